"Rotary tables of every scaling against transformers', and what an engine relies on."
import pytest
import torch
from paging import DEVICES
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from minivllm.layers.rotary_embedding import (
    RotaryEmbedding,
    apply_rotary,
    apply_rotary_torch,
    apply_rotary_triton,
    default_inv_freq,
    head_tile,
    ntk_base,
    rope_cos_sin,
    rope_inv_freq,
)


def original(length):
    return {"original_max_position_embeddings": length}


SCALINGS = {
    "none": lambda n: {},
    "default": lambda n: {"rope_type": "default"},
    "linear": lambda n: {"rope_type": "linear", "factor": 4.0},
    "linear, odd factor": lambda n: {"rope_type": "linear", "factor": 3.3},
    "llama3": lambda n: {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original(n)
    },
    "yarn": lambda n: {"rope_type": "yarn", "factor": 4.0, **original(n)},
    "yarn, betas": lambda n: {
        "rope_type": "yarn", "factor": 3.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, **original(n)
    },
    "yarn, mscale": lambda n: {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0, **original(n)},
    "yarn, one mscale": lambda n: {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, **original(n)},
    "yarn, attention factor": lambda n: {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, **original(n)},
    "yarn, factor 1": lambda n: {"rope_type": "yarn", "factor": 1.0, **original(n)},
}


def their_rope(scaling, head_dim, base, max_position):
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=max_position,
        rope_theta=base,
        rope_scaling=dict(scaling) or None,
    )
    return LlamaRotaryEmbedding(config)


def their_table(rope, positions):
    "transformers' cosines and sines, `[num_positions, head_dim]` each"
    cos, sin = rope(torch.zeros(1), torch.as_tensor(positions)[None])
    return cos[0], sin[0]


def cos_and_sin(module):
    "Our table as transformers has it"
    cos, sin = module.cos_sin.unbind(1)
    half = cos.shape[-1] // 2
    assert torch.equal(sin[:, :half], -sin[:, half:]) and torch.equal(cos[:, :half], cos[:, half:])
    return cos, torch.cat((sin[:, half:], sin[:, half:]), -1)


@pytest.mark.parametrize("head_dim, base, trained", [(64, 1e4, 2048), (128, 1e6, 1024), (16, 5e5, 64)])
@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers_up_to_four_times_the_training_length(name, head_dim, base, trained):
    scaling = SCALINGS[name](trained)
    ours = RotaryEmbedding(head_dim, 4 * trained, base, scaling)
    theirs = their_table(their_rope(scaling, head_dim, base, 4 * trained), range(4 * trained))
    for mine, other in zip(cos_and_sin(ours), theirs):
        assert (mine - other).abs().max() < 1e-4


@pytest.mark.parametrize("head_dim, base, trained, factor", [(64, 1e4, 512, 2.0), (16, 1e4, 64, 4.0), (32, 1e6, 128, 3.3)])
def test_dynamic_equals_transformers_decoding_token_by_token(head_dim, base, trained, factor):  # F41
    scaling = {"rope_type": "dynamic", "factor": factor}
    ours = RotaryEmbedding(head_dim, 4 * trained, base, scaling | original(trained))
    rope = their_rope(scaling, head_dim, base, trained)
    theirs = [their_table(rope, [p]) for p in range(4 * trained)]
    for mine, other in zip(cos_and_sin(ours), zip(*theirs)):
        assert (mine - torch.cat(other)).abs().max() < 5e-4
    assert torch.equal(ours.cos_sin[:trained], RotaryEmbedding(head_dim, trained, base).cos_sin)
    assert not torch.equal(ours.cos_sin[trained + 1], RotaryEmbedding(head_dim, trained + 2, base).cos_sin[-1])


@pytest.mark.parametrize("trained", [1.0, 2.0, 4.0])
def test_static_ntk_is_dynamic_at_its_length(trained):
    "The NTK-aware base for a stretch of s is transformers' dynamic base at the length that stretches by s"
    factor, length = 2.0, int(64 * trained)
    stretch = factor * length / 64 - (factor - 1)
    rope = their_rope({"rope_type": "dynamic", "factor": factor}, 32, 1e4, 64)
    their_table(rope, range(length))
    assert torch.allclose(default_inv_freq(32, ntk_base(32, 1e4, stretch)), rope.inv_freq, rtol=1e-6)


@pytest.mark.parametrize(
    "scaling, expected",
    [
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | original(64),
            [1, 0.2443846, 0.0130423, 0.0039528, 0.00125, 0.0003953, 0.000125, 0.0000395],
        ),
        (
            {"rope_type": "yarn", "factor": 4.0} | original(64),
            [1, 0.2371708, 0.05, 0.0079057, 0.0025, 0.0007906, 0.00025, 0.0000791],
        ),
    ],
)
def test_known_frequencies(scaling, expected):  # F41
    inv_freq, _ = rope_inv_freq(16, 1e4, scaling)
    assert torch.allclose(inv_freq, torch.tensor(expected), rtol=2e-3)


