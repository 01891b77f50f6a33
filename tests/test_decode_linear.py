"Linear layers of few rows, with what stands before and behind them, against their twins and float64"
import itertools

import pytest
import torch

from minivllm.kernels.decode_linear import (
    LinearConfig,
    linear_config,
    linear_residual,
    linear_residual_torch,
    linear_residual_triton,
    norm_gate_up_silu,
    norm_gate_up_silu_torch,
    norm_gate_up_silu_triton,
    norm_linear,
    norm_linear_torch,
    norm_linear_triton,
)
from minivllm.kernels import decode_fused, decode_linear
from paging import KERNEL_DEVICES

EPS = 1e-5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SIZES = [(14, 64), (7, 100)]  # outputs, inputs
OPS = {
    "norm_linear": (norm_linear_torch, norm_linear_triton, norm_linear),
    "norm_gate_up_silu": (norm_gate_up_silu_torch, norm_gate_up_silu_triton, norm_gate_up_silu),
    "linear_residual": (linear_residual_torch, linear_residual_triton, linear_residual),
    "no norm": (norm_linear_torch, norm_linear_triton, norm_linear),
}


def arguments(op, rows, sizes, dtype=torch.float32, bias=False, device="cpu", seed=0):
    "Of one of the operations; numbers that `dtype` holds exactly"
    outputs, inputs = sizes
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)
    size = 2 * outputs if op == "norm_gate_up_silu" else outputs
    x, weight, norm_weight = random(rows, inputs), random(size, inputs) / inputs**0.5, random(inputs) + 1
    tail = [random(size)] if bias else []
    if op == "linear_residual":
        return x, weight, random(rows, outputs), *tail
    return x, None if op == "no norm" else norm_weight, EPS, weight, *tail


def exact(op, args):
    "In float64, without roundings on the way"
    return OPS[op][0](*(a.double() if isinstance(a, torch.Tensor) else a for a in args)) if op == "linear_residual" else exact_norm(op, *args)


def exact_norm(op, x, norm_weight, eps, weight, bias=None):
    x = x.double()
    if norm_weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight.double()
    y = x @ weight.double().T + (0 if bias is None else bias.double())
    if op != "norm_gate_up_silu":
        return y
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def assert_near(y, expected, dtype, factor=1.0):
    scale = expected.abs().clamp(min=1)
    error = ((y.double() - expected.double()).abs() / scale.double()).max().item() if y.numel() else 0.0
    assert error <= factor * TOLERANCE[dtype], error


@pytest.fixture(params=["a tile a program", "several tiles"])
def small_tiles(request, monkeypatch):
    "Several programs, which need several loads for a row; the interpreter claims to have 4 SMs"
    programs = 100 if request.param == "a tile a program" else 1
    config = LinearConfig(rows=2, block_n=4, block_k=32, warps=2, programs=programs)
    monkeypatch.setattr(decode_linear, "linear_config", lambda *a: config)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_equals_the_twin_and_float64(op, sizes, bias, device, small_tiles):
    args = arguments(op, 3, sizes, bias=bias, device=device)
    y = OPS[op][1](*args)
    assert_near(y, OPS[op][0](*args), torch.float32)
    assert_near(y, exact(op, args), torch.float32)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("rows", range(1, 9))
