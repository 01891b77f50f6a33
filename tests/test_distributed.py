"Groups and collectives: what each rank gets, and that a failing rank never leaves the others waiting"
import threading
import time

import pytest
import torch

from minivllm.distributed import SINGLE, PretendGroup, TensorParallelGroup, divide, run_ranks


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
