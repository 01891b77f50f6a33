"Recorded decode steps: what is packed, what padding may touch, and the same tokens as without; on a CPU a recorded step is the step again"
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs import DEVICE
from test_model_runner import GREEDY, PROMPT, advance, make_runner, shared_seqs

from minivllm.engine import model_runner
from minivllm.engine.batch import prepare_decode, prepare_sample
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.cuda_graph import (
    FIELDS, PADDING, DecodeGraphs, Recording, graph_sizes, num_shared_tiles, pack_step, record, step_bytes, step_fields, step_parts,
    leave_tokens, leave_tokens_kernel, take_tokens, take_tokens_kernel,
)
from minivllm.engine.sequence import Sequence
from minivllm.kernels.decode import SharedPrefixes
from minivllm.layers.attention import ATTENTION_BACKENDS, TritonAttentionBackend
from minivllm.sampling_params import SamplingParams


def recorded_runner(**options):
    "A runner whose decode steps are recorded; on a CPU they are repeated"
    runner = make_runner(enforce_eager=True, **options)
    runner.capture_cudagraph()
    return runner


@given(st.integers(1, 600))
def test_every_batch_has_a_size_that_wastes_less_than_half_or_fifteen_rows(max_num_seqs):
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    for n in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= n)
        assert size == n or size - n < max(n, 2) and size - n < 16
    assert len(sizes) <= 5 + max_num_seqs // 16


@given(st.integers(1, 300), st.integers(1, 50), st.booleans())
@settings(max_examples=50, deadline=None)
def test_fields_are_aligned_and_do_not_overlap(num_rows, max_blocks, shared):
    buffer = torch.zeros(step_bytes(num_rows, max_blocks), dtype=torch.uint8)
    fields, start, end = step_fields(buffer, num_rows, max_blocks), buffer.data_ptr(), 0
    assert list(fields) == [name for name, *_ in step_parts(num_rows, max_blocks)]
    for field in fields.values():
        offset = field.data_ptr() - start
        assert offset % 16 == 0 and offset >= end
        end = offset + field.nbytes
    assert end <= len(buffer)
    # what is sent without shared prefixes ends where they begin
    assert step_bytes(num_rows, max_blocks, shared=False) == fields["rows"].data_ptr() - start


def decodes(n, block_size=4, **params):
    "Sequences of different lengths with a token left to compute"
    seqs = []
    for i in range(n):
        seq = Sequence(i, range(5, 6 + 3 * i), SamplingParams(temperature=i / 2, **params), block_size)
        seq.num_computed_tokens, seq.seed, seq.choice = seq.num_tokens - 1, 100 + i, 2 * i
        seq.block_table.extend(10 * i + j for j in range(seq.num_blocks))
        seqs.append(seq)
    return seqs


@pytest.mark.parametrize("filters", [{}, dict(top_k=3, top_p=0.5, min_p=0.1)])
@pytest.mark.parametrize("unknown", [None, np.array([-1, 2, -1])])
def test_a_packed_step_holds_the_batch_and_rows_of_nobody(filters, unknown):
    seqs, size, max_blocks = decodes(3, **filters), 8, 6
    batch, sampling = prepare_decode(seqs), prepare_sample(seqs)
    staging = torch.full((step_bytes(size, max_blocks),), 0x55, dtype=torch.uint8)  # what an earlier step has left
    fields = step_fields(staging, size, max_blocks)
    pack_step({name: field.numpy() for name, field in fields.items()}, batch, sampling, unknown, 1)
    assert fields["slot"].tolist() == [1]
    expected = dict(
        token_ids=batch.token_ids, positions=batch.positions, slot_mapping=batch.slot_mapping, context_lens=batch.context_lens,
        seeds=sampling.seeds, sample_positions=sampling.positions, temperature=sampling.temperature, unknown=unknown,
        top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, choices=sampling.choices,
    )
    for name, _ in FIELDS:
        padding = PADDING.get(name, 0)
        assert (fields[name][3:] == padding).all(), name
        value = np.full(3, padding) if expected[name] is None else expected[name]
        assert np.array_equal(fields[name][:3].numpy(), value), name
    width = batch.block_tables.shape[1]
    assert np.array_equal(fields["block_tables"][:3, :width].numpy(), batch.block_tables)


