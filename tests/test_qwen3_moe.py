"Qwen3-MoE and Mixtral: logits and greedy tokens of transformers, from per-expert checkpoints, on one rank and on several"
import json
import random

import pytest
import torch
import transformers
from rigs import DEVICE, RIGS, check_greedy, edit_config, load, reference_logits, tiny_model
from safetensors.torch import load_file

from minivllm import LLM, SamplingParams
from minivllm.config import ExpertsConfig, ModelConfig, load_model_config
from minivllm.distributed import TensorParallelGroup, run_ranks
from minivllm.layers.attention import ForwardContext
from minivllm.layers.fused_moe import FusedMoE
from minivllm.models.llama import LlamaMLP
from minivllm.models.loader import CheckpointError, build_model, init_dummy_weights
from minivllm.models.qwen3_moe import MixtralForCausalLM, Qwen3MoeForCausalLM


def qwen3_moe(top_k=2, **options):
    "Options of a tiny Qwen3-MoE with 8 experts"
    return "Qwen3Moe", dict(num_experts=8, num_experts_per_tok=top_k, moe_intermediate_size=32, **options)


MOE = {
    "qwen3-moe": qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-raw": qwen3_moe(norm_topk_prob=False),
    "qwen3-moe-3": qwen3_moe(3, norm_topk_prob=True),
    "qwen3-moe-3-raw": qwen3_moe(3, norm_topk_prob=False),
    "qwen3-moe-every-second": qwen3_moe(norm_topk_prob=True, num_hidden_layers=4, decoder_sparse_step=2),
    "qwen3-moe-mixed": qwen3_moe(3, num_hidden_layers=4, decoder_sparse_step=1, mlp_only_layers=[0, 2]),
    "qwen3-moe-tied": qwen3_moe(norm_topk_prob=True, tie_word_embeddings=True),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
}


@pytest.fixture(scope="module", autouse=True)
def rigs():
    "These models beside the others, for this file"
    RIGS.update(MOE)
    yield
    for name in MOE: del RIGS[name]


@torch.inference_mode()
def our_logits(model, token_ids):
    "Logits at every position of a prompt, computed in one go"
    config, n = model.config, len(token_ids)
    heads = model.model.layers[0].self_attn.attn.num_kv_heads
    caches = [(k, v) for k, v in torch.zeros(config.num_layers, 2, 1, n, heads, config.head_dim, device=DEVICE)]
    table, lens, starts = (torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in ([[0]], [n], [0, n]))
    positions = torch.arange(n, device=DEVICE)
    ctx = ForwardContext(positions, table, lens, starts, 0, n, caches)
    return model.compute_logits(model(torch.tensor(token_ids, device=DEVICE), positions, ctx))


PROMPT = random.Random(0).choices(range(256), k=37)


@pytest.mark.parametrize("name", MOE)
def test_logits_equal_transformers(name):  # F49, F51
    folder, reference = tiny_model(name)
    torch.testing.assert_close(our_logits(load(folder), PROMPT), reference_logits(reference, PROMPT), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("options", [dict(block_size=16, num_kv_blocks=100), dict(block_size=4, num_kv_blocks=60, max_num_batched_tokens=16)], ids=["whole", "chunks, small pool"])
def test_greedy_equals_transformers(name, options):
    folder, reference = tiny_model(name)
    prompts = [PROMPT[:1], PROMPT[:5], PROMPT, PROMPT[:16] + PROMPT[:16]]
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_num_seqs=4, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    assert sum(check_greedy(reference, p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs)) <= 1


def test_the_flag_matters():  # F49
    "Renormalised or not are two models: the same file read the other way gives other logits"
    folder, _ = tiny_model("qwen3-moe")
    model = load(folder)
    right = our_logits(model, PROMPT)
    for layer in model.model.layers: layer.mlp.normalize = False
    assert (our_logits(model, PROMPT) - right).abs().max() > 0.1


def test_layers_with_and_without_experts():
    kinds = {}
    for name in ("qwen3-moe-every-second", "qwen3-moe-mixed", "qwen3-moe", "mixtral"):
        kinds[name] = [type(layer.mlp) for layer in load(tiny_model(name)[0]).model.layers]
    assert kinds["qwen3-moe-every-second"] == kinds["qwen3-moe-mixed"] == [LlamaMLP, FusedMoE] * 2
    assert kinds["qwen3-moe"] == kinds["mixtral"] == [FusedMoE] * 2


def test_a_skewed_router():
    "One expert gets all tokens and others none"
    folder, reference = tiny_model("qwen3-moe-3")
    model, gate = load(folder), reference.model.layers[0].mlp.gate.weight
    before = gate.data.clone()
    skewed = torch.zeros_like(before)  # all logits are equal: everybody takes the lowest numbers
    try:
        gate.data = skewed
        model.model.layers[0].mlp.gate.weight.data = skewed.clone()
        expected = reference_logits(reference, PROMPT)
    finally:
        gate.data = before
    chosen = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda m, args, out: chosen.append(out))
    got = our_logits(model, PROMPT)
    assert not chosen[0].any()
    # which of the equals transformers takes is torch.topk's affair: compare only where it took the same
    if reference_takes_lowest(8, 3): torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)
    assert got.isfinite().all()


