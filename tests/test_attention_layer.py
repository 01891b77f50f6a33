"The attention layer: any cut of the work equals a plain layer over the whole sequence"
import random
import sys
import types
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import DEVICES, Pages, paged_batch, reference

import minivllm.layers.attention as attention_module
from minivllm.kernels.common import MissingTriton, can_launch
from minivllm.kernels.decode import SharedPrefixes, find_shared_prefixes, paged_decode_torch
from minivllm.kernels.prefill import paged_prefill_torch
from minivllm.layers.attention import (
    ATTENTION_BACKENDS, Attention, FlashAttentionBackend, ForwardContext, TorchAttentionBackend, TritonAttentionBackend,
    get_attention_backend,
)
from minivllm.layers.layernorm import RMSNorm
from minivllm.layers.rotary_embedding import RotaryEmbedding


def make_layer(heads, norms=False, layer_idx=0, backend=TorchAttentionBackend):
    "A layer whose norms can be seen"
    num_heads, num_kv_heads, head_dim = heads
    q_norm, k_norm = (RMSNorm(head_dim), RMSNorm(head_dim)) if norms else (None, None)
    for norm in (q_norm, k_norm):
        if norm is not None:
            torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return Attention(num_heads, num_kv_heads, head_dim, RotaryEmbedding(head_dim, 256, 10000.0), layer_idx, q_norm, k_norm, backend)


def make_caches(layer, block_size, num_blocks=256, num_layers=1, fill=torch.nan):
    "Caches in which unwritten slots show"
    pool = torch.full((num_layers, 2, num_blocks, block_size, layer.num_kv_heads, layer.head_dim), fill)
    return [(k, v) for k, v in pool]


def context_on(device):
    "Makes contexts whose tensors are on the device"
    return lambda *args: ForwardContext(*(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args))


def plain(layer, qkv):
    "The layer over one whole sequence, in float64, without cache or pages"
    q, k, v = qkv.unflatten(1, (-1, layer.head_dim)).split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], 1)
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k = layer.rope(torch.arange(len(qkv)), q, k)
    return reference(q, [len(q)], [torch.stack((k, v))], layer.scale).flatten(1)


@torch.no_grad()
def run(layer, steps, hits, block_size, device="cpu"):
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
    pages, differences = Pages(block_size), []
    caches = [tuple(cache.to(device) for cache in pair) for pair in make_caches(layer, block_size)]
    layer.to(device)
    for step in steps:
        for r in step.keys() - pages.tables.keys():
            pages.start(r, hits.get(r, 0), of=0)
        ctx, positions, spans = pages.step(step, caches, context_on(device))
        rows, right = (torch.cat([t[r][s.start : s.stop] for r, s in spans.items()]) for t in (inputs, expected))
        differences.append((layer(rows.to(device), positions.to(device), ctx).cpu() - right).abs().max())
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
    ctx = ForwardContext(torch.tensor([8, -1, -1]), tables, torch.tensor([1, 0, 0]), torch.arange(4), 3, 0, caches)
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
    ctx = ForwardContext(torch.arange(9), torch.arange(8).view(4, 2), torch.tensor([3, 9, 4, 7]), torch.tensor([0, 1, 2, 5, 9]), 2, 4, [])
    with pytest.raises(FrozenInstanceError):
        ctx.num_decodes = 3
    tables, lens = ctx.decodes
    assert tables.tolist() == [[0, 1], [2, 3]] and lens.tolist() == [3, 9]
    tables, cu_seqlens_q, lens = ctx.prefills
    assert tables.tolist() == [[4, 5], [6, 7]] and cu_seqlens_q.tolist() == [0, 3, 7] and lens.tolist() == [4, 7]
    assert [ctx.once("a", lambda: 1), ctx.once("a", lambda: 2), ctx.once("b", lambda: 3)] == [1, 1, 3]


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads", [(6, 2, 16), (3, 3, 16)])
def test_the_triton_backend_runs_mixed_steps(heads, norms):
    "Kernels in the interpreter, or on the GPU: decodes, chunks and what follows a prefix hit, in one step"
    torch.manual_seed(0)
    steps = [{0: 9}, {0: 1, 1: 5}, {0: 1, 1: 3, 2: 3}, {0: 1, 1: 1, 2: 1}]
    assert run(make_layer(heads, norms, backend=TritonAttentionBackend), steps, {2: 8}, 4, DEVICES[-1]) < 1e-5


