"Sequences in every state become flat arrays: token by token against a slow reference"
import dataclasses
import random
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench import host_loop_seconds
from minivllm.engine.batch import (
    Batch, pad_block_tables, prepare_decode, prepare_extras, prepare_prefill, prepare_sample, sampled_seqs, slots, to_device,
    unknown_rows,
)
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_seq(token_ids, block_table, computed=0, block_size=4, seq_id=0, seed=0, **params):
    "A sequence in a given state"
    seq = Sequence(seq_id, token_ids, SamplingParams(**params), block_size, seed=seed)
    seq.block_table.extend(block_table)
    seq.num_computed_tokens = computed
    return seq


def one_of_each():
    "A decode, a chunk in the middle of its prompt, and what a prefix hit left over"
    return [
        make_seq([*range(20, 29), 77], [5, 2, 8], computed=9, seq_id=0),
        make_seq(range(40, 53), [1, 9, 0, 6], computed=4, seq_id=1),
        make_seq([*range(20, 28), 30, 31, 32], [5, 2, 3], computed=8, seq_id=2),
    ], [1, 4, 3]


def reference(seqs, num_tokens):
    "Token by token, as plain lists"
    out = dict(token_ids=[], positions=[], slot_mapping=[], cu_seqlens_q=[0], context_lens=[], sample_rows=[])
    for seq, n in zip(seqs, num_tokens):
        for p in range(seq.num_computed_tokens, seq.num_computed_tokens + n):
            out["token_ids"].append(seq.token_ids[p])
            out["positions"].append(p)
            out["slot_mapping"].append(seq.block_table[p // seq.block_size] * seq.block_size + p % seq.block_size)
        out["cu_seqlens_q"].append(len(out["token_ids"]))
        out["context_lens"].append(seq.num_computed_tokens + n)
        if seq.num_computed_tokens + n == seq.num_tokens: out["sample_rows"].append(len(out["token_ids"]) - 1)
    width = max(len(seq.block_table) for seq in seqs)
    out["block_tables"] = [seq.block_table.tolist() + [0] * (width - len(seq.block_table)) for seq in seqs]
    out["num_decodes"] = list(num_tokens).count(1)
    out["max_query_len"] = max([n for n in num_tokens if n > 1], default=0)
    out["max_context_len"] = max(out["context_lens"])
    out["shared_prefixes"] = None
    return out


def as_lists(batch: Batch) -> dict:
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


def test_unknown_tokens_are_found_by_sequence_wherever_they_stand():
    "Only the last token of a sequence can be unknown, and only a step that reaches it needs it"
    seqs, num_tokens = one_of_each()
    assert unknown_rows(seqs, num_tokens, {}) is None
    for seq in seqs[::2]:
        seq.append_unknown_token()
        seq.block_table.append(11)
    seqs[0].num_computed_tokens += 1
    rows = unknown_rows(seqs, num_tokens, {2: 0, 7: 1, 0: 2})
    assert rows.tolist() == [2] + [-1] * 7  # sequence 2's chunk ends before its unknown token
    assert (prepare_prefill(seqs, num_tokens).token_ids < 0).tolist() == (rows >= 0).tolist()
    rows = unknown_rows(seqs, [1, 4, 4], {2: 0, 7: 1, 0: 2})
    assert rows.tolist() == [2] + [-1] * 7 + [0] and rows.dtype == np.int64
    assert (prepare_prefill(seqs, [1, 4, 4]).token_ids < 0).tolist() == (rows >= 0).tolist()


@st.composite
def steps(draw, decodes_only=False):
    "Sequences that a block manager has given their blocks, some sharing a prefix, and tokens for each"
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    rng = random.Random(draw(st.integers(0, 2**32)))
    manager, seqs, num_tokens = BlockManager(400, block_size), [], []
    for i in range(draw(st.integers(1, 7))):
        model = rng.choice(seqs).token_ids if seqs and rng.random() < 0.5 else []
        token_ids = model[: rng.randrange(40)] + [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
        seq = Sequence(i, token_ids, SamplingParams(), block_size)
        manager.allocate_with_cache(seq, manager.lookup(seq))
        before = seq.num_computed_tokens
        seq.num_computed_tokens = seq.num_tokens - 1 if decodes_only else rng.randrange(before, seq.num_tokens)
        manager.cache_full_blocks(seq, before)
        manager.append(seq, seq.num_tokens + rng.choice([0, 0, 20]))  # a table may be ahead of its need
        seqs.append(seq)
        num_tokens.append(rng.choice([1, rng.randint(1, seq.num_uncomputed_tokens), seq.num_uncomputed_tokens]))
    order = sorted(range(len(seqs)), key=lambda i: num_tokens[i] > 1)
    return [seqs[i] for i in order], [num_tokens[i] for i in order]


def test_a_decode_a_chunk_and_a_prefix_hit_by_hand():
    seqs, num_tokens = one_of_each()
    batch = prepare_prefill(seqs, num_tokens)
    assert as_lists(batch) == dict(
        token_ids=[77, 44, 45, 46, 47, 30, 31, 32],
        positions=[9, 4, 5, 6, 7, 8, 9, 10],
        slot_mapping=[33, 36, 37, 38, 39, 12, 13, 14],
        cu_seqlens_q=[0, 1, 5, 8],
        context_lens=[10, 8, 11],
        block_tables=[[5, 2, 8, 0], [1, 9, 0, 6], [5, 2, 3, 0]],
        sample_rows=[0, 7],
        num_decodes=1,
        max_query_len=4,
        max_context_len=11,
        shared_prefixes=None,
    )


def test_dtypes_are_those_that_the_model_asks_for():
    seqs, num_tokens = one_of_each()
    for batch in (prepare_prefill(seqs, num_tokens), prepare_decode(seqs[:1])):
        for name in ("token_ids", "positions", "slot_mapping", "sample_rows"):
            assert getattr(batch, name).dtype == np.int64
        for name in ("cu_seqlens_q", "context_lens", "block_tables"):
            assert getattr(batch, name).dtype == np.int32
        assert type(batch.num_decodes) is type(batch.max_query_len) is type(batch.max_context_len) is int


@settings(max_examples=200, deadline=None)
@given(steps())
def test_any_step_equals_the_reference(step):
    assert as_lists(prepare_prefill(*step)) == reference(*step)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_no_two_tokens_share_a_slot_and_none_touches_a_cached_one(step):
    seqs, num_tokens = step
    mapping = prepare_prefill(seqs, num_tokens).slot_mapping.tolist()
    assert len(set(mapping)) == len(mapping)
    size = seqs[0].block_size
    computed = {seq.block_table[p // size] * size + p % size for seq in seqs for p in range(seq.num_computed_tokens)}
    assert not computed & set(mapping)


@settings(max_examples=100, deadline=None)
@given(steps(decodes_only=True))
def test_the_fast_path_equals_the_general_one(step):
    seqs, _ = step
    fast, general = prepare_decode(seqs), prepare_prefill(seqs, [1] * len(seqs))
    assert as_lists(fast) == as_lists(general)
    assert all(getattr(fast, f.name).dtype == getattr(general, f.name).dtype
               for f in dataclasses.fields(Batch) if isinstance(getattr(fast, f.name), np.ndarray))


@settings(max_examples=100, deadline=None)
@given(steps(decodes_only=True), st.integers(1, 4))
def test_shared_prefixes_are_blocks_that_the_tables_share(step, num_tiles):
    seqs, _ = step
    batch, size = prepare_decode(seqs, num_tiles), seqs[0].block_size
    shared, without = batch.shared_prefixes, prepare_decode(seqs)
    batch.shared_prefixes = None
    assert as_lists(batch) == as_lists(without)  # nothing else changes
    if shared is None:
        firsts = [seq.block_table[0] for seq in seqs if seq.num_tokens > size]
        assert len(set(firsts)) == len(firsts)
        return
    assert shared.rows.shape[0] == len(shared.lens) == num_tiles and len(shared.starts) == len(seqs)
    for rows, length in zip(shared.rows.tolist(), shared.lens.tolist()):
        members = [row for row in rows if row >= 0]
        assert bool(members) == (length > 0) and length % size == 0
        assert len({tuple(seqs[row].block_table[: length // size]) for row in members}) <= 1
        assert all(shared.starts[row] == length < seqs[row].num_tokens for row in members)


def test_shared_prefixes_reach_the_device():
    seqs = [make_seq([*range(8), 50 + i], [5, 2, 7 + i], computed=8, seq_id=i) for i in range(3)]
    seqs.append(make_seq([1] * 6, [1, 0], computed=5))
    batch = prepare_decode(seqs, num_shared_tiles=2)
    shared = to_device(batch, "cpu")["shared_prefixes"]
    assert type(shared) is type(batch.shared_prefixes) and all(t.dtype == torch.int32 for t in shared)
    assert [row for row in shared.rows.flatten().tolist() if row >= 0] == [0, 1, 2]
    assert shared.lens.tolist() == [8, 0] and shared.starts.tolist() == [8, 8, 8, 0]
    assert prepare_decode(seqs[2:], num_shared_tiles=2).shared_prefixes is None


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_decode_slot_is_the_last_of_the_last_block(block_size):
    for length in range(1, 50):
        table = random.Random(length).sample(range(100), -(-length // block_size))
        seq = make_seq([7] * length, table, computed=length - 1, block_size=block_size)
        expected = table[-1] * block_size + seq.last_block_num_tokens - 1
        assert prepare_decode([seq]).slot_mapping.tolist() == [expected]
        seq.block_table.append(999)  # a block ahead of need changes nothing
        assert prepare_decode([seq]).slot_mapping.tolist() == [expected]


def test_a_chunk_of_one_token_is_no_decode():
    seq = make_seq(range(40, 53), [3, 1, 4, 0], computed=5)
    with pytest.raises(ValueError, match="no decode"): prepare_decode([seq])
    batch = prepare_prefill([seq], [1])
    assert batch.token_ids.tolist() == [45] and batch.positions.tolist() == [5] and batch.sample_rows.tolist() == []
    assert batch.num_decodes == 1  # for attention it is one: a single query
    seq.num_computed_tokens = 12  # the last one is
    assert prepare_decode([seq]).token_ids.tolist() == prepare_prefill([seq], [1]).token_ids.tolist() == [52]


def test_single_tokens_must_come_first():
    seqs, num_tokens = one_of_each()
    with pytest.raises(ValueError, match="first"): prepare_prefill(seqs[::-1], num_tokens[::-1])


def test_a_token_without_a_slot_is_an_error():
    seqs, num_tokens = one_of_each()
    seqs[2].block_table.pop()
    with pytest.raises(ValueError, match="2 blocks have no slots for 11 tokens"): prepare_prefill(seqs, num_tokens)
    full = make_seq([7] * 9, [3, 5], computed=8)  # the padding of a longer neighbour would hide it
    with pytest.raises(ValueError, match="no slots"): prepare_decode([seqs[0], full])
    with pytest.raises(ValueError, match="no slots"): pad_block_tables([full], np.array([9]))


def test_slots_beyond_32_bits():
    tables = np.array([[200_000_000]], dtype=np.int32)
    assert slots(tables, np.array([0]), np.array([3]), 16).tolist() == [3_200_000_003]


def test_only_complete_sequences_are_sampled():
    seqs, num_tokens = one_of_each()
    assert sampled_seqs(seqs, num_tokens) == [0, 2]
    assert sampled_seqs(seqs, [1, 9, 2]) == [0, 1]


def test_sampling_parameters_row_by_row():
    seqs = [make_seq([1, 2], [0], seed=2**63 - 1, temperature=0.0), make_seq([1, 2, 3], [1], seed=5, temperature=0.7)]
    plain = prepare_sample(seqs)
    assert plain.temperature.tolist() == [0.0, np.float32(0.7)] and plain.seeds.tolist() == [2**63 - 1, 5]
    assert plain.positions.tolist() == [2, 3]  # of the token that is drawn: one past the last
    assert plain.top_k is plain.top_p is plain.min_p is None
    for options, expected in [(dict(top_k=3), ([0, 3], [1, 1], [0, 0])), (dict(top_p=0.5), ([0, 0], [1, 0.5], [0, 0])),
                              (dict(min_p=0.25), ([0, 0], [1, 1], [0, 0.25]))]:
        asked = prepare_sample([seqs[0], make_seq([1], [0], **options)])
        assert (asked.top_k.tolist(), asked.top_p.tolist(), asked.min_p.tolist()) == expected
        assert asked.top_k.dtype == np.int64 and asked.top_p.dtype == asked.min_p.dtype == np.float32


def extras_seq(prompt, output, unknown=False, **params):
    "A sequence that has put out some tokens; token 2 would end it"
    seq = Sequence(0, prompt, SamplingParams(**params), 4, frozenset([2, 9]))
    for token_id in output: seq.append_token(token_id)
    if unknown: seq.append_unknown_token()
    return seq


def test_steps_without_extras_have_none():
    assert prepare_extras([]) is None
    assert prepare_extras([extras_seq([1], [3]), extras_seq([1], [], top_k=3, temperature=0.0)]) is None
    assert prepare_extras([extras_seq([1], [3, 4], min_tokens=2), extras_seq([1], [3], unknown=True, min_tokens=2)]) is None


def test_ends_are_banned_as_long_as_the_answer_is_too_short():
    seqs = [extras_seq([1, 5], output, unknown, min_tokens=2) for output in ([], [3], [3, 4]) for unknown in (False, True)]
    extras = prepare_extras(seqs)
    # with the token that is drawn now, the first three would have one or two
    assert extras.banned_rows.tolist() == [0, 0, 1, 1, 2, 2] and extras.banned_ids.tolist() == [2, 9] * 3
    assert extras.token_ids is extras.logprob_rows is extras.presence is None


def test_tokens_of_rows_with_penalties():
    seqs = [
        extras_seq([1, 5], [7]), extras_seq([1, 5], [7, 7], True, repetition_penalty=1.5),
        extras_seq([1, 5, 6], [8], frequency_penalty=0.5, presence_penalty=-1.0), extras_seq([3], [], presence_penalty=1.0),
    ]
    extras = prepare_extras(seqs)
    assert extras.token_ids.tolist() == [1, 5, 7, 7, -1, 8] and extras.rows.tolist() == [1, 1, 1, 1, 1, 2]
    assert extras.is_output.tolist() == [False, False, True, True, True, True]
    assert extras.repetition.tolist() == [1, 1.5, 1, 1] and extras.frequency.tolist() == [0, 0, 0.5, 0]
    assert extras.presence.tolist() == [0, 0, -1, 1] and extras.banned_ids is extras.logprob_rows is None
    alone = prepare_extras(seqs[3:])  # the first token of an answer
    assert alone.token_ids.tolist() == [] and alone.token_ids.dtype == np.int64


def test_rows_that_want_logprobs():
    extras = prepare_extras([extras_seq([1], [3], logprobs=n) for n in (None, 0, 5)])
    assert extras.logprob_rows.tolist() == [1, 2] and extras.num_logprobs == 5
    tensors = to_device(extras, "cpu")
    assert tensors["logprob_rows"].dtype == torch.int64 and tensors["token_ids"] is None and tensors["num_logprobs"] == 5


def test_on_the_cpu_tensors_share_the_arrays():
    batch = prepare_prefill(*one_of_each())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that can't be written to
        tensors = to_device(batch, "cpu")
        sampling = to_device(prepare_sample(one_of_each()[0]), "cpu")
    for name, value in tensors.items():
        if not isinstance(getattr(batch, name), np.ndarray): assert value == getattr(batch, name)
        else: assert value.data_ptr() == getattr(batch, name).ctypes.data
    assert sampling["top_k"] is None and sampling["seeds"].dtype == torch.int64


@needs_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_copies_arrive_on_the_gpu(device):
    batch = prepare_prefill(*one_of_each())
    torch.cuda._sleep(10_000_000)  # the copies wait behind it, while their sources go out of scope
    tensors = [to_device(prepare_prefill(*one_of_each()), device) for _ in range(50)]
    for moved in tensors:
        for name, value in moved.items():
            if not isinstance(getattr(batch, name), np.ndarray): continue
            assert value.is_cuda and value.tolist() == getattr(batch, name).tolist()


def test_a_full_decode_step_is_prepared_faster_than_the_yardstick():
    "256 sequences of 64 blocks, against a Python loop of 40,000 rounds (a few milliseconds)"
    seqs = [make_seq([7] * 1020, range(64 * i, 64 * i + 64), computed=1019, block_size=16) for i in range(256)]
    spans = []
    for _ in range(50):
        start = time.perf_counter()
        prepare_decode(seqs)
        spans.append(time.perf_counter() - start)
    assert sorted(spans)[12] < host_loop_seconds() / 4