def reference_takes_lowest(num_experts, top_k):
    return torch.zeros(1, num_experts, device=DEVICE).softmax(-1).topk(top_k).indices.sort().values.tolist() == [list(range(top_k))]


# Checkpoints


def test_what_transformers_writes():  # F51
    "Per expert, under the names that published checkpoints have; in memory it keeps all experts in one tensor"
    folder, model = tiny_model("qwen3-moe")
    names = set(load_file(folder / "model.safetensors"))
    assert {f"model.layers.1.mlp.experts.7.{p}_proj.weight" for p in ("gate", "up", "down")} | {"model.layers.1.mlp.gate.weight"} <= names
    names = set(load_file(tiny_model("mixtral")[0] / "model.safetensors"))
    assert {f"model.layers.1.block_sparse_moe.experts.3.w{i}.weight" for i in (1, 2, 3)} | {"model.layers.1.block_sparse_moe.gate.weight"} <= names


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_an_expert_over_several_files(name, tmp_path):  # F51
    _, reference = tiny_model(name)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    experts = {}
    for tensor, file in index.items():
        if ".experts." in tensor: experts.setdefault(tensor.rsplit(".", 2)[0], set()).add(file)
    assert any(len(files) > 1 for files in experts.values())
    torch.testing.assert_close(our_logits(load(tmp_path), PROMPT), reference_logits(reference, PROMPT), atol=2e-4, rtol=2e-4)


