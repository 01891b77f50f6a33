"From a model's name to a folder, and from a folder's safetensors to a model's parameters"
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from minivllm.demo import DEMO_MODEL, demo_model
from minivllm.layers.linear import load_whole

class CheckpointError(ValueError):
    "A checkpoint that doesn't fit its model; the message lists every tensor concerned"


def resolve_model(
    model: str | Path,  # a local folder, a Hub id such as "Qwen/Qwen3-0.6B", or "smollm2-135m"
) -> Path:  # a local folder with config.json
    "Find the model's folder, fetching it where needed"
    if Path(model).is_dir():
        if (Path(model) / "config.json").is_file(): return Path(model)
        raise FileNotFoundError(f"{model} is a folder without config.json")
    if str(model) == DEMO_MODEL: return demo_model()
    return fetch_from_hub(str(model))


def fetch_from_hub(model: str) -> Path:
    "Download (or find in the Hub's cache) what an engine needs of a model: configs, tokenizer and safetensors"
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    hint = f"Give a local folder with config.json and *.safetensors instead, or {DEMO_MODEL!r}, which needs no hub."
    try: return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]))
    except HFValidationError: raise FileNotFoundError(f"{model!r} is neither a local folder nor a Hub id. {hint}") from None
    except RepositoryNotFoundError as error: raise FileNotFoundError(f"the Hub has no model {model!r}. {hint}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConnectionError(f"{model!r} could not be fetched from the Hub and is not in its cache "
                              f"({type(error).__name__}). {hint}") from error


class LazyTensor:
    "A tensor of a safetensors file, read where it is indexed"
    def __init__(self, file, name: str):
        self.name, self._slice = name, file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def __getitem__(self, index): return self._slice[index]


def checkpoint_files(folder: Path) -> list[Path]:
    "The safetensors files of a folder: those its index names, or all there are"
    index = folder / "model.safetensors.index.json"
    if index.is_file(): files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else: files = sorted(folder.glob("*.safetensors"))
    if not files: raise CheckpointError(f"{folder} holds no *.safetensors files")
    missing = [file.name for file in files if not file.is_file()]
    if missing: raise CheckpointError(f"{folder}: the index names files that are not there: {', '.join(missing)}")
    return files


def iter_checkpoint(folder: Path) -> Iterator[tuple[str, LazyTensor]]:
    "Every tensor's name and its lazy slice, file by file; nothing is read before it is indexed"
    for path in checkpoint_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys(): yield name, LazyTensor(file, name)
        except SafetensorError as error: raise CheckpointError(f"{path.name} can't be read: {error}") from error


def checkpoint_names(
    param_name: str,  # of one of the model's parameters
    packed_modules: dict,  # our module name -> {checkpoint's module name: shard id}
) -> dict:  # name in the checkpoint -> shard id (None: the whole parameter)
    "The checkpoint tensors that fill a parameter"
    for ours, theirs in packed_modules.items():
        if f".{ours}." in param_name:
            return {param_name.replace(f".{ours}.", f".{name}."): shard_id for name, shard_id in theirs.items()}
    return {param_name: None}


@torch.no_grad()
def load_weights(
    model: nn.Module,  # has `packed_modules` and `tie_word_embeddings`
    folder: Path,
):
    "Fill every parameter from the checkpoint; missing, unexpected and misshapen tensors are one error that lists them"
    wanted = {name: (param, shard_id) for param_name, param in model.named_parameters()
              for name, shard_id in checkpoint_names(param_name, model.packed_modules).items()}
    missing, unexpected, misshapen = dict.fromkeys(wanted), [], []
    for name, tensor in iter_checkpoint(Path(folder)):
        if name in wanted:
            missing.pop(name, None)
            param, shard_id = wanted[name]
            loader = getattr(param, "weight_loader", load_whole)
            try: loader(param, tensor) if shard_id is None else loader(param, tensor, shard_id)
            except ValueError as error: misshapen.append(f"{name}: {error}")
        elif name == "lm_head.weight" and model.tie_word_embeddings: pass  # checked below
        elif not name.endswith("rotary_emb.inv_freq"): unexpected.append(name)  # old checkpoints store the table
    problems = {"missing": list(missing), "unexpected": unexpected, "of the wrong shape": misshapen}
    text = [f"{what}:\n  " + "\n  ".join(names) for what, names in problems.items() if names]
    if text: raise CheckpointError("\n".join([f"the checkpoint in {folder} doesn't fit {type(model).__name__}", *text]))


def init_dummy_weights(
    model: nn.Module,
    seed: int = 0,
    std: float = 0.02,
):
    "Seeded normal random weights; norms and other vectors stay as they were built"
    generator = None
    with torch.no_grad():
        for param in model.parameters():
            generator = generator or torch.Generator(param.device).manual_seed(seed)
            if param.dim() > 1: param.normal_(0, std, generator=generator)
            elif getattr(param, "weight_loader", None): param.zero_()  # biases


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    "Create parameters in `dtype`; the process's own default returns even after an error"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try: yield
    finally: torch.set_default_dtype(before)


def build_model(
    model_class: type,
    config,  # `ModelConfig`
    dtype: torch.dtype,
    device: str,
    **kwargs,  # for the model's constructor
) -> nn.Module:
    "An instance whose parameters live on `device` in `dtype`, not yet filled"
    with default_dtype(dtype), torch.device(device): return model_class(config, **kwargs).eval()
