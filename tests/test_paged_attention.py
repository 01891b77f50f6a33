"Prefill and decode over pages, against a float64 reference over plain tensors"
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import DEVICES, paged_batch, reference

import minivllm.kernels.decode as decode_module
import minivllm.kernels.prefill as prefill_module
from minivllm.kernels.decode import (
    TILE_ROWS, SharedPrefixes, find_shared_prefixes, paged_decode, paged_decode_torch, paged_decode_triton, plan_decode,
    shared_decode_torch,
)
from minivllm.kernels.prefill import causal_attention, paged_prefill_torch, paged_prefill_triton
from minivllm.kernels.prefill_hopper import paged_prefill

HEADS = [(9, 3, 64), (4, 2, 16), (4, 4, 16), (8, 1, 32), (14, 2, 80)]
PREFILLS = [paged_prefill_torch, paged_prefill_triton, paged_prefill]
DECODES = [paged_decode_torch, paged_decode_triton, paged_decode]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
on_devices = pytest.mark.parametrize("device", DEVICES)
GPU = DEVICES[-1]  # where kernels run: interpreted, if there is none


def can_run(function, device):
    "Kernels are interpreted on the CPU, or compiled for the GPU: never both"
    return device == GPU or not function.__name__.endswith("_triton")


def decode_args(batch):
    "Of a batch with one query each"
    q, k_cache, v_cache, tables, _, context_lens = batch
    return q, k_cache, v_cache, tables, context_lens


def close(out, expected, tolerance=1e-5):
    "Equal to rounding, and no NaN"
    assert out.shape == expected.shape
    assert (out.double() - expected).abs().max() < tolerance  # false for NaN


lengths = st.one_of(st.integers(1, 70), st.sampled_from([3, 4, 5, 15, 16, 17, 31, 32, 33, 64]))
requests = st.lists(st.tuples(lengths, st.floats(0, 1)), min_size=1, max_size=5)
options = dict(block_size=st.sampled_from([4, 16]), heads=st.sampled_from(HEADS), seed=st.integers(0, 1000))


@settings(deadline=None, max_examples=80)
@given(requests=requests, shared=st.integers(0, 2), **options)
def test_prefill(requests, shared, block_size, heads, seed):
    torch.manual_seed(seed)
    context_lens = [n + shared * block_size for n, _ in requests]
    query_lens = [max(1, round(n * share)) for n, share in requests]
    scale = heads[2] ** -0.5
    batch, plain = paged_batch(query_lens, context_lens, block_size, heads, shared)
    close(paged_prefill_torch(*batch, scale), reference(batch[0], query_lens, plain, scale))


@settings(deadline=None, max_examples=80)
@given(context_lens=st.lists(st.one_of(st.just(0), lengths), min_size=1, max_size=6), shared=st.integers(0, 2), **options)
def test_decode(context_lens, shared, block_size, heads, seed):
    torch.manual_seed(seed)
    scale, ones = heads[2] ** -0.5, [1] * len(context_lens)
    batch, plain = paged_batch(ones, context_lens, block_size, heads, shared)
    out = paged_decode_torch(*decode_args(batch), scale)
    real = [i for i, n in enumerate(context_lens) if n > 0]
    padding = [i for i, n in enumerate(context_lens) if n == 0]
    assert out[padding].eq(0).all()
    if real:
        close(out[real], reference(batch[0][real], [1] * len(real), [plain[i] for i in real], scale))


@on_devices
@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_dtypes_and_devices(heads, dtype, tolerance, device):
    torch.manual_seed(0)
    queries, contexts, scale = [3, 20, 1, 16], [8, 20, 33, 64], heads[2] ** -0.5
    batch, plain = paged_batch(queries, contexts, 4, heads, device=device, dtype=dtype)
    for prefill in (function for function in PREFILLS if can_run(function, device)):
        out = prefill(*batch, scale)
        assert out.dtype == dtype
        close(out, reference(batch[0], queries, plain, scale), tolerance)
    batch, plain = paged_batch([1] * 4, contexts, 16, heads, device=device, dtype=dtype)
    for decode in (function for function in DECODES if can_run(function, device)):
        out = decode(*decode_args(batch), scale)
        assert out.dtype == dtype
        close(out, reference(batch[0], [1] * 4, plain, scale), tolerance)


# The Triton kernels: the same, at sizes that an interpreter can do

