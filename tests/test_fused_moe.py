"Mixture of experts: the router, the order by experts and the products, against loops in float64."
import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import KERNEL_DEVICES

from minivllm.distributed import run_ranks
from minivllm.kernels import fused_moe as kernels
from minivllm.kernels.fused_moe import (
    MoETiles, align_torch, align_triton, blocks, check_moe, fused_moe, fused_moe_torch, fused_moe_triton, max_tiles,
    moe_tiles, route, route_torch, route_triton,
)
from minivllm.layers.fused_moe import FusedMoE
from minivllm.layers.layernorm import RMSNorm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ERROR = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest number
DEVICE = KERNEL_DEVICES[0]
CONFIGS = {
    "by pairs": MoETiles(0, blocks(16, 64, 4), blocks(16, 32, 4)),
    "by tiles": MoETiles(16, blocks(32, 32, 4, 2), blocks(64, 32, 4, 2)),
}
ROUTERS, IMPLEMENTATIONS = [route_torch, route_triton], {"torch": fused_moe_torch}
IMPLEMENTATIONS |= {name: functools.partial(fused_moe_triton, config=config) for name, config in CONFIGS.items()}


def reference(x, w13, w2, weights, experts):
    "Every token and every one of its experts by itself, in float64"
    x, w13, w2, weights = (t.double() for t in (x, w13, w2, weights))
    out = torch.zeros_like(x)
    for token, chosen in enumerate(experts.tolist()):
        for weight, expert in zip(weights[token], chosen):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            out[token] += weight * (w2[expert] @ (F.silu(gate) * up))
    return out


def layer(num_tokens, num_experts=6, top_k=2, hidden=40, size=24, dtype=torch.float32):
    "Input, the matrices of all experts, and a random choice"
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(num_tokens, hidden), torch.randn(num_experts, 2 * size, hidden), torch.randn(num_experts, hidden, size)
    x, w13, w2 = (t.to(DEVICE, dtype) for t in (x, w13 / hidden**0.5, w2 / size**0.5))
    return x, w13, w2, *route_torch(torch.randn(num_tokens, num_experts).to(DEVICE), top_k, True)


def check(implementation, arguments):
    got, want = implementation(*arguments), reference(*arguments)
    assert got.dtype == arguments[0].dtype and got.shape == want.shape and got.is_contiguous()
    if len(want):
        assert (got - want).abs().max() <= ERROR[got.dtype] * want.abs().max()
    return got


# The router


