"Attention of many query tokens over keys and values in pages: prompts, chunks of prompts, prompts after a prefix hit"
import torch

QUERY_TILE = 512


def causal_attention(
    q: torch.Tensor,  # `[num_queries, num_heads, head_dim]`
    k: torch.Tensor,  # `[context_len, num_kv_heads, head_dim]`
    v: torch.Tensor,  # like `k`
    scale: float,  # factor on the scores, usually `head_dim ** -0.5`
) -> torch.Tensor:  # like `q`
    "Causal attention of the *last* `num_queries` positions of a context over all of it"
    num_queries, num_heads, head_dim = q.shape
    context_len, num_kv_heads, _ = k.shape
    # query heads of one group share a key/value head: they are stacked, so that K and V are never repeated
    q = q.view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (q @ k.permute(1, 2, 0)).view(num_kv_heads, -1, num_queries, context_len).float() * scale
    # query i stands at position context_len - num_queries + i and sees the keys up to itself
    position = torch.arange(context_len - num_queries, context_len, device=q.device)
    hidden = torch.arange(context_len, device=q.device) > position.unsqueeze(1)
    probs = scores.masked_fill_(hidden, -torch.inf).softmax(-1).to(v.dtype)
    out = probs.flatten(1, 2) @ v.permute(1, 0, 2)
    return out.view(num_kv_heads, -1, num_queries, head_dim).permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


def gather_pages(
    cache: torch.Tensor,  # `[num_blocks, block_size, num_kv_heads, head_dim]`
    block_table: torch.Tensor,  # `[max_blocks]`, one sequence's blocks in order
    context_len: int,
) -> torch.Tensor:  # `[context_len, num_kv_heads, head_dim]`
    "One sequence's keys or values, brought together from its pages"
    num_blocks = -(-context_len // cache.shape[1])
    return cache[block_table[:num_blocks]].flatten(0, 1)[:context_len]


def paged_prefill_torch(
    q: torch.Tensor,  # `[num_tokens, num_heads, head_dim]`, all sequences' queries one after another
    k_cache: torch.Tensor,  # `[num_blocks, block_size, num_kv_heads, head_dim]`, the queries' own keys stored already
    v_cache: torch.Tensor,  # like `k_cache`
    block_tables: torch.Tensor,  # `[num_seqs, max_blocks]`
    cu_seqlens_q: torch.Tensor,  # `[num_seqs + 1]`, where each sequence's queries begin and end
    context_lens: torch.Tensor,  # `[num_seqs]`, keys that each sequence's last query sees
    scale: float,
) -> torch.Tensor:  # like `q`
    "Causal attention of ragged queries over paged keys and values, sequence by sequence"
    out = torch.empty_like(q)
    starts, lens = cu_seqlens_q.tolist(), context_lens.tolist()
    for i, context_len in enumerate(lens):
        start, end = starts[i], starts[i + 1]
        k = gather_pages(k_cache, block_tables[i], context_len)
        v = gather_pages(v_cache, block_tables[i], context_len)
        # the score matrix is num_heads * queries * keys: a tile of queries at a time keeps it small
        for first in range(start, end, QUERY_TILE):
            last = min(first + QUERY_TILE, end)
            seen = context_len - (end - last)
            out[first:last] = causal_attention(q[first:last], k[:seen], v[:seen], scale)
    return out


def paged_prefill(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, scale):
    "Ragged causal attention over pages by the implementation for the device of `q`"
    return paged_prefill_torch(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, scale)
