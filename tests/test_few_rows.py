"The way of few rows through the layers: the same numbers, also where several ranks hold the weights"
import pytest
import torch
from rigs import DEVICE, RIGS, tiny_model

from minivllm.config import load_model_config
from minivllm.distributed import PretendGroup, run_ranks
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


SOME_EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, num_hidden_layers=4, decoder_sparse_step=1, mlp_only_layers=[0, 2])


class Noting(PretendGroup):
    "Has places as GPUs do, and notes what all ranks do together: exchanges, and who writes to which place"

    def __init__(self, tp, max_rows):
        super().__init__(tp.rank, tp.world_size, tp._barrier, tp._slots)
        self.max_rows, self.buffers, self.seen = max_rows, [None, None], []

    def _exchange(self, x, combine):
        self.seen.append("exchange")
        return super()._exchange(x, combine)

    def place(self, which, shape, dtype):
        if shape[0] > self.max_rows:
            return None
        self.seen.append(which)
        # what others may still read must stay: a new write goes to the same memory
        if self.buffers[which] is None:
            self.buffers[which] = torch.empty(shape, dtype=dtype)
        return self.buffers[which]


@pytest.mark.skipif(DEVICE != "cpu", reason="threads that share tensors")
@pytest.mark.parametrize("max_rows", [4, 3])
@pytest.mark.parametrize("name", ["llama-biased", "qwen2", "moe-in-some"])
def test_between_two_uses_of_a_place_lies_an_exchange(name, max_rows, monkeypatch):
    "Within a step and from step to step; and products written to their places are the right ones"
    monkeypatch.setitem(RIGS, "moe-in-some", ("Qwen3Moe", SOME_EXPERTS))
    folder, _ = tiny_model(name)
    whole, = run_ranks(lambda tp: logits_of(tp, folder, False, monkeypatch), 1)

    def steps(tp):
        tp = Noting(tp, max_rows)
        return [logits_of(tp, folder, few, monkeypatch) for few in (False, False, "moe" not in name, False)], tp.seen

    (logits, seen), *_ = run_ranks(steps, 2)
    for y in logits:
        torch.testing.assert_close(y, whole, atol=2e-4, rtol=2e-4)
    assert (0 in seen) == (max_rows == 4) and all(seen[i + 1] == "exchange" for i, what in enumerate(seen) if what != "exchange")
    for which in (0, 1):
        uses = [i for i, what in enumerate(seen) if what == which]
        for first, second in zip(uses, uses[1:]):
            # the first is the sum of what stands in the place, behind which others read it
            assert seen[first + 2 : second].count("exchange")
