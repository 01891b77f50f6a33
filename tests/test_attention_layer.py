"The attention layer: any cut of the work equals a plain layer over the whole sequence"
import random
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import Pages, reference

import minivllm.layers.attention as attention_module
from minivllm.layers.attention import Attention, ForwardContext, TorchAttentionBackend, get_attention_backend
from minivllm.layers.layernorm import RMSNorm
from minivllm.layers.rotary_embedding import RotaryEmbedding


def make_layer(heads, norms=False, layer_idx=0):
    "A layer whose norms can be seen"
    num_heads, num_kv_heads, head_dim = heads
    q_norm, k_norm = (RMSNorm(head_dim), RMSNorm(head_dim)) if norms else (None, None)
    for norm in (q_norm, k_norm):
        if norm is not None:
            torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return Attention(num_heads, num_kv_heads, head_dim, RotaryEmbedding(head_dim, 256, 10000.0), layer_idx, q_norm, k_norm)


def make_caches(layer, block_size, num_blocks=256, num_layers=1, fill=torch.nan):
    "Caches in which unwritten slots show"
    pool = torch.full((num_layers, 2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim), fill)
    return [(k, v) for k, v in pool]


def plain(layer, qkv):
    "The layer over one whole sequence, in float64, without cache or pages"
    q, k, v = qkv.unflatten(1, (-1, layer.head_dim)).split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k = layer.rope(torch.arange(len(qkv)), q, k)
    return reference(q, [len(q)], [torch.stack((k, v))], layer.scale).flatten(1)


@torch.no_grad()
def run(layer, steps, hits, block_size):
    "Largest difference of any row of any step from the plain layer"
    lengths = {}
    for step in steps:
        for r, n in step.items():
            lengths[r] = lengths.get(r, hits.get(r, 0)) + n
    width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    inputs = {r: torch.randn(n, width) for r, n in lengths.items()}
    for r, n in hits.items():
        if r in inputs:
            inputs[r][:n] = inputs[0][:n]
    expected = {r: plain(layer, x) for r, x in inputs.items()}
    pages, caches, differences = Pages(block_size), make_caches(layer, block_size), []
    for step in steps:
        for r in step.keys() - pages.tables.keys():
            pages.start(r, hits.get(r, 0), of=0)
        ctx, positions, spans = pages.step(step, caches, ForwardContext)
        rows, right = (torch.cat([t[r][s.start : s.stop] for r, s in spans.items()]) for t in (inputs, expected))
        differences.append((layer(rows, positions, ctx) - right).abs().max())
    return torch.stack(differences).max().item()


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 16), (4, 4, 16)])
def test_a_generation_with_chunks_mixed_steps_and_a_prefix_hit(heads, block_size, norms):
    torch.manual_seed(0)
    steps = [{0: 10}, {0: 1, 1: 5}, {1: 5, 0: 1}, {0: 1, 1: 3, 2: 3}, {0: 1, 1: 1, 2: 1}, {2: 1, 1: 1}]
    assert run(make_layer(heads, norms), steps, {2: 8}, block_size) < 1e-5


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10000), block_size=st.sampled_from([1, 4, 16]), norms=st.booleans())
def test_any_cut_of_the_work(seed, block_size, norms):
    torch.manual_seed(seed)
    generator = random.Random(seed)
    steps = [{0: generator.randint(16, 24)}]
    for _ in range(8):
        chosen = generator.sample(range(4), generator.randint(1, 4))
        steps.append({r: generator.choice([1, 1, generator.randint(2, 18)]) for r in chosen})
    assert run(make_layer((4, 2, 16), norms), steps, {1: 16}, block_size) < 1e-5


def test_each_layer_has_its_own_cache():
    torch.manual_seed(0)
    layers = [make_layer((4, 2, 16), layer_idx=i) for i in range(3)]
    caches, pages = make_caches(layers[0], 4, num_layers=3), Pages(4)
    pages.start(0)
    ctx, positions, _ = pages.step({0: 5}, caches, ForwardContext)
    layers[1](torch.randn(5, 8 * 16), positions, ctx)
    assert [not k.isnan().all() for k, _ in caches] == [False, True, False]