small_options = dict(block_size=st.sampled_from([4, 16, 64]), heads=st.sampled_from([(9, 3, 16), (4, 4, 16), (8, 1, 32), (4, 2, 40)]),
                     seed=st.integers(0, 1000))
small_requests = st.lists(st.tuples(lengths, st.floats(0, 1)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=10)
@given(requests=small_requests, shared=st.integers(0, 1), **small_options)
def test_triton_prefill(requests, shared, block_size, heads, seed):
    torch.manual_seed(seed)
    context_lens = [n + shared * block_size for n, _ in requests]
    query_lens = [max(1, round(n * share)) for n, share in requests]
    batch, plain = paged_batch(query_lens, context_lens, block_size, heads, shared, device=GPU)
    close(paged_prefill_triton(*batch, heads[2] ** -0.5), reference(batch[0], query_lens, plain, heads[2] ** -0.5))


@settings(deadline=None, max_examples=10)
@given(context_lens=st.lists(st.one_of(st.just(0), lengths), min_size=1, max_size=4), shared=st.integers(0, 1), **small_options)
def test_triton_decode(context_lens, shared, block_size, heads, seed):
    torch.manual_seed(seed)
    batch, plain = paged_batch([1] * len(context_lens), context_lens, block_size, heads, shared, device=GPU)
    check_decode(decode_args(batch), plain, heads[2] ** -0.5)


def check_decode(args, plain, scale, tolerance=1e-5, **options):
    "The kernel against float64; zeros for padding rows, and counters that are zero again"
    q, context_lens = args[0], args[4].tolist()
    arrived = torch.zeros(len(q) * args[1].shape[2], dtype=torch.int32, device=q.device)
    out = paged_decode_triton(*args, scale, arrived=arrived, **options)
    real = [i for i, n in enumerate(context_lens) if n > 0]
    assert out.dtype == q.dtype and not arrived.any()
    assert out[[i for i, n in enumerate(context_lens) if n == 0]].eq(0).all()
    if real: close(out[real], reference(q[real], [1] * len(real), [plain[i] for i in real], scale), tolerance)


AWKWARD = [1, 0, 15, 16, 17, 31, 33, 64, 65, 0]  # one token, padding rows, borders of pages and tiles
RATIOS = [(2, 2, 16), (4, 2, 16), (3, 1, 16), (4, 1, 16), (6, 1, 16), (8, 1, 16), (9, 3, 16)]


@pytest.mark.parametrize("heads, dtype, tolerance", [(heads, *DTYPES[0]) for heads in RATIOS] + [((9, 3, 16), *row) for row in DTYPES[1:]])
def test_awkward_contexts(heads, dtype, tolerance):
    torch.manual_seed(0)
    batch, plain = paged_batch([1] * len(AWKWARD), AWKWARD, 16, heads, device=GPU, dtype=dtype)
    check_decode(decode_args(batch), plain, 0.25, tolerance)
    contexts, queries = [1, 16, 17, 65], [1, 16, 2, 33]
    batch, plain = paged_batch(queries, contexts, 16, heads, device=GPU, dtype=dtype)
    out = paged_prefill_triton(*batch, 0.25)
    assert out.dtype == dtype
    close(out, reference(batch[0], queries, plain, 0.25), tolerance)


@pytest.mark.parametrize("head_dim, block_size", [(64, 16), (80, 32), (96, 64), (128, 128), (256, 256), (128, 16), (64, 256)])
def test_head_dims_and_block_sizes(head_dim, block_size):
    torch.manual_seed(0)
    heads, scale = (2, 1, head_dim), head_dim**-0.5
    contexts = [n for n in (block_size - 1, block_size, block_size + 1) if n < 140] or [100, 65]
    queries = [n if i else 3 for i, n in enumerate(contexts)]
    batch, plain = paged_batch(queries, contexts, block_size, heads, device=GPU, dtype=torch.bfloat16)
    close(paged_prefill_triton(*batch, scale), reference(batch[0], queries, plain, scale), 2e-2)
    batch, plain = paged_batch([1] * len(contexts), contexts, block_size, heads, device=GPU, dtype=torch.bfloat16)
    check_decode(decode_args(batch), plain, scale, 2e-2)


@pytest.mark.skipif(GPU != "cpu", reason="a GPU takes its own way")
@pytest.mark.parametrize("dtype, tolerance", DTYPES[1:])
@pytest.mark.parametrize("heads", [(3, 3, 64), (4, 1, 128), (2, 1, 256)])
def test_by_descriptors(heads, dtype, tolerance, monkeypatch):
    "As on sm_90 and later: the copy engine fetches tiles, whatever lies behind the context"
    used = []
    for module in (prefill_module, decode_module):
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))
        describe = module.kv_descriptors
        monkeypatch.setattr(module, "kv_descriptors", lambda *args, describe=describe: used.append(1) or describe(*args))
    torch.manual_seed(0)
    contexts, queries, scale = [1, 63, 64, 65, 130], [1, 60, 64, 2, 5], heads[2] ** -0.5
    batch, plain = paged_batch(queries, contexts, 64, heads, dtype=dtype)
    close(paged_prefill_triton(*batch, scale), reference(batch[0], queries, plain, scale), tolerance)
    batch, plain = paged_batch([1] * 6, [*contexts, 0], 64, heads, dtype=dtype)
    check_decode(decode_args(batch), plain, scale, tolerance)
    assert len(used) == 2