def step_of_each_kind(layers, backend):
    "Outputs of some layers over three steps: a prompt and a chunk, decodes that share a block, both kinds"
    torch.manual_seed(0)
    device = DEVICES[-1]
    caches, pages, outs = make_caches(layers[0], 4, num_layers=len(layers), fill=0.0), Pages(4), []
    caches = [tuple(cache.to(device) for cache in pair) for pair in caches]
    for layer in layers: layer.to(device).backend = backend
    pages.start(0)
    for step in [{0: 7}, {0: 1, 1: 1}, {0: 1, 1: 4}]:
        if 1 in step and 1 not in pages.tables: pages.start(1, 4, of=0)
        ctx, positions, _ = pages.step(step, caches, context_on(device))
        if not ctx.max_query_len:
            found = find_shared_prefixes(ctx.block_tables.cpu().numpy(), ctx.context_lens.cpu().numpy(), 4, num_tiles=2)
            ctx = replace(ctx, shared_prefixes=SharedPrefixes(*(torch.from_numpy(array).to(device) for array in found)))
        outs += [layer(torch.randn(len(positions), 8 * 16).to(device), positions.to(device), ctx) for layer in layers]
    return torch.cat(outs)


def test_backends_agree_over_layers_that_share_a_context(monkeypatch):
    zeros, real_decode = [], attention_module.paged_decode_triton
    layers = [make_layer((4, 2, 16), layer_idx=i) for i in range(3)]
    expected = step_of_each_kind(layers, TorchAttentionBackend)

    def decode(*args):
        *_, shared, arrived = args
        zeros.append((shared is not None, arrived))
        assert arrived.shape == (len(args[0]) * 2,) and arrived.dtype == torch.int32 and not arrived.any()
        out = real_decode(*args)
        assert not arrived.any()  # or the next layer would wait for too few
        return out

    monkeypatch.setattr(attention_module, "paged_decode_triton", decode)
    out = step_of_each_kind(layers, TritonAttentionBackend)
    assert (out - expected).abs().max() < 1e-5
    assert [shared for shared, _ in zeros] == [True] * 3 + [False] * 3
    assert len({arrived.data_ptr() for _, arrived in zeros[:3]}) == len({id(arrived) for _, arrived in zeros[3:]}) == 1


@pytest.mark.parametrize("fits", [True, False])
def test_the_kernel_for_hopper_where_it_fits_planned_once_a_step(fits, monkeypatch):
    calls = []

    def hopper(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, scale, plan=None):
        assert plan == "plan"
        calls.append("hopper")
        return paged_prefill_torch(q, k_cache, v_cache, block_tables, cu_seqlens_q, context_lens, scale)

    def triton(*args):
        calls.append("triton")
        return paged_prefill_torch(*args)

    def plan(cu_seqlens_q, context_lens, num_tokens):
        assert cu_seqlens_q.tolist() == [0, 7] and context_lens.tolist() == [7] and num_tokens == 7
        calls.append("plan")
        return "plan"

    for name, function in dict(fits_hopper=lambda q, k: fits, paged_prefill_hopper=hopper, paged_prefill_triton=triton, plan_prefill=plan).items():
        monkeypatch.setattr(attention_module, name, function)
    layers = [make_layer((4, 2, 16), layer_idx=i, backend=TritonAttentionBackend) for i in range(3)]
    pages = Pages(4)
    pages.start(0)
    ctx, positions, _ = pages.step({0: 7}, make_caches(layers[0], 4, num_layers=3), ForwardContext)
    for layer in layers: layer(torch.randn(7, 8 * 16), positions, ctx)
    assert calls == (["plan"] + ["hopper"] * 3 if fits else ["triton"] * 3)


def fake_flash_attn(calls):
    "The two functions of flash-attn 2.8 that are used, with their own names of arguments, in torch"

    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                                cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False):
        assert causal and q.dim() == 4 and cache_seqlens.dtype == block_table.dtype == torch.int32
        calls.append("decode")
        return paged_decode_torch(q[:, 0], k_cache, v_cache, block_table, cache_seqlens, softmax_scale)[:, None]

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                               causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                               return_attn_probs=False, block_table=None):
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        calls.append("prefill")
        return paged_prefill_torch(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k.diff(), softmax_scale)

    module = types.ModuleType("flash_attn")
    module.flash_attn_with_kvcache, module.flash_attn_varlen_func = flash_attn_with_kvcache, flash_attn_varlen_func
    return module


def test_what_the_library_is_told(monkeypatch):
    calls, layers = [], [make_layer((4, 2, 16), layer_idx=i) for i in range(2)]
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn(calls))
    out = step_of_each_kind(layers, FlashAttentionBackend)
    assert torch.equal(out, step_of_each_kind(layers, TorchAttentionBackend))
    assert calls == ["prefill"] * 2 + ["decode"] * 2 + ["decode", "prefill"] * 2


def on_a_gpu_of(monkeypatch, capability):
    "Pretend that there is a GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    can_launch.cache_clear()


@pytest.fixture
def fresh_can_launch():
    "What it remembers of pretended GPUs is forgotten"
    yield
    can_launch.cache_clear()


def test_backends_on_the_cpu():
    assert get_attention_backend("auto") is get_attention_backend("torch") is TorchAttentionBackend
    for name in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"'{name}' can't run on cpu: .*CUDA.*use 'torch'"):
            get_attention_backend(name)
    for name in ("flashattn", "", "Torch", None, []):
        with pytest.raises(ValueError, match="is unknown; there are: auto, torch, triton, flash_attn"):
            get_attention_backend(name)


