"Architecture names and the classes that build them"
import importlib
import pkgutil

_MODELS = {}


def register_model(
    *architectures: str,  # names as in a checkpoint's `architectures`
):
    "Class decorator: this class builds checkpoints of these architectures"
    def register(cls):
        for name in architectures:
            # a notebook that redefines its class replaces the old one; another class is a mistake
            taken = _MODELS.get(name)
            if taken is not None and taken.__qualname__ != cls.__qualname__:
                raise ValueError(f"{name} is registered to {taken.__qualname__} already")
            _MODELS[name] = cls
        return cls
    return register


def registered_models() -> list[str]:
    "The architectures that can be built, sorted"
    import_models()
    return sorted(_MODELS)


def get_model_class(
    architecture: str,
) -> type:
    "The class registered for an architecture; an unknown one is a ValueError that lists the others"
    import_models()
    if architecture not in _MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(_MODELS))}")
    return _MODELS[architecture]


def import_models():
    "Import every module of `minivllm.models`: each registers its architectures as it is imported"
    package = importlib.import_module("minivllm.models")
    for module in pkgutil.iter_modules(package.__path__): importlib.import_module(f"minivllm.models.{module.name}")
