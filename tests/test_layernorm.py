"RMSNorm against transformers', its float32 statistics, and the fused residual add."
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minivllm.layers.layernorm import (
    RMSNorm,
    add_rms_norm,
    add_rms_norm_torch,
    rms_norm,
    rms_norm_torch,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_transformers_bit_for_bit(dtype, eps):  # F54
    weight = 1 + 0.3 * random(64, seed=1)
    ours, theirs = RMSNorm(64, eps=eps), LlamaRMSNorm(64, eps=eps)
    for norm in (ours, theirs):
        norm.weight.data.copy_(weight)
        norm.to(dtype)
    x = (8 * random(33, 64)).to(dtype)
    with torch.inference_mode():
        assert torch.equal(ours(x), theirs(x))


def test_statistics_are_float32():  # F54
    "Statistics in bfloat16 are a bfloat16 step or more off; ours round once"
    x = (8 * random(4, 64)).to(torch.bfloat16)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    y = rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 1e-6).double()
    assert ((y - exact).abs() <= exact.abs() * 2**-8).all()


def test_float16_squares_do_not_overflow():
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_no_mean_is_subtracted():
    y = rms_norm(torch.full((1, 8), 5.0), torch.ones(8), 0.0)
    assert torch.equal(y, torch.ones(1, 8))


def test_eps_comes_from_the_constructor_and_guards_zeros():  # F54
    x = torch.full((1, 8), 1e-3)
    assert RMSNorm(8, eps=1e-6)(x)[0, 0].item() == pytest.approx(2**-0.5, rel=1e-4)
    assert RMSNorm(8, eps=0.1)(x)[0, 0].item() == pytest.approx(1e-3 / 0.1**0.5, rel=1e-3)
    assert torch.equal(RMSNorm(8)(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_equals_add_then_norm(dtype):  # F54
    x, residual = (random(9, 32, seed=seed, dtype=dtype) for seed in range(2))
    weight = random(32, seed=2, dtype=dtype)
    y, stream = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, x + residual)
    assert torch.equal(y, rms_norm(x + residual, weight, 1e-5))
    assert y.dtype == stream.dtype == dtype


@torch.inference_mode()
def test_arguments_stay_as_they_are():
    x, residual, norm = random(2, 3, 8), random(2, 3, 8, seed=1), RMSNorm(8)
    before = x.clone(), residual.clone()
    norm(x)
    _, stream = norm(x, residual)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert stream.data_ptr() not in (x.data_ptr(), residual.data_ptr())


@torch.inference_mode()
def test_layer_without_and_with_residual():
    x, residual, norm = random(5, 8), random(5, 8, seed=1), RMSNorm(8, eps=1e-5)
    norm.weight.data.copy_(random(8, seed=2))
    assert torch.equal(norm(x), rms_norm_torch(x, norm.weight, 1e-5))
    y, stream = norm(x, residual)
    expected = add_rms_norm_torch(x, residual, norm.weight, 1e-5)
    assert torch.equal(y, expected[0]) and torch.equal(stream, expected[1])


@torch.inference_mode()
def test_chain_of_fused_norms_equals_the_textbook():  # F54
    "The first residual is the raw embedding, not its norm"
    norms = [RMSNorm(16) for _ in range(4)]
    mixers = [random(16, 16, seed=s) / 4 for s in range(4)]
    embedding = 0.05 * random(3, 16, seed=9)
    x, residual, h = embedding, None, embedding
    for norm, mixer in zip(norms, mixers):
        x, residual = (norm(x), x) if residual is None else norm(x, residual)
        x = x @ mixer
        h = h + norm(h) @ mixer
    assert torch.equal(x + residual, h)


@torch.inference_mode()
def test_per_head_and_empty():
    heads, norm = random(3, 9, 64), RMSNorm(64)
    norm.weight.data.copy_(random(64, seed=1))
    assert torch.equal(norm(heads)[:, 4], norm(heads[:, 4]))
    strided = random(3, 15, 64)[:, 9:12]
    assert torch.equal(norm(strided), norm(strided.contiguous()))
    assert norm(heads[:0]).shape == (0, 9, 64)