def test_a_missing_matrix_of_an_expert_is_named(checkpoint):  # F51
    folder, rewrite = checkpoint("qwen3-moe")
    rewrite(lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing:\n  model.layers.1.mlp.experts.3.up_proj.weight$"): load(folder)


def test_an_expert_too_many_is_named(checkpoint):  # F51
    folder, _ = checkpoint("qwen3-moe")
    edit_config(folder, num_experts=7, num_local_experts=None)
    with pytest.raises(CheckpointError, match="unexpected:\n(.*\n)*  model.layers.0.mlp.experts.7.down_proj.weight"): load(folder)


def test_a_transposed_matrix_is_refused(checkpoint):  # F51
    folder, rewrite = checkpoint("mixtral")
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight"
    rewrite(lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(CheckpointError, match=rf"wrong shape or type:\n  {name}: checkpoint shape \(128, 64\), expected \(64, 128\)"): load(folder)


def test_gate_and_up_are_not_exchanged(checkpoint):  # F51
    folder, rewrite = checkpoint("qwen3-moe")
    right = our_logits(load(folder), PROMPT)
    def exchange(tensors):
        a, b = (f"model.layers.0.mlp.experts.5.{p}_proj.weight" for p in ("gate", "up"))
        tensors[a], tensors[b] = tensors[b], tensors[a]
    rewrite(exchange)
    assert (our_logits(load(folder), PROMPT) - right).abs().max() > 1e-3


# Ranks


@pytest.mark.parametrize("name", ["qwen3-moe-3-raw", "qwen3-moe-mixed", "mixtral"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_equal_one(name, world_size):
    folder, _ = tiny_model(name)
    whole = load(folder)
    # building sets a process-wide default dtype, which threads share: one after another
    models = [load(folder, tp=TensorParallelGroup(rank, world_size)) for rank in range(world_size)]
    for layers in zip(*(model.model.layers for model in models)):
        for mlp, part in ((l.mlp, i) for i, l in enumerate(layers) if isinstance(l.mlp, FusedMoE)):
            full = whole.model.layers[layers[0].self_attn.attn.layer_idx].mlp
            gate, up = (t.chunk(world_size, 1)[part] for t in full.w13.weight.chunk(2, 1))
            assert torch.equal(mlp.w13.weight, torch.cat((gate, up), 1))
            assert torch.equal(mlp.w2.weight, full.w2.weight.chunk(world_size, 2)[part])
            assert torch.equal(mlp.gate.weight, full.gate.weight)

    def forward(tp):
        model = models[tp.rank]
        for module in model.modules():
            if hasattr(module, "tp"): module.tp = tp
        return our_logits(model, PROMPT)
    logits = run_ranks(forward, world_size)
    torch.testing.assert_close(logits[0], our_logits(whole, PROMPT), atol=2e-4, rtol=2e-4)
    assert all(l is None for l in logits[1:])


def test_experts_that_cannot_be_cut():
    folder, _ = tiny_model("qwen3-moe")
    config = load_model_config(folder)
    config.experts = ExpertsConfig(8, 2, 33, True, ())
    with pytest.raises(ValueError, match="intermediate size 33 can't be divided among 2 ranks"):
        build_model(Qwen3MoeForCausalLM, config, torch.float32, DEVICE, max_position=64, tp=TensorParallelGroup(0, 2))


# Configs and dummy weights


@pytest.mark.parametrize("options, dense", [
    ({}, ()), (dict(decoder_sparse_step=2), (0, 2)), (dict(mlp_only_layers=[1, 3]), (1, 3)),
    (dict(decoder_sparse_step=3, mlp_only_layers=[2]), (0, 1, 2, 3)),
])
def test_dense_layers_as_in_transformers(options, dense):
    config = transformers.Qwen3MoeConfig(
        **{**qwen3_moe()[1], **options}, num_hidden_layers=4, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=20, architectures=["Qwen3MoeForCausalLM"])
    reference = transformers.Qwen3MoeForCausalLM(config)
    assert tuple(i for i, layer in enumerate(reference.model.layers) if not hasattr(layer.mlp, "experts")) == dense
    assert ModelConfig.from_hf(config).experts.dense_layers == dense


def test_families_without_experts_have_none():
    assert load_model_config(tiny_model("qwen3")[0]).experts is None
    mixtral = load_model_config(tiny_model("mixtral")[0]).experts
    assert mixtral == ExpertsConfig(num_experts=4, top_k=2, intermediate_size=128, normalize=True, dense_layers=())


@pytest.mark.parametrize("changes, message", [
    (dict(num_experts_per_tok=9), "num_experts_per_tok=9: must be an integer, at least 1, at most 8"),
    (dict(moe_intermediate_size=0), "moe_intermediate_size=0"), (dict(decoder_sparse_step=0), "decoder_sparse_step=0"),
])
def test_numbers_that_build_no_experts(checkpoint, changes, message):
    folder, _ = checkpoint("qwen3-moe")
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message): load_model_config(folder)


def test_dummy_weights():
    config = load_model_config(tiny_model("qwen3-moe")[0])
    models = []
    for _ in range(2):
        models.append(build_model(Qwen3MoeForCausalLM, config, torch.bfloat16, DEVICE, max_position=64))
        for p in models[-1].parameters(): p.data.fill_(torch.nan) if p.dim() > 1 else None
        init_dummy_weights(models[-1], seed=3)
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    w13 = models[0].model.layers[0].mlp.w13.weight
    assert w13.std().item() == pytest.approx(0.02, rel=0.05) and not torch.equal(w13[0], w13[1])


def test_dummy_engine():
    with LLM(str(tiny_model("mixtral")[0]), skip_tokenizer_init=True, load_format="dummy", num_kv_blocks=16) as llm:
        assert isinstance(llm.engine.runner.model, MixtralForCausalLM)
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4
