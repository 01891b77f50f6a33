"Prefill for Hopper: its plan in the interpreter, its barriers in a simulation, the kernel itself where there is such a GPU"
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import minivllm.kernels.prefill_hopper as module
from minivllm.kernels.prefill import paged_prefill_torch
from minivllm.kernels.prefill_hopper import BLOCK_M, fits_hopper, is_hopper, paged_prefill, paged_prefill_hopper, plan_prefill
from paging import DEVICES, KERNEL_DEVICES, paged_batch

ROOT = Path(__file__).parents[1]
HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda", 0))
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of generation 9.0")


# The plan: plain Triton


def expected_plan(query_lens, context_lens):
    "(request, first row of q, its position, keys to see) of every tile"
    tiles, row = [], 0
    for seq, (num_queries, context_len) in enumerate(zip(query_lens, context_lens)):
        for start in range(0, num_queries, BLOCK_M):
            position = context_len - num_queries + start
            tiles.append([seq, row + start, position, min(position + BLOCK_M, context_len)])
        row += num_queries
    return tiles


def plan_of(query_lens, context_lens, device, padded=0):
    cu_seqlens_q = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    context_lens = torch.tensor(context_lens, device=device, dtype=torch.int32)
    return plan_prefill(cu_seqlens_q, context_lens, sum(query_lens) + padded).tolist()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("query_lens, context_lens", [
    ([1], [1]), ([128], [128]), ([129], [1000]), ([127, 128, 129, 1], [127, 600, 129, 5]), ([1] * 9, list(range(1, 10))),
    ([0, 5, 0, 300, 0], [0, 5, 7, 300, 0]), ([300 * 128], [300 * 128]),
])
def test_plan(query_lens, context_lens, device):
    plan, expected = plan_of(query_lens, context_lens, device), expected_plan(query_lens, context_lens)
    assert plan[: len(expected)] == expected
    assert len(plan) <= sum(query_lens) // BLOCK_M + len(query_lens)
    assert all(keys == 0 for _, _, _, keys in plan[len(expected) :])


def test_plan_of_a_padded_step():
    plan = plan_of([130, 2], [130, 9], KERNEL_DEVICES[0], padded=1000)
    assert [row for row in plan if row[3]] == expected_plan([130, 2], [130, 9])


# Who is chosen


@pytest.mark.parametrize("device", DEVICES)
def test_without_such_a_gpu_it_is_never_chosen(device):
    q, k_cache = torch.empty(3, 4, 128, device=device, dtype=torch.bfloat16), torch.empty(2, 16, 2, 128, device=device)
    assert fits_hopper(q, k_cache) == (HOPPER and device == "cuda")


def test_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(module, "is_hopper", lambda device: True)

    def fits(head_dim=128, block_size=64, dtype=torch.bfloat16):
        q, k_cache = torch.empty(3, 4, head_dim, dtype=dtype), torch.empty(2, block_size, 2, head_dim, dtype=dtype)
        return fits_hopper(q, k_cache)

    assert fits() and fits(head_dim=64) and fits(dtype=torch.float16) and all(fits(block_size=n) for n in (16, 48, 256))
    assert not any((fits(head_dim=80), fits(head_dim=256), fits(dtype=torch.float32), fits(block_size=8), fits(block_size=40)))
    q, k_cache = torch.empty(3, 4, 128, dtype=torch.bfloat16), torch.empty(2, 2, 64, 128, dtype=torch.bfloat16)
    assert not fits_hopper(q, k_cache.transpose(1, 2))


@pytest.mark.parametrize("hopper, launch, expected", [(True, True, "hopper"), (False, True, "triton"), (False, False, "torch")])
def test_dispatcher(hopper, launch, expected, monkeypatch):
    for kind in ("hopper", "triton", "torch"):
        monkeypatch.setattr(module, f"paged_prefill_{kind}", lambda *args, kind=kind: (kind, len(args)))
    monkeypatch.setattr(module, "fits_hopper", lambda q, k_cache: hopper)
    monkeypatch.setattr(module, "can_launch", lambda device: launch)
    kind, count = paged_prefill(torch.empty(1), *range(6))
    assert (kind, count) == (expected, 8 if hopper else 7)


# Imports


def run(script, **env):
    outside = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment = outside | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("missing", ["triton", "triton.experimental", "triton.experimental.gluon.nvidia.hopper"])
