"Groups and collectives: what each rank gets, and that a failing rank never leaves the others waiting"
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import shared_memory
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from minivllm import distributed
from minivllm.distributed import (
    FEW_NUMBERS, FEW_PROGRAMS, FEW_ROWS, LINE_ROWS, MARK_SUMS, MAX_MARKS, MAX_PROGRAMS, PLACE_BYTES, PUSH_BLOCK, PUSH_NUMBERS, REGION_BYTES, SCATTER_ROWS, SINGLE,
    SUM_PROGRAMS, TABLE_BYTES, PeerMemory, PretendGroup, ProcessGroup, PushTarget, ScatteredPart, TensorParallelGroup, buffer_bytes, divide, environment, few_start,
    fits_lines, leave_memory, lines_of_row, open_store, place_start, region_bytes, run_ranks, sends_whole_lines, share_memory,
)
from minivllm.engine.worker import WorkerError
from minivllm.kernels.common import triton
from minivllm.kernels.decode_push import collect, collected_block, linear_sum, push_product
from minivllm.layers.layernorm import RMSNorm, add_rms_norm_torch
from minivllm.layers.linear import RowParallelLinear
from minivllm.models import llama
from places import find_hazard, sequences
from tp_rig import Ranks, norm_input, peer_input, product_input, split_input


def test_group_of_one_returns_its_tensor():
    x = torch.randn(3)
    assert (SINGLE.rank, SINGLE.world_size) == (0, 1)
    for y in (SINGLE.all_reduce(x), SINGLE.all_gather(x), SINGLE.gather(x), SINGLE.broadcast(x)):
        assert y is x


@pytest.mark.parametrize("rank, world_size", [(-1, 1), (1, 1), (2, 2), (0, 0)])
def test_rank_outside_the_group(rank, world_size):
    with pytest.raises(ValueError, match=str(rank)):
        TensorParallelGroup(rank, world_size)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "gather", "broadcast"])
def test_base_class_makes_up_no_answer_for_several_ranks(collective):
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        getattr(TensorParallelGroup(1, 2), collective)(torch.ones(2))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_collectives(n):
    parts = [torch.randn(4, 6) for _ in range(n)]

    def rank_main(tp):
        x = parts[tp.rank]
        gathers = tp.all_gather(x), tp.all_gather(x, dim=0), tp.gather(x, dst=n - 1)
        return (tp.all_reduce(x), *gathers, tp.broadcast(x, src=n - 1))

    for rank, (total, side, below, gathered, sent) in enumerate(run_ranks(rank_main, n)):
        assert torch.allclose(total, sum(parts), atol=1e-6)
        assert torch.equal(side, torch.cat(parts, -1)) and torch.equal(below, torch.cat(parts, 0))
        assert torch.equal(sent, parts[-1])
        assert torch.equal(gathered, side) if rank == n - 1 else gathered is None


def test_all_ranks_get_the_same_bits_whoever_comes_first():
    parts = [torch.randn(1000) for _ in range(4)]

    def rank_main(tp, late):
        time.sleep(0.02 * (tp.rank == late))
        return tp.all_reduce(parts[tp.rank])

    runs = [run_ranks(lambda tp: rank_main(tp, late), 4) for late in range(4)]
    assert all(torch.equal(y, runs[0][0]) for run in runs for y in run)


def test_no_rank_sees_another_change_its_tensor():
    # every rank overwrites its tensor right after each collective, and some ranks are slow
    def rank_main(tp):
        x = torch.zeros(10_000)
        for step in range(50):
            x.fill_(step)
            total = tp.all_reduce(x)
            x.fill_(-1)
            assert total.unique().tolist() == [step * tp.world_size]

    run_ranks(rank_main, 4)


def test_a_slow_reader_delays_the_writers():
    group_type = type("Slow", (PretendGroup,), {})
    barrier, slots, seen = threading.Barrier(2, timeout=5), [None, None], {}

    def slowly(parts):
        time.sleep(0.05)
        return parts[0].clone()

    def rank_main(rank):
        tp, x = group_type(rank, 2, barrier, slots), torch.zeros(1)
        seen[rank] = tp._exchange(x, slowly if rank else lambda parts: parts[0].clone())
        x.fill_(7)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert seen[0].item() == seen[1].item() == 0


def test_broadcast_gives_copies():
    def rank_main(tp):
        x = tp.broadcast(torch.zeros(1))
        tp.all_reduce(x)
        x += tp.rank
        tp.all_reduce(x)
        return x.item()

    assert run_ranks(rank_main, 3) == [0, 1, 2]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failing_rank_is_reported_at_once(failing):
    def rank_main(tp):
        if tp.rank == failing:
            raise KeyError("the cause")
        return tp.all_reduce(torch.ones(1))

    start = time.perf_counter()
    with pytest.raises(KeyError, match="the cause"):
        run_ranks(rank_main, 3, timeout=30)
    assert time.perf_counter() - start < 10


def test_a_failure_inside_a_collective_is_reported():
    with pytest.raises(RuntimeError, match="size"):
        run_ranks(lambda tp: tp.all_reduce(torch.ones(1 + tp.rank)), 2, timeout=30)


def test_a_collective_that_one_rank_leaves_out_ends():
    with pytest.raises(RuntimeError, match="did not all take part"):
        run_ranks(lambda tp: tp.all_reduce(torch.ones(1)) if tp.rank else None, 2, timeout=0.2)


def test_divide():
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="number of heads 9 .* 2 ranks"):
        divide(9, 2, "number of heads")


# Processes


@pytest.fixture(scope="module")
def ranks():
    "Three ranks, two of them processes of their own"
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("dst", [0, 2])
def test_collectives_between_processes(ranks, dst):
    parts = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(3)]
    for rank, (side, below, gathered, nothing, total, sent, empty) in enumerate(ranks.run("collectives", dst)):
        assert np.array_equal(side, torch.cat(parts, 1)) and np.array_equal(below, torch.cat(parts))
        assert (gathered is None) == (nothing is None) == (rank != dst)
        if rank == dst:
            assert np.array_equal(gathered, torch.cat(parts, 1)) and nothing.shape == (2, 0)
        assert np.array_equal(total, sum(parts)) and np.array_equal(sent, parts[dst]) and empty.shape == (0, 3)


