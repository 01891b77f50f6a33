"RMSNorm against transformers', its float32 statistics, the fused residual add, and the kernel against its twin."
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minivllm.layers.layernorm import (
    RMSNorm,
    add_rms_norm,
    add_rms_norm_torch,
    add_rms_norm_triton,
    launch_config,
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
)
from paging import KERNEL_DEVICES

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


# The kernel: in the interpreter, and on a GPU where there is one


def normed(x, weight, eps=1e-5):
    "The definition in float64"
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_like_twin(y, twin):
    "The same roundings: in half precision nearly all bits agree, in float32 all but the last few"
    assert y.dtype == twin.dtype and y.shape == twin.shape and y.is_contiguous()
    step = torch.finfo(y.dtype).eps
    assert ((y.double() - twin.double()).abs() <= 4 * step * twin.double().abs() + 1e-7).all()
    if y.dtype != torch.float32:
        assert (y != twin).double().mean() < 0.01


def check_both(x, residual, weight):
    "Both kernels against the twins and float64; what they return"
    tolerance = 4 * torch.finfo(x.dtype).eps
    y = rms_norm_triton(x, weight, 1e-5)
    assert_like_twin(y, rms_norm_torch(x, weight, 1e-5))
    torch.testing.assert_close(y.double(), normed(x, weight), rtol=tolerance, atol=1e-7)
    y, stream = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert torch.equal(stream, residual + x) and stream.is_contiguous()
    assert_like_twin(y, add_rms_norm_torch(x, residual, weight, 1e-5)[0])
    torch.testing.assert_close(y.double(), normed(stream, weight), rtol=tolerance, atol=1e-7)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (33, 64), (5, 1), (3, 77), (2, 576), (1, 4096), (7,), (2, 3, 40), (2, 2, 3, 16)])
def test_kernel_like_twin_and_definition(shape, dtype, device):
    x, residual = ((3 * random(*shape, seed=seed)).to(device, dtype) for seed in range(2))
    check_both(x, residual, (0.5 + random(shape[-1], seed=2).abs()).to(device, dtype))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [
    lambda x: x[:, 3:5],  # heads in a packed tensor
    lambda x: x[1:, 4],  # one head of every token
    lambda x: x.transpose(0, 1),
    lambda x: x[..., ::2],
    lambda x: x[..., 1:],
    lambda x: x.transpose(1, 2),
    lambda x: x.transpose(0, 1)[None],
    lambda x: x[:1].expand(4, 6, 16),
])
def test_kernel_reads_any_layout(view, dtype, device):
    x, residual = (view(random(5, 6, 16, seed=seed).to(device, dtype)) for seed in range(2))
    before = x.clone()
    check_both(x, residual, view(random(5, 6, 16, seed=2).abs().to(device, dtype)).flatten()[: x.shape[-1]])
    check_both(x, residual.contiguous(), random(2 * x.shape[-1], seed=3).abs().to(device, dtype)[::2])
    assert torch.equal(x, before)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shape", [(0, 64), (0, 3, 16), (2, 0, 16)])
def test_kernel_of_nothing(shape, device):
    x, weight = torch.empty(shape, device=device), torch.ones(shape[-1], device=device)
    assert rms_norm_triton(x, weight, 1e-5).shape == shape
    y, stream = add_rms_norm_triton(x, x, weight, 1e-5)
    assert y.shape == stream.shape == shape


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_kernel_rounds_the_stream_before_it_is_normalised(device):
    "1 + 2**-9 is 1 in bfloat16; normalised unrounded, the first number would come out larger than the second"
    x = torch.tensor([[2.0**-9, 0.0] * 8], dtype=torch.bfloat16, device=device)
    residual, weight = torch.ones_like(x), torch.full((16,), 255.0, dtype=torch.bfloat16, device=device)
    y, stream = add_rms_norm_triton(x, residual, weight, 1e-6)
    assert torch.equal(stream, torch.ones_like(x)) and torch.equal(y, weight.expand(1, 16))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_kernel_leaves_what_it_does_not_own(device):
    "Rows that share a program with the last ones, and columns of the padding, are not written"
    buffer = torch.full((3, 7, 12), 9.0, device=device)
    before = buffer.clone()
    x = buffer[:, 2:5]
    y = rms_norm_triton(x, torch.ones(12, device=device), 1e-6)
    torch.testing.assert_close(y, torch.ones(3, 3, 12, device=device))
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(dtype, device):
    x, residual, weight = (random(n, 96, seed=n).to(device, dtype) for n in (40, 40, 1))
    alone = [rms_norm_triton(x[i : i + 1], weight[0], 1e-5) for i in (0, 17, 39)]
    assert torch.equal(rms_norm_triton(x, weight[0], 1e-5)[[0, 17, 39]], torch.cat(alone))
    alone = [add_rms_norm_triton(x[i : i + 1], residual[i : i + 1], weight[0], 1e-5)[0] for i in (0, 17, 39)]
    assert torch.equal(add_rms_norm_triton(x, residual, weight[0], 1e-5)[0][[0, 17, 39]], torch.cat(alone))