def test_imports_without(missing):
    run(f"""
import sys
import torch
if {missing!r} != "triton":
    import minivllm.kernels.common  # for Triton needs its own folder whole
    import triton
sys.modules[{missing!r}] = None
from minivllm.kernels.prefill_hopper import fits_hopper, is_hopper, paged_prefill
assert not is_hopper(torch.device("cuda", 0)) and not torch.cuda.is_initialized()
x = torch.ones(1, 16, 2, 64)
out = paged_prefill(x[0, :3], x, x, torch.tensor([[0]]), torch.tensor([0, 3]), torch.tensor([3]), 0.125)
assert out.eq(1).all()
""")


def test_imports_for_compiling():
    run("import minivllm.kernels.prefill_hopper as m; assert type(m.consume).__name__ == type(m.produce).__name__ == 'GluonJITFunction'", TRITON_INTERPRET="0")


# The protocol of the barriers


class Barrier:
    "Counts arrivals; the phase turns when all have come"

    def __init__(self, arrivals):
        self.arrivals, self.missing, self.turns = arrivals, arrivals, 0

    def arrive(self):
        self.missing -= 1
        if self.missing == 0:
            self.missing, self.turns = self.arrivals, self.turns + 1

    def passed(self, phase):
        "A wait for this phase ends when the current one is another"
        return self.turns & 1 != phase


def producer(num_tiles, k, v, stages, log):
    "As `produce`: keys a tile ahead of values"
    def copy(ring, tile):
        stage = tile % stages
        yield ring[1][stage], tile // stages & 1 ^ 1
        log.append(("copy", ring[2], tile))
        ring[0][stage].arrive()  # the copy engine, some time later: here at once

    yield from copy(k, 0)
    for tile in range(1, num_tiles):
        yield from copy(k, tile)
        yield from copy(v, tile - 1)
    yield from copy(v, num_tiles - 1)


def consumer(mine, num_tiles, k, v, stages, log):
    "As `consume` with `attend_overlapped`: scores of a tile, then the values before; what it needn't see it only hands back"
    def take(ring, tile):
        yield ring[0][tile % stages], tile // stages & 1
        log.append(("use", ring[2], tile))

    if mine:
        yield from take(k, 0)
        k[1][0].arrive()
        for tile in range(1, mine):
            yield from take(k, tile)
            yield from take(v, tile - 1)
            k[1][tile % stages].arrive()
            v[1][(tile - 1) % stages].arrive()
        yield from take(v, mine - 1)
        v[1][(mine - 1) % stages].arrive()
    for tile in range(mine, num_tiles):
        for ring in (k, v):
            yield from take(ring, tile)
            ring[1][tile % stages].arrive()


def simulate(mine, num_tiles, stages, order):
    "Runs the three until all are done; they are asked in the order given, again and again"
    rings = [([Barrier(1) for _ in range(stages)], [Barrier(2) for _ in range(stages)], name) for name in "kv"]
    log = []
    programs = [producer(num_tiles, *rings, stages, log), *(consumer(n, num_tiles, *rings, stages, log) for n in mine)]
    waits = [next(p, None) for p in programs]
    for _ in range(20 * num_tiles + 20):
        for i in order:
            while waits[i] and waits[i][0].passed(waits[i][1]):
                waits[i] = next(programs[i], None)
        if not any(waits):
            return log
    raise AssertionError(f"nobody gets on: {mine} of {num_tiles} tiles")


@pytest.mark.parametrize("stages", [2, 3])
def test_barriers(stages):
    for num_tiles, order in itertools.product(range(1, 7), itertools.permutations(range(3))):
        for mine in itertools.product({num_tiles, num_tiles - 1, 0}, repeat=2):
            log = simulate(mine, num_tiles, stages, order)
            for name, tile in itertools.product("kv", range(num_tiles)):
                assert log.count(("copy", name, tile)) == 1 and log.count(("use", name, tile)) == 2
                if tile >= stages:  # its place is free only when both have used what stood there
                    before = [i for i, entry in enumerate(log) if entry == ("use", name, tile - stages)]
                    assert log.index(("copy", name, tile)) > max(before)


def test_barriers_that_wait_for_one_consumer_alone_fail(monkeypatch):
    monkeypatch.setitem(globals(), "Barrier", lambda arrivals, real=Barrier: real(1))
    with pytest.raises(AssertionError):
        test_barriers(2)


