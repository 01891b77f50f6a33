"The decode kernels (interpreted, or on a GPU) against their twin and a float64 reference"
import itertools

import numpy as np
import pytest
import torch

import minivllm.kernels.decode as decode_module
from minivllm.kernels.common import tl, triton
from minivllm.kernels.decode import SharedPrefixes, add_hints, add_stage, divide_work, find_shared_prefixes, paged_decode_torch
from minivllm.kernels.decode import paged_decode_triton, shared_decode_torch
from minivllm.kernels.prefill import paged_prefill_triton

from paging import paged_batch, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernels are interpreted
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def batch_of(lens, block_size, heads, shared=0, dtype=torch.float32, seed=0):
    "Arguments of a decode, and the float64 result: zeros for padding rows"
    torch.manual_seed(seed)
    (q, k_cache, v_cache, tables, _, context_lens), plain = paged_batch([1] * len(lens), lens, block_size, heads, shared, device=DEVICE, dtype=dtype)
    exact = torch.zeros(q.shape, dtype=torch.float64, device=DEVICE)
    kept = [row for row, n in enumerate(lens) if n]
    if kept:
        exact[kept] = reference(q[kept], [1] * len(kept), [plain[row] for row in kept], heads[2] ** -0.5)
    return (q, k_cache, v_cache, tables, context_lens, heads[2] ** -0.5), exact


def find(args, num_tiles):
    found = find_shared_prefixes(args[3].cpu().numpy(), args[4].cpu().numpy(), args[1].shape[1], num_tiles)
    return found and SharedPrefixes(*(torch.from_numpy(array).to(DEVICE) for array in found))


