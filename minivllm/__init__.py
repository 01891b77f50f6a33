"vLLM's core, rebuilt as a book that runs"
import logging

__version__ = "0.1.0"

# silent until the user asks: logging.basicConfig(); logging.getLogger("minivllm").setLevel("INFO")
logging.getLogger("minivllm").addHandler(logging.NullHandler())

_EXPORTS = {
    "LLM": "minivllm.llm",
    "AsyncLLM": "minivllm.llm_async",
    "LLMEngine": "minivllm.engine.llm_engine",
    "SamplingParams": "minivllm.sampling_params",
    "RequestOutput": "minivllm.outputs",
    "CompletionOutput": "minivllm.outputs",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name):
    "Import the public names on first use, so that `import minivllm` alone doesn't import torch"
    if name in _EXPORTS:
        from importlib import import_module
        value = getattr(import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")


def __dir__():
    return sorted(__all__)