def test_a_weight_that_must_be_copied_is_not_read_early(monkeypatch):
    "The kernel reads its weight before the one in front has ended; the copy is that one"
    asked = []
    monkeypatch.setattr("minivllm.layers.layernorm.early_launch", lambda device: asked.append(device) or {})
    x, weight = random(3, 16).to(KERNEL_DEVICES[-1]), random(32, seed=1).to(KERNEL_DEVICES[-1])
    rms_norm_triton(x, weight[:16], 1e-5)
    assert len(asked) == 1
    rms_norm_triton(x, weight[::2], 1e-5), add_rms_norm_triton(x, x, weight[::2], 1e-5)
    assert len(asked) == 1


def test_kernel_refuses_what_does_not_fit():
    x, weight = torch.randn(2, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"weight of shape \(32,\) for rows of 64"):
        rms_norm_triton(x, weight[:32], 1e-5)
    with pytest.raises(ValueError, match=r"residual torch.float32 \(1, 64\)"):
        add_rms_norm_triton(x, x[:1], weight, 1e-5)
    with pytest.raises(ValueError, match="residual torch.float16"):
        add_rms_norm_triton(x, x.half(), weight, 1e-5)



def test_launch_configs_fit():
    for size in (1, 64, 80, 128, 576, 896, 1024, 1536, 4096, 5120, 16384):
        config = launch_config(size)
        assert config["BLOCK"] >= size > config["BLOCK"] // 2
        threads = 32 * config["num_warps"]
        assert 128 <= threads <= 512
        assert 16 <= config["ROWS"] * config["BLOCK"] // threads <= 32  # numbers in registers


@pytest.mark.skipif("cuda" not in KERNEL_DEVICES, reason="the dispatcher chooses the kernel on a GPU only")
@pytest.mark.parametrize("hidden_size", [128, 1024, 4096, 5120, 16384])
def test_dispatcher_on_the_gpu(hidden_size):
    x, residual = (random(300, hidden_size, seed=seed, dtype=torch.bfloat16).cuda() for seed in range(2))
    weight = random(hidden_size, seed=2, dtype=torch.bfloat16).cuda()
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_triton(x, weight, 1e-6))
    y, stream = add_rms_norm(x, residual, weight, 1e-6)
    expected = add_rms_norm_triton(x, residual, weight, 1e-6)
    assert torch.equal(y, expected[0]) and torch.equal(stream, expected[1])
    check_both(x, residual, weight)


@pytest.mark.skipif("cuda" not in KERNEL_DEVICES, reason="needs a GPU's memory")
def test_offsets_beyond_32_bits():
    "The last of 2**21 + 1 rows of 1024 begins at element 2**31"
    x = torch.ones(2**21 + 1, 1024, dtype=torch.bfloat16, device="cuda")
    x[-1] = 3 * torch.arange(1024, device="cuda")
    weight = torch.ones(1024, dtype=torch.bfloat16, device="cuda")
    y = rms_norm_triton(x, weight, 0.0)
    assert_like_twin(y[-1:], rms_norm_torch(x[-1:], weight, 0.0))
    assert torch.equal(y[:-1:4096], torch.ones_like(y[:-1:4096]))


# Products that were split along their inputs: their sum is what is added


SPLIT_SHAPES = [(5, 64), (33, 64), (3, 77), (1, 576), (7,), (2, 3, 40), (2, 2, 3, 16), (5, 1)]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SPLIT_SHAPES)
def test_kernel_sums_splits_and_rounds_once(shape, splits, dtype, device):
    x, residual = (3 * random(splits, *shape)).to(device, dtype), random(*shape, seed=1).to(device, dtype)
    before, weight = x.clone(), (0.5 + random(shape[-1], seed=2).abs()).to(device, dtype)
    y, stream = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert torch.equal(x, before) and y.shape == stream.shape == shape and y.dtype == stream.dtype == dtype
    terms = torch.cat((x, residual[None])).double()
    step = torch.finfo(dtype).eps
    assert ((stream.double() - terms.sum(0)).abs() <= step / 2 * terms.sum(0).abs() + splits * 2**-24 * terms.abs().sum(0)).all()
    torch.testing.assert_close(y.double(), normed(stream, weight), rtol=4 * step, atol=1e-7)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_splits_are_summed_in_float32(device):
    "In bfloat16 256 + 1 is 256"
    x = torch.tensor([256.0, 1.0, 1.0, -256.0], device=device).bfloat16()[:, None, None].expand(4, 2, 16)
    residual, weight = torch.zeros(2, 16, device=device).bfloat16(), torch.ones(16, device=device).bfloat16()
    assert torch.equal(add_rms_norm_triton(x, residual, weight, 1e-5)[1], residual + 2)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SPLIT_SHAPES)