@pytest.mark.parametrize("lens, block_size, heads", [
    ([1], 16, (4, 4, 16)),
    ([15, 16, 17, 0, 31, 32, 33], 16, (4, 2, 16)),
    ([63, 64, 65, 130], 64, (9, 3, 64)),
    ([300, 1, 0, 0, 5], 16, (8, 1, 16)),
    ([7, 2], 1, (2, 1, 16)),
    ([129, 70], 128, (14, 2, 80)),
    ([0, 0], 16, (4, 2, 16)),
])
def test_awkward_shapes(lens, block_size, heads):
    args, exact = batch_of(lens, block_size, heads)
    assert (paged_decode_triton(*args).double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_half_precision_and_descriptors(dtype, capability, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(decode_module, "capability_of", lambda device: capability)
    args, exact = batch_of([70, 0, 128, 1], 64, (4, 2, 64), dtype=dtype)
    out = paged_decode_triton(*args)
    assert out.dtype == dtype and (out.double() - exact).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("lens", [[65, 3, 0, 200], [200], [0]])
@pytest.mark.parametrize("num_programs", [1, 2, 3, 7, 40])
def test_any_number_of_programs(lens, num_programs):
    "From one program for everything to more than there are tiles; the counters are zero again"
    args, exact = batch_of(lens, 16, (4, 2, 16))
    arrived = torch.zeros(len(lens) * 2, dtype=torch.int32, device=DEVICE)
    config = decode_module.decode_config(len(lens), 2, 16, 16, 4, (8, 0), 4)._replace(programs=num_programs)
    out = paged_decode_triton(*args, arrived=arrived, config=config)
    assert (out.double() - exact).abs().max() < 1e-5
    assert arrived.eq(0).all()
    assert torch.equal(paged_decode_triton(*args, arrived=arrived, config=config), out)


@triton.jit
def share_kernel(lens_ptr, starts_ptr, found_ptr, num_seqs, TILE: tl.constexpr, SEQS: tl.constexpr, SHARED: tl.constexpr):
    "What `divide_work` tells each program"
    program = tl.program_id(0)
    found = divide_work(lens_ptr, starts_ptr, num_seqs, program, tl.num_programs(0), TILE, SEQS, SHARED)
    for i in tl.static_range(5):
        tl.store(found_ptr + program * 5 + i, found[i])


@pytest.mark.parametrize("num_programs", [1, 2, 3, 7, 16, 40])
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 1000])
def test_a_single_sequence_is_divided_as_a_batch_is(length, num_programs):
    "By scalars, and by sums over a batch of which the rest is padding; behind a shared prefix too"
    for start in (None, 0, 64):
        begin = start or 0
        lens, starts = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (begin + length, begin))
        found = {}
        for seqs in (1, 2, 32):
            found[seqs] = torch.full((num_programs, 5), -1, dtype=torch.int32, device=DEVICE)
            share_kernel[(num_programs,)](lens, starts, found[seqs], 1, TILE=64, SEQS=seqs, SHARED=start is not None)
            found[seqs][:, 0].clamp_(max=1)  # of a program without work: any sequence that there isn't
        assert torch.equal(found[1], found[2]) and torch.equal(found[1], found[32])
        skip, position, stop = found[1][:, 1:4].T
        tiles = [t for a, b in zip(position.tolist(), stop.tolist()) for t in range(a, b)]
        assert torch.equal(skip[position < stop], position[position < stop])
        assert tiles == list(range(max(1, -(-length // 64))))


def test_no_requests_and_a_slice_of_packed_queries():
    args, exact = batch_of([5, 20], 16, (4, 2, 16))
    packed = torch.cat((args[0], torch.full((2, 3, 16), torch.nan, device=DEVICE)), 1)[:, :4]
    assert (paged_decode_triton(packed, *args[1:]).double() - exact).abs().max() < 1e-5
    nothing = paged_decode_triton(args[0][:0], *args[1:3], args[3][:0], args[4][:0], 1.0)
    assert nothing.shape == (0, 4, 16)


@pytest.mark.parametrize("lens, shared, dtype", [
    ([33, 60, 0, 40, 34, 5], 2, torch.float32),
    ([33, 60, 0, 40, 34, 5], 2, torch.bfloat16),
    ([17] * 3 + [16], 1, torch.float32),  # the last one can't share its only block
])
def test_shared_prefixes(lens, shared, dtype):
    args, exact = batch_of(lens, 16, (4, 2, 16), shared, dtype)
    prefixes = find(args, 2)
    assert prefixes.starts.sum() > 0
    arrived = torch.zeros(len(lens) * 2, dtype=torch.int32, device=DEVICE)
    for out in (paged_decode_triton(*args, prefixes, arrived), shared_decode_torch(*args, prefixes)):
        assert (out.double() - exact).abs().max() < TOLERANCE[dtype]
    assert arrived.eq(0).all()


def test_more_rows_than_a_tile(monkeypatch):
    monkeypatch.setattr(decode_module, "TILE_ROWS", 16)
    args, exact = batch_of([20 + i for i in range(20)], 16, (2, 2, 16), 1)
    prefixes = find(args, 4)
    assert prefixes.lens.tolist() == [16, 16, 0, 0]
    assert (paged_decode_triton(*args, prefixes).double() - exact).abs().max() < 1e-5


def brute_force_saving(tables, own):
    "The most block reads that one group with the same first block can save"
    best = 0
    for size in range(2, len(tables) + 1):
        for group in itertools.combinations(range(len(tables)), size):
            common = 0
            while common < min(own[i] for i in group) and len({tables[i][common] for i in group}) == 1:
                common += 1
            best = max(best, (size - 1) * common)
    return best


def test_find_shared_prefixes():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, block_size = int(rng.integers(1, 6)), 4
        tables, lens = np.zeros((n, 5), dtype=np.int32), rng.integers(0, 21, n).astype(np.int32)
        for row in range(n):  # blocks are equal only behind equal blocks, as in a prefix cache
            path = 0
            for column in range(5):
                path = path * 3 + int(rng.integers(1, 3))
                tables[row, column] = path
        found = find_shared_prefixes(tables, lens, block_size, 3)
        if found is None:
            assert brute_force_saving(tables.tolist(), ((lens - 1) // block_size).tolist()) == 0
            continue
        rows, shared, starts = found
        members = [row[row >= 0].tolist() for row in rows]
        assert sorted(sum(members, [])) == np.flatnonzero(starts).tolist()  # nobody twice, nobody forgotten
        for group, num_tokens in zip(members, shared.tolist()):
            assert bool(group) == bool(num_tokens) and len(group) != 1
            for seq in group:
                assert starts[seq] == num_tokens < lens[seq]
                assert (tables[seq][: num_tokens // block_size] == tables[group[0]][: num_tokens // block_size]).all()
        for first in set(tables[:, 0]):
            same = np.flatnonzero((tables[:, 0] == first) & (lens > 0))
            saved = sum((len(g) - 1) * t // block_size for g, t in zip(members, shared.tolist()) if g and g[0] in same)
            assert saved == brute_force_saving(tables[same].tolist(), ((lens[same] - 1) // block_size).tolist())


PTX = """.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .align 64 .b8 k_param_1[128],
	.param .align 64 .b8 k_param_2[128]
)
{
// %bb.0:
	} // policy of fetches, version 1: %rd7
	@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
	@%p1 cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3, %r4}], [%r4];
	cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r2, %r3}], [%r1];
"""


def test_hints_go_where_they_belong():
    "Into each copy to shared memory, not into stores; behind the kernel's first line; once; and not into other kernels"
    lines, hinted = PTX.splitlines(), add_hints(PTX)
    got = hinted.splitlines()
    for before, after in zip(lines[-3:-1], got[-3:-1]):
        assert after == before.replace("::bytes [", "::bytes.L2::cache_hint [").replace(";", ", %rd7;")
    assert got[-1] == lines[-1]
    first = got.index("// %bb.0:")
    assert ["k_param_1" in got[first + 1], "k_param_2" in got[first + 2]] == [True, True]
    assert hinted.count("prefetch.tensormap") == 2
    assert add_hints(hinted) == hinted
    other = PTX.replace("policy of fetches", "policy")
    assert add_hints(other) == other


def test_the_hook_of_somebody_else_is_still_asked():
    "Both ways in which versions of Triton call it"
    seen = "// seen\n"

    def theirs(backend=None, stages=None, *options):
        if stages is None:
            return "key", "tag"
        stages["ptx"] = lambda src, metadata: src + seen

    for hook in (theirs, None):
        look, stages = add_stage(hook), {"ptx": lambda src, metadata: src + metadata}
        key, tag = look()
        assert "add_hints" in key and "add_hints" in tag and (key.endswith("key"), tag.endswith("tag")) == (hook is not None,) * 2
        look("backend", stages, "options", "language", 90)
        assert stages["ptx"](PTX, "") == add_hints(PTX) + (seen if hook else "")
    stages = {"amdgcn": None}  # there is no PTX for other makers' GPUs
    add_stage(None)("backend", stages=stages, options="options", language="language", capability=None)
    assert stages == {"amdgcn": None}


def test_a_module_that_is_loaded_again_leaves_one_hook(monkeypatch):
    "And code of `add_hints` that has changed makes other kernels"
    once = add_stage(None)
    twice = add_stage(add_stage(once))
    assert twice() == once() and twice.before is None
    monkeypatch.setattr(decode_module, "COPY", "something else")
    assert add_stage(None)() != once()


@pytest.fixture
def launches(monkeypatch):
    "Grid, numbers and options of what would be launched"
    recorded = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, **options: recorded.append((grid, [a for a in args if not isinstance(a, torch.Tensor)], options))

    monkeypatch.setattr(decode_module, "paged_decode_kernel", Recorded())
    return recorded


def test_only_a_single_sequence_goes_without_sums(launches):
    for count in (1, 2, 8, 33):
        args, _ = batch_of([5] * count, 16, (4, 2, 16))
        paged_decode_triton(*args)
    assert [options["SEQS"] for _, _, options in launches] == [1, 32, 32, 256]


def test_programs_an_sm():
    "On an H200 with 8 KV heads: one for up to eight sequences, then two, four for a large batch"
    chosen = {n: decode_module.decode_config(n, 8, 128, 128, 2, (9, 0), 132) for n in (1, 2, 3, 8, 9, 63, 64)}
    assert [config.programs for config in chosen.values()] == [16, 16, 16, 16, 33, 33, 66]
    assert chosen[1] == chosen[8] and chosen[9].tile == 128
    # pages that the copy engine can't fetch need more programs with loads on the way
    assert [decode_module.decode_config(n, 8, 128, 16, 2, (9, 0), 132).programs for n in (1, 2, 3, 8)] == [16, 16, 33, 33]
    # and so do heads that it can't fetch
    assert [decode_module.decode_config(n, 8, 96, 128, 2, (9, 0), 132).programs for n in (1, 2, 8, 64)] == [16, 66, 66, 66]


def test_an_sm_is_asked_for_no_more_shared_memory_than_its_programs_need(monkeypatch):
    asked = []
    monkeypatch.setattr(decode_module, "num_sms", lambda device: 4)
    monkeypatch.setattr(decode_module, "reserve_shared", lambda kernel, num_programs: asked.append(num_programs))
    args, _ = batch_of([5], 16, (4, 2, 16))
    for programs in (1, 2, 3, 4, 5):  # for each of two KV heads
        config = decode_module.decode_config(1, 2, 16, 16, 4, (8, 0), 4)._replace(programs=programs)
        paged_decode_triton(*args, config=config)
    assert asked == [1, 1, 2, 2, 3]


def test_launches_know_nothing_of_the_lengths(launches):
    "The grid and every number of a launch are the same for all lengths: what a CUDA graph records is right for every step"
    for lens in ([1, 1, 1], [60, 0, 7], [64, 64, 64]):
        args, _ = batch_of(lens, 16, (4, 2, 16))
        tables = torch.zeros(3, 8, dtype=torch.int32, device=DEVICE)
        paged_decode_triton(*args[:3], tables, *args[4:])
    assert launches[0] == launches[1] == launches[2]


@pytest.mark.parametrize("launch", ["decode", "prefill"])
def test_what_a_kernel_would_read_from_the_wrong_place_is_refused_or_put_right(launch):
    args, _ = batch_of([5, 9, 3], 16, (4, 2, 16))
    q, k_cache, v_cache, tables, lens, scale = args
    call = {
        "decode": lambda q, k, v: paged_decode_triton(q, k, v, tables, lens, scale),
        "prefill": lambda q, k, v: paged_prefill_triton(q, k, v, tables, torch.arange(4, dtype=torch.int32, device=q.device), lens, scale),
    }[launch]
    expected = call(q, k_cache, v_cache)
    apart = torch.zeros(3, 4, 32, dtype=q.dtype, device=q.device)[..., :16].copy_(q)  # heads with gaps between them
    assert torch.equal(call(apart, k_cache, v_cache), expected)
    gaps = torch.zeros(*k_cache.shape[:3], 32, dtype=q.dtype, device=q.device)[..., :16].copy_(k_cache)
    for bad in ((q, gaps, v_cache), (q, k_cache, v_cache[:, :8]), (q[..., :8], k_cache, v_cache), (q[:, :3], k_cache, v_cache),
                (q, k_cache.half(), v_cache.half())):
        with pytest.raises(ValueError): call(*bad)
