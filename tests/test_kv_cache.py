"Keys and values in pages: what is stored where, and what is never touched"
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import DEVICES, slot_of

from minivllm.kernels.kv_cache import (
    gather_pages,
    norm_rope_store,
    norm_rope_store_torch,
    norm_rope_store_triton,
    store_kv,
    store_kv_torch,
    store_kv_triton,
    store_tile,
)
from minivllm.layers.rotary_embedding import default_inv_freq, rope_cos_sin

STORES = [store_kv_torch, store_kv_triton, store_kv]  # kernels are interpreted where there is no GPU
FUSED = [norm_rope_store_torch, norm_rope_store_triton, norm_rope_store]
def on_devices(name, functions):
    "Each function on every device; compiled kernels can't work on CPU tensors, interpreted ones can"
    kernels = DEVICES[-1:]
    pairs = [(fn, device) for fn in functions for device in (kernels if fn.__name__.endswith("_triton") else DEVICES)]
    return pytest.mark.parametrize(f"{name}, device", pairs)


def caches(num_blocks=6, block_size=4, num_kv_heads=3, head_dim=8, device="cpu", dtype=torch.float32):
    "Empty caches: NaN marks slots that were never written"
    return torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, device=device, dtype=dtype)


def written(cache):
    "Slots that hold something"
    return cache.flatten(0, 1).isnan().logical_not().flatten(1).any(1).nonzero().flatten().tolist()


