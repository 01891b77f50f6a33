"Keys and values in pages: what is stored where, and what is never touched"
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import DEVICES, slot_of

from minivllm.kernels.kv_cache import gather_pages, store_kv, store_kv_torch

STORES = [store_kv_torch, store_kv]
on_devices = pytest.mark.parametrize("device", DEVICES)


def caches(num_blocks=6, block_size=4, num_kv_heads=3, head_dim=8, device="cpu", dtype=torch.float32):
    "Empty caches: NaN marks slots that were never written"
    return torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, device=device, dtype=dtype)


def written(cache):
    "Slots that hold something"
    return cache.flatten(0, 1).isnan().logical_not().flatten(1).any(1).nonzero().flatten().tolist()


@on_devices
@pytest.mark.parametrize("store", STORES)
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


@on_devices
@pytest.mark.parametrize("store", STORES)
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


def test_no_tokens():
    k_cache, v_cache = caches()
    store_kv(torch.empty(0, 3, 8), torch.empty(0, 3, 8), k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    assert written(k_cache) == []


def test_keys_as_a_slice_of_packed_qkv():
    k_cache, v_cache = caches()
    heads = torch.randn(2, 15, 8)  # 9 query, 3 key, 3 value heads
    store_kv(heads[:, 9:12], heads[:, 12:], k_cache, v_cache, torch.tensor([6, 1]))
    assert torch.equal(k_cache[1, 2], heads[0, 9:12]) and torch.equal(v_cache[0, 1], heads[1, 12:])


@pytest.mark.parametrize("which", [0, 1])
def test_a_cache_with_gaps_is_refused(which):
    # a copy of it would be written, and the write be lost
    both = list(torch.zeros(2, 6, 4, 3, 8))
    both[which] = torch.zeros(12, 4, 3, 8)[::2]
    with pytest.raises(RuntimeError, match="view"):
        store_kv(*torch.randn(2, 1, 3, 8), *both, torch.tensor([0]))


def test_a_slot_outside_the_pool_is_an_error():
    k_cache, v_cache = caches()
    with pytest.raises(IndexError):
        store_kv(*torch.randn(2, 1, 3, 8), k_cache, v_cache, torch.tensor([24]))
    assert written(k_cache) == []


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
    chunk=st.integers(1, 41),
    seed=st.integers(0, 1000),
)
def test_round_trip(length, block_size, chunk, seed):
    torch.manual_seed(seed)
    num_blocks = -(-length // block_size) + 3
    k_cache, v_cache = caches(num_blocks, block_size)
    table = torch.randperm(num_blocks).int()
    key, value = torch.randn(2, length, 3, 8)
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        slots = slot_of(table, torch.arange(start, end), block_size)
        store_kv(key[start:end], value[start:end], k_cache, v_cache, slots)
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
