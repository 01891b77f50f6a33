"What the user asks of an engine, and what a checkpoint says about its model"
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig

from minivllm.sampling_params import check_option_names, check_range

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class ModelConfig:
    "The numbers that build a model, from a Hugging Face config of either generation"
    architecture: str  # the registered class name, such as "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None  # `rope_type` and its parameters, None for the default rotation
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: torch.dtype | None  # as the checkpoint states it
    eos_token_ids: list[int] = field(default_factory=list)

    @classmethod
    def from_hf(cls, hf_config) -> "ModelConfig":
        "Read the fields, whatever they are called in this version of transformers"
        get = lambda name, default=None: default if (value := getattr(hf_config, name, None)) is None else value
        if not get("architectures"): raise ValueError("config.json names no architecture (`architectures` is missing or empty)")
        if (act := get("hidden_act", "silu")) != "silu": raise ValueError(f"hidden_act={act!r} is not supported; supported: silu")
        theta, scaling = read_rope(hf_config)
        return cls(
            architecture=hf_config.architectures[0],
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=hf_config.num_attention_heads,
            num_kv_heads=get("num_key_value_heads", hf_config.num_attention_heads),
            head_dim=get("head_dim", hf_config.hidden_size // hf_config.num_attention_heads),
            rms_norm_eps=hf_config.rms_norm_eps,
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=hf_config.max_position_embeddings,
            tie_word_embeddings=bool(get("tie_word_embeddings", False)),
            attention_bias=bool(get("attention_bias", False)),
            mlp_bias=bool(get("mlp_bias", False)),
            dtype=read_dtype(hf_config),
            eos_token_ids=as_list(get("eos_token_id")),
        )


def as_list(value) -> list:
    "None is no element, a single value one, a list itself"
    if value is None: return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def read_rope(hf_config) -> tuple[float, dict | None]:
    "Base and scaling of the rotary embedding: `rope_parameters` (transformers 5), else `rope_theta` and `rope_scaling`"
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    parameters = dict(parameters)
    theta = parameters.pop("rope_theta", None) or getattr(hf_config, "rope_theta", None)
    if theta is None: theta = getattr(hf_config, "default_theta", 10000.0)
    if parameters.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise ValueError(f"partial_rotary_factor={parameters['partial_rotary_factor']} is not supported")
    parameters.pop("partial_rotary_factor", None)
    rope_type = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if rope_type == "default": return float(theta), None
    # scalings that need the training length take the config's maximum where they don't state it
    parameters.setdefault("original_max_position_embeddings", hf_config.max_position_embeddings)
    return float(theta), {"rope_type": rope_type, **parameters}


def read_dtype(hf_config) -> torch.dtype | None:
    "The checkpoint's dtype under its new name (`dtype`) or its old one (`torch_dtype`); None where it states none"
    value = getattr(hf_config, "dtype", None)
    if value is None: value = getattr(hf_config, "torch_dtype", None)
    if value is None or isinstance(value, torch.dtype): return value
    return getattr(torch, str(value).removeprefix("torch."))


@dataclass
class EngineConfig:
    "Options of an engine; every one is checked when it is set"
    model: str  # local folder, Hub id, or "smollm2-135m"
    tokenizer: str | None = None  # folder or Hub id; None takes the model's own
    skip_tokenizer_init: bool = False  # prompts and outputs are token ids only
    dtype: str | torch.dtype = "auto"  # "auto", "float32", "bfloat16", "float16"
    device: str = "auto"  # "auto" takes CUDA where there is one
    seed: int = 0  # of requests that bring none of their own, and of dummy weights
    max_model_len: int | None = None  # tokens of prompt and output together; None takes the model's own
    max_num_seqs: int = 256  # requests that run at once
    max_num_batched_tokens: int = 8192  # token budget of a step
    block_size: int | None = None  # tokens of a KV block; None resolves to 16
    num_kv_blocks: int | None = None  # blocks in the pool; None takes what fits
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory this engine may use
    enable_prefix_caching: bool = True
    scheduling_policy: str = "mixed"  # "mixed" or "prefill_first"
    attention_backend: str = "auto"
    load_format: str = "auto"  # "auto" or "dummy" (seeded random weights)

    def __post_init__(self):
        for name in ("max_num_seqs", "max_num_batched_tokens"): check_range(name, getattr(self, name), 1)
        for name in ("max_model_len", "block_size", "num_kv_blocks"):
            if getattr(self, name) is not None: check_range(name, getattr(self, name), 1)
        check_range("seed", self.seed, 0, 2**63 - 1)
        check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.0, 1.0, kind=float)
        if self.gpu_memory_utilization == 0: raise ValueError("gpu_memory_utilization=0: must be above 0, up to 1")
        check_choice("scheduling_policy", self.scheduling_policy, ("mixed", "prefill_first"))
        check_choice("load_format", self.load_format, ("auto", "dummy"))
        self.dtype = str(self.dtype).removeprefix("torch.")
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        self.device = resolve_device(self.device)
        self.block_size = self.block_size or 16


EngineConfig.__init__ = check_option_names(EngineConfig.__init__)


def check_choice(name: str, value, choices):
    "Raise a ValueError naming option, value and choices, unless `value` is one of `choices`"
    if value not in choices: raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")


def resolve_device(device: str) -> str:
    '"auto" becomes "cuda" or "cpu"; asking for CUDA where there is none is an error'
    kind = str(device).split(":")[0]
    check_choice("device", kind, ("auto", "cpu", "cuda"))
    if kind == "auto": return "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: this PyTorch ({torch.__version__}) sees no CUDA device; use device='cpu'")
    return str(device)


def resolve_dtype(
    dtype: str,  # as in `EngineConfig`
    model_dtype: torch.dtype | None,  # the checkpoint's own, if it states one
    device: str,
) -> torch.dtype:
    """The dtype to compute in. "auto" is float32 on the CPU, where half precision saves memory but no time;
    on CUDA the checkpoint's own, or bfloat16 where it states none or float32."""
    if dtype != "auto": return DTYPES[dtype]
    if model_dtype not in (None, *DTYPES.values()):
        raise ValueError(f"the checkpoint's dtype {model_dtype} is not supported; choose one of {', '.join(DTYPES)}")
    if device == "cpu": return torch.float32
    return torch.bfloat16 if model_dtype in (None, torch.float32) else model_dtype


def resolve_max_model_len(
    asked: int | None,
    limit: int,  # `max_position_embeddings` of the model
) -> int:
    "The longest sequence, prompt and output together, that the engine admits"
    if asked is None: return limit
    if asked > limit: raise ValueError(f"max_model_len={asked}: the model's positions end at {limit}")
    return asked


def load_model_config(
    folder: str | Path,  # a folder with config.json
) -> ModelConfig:
    "The model's numbers from its folder"
    return ModelConfig.from_hf(AutoConfig.from_pretrained(folder))
