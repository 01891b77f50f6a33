"Budgets, block counts and the pool's tensors"
import os
import re
from pathlib import Path

import pytest
import torch

from minivllm.engine import kv_pool
from minivllm.engine.kv_pool import (
    GIB, allocate_kv_cache, block_bytes, check_pool_fits, cpu_budget, kv_budget, machine_memory, num_blocks_for,
)
from minivllm.kernels.kv_cache import gather_pages, store_kv


def test_bytes_of_a_block():
    assert block_bytes(2, 4, 2, 16, torch.float32) == 2 * 2 * 4 * 2 * 16 * 4 == 2048
    assert block_bytes(30, 1, 3, 64, torch.bfloat16) == 23_040  # SmolLM2
    assert block_bytes(28, 1, 8, 128, torch.bfloat16) == 114_688  # Qwen3-0.6B
    assert block_bytes(32, 1, 8, 128, torch.bfloat16) == 131_072  # Llama-3.1-8B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_bytes_is_what_the_pool_takes(dtype):
    caches = allocate_kv_cache(3, 7, 4, 2, 16, dtype, "cpu")
    assert sum(cache.nbytes for layer in caches for cache in layer) == 7 * block_bytes(3, 4, 2, 16, dtype)


def test_budgets():
    assert kv_budget(80, 30, 10, 5, 0.9) == 35  # 72 would be allowed, 50 are there
    assert kv_budget(80, 0, 10, 5, 0.9) == 57
    assert kv_budget(80, 0, 10, 5, 1.0) == 65
    assert kv_budget(80, 8, 10, 5, 0.9) == 57  # what others hold within the rest costs nothing


def test_two_engines_share_a_gpu_whoever_comes_first():
    first = kv_budget(80, 0, 10, 5, 0.45)
    second = kv_budget(80, 10 + 5 + first, 10, 5, 0.45)
    assert first == second == 21


def test_no_budget_is_an_error_with_every_term():
    with pytest.raises(MemoryError) as error: kv_budget(80, 65, 10, 5, 0.9)
    for term in ("total 80", "others 65", "weights 10", "activations 5", "0.9"): assert term in str(error.value)
    with pytest.raises(MemoryError): kv_budget(80, 0, 70, 5, 0.9)


@pytest.mark.parametrize("utilization", [0, 1.2, -0.1, float("nan")])
def test_a_share_outside_of_its_range_is_refused(utilization):
    with pytest.raises(ValueError, match="gpu_memory_utilization"): kv_budget(80, 0, 10, 5, utilization)


def test_blocks_fill_the_budget_but_not_more_than_can_be_used():
    assert num_blocks_for(10 * 2048 + 2047, 2048, 4, 16) == 10
    assert num_blocks_for(GIB, 2048, 4, 16) == 64
    with pytest.raises(MemoryError, match="1 KV blocks"): num_blocks_for(2047, 2048, 4, 16)


def test_a_pool_that_does_not_fit_is_refused_with_need_and_capacity():
    check_pool_fits(4, GIB, 4 * GIB)
    with pytest.raises(MemoryError) as error: check_pool_fits(5, GIB, 4 * GIB)
    assert "5 GiB" in str(error.value) and "4 GiB" in str(error.value) and "num_kv_blocks" in str(error.value)


def test_cpu_budget(monkeypatch):
    assert machine_memory() > 2**26
    monkeypatch.setattr(kv_pool, "machine_memory", lambda: 64 * GIB)
    assert cpu_budget() == GIB
    monkeypatch.setattr(kv_pool, "machine_memory", lambda: GIB)
    assert cpu_budget() == GIB // 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))])
def test_the_pool_is_zero_contiguous_and_apart_by_layer(device):
    caches = allocate_kv_cache(3, 5, 4, 2, 16, torch.float32, device)
    assert len(caches) == 3
    flat = [cache for layer in caches for cache in layer]
    for cache in flat:
        assert cache.shape == (5, 4, 2, 16) and cache.is_contiguous() and cache.device.type == device
        assert cache.count_nonzero() == 0
    for i, cache in enumerate(flat): cache.fill_(i + 1)
    assert [cache.unique().tolist() for cache in flat] == [[i + 1] for i in range(6)]


def test_what_goes_into_slots_comes_back_through_the_table():
    k_cache, v_cache = allocate_kv_cache(2, 6, 4, 2, 16, torch.float32, "cpu")[1]
    key, value = torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    slots = torch.tensor([5 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2])
    store_kv(key, value, k_cache, v_cache, slots)
    table = torch.tensor([5, 2], dtype=torch.int32)
    assert torch.equal(gather_pages(k_cache, table, 7), key) and torch.equal(gather_pages(v_cache, table, 7), value)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_pages_that_nobody_wrote_cost_no_memory():
    def resident(): return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    before = resident()
    caches = allocate_kv_cache(4, 4096, 16, 2, 64, torch.float32, "cpu")  # 256 MiB
    assert resident() - before < 32 * 2**20
    caches[0][0][:1024] = 1  # 8 MiB
    assert resident() - before < 64 * 2**20
    assert os.sysconf("SC_PAGE_SIZE") <= 2**21