@pytest.mark.parametrize("router", ROUTERS)
def test_softmax_comes_before_the_choice(router):  # F49
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=DEVICE)
    weights, experts = router(logits, 2, False)
    assert experts.tolist() == [[0, 1]] and experts.dtype == torch.int32
    assert weights[0].tolist() == pytest.approx([0.643914, 0.236883], abs=1e-6)
    assert router(logits, 2, True)[0][0].tolist() == pytest.approx([0.731059, 0.268941], abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_experts, top_k", [(8, 1), (8, 2), (8, 8), (6, 3), (128, 8), (1, 1), (40, 5)])
def test_the_router_kernel_equals_its_twin(num_experts, top_k, dtype):
    logits = torch.randn(5, num_experts + 3, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[:, :num_experts]
    for normalize in (True, False):
        (weights, experts), (twin_weights, twin_experts) = (router(logits, top_k, normalize) for router in ROUTERS)
        assert torch.equal(experts, twin_experts)
        torch.testing.assert_close(weights, twin_weights, atol=1e-6, rtol=1e-5)
        probs = logits.double().softmax(-1)
        assert torch.allclose(probs.gather(1, experts.long()), probs.topk(top_k)[0])
        if normalize: assert torch.allclose(weights.sum(-1), torch.ones(5, device=DEVICE))


@pytest.mark.parametrize("router", ROUTERS)
def test_equals_are_chosen_in_order(router):
    logits = torch.zeros(2, 100, device=DEVICE)
    logits[1, 70] = 1
    assert router(logits, 3, False)[1].tolist() == [[0, 1, 2], [70, 0, 1]]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("router", ROUTERS)
def test_experts_of_a_broken_token_exist(router, value):
    "It must not make a kernel read behind the weights, nor hide that it is broken"
    logits = torch.full((2, 6), value, device=DEVICE)
    logits[1] = torch.arange(6)
    assert router(logits, 3, False)[0][0].isnan().all()
    weights, experts = router(logits, 3, True)
    assert sorted(set(experts[0].tolist())) == sorted(experts[0].tolist()) and 0 <= experts.min() and experts.max() < 6
    assert weights[0].isnan().all() and experts[1].tolist() == [5, 4, 3] and weights[1].isfinite().all()


def test_no_token_is_routed():
    for router in (*ROUTERS, route):
        weights, experts = router(torch.empty(0, 8, device=DEVICE), 2, True)
        assert weights.shape == experts.shape == (0, 2)


@pytest.mark.parametrize("top_k", [0, 9])
def test_more_experts_than_there_are(top_k):
    with pytest.raises(ValueError, match=f"top_k={top_k}: there are 8 experts"): route(torch.zeros(1, 8), top_k, True)


# The order by experts


def check_alignment(alignment, experts, num_experts, tile):
    "Every pair stands once in a tile of its expert, in order; nothing else is in a tile"
    pairs, of_tile, flat = alignment.pairs.tolist(), alignment.experts.tolist(), experts.flatten().tolist()
    assert len(of_tile) == max_tiles(len(flat), num_experts, tile) and len(pairs) == len(of_tile) * tile
    used = [expert for expert in of_tile if expert >= 0]
    assert of_tile == used + [-1] * (len(of_tile) - len(used)) and used == sorted(used)
    seen = []
    for i, expert in enumerate(used):
        rows = pairs[i * tile : (i + 1) * tile]
        real = [pair for pair in rows if pair < len(flat)]
        assert real and rows == real + [len(flat)] * (tile - len(real))
        assert all(flat[pair] == expert for pair in real)
        assert len(real) == tile or used[i + 1 : i + 2] != [expert]  # only the last of a run isn't full
        seen += real
    assert sorted(seen) == list(range(len(flat)))
    assert all(a < b for a, b in zip(seen, seen[1:]) if flat[a] == flat[b])  # stable: no chance involved


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_alignment(data):
    num_experts, tile = data.draw(st.integers(1, 24)), data.draw(st.sampled_from([1, 2, 16, 32]))
    shape = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 8))
    pool = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=1, max_size=4))
    experts = data.draw(st.lists(st.one_of(st.sampled_from(pool), st.integers(0, num_experts - 1)), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    experts = torch.tensor(experts, dtype=torch.int32, device=DEVICE).view(shape)
    for align in (align_torch, align_triton):
        check_alignment(align(experts, num_experts, tile), experts, num_experts, tile)


@pytest.mark.parametrize("num_experts", [9, 40])
def test_alignment_of_many_pairs(monkeypatch, num_experts):
    "More than one program looks through"
    monkeypatch.setattr(kernels, "CHUNK", 32)
    experts = torch.randint(num_experts, (33, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    experts[:20, 0] = 5
    check_alignment(align_triton(experts, num_experts, 16), experts, num_experts, 16)


@pytest.mark.parametrize("num_pairs, num_experts, tile, tiles", [(1, 8, 16, 1), (8, 8, 16, 8), (24, 8, 16, 9), (16, 1, 16, 1), (17, 1, 16, 2), (0, 8, 16, 0)])
def test_the_bound_is_reached(num_pairs, num_experts, tile, tiles):
    assert max_tiles(num_pairs, num_experts, tile) == tiles
    # the worst case: one pair each, the rest for expert 0
    counts = [1] * min(num_experts, num_pairs)
    if counts: counts[0] += num_pairs - len(counts)
    assert sum(-(-n // tile) for n in counts) == tiles


# The products


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 0])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_equals_float64(name, num_tokens, dtype):
    check(IMPLEMENTATIONS[name], layer(num_tokens, dtype=dtype))


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_any_number_of_choices(name, top_k):
    check(IMPLEMENTATIONS[name], layer(3, num_experts=8, top_k=top_k))


@pytest.mark.parametrize("hidden, size", [(32, 16), (36, 20), (8, 150), (130, 3)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_any_size(name, hidden, size):
    check(IMPLEMENTATIONS[name], layer(4, hidden=hidden, size=size))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_one_expert_receives_all(name):
    x, w13, w2, weights, experts = layer(35, num_experts=5, top_k=1)
    experts = torch.full_like(experts, 3)
    for unused in (0, 1, 2, 4):  # nobody may touch the others
        w13[unused], w2[unused] = torch.nan, torch.nan
    arguments = x, w13, w2, weights, experts
    assert check(IMPLEMENTATIONS[name], arguments).isfinite().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_token_keeps_to_itself(name):
    "A broken token breaks no other, and a token's result doesn't depend on who else is there"
    x, w13, w2, weights, experts = layer(20)
    whole = IMPLEMENTATIONS[name](x, w13, w2, weights, experts)
    broken = x.clone()
    broken[7] = torch.nan
    got = IMPLEMENTATIONS[name](broken, w13, w2, weights, experts)
    others = torch.arange(20) != 7
    assert got[7].isnan().all() and torch.equal(got[others], whole[others])
    if name != "torch":
        assert torch.equal(IMPLEMENTATIONS[name](x[3:4], w13, w2, weights[3:4], experts[3:4]), whole[3:4])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_weights_that_do_not_add_up_to_one(name):
    x, w13, w2, weights, experts = layer(4)
    check(IMPLEMENTATIONS[name], (x, w13, w2, 0.3 * weights, experts))
    assert not IMPLEMENTATIONS[name](x, w13, w2, torch.zeros_like(weights), experts).any()


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_residual(name, dtype):
    "Added to the rounded result, and rounded again"
    arguments = layer(3, dtype=dtype)
    wide = torch.randn(3, 80, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    for residual in (wide[:, :40], wide[:, ::2]):
        got = IMPLEMENTATIONS[name](*arguments, residual)
        assert torch.equal(got, IMPLEMENTATIONS[name](*arguments) + residual)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_strided_input(name):
    x, *rest = layer(5)
    wide = torch.cat((x, x), 1)
    assert torch.equal(IMPLEMENTATIONS[name](wide[:, :40], *rest), IMPLEMENTATIONS[name](x, *rest))
    transposed = x.T.contiguous().T
    check(IMPLEMENTATIONS[name], (transposed, *rest))


def test_the_input_is_left_alone():
    arguments = layer(5)
    before = [t.clone() for t in arguments]
    for implementation in IMPLEMENTATIONS.values(): implementation(*arguments)
    assert all(map(torch.equal, arguments, before))


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # rows that nobody wrote are multiplied, not used
def test_descriptors_give_the_same():
    "The copy engine's loads, which only newer GPUs have, against those by addresses"
    arguments, config = layer(5, hidden=64, size=32, dtype=torch.bfloat16), MoETiles(16, blocks(16, 32, 4, 2), blocks(32, 16, 4, 2))
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0): pytest.skip("no copy engine")
    assert torch.equal(kernels.by_tiles(*arguments, None, config, descriptors=True), kernels.by_tiles(*arguments, None, config, descriptors=False))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_choices_grow_with_the_batch(capability):
    tiles = [moe_tiles(n * 8, 128, 8, 2048, 768, 2, capability).tile for n in (1, 4, 5, 64, 256, 1024, 8192)]
    assert tiles[0] == 0 and tiles == sorted(tiles) and tiles[-1] >= 64
    assert moe_tiles(2, 8, 2, 4096, 14336, 2, capability).tile == 0  # one token is never sorted


def test_what_does_not_fit_is_refused():
    x, w13, w2, weights, experts = layer(3)
    for wrong in ((x[:, :8], w13, w2, weights, experts), (x, w13, w2[:3], weights, experts), (x.half(), w13, w2, weights, experts), (x, w13, w2, weights[:2], experts)):
        with pytest.raises(ValueError, match="don't fit together: x"): fused_moe_triton(*wrong)
    with pytest.raises(ValueError, match=r"residual \(3, 8\)"): fused_moe_triton(x, w13, w2, weights, experts, x[:, :8])
    check_moe(x, w13, w2, weights, experts)


def test_the_dispatcher_takes_what_the_device_can():
    arguments = layer(3)
    expected = fused_moe_triton if DEVICE == "cuda" else fused_moe_torch
    assert torch.equal(fused_moe(*arguments), expected(*arguments))


# The layer


def moe_layer(tp=None, num_experts=4, hidden=16, size=12, **options):
    "A layer, and how its checkpoint fills it"
    layer = FusedMoE(hidden, size, num_experts, 2, **options, **({} if tp is None else dict(tp=tp)))
    generator = torch.Generator().manual_seed(0)
    gate = torch.randn(num_experts, hidden, generator=generator)
    layer.gate.weight.weight_loader(layer.gate.weight, gate)
    loaded = {"gate": gate}
    for expert in reversed(range(num_experts)):  # in any order
        for part, shape in (("up", (size, hidden)), ("gate", (size, hidden))):
            loaded[expert, part] = torch.randn(shape, generator=generator)
            layer.w13.weight.weight_loader(layer.w13.weight, loaded[expert, part], (expert, part))
        loaded[expert, "down"] = torch.randn(hidden, size, generator=generator)
        layer.w2.weight.weight_loader(layer.w2.weight, loaded[expert, "down"], expert)
    return layer, loaded


@pytest.mark.parametrize("normalize", [True, False])
def test_the_layer(normalize):
    layer, loaded = moe_layer(normalize=normalize)
    x = torch.randn(7, 16, generator=torch.Generator().manual_seed(1))
    probs = (x @ loaded["gate"].T).softmax(-1)
    weights, experts = probs.topk(2)
    if normalize: weights = weights / weights.sum(-1, keepdim=True)
    want = torch.zeros(7, 16)
    for token in range(7):
        for weight, e in zip(weights[token], experts[token].tolist()):
            h = F.silu(loaded[e, "gate"] @ x[token]) * (loaded[e, "up"] @ x[token])
            want[token] += weight * (loaded[e, "down"] @ h)
    torch.testing.assert_close(layer(x), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_are_added_to_the_stream(dtype):
    layer, norm = moe_layer()[0].to(dtype), RMSNorm(16).to(dtype)
    torch.nn.init.normal_(norm.weight)
    stream = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.testing.assert_close(layer.add_to(stream, norm), stream + layer(norm(stream)))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_hold_slices_of_every_expert(world_size):
    whole, _ = moe_layer(size=12)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))

    def on_rank(tp):
        layer, _ = moe_layer(tp, size=12)
        assert layer.w13.weight.shape == (4, 24 // world_size, 16) and layer.w2.weight.shape == (4, 16, 12 // world_size)
        return layer(x), layer.w13.weight, layer.w2.weight
    outs, w13, w2 = zip(*run_ranks(on_rank, world_size))
    for out in outs: torch.testing.assert_close(out, whole(x), atol=1e-4, rtol=1e-4)
    norm = RMSNorm(16)
    for out in run_ranks(lambda tp: moe_layer(tp, size=12)[0].add_to(x, norm), world_size):
        torch.testing.assert_close(out, whole.add_to(x, norm), atol=1e-4, rtol=1e-4)
    gates, ups = zip(*(w.chunk(2, dim=1) for w in w13))
    assert torch.equal(torch.cat((*gates, *ups), 1), whole.w13.weight)
    assert torch.equal(torch.cat(w2, 2), whole.w2.weight)


def test_ranks_that_do_not_divide():
    with pytest.raises(ValueError, match="intermediate size 12 can't be divided among 5 ranks"):
        run_ranks(lambda tp: moe_layer(tp), 5)


def test_a_tensor_of_the_wrong_shape():
    layer, loaded = moe_layer()
    for index in ((1, "gate"), (1, "up")):
        with pytest.raises(ValueError, match=r"checkpoint shape \(16, 12\), expected \(12, 16\)"):
            layer.w13.weight.weight_loader(layer.w13.weight, loaded[1, "up"].T, index)
    with pytest.raises(ValueError, match=r"checkpoint shape \(12, 16\), expected \(16, 12\)"):
        layer.w2.weight.weight_loader(layer.w2.weight, loaded[1, "up"], 0)
