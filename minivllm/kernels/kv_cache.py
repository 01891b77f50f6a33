"Keys and values into pages: one slot per token"
import torch


def store_kv_torch(
    key: torch.Tensor,  # `[num_tokens, num_kv_heads, head_dim]`
    value: torch.Tensor,  # `[num_tokens, num_kv_heads, head_dim]`
    k_cache: torch.Tensor,  # `[num_blocks, block_size, num_kv_heads, head_dim]`, written in place
    v_cache: torch.Tensor,  # like `k_cache`
    slot_mapping: torch.Tensor,  # `[num_tokens]` int64, `block * block_size + offset`; -1 stores nothing
):
    "Write each token's key and value into its slot of the paged cache"
    # to an index operation -1 is the *last* slot: padding would overwrite somebody's live K/V
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    k_cache.flatten(0, 1)[slots] = key[real]
    v_cache.flatten(0, 1)[slots] = value[real]


def store_kv(key, value, k_cache, v_cache, slot_mapping):
    "Store keys and values by the implementation for their device"
    store_kv_torch(key, value, k_cache, v_cache, slot_mapping)
