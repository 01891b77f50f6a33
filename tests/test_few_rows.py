"The way of few rows through the layers: the same numbers, also where several ranks hold the weights"
import pytest
import torch
from rigs import DEVICE, tiny_model

from minivllm.config import load_model_config
from minivllm.distributed import run_ranks
from minivllm.layers.attention import ForwardContext
from minivllm.models.llama import LlamaModel
from minivllm.models.loader import build_model, load_weights
from minivllm.models.registry import get_model_class

TOKENS = torch.tensor([7, 200, 3, 41])


def whole_prompt(model, config):
    "Context and positions of a prompt in one block"
    n, num_kv_heads = len(TOKENS), model.model.layers[0].self_attn.attn.num_kv_heads
    cache = torch.zeros(config.num_layers, 2, 1, 16, num_kv_heads, config.head_dim, device=DEVICE)
    ctx = ForwardContext(
        slot_mapping=torch.arange(n, device=DEVICE), block_tables=torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        context_lens=torch.tensor([n], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.tensor([0, n], dtype=torch.int32, device=DEVICE),
        num_decodes=0, max_query_len=n, kv_caches=[(k, v) for k, v in cache])
    return torch.arange(n, device=DEVICE), ctx


@torch.inference_mode()
def logits_of(tp, folder, few, monkeypatch):
    config = load_model_config(folder)
    model = build_model(get_model_class(config.architecture), config, torch.float32, DEVICE, max_position=32, tp=tp)
    load_weights(model, folder)
    monkeypatch.setattr(LlamaModel, "has_few_rows", lambda self, x: few)
    return model.compute_logits(model(TOKENS.to(DEVICE), *whole_prompt(model, config))[-2:])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama-biased", "qwen3", "qwen3-tied"])
def test_few_rows_are_the_same_on_any_number_of_ranks(name, world_size, monkeypatch):
    folder, _ = tiny_model(name)
    whole, = run_ranks(lambda tp: logits_of(tp, folder, False, monkeypatch), 1)
    few, *others = run_ranks(lambda tp: logits_of(tp, folder, True, monkeypatch), world_size)
    assert whole.abs().max() > 1 and all(y is None for y in others)
    torch.testing.assert_close(few, whole, atol=2e-4, rtol=2e-4)