def test_legacy_key_and_ignored_keys():  # F41
    new = rope_inv_freq(16, 1e4, {"rope_type": "linear", "factor": 2.0})
    for scaling in (
        {"type": "linear", "factor": 2.0},
        {"type": "linear", "rope_type": None, "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    ):
        old = rope_inv_freq(16, 1e4, scaling)
        assert torch.equal(new[0], old[0]) and new[1] == old[1]
    assert torch.equal(new[0], default_inv_freq(16, 1e4) / 2)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "foo"}, "'foo' is not supported; supported: default, linear"),
        ({"type": "longrope", "factor": 2.0}, "'longrope'"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": None}, "needs factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"rope_type": "dynamic", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"rope_type": "llama3", "factor": 8.0} | original(64), "needs low_freq_factor, high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_done_is_an_error(scaling, message):  # F41
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(16, 64, 1e4, scaling)


def test_odd_head_is_refused():
    with pytest.raises(ValueError, match="15 is odd"):
        RotaryEmbedding(15, 64, 1e4)


def qkv(num_tokens, dtype=torch.float32):
    return torch.randn(num_tokens, 15, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_rotation_equals_transformers_bit_for_bit():
    positions = torch.tensor([3, 0, 1999, 7, 7])
    x = qkv(5)
    q, k = RotaryEmbedding(64, 2048, 1e4)(positions, x[:, :9], x[:, 9:12])
    cos, sin = their_table(their_rope({}, 64, 1e4, 2048), positions)
    their_q, their_k = apply_rotary_pos_emb(x[:, :9], x[:, 9:12], cos, sin, unsqueeze_dim=1)
    assert torch.equal(q, their_q) and torch.equal(k, their_k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joint_form_views_and_arguments(dtype):
    rope, positions, x = RotaryEmbedding(64, 64, 1e4), torch.tensor([3, 0, 63]), qkv(3, dtype)
    before = x.clone()
    q, k = rope(positions, x[:, :9], x[:, 9:12])
    assert torch.equal(rope.rotate(positions, x[:, :12]), torch.cat((q, k), 1))
    assert torch.equal(rope.rotate(positions, x[:, 3:9].contiguous()), q[:, 3:9])
    assert torch.equal(x, before) and q.dtype == dtype
    assert rope.rotate(positions[:0], x[:0]).shape == (0, 15, 64)
    assert torch.equal(rope.rotate(positions.int(), x), rope.rotate(positions, x))


def test_half_precision_rounds_once():
    rope, positions, x = RotaryEmbedding(64, 2048, 1e4), torch.tensor([1, 500, 2047]), qkv(3, torch.bfloat16)
    assert torch.equal(rope.rotate(positions, x), rope.rotate(positions, x.float()).bfloat16())


def test_only_the_distance_counts():
    rope, x = RotaryEmbedding(64, 2048, 1e4), qkv(32)
    scores = []
    for offset in (0, 1, 100, 2000):
        turned = rope.rotate(torch.arange(32) + offset, x)
        scores.append(turned[:, 0] @ turned[:, 1].T)
    for other in scores[1:]:
        assert (other - scores[0]).abs().max() < 5e-3


@torch.inference_mode()
def test_attention_factor_scales_scores_by_its_square():
    scaling = {"rope_type": "yarn", "factor": 4.0} | original(64)
    plain = RotaryEmbedding(16, 128, 1e4, scaling | {"attention_factor": 1.0})
    sharp = RotaryEmbedding(16, 128, 1e4, scaling | {"attention_factor": 1.5})
    positions, x = torch.tensor([0, 100]), torch.randn(2, 1, 16)
    scores = [(t[0, 0] @ t[1, 0]).item() for t in (plain.rotate(positions, x), sharp.rotate(positions, x))]
    assert scores[1] == pytest.approx(2.25 * scores[0], rel=1e-4)


def test_table_keeps_its_precision_and_is_no_weight():
    rope = RotaryEmbedding(64, 64, 1e4)
    table = rope.cos_sin.clone()
    model = torch.nn.ModuleList([rope, torch.nn.Linear(2, 2), torch.nn.ModuleList([rope])])
    model.to(torch.bfloat16)
    assert model[1].weight.dtype == torch.bfloat16
    assert rope.cos_sin.dtype == torch.float32 and torch.equal(rope.cos_sin, table)
    assert not rope.state_dict()


def test_models_share_nothing():
    first, second = RotaryEmbedding(64, 64, 1e4), RotaryEmbedding(64, 64, 1e4)
    second.to("meta")
    assert first.cos_sin.device.type == "cpu"
    first.rotate(torch.tensor([1]), qkv(1))


def test_default_dtype_does_not_reach_the_table():
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        rope = RotaryEmbedding(64, 64, 1e4)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(rope.cos_sin, RotaryEmbedding(64, 64, 1e4).cos_sin)


@pytest.mark.parametrize("position", [64, 1000])
def test_position_beyond_the_table_is_an_error(position):
    with pytest.raises(IndexError):
        RotaryEmbedding(64, 64, 1e4).rotate(torch.tensor([position]), qkv(1))


def test_dispatcher_on_the_cpu_uses_the_twin(monkeypatch):
    monkeypatch.setattr("minivllm.layers.rotary_embedding.apply_rotary_triton", None)
    cos_sin = rope_cos_sin(default_inv_freq(64, 1e4), 5)
    assert torch.equal(apply_rotary(qkv(5), cos_sin), apply_rotary_torch(qkv(5), cos_sin))


# The kernel: interpreted where there is no GPU

IMPLEMENTATIONS = [apply_rotary_torch, apply_rotary_triton, apply_rotary]


def on_devices(name, functions):
    "Each function on every device; compiled kernels can't work on CPU tensors, interpreted ones can"
    kernels = DEVICES[-1:]
    pairs = [(fn, device) for fn in functions for device in (kernels if fn.__name__.endswith("_triton") else DEVICES)]
    return pytest.mark.parametrize(f"{name}, device", pairs)


def in_float64(x, cos_sin):
    "The rotation as it is written in a book"
    head_dim = x.shape[-1]
    (x1, x2), cos, sin = x.double().chunk(2, -1), *cos_sin.double()[:, None].unbind(2)
    cos, sin = cos[..., : head_dim // 2], sin[..., head_dim // 2 :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)


def close(actual, expected, x):
    "Equal, up to one rounding to the dtype of x"
    tolerance = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[x.dtype]
    return (actual.double() - expected).abs().max() <= tolerance * x.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "num_tokens, num_heads, head_dim",
    [(1, 9, 64), (3, 1, 80), (2, 5, 96), (4, 24, 128), (2, 9, 256), (5, 3, 6), (1, 40, 128), (3, 3, 2)],
)
@on_devices("rotate", IMPLEMENTATIONS)
def test_rotation_in_float64(rotate, num_tokens, num_heads, head_dim, dtype, device):
    x = torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype)
    positions = torch.randint(0, 500, (num_tokens,))
    cos_sin = rope_cos_sin(default_inv_freq(head_dim, 1e4), 500)[positions].to(device)
    y = rotate(x, cos_sin)
    assert y.shape == x.shape and y.dtype == dtype and y.is_contiguous()
    assert close(y, in_float64(x, cos_sin), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernel_rounds_as_the_twin(dtype):
    device = DEVICES[-1]
    cos_sin, x = rope_cos_sin(default_inv_freq(64, 1e4), 20).to(device), qkv(20, dtype).to(device)
    y, expected = apply_rotary_triton(x, cos_sin), apply_rotary_torch(x, cos_sin)
    # on a GPU the compiler may contract a product and a sum: rarely, a last bit
    assert (y != expected).float().mean() <= (0 if device == "cpu" else 0.005)


@on_devices("rotate", IMPLEMENTATIONS)
def test_rotation_of_views(rotate, device):
    packed = qkv(4).to(device)
    cos_sin = rope_cos_sin(default_inv_freq(64, 1e4), 4).to(device)
    before, whole = packed.clone(), rotate(packed.clone(), cos_sin)
    for view in (packed[:, :9], packed[:, 9:12], packed[:, 12:13], packed[:, ::3], packed[:, :0]):
        start = view.storage_offset() // 64
        heads = range(0, 15, 3) if view.stride(1) > 64 else range(start, start + view.shape[1])
        assert torch.equal(rotate(view, cos_sin), whole[:, list(heads)])
    every_second = rotate(packed[::2], cos_sin[::2])
    assert torch.equal(every_second, whole[::2])
    spread = torch.empty(4, 64, 15, device=device).transpose(1, 2).copy_(packed)  # heads' numbers lie apart
    assert torch.equal(rotate(spread, cos_sin), whole)
    assert rotate(packed[:0], cos_sin[:0]).shape == (0, 15, 64)
    assert torch.equal(packed, before)


@pytest.mark.parametrize("num_heads", [1, 3, 9, 15, 24, 32, 40, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_tiles(num_heads, head_dim):
    heads, half, num_warps = head_tile(num_heads, head_dim)
    assert half >= head_dim // 2 > half // 2 and heads * half <= 1024
    assert heads == heads & -heads and heads // 2 < num_heads
    assert num_warps == 1 or heads * half == 8 * 32 * num_warps  # 16 bytes of either half for each thread
