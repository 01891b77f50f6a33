"One attention layer over all backends: packed qkv in, Q/K norm, rotary embedding, store, attention"
from dataclasses import dataclass

import torch
from torch import nn

from minivllm.kernels.decode import paged_decode_torch
from minivllm.kernels.kv_cache import store_kv_torch
from minivllm.kernels.prefill import paged_prefill_torch


@dataclass(frozen=True)
class ForwardContext:
    "What a forward pass knows besides its activations: where each token's K/V goes and which K/V each query sees"
    slot_mapping: torch.Tensor  # `[num_tokens]` int64, slot of each token's K/V; -1 stores nothing
    block_tables: torch.Tensor  # `[num_seqs, max_blocks]` int32, rows padded with 0
    context_lens: torch.Tensor  # `[num_seqs]` int32, keys that the sequence's last query sees
    cu_seqlens_q: torch.Tensor  # `[num_seqs + 1]` int32, where each sequence's queries begin and end
    num_decodes: int  # the first `num_decodes` sequences have one query each
    kv_caches: list  # per layer `(k_cache, v_cache)`, each `[num_blocks, block_size, num_kv_heads, head_dim]`


class TorchAttentionBackend:
    "Plain torch over pages: runs anywhere, and is what the other backends are held to"
    name = "torch"
    store_kv = staticmethod(store_kv_torch)
    prefill = staticmethod(paged_prefill_torch)
    decode = staticmethod(paged_decode_torch)


ATTENTION_BACKENDS = {"torch": TorchAttentionBackend}


def get_attention_backend(
    name: str,  # "auto" or a key of `ATTENTION_BACKENDS`
) -> type:
    "The backend's class; an unknown one is a ValueError that lists the others"
    if name == "auto": name = "torch"
    if name not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend={name!r}: must be one of auto, {', '.join(ATTENTION_BACKENDS)}")
    return ATTENTION_BACKENDS[name]


class Attention(nn.Module):
    "Attention of one layer, from the packed projection to the heads' outputs"
    def __init__(
        self,
        num_heads: int,  # query heads on this rank
        num_kv_heads: int,  # key/value heads on this rank
        head_dim: int,
        rope: nn.Module,  # a `RotaryEmbedding`, shared by all layers
        layer_idx: int,  # which of `ctx.kv_caches` is this layer's
        q_norm: nn.Module | None = None,  # RMSNorm over each query head
        k_norm: nn.Module | None = None,  # RMSNorm over each key head
        backend: type = TorchAttentionBackend,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.rope, self.q_norm, self.k_norm = rope, q_norm, k_norm
        self.layer_idx, self.backend = layer_idx, backend

    def forward(
        self,
        qkv: torch.Tensor,  # `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`
        positions: torch.Tensor,  # `[num_tokens]` int64
        ctx: ForwardContext,
    ) -> torch.Tensor:  # `[num_tokens, num_heads * head_dim]`
        "Normalise and rotate queries and keys, store keys and values, attend"
        heads = qkv.view(len(qkv), -1, self.head_dim)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None: q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(positions, q, k)
        k_cache, v_cache = ctx.kv_caches[self.layer_idx]
        self.backend.store_kv(k, v, k_cache, v_cache, ctx.slot_mapping)
        return self.attend(q, k_cache, v_cache, ctx).flatten(1)

    def attend(self, q, k_cache, v_cache, ctx):
        "Decode rows by the decode kernel, the rest by the prefill kernel; each only where it has rows"
        n, parts = ctx.num_decodes, []
        if n: parts.append(self.backend.decode(q[:n], k_cache, v_cache, ctx.block_tables[:n], ctx.context_lens[:n], self.scale))
        if n < len(ctx.context_lens):
            parts.append(self.backend.prefill(q[n:], k_cache, v_cache, ctx.block_tables[n:], ctx.cu_seqlens_q[n:] - n,
                                              ctx.context_lens[n:], self.scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
