"Tiny random models, and the checks that hold the engine to transformers"
import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

from minivllm.config import load_model_config
from minivllm.models.loader import build_model, load_weights
from minivllm.models.registry import get_model_class

# vocabulary of a byte tokenizer with four special tokens; large weights make the argmax gaps clear
TINY = dict(vocab_size=260, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
            intermediate_size=128, max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=False,
            initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def rope(rope_type, **parameters):
    "Config keys of a rotary scaling; the training length is 64 tokens"
    return dict(rope_theta=10000.0, rope_scaling=dict(rope_type=rope_type, original_max_position_embeddings=64, **parameters))


RIGS = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", dict(tie_word_embeddings=True)),
    "llama-biased": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "qwen2": ("Qwen2", dict(use_sliding_window=False)),
    "mistral": ("Mistral", dict(sliding_window=256)),
    "linear": ("Llama", rope("linear", factor=2.0)),
    "yarn": ("Llama", rope("yarn", factor=4.0)),
    # what transformers does beyond the training length depends on the longest text of a call: here all is within it
    "dynamic": ("Llama", dict(rope_theta=10000.0, rope_scaling=dict(rope_type="dynamic", factor=2.0))),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TIE = 1e-4  # a first difference counts as equal where the reference's two best logits are this close


@functools.cache
def tiny_model(
    name: str,  # a key of RIGS
) -> tuple[Path, torch.nn.Module]:  # checkpoint folder, transformers' model
    "A tiny random model of a family, saved as a checkpoint"
    family, options = RIGS[name]
    config = getattr(transformers, f"{family}Config")(**{**TINY, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    for parameter in model.parameters():
        # transformers starts norms at one and biases at zero, where a mistake in them could not be seen
        if parameter.dim() == 1: torch.nn.init.normal_(parameter, 1.0 if parameter.mean() == 1 else 0.0, 0.3)
    folder = Path(tempfile.mkdtemp(prefix=f"minivllm-{name}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder, model.to(DEVICE)


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    **options,  # of the model, such as its rank's group
) -> torch.nn.Module:
    "Our model, loaded from a folder"
    config = load_model_config(folder)
    model = build_model(get_model_class(config.architecture), config, dtype, DEVICE, max_position=256, **options)
    load_weights(model, folder)
    return model


@torch.inference_mode()
def reference_logits(model, token_ids: list[int]) -> torch.Tensor:  # `[len(token_ids), vocab_size]`
    "transformers' logits at every position"
    return model(torch.tensor([token_ids], device=model.device)).logits[0]


def check_greedy(
    model,  # transformers' model
    prompt: list[int],
    output: list[int],  # the engine's greedy tokens
) -> int:  # ties met (0 or 1)
    "Assert that `output` is transformers' greedy continuation, up to a tie"
    logits = reference_logits(model, prompt + output[:-1])[len(prompt) - 1:]
    best = logits.topk(2)
    differ = (best.indices[:, 0] != torch.tensor(output, device=logits.device)).nonzero().flatten().tolist()
    if not differ: return 0
    # after a tie both continue texts of their own: only the first difference says something
    i = differ[0]
    gap = (best.values[i, 0] - best.values[i, 1]).item()
    assert gap < TIE and best.indices[i, 1] == output[i], (
        f"token {i} is {output[i]}, transformers has {best.indices[i, 0].item()}, ahead by {gap:.2g}")
    return 1


def edit_config(folder: Path, **changes):
    "Change keys of a checkpoint's config.json; None removes a key"
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