# The kernel, on the GPU

RAGGED = [(1, 1), (127, 127), (128, 128), (129, 129), (300, 300), (64, 64), (65, 700), (200, 333), (5, 1000), (257, 513),
          (130, 258), (1, 257), (100, 1124), (640, 640), (63, 63), (192, 320)]
MANY = [(37 * i % 401 + 1, 37 * i % 401 + 1 + 53 * i % 300 * (i % 3 == 0)) for i in range(90)]
CASES = {
    "grouped heads": (torch.bfloat16, (32, 8, 128), RAGGED, False),
    "packed qkv, 9 and 3 heads": (torch.bfloat16, (9, 3, 128), RAGGED[::-1], True),
    "fp16, head_dim 64": (torch.float16, (9, 3, 64), RAGGED, True),
    "bf16, head_dim 64": (torch.bfloat16, (16, 2, 64), RAGGED, False),
    "one query": (torch.bfloat16, (32, 8, 128), [(1, 1)], False),
    "decodes": (torch.bfloat16, (32, 8, 128), [(1, n) for n in (1, 16, 17, 127, 128, 129, 900)], False),
    "many": (torch.bfloat16, (32, 8, 128), MANY, False),
}
RUNS = [  # each kind of heads and each size of pages is compiled
    *(("grouped heads", block_size, True) for block_size in (16, 32, 48, 64, 128, 256)),
    *(("grouped heads", block_size, False) for block_size in (16, 128)),
    *((case, block_size, True) for case in list(CASES)[1:] for block_size in (16, 64)),
]


def hopper_batch(dtype, heads, lens, packed, block_size):
    "On the GPU, with NaN wherever no request's keys or values lie; the tables end exactly at the longest request"
    torch.manual_seed(0)
    batch, plain = paged_batch(*zip(*lens), block_size, heads, device="cuda", dtype=dtype)
    if packed:
        q = torch.randn(len(batch[0]), heads[0] + 2 * heads[1], heads[2], device="cuda").to(dtype)
        batch = (q[:, : heads[0]], *batch[1:])
    return batch, plain


def relative_errors(out, batch, lens, plain, scale):
    "Of each request, against float32 on its plain keys and values"
    errors = []
    for part, q, (n, context_len), (k, v) in zip(out.split([n for n, _ in lens]), batch[0].split([n for n, _ in lens]), lens, plain):
        group = q.shape[1] // k.shape[1]
        k, v = (t.float().repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
        position = torch.arange(context_len - n, context_len, device=q.device)[:, None]
        scores.masked_fill_(torch.arange(context_len, device=q.device) > position, -torch.inf)
        exact = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        errors.append(((part.float() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).max().item())  # per query
    return errors


@on_hopper
@pytest.mark.parametrize("case, block_size, overlap", RUNS)
def test_kernel(case, block_size, overlap):
    dtype, heads, lens, packed = CASES[case]
    scale = heads[2] ** -0.5
    batch, plain = hopper_batch(*CASES[case], block_size)
    allow, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    out = paged_prefill_hopper(*batch, scale, overlap=overlap)
    errors = relative_errors(out, batch, lens, plain, scale)
    torch.backends.cuda.matmul.allow_tf32 = allow
    assert out.dtype == dtype and max(errors) < (2e-2 if dtype == torch.bfloat16 else 3e-3), errors
    for _ in range(3):
        assert torch.equal(paged_prefill_hopper(*batch, scale, overlap=overlap), out)


@on_hopper
def test_one_plan_serves_all_layers_and_graphs():
    batch, _ = hopper_batch(*CASES["many"], 64)
    expected = paged_prefill_hopper(*batch, 0.1)
    plan = plan_prefill(*batch[4:], len(batch[0]))
    assert torch.equal(paged_prefill(*batch, 0.1, plan), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_prefill(*batch, 0.1)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@on_hopper
def test_agrees_with_the_twin():
    batch, _ = hopper_batch(*CASES["grouped heads"], 64)
    difference = paged_prefill(*batch, 0.1).float() - paged_prefill_torch(*batch, 0.1).float()
    assert difference.abs().max() < 0.1  # the twin rounds its scores


@on_hopper
def test_no_tokens():
    batch, _ = hopper_batch(*CASES["one query"], 64)
    assert paged_prefill(batch[0][:0], *batch[1:], 0.1).shape == (0, 32, 128)