def test_a_single_split_is_the_plain_case(shape, dtype, device):
    x, residual = (random(*shape, seed=seed).to(device, dtype) for seed in range(2))
    weight = random(shape[-1], seed=2).to(device, dtype)
    pairs = zip(add_rms_norm_triton(x[None], residual, weight, 1e-5), add_rms_norm_triton(x, residual, weight, 1e-5))
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [
    lambda x: x.transpose(0, 1),  # a token's splits side by side
    lambda x: x[..., ::2],
    lambda x: x[..., 1:],
    lambda x: x[1:, ::2],
    lambda x: x.transpose(1, 2),
    lambda x: x[:1].expand(4, 6, 16),
    lambda x: x.unflatten(1, (2, 3)).transpose(1, 2),
])
def test_kernel_sums_splits_in_any_layout(view, dtype, device):
    x = view(random(5, 6, 16).to(device, dtype))
    residual = view(random(5, 6, 16, seed=1).to(device, dtype))[0]
    weight = random(x.shape[-1], seed=2).abs().to(device, dtype)
    pairs = zip(add_rms_norm_triton(x, residual, weight, 1e-5), add_rms_norm_triton(x.clone(memory_format=torch.contiguous_format), residual.contiguous(), weight, 1e-5))
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_splits_does_not_depend_on_its_batch(dtype, device):
    x, residual, weight = (t.to(device, dtype) for t in (random(4, 40, 96), random(40, 96, seed=1), random(96, seed=2)))
    together = add_rms_norm_triton(x, residual, weight, 1e-5)
    for i in (0, 17, 39):
        alone = add_rms_norm_triton(x[:, i : i + 1], residual[i : i + 1], weight, 1e-5)
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shape", [(3, 0, 64), (2, 2, 0, 16)])
def test_splits_of_nothing(shape, device):
    residual, weight = torch.empty(shape[1:], device=device), torch.ones(shape[-1], device=device)
    y, stream = add_rms_norm_triton(torch.empty(shape, device=device), residual, weight, 1e-5)
    assert y.shape == stream.shape == shape[1:]


@pytest.mark.parametrize("shape, stream", [
    ((2, 5, 8), (4, 8)), ((2, 5, 8), (2, 8)), ((2, 5, 8), (1, 8)), ((2, 5, 8), (8,)), ((0, 5, 8), (5, 8)), ((2, 2, 5, 8), (5, 8)), ((5, 8), (2, 5, 8)),
])
def test_kernel_refuses_splits_of_another_shape(shape, stream):
    with pytest.raises(ValueError) as error:
        add_rms_norm_triton(torch.ones(shape), torch.ones(stream), torch.ones(8), 1e-5)
    assert str(shape) in str(error.value) and str(stream) in str(error.value)
    with pytest.raises(ValueError, match="residual torch.float16"):
        add_rms_norm_triton(torch.ones(2, 5, 8), torch.ones(5, 8).half(), torch.ones(8), 1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_without_a_kernel(dtype, monkeypatch):
    "The dispatcher and the layer, in torch"
    monkeypatch.setattr("minivllm.layers.layernorm.add_rms_norm_triton", None)
    x, residual, norm = random(4, 9, 32, dtype=dtype), random(9, 32, seed=1, dtype=dtype), RMSNorm(32, eps=1e-5).to(dtype)
    norm.weight.data.copy_(random(32, seed=2))
    expected = add_rms_norm_torch(x.double().sum(0).to(dtype), residual, norm.weight, 1e-5)
    tolerance = dict(rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    for pair in (add_rms_norm(x, residual, norm.weight, 1e-5), norm(x, residual)):
        for ours, wanted in zip(pair, expected):
            torch.testing.assert_close(ours, wanted, **tolerance)
    assert all(map(torch.equal, norm(x[:1], residual), norm(x[0], residual)))
