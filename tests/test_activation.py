"The gated activations against transformers', and what they must leave alone."
import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from minivllm.layers import activation
from minivllm.layers.activation import (
    GeluAndMul,
    SiluAndMul,
    gelu_and_mul,
    gelu_and_mul_torch,
    gelu_and_mul_triton,
    launch_config,
    silu_and_mul,
    silu_and_mul_torch,
    silu_and_mul_triton,
)
from paging import KERNEL_DEVICES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # relative: two roundings
IMPLEMENTATIONS = {  # name -> kernel, twin, their other arguments
    "silu": (silu_and_mul_triton, silu_and_mul_torch, ()),
    "gelu": (gelu_and_mul_triton, gelu_and_mul_torch, ()),
    "gelu_pytorch_tanh": (gelu_and_mul_triton, gelu_and_mul_torch, ("tanh",)),
}
SHAPES = {"one token": (1, 64), "no token": (0, 64), "narrow": (5, 2), "odd": (3, 2 * 37), "one row": (80,), "three": (2, 3, 24), "blocks": (3, 2 * 1300)}
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


def assert_near(y, expected, dtype):
    "Near `expected`, in units of the dtype: relative, and absolute where activations cancel to almost nothing"
    torch.testing.assert_close(y.double(), expected.double(), rtol=TOLERANCE[dtype], atol=max(TOLERANCE[dtype], 1e-5))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_kernel_equals_twin_and_float64(name, shape, dtype, device):
    kernel, twin, args = IMPLEMENTATIONS[name]
    x = gate_up(*shape, dtype=dtype).to(device)
    before = x.clone()
    y = kernel(x, *args)
    assert y.dtype == dtype and y.shape == (*shape[:-1], shape[-1] // 2) and y.is_contiguous()
    assert torch.equal(x, before)
    assert_near(y, twin(x, *args), dtype)
    assert_near(y, twin(x.double(), *args), dtype)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_rounds_where_the_twin_does(dtype, device):
    "Once after SiLU and once after the product: rounding only at the end gives other bits in every fifth number or so"
    x = gate_up(50, 64, dtype=dtype).to(device)
    gate, up = x.float().chunk(2, -1)
    twin = silu_and_mul_torch(x)
    assert (silu_and_mul_triton(x) == twin).float().mean() > 0.99
    assert ((F.silu(gate) * up).to(dtype) == twin).float().mean() < 0.95


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_kernel_on_strided_rows(name, device):
    kernel, twin, args = IMPLEMENTATIONS[name]
    x = gate_up(6, 8, 96).to(device)
    views = {
        "row stride": x[0, :, 3:67], "every second row": x[0, ::2], "uneven rows": x[:, 1:, :32],
        "column stride": x[0, :, ::2], "transposed": x[0, :, :8].T, "repeated": x[0, :1].expand(4, 96),
    }
    for what, view in views.items():
        torch.testing.assert_close(kernel(view, *args), twin(view, *args), msg=lambda m: f"{what}: {m}")


def test_kernel_keeps_the_tails():
    "Far out the activation is 0 or the gate, not NaN"
    for device in KERNEL_DEVICES:
        x = torch.tensor([[-1e30, -200.0, 200.0, 1e30, 1.0, 1.0, 1.0, 1.0]], device=device)
        for kernel, _, args in IMPLEMENTATIONS.values():
            assert kernel(x, *args).tolist() == [[0, 0, 200, pytest.approx(1e30)]]


@pytest.mark.parametrize("kernel", [silu_and_mul_triton, gelu_and_mul_triton])
def test_kernel_refuses_an_odd_width(kernel):
    with pytest.raises(ValueError, match="last dimension is 7"):
        kernel(torch.randn(2, 7))


def test_kernel_refuses_an_unknown_approximation():
    with pytest.raises(ValueError, match="'erf'"):
        gelu_and_mul_triton(torch.randn(2, 8), "erf")


@pytest.mark.parametrize("size", [1, 37, 256, 768, 1000, 1024, 1536, 3072, 8192, 9728, 11008, 18944, 25600])
def test_launch_config(size):
    block, num_warps = launch_config(size)
    assert block & (block - 1) == 0 and num_warps & (num_warps - 1) == 0
    assert block == 8 * 32 * num_warps or block < 256  # 16 bytes of bfloat16 per thread
    blocks = -(-size // block)
    assert (blocks - 1) * block < size  # no program without work
    assert blocks * block - size < max(size / 8, 256)  # few idle threads


def test_nothing_is_launched_for_no_rows(monkeypatch):
    monkeypatch.setattr(activation, "act_and_mul_kernel", None)  # a GPU refuses a grid of no programs
    assert silu_and_mul_triton(torch.empty(0, 8)).shape == (0, 4)
    assert gelu_and_mul_triton(torch.empty(2, 0, 8)).shape == (2, 0, 4)


def test_dispatchers_launch_where_kernels_can(monkeypatch):
    monkeypatch.setattr(activation, "can_launch", lambda device: True)
    monkeypatch.setattr(activation, "silu_and_mul_torch", None)
    monkeypatch.setattr(activation, "gelu_and_mul_torch", None)
    x = gate_up(3, 8).to(KERNEL_DEVICES[0])
    torch.testing.assert_close(SiluAndMul()(x), silu_and_mul_torch(x))
    torch.testing.assert_close(GeluAndMul("tanh")(x), gelu_and_mul_torch(x, "tanh"))