def test_packed_shared_prefixes_leave_no_tile_of_an_earlier_step():
    seqs = decodes(4)
    batch = prepare_decode(seqs)
    tiles = num_shared_tiles(4)
    rows = np.full((tiles, 32), -1, np.int32); rows[0, :2] = 2, 3
    batch.shared_prefixes = SharedPrefixes(rows[:1], np.array([8], np.int32), np.array([0, 0, 8, 8], np.int32))
    staging = torch.full((step_bytes(8, 6),), 0x55, dtype=torch.uint8)
    fields = {name: field.numpy() for name, field in step_fields(staging, 8, 6).items()}
    pack_step(fields, batch, prepare_sample(seqs), None, 0)
    assert fields["lens"].tolist() == [8] + [0] * (len(fields["lens"]) - 1)
    assert fields["starts"].tolist() == [0, 0, 8, 8, 0, 0, 0, 0] and fields["rows"][0, :3].tolist() == [2, 3, -1]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("slot", [0, 1])
def test_unknown_tokens_are_taken_from_the_other_slot_and_left_in_this(slot, by_kernel):
    sampled = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    sampled[1 - slot, :3] = torch.tensor([50, -1, 52])  # -1: a row that could not be sampled
    token_ids, unknown = (torch.tensor(x, device=DEVICE) for x in ([7, 0, 0, 8], [-1, 2, 1, -1]))
    where, left = torch.tensor([slot], device=DEVICE), torch.tensor([1, 2, 3, 4], device=DEVICE)
    if by_kernel:  # on a CPU it is interpreted
        take_tokens_kernel[1,](token_ids, unknown, where, sampled, sampled.stride(0), 4, ROWS=4)
        leave_tokens_kernel[1,](left, where, sampled, sampled.stride(0), 4, ROWS=4)
    else:
        take_tokens(token_ids, unknown, where, sampled)
        leave_tokens(left, where, sampled)
    assert token_ids.tolist() == [7, 52, 0, 8]
    assert sampled[slot].tolist() == [1, 2, 3, 4, 0] and sampled[1 - slot].tolist() == [50, -1, 52, 0, 0]


def run_all(runner, params, prompts=(PROMPT, PROMPT[:9], PROMPT[3:8]), steps=6):
    "The tokens of some requests, decoded together"
    manager = BlockManager(runner.num_kv_blocks, runner.block_size)
    seqs = [Sequence(i, prompt, params, runner.block_size) for i, prompt in enumerate(prompts)]
    for i, seq in enumerate(seqs):
        seq.seed = 1000 + i
        manager.allocate_with_cache(seq, manager.lookup(seq))
        advance(runner, manager, [seq], [seq.num_uncomputed_tokens])
    for _ in range(steps): advance(runner, manager, seqs, [1] * len(seqs))
    return [seq.output_token_ids for seq in seqs]


@pytest.mark.parametrize("params", [
    GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=5), SamplingParams(temperature=2.0, top_p=0.7, min_p=0.01),
])
def test_recorded_steps_give_the_tokens_of_launched_ones(params):
    "Three rows in a graph of four"
    plain, recorded = make_runner(enforce_eager=True), recorded_runner()
    replays = []
    replay = recorded.graphs.replay
    recorded.graphs.replay = lambda *args: replays.append(1) or replay(*args)
    assert run_all(recorded, params) == run_all(plain, params) and len(replays) == 7  # one is all that is left of the second prompt after its prefix hit