def test_every_number_of_rows(rows, device):
    for op in OPS:
        args = arguments(op, rows, (10, 96), device=device)
        assert_near(OPS[op][1](*args), OPS[op][0](*args), torch.float32)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_rounds_where_the_twin_rounds(op, dtype, device, small_tiles):
    "Sums in another order may cross the border between two roundings, but hardly ever do"
    args = arguments(op, 2, (24, 64), dtype, bias=True, device=device)
    y, twin = OPS[op][1](*args), OPS[op][0](*args)
    assert y.dtype == dtype
    assert (y != twin).float().mean() < 0.05
    assert_near(y, twin, dtype)
    assert_near(y, exact(op, args), dtype, factor=4)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_row_does_not_depend_on_the_others(device, small_tiles):
    for op in OPS:
        args = arguments(op, 4, (10, 96), device=device)
        one = [a[2:3] if isinstance(a, torch.Tensor) and len(a) == 4 else a for a in args]
        assert torch.equal(OPS[op][1](*args)[2:3], OPS[op][1](*one))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_rows_that_lie_apart(device, small_tiles):
    apart = lambda t: torch.stack((t, t + torch.nan), 1).flatten(0, 1)[::2]
    turned = lambda t: t.T.contiguous().T
    for change, op in itertools.product((apart, turned), OPS):
        args = arguments(op, 3, (8, 64), device=device)
        changed = [change(a) if isinstance(a, torch.Tensor) and len(a) == 3 else a for a in args]
        assert not changed[0].is_contiguous()
        assert torch.equal(OPS[op][1](*args), OPS[op][1](*changed))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_no_rows(op, device):
    assert OPS[op][1](*arguments(op, 0, (40, 96), device=device)).shape == (0, 40)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_arguments_stay_as_they_are(op, device, small_tiles):
    args = arguments(op, 3, (20, 64), device=device)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    OPS[op][1](*args)
    assert all(torch.equal(a, b) for a, b in zip(args, before) if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("op", OPS)
def test_dispatchers_take_torch_on_a_cpu(op):
    args = arguments(op, 3, (20, 64))
    assert torch.equal(OPS[op][2](*args), OPS[op][0](*args))


def test_wrong_arguments_are_refused():
    x, norm_weight, eps, weight = arguments("norm_linear", 2, (20, 64))
    for bad in [
        (x, norm_weight[1:], eps, weight), (x, norm_weight, eps, weight[:, 1:]), (x, norm_weight, eps, weight.half()),
        (x, norm_weight, eps, weight, torch.zeros(19)), (x, norm_weight, eps, weight.T.contiguous().T),
    ]:
        with pytest.raises(ValueError):
            norm_linear_triton(*bad)
    with pytest.raises(ValueError, match=r"residual torch.float32 \(1, 20\)"):
        linear_residual_triton(x, weight, torch.zeros(1, 20))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size, K", [(151936, 1024), (1024, 3072), (1024, 2048), (6144, 4096), (4096, 12288), (960, 576), (576, 1536), (5120, 25600), (64, 33)])
def test_configurations_fit(size, K, num_rows, itemsize):
    config = linear_config(num_rows, size, K, itemsize, 132)
    powers = [config.rows, config.block_n, config.block_k, config.warps]
    assert config.programs >= 1
    assert all(n & (n - 1) == 0 for n in powers)
    # whole rows of the weight in registers, twice, beside everything else
    held = config.block_n * -(-K // config.block_k) * config.block_k * itemsize
    assert held <= 32 * config.warps * 256 * 1.6  # padding is not loaded


# In a model


def tiny_step(name, dtype, forced, monkeypatch, **known):
    "Logits of a prompt of 5 tokens, then of one token after it"
    from minivllm.config import load_model_config
    from minivllm.layers.attention import ForwardContext, TritonAttentionBackend
    from minivllm.models import llama
    from minivllm.models.loader import build_model, load_weights
    from minivllm.models.registry import get_model_class
    from rigs import tiny_model

    folder, _ = tiny_model(name)
    config = load_model_config(folder)
    device = KERNEL_DEVICES[0]
    model = build_model(get_model_class(config.architecture), config, dtype, device, max_position=64, backend=TritonAttentionBackend)
    load_weights(model, folder)
    monkeypatch.setattr(llama, "few_rows", lambda *sizes: 8 if forced else 0)
    if device == "cpu":
        monkeypatch.setattr(llama, "can_launch", lambda device: forced)
        monkeypatch.setattr(decode_linear, "can_launch", lambda device: forced)
        monkeypatch.setattr(decode_fused, "can_launch", lambda device: forced)
    shape = (config.num_layers, 2, 2, 16, config.num_kv_heads, config.head_dim)
    kv_caches = [(k, v) for k, v in torch.zeros(shape, dtype=dtype, device=device)]
    ids, logits = torch.arange(40, 46, device=device), []
    for start, end in ((0, 5), (5, 6)):
        ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
        decode = end - start == 1
        ctx = ForwardContext(
            slot_mapping=torch.arange(start, end, device=device), block_tables=ints(0, 1)[None], context_lens=ints(end),
            cu_seqlens_q=ints(0, end - start), num_decodes=int(decode), max_query_len=0 if decode else end, kv_caches=kv_caches,
            **known,
        )
        with torch.inference_mode():
            logits.append(model.compute_logits(model(ids[start:end], torch.arange(start, end, device=device), ctx)))
    return torch.cat(logits).float()


@pytest.mark.parametrize("name", ["qwen3", "llama-biased"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_a_model_gives_the_same_logits(name, dtype, tolerance, monkeypatch):
    launched, attended = [], []
    launch, attend = decode_linear._launch, decode_fused.rope_attend_triton
    monkeypatch.setattr(decode_linear, "_launch", lambda *a, **k: launched.append(1) or launch(*a, **k))
    monkeypatch.setattr(decode_fused, "rope_attend_triton", lambda *a, **k: attended.append(1) or attend(*a, **k))
    monkeypatch.setattr(decode_linear, "linear_config", lambda *a: LinearConfig(1, 64, 64, 4, 100))  # quick to interpret
    plain = tiny_step(name, dtype, False, monkeypatch)
    assert not launched and not attended
    fused = tiny_step(name, dtype, True, monkeypatch, max_context_len=6)
    # steps, projections, layers, and the head for one row; the second step is a decode
    assert len(launched) == 2 * 4 * 2 + 1 and len(attended) == 2
    assert (fused - plain).norm() < tolerance * plain.norm()
    attended.clear()
    for unfit in (dict(max_context_len=10_000), {}):  # long contexts, or nothing known of them: two kernels
        two = tiny_step(name, dtype, True, monkeypatch, **unfit)
        assert not attended and (two - plain).norm() < tolerance * plain.norm()