def test_two_passes_in_turns_do_not_meet():
    torch.manual_seed(0)
    layers = [make_layer((4, 2, 16), layer_idx=i) for i in range(2)]
    inputs = torch.randn(2, 6, 8 * 16)

    def outputs(in_turns):
        caches, pages, passes = make_caches(layers[0], 4, num_layers=2), Pages(4), []
        for r in range(2):
            pages.start(r)
            passes.append(pages.step({r: 6}, caches, ForwardContext))
        order = [(l, r) for l in range(2) for r in range(2)] if in_turns else [(l, r) for r in range(2) for l in range(2)]
        for l, r in order:
            layers[l](inputs[r], passes[r][1], passes[r][0])
        outs = []
        for r in range(2):  # the next token shows what stands in the caches
            ctx, positions, _ = pages.step({r: 1}, caches, ForwardContext)
            outs += [layer(inputs[r, :1], positions, ctx) for layer in layers]
        return torch.stack(outs)

    alone, mixed = outputs(False), outputs(True)
    assert torch.equal(alone, mixed) and not alone.isnan().any()


def test_padding_rows_write_nothing_and_give_zeros():
    torch.manual_seed(0)
    layer = make_layer((4, 2, 16))
    (k_cache, v_cache), = caches = make_caches(layer, 4, num_blocks=4)
    tables = torch.tensor([[2], [0], [0]], dtype=torch.int32)
    ctx = ForwardContext(torch.tensor([8, -1, -1]), tables, torch.tensor([1, 0, 0]), torch.arange(4), 3, caches)
    out = layer(torch.randn(3, 8 * 16), torch.zeros(3, dtype=torch.int64), ctx)
    assert out[0].any() and out[1:].eq(0).all()
    assert k_cache.isnan().flatten(2).all(-1).sum() == 15


def test_derived_values_are_computed_once_per_step(monkeypatch):
    torch.manual_seed(0)
    layers = [make_layer((4, 2, 16), layer_idx=i) for i in range(5)]
    caches, pages, calls = make_caches(layers[0], 4, num_layers=5), Pages(4), []
    real_plan = attention_module.plan_decode
    monkeypatch.setattr(attention_module, "plan_decode", lambda *args: calls.append(1) or real_plan(*args))
    for r in range(2):
        pages.start(r)
    for expected, step in enumerate([{0: 5, 1: 3}, {0: 1, 1: 1}, {0: 1, 1: 2}]):
        ctx, positions, _ = pages.step(step, caches, ForwardContext)
        for layer in layers:
            layer(torch.randn(len(positions), 8 * 16), positions, ctx)
        assert len(calls) == expected  # none in the prefill step, then one a step


def test_context_is_frozen_and_slices_its_rows():
    ctx = ForwardContext(torch.arange(9), torch.arange(8).view(4, 2), torch.tensor([3, 9, 4, 7]), torch.tensor([0, 1, 2, 5, 9]), 2, [])
    with pytest.raises(FrozenInstanceError):
        ctx.num_decodes = 3
    tables, lens = ctx.decodes
    assert tables.tolist() == [[0, 1], [2, 3]] and lens.tolist() == [3, 9]
    tables, cu_seqlens_q, lens = ctx.prefills
    assert tables.tolist() == [[4, 5], [6, 7]] and cu_seqlens_q.tolist() == [0, 3, 7] and lens.tolist() == [4, 7]
    assert [ctx.once("a", lambda: 1), ctx.once("a", lambda: 2), ctx.once("b", lambda: 3)] == [1, 1, 3]


def test_backends():
    assert get_attention_backend("auto") is get_attention_backend("torch") is TorchAttentionBackend
    for name in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"{name}.*not part of this version.*auto, torch"):
            get_attention_backend(name)
    for name in ("flashattn", "", "Torch", None):
        with pytest.raises(ValueError, match="is unknown.*auto, torch"):
            get_attention_backend(name)


def test_a_layer_uses_the_backend_it_is_given():
    calls = []

    class Recording(TorchAttentionBackend):
        store_kv = staticmethod(lambda *args: calls.append("store") or TorchAttentionBackend.store_kv(*args))
        decode = staticmethod(lambda *args: calls.append("decode") or TorchAttentionBackend.decode(*args))
        prefill = staticmethod(lambda *args: calls.append("prefill") or TorchAttentionBackend.prefill(*args))

    layer, pages = make_layer((4, 2, 16)), Pages(4)
    layer.backend = Recording
    caches = make_caches(layer, 4)
    for r in range(2):
        pages.start(r)
    for step, expected in [({0: 5}, ["store", "prefill"]), ({0: 1}, ["store", "decode"]), ({1: 2, 0: 1}, ["store", "decode", "prefill"])]:
        calls.clear()
        ctx, positions, _ = pages.step(step, caches, ForwardContext)
        assert layer(torch.randn(len(positions), 8 * 16), positions, ctx).shape == (len(positions), 64)
        assert calls == expected