@pytest.mark.parametrize("extras", [dict(repetition_penalty=1.5), dict(frequency_penalty=1.0, logprobs=2), dict(logprobs=0)])
def test_steps_with_extras_end_their_recording_at_the_logits(extras):
    params = SamplingParams(temperature=1.0, **extras)
    plain, recorded = make_runner(enforce_eager=True), recorded_runner()
    launched = []
    run_model = recorded.run_model
    recorded.run_model = lambda inputs: launched.append(len(inputs["token_ids"])) or run_model(inputs)
    assert run_all(recorded, params) == run_all(plain, params)
    # on the CPU a recording calls again: four rows, of which one is nobody's
    assert list(recorded.graphs.logits_graphs) == [Recording(1), Recording(4)]
    assert recorded.device != "cpu" or launched[-6:] == [4] * 6
    assert recorded.graphs.logits.shape == (4, 260)


def test_recording_and_padding_touch_no_live_key():
    runner = make_runner(enforce_eager=True)
    for caches in runner.kv_caches:
        for cache in caches: cache.normal_()
    before = [[cache.clone() for cache in caches] for caches in runner.kv_caches]
    runner.capture_cudagraph()
    assert all(torch.equal(a, b) for pair in zip(runner.kv_caches, before) for a, b in zip(*pair))
    seqs = decodes(3)
    runner.run(seqs, [1] * 3)
    written = [seq.block_table[-1] * 4 + (seq.num_tokens - 1) % 4 for seq in seqs]
    for (cache, _), (old, _) in zip(runner.kv_caches, before):
        changed = (cache != old).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert sorted(written) == changed


def test_a_graph_recorded_later_disturbs_no_step_on_its_way():
    "Some tokens may be known to the device only"
    graphs = recorded_runner().graphs
    graphs.sampled.copy_(torch.arange(8).view(2, 4))
    graphs.capture(Recording(4, shared=True))
    assert graphs.sampled.flatten().tolist() == list(range(8))


def test_shared_prefixes_in_a_recorded_step_change_no_token(monkeypatch):
    "On the CPU the kernels are interpreted"
    runner = make_runner(enforce_eager=True)
    expected = runner.run(shared_seqs(runner, 3), [1] * 3)
    runner = make_runner(enforce_eager=True)
    seqs = shared_seqs(runner, 3)
    monkeypatch.setattr(model_runner, "SHARED_PREFIX_BYTES", 1)
    runner.config.attention_backend = "triton"
    for layer in runner.model.model.layers: layer.self_attn.attn.backend = TritonAttentionBackend
    runner.capture_cudagraph()
    assert runner.run(seqs, [1] * 3) == expected
    assert [key.size for key in runner.graphs.graphs if key.shared] == [4, 2]


def test_graphs_are_recorded_on_gpus_unless_asked_not_to(monkeypatch):
    runner = make_runner(enforce_eager=True)
    assert runner.graphs is None and not runner.uses_graphs()
    runner.config.enforce_eager = False
    assert runner.uses_graphs() == (DEVICE == "cuda")
    runner.device, runner.config.attention_backend = "cuda", "torch"
    monkeypatch.setattr(model_runner, "get_attention_backend", lambda name, device: ATTENTION_BACKENDS[name])
    assert not runner.uses_graphs()  # it asks the device for lengths


def test_buffers_hold_the_largest_batch():
    graphs = DecodeGraphs(lambda fields, shared: fields["token_ids"] + 1, 20, 3, DEVICE)
    assert graphs.sizes == [1, 2, 4, 8, 16, 20] and len(graphs.buffers.on_device) == step_bytes(20, 3)
    assert [graphs.size_for(n) for n in (1, 3, 5, 17, 20)] == [1, 4, 8, 20, 20]
    graphs.capture_all()
    seqs = decodes(3, block_size=16)
    tokens = graphs.replay(prepare_decode(seqs), prepare_sample(seqs), None)
    assert tokens.tolist() == [seq.token_ids[-1] + 1 for seq in seqs]
    again = graphs.replay(prepare_decode(seqs), prepare_sample(seqs), np.array([2, 0, -1]), 1)
    assert again.tolist() == [seqs[2].token_ids[-1] + 2, seqs[0].token_ids[-1] + 2, seqs[2].token_ids[-1] + 1]