# Shared prefixes

@st.composite
def sharing_batches(draw):
    "Block tables and lengths in which some requests begin alike, in families of different length"
    size, rng = draw(st.sampled_from([4, 16])), np.random.default_rng(draw(st.integers(0, 10**6)))
    families = [rng.permutation(range(100 * i + 1, 100 * i + 9))[: rng.integers(1, 5)] for i in range(draw(st.integers(1, 3)))]
    tables, lens, fresh = [], [], 1000
    for _ in range(draw(st.integers(1, 7))):
        common = list(families[rng.integers(len(families))])
        common = common[: rng.integers(0, len(common) + 1)]
        own = int(rng.integers(0, 3 * size)) if rng.random() < 0.9 else 0
        if rng.random() < 0.2: common, own = [], 0  # a padding row
        tables.append(common + list(range(fresh, fresh + -(-own // size))))
        lens.append(len(common) * size + own)
        fresh += 10
    width = max(1, *map(len, tables))
    return np.array([t + [0] * (width - len(t)) for t in tables], dtype=np.int32), np.array(lens, dtype=np.int32), size


@settings(deadline=None, max_examples=150)
@given(sharing_batches(), st.integers(1, 4))
def test_found_prefixes(batch, num_tiles):
    tables, lens, size = batch
    found = find_shared_prefixes(tables, lens, size, num_tiles)
    if found is None:
        firsts = tables[lens > size, 0].tolist()
        assert len(set(firsts)) == len(firsts)
        return
    rows, shared_lens, starts = found
    assert rows.shape == (num_tiles, TILE_ROWS) and all(array.dtype == np.int32 for array in found)
    placed = rows[rows >= 0].tolist()
    assert len(set(placed)) == len(placed)  # nobody's prefix is counted twice
    assert [i for i, start in enumerate(starts) if start] == sorted(placed)
    for members, length in zip(rows, shared_lens.tolist()):
        members = members[members >= 0]
        assert (len(members) > 0) == (length > 0) and length % size == 0
        if length:
            assert (starts[members] == length).all() and (lens[members] > length).all()  # the newest token is one's own
            assert len(np.unique(tables[members, : length // size], axis=0)) == 1
            assert len(members) >= 2
            longer = length // size + 1
            # and no longer prefix is common to them, whole blocks of each
            assert (lens[members] <= longer * size).any() or len(np.unique(tables[members, :longer], axis=0)) > 1


@settings(deadline=None, max_examples=12)
@given(sharing_batches(), st.integers(1, 4), st.sampled_from([(4, 2, 16), (9, 3, 16), (3, 3, 16)]))
def test_shared_decode_is_plain_decode(batch, num_tiles, heads):
    tables, lens, size = batch
    found = find_shared_prefixes(tables, lens, size, num_tiles)
    if found is None: return
    shared = SharedPrefixes(*(torch.from_numpy(array).to(GPU) for array in found))
    _, compact = np.unique(tables, return_inverse=True)  # a pool of the blocks in use
    compact = compact.reshape(tables.shape)
    k_cache, v_cache = torch.randn(2, compact.max() + 1, size, *heads[1:], device=GPU)
    q = torch.randn(len(lens), heads[0], heads[2], device=GPU)
    args = q, k_cache, v_cache, torch.from_numpy(compact).int().to(GPU), torch.from_numpy(lens).to(GPU), 0.25
    expected = paged_decode_torch(*args).double()
    close(shared_decode_torch(*args, shared), expected)
    arrived = torch.zeros(len(lens) * heads[1], dtype=torch.int32, device=GPU)
    for _ in range(2):  # the second layer finds the counters as the first did
        close(paged_decode_triton(*args, shared, arrived), expected)
    assert not arrived.any()
    assert torch.allclose(paged_decode(*args, shared).double(), expected, atol=1e-5)


def test_more_sharers_than_a_tile_has_rows():
    torch.manual_seed(0)
    num_seqs = TILE_ROWS + 3
    tables = np.array([[1, 2, 3 + i] for i in range(num_seqs)], dtype=np.int32)
    lens = np.array([9 + i % 4 for i in range(num_seqs)], dtype=np.int32)
    assert find_shared_prefixes(tables, lens, 4, 1) is None  # no room for all of them
    found = find_shared_prefixes(tables, lens, 4, 3)
    assert found[1].tolist() == [8, 8, 0]
    shared = SharedPrefixes(*(torch.from_numpy(array).to(GPU) for array in found))
    caches = torch.randn(2, num_seqs + 3, 4, 1, 16, device=GPU)
    args = torch.randn(num_seqs, 2, 16, device=GPU), *caches, torch.from_numpy(tables).to(GPU), torch.from_numpy(lens).to(GPU), 0.25
    for decode in (shared_decode_torch, paged_decode_triton):
        close(decode(*args, shared), paged_decode_torch(*args).double())


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_queries_after_a_prefix_hit_see_the_prefix(dtype, tolerance):  # F09 b
    # three queries behind five cached keys: query i sees the keys 0 .. 5 + i
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, 6, 4, 2, 16).to(dtype)
    q, table = torch.randn(3, 4, 16).to(dtype), torch.tensor([[5, 2]], dtype=torch.int32)
    out = paged_prefill(q, k_cache, v_cache, table, torch.tensor([0, 3]), torch.tensor([8]), 0.25)
    keys, values = (cache[[5, 2]].flatten(0, 1).double() for cache in (k_cache, v_cache))
    for i in range(3):
        for head in range(4):
            probs = (keys[: 6 + i, head // 2] @ q[i, head].double() * 0.25).softmax(0)
            assert (out[i, head].double() - probs @ values[: 6 + i, head // 2]).abs().max() < tolerance


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 17, 49])
def test_chunks_are_rows_of_the_whole_prompt(chunk):
    torch.manual_seed(0)
    (q, *caches, tables, cu_seqlens_q, context_lens), _ = paged_batch([50], [50], 16, (9, 3, 64))
    whole = paged_prefill(q, *caches, tables, cu_seqlens_q, context_lens, 0.125)
    for start in range(0, 50, chunk):
        end = min(start + chunk, 50)
        part = (q[start:end], *caches, tables, torch.tensor([0, end - start]), torch.tensor([end]))
        close(paged_prefill(*part, 0.125), whole[start:end].double())


def test_decode_is_prefill_with_one_query():
    torch.manual_seed(0)
    batch, _ = paged_batch([1] * 4, [1, 16, 17, 40], 16, (9, 3, 64))
    close(paged_decode(*decode_args(batch), 0.125), paged_prefill(*batch, 0.125).double())


@pytest.mark.parametrize("unused", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_unused_slots_are_never_felt(unused):
    torch.manual_seed(0)
    contexts, heads = [1, 5, 16, 0, 30], (4, 2, 16)
    dirty, plain = paged_batch([1] * 5, contexts, 16, heads, unused=unused)
    out = paged_decode(*decode_args(dirty), 0.25)
    real = [0, 1, 2, 4]
    close(out[real], reference(dirty[0][real], [1] * 4, [plain[i] for i in real], 0.25))
    assert out[3].eq(0).all()
    dirty, plain = paged_batch([1, 3, 16, 7], [1, 5, 16, 30], 16, heads, unused=unused)
    close(paged_prefill(*dirty, 0.25), reference(dirty[0], [1, 3, 16, 7], plain, 0.25))


def test_a_broken_request_harms_nobody_else():
    torch.manual_seed(0)
    batch, plain = paged_batch([1] * 3, [5, 30, 9], 4, (4, 2, 16))
    q, k_cache, v_cache, tables, context_lens = decode_args(batch)
    for cache in (k_cache, v_cache):
        cache[tables[1, :8].long()] = torch.nan
    out = paged_decode(q, k_cache, v_cache, tables, context_lens, 0.25)
    assert out[1].isnan().all()
    close(out[[0, 2]], reference(q[[0, 2]], [1, 1], [plain[0], plain[2]], 0.25))


def test_padding_rows_whose_table_points_at_broken_pages():
    # tables are padded with block 0, whoever owns it
    torch.manual_seed(0)
    k_cache, v_cache = torch.full((2, 3, 4, 2, 16), torch.nan)
    k_cache[1], v_cache[1] = 1.0, 2.0
    tables = torch.tensor([[1], [0], [0]], dtype=torch.int32)
    out = paged_decode(torch.randn(3, 4, 16), k_cache, v_cache, tables, torch.tensor([3, 0, 0]), 0.25)
    assert out[0].eq(2).all() and out[1:].eq(0).all()
    out = paged_decode(torch.randn(3, 4, 16), k_cache, v_cache, tables, torch.tensor([0, 0, 0]), 0.25)
    assert out.eq(0).all()


@pytest.mark.parametrize("gathered_bytes, widths", [(1, [3, 20, 0, 1, 40, 16]), (25000, [20, 1, 40]), (31000, [20, 40])])
def test_groups_change_nothing(gathered_bytes, widths, monkeypatch):
    torch.manual_seed(0)
    contexts = [3, 20, 0, 1, 40, 16]
    args = decode_args(paged_batch([1] * 6, contexts, 4, (4, 2, 16))[0])
    expected = paged_decode_torch(*args, 0.25)
    assert len(plan_decode(args[1], *args[3:])) == 1
    monkeypatch.setitem(decode_module.GATHERED_BYTES, "cpu", gathered_bytes)
    plan = plan_decode(args[1], *args[3:])
    assert [group.bias.shape[-1] for group in plan] == widths  # each as wide as its own longest
    for group in plan:  # and no larger than allowed, unless it is a single request
        assert group.num_seqs == 1 or 2 * 4 * 16 * group.rows.numel() <= gathered_bytes
    close(paged_decode_torch(*args, 0.25), expected.double())


@pytest.mark.parametrize("tile", [1, 3, 7])
def test_query_tiles_change_nothing(tile, monkeypatch):
    torch.manual_seed(0)
    batch, _ = paged_batch([10, 1, 5], [10, 12, 17], 4, (4, 2, 16))
    expected = paged_prefill_torch(*batch, 0.25)
    held = []
    monkeypatch.setattr(prefill_module, "QUERY_TILE", tile)
    monkeypatch.setattr(prefill_module, "causal_attention", lambda q, *args: held.append(len(q)) or causal_attention(q, *args))
    close(paged_prefill_torch(*batch, 0.25), expected.double())
    assert max(held) <= tile


def test_one_plan_serves_all_layers():
    torch.manual_seed(0)
    q, k_cache, v_cache, tables, context_lens = decode_args(paged_batch([1] * 3, [7, 0, 33], 4, (4, 2, 16))[0])
    plan = plan_decode(k_cache, tables, context_lens)
    for _ in range(3):
        k_cache, v_cache = torch.randn_like(k_cache), torch.randn_like(v_cache)
        expected = paged_decode_torch(q, k_cache, v_cache, tables, context_lens, 0.25)
        assert torch.equal(paged_decode_torch(q, k_cache, v_cache, tables, context_lens, 0.25, plan), expected)


def test_inputs_are_left_alone():
    torch.manual_seed(0)
    batch, _ = paged_batch([2, 1], [9, 17], 4, (4, 2, 16), unused=0.0)
    before = [t.clone() for t in batch]
    paged_prefill(*batch, 0.25)
    paged_decode(batch[0][:2], *batch[1:4], batch[5], 0.25)
    assert all(torch.equal(a, b) for a, b in zip(batch, before))


def test_queries_as_a_slice_of_packed_qkv():
    torch.manual_seed(0)
    batch, _ = paged_batch([1, 1], [9, 17], 4, (4, 2, 16))
    packed = torch.cat((batch[0], torch.randn(2, 4, 16)), 1)[:, :4]
    assert not packed.is_contiguous()
    assert torch.equal(paged_prefill(packed, *batch[1:], 0.25), paged_prefill(*batch, 0.25))
    args = decode_args(batch)
    assert torch.equal(paged_decode(packed, *args[1:], 0.25), paged_decode(*args, 0.25))


def test_a_table_too_short_for_its_length_is_an_error():
    args = decode_args(paged_batch([1, 1], [4, 8], 4, (4, 2, 16))[0])
    with pytest.raises(IndexError):
        paged_decode(*args[:4], torch.tensor([4, 9]), 0.25)
