"Ragged requests as flat tensors: one list of tokens for all sequences, and the maps that say what is whose"
from dataclasses import dataclass, fields

import numpy as np
import torch

from minivllm.engine.sequence import Sequence


@dataclass
class Batch:
    "One step's model inputs, on the host"
    token_ids: np.ndarray  # `[num_tokens]` int64
    positions: np.ndarray  # `[num_tokens]` int64
    slot_mapping: np.ndarray  # `[num_tokens]` int64, slot of each token's K/V
    cu_seqlens_q: np.ndarray  # `[num_seqs + 1]` int32, where each sequence's tokens begin and end
    context_lens: np.ndarray  # `[num_seqs]` int32, keys its last token sees
    block_tables: np.ndarray  # `[num_seqs, max_blocks]` int32, padded with 0
    sample_rows: np.ndarray  # `[num_sampled]` int64, tokens whose logits are wanted: the last of each finished prompt
    num_decodes: int  # the first sequences, one token each


def slots(
    block_table,  # physical blocks of one sequence
    start: int,  # first position
    end: int,  # one past the last position
    block_size: int,
) -> np.ndarray:  # `[end - start]` int64
    "The slot of each position: `block_table[p // block_size] * block_size + p % block_size`"
    positions = np.arange(start, end)
    return np.asarray(block_table, dtype=np.int64)[positions // block_size] * block_size + positions % block_size


def pad_block_tables(
    seqs: list[Sequence],
) -> np.ndarray:  # `[num_seqs, max_blocks]` int32
    "All block tables as one matrix; the padding is never read, as `context_lens` ends before it"
    tables = np.zeros((len(seqs), max(len(seq.block_table) for seq in seqs)), dtype=np.int32)
    for row, seq in zip(tables, seqs): row[: len(seq.block_table)] = seq.block_table
    return tables


def prepare_decode(
    seqs: list[Sequence],  # each with all but its newest token computed
) -> Batch:
    "The batch of a pure decode step: the newest token of each sequence"
    block_size = seqs[0].block_size
    positions = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int64)
    last_blocks = np.array([seq.block_table[-1] for seq in seqs], dtype=np.int64)
    return Batch(
        token_ids=np.array([seq.token_ids[-1] for seq in seqs], dtype=np.int64),
        positions=positions,
        slot_mapping=last_blocks * block_size + positions % block_size,
        cu_seqlens_q=np.arange(len(seqs) + 1, dtype=np.int32),
        context_lens=(positions + 1).astype(np.int32),
        block_tables=pad_block_tables(seqs),
        sample_rows=np.arange(len(seqs)),
        num_decodes=len(seqs),
    )


def prepare_prefill(
    seqs: list[Sequence],  # those with a single token first
    num_tokens: list[int],  # of each sequence, in this step
) -> Batch:
    "The batch of any step: whole prompts, chunks, what is left after a prefix hit, decodes in front"
    starts = [seq.num_computed_tokens for seq in seqs]
    ends = [start + n for start, n in zip(starts, num_tokens)]
    cu_seqlens_q = np.concatenate(([0], np.cumsum(num_tokens))).astype(np.int32)
    complete = np.array([end == seq.num_tokens for seq, end in zip(seqs, ends)])
    return Batch(
        token_ids=np.concatenate([seq.token_ids[start:end] for seq, start, end in zip(seqs, starts, ends)]).astype(np.int64),
        positions=np.concatenate([np.arange(start, end) for start, end in zip(starts, ends)]),
        slot_mapping=np.concatenate([slots(seq.block_table, start, end, seq.block_size)
                                     for seq, start, end in zip(seqs, starts, ends)]),
        cu_seqlens_q=cu_seqlens_q,
        context_lens=np.array(ends, dtype=np.int32),
        block_tables=pad_block_tables(seqs),
        sample_rows=(cu_seqlens_q[1:] - 1)[complete].astype(np.int64),
        num_decodes=sum(n == 1 for n in num_tokens),
    )


@dataclass
class SamplingBatch:
    "How each sampled row is sampled, on the host; the filters are None when no row asks for one"
    temperature: np.ndarray  # `[num_rows]` float32
    seeds: np.ndarray  # `[num_rows]` int64
    positions: np.ndarray  # `[num_rows]` int64, position of the token that is drawn
    top_k: np.ndarray | None  # `[num_rows]` int64
    top_p: np.ndarray | None  # `[num_rows]` float32
    min_p: np.ndarray | None  # `[num_rows]` float32


def prepare_sample(
    seqs: list[Sequence],  # the sequences of the sampled rows
) -> SamplingBatch:
    "The rows' sampling parameters as arrays"
    params = [seq.sampling_params for seq in seqs]
    filters = {}
    asked = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params)
    for name, dtype in (("top_k", np.int64), ("top_p", np.float32), ("min_p", np.float32)):
        filters[name] = np.array([getattr(p, name) for p in params], dtype=dtype) if asked else None
    return SamplingBatch(
        temperature=np.array([p.temperature for p in params], dtype=np.float32),
        seeds=np.array([seq.seed for seq in seqs], dtype=np.int64),
        positions=np.array([seq.num_tokens for seq in seqs], dtype=np.int64),
        **filters,
    )


def to_device(
    batch,  # a dataclass of arrays, such as `Batch`
    device: str,
) -> dict:  # field name -> tensor; what is no array is left as it is
    "The arrays as tensors on `device`, by asynchronous copies from pinned memory where it is a GPU"
    def move(value):
        if not isinstance(value, np.ndarray): return value
        tensor = torch.from_numpy(value)
        return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
    return {f.name: move(getattr(batch, f.name)) for f in fields(batch)}