def test_steps_of_few_rows_are_recorded_for_short_contexts_too():
    bounds = []

    def step(fields, shared):
        bounds.append(fields["max_context_len"])
        return fields["token_ids"]

    graphs = DecodeGraphs(step, 4, 8, DEVICE, max_context_len=100, short_keys={1: 9, 2: 7, 3: 8})
    assert graphs.keys == [Recording(4), Recording(2), Recording(1), Recording(2, short=True), Recording(1, short=True)]
    graphs.capture_all()
    if graphs.stream is None:  # a recording on a GPU runs the step twice
        assert bounds == [100, 100, 100, 7, 9]
    for lens, key in {(9,): Recording(1, short=True), (10,): Recording(1), (3, 7): Recording(2, short=True), (3, 8): Recording(2), (3, 3, 3): Recording(4)}.items():
        batch = SimpleNamespace(token_ids=lens, max_context_len=max(lens), shared_prefixes=None)
        assert graphs.key_for(batch) == key
        batch.shared_prefixes = object()
        assert graphs.key_for(batch) == Recording(key.size, shared=True)


def test_which_steps_are_recorded_for_short_contexts(monkeypatch):
    runner = make_runner(enforce_eager=True)
    runner.max_model_len = 4096
    assert runner.short_steps() == {}  # with the backend of the CPU nothing depends on it
    runner.config.attention_backend = "triton"
    monkeypatch.setattr(runner.model_config, "head_dim", 128)
    monkeypatch.setattr(runner, "num_kv_heads", 8)
    monkeypatch.setattr(runner, "dtype", torch.bfloat16)
    monkeypatch.setattr(model_runner, "num_sms", lambda device: 132)
    assert runner.short_steps() == {1: 1025, 2: 513, 3: 705, 4: 513}
    graphs = runner.decode_graphs()
    assert [key.size for key in graphs.keys if key.short] == [4, 2, 1] and graphs.max_context_len == 4096
    runner.max_model_len = 1025  # all contexts are short for one row, which needs no second recording
    assert runner.short_steps() == {2: 513, 3: 705, 4: 513}
    runner.max_model_len = 4096
    monkeypatch.setattr(runner.model_config, "hidden_size", 4096)  # whose products of two rows and more are the library's
    assert runner.short_steps() == {1: 1025}
    monkeypatch.setattr(runner.config, "tensor_parallel_size", 2)  # whose products of two rows push their sums
    assert runner.short_steps() == {1: 1025, 2: 513}
    monkeypatch.setattr(runner.model_config, "head_dim", 96)  # heads that it doesn't take
    assert runner.short_steps() == {}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_recording(fails, monkeypatch):
    "A dropped engine's graphs, freed in the middle of a recording, would end it"
    collects = []

    class Graph:
        capture_begin = capture_end = lambda self, *args, **options: None

    class Stream:
        synchronize = lambda self: None

    def fn():
        collects.append(gc.isenabled())
        if fails and len(collects) == 2:
            raise RuntimeError("while recording")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        record(fn)
    assert collects == [True, False] and gc.isenabled()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_that_is_dropped_while_another_is_recorded():
    x = torch.zeros(4, device="cuda")

    class Cycle:
        "Is freed by the garbage collector only"

        def __init__(self):
            self.itself, self.graph = self, record(lambda: x.add_(1))

    def fn():
        [[] for _ in range(100_000)]  # enough for the collector to start
        x.mul_(2)

    with torch.cuda.stream(torch.cuda.Stream()):
        Cycle()
        graph = record(fn)
        before = x.clone()
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, 2 * before)


def test_recordings_are_gone_when_a_runner_exits_whoever_still_knows_it():
    "A group's end waits for the last recording of its collectives, and the frames of an error may hold the runner's"
    runner = recorded_runner()
    graphs = runner.graphs
    assert graphs.graphs
    runner.exit()
    assert not graphs.graphs and not graphs.logits_graphs