@on_devices("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_token_goes_to_its_slot(store, dtype, device):
    k_cache, v_cache = caches(device=device, dtype=dtype)
    key, value = torch.randn(2, 5, 3, 8, device=device).to(dtype)
    slots = [9, 0, 23, 4, 3]
    store(key, value, k_cache, v_cache, torch.tensor(slots, device=device))
    for i, slot in enumerate(slots):
        assert torch.equal(k_cache[slot // 4, slot % 4], key[i])
        assert torch.equal(v_cache[slot // 4, slot % 4], value[i])
    assert written(k_cache) == written(v_cache) == sorted(slots)


@on_devices("store", STORES)
@pytest.mark.parametrize("slots", [[-1, 5, -1, 7], [5, 7, -1, -1], [-1, -1, -1, -1]])
def test_padding_stores_nothing(store, slots, device):
    k_cache, v_cache = caches(device=device)
    k_cache[-1, -1], v_cache[-1, -1] = 1.0, 2.0  # the last slot belongs to somebody
    key, value = torch.randn(2, 4, 3, 8, device=device)
    store(key, value, k_cache, v_cache, torch.tensor(slots, device=device))
    assert k_cache[-1, -1].eq(1).all() and v_cache[-1, -1].eq(2).all()
    real = [slot for slot in slots if slot >= 0]
    assert written(k_cache) == written(v_cache) == [*real, 23]
    for slot in real:
        assert torch.equal(k_cache[slot // 4, slot % 4], key[slots.index(slot)])


@on_devices("store", STORES)
def test_no_tokens(store, device):
    k_cache, v_cache = caches(device=device)
    empty = torch.empty(0, 3, 8, device=device)
    store(empty, empty, k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=device))
    assert written(k_cache) == []


@on_devices("store", STORES)
def test_keys_as_a_slice_of_packed_qkv(store, device):
    k_cache, v_cache = caches(device=device)
    heads = torch.randn(2, 15, 8, device=device)  # 9 query, 3 key, 3 value heads
    store(heads[:, 9:12], heads[:, 12:], k_cache, v_cache, torch.tensor([6, 1], device=device))
    for i, (block, offset) in enumerate([(1, 2), (0, 1)]):
        assert torch.equal(k_cache[block, offset], heads[i, 9:12])
        assert torch.equal(v_cache[block, offset], heads[i, 12:])
    spread = torch.randn(2, 8, 3, device=device).transpose(1, 2)  # a head's numbers lie apart
    store(spread, heads[:, 12:], k_cache, v_cache, torch.tensor([6, 1], device=device))
    assert torch.equal(k_cache[1, 2], spread[0]) and torch.equal(k_cache[0, 1], spread[1])


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_cache_with_gaps_is_refused(store, which):
    # a copy of it would be written, and the write be lost
    both = list(torch.zeros(2, 6, 4, 3, 8))
    both[which] = torch.zeros(12, 4, 3, 8)[::2]
    with pytest.raises((RuntimeError, ValueError), match="view|contiguous"):
        store(*torch.randn(2, 1, 3, 8), *both, torch.tensor([0]))


@pytest.mark.parametrize(
    "kv_shape, dtype, num_slots, message",
    [
        ((2, 3, 8), torch.float16, 2, "float16 doesn't go with caches of torch.float32"),
        ((2, 3, 8), torch.float32, 3, "2 tokens, but slots for 3"),
        ((2, 2, 8), torch.float32, 2, "don't fit"),
        ((2, 3, 4), torch.float32, 2, "don't fit"),
    ],
)
def test_the_kernel_refuses_what_does_not_fit(kv_shape, dtype, num_slots, message):
    key, value = torch.zeros(2, *kv_shape).to(dtype)
    with pytest.raises(ValueError, match=message):
        store_kv_triton(key, value, *caches(), torch.zeros(num_slots, dtype=torch.int64))


def test_a_slot_outside_the_pool_is_an_error():  # of the twin: the kernel believes its slots
    k_cache, v_cache = caches()
    with pytest.raises(IndexError):
        store_kv_torch(*torch.randn(2, 1, 3, 8), k_cache, v_cache, torch.tensor([24]))
    assert written(k_cache) == []


@st.composite
def slot_mappings(draw, num_slots=24, most=9):
    "Slots of a step's tokens, -1 for padding anywhere"
    slots = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=most))
    for _ in range(draw(st.integers(0, 3))):
        slots.insert(draw(st.integers(0, len(slots))), -1)
    return slots


def guarded(num_kv_heads, head_dim, num_slots=24):
    "Two caches of NaN with a block of NaN before and behind each"
    blocks = torch.full((2, num_slots // 4 + 2, 4, num_kv_heads, head_dim), torch.nan, device=DEVICES[-1])
    return blocks, blocks[0, 1:-1], blocks[1, 1:-1]


@pytest.mark.parametrize("store", STORES[:2])
@settings(deadline=None, max_examples=40)
@given(slots=slot_mappings(), num_kv_heads=st.sampled_from([1, 2, 3]), head_dim=st.sampled_from([5, 8, 16]))
def test_only_the_named_slots_are_written(store, slots, num_kv_heads, head_dim):
    blocks, k_cache, v_cache = guarded(num_kv_heads, head_dim)
    expected = blocks.clone()
    kv = torch.randn(2, len(slots), num_kv_heads, head_dim, device=DEVICES[-1])
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[:, 1 + slot // 4, slot % 4] = kv[:, i]
        else:
            kv[:, i] = torch.nan  # what padding tokens hold
    store(*kv, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64, device=DEVICES[-1]))
    assert torch.equal(blocks.isnan(), expected.isnan())
    assert torch.equal(blocks.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("store", STORES[:2])
@settings(deadline=None, max_examples=50)
@given(
    length=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
    chunk=st.integers(1, 41),
    seed=st.integers(0, 1000),
)
def test_round_trip(store, length, block_size, chunk, seed):
    torch.manual_seed(seed)
    num_blocks = -(-length // block_size) + 3
    k_cache, v_cache = caches(num_blocks, block_size, device=DEVICES[-1])
    table = torch.randperm(num_blocks).int().to(DEVICES[-1])
    key, value = torch.randn(2, length, 3, 8, device=DEVICES[-1])
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        slots = slot_of(table, torch.arange(start, end, device=DEVICES[-1]), block_size)
        store(key[start:end], value[start:end], k_cache, v_cache, slots)
        # the table goes on behind the tokens stored so far: nothing of that may be read
        assert torch.equal(gather_pages(k_cache, table, end), key[:end])
        assert torch.equal(gather_pages(v_cache, table, end), value[:end])
    assert len(written(k_cache)) == length


@pytest.mark.parametrize("length", range(1, 14))
def test_block_boundaries(length):
    table = [5, 2, 7, 0]
    slots = slot_of(table, torch.arange(length), 4).tolist()
    assert slots == [table[p // 4] * 4 + p % 4 for p in range(length)]
    assert len(set(slots)) == length
    used = {slot // 4 for slot in slots}
    assert len(used) == -(-length // 4)


# Norm, rotation and store in one pass


def fused_case(num_tokens, num_heads, num_kv_heads, head_dim, dtype=torch.float32, norms=True, gap=0, device="cpu"):
    "Arguments of `norm_rope_store` up to the caches; rows of qkv lie `gap` numbers apart"
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width + gap)[:, :width]
    weights = torch.randn(2, head_dim).add(1).to(device, dtype) if norms else (None, None)
    table = rope_cos_sin(default_inv_freq(head_dim, 1e4), 300)
    positions = torch.randint(0, 300, (num_tokens,))
    qkv = torch.empty(num_tokens, width + gap, device=device, dtype=dtype)[:, :width].copy_(qkv)
    return qkv, positions.to(device), table.to(device), *weights, 1e-5


def fused_in_float64(qkv, positions, cos_sin, q_weight, k_weight, eps, num_kv_heads):
    "Queries, keys and values as they are written in a book"
    head_dim = cos_sin.shape[-1]
    heads = qkv.double().unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    if q_weight is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w.double() for x, w in ((q, q_weight), (k, k_weight))
        )
    cos, sin = cos_sin[positions].double()[:, None].unbind(2)
    partner = lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)
    return q * cos + partner(q) * sin, k * cos + partner(k) * sin, v


SHAPES = [  # tokens, query heads, key/value heads, head_dim
    (1, 9, 3, 64),    # one program, one row of its tile empty
    (4, 16, 8, 128),  # a program of queries, one of keys and values
    (2, 32, 8, 80),
    (3, 6, 1, 96),
    (2, 9, 3, 256),   # queries, keys and values meet in one program
    (5, 2, 2, 8),
    (1, 5, 5, 256),
]


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@on_devices("fused", FUSED)
def test_fused_in_float64(fused, shape, dtype, norms, device):
    num_tokens, num_heads, num_kv_heads, head_dim = shape
    arguments = fused_case(*shape, dtype, norms, gap=16, device=device)
    k_cache, v_cache = caches(3, 4, num_kv_heads, head_dim, device, dtype)
    slots = torch.randperm(12)[:num_tokens].to(device)
    before = arguments[0].clone()
    q = fused(*arguments, k_cache, v_cache, slots)
    assert q.shape == (num_tokens, num_heads, head_dim) and q.dtype == dtype and q.stride()[1:] == (head_dim, 1)
    assert torch.equal(arguments[0], before)
    stored_k, stored_v = (cache.flatten(0, 1)[slots] for cache in (k_cache, v_cache))
    expected = fused_in_float64(*arguments, num_kv_heads)
    assert torch.equal(stored_v.double(), expected[2])
    # up to four roundings: after the norm, after its weight, after the rotation, which adds two numbers
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for actual, wanted in zip((q, stored_k), expected):
        assert (actual.double() - wanted).abs().max() <= 3 * tolerance * wanted.abs().max()
    assert written(k_cache) == written(v_cache) == sorted(slots.tolist())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_kernel_rounds_as_the_twin(dtype, shape):
    torch.manual_seed(0)
    arguments = fused_case(*shape, dtype, device=DEVICES[-1])
    results = []
    for fused in FUSED[:2]:
        both = caches(3, 4, *shape[2:], DEVICES[-1], dtype)
        results.append((fused(*arguments, *both, torch.arange(shape[0], device=DEVICES[-1])), both.nan_to_num()))
    for one, other in zip(*results):
        different = (one != other).float().mean()  # sums in another order, on a GPU contracted: rarely, a last bit
        assert different < 0.01 and torch.allclose(one.float(), other.float(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_gives_the_same_bits_in_every_tile(monkeypatch, shape):
    "`store_tile` asks for the number of tokens; a request's numbers must not depend on the batch"
    arguments = fused_case(*shape, torch.bfloat16, device=DEVICES[-1])
    num_rows, head_dim = shape[1] + 2 * shape[2], shape[3]
    few, many = (store_tile(num_tokens, num_rows, head_dim) for num_tokens in (512, 513))
    assert few[:2] == many[:2] and many[2] == max(few[2] // 2, 1)
    results = []
    for tile in (few, many):
        monkeypatch.setattr("minivllm.kernels.kv_cache.store_tile", lambda *_: tile)
        both = caches(3, 4, *shape[2:], DEVICES[-1], torch.bfloat16)
        results.append((norm_rope_store_triton(*arguments, *both, torch.arange(shape[0], device=DEVICES[-1])), both.nan_to_num()))
    assert all(map(torch.equal, *results))


@settings(deadline=None, max_examples=40)
@given(slots=slot_mappings(), heads=st.sampled_from([(1, 1), (9, 3), (4, 2)]), head_dim=st.sampled_from([8, 16, 12]))
@pytest.mark.parametrize("fused", FUSED[:2])
def test_fused_writes_only_the_named_slots(fused, slots, heads, head_dim):
    num_heads, num_kv_heads = heads
    arguments = fused_case(len(slots), num_heads, num_kv_heads, head_dim, device=DEVICES[-1])
    blocks, k_cache, v_cache = guarded(num_kv_heads, head_dim)
    q = fused(*arguments, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64, device=DEVICES[-1]))
    expected_q, key, value = fused_in_float64(*arguments, num_kv_heads)
    assert torch.allclose(q.double(), expected_q, atol=1e-4)  # of padding tokens too
    expected = torch.full_like(blocks, torch.nan, dtype=torch.float64)
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected[:, 1 + slot // 4, slot % 4] = torch.stack((key[i], value[i]))
    assert torch.equal(blocks.isnan(), expected.isnan())
    assert torch.allclose(blocks.double().nan_to_num(), expected.nan_to_num(), atol=1e-4)


@on_devices("fused", FUSED)
def test_fused_without_tokens(fused, device):
    k_cache, v_cache = caches(device=device)
    q = fused(*fused_case(0, 9, 3, 8, device=device), k_cache, v_cache, torch.empty(0, dtype=torch.int64, device=device))
    assert q.shape == (0, 9, 8) and written(k_cache) == []


@on_devices("fused", FUSED)
def test_fused_takes_a_transposed_projection(fused, device):
    qkv, *rest = fused_case(3, 9, 3, 8, device=device)
    spread = qkv.t().contiguous().t()
    assert spread.stride(1) != 1
    results = []
    for x in (qkv, spread):
        both = caches(device=device)
        results.append((fused(x, *rest, *both, torch.tensor([7, -1, 2], device=device)), both))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1].nan_to_num(), results[1][1].nan_to_num(), atol=1e-5)


@pytest.mark.parametrize(
    "width, head_dim, message",
    [
        (15 * 8 + 4, 8, "don't fit"),  # no whole number of heads
        (6 * 8, 8, "don't fit"),       # no query heads
        (15 * 8, 16, "don't fit"),     # a table for other heads
    ],
)
def test_fused_kernel_refuses_what_does_not_fit(width, head_dim, message):
    table = rope_cos_sin(default_inv_freq(head_dim, 1e4), 4)
    with pytest.raises(ValueError, match=message):
        norm_rope_store_triton(
            torch.zeros(1, width), torch.tensor([1]), table, None, None, 1e-6, *caches(), torch.tensor([0])
        )
    gaps = torch.zeros(12, 4, 3, 8)[::2]
    with pytest.raises(ValueError, match="contiguous"):
        norm_rope_store_triton(*fused_case(1, 9, 3, 8), gaps, gaps, torch.tensor([0]))



def test_on_the_cpu_dispatchers_use_the_twins(monkeypatch):
    for name in ("store_kv_triton", "norm_rope_store_triton"):
        monkeypatch.setattr(f"minivllm.kernels.kv_cache.{name}", None)
    store_kv(*torch.randn(2, 1, 3, 8), *caches(), torch.tensor([0]))
    norm_rope_store(*fused_case(1, 9, 3, 8), *caches(), torch.tensor([0]))


# A projection that was split along its inputs: its sum is meant


def summed(qkv):
    "What the kernel sums in float32, rounded"
    total = qkv[0].float()
    for part in qkv[1:]:
        total = total + part.float()
    return total.to(qkv.dtype)


def store_splits(fused, qkv, rest, num_kv_heads, slots):
    "Queries, and the bits of caches that were empty"
    both = caches(3, 4, num_kv_heads, rest[1].shape[-1], qkv.device, qkv.dtype)
    q = fused(qkv, *rest, *both, torch.tensor(slots, dtype=torch.int64, device=qkv.device))
    return q, both.view({2: torch.int16, 4: torch.int32}[qkv.element_size()])


SPLIT_SHAPES = [*SHAPES, (3, 4, 2, 12), (2, 5, 1, 6)]


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", SPLIT_SHAPES)
def test_fused_kernel_of_splits_is_that_of_their_sum(shape, splits, dtype, norms):
    "Bit for bit, in queries and caches; the last token is padding"
    torch.manual_seed(0)
    num_tokens, _, num_kv_heads, _ = shape
    qkv, *rest = fused_case(*shape, dtype, norms, device=DEVICES[-1])
    qkv = torch.stack([qkv, *torch.randn(splits - 1, *qkv.shape, device=DEVICES[-1]).to(dtype)])
    before, slots = qkv.clone(), [7, 2, 11, 0, 4][: num_tokens - 1] + [-1]
    ours, expected = (store_splits(norm_rope_store_triton, x, rest, num_kv_heads, slots) for x in (qkv, summed(qkv)))
    assert ours[0].shape == shape[:2] + shape[3:] and ours[0].dtype == dtype
    assert all(map(torch.equal, ours, expected)) and torch.equal(qkv, before)


@pytest.mark.parametrize("view", [
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),  # a token's splits side by side
    lambda x: torch.cat((x, x), 2)[..., : x.shape[2]],
    lambda x: x.mT.contiguous().mT,
    lambda x: torch.cat((x, x))[::2],
])
def test_fused_kernel_of_splits_in_any_layout(view):
    _, *rest = fused_case(3, 9, 3, 8, device=DEVICES[-1])
    x = view(torch.randn(4, 3, 120, device=DEVICES[-1]))
    ours, expected = (store_splits(norm_rope_store_triton, y, rest, 3, [7, -1, 2]) for y in (x, summed(x)))
    assert all(map(torch.equal, ours, expected))


def test_fused_kernel_of_splits_without_tokens():
    qkv, *rest = fused_case(0, 9, 3, 8, device=DEVICES[-1])
    assert store_splits(norm_rope_store_triton, qkv.expand(2, 0, 120), rest, 3, [])[0].shape == (0, 9, 8)


@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_without_a_kernel(dtype, norms, monkeypatch):
    monkeypatch.setattr("minivllm.kernels.kv_cache.norm_rope_store_triton", None)
    qkv, *rest = fused_case(4, 9, 3, 8, dtype, norms)
    qkv = torch.stack((qkv, *torch.randn(2, *qkv.shape).to(dtype)))
    ours = store_splits(norm_rope_store, qkv, rest, 3, [7, -1, 2, 5])
    expected = store_splits(norm_rope_store_torch, qkv.sum(0), rest, 3, [7, -1, 2, 5])
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("change, message", [
    (dict(width=15 * 8 + 4), "don't fit"),
    (dict(width=6 * 8), "don't fit"),
    (dict(tokens=3), "3 tokens, but slots for 1"),  # not the number of splits
    (dict(dtype=torch.float16), "torch.float16 doesn't go with caches of torch.float32"),
])
def test_fused_kernel_refuses_splits_that_do_not_fit(change, message):
    change = dict(tokens=1, width=120, dtype=torch.float32) | change
    qkv = torch.zeros(2, change["tokens"], change["width"], dtype=change["dtype"])
    with pytest.raises(ValueError, match=message):
        norm_rope_store_triton(qkv, *fused_case(1, 9, 3, 8)[1:], *caches(), torch.tensor([0]))