@pytest.mark.usefixtures("fresh_can_launch")
def test_backends_by_generation(monkeypatch, caplog):
    on_a_gpu_of(monkeypatch, (9, 0))
    assert get_attention_backend("auto", "cuda") is get_attention_backend("triton", "cuda:1") is TritonAttentionBackend
    assert not caplog.records
    on_a_gpu_of(monkeypatch, (7, 5))
    assert get_attention_backend("auto", "cuda") is get_attention_backend("torch", "cuda") is TorchAttentionBackend
    assert "7.5" in caplog.text and "8.0" in caplog.text and "torch" in caplog.text
    for name in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"'{name}' can't run on cuda: .*8.0"): get_attention_backend(name, "cuda")


@pytest.mark.usefixtures("fresh_can_launch")
def test_what_to_install(monkeypatch):
    on_a_gpu_of(monkeypatch, (8, 6))
    for absent in (None, types.ModuleType("flash_attn")):  # not there; there, but another package's
        monkeypatch.setitem(sys.modules, "flash_attn", absent)
        with pytest.raises(ValueError, match="'flash_attn' can't run on cuda: .*flash_attn.*pip install flash-attn"):
            get_attention_backend("flash_attn", "cuda")
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn([]))
    assert get_attention_backend("flash_attn", "cuda") is FlashAttentionBackend
    assert get_attention_backend("auto", "cuda") is TritonAttentionBackend
    for module in ("minivllm.kernels.common", "minivllm.layers.attention"): monkeypatch.setattr(f"{module}.triton", MissingTriton())
    can_launch.cache_clear()
    with pytest.raises(ValueError, match="'triton' can't run on cuda: .*pip install triton"): get_attention_backend("triton", "cuda")


def test_what_backends_accept():
    assert {name: backend.default_block_size for name, backend in ATTENTION_BACKENDS.items()} == dict(torch=16, triton=128, flash_attn=256)
    for backend in (TorchAttentionBackend, TritonAttentionBackend):
        for block_size in (1, 4, 16, 100): backend.check_block_size(block_size)
        for dtype in (torch.float32, torch.bfloat16): backend.check_model(dtype, 512)
    FlashAttentionBackend.check_block_size(512)
    for block_size in (16, 255, 257, 384):
        with pytest.raises(ValueError, match=f"block_size={block_size}: .*multiple of 256"): FlashAttentionBackend.check_block_size(block_size)
    FlashAttentionBackend.check_model(torch.float16, 256)
    for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 512)):
        with pytest.raises(ValueError, match=f"not {dtype} and {head_dim}"): FlashAttentionBackend.check_model(dtype, head_dim)


def installed_backends():
    "Those that can run on the GPU"
    return [b for b in ATTENTION_BACKENDS.values() if b.unavailable(torch.device("cuda")) is None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_backends_agree_on_a_gpu(dtype, tolerance):
    "A step of padding rows, decodes and chunks, at the smallest pages that all of them read"
    torch.manual_seed(0)
    contexts, queries, heads = [257, 0, 5, 600], [1, 1, 1, 300], (8, 2, 128)
    (q, *caches, tables, cu, lens), plain_kv = paged_batch(queries, contexts, 256, heads, unused=0.0, device="cuda", dtype=dtype)
    slots = torch.full((len(q),), -1, device="cuda")
    ctx = ForwardContext(slots, tables, lens, cu, 3, 300, [tuple(caches)])
    real = [0, 2, 3]
    expected = reference(torch.cat((q[:1], q[2:])), [1, 1, 300], [plain_kv[i] for i in real], heads[2] ** -0.5)
    for backend in installed_backends():
        if backend is FlashAttentionBackend and dtype == torch.float16: continue  # a build may have one of the two
        layer = make_layer(heads, backend=backend)
        out = layer.attend(q, *caches, replace(ctx))
        assert out[1].eq(0).all(), backend
        assert (torch.cat((out[:1], out[2:])).double() - expected).abs().max() < tolerance, backend


def test_a_layer_uses_the_backend_it_is_given():
    calls = []

    class Recording(TorchAttentionBackend):
        decode = staticmethod(lambda *args: calls.append("decode") or TorchAttentionBackend.decode(*args))
        prefill = staticmethod(lambda *args: calls.append("prefill") or TorchAttentionBackend.prefill(*args))

    layer, pages = make_layer((4, 2, 16)), Pages(4)
    layer.backend = Recording
    caches = make_caches(layer, 4)
    for r in range(2):
        pages.start(r)
    for step, expected in [({0: 5}, ["prefill"]), ({0: 1}, ["decode"]), ({1: 2, 0: 1}, ["decode", "prefill"])]:
        calls.clear()
        ctx, positions, _ = pages.step(step, caches, ForwardContext)
        assert layer(torch.randn(len(positions), 8 * 16), positions, ctx).shape == (len(positions), 64)
        assert calls == expected
