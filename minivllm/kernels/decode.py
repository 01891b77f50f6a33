"Attention of one query token per sequence over its pages"
import torch

GATHERED_TOKENS = 2**17


def paged_decode_torch(
    q: torch.Tensor,  # `[num_seqs, num_heads, head_dim]`, one query per sequence
    k_cache: torch.Tensor,  # `[num_blocks, block_size, num_kv_heads, head_dim]`
    v_cache: torch.Tensor,  # like `k_cache`
    block_tables: torch.Tensor,  # `[num_seqs, max_blocks]`; entries past a sequence's length are never used
    context_lens: torch.Tensor,  # `[num_seqs]`, keys to attend to; 0 marks a padding row, which gives zeros
    scale: float,  # factor on the scores
) -> torch.Tensor:  # like `q`
    "Attention of the newest token of each sequence over its whole context"
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    # a batch is gathered into one padded tensor; very large ones in several passes, to bound the memory
    rows = max(1, GATHERED_TOKENS // max(1, block_tables.shape[1] * block_size))
    if num_seqs > rows:
        parts = zip(q.split(rows), block_tables.split(rows), context_lens.split(rows))
        return torch.cat([paged_decode_torch(a, k_cache, v_cache, b, c, scale) for a, b, c in parts])
    # [num_seqs, num_kv_heads, keys, head_dim]
    k = k_cache[block_tables].flatten(1, 2).transpose(1, 2)
    v = v_cache[block_tables].flatten(1, 2).transpose(1, 2)
    q = q.view(num_seqs, num_kv_heads, -1, head_dim)
    scores = (q @ k.transpose(2, 3)).float() * scale
    padding = torch.arange(k.shape[2], device=q.device) >= context_lens.unsqueeze(1)
    scores.masked_fill_(padding[:, None, None], -torch.inf)
    probs = scores.softmax(-1).to(v.dtype).masked_fill(context_lens.eq(0)[:, None, None, None], 0)
    return (probs @ v).reshape(num_seqs, num_heads, head_dim)


def paged_decode(q, k_cache, v_cache, block_tables, context_lens, scale):
    "Decode attention over pages by the implementation for the device of `q`"
    return paged_decode_torch(q, k_cache, v_cache, block_tables, context_lens, scale)
