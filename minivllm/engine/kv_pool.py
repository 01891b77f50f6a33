"How many KV blocks fit, and the tensors that hold them"
import os

import torch

GIB = 2**30
CPU_POOL_BYTES = 1 * GIB


def block_bytes(
    num_layers: int,
    block_size: int,  # tokens of a block
    num_kv_heads: int,  # on this rank
    head_dim: int,
    dtype: torch.dtype,
) -> int:
    "Bytes of one block: keys and values of `block_size` tokens in every layer"
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def kv_budget(
    total: float,  # the GPU's memory; all amounts in one unit
    others: float,  # held by other processes
    weights: float,
    activations: float,  # peak of the largest step
    utilization: float,  # share of `total` that this engine may use
) -> float:  # what is left for the KV cache
    "Memory for the KV cache; nothing left is a MemoryError that gives every term"
    if not 0 < utilization <= 1: raise ValueError(f"gpu_memory_utilization={utilization}: must be above 0, up to 1")
    # the share is this engine's own: two engines at 0.45 fit one GPU, whoever comes first
    budget = min(total * utilization, total - others) - weights - activations
    if budget <= 0:
        raise MemoryError(f"no memory is left for the KV cache: total {total:g}, others {others:g}, weights {weights:g}, "
                          f"activations {activations:g}, gpu_memory_utilization {utilization:g}; "
                          "raise gpu_memory_utilization, or lower max_num_batched_tokens")
    return budget


def num_blocks_for(
    budget: float,  # bytes
    bytes_per_block: int,
    max_num_seqs: int,
    max_blocks_per_seq: int,  # blocks of a sequence of max_model_len tokens
) -> int:
    "Blocks that fit the budget, and no more than all sequences together could ever fill"
    num_blocks = min(int(budget // bytes_per_block), max_num_seqs * max_blocks_per_seq)
    if num_blocks < 1:
        raise MemoryError(f"not one KV block fits: a block needs {bytes_per_block:,} bytes, {budget:,.0f} are free; "
                          "lower block_size, or raise gpu_memory_utilization")
    return num_blocks


def cpu_budget() -> int:  # bytes
    "A pool for the CPU: a fixed size, but never more than half of the machine's memory"
    return min(CPU_POOL_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
) -> list:  # per layer `(k_cache, v_cache)`, each `[num_blocks, block_size, num_kv_heads, head_dim]`
    "The pool: one allocation, and each layer's views of it"
    shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    # zeros, not empty: pages that were never written must not hold NaN, which even a masked product would spread
    pool = torch.zeros(shape, dtype=dtype, device=device)
    return [(layer[0], layer[1]) for layer in pool]
