"The gated activations against transformers', and what they must leave alone."
import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from minivllm.layers.activation import (
    GeluAndMul,
    SiluAndMul,
    gelu_and_mul,
    gelu_and_mul_torch,
    silu_and_mul,
    silu_and_mul_torch,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS = {
    "silu": SiluAndMul(),
    "gelu": GeluAndMul(),
    "gelu_pytorch_tanh": GeluAndMul("tanh"),
}


def gate_up(*shape, dtype=torch.float32):
    "Seeded input, large enough to reach both tails"
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_equals_transformers(name, dtype):
    x = gate_up(7, 64, dtype=dtype)
    gate, up = x[:, :32], x[:, 32:]
    y = LAYERS[name](x)
    assert y.dtype == dtype
    assert torch.equal(y, ACT2FN[name](gate) * up)


def test_gate_is_the_first_half():
    x = torch.tensor([[-100.0, 3.0]])
    assert silu_and_mul(x).item() == pytest.approx(0, abs=1e-30)
    assert silu_and_mul(x.flip(-1)).item() == pytest.approx(3 * -100 / (1 + torch.e**-3), rel=1e-6)


@pytest.mark.parametrize("fn", [silu_and_mul, silu_and_mul_torch, gelu_and_mul, gelu_and_mul_torch])
def test_any_leading_shape_and_input_untouched(fn):
    x = gate_up(2, 3, 16)
    before = x.clone()
    y = fn(x)
    assert torch.equal(x, before)
    assert torch.equal(y, torch.stack([fn(x[0]), fn(x[1])]))
    assert fn(x[:0]).shape == (0, 3, 8)


def test_strided_input():
    x = gate_up(5, 40)
    assert torch.equal(silu_and_mul(x[:, 4:20]), silu_and_mul(x[:, 4:20].contiguous()))


def test_exact_and_tanh_gelu_are_two_functions():
    x = gate_up(64, 64)
    difference = (gelu_and_mul(x) - gelu_and_mul(x, "tanh")).abs().max()
    assert 1e-5 < difference < 1e-1
    exact = x[:, :32] * 0.5 * (1 + torch.erf(x[:, :32] / 2**0.5)) * x[:, 32:]
    assert torch.allclose(gelu_and_mul(x), exact, atol=1e-5)


def test_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match="'erf'.*'none' and 'tanh'"):
        GeluAndMul("erf")


def test_dispatchers_use_the_twin():
    x = gate_up(3, 8)
    assert torch.equal(silu_and_mul(x), silu_and_mul_torch(x))
    for approximate in ("none", "tanh"):
        assert torch.equal(gelu_and_mul(x, approximate), gelu_and_mul_torch(x, approximate))
        assert torch.equal(gelu_and_mul(x, approximate), F.gelu(x[:, :4], approximate=approximate) * x[:, 4:])
