"Attention of one new token per request, from the projection on, in one kernel, against its twin"
from types import SimpleNamespace

import pytest
import torch

from minivllm.kernels import decode_fused
from minivllm.kernels.common import tl, triton
from minivllm.kernels.decode_fused import fits_fused, fused_config, keys_of_part, rope_attend, rope_attend_torch, rope_attend_triton
from minivllm.layers.attention import ForwardContext, TritonAttentionBackend
from minivllm.models import llama
from paging import KERNEL_DEVICES, slot_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.005}


def arguments(lens, heads=(4, 2, 32), norm=True, dtype=torch.float32, block_size=16, device="cpu", seed=0):
    "Requests of these lengths, the new token included; slots without a key hold NaN"
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(shape, generator=generator).to(dtype)
    num_heads, num_kv_heads, head_dim = heads
    counts = [-(-n // block_size) for n in lens]
    free = torch.randperm(sum(counts) + 1, generator=generator).int()[:-1]
    caches = torch.full((2, sum(counts) + 1, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    tables, slots = torch.zeros(len(lens), max([*counts, 1]), dtype=torch.int32), []
    for row, (n, table) in enumerate(zip(lens, free.split(counts) if counts else [])):
        tables[row, : len(table)] = table
        place = slot_of(table, torch.arange(n), block_size)
        caches.flatten(1, 2)[:, place[:-1]] = random(2, n - 1, num_kv_heads, head_dim)
        slots.append(place[-1].item())
    angles = torch.randn(64, head_dim // 2, generator=generator)
    cos_sin = torch.stack((torch.cat((angles.cos(),) * 2, 1), torch.cat((-angles.sin(), angles.sin()), 1)), 1)
    weights = (random(head_dim) + 1, random(head_dim) + 1) if norm else (None, None)
    lens = torch.tensor(lens, dtype=torch.int32)
    args = (random(len(lens), (num_heads + 2 * num_kv_heads) * head_dim), lens.long() - 1, cos_sin, *weights, 1e-6, *caches,
            torch.tensor(slots, dtype=torch.int64), tables, lens, head_dim**-0.5)
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


def run(fn, args, **options):
    "Output and caches after a call that leaves the arguments alone"
    own = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    return fn(*own, **options), own[6], own[7]


def assert_equal(args, dtype=torch.float32, **options):
    for ours, twin in zip(run(rope_attend_triton, args, **options), run(rope_attend_torch, args)):
        torch.testing.assert_close(ours, twin, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("config", [(16, 4, 4), (16, 4, 1), (32, 4, 3)])
@pytest.mark.parametrize("lens", [[1], [2], [16], [17], [18], [33, 1, 49]])
def test_equals_the_twin(lens, config, device):
    assert_equal(arguments(lens, device=device), config=config)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 32), (2, 1, 128)])
def test_heads_and_dtypes(heads, norm, dtype, device):
    assert_equal(arguments([35], heads, norm, dtype, device=device), dtype, config=(16, 4, 2))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_counters_are_left_as_they_were(device):
    args, arrived = arguments([40, 20], device=device), torch.zeros(4, dtype=torch.int32, device=device)
    for _ in range(2):
        assert_equal(args, config=(16, 4, 2), arrived=arrived)
        assert not arrived.any()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_slot_minus_one_is_not_stored(device):
    args = arguments([20], device=device)
    args[8].fill_(-1)
    out, *caches = run(rope_attend_triton, args)
    assert all(torch.equal(a, b) or (a.isnan() == b.isnan()).all() for a, b in zip(caches, args[6:8]))
    stored = arguments([20], device=device)
    torch.testing.assert_close(out, run(rope_attend_torch, stored)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_rows_that_lie_apart_and_no_rows(device):
    args = arguments([20, 5], device=device)
    wide = torch.cat((args[0], args[0] * torch.nan), 1)[:, : args[0].shape[1]]
    assert torch.equal(run(rope_attend_triton, [wide, *args[1:]])[0], run(rope_attend_triton, args)[0])
    assert rope_attend_triton(*arguments([], device=device)).shape == (0, 4, 32)


def test_wrong_arguments_are_refused():
    args = arguments([20])
    for i, wrong in [(0, args[0][:, :-32]), (0, args[0].half()), (2, args[2][..., :16]), (8, torch.zeros(3, dtype=torch.int64))]:
        with pytest.raises(ValueError):
            rope_attend_triton(*args[:i], wrong, *args[i + 1 :])


def test_dispatcher_takes_torch_on_a_cpu():
    args = arguments([20])
    assert torch.equal(run(rope_attend, args)[0], run(rope_attend_torch, args)[0])


def test_what_it_is_for(monkeypatch):
    monkeypatch.setattr(decode_fused, "num_sms", lambda device: 132)
    cache = lambda num_kv_heads, head_dim=128: torch.empty(1, 16, num_kv_heads, head_dim, dtype=torch.bfloat16)
    # one tile of 64 keys for each of 16 parts, of 8 for two requests, and the new key
    for num_seqs, num_kv_heads, keys in ((1, 8, 1025), (2, 8, 513), (4, 8, 513), (1, 4, 2113), (4, 64, 65)):
        assert fits_fused(num_seqs, keys, cache(num_kv_heads)) and not fits_fused(num_seqs, keys + 1, cache(num_kv_heads))
    assert fits_fused(4, 500, cache(8, 64)) and not fits_fused(5, 10, cache(8))
    assert not fits_fused(1, 10, cache(8, 80)) and not fits_fused(1, 10, cache(8, 96)) and not fits_fused(1, 10, cache(8, 8))
    assert not fits_fused(1, None, cache(8))  # lengths of which nothing is known
    assert fused_config(1, 8, 2, 132)[2] == 16 and fused_config(8, 32, 2, 132)[2] == 1


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_padding_row_disturbs_nobody(device):
    "As in a graph of more rows than there are requests: no keys, no slot"
    args = arguments([1, 40], device=device)
    args[8][0], args[10][0] = -1, 0
    out, *caches = run(rope_attend_triton, args, config=(16, 4, 2))
    alone = [a[1:] if i in (0, 1, 8, 9, 10) else a for i, a in enumerate(args)]
    for ours, expected in zip((out[1:], *caches), run(rope_attend_torch, alone)):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


@triton.jit
def parts_kernel(found_ptr, num_keys, TILE: tl.constexpr):
    begin, end, num_parts = keys_of_part(num_keys, tl.program_id(1), TILE)
    tl.store(found_ptr + tl.program_id(1) * 3, begin)
    tl.store(found_ptr + tl.program_id(1) * 3 + 1, end)
    tl.store(found_ptr + tl.program_id(1) * 3 + 2, num_parts)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("num_keys, parts", [(0, 4), (1, 4), (16, 4), (17, 4), (150, 4), (160, 3), (33, 1)])
def test_parts_have_all_keys_once_in_whole_tiles(num_keys, parts, device):
    found = torch.empty(parts, 3, dtype=torch.int32, device=device)
    parts_kernel[1, parts](found, num_keys, 16)
    ranges, (num_parts,) = found[:, :2].tolist(), set(found[:, 2].tolist())
    assert 1 <= num_parts <= parts and all(begin >= end for begin, end in ranges[num_parts:])
    assert [key for begin, end in ranges[:num_parts] for key in range(begin, end)] == list(range(num_keys))
    assert all(begin % 16 == 0 and (begin < end or num_keys == 0) for begin, end in ranges[:num_parts])


@pytest.mark.parametrize("one, changed", [
    (True, {}), (False, dict(max_context_len=34)), (False, dict(max_context_len=None)), (False, dict(num_decodes=1)),
    (False, dict(shared_prefixes="some")),  # the general kernel reads them once for all
])
def test_what_the_model_asks_it_for(one, changed, monkeypatch):
    "Few requests with short contexts and nothing in common, each with its next token"
    class Layer:
        layer_idx, backend, num_kv_heads, scale, rope = 0, TritonAttentionBackend, 1, 1.0, SimpleNamespace(cos_sin=None)
        norms = lambda self: (None, None)
        __call__ = lambda self, qkv, positions, ctx: "two kernels"

    monkeypatch.setattr(decode_fused, "num_sms", lambda device: 4)  # two parts of each request, of 16 keys
    monkeypatch.setattr(llama, "rope_attend", lambda *args, arrived: torch.zeros(2, 1, 128))
    lens = torch.tensor([5, 9], dtype=torch.int32)
    known = dict(num_decodes=2, max_context_len=33, shared_prefixes=None) | changed
    ctx = ForwardContext(lens, lens[:, None], lens, lens, max_query_len=0, kv_caches=[(torch.empty(1, 16, 1, 128),) * 2], **known)
    out = llama.attend_few_rows(Layer(), torch.empty(2, 3 * 128), lens, ctx)
    assert (out != "two kernels") if one else (out == "two kernels")
