"Prefill and decode over pages, against a float64 reference over plain tensors"
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import DEVICES, paged_batch, reference

import minivllm.kernels.decode as decode_module
import minivllm.kernels.prefill as prefill_module
from minivllm.kernels.decode import paged_decode, paged_decode_torch, plan_decode
from minivllm.kernels.prefill import causal_attention, paged_prefill, paged_prefill_torch

HEADS = [(9, 3, 64), (4, 2, 16), (4, 4, 16), (8, 1, 32), (14, 2, 80)]
PREFILLS = [paged_prefill_torch, paged_prefill]
DECODES = [paged_decode_torch, paged_decode]
on_devices = pytest.mark.parametrize("device", DEVICES)


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
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("heads", HEADS)
def test_dtypes_and_devices(heads, dtype, tolerance, device):
    torch.manual_seed(0)
    queries, contexts, scale = [3, 20, 1, 16], [8, 20, 33, 64], heads[2] ** -0.5
    batch, plain = paged_batch(queries, contexts, 4, heads, device=device, dtype=dtype)
    for prefill in PREFILLS:
        out = prefill(*batch, scale)
        assert out.dtype == dtype
        close(out, reference(batch[0], queries, plain, scale), tolerance)
    batch, plain = paged_batch([1] * 4, contexts, 16, heads, device=device, dtype=dtype)
    for decode in DECODES:
        out = decode(*decode_args(batch), scale)
        assert out.dtype == dtype
        close(out, reference(batch[0], [1] * 4, plain, scale), tolerance)


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