def test_row_parallel_bias_counts_once(ranks):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 9), torch.randn(6, 9), torch.arange(6.0)
    whole = torch.nn.functional.linear(x, weight, bias)
    for y in ranks.run("biased_row_parallel", x.numpy(), weight.numpy(), bias.numpy()):
        assert np.allclose(y, whole, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and want GPUs that reach each other")
@pytest.mark.parametrize("way", ["one_shot_all_reduce", "push_all_reduce"])
def test_sums_through_peer_memory(ranks, way):
    sizes = [1, 100, 3000, 7]
    with segments_of(*[buffer_bytes(3)] * 3) as names:
        results = ranks.run("peer_sums", names, sizes, 12, way)
    for call, sums in enumerate(zip(*results)):
        parts = [peer_input(rank, call, sizes) for rank in range(3)]
        expected = sum(part.float() for part in parts).to(parts[0].dtype).float()
        assert np.allclose(sums[0], expected, atol=1e-5)
        assert all(np.array_equal(y, sums[0]) for y in sums)  # the same bits everywhere


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("first", [False, True])
def test_norm_of_a_sum(n, first):
    parts, residual, weight = norm_input(n, 0, 4, 6, torch.float32)
    given, residual = None if first else residual, residual * (not first)
    norm = RMSNorm(6, 1e-5).requires_grad_(False)
    norm.weight.copy_(weight)
    for normed, stream in run_ranks(lambda tp: tp.add_rms_norm(parts[tp.rank], given, norm), n):
        torch.testing.assert_close(stream, residual + parts.sum(0))
        torch.testing.assert_close(normed, norm(stream))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("first", [False, True])
def test_norm_of_a_sum_of_splits(n, splits, first):
    "Which no group has to ask for: where nothing faster sums them, this does"
    parts, _, residual, weight = split_input(n, 0, splits, 4, 6, torch.float32)
    given, residual = None if first else residual, residual * (not first)
    norm = RMSNorm(6, 1e-5).requires_grad_(False)
    norm.weight.copy_(weight)
    for normed, stream in run_ranks(lambda tp: tp.add_rms_norm(parts[tp.rank], given, norm), n):
        assert normed.shape == stream.shape == (4, 6)
        torch.testing.assert_close(stream, residual + parts.sum((0, 1)))
        torch.testing.assert_close(normed, norm(stream))


def test_which_groups_sum_splits():
    "One rank alone, by the norm; several only where one kernel does"
    assert SINGLE.sums_splits((64, 4096), torch.bfloat16) and SINGLE.sums_splits((5, 7), torch.float32)
    assert not TensorParallelGroup(1, 2).sums_splits((64, 4096), torch.bfloat16)
    assert run_ranks(lambda tp: tp.sums_splits((64, 4096), torch.bfloat16), 2) == [False, False]
    group = ProcessGroup(0, 1, open_store(1))
    assert not group.sums_splits((64, 4096), torch.bfloat16)  # without peers
    group.close()


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORM_STEPS = [(5, 64, BF16), (1, 100, FP32), (140, 24, BF16), (9, 24, FP16), (3, 100, BF16)]
LINE_STEPS = [(5, 64, BF16), (1, 100, BF16), (20, 24, BF16), (9, 24, FP16), (3, 60, BF16), (2, 132, BF16)]  # 56 numbers are a line


@contextmanager
def segments_of(*sizes):
    "Names of memory that processes share"
    shared = [shared_memory.SharedMemory(create=True, size=size) for size in sizes]
    try:
        yield [segment.name for segment in shared]
    finally:
        for segment in shared:
            segment.close()
            segment.unlink()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and want GPUs that reach each other")
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("way, steps", [("pulled", NORM_STEPS), ("pushed", LINE_STEPS)])
def test_sums_with_norms_through_peer_memory(ranks, late, way, steps):
    "Fewer rows than programs and more, one number of rows after another, whoever is late"
    with segments_of(*[buffer_bytes(3)] * 3) as names:
        results = ranks.run("peer_norms", names, steps, late, way)
    for call, (step, pairs) in enumerate(zip(steps, zip(*results))):
        parts, residual, weight = norm_input(3, call, *step)
        if way == "pushed" and call % 3 == 2:
            residual = torch.zeros_like(residual)
        total = sum(part.float() for part in parts).to(residual.dtype)  # in the order of the ranks
        for ours, expected in zip(pairs[0], add_rms_norm_torch(total, residual, weight, 1e-5)):
            np.testing.assert_allclose(ours, expected.float(), rtol=1e-5 if step[2] == FP32 else 1e-2, atol=1e-5)
        assert np.array_equal(pairs[0][1], (residual + total).float())
        assert all(np.array_equal(a, b) for pair in pairs for a, b in zip(pair, pairs[0]))


SPLIT_STEPS = [(2, 3, 64, BF16), (3, 1, 100, BF16), (8, 4, 24, BF16), (4, 2, 132, FP16), (1, 2, 60, BF16)]  # splits, rows, numbers


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and want GPUs that reach each other")
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_splits_are_pushed_as_their_sum(ranks, late):
    "Bit for bit what is pushed of a part in one piece, number of splits after number of splits, whoever is late"
    with segments_of(*[buffer_bytes(3)] * 3) as names:
        results = ranks.run("split_norms", names, SPLIT_STEPS, late)
    for call, (step, pairs) in enumerate(zip(SPLIT_STEPS, zip(*(zip(mine[::2], mine[1::2]) for mine in results)))):
        _, whole, residual, _ = split_input(3, call, *step)
        total = sum(part.float() for part in whole).to(step[-1])
        for of_splits, of_one in pairs:
            assert np.array_equal(of_splits[1], (total if call % 3 == 2 else residual + total).float())
            assert np.array_equal(of_splits[0], of_one[0]) and np.array_equal(of_splits[1], of_one[1])
            assert np.array_equal(of_splits[0], pairs[0][0][0]) and np.isfinite(of_splits[0]).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and want GPUs that reach each other")
def test_products_of_several_ranks_are_split_where_lines_take_them(ranks):
    "More numbers than are pushed one by one, few enough for lines, of two bytes; the others come whole, and all are right"
    steps = [(5, 64, 8, BF16), (3, 8, 8, BF16), (5, 64, 8, FP32), (129, 8, 8, FP16), (3, 100, 12, FP16)]
    with segments_of(*[buffer_bytes(3)] * 3) as names:
        results = ranks.run("split_layers", names, steps)
    for call, (rows, hidden, inputs, dtype) in enumerate(steps):
        xs, weights, *_ = product_input(3, call, rows, hidden, inputs, dtype)
        _, residual, weight = norm_input(3, call, rows, hidden, dtype)
        sums = sum(x.float() @ w.float().T for x, w in zip(xs, weights)) + residual.float()
        eps = torch.finfo(dtype).eps
        for mine in results:
            (split, normed, stream), (without_peers, *others) = mine[2 * call : 2 * call + 2]
            assert split == (call in (0, 4)) and not without_peers
            for x, y in ((normed, stream), others):
                np.testing.assert_allclose(y, sums, rtol=4 * eps, atol=16 * eps)
                np.testing.assert_allclose(x, add_rms_norm_torch(sums, 0 * sums, weight.float(), 1e-5)[0], rtol=0.05 if dtype != FP32 else 1e-4, atol=0.05 if dtype != FP32 else 1e-4)
            assert np.array_equal(normed, results[0][2 * call][1])  # the same bits everywhere


# whose rows have owners: as many each, one rank fewer, one row each; then parts that stay whole, and parts that go again
SCATTER_STEPS = [(9, 24, 16, FP32), (8, 24, 8, BF16), (140, 16, 16, BF16), (7, 100, 24, FP32), (5, 24, 16, FP32), (6, 24, 16, FP16), (7, 24, 16, BF16)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and want GPUs that reach each other")
@pytest.mark.parametrize("late", [0, 2])
def test_rows_are_summed_by_their_owners(late, monkeypatch):
    "Every rank gets the norm of all rows, and of the stream the rows that it owns; whoever is late"
    monkeypatch.setattr(distributed, "SCATTER_ROWS", SCATTER_ROWS)  # to be given back: this process is rank 0
    fresh = Ranks(3)  # a group with peers
    try:
        with segments_of(*[buffer_bytes(3)] * 3) as names:
            results = fresh.run("scattered_norms", names, SCATTER_STEPS, late)
    finally:
        fresh.tp.peers = None
        fresh.close()
    for call, (rows, hidden, _, dtype) in enumerate(SCATTER_STEPS):
        _, stream, weight = norm_input(3, call, rows, hidden, dtype)
        stream = stream if call % 2 else torch.zeros_like(stream)
        for branch in range(3):
            parts, normed, streams = zip(*(result[3 * call + branch] for result in results))
            total = sum(torch.from_numpy(part) for part in parts).to(dtype)
            expected, stream = add_rms_norm_torch(total, stream, weight, 1e-5)
            owned = np.concatenate(streams) if rows >= 6 else streams[0]
            tolerance = dict(rtol=1e-4 if dtype == FP32 else 2e-2, atol=1e-4 if dtype == FP32 else 3e-2)
            np.testing.assert_allclose(owned, stream.float(), **tolerance)
            np.testing.assert_allclose(normed[0], expected.float(), **tolerance)
            assert all(np.array_equal(y, normed[0]) for y in normed)
            assert [len(y) for y in streams] == ([-(-rows // 3)] * 2 + [rows - 2 * -(-rows // 3)] if rows >= 6 else [rows] * 3)
            stream = torch.from_numpy(owned).to(dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_where_rows_of_a_part_go():
    buffers = [torch.zeros(buffer_bytes(2), dtype=torch.uint8) for _ in range(2)]
    addresses, start = torch.tensor([buffer.data_ptr() for buffer in buffers]), place_start(2, 0)
    places = [buffer[start : start + PLACE_BYTES] for buffer in buffers]
    one, other = (PeerMemory(rank, buffers[rank], addresses, first_places=places) for rank in (0, 1))
    shape = PLACE_BYTES // 8192, 4096
    starts = [[target.data_ptr() - place.data_ptr() for target, place in zip(peers.scatter_targets(shape, BF16), places)] for peers in (one, other)]
    assert starts == [[0, 0], [PLACE_BYTES // 2] * 2]  # each rank's part in a half of both places
    assert [tuple(target.shape) for target in other.scatter_targets((7, 4096), BF16)] == [(4, 4096), (3, 4096)]
    assert other.scatter_targets((shape[0] + 1, 4096), BF16) is None and one.scatter_targets((0, 8), BF16) is None
    assert one.scatter_targets((1, 8), BF16) is None  # rank 1 would own no row
    assert PeerMemory(0, buffers[0], addresses).scatter_targets((7, 8), BF16) is None
    group = ProcessGroup(0, 1, open_store(1))
    assert group.scatter_targets((SCATTER_ROWS, 8), BF16) is None
    group.peers = one
    assert group.scatter_targets((SCATTER_ROWS - 1, 8), BF16) is None
    part = ScatteredPart(group.scatter_targets((SCATTER_ROWS, 8), BF16))
    with pytest.raises(ValueError, match="several dtypes"):
        one.add_rms_norm(part, torch.ones(SCATTER_ROWS, 8), torch.ones(8, dtype=BF16), 1e-5)
    with pytest.raises(ValueError, match=r"a part \(\d+, 8\) and a stream \(5, 8\)"):
        one.add_rms_norm(torch.ones(SCATTER_ROWS + 1, 8, dtype=BF16), torch.ones(5, 8, dtype=BF16), torch.ones(8, dtype=BF16), 1e-5)
    with pytest.raises(ValueError, match=f"a stream of 5 rows for {SCATTER_ROWS // 2} of {SCATTER_ROWS}"):
        one.add_rms_norm(part, torch.ones(5, 8, dtype=BF16), torch.ones(8, dtype=BF16), 1e-5)
    group.peers = None
    group.close()


PUSH_STEPS = [(1, 64, 32, BF16), (3, 2100, 16, BF16), (1, 2100, 48, FP16), (4, 7, 5, BF16), (2, 64, 32, BF16), (1, 1500, 16, BF16), (1, 2100, 16, BF16)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and want GPUs that reach each other")
@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_products_that_push(ranks, late):
    "Short rows and long ones, few and more, one after another, whoever is late: what torch sums, in the order of the ranks"
    with segments_of(*[buffer_bytes(3)] * 3) as names:
        results = ranks.run("pushed_products", names, PUSH_STEPS, late)
    for call, ((*_, dtype), sums) in enumerate(zip(PUSH_STEPS, zip(*results))):
        xs, weights, bias, residual = product_input(3, call, *PUSH_STEPS[call])
        parts = [x.float() @ weight.float().T for x, weight in zip(xs, weights)]
        parts = [parts[0], parts[1].to(dtype).float() + residual.float(), parts[2] + bias.float()]
        expected = sum(part.to(dtype).float() for part in parts).to(dtype).float()
        np.testing.assert_allclose(sums[0], expected, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
        assert all(np.array_equal(y, sums[0]) for y in sums)  # the same bits everywhere


def targets_of(world_size):
    "Buffers of one process, each rank's target, its memory, and the counts of its collector"
    buffers = [torch.zeros(buffer_bytes(world_size), dtype=torch.uint8) for _ in range(world_size)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    peers = [PeerMemory(rank, buffer, addresses) for rank, buffer in enumerate(buffers)]
    counts = [peer.buffer[few_start(world_size) + peer.few.nbytes :][: 8 * FEW_PROGRAMS].view(torch.int64) for peer in peers]
    return [PushTarget(addresses, rank) for rank in range(world_size)], peers, counts


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_a_product_may_push_one_sum_ahead_and_its_counts_begin_again():
    "Counts of 16 bits start again behind 65,533, at an even sum"
    targets, peers, counts = targets_of(2)
    for begin in (0, 65_532, 65_533):
        for one in counts:
            one.fill_(begin)
        x, weight = torch.eye(2, 8).bfloat16(), torch.eye(8).bfloat16()
        for call in range(4):
            for rank, target in enumerate(targets):
                push_product(x * (call + 1) * (rank + 1), weight, None, None, target)
            if call == 0:  # rank 1 collects, and pushes for the next sum, before rank 0 has looked
                assert torch.equal(collect(2, 8, BF16, targets[1]), 3 * x)
                push_product(x * 4, weight, None, None, targets[1])
                assert torch.equal(collect(2, 8, BF16, targets[0]), 3 * x)
                push_product(x * 2, weight, None, None, targets[0])
                assert all(torch.equal(collect(2, 8, BF16, target), 6 * x) for target in targets)
            else:
                assert all(torch.equal(collect(2, 8, BF16, target), 3 * (call + 1) * x) for target in targets)
        assert [int(one[0]) for one in counts] == [begin + 5] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("rows, size", [(2, 8), (1, 1024)])
def test_words_of_the_last_cycle_of_counts_are_not_taken(rows, size):
    "A second row, or a column far behind, that was last used when the counts were the same"
    targets, peers, counts = targets_of(2)
    x, weight, last = torch.ones(rows, 2).bfloat16(), torch.ones(size, 2).bfloat16(), 2 * 65_534

    def step(x, weight, begin):
        for one in counts:
            one.fill_(begin)
        for target in targets:
            push_product(x, weight, None, None, target)
        return [collect(len(x), len(weight), BF16, target) for target in targets]

    assert all((y == 4).all() for y in step(x, weight, last - 65_534 + 6))
    for begin in (32_767, 65_533, 65_534):  # steps of one short row, of which these clear up; others come between
        step(x[:1], weight[:8], last - 65_534 + begin)
    words = [peer.few.view(2, 2, FEW_ROWS, FEW_NUMBERS)[1, :, rows - 1, size - 1] for peer in peers]
    assert all(((one >> 16) & 0xFFFF == 0xFFFE).all() for one in words)
    assert all((y == 6).all() for y in step(1.5 * x, weight, last + 6))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_products_are_summed_in_the_order_of_the_ranks():
    targets, *_ = targets_of(3)
    for target, value in zip(targets, (1.0, 2.0**30, -(2.0**30))):
        push_product(torch.full((1, 1), value).bfloat16(), torch.ones(4, 1).bfloat16(), None, None, target)
    assert all(torch.equal(collect(1, 4, BF16, target), torch.zeros(1, 4).bfloat16()) for target in targets)


def test_what_a_product_does_not_push():
    "It would write over what belongs to others"
    target = PushTarget(torch.zeros(2, dtype=torch.int64), 0)
    for rows, size, dtype in ((FEW_ROWS + 1, 8, BF16), (1, FEW_NUMBERS + 1, BF16), (0, 8, BF16), (1, 8, FP32)):
        with pytest.raises(ValueError, match="words have room"):
            push_product(torch.ones(rows, 4, dtype=dtype), torch.ones(size, 4, dtype=dtype), None, None, target)
    with pytest.raises(ValueError, match="bias must follow"):
        push_product(torch.ones(1, 4).bfloat16(), torch.ones(8, 4).bfloat16(), torch.ones(16).bfloat16()[::2], None, target)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_who_collects_waits_for_all_words_of_this_sum():
    (targets, (peers, _), _), sums = targets_of(2), []
    x, weight = torch.ones(1, 4).bfloat16(), torch.ones(8, 4).bfloat16()
    push_product(x, weight, None, None, targets[0])
    words = peers.few.view(2, 2, FEW_ROWS, FEW_NUMBERS)[1, 1, 0]
    words[:7] = 1 << 16 | 0x3F80  # seven of eight have come, each a 1.0 of the first sum; the last is of another
    words[7] = (65_533 << 16 | 0x3F80) - 2**32
    thread = threading.Thread(target=lambda: sums.append(collect(1, 8, BF16, targets[0])), daemon=True)
    thread.start()
    thread.join(0.5)
    assert not sums
    words[7] = 1 << 16 | 0x4000
    thread.join(30)
    assert sums[0].tolist() == [[5.0] * 7 + [6.0]]
    # and a rank that never comes: the wait ends when this one is told, now and later
    thread = threading.Thread(target=lambda: sums.extend(linear_sum(x, weight, None, None, targets[0]) for _ in range(3)), daemon=True)
    thread.start()
    thread.join(0.5)
    assert len(sums) == 1
    peers.release()
    thread.join(30)
    assert len(sums) == 4


def test_what_a_product_may_push():
    peers = PeerMemory(1, torch.zeros(buffer_bytes(2), dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    target = peers.push_target((FEW_ROWS, FEW_NUMBERS), BF16)
    assert target.rank == 1 and target.addresses is peers.addresses and peers.push_target((1, 1), FP16) is not None
    for shape, dtype in (((FEW_ROWS + 1, 8), BF16), ((1, FEW_NUMBERS + 1), BF16), ((0, 8), BF16), ((1, 8), FP32), ((1, 8), torch.float64)):
        assert peers.push_target(shape, dtype) is None
    assert SINGLE.push_target((1, 8), BF16) is None
    for world_size in (1, 2, 3, 8, 64):  # each column has its program, and its count a place
        assert triton.cdiv(FEW_NUMBERS, collected_block(FEW_NUMBERS, world_size)) <= FEW_PROGRAMS


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_a_branch_that_pushes_gives_the_stream(monkeypatch):
    "Of a group in which the product can push, the layer of few rows lets it; bias and stream count on the first rank"
    buffer, stream, x = torch.zeros(buffer_bytes(1), dtype=torch.uint8), torch.randn(2, 16).bfloat16(), torch.randn(2, 8).bfloat16()
    group = ProcessGroup(0, 1, open_store(1))
    group.peers = PeerMemory(0, buffer, torch.tensor([buffer.data_ptr()]))
    linear = RowParallelLinear(8, 16, bias=True, tp=group).bfloat16().requires_grad_(False)
    linear.weight.normal_()
    linear.bias.normal_()
    monkeypatch.setattr(llama, "linear_residual", None)  # the other way
    asked, given = [], group.peers.push_target
    group.peers.push_target = lambda *shape_and_dtype: asked.append(shape_and_dtype) or given(*shape_and_dtype)
    expected = stream + linear(x)
    torch.testing.assert_close(llama.add_product(linear, stream, x), expected, rtol=0.02, atol=0.02)
    group.rank = 1
    group.peers.rank = 0  # of one, still
    torch.testing.assert_close(llama.add_product(linear, stream, x), x @ linear.weight.T, rtol=0.02, atol=0.02)
    assert asked == [((2, 16), BF16)] * 2
    group.rank = 0
    group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, and want GPUs that reach each other")
@pytest.mark.parametrize("late", [0, 1])
def test_columns_of_a_table(ranks, late):
    "On rank 0 the whole, whoever is late, one shape after another"
    shapes = [(4, 5), (1, 7), (4, 5), (30, 40)]
    with segments_of(buffer_bytes(3, with_table=True), buffer_bytes(3), buffer_bytes(3)) as names:
        whole, *others = ranks.run("peer_tables", names, shapes, late)
    assert all(table is None for tables in others for table in tables)
    for call, ((rows, size), table) in enumerate(zip(shapes, whole)):
        columns = np.arange(rows * size, dtype=np.float32).reshape(rows, size) + call
        assert np.array_equal(table, np.concatenate([columns + 1000 * rank for rank in range(3)], 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_what_fits_into_the_table():
    assert SINGLE.columns((2, 3), FP32) is None and torch.equal(SINGLE.assemble(torch.ones(2)), torch.ones(2))
    buffers = [torch.zeros(buffer_bytes(2, with_table=rank == 0), dtype=torch.uint8) for rank in range(2)]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    assert PeerMemory(1, buffers[1], addresses).columns((2, 3), FP32) is None
    peers = PeerMemory(1, buffers[1], addresses, buffers[0][buffer_bytes(2):])
    largest = peers.columns((TABLE_BYTES // 4096, 1024), BF16)
    assert largest[-1].data_ptr() + 2048 == buffers[0].data_ptr() + len(buffers[0]) and largest.stride() == (2048, 1)
    assert peers.columns((TABLE_BYTES // 4096 + 1, 1024), BF16) is None and peers.columns((0, 5), BF16) is None


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_no_part_of_a_buffer_overlaps_another(world_size):
    buffer = torch.zeros(buffer_bytes(world_size), dtype=torch.uint8)
    peers, base = PeerMemory(0, buffer, torch.zeros(world_size, dtype=torch.int64)), buffer.data_ptr()
    tensors = [peers.flags, peers.words, peers.sum_flags, peers.lines, peers.few, *(peers.place(i, (1, PLACE_BYTES // 2), BF16) for i in (0, 1))]
    # behind what is waited for lie the counts of the programs, and the two regions of one shot
    behind = [MAX_PROGRAMS * (8 + 2 * REGION_BYTES), 8 * PUSH_NUMBERS // PUSH_BLOCK, 8 * SUM_PROGRAMS, 8 * LINE_ROWS, 8 * FEW_PROGRAMS, 0, 0]
    starts = [tensor.data_ptr() - base for tensor in tensors]
    assert [start + tensor.nbytes + more for start, tensor, more in zip(starts, tensors, behind)] == [*starts[1:], len(buffer)]
    assert (peers.lines.data_ptr() - base) % 128 == 0  # what the machine moves as one


@pytest.mark.parametrize("num_ranks, length", [(2, 2), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_no_place_is_overwritten_before_it_was_read(num_ranks, length):
    "In no order of the ranks, whatever step follows whatever other"
    hazards = {name: hazard for name, exchanges in sequences(length) if (hazard := find_hazard(exchanges, num_ranks))}
    assert not hazards


def test_what_keeps_places_from_being_overwritten():
    "The second wait of owners; that no step ends with a pulled sum of place 0; that branches take turns"
    assert "and finds" in find_hazard(["owners"] * 2, 2, no_second_wait=True)
    assert "and finds" in find_hazard(["pull 0", "owners"], 2)
    assert "and finds" in find_hazard(["pull 1", "pull 1"], 2)
    assert find_hazard(["pull 1", "owners"], 2) is None


def send_lines(peers, rows, call, source=1):
    "Parts that another rank pushes, put there by hand"
    lines = peers.lines.view(2, len(peers.addresses), LINE_ROWS, -1, 16)[call % 2, source, : len(rows), : lines_of_row(rows.shape[1])]
    lines[..., 14:] = call
    words = torch.zeros(len(rows), lines.shape[1] * 14, dtype=torch.int64)
    words[:, : rows.shape[1] // 4] = rows.view(torch.int64)
    lines[..., :14] = words.view(len(rows), -1, 14)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_a_rank_may_push_lines_one_sum_ahead():
    "And in the second sum, of fewer rows, a row counts for itself"
    buffers = [torch.zeros(buffer_bytes(2), dtype=torch.uint8) for _ in range(2)]
    peers = PeerMemory(0, buffers[0], torch.tensor([buffer.data_ptr() for buffer in buffers]))
    theirs, ours, residual, weight = torch.randn(3, 3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.ones(64).bfloat16()
    send_lines(peers, theirs[0], 1)
    send_lines(peers, theirs[1][:2], 2)
    for rows, call in ((3, 0), (2, 1)):
        got = distributed.push_add_norm(ours[:rows], residual[:rows], weight, 1e-5, peers.addresses, 0)
        total = (ours[:rows].float() + theirs[call][:rows].float()).bfloat16()
        assert torch.equal(got[1], residual[:rows] + total)
    # the third row has had one sum, so this is its second
    lines = peers.lines.view(2, 2, LINE_ROWS, -1, 16)
    send_lines(peers, theirs[2], 3)
    lines[0, 1, 2] = lines[1, 1, 2]
    lines[0, 1, 2, :, 14:] = 2
    got = distributed.push_add_norm(ours, residual, weight, 1e-5, peers.addresses, 0)
    assert torch.equal(got[1], residual + (ours.float() + theirs[2].float()).bfloat16())


def test_what_is_pushed_in_lines():
    fitting = torch.empty(LINE_ROWS, 4096, dtype=BF16)
    assert fits_lines(fitting) and fits_lines(fitting[:1]) and not fits_lines(torch.empty(LINE_ROWS + 1, 4096, dtype=BF16))
    assert not any(map(fits_lines, (fitting.float(), fitting[:, :2048], torch.empty(4, 6, dtype=BF16), torch.empty(LINE_ROWS, 16384, dtype=BF16))))
    # of more ranks fewer rows, and short ones: registers must stay free
    assert not fits_lines(fitting, 4) and fits_lines(fitting[:128], 4) and not fits_lines(fitting[:1], 8)
    assert fits_lines(torch.empty(1, 8192, dtype=BF16), 2) and not fits_lines(torch.empty(1, 8192, dtype=BF16), 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("lacks", [None, "memory", "table", "whole lines", "places", "memory here", "table here", "whole lines here", "places here"])
def test_what_one_rank_lacks_none_uses(lacks, monkeypatch):
    group = ProcessGroup(0, 1, open_store(1))
    group.world_size = 2
    group.all_reduce = lambda x: x + x.new_tensor([lacks != name for name in ("memory", "table", "whole lines", "places")])  # of the other
    memory, asked = torch.zeros(buffer_bytes(2, with_table=True), dtype=torch.uint8), []

    def share_memory(rank, world_size, store):
        if lacks == "memory here": raise RuntimeError("no memory")
        return [memory.data_ptr(), memory.data_ptr()]

    def as_tensor(raw, device):
        about = raw.__cuda_array_interface__
        start, (size,) = about["data"][0] - memory.data_ptr(), about["shape"]
        asked.append((start, size))
        part = memory[start : start + size]
        return part.clone() if (lacks, len(asked)) in (("table here", 2), ("places here", 4)) else part

    monkeypatch.setattr(distributed, "share_memory", share_memory)
    monkeypatch.setattr(distributed, "sends_whole_lines", lambda first, world_size: lacks != "whole lines here")
    monkeypatch.setattr(distributed.torch, "as_tensor", as_tensor)
    group.device = SimpleNamespace(index=0)
    tensor = torch.tensor
    monkeypatch.setattr(distributed.torch, "tensor", lambda data, device: tensor(data))
    group.connect_peers()
    what = (lacks or "").removesuffix(" here")
    assert (group.peers is None) == (what == "memory")
    if group.peers is not None:
        assert asked == [(0, buffer_bytes(2)), (buffer_bytes(2), TABLE_BYTES), *[(place_start(2, 0), PLACE_BYTES)] * 2]
        assert (group.scatter_targets((SCATTER_ROWS, 8), FP32) is None) == (what == "places")
        assert (group.columns((2, 3), FP32) is None) == (what == "table") and group.peers.whole_lines == (what != "whole lines")
    group.world_size, group.shared, group.device = 1, None, torch.device("cpu")
    group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_places_of_parts():
    buffer = torch.zeros(buffer_bytes(1), dtype=torch.uint8)
    peers = PeerMemory(0, buffer, torch.tensor([buffer.data_ptr()]))
    largest = peers.place(1, (PLACE_BYTES // 8192, 4096), BF16)
    assert largest.data_ptr() + largest.nbytes == buffer.data_ptr() + len(buffer)
    assert peers.place(0, (PLACE_BYTES // 8192, 4096), FP32) is None and peers.place(0, (0, 4096), BF16) is None
    first = peers.place(0, (3, 8), FP32)
    assert first.data_ptr() + PLACE_BYTES == largest.data_ptr() and first.data_ptr() % 16 == buffer.data_ptr() % 16
    assert peers.holds(first) and peers.holds(largest) and peers.holds(first[:2])
    assert not any(peers.holds(x) for x in (first.clone(), first[1:], first[:, :4], torch.ones(3)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_how_a_group_sums_and_normalises(monkeypatch):
    "Few numbers by a push and the norm, some rows in lines, parts in a place in one kernel, others by an all-reduce"
    monkeypatch.setattr(distributed, "PUSH_NUMBERS", 24)  # the interpreter is slow
    group, norm = ProcessGroup(0, 1, open_store(1)), RMSNorm(8).requires_grad_(False)
    buffer, used = torch.zeros(buffer_bytes(1), dtype=torch.uint8), []
    assert group.place(0, (3, 8), FP32) is None
    group.peers = PeerMemory(0, buffer, torch.tensor([buffer.data_ptr()]))
    group.all_reduce = lambda x: used.append("all_reduce") or x
    for name in ("push_add_norm", "sum_add_norm"):
        monkeypatch.setattr(distributed, name, lambda *args, name=name, fn=getattr(distributed, name): used.append(name) or fn(*args))
    for rows, dtype, placed in [(3, BF16, True), (4, BF16, True), (4, BF16, False), (4, FP32, True), (4, FP32, False), (4, BF16, None)]:
        x, residual = torch.randn(2, rows, 8).to(dtype)
        group.peers.whole_lines = placed is not None
        norm = norm.to(dtype)
        part = group.place(1, (rows, 8), dtype).copy_(x) if placed else x
        for ours, expected in zip(group.add_rms_norm(part, residual, norm), (norm(x + residual), x + residual)):
            torch.testing.assert_close(ours, expected)
    assert used == ["all_reduce", "push_add_norm", "push_add_norm", "sum_add_norm", "all_reduce", "all_reduce"]
    group.peers.whole_lines = True
    assert group.peers.add_rms_norm(torch.ones(4, 8, dtype=BF16), torch.ones(4, 8), norm.weight, 1e-5) is None  # of two dtypes
    group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("whole_lines", [True, False])
def test_a_group_sums_the_splits_that_it_promises_to_sum(whole_lines, monkeypatch):
    "By the kernel of lines, and no other; what it did not promise is summed all the same, by torch in front of an all-reduce"
    monkeypatch.setattr(distributed, "PUSH_NUMBERS", 24)  # the interpreter is slow
    monkeypatch.setattr(distributed, "SCATTER_ROWS", 3)  # the number of splits is no number of rows
    group, buffer, used = ProcessGroup(0, 1, open_store(1)), torch.zeros(buffer_bytes(1), dtype=torch.uint8), []
    start = place_start(1, 0)
    group.peers = PeerMemory(0, buffer, torch.tensor([buffer.data_ptr()]), whole_lines=whole_lines, first_places=[buffer[start : start + PLACE_BYTES]])
    all_reduce, push = group.all_reduce, distributed.push_add_norm
    group.all_reduce = lambda x: used.append(x.dim()) or all_reduce(x)
    group.world_size = 2  # for what the base class decides; the peer memory is of one
    monkeypatch.setattr(distributed, "push_add_norm", lambda part, *args: used.append("lines") or push(part, *args))
    group.peers.all_reduce = lambda x: x
    promises = {}
    for rows, hidden, dtype, in_gaps in [
        (4, 8, BF16, False), (3, 8, BF16, False), (4, 8, FP32, False), (5, 8, FP16, False), (5, 6, BF16, False), (LINE_ROWS + 1, 8, BF16, False), (4, 8, BF16, True),
    ]:
        norm = RMSNorm(hidden, 1e-5).requires_grad_(False).to(dtype)
        parts, whole, residual, weight = split_input(1, rows, 4, rows, hidden, dtype)
        part = parts[0].transpose(0, 1).contiguous().transpose(0, 1) if in_gaps else parts[0]
        norm.weight.copy_(weight)
        promised = promises[rows, hidden, dtype] = group.sums_splits((rows, hidden), dtype)
        for stream in (residual, None):
            used.clear()
            directly = group.peers.add_rms_norm(part, stream, norm.weight, norm.eps)
            assert (directly is not None) == (promised and not in_gaps) == (used == ["lines"])
            used.clear()
            ours = group.add_rms_norm(part, stream, norm)
            assert used == (["lines"] if promised and not in_gaps else [2])
            expected = whole[0] if stream is None else whole[0] + stream
            tolerance = dict(rtol=2 * torch.finfo(dtype).eps, atol=1e-5 if dtype == FP32 else 1e-2)
            torch.testing.assert_close(ours[1], expected, **tolerance)
            torch.testing.assert_close(ours[0], norm(expected), **tolerance)
    assert [key for key, promised in promises.items() if promised] == ([(4, 8, BF16), (5, 8, FP16)] if whole_lines else [])
    # of two dtypes: the promise was about one
    part, residual, norm = torch.ones(4, 4, 8).bfloat16(), torch.ones(4, 8), RMSNorm(8).requires_grad_(False)
    assert group.peers.add_rms_norm(part, residual, norm.weight, 1e-5) is None
    assert torch.equal(group.add_rms_norm(part, residual, norm)[1], torch.full((4, 8), 5.0))
    group.world_size, group.peers = 1, None
    group.close()


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_splits_are_promised_where_their_sum_has_lines(world_size):
    peers = PeerMemory(0, torch.zeros(buffer_bytes(world_size), dtype=torch.uint8), torch.zeros(world_size, dtype=torch.int64))
    for rows in (1, 8, 9, 16, 128, 129, LINE_ROWS, LINE_ROWS + 1):
        for hidden in (100, 102, 1024, 4096, 8192, 16384):
            for dtype in (BF16, FP32):
                whole = torch.empty(rows, hidden, dtype=dtype)
                promised = peers.sums_splits((rows, hidden), dtype)
                assert promised == (fits_lines(whole, world_size) and whole.numel() > PUSH_NUMBERS)
                assert fits_lines(whole.expand(2, rows, hidden).contiguous(), world_size) == fits_lines(whole, world_size)
    assert not fits_lines(torch.empty(4, 2, 64, dtype=BF16).transpose(0, 1)) and not fits_lines(torch.empty(2, 4, 64, dtype=BF16)[..., :32])


@pytest.mark.parametrize("way", ["all_reduce", "add_rms_norm", "norm behind", "pushed", "by owners"])
def test_a_host_does_not_run_far_ahead(way, monkeypatch):
    "At most `MAX_MARKS` marks are open, the oldest is waited for; nothing is marked in a graph, or on a CPU"
    group, issued, capturing = ProcessGroup(0, 1, open_store(1)), [], [False]

    class Stream:
        def record_event(self):
            issued.append(mark := SimpleNamespace(waited=False))
            mark.synchronize = lambda: setattr(mark, "waited", True)
            return mark

    def current_stream(device):
        assert device is group.device
        return Stream()

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    group.peers = SimpleNamespace(
        all_reduce=lambda x: x, push_target=lambda shape, dtype: "a target",
        add_rms_norm=lambda part, residual, weight, eps: None if way == "norm behind" else (part, residual))
    group.world_size = 2
    x, norm = torch.ones(2, 8), RMSNorm(8)
    owned = ScatteredPart([x[:1], x[1:]])
    sum_once = {"all_reduce": lambda: group.all_reduce(x), "by owners": lambda: group.add_rms_norm(owned, x, norm), "pushed": lambda: group.push_target((1, 8), BF16)}.get(way, lambda: group.add_rms_norm(x, x, norm))

    def sum_often(count):
        for _ in range(count // 2 if way == "by owners" else count):  # behind two products: counts twice
            sum_once()
        return [mark.waited for mark in issued]

    assert sum_often(2 * MARK_SUMS) == []  # gloo: the host does the sums itself
    group.device = SimpleNamespace(type="cuda")
    assert sum_often(MARK_SUMS - 2) == [] and sum_often(2) == [False]
    assert sum_often((MAX_MARKS - 1) * MARK_SUMS) == [False] * MAX_MARKS
    assert sum_often(2 * MARK_SUMS) == [True, True] + [False] * MAX_MARKS
    capturing[0] = True
    assert len(sum_often(3 * MARK_SUMS)) == MAX_MARKS + 2
    capturing[0], group.peers.push_target = False, lambda shape, dtype: None
    assert group.push_target((1, 8), BF16) is None and group.num_sums == (MAX_MARKS + 7) * MARK_SUMS  # no target: the sum comes by another way
    group.peers, group.world_size, group.device = None, 1, torch.device("cpu")
    group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_released_sums_with_norms_wait_for_nobody(dtype, monkeypatch):
    monkeypatch.setattr(distributed, "PUSH_NUMBERS", 24)
    buffers = [torch.zeros(buffer_bytes(2), dtype=torch.uint8) for _ in range(2)]
    peers = PeerMemory(0, buffers[0], torch.tensor([buffer.data_ptr() for buffer in buffers]))
    done, residual = threading.Event(), torch.ones(140, 4, dtype=dtype)

    def twice():
        for which in (0, 1):
            assert peers.add_rms_norm(peers.place(which, (140, 4), dtype), residual, torch.ones(4, dtype=dtype), 1e-5) is not None
        done.set()

    wait_until_released(twice, peers, done)


def wait_until_released(fn, peers, done):
    thread = threading.Thread(target=fn, daemon=True)
    thread.start()
    assert not done.wait(0.5)  # rank 1 never comes
    peers.release()
    assert done.wait(30)
    thread.join()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_released_owners_wait_for_nobody():
    buffers, start = [torch.zeros(buffer_bytes(2), dtype=torch.uint8) for _ in range(2)], place_start(2, 0)
    places = [buffer[start : start + PLACE_BYTES] for buffer in buffers]
    peers = PeerMemory(0, buffers[0], torch.tensor([buffer.data_ptr() for buffer in buffers]), first_places=places)
    done, stream = threading.Event(), torch.ones(9, 4)

    def twice():
        for _ in range(2):
            part = ScatteredPart(peers.scatter_targets((9, 4), FP32))
            assert len(peers.add_rms_norm(part, stream, torch.ones(4), 1e-5)[1]) == 5
        done.set()

    wait_until_released(twice, peers, done)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_tokens_are_told_through_peer_memory():
    tokens = torch.tensor([151_935, -1, 0, 2**40 + 3])
    buffers = [torch.zeros(buffer_bytes(2), dtype=torch.uint8) for _ in range(2)]
    peers = PeerMemory(1, buffers[1], torch.tensor([buffer.data_ptr() for buffer in buffers]))
    peers.words.view(2, 2, PUSH_NUMBERS)[1, 0, :8] = (tokens.view(torch.int32).long() & 0xFFFFFFFF) | 1 << 32  # by rank 0
    assert torch.equal(peers.broadcast(torch.zeros_like(tokens), 0), tokens)
    sent = torch.frombuffer(buffers[0].numpy(), dtype=torch.int64, offset=region_bytes(2)).view(-1)
    assert (sent[: 4 * PUSH_NUMBERS].view(2, 2, -1)[1, 1, :8] == 1 << 32).all()  # this rank's word, to which nobody listens


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("numel", [5, 40_000])
def test_released_kernels_wait_for_nobody(numel):
    buffers = [torch.zeros(buffer_bytes(2), dtype=torch.uint8) for _ in range(2)]
    peers = PeerMemory(0, buffers[0], torch.tensor([buffer.data_ptr() for buffer in buffers]))
    assert (numel <= PUSH_NUMBERS) == (numel == 5)  # each by another kernel
    done, x = threading.Event(), torch.ones(numel)
    thread = threading.Thread(target=lambda: (peers.all_reduce(x), peers.all_reduce(x), done.set()))
    thread.start()
    assert not done.wait(1)  # rank 1 never comes
    peers.release()
    assert done.wait(30)
    thread.join()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_a_rank_may_push_one_sum_ahead():
    buffers, sums = [torch.zeros(buffer_bytes(2), dtype=torch.uint8) for _ in range(2)], []
    peers = PeerMemory(0, buffers[0], torch.tensor([buffer.data_ptr() for buffer in buffers]))
    for call, x in ((1, 10.0), (2, 20.0)):  # all that rank 1 pushes, before this rank has begun
        bits = torch.full((5,), x).view(torch.int32).long()
        peers.words.view(2, 2, PUSH_NUMBERS)[call % 2, 1, :5] = bits | call << 32
    thread = threading.Thread(target=lambda: sums.extend(peers.all_reduce(torch.full((5,), x))[0].item() for x in (1.0, 2.0)))
    thread.start()
    thread.join(30)
    peers.release()
    assert sums == [11.0, 22.0]


def test_a_group_that_is_closed_while_it_is_aborted():
    "Another thread aborts: the end waits for it, and nothing is aborted twice, or after the end"
    events, go_on = [], threading.Event()

    class Backend:
        def abort(self):
            go_on.wait(10)
            events.append("aborted")

    group = ProcessGroup(0, 1, open_store(1))
    group.close()
    group.backend, group.device = Backend(), torch.device("cuda")
    group.peers = SimpleNamespace(release=lambda: (time.sleep(0.2), events.append("released")))
    watching = threading.Thread(target=group.abort)
    watching.start()
    time.sleep(0.05)  # it is in the middle of `release`
    threading.Timer(0.4, go_on.set).start()
    group.close()
    assert events == ["released", "aborted"] and group.peers is None
    group.abort()
    group.close()
    watching.join()
    group.aborting.join()
    assert events == ["released", "aborted"]


def test_waits_are_ended_again_unless_the_group_is_left(monkeypatch):
    "What a rank that is killed, too, had on its way may have undone the first time"
    released, timers = [], []

    class Timer:
        def __init__(self, seconds, fn):
            timers.append((seconds, fn))

        start = lambda self: None

    monkeypatch.setattr(threading, "Timer", Timer)
    group = ProcessGroup(0, 1, open_store(1))
    group.close()
    group.backend, group.device = SimpleNamespace(abort=lambda: None), torch.device("cuda")
    group.peers = SimpleNamespace(release=lambda: released.append(len(timers)))
    group.abort()
    assert released == [0] and 0 < timers[0][0] < timers[1][0]
    timers[0][1]()
    assert released == [0, 2]
    group.close()
    timers[1][1]()
    assert released == [0, 2]


def test_groups_leave_the_default_group_and_the_threads_alone(ranks):
    assert not torch.distributed.is_initialized()
    before = torch.get_num_threads()
    alone = ProcessGroup(0, 1, open_store(1))
    alone.close()
    alone.close()
    assert torch.get_num_threads() == before


def test_a_partner_that_ends_before_it_is_met(ranks):
    def check():
        raise RuntimeError("rank 1 has ended")

    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        ProcessGroup(0, 2, open_store(2), check=check)


def test_environment_is_given_back(monkeypatch):
    monkeypatch.setenv("MINIVLLM_A", "mine")
    with environment(MINIVLLM_A="theirs", MINIVLLM_B="1"):
        assert (os.environ["MINIVLLM_A"], os.environ["MINIVLLM_B"]) == ("mine", "1")
    assert os.environ["MINIVLLM_A"] == "mine" and "MINIVLLM_B" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "failed"])
def test_a_rank_that_ends_while_rank_0_waits_inside_gloo(how):
    ranks = Ranks(3)
    start = time.monotonic()
    if how == "killed":
        threading.Timer(0.5, lambda: os.kill(ranks.workers.processes[0].pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerError, match="rank 1 was killed"):
            ranks.run("wait_for_nobody", 100)
    else:
        with pytest.raises(WorkerError, match="(?s)rank 2 failed.*a mistake"):
            ranks.run("fail_on", 2)
    ranks.close()
    assert time.monotonic() - start < 10


class FakeDriver(ModuleType):
    "Stands in for the CUDA driver, of which another process's memory has the handle hhh..."

    CUipcMem_flags, CUipcMemHandle = SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1), SimpleNamespace

    def __init__(self, error=0):
        super().__init__("cuda.bindings.driver")
        self.error, self.calls = error, []

    def cuMemAlloc(self, nbytes):
        return self.error, 4096

    def cuMemsetD8(self, address, value, nbytes):
        self.calls.append(("set", address, value, nbytes))
        return 0,

    def cuIpcGetMemHandle(self, address):
        return 0, SimpleNamespace(reserved=b"o" * 64)

    def cuIpcOpenMemHandle(self, handle, flags):
        assert handle.reserved == b"h" * 64 and flags == 1
        return 0, 8192

    def cuMemFree(self, address):
        self.calls.append(("free", address))
        return 0,

    def cuIpcCloseMemHandle(self, address):
        self.calls.append(("close", address))
        return 0,


@pytest.fixture
def driver(monkeypatch):
    def install(driver):
        package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
        package.bindings, bindings.driver = bindings, driver
        for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.driver", driver)):
            monkeypatch.setitem(sys.modules, name, module)
        return driver
    return install


def test_memory_is_offered_found_and_given_back(driver):
    fake, store = driver(FakeDriver()), open_store(2)
    store.set("memory of rank 0", b"h" * 64)
    addresses = share_memory(1, 2, store)
    assert addresses == [8192, 4096] and store.get("memory of rank 1") == b"o" * 64
    leave_memory(1, addresses)
    assert fake.calls == [("set", 4096, 0, buffer_bytes(2)), ("close", 8192), ("free", 4096)]
    assert buffer_bytes(2, with_table=True) == buffer_bytes(2) + TABLE_BYTES  # the root has the table behind the rest


def test_lines_are_for_gpus_whose_atomics_reach_each_other(driver):
    fake, linked = driver(FakeDriver()), {(2, 3), (3, 2), (2, 4), (4, 2), (3, 4)}
    fake.CUdevice_P2PAttribute = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=3)
    fake.cuDeviceGetP2PAttribute = lambda attribute, a, b: (0, int(attribute == 3 and (a, b) in linked))
    assert sends_whole_lines(2, 2) and not sends_whole_lines(2, 3)


class OutOfMemory(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


def test_who_has_no_memory_says_so_before_it_fails(driver):
    driver(FakeDriver(OutOfMemory(2)))
    store = open_store(2)
    with pytest.raises(RuntimeError, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"):
        share_memory(0, 2, store)
    assert store.get("memory of rank 0") == b""
    fake = driver(FakeDriver())
    with pytest.raises(RuntimeError, match="rank 0 has no memory to share"):
        share_memory(1, 2, store)
    assert fake.calls[-1] == ("free", 4096)  # what it had made itself
    # one of two others can't be reached: what was found by then is given back, too
    store, fake = open_store(3), driver(FakeDriver())
    store.set("memory of rank 0", b"h" * 64)
    store.set("memory of rank 1", b"h" * 64)
    reached = iter([(0, 8192), (OutOfMemory(2), None)])
    fake.cuIpcOpenMemHandle = lambda handle, flags: next(reached)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        share_memory(2, 3, store)
    assert fake.calls[1:] == [("close", 8192), ("free", 4096)]
    # nor is it kept when it can't be made known
    store, fake = open_store(2), driver(FakeDriver())
    fake.cuIpcGetMemHandle = lambda address: (OutOfMemory(2), None)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        share_memory(0, 2, store)
    assert store.get("memory of rank 0") == b"" and fake.calls[-1] == ("free", 4096)


def test_without_the_driver_others_are_told(monkeypatch):
    for name in ("cuda", "cuda.bindings"):  # the second, too: somebody may have imported it by now
        monkeypatch.setitem(sys.modules, name, None)
    store = open_store(2)
    with pytest.raises(ImportError):
        share_memory(0, 2, store)
    assert store.get("memory of rank 0") == b""
