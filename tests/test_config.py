"Configs as transformers 4 and 5 write them, and options that are checked when they are set"
import copy
import dataclasses
import json
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from rigs import TINY
from transformers import AutoConfig

import minivllm.config as config_module
from minivllm.config import (
    EngineConfig, ModelConfig, check_num_gpus, load_model_config, rank_device, read_dtype, read_rope,
    read_sliding_window, resolve_dtype, resolve_max_model_len,
)

LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama",
             **{key: value for key, value in TINY.items() if value is not None and key != "head_dim"})


def write(tmp_path, **changes):
    "A folder with only a config.json: Llama's, with changes; None writes null"
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return tmp_path


@pytest.mark.parametrize("form", [
    dict(rope_theta=1e6, rope_scaling=None),
    dict(rope_theta=1e6),
    dict(rope_parameters=dict(rope_theta=1e6, rope_type="default")),
])
def test_the_rotary_base_is_found_in_every_form(tmp_path, form):  # F40
    assert load_model_config(write(tmp_path, **form)).rope_theta == 1e6


def test_a_scaling_is_found_under_its_old_name_too(tmp_path):  # F41
    old = load_model_config(write(tmp_path, rope_theta=1e4, rope_scaling=dict(type="linear", factor=2.0)))
    new = load_model_config(write(tmp_path, rope_parameters=dict(rope_theta=1e4, rope_type="linear", factor=2.0)))
    assert old.rope_scaling == new.rope_scaling and new.rope_scaling["rope_type"] == "linear" and new.rope_scaling["factor"] == 2.0


def test_a_config_without_attributes_of_version_5_is_read_like_version_4():  # F40, F41
    class Version4:
        rope_theta, rope_scaling, max_position_embeddings = 5e5, {"type": "linear", "factor": 4.0}, 64
    theta, scaling = read_rope(Version4)
    assert theta == 5e5 and scaling == dict(rope_type="linear", factor=4.0, original_max_position_embeddings=64)


def test_a_partial_rotation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="partial_rotary_factor=0.5"):
        load_model_config(write(tmp_path, rope_parameters=dict(rope_theta=1e4, rope_type="default", partial_rotary_factor=0.5)))


@pytest.mark.parametrize("changes, head_dim", [
    ({}, 16), (dict(head_dim=None), 16), (dict(head_dim=32), 32),
    (dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"), 128),
])
def test_head_dim_absent_null_given_or_the_familys(tmp_path, changes, head_dim):  # F43
    assert load_model_config(write(tmp_path, **changes)).head_dim == head_dim


def test_head_dim_that_stays_null():  # F43 b: Mixtral's is an attribute that is None
    config = transformers.MixtralConfig(**{**TINY, "head_dim": None}, architectures=["MixtralForCausalLM"])
    config.head_dim = None  # whatever the version makes of it
    assert ModelConfig.from_hf(config).head_dim == 16


def test_null_key_value_heads_means_one_for_each_query_head():
    config = transformers.LlamaConfig(**{**TINY, "num_key_value_heads": None}, architectures=["LlamaForCausalLM"])
    config.num_key_value_heads = None
    assert ModelConfig.from_hf(config).num_kv_heads == 4


@pytest.mark.parametrize("changes, dtype", [
    (dict(torch_dtype="bfloat16"), torch.bfloat16), (dict(dtype="bfloat16"), torch.bfloat16), ({}, None),
    (dict(dtype="float64"), torch.float64),  # found, and refused by resolve_dtype
])
def test_the_dtype_is_found_under_both_names(tmp_path, changes, dtype):  # F53
    assert load_model_config(write(tmp_path, **changes)).dtype is dtype


def test_the_dtype_of_a_version_that_knows_the_old_name_alone():  # F53
    assert read_dtype(SimpleNamespace(torch_dtype="bfloat16")) is torch.bfloat16
    assert read_dtype(SimpleNamespace(torch_dtype=torch.float16)) is torch.float16
    assert read_dtype(SimpleNamespace(dtype="float32", torch_dtype="float16")) is torch.float32
    assert read_dtype(SimpleNamespace(torch_dtype=None)) is None


def test_auto_dtype_by_device():  # F53
    assert resolve_dtype("auto", torch.bfloat16, "cpu") is torch.float32
    assert resolve_dtype("auto", torch.float16, "cuda") is torch.float16
    assert resolve_dtype("auto", None, "cuda:1") is torch.bfloat16
    assert resolve_dtype("float16", torch.bfloat16, "cpu") is torch.float16
    with pytest.raises(ValueError, match="float64"): resolve_dtype("auto", torch.float64, "cpu")


@pytest.mark.parametrize("changes, message", [
    (dict(architectures=None), "names no architecture"), (dict(hidden_act="gelu"), "hidden_act='gelu'"), (dict(model_type="nonsense"), "nonsense"),
])
def test_an_unusable_config_is_a_value_error_that_names_its_folder(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error: load_model_config(write(tmp_path, **changes))
    assert str(tmp_path) in str(error.value)


def test_a_config_that_is_no_json_is_a_value_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=str(tmp_path)): load_model_config(tmp_path)


def test_end_tokens_are_a_list_whatever_the_file_says(tmp_path):  # F33
    assert load_model_config(write(tmp_path, eos_token_id=[256, 257])).eos_token_ids == [256, 257]
    assert load_model_config(write(tmp_path, eos_token_id=256)).eos_token_ids == [256]
    assert load_model_config(write(tmp_path, eos_token_id=None)).eos_token_ids == []


@pytest.mark.parametrize("options", [
    dict(max_num_seqs=0), dict(block_size=0), dict(gpu_memory_utilization=1.5), dict(gpu_memory_utilization=0), dict(max_model_len=0),
    dict(num_kv_blocks=-1), dict(dtype="int8"), dict(scheduling_policy="fair"), dict(load_format="pt"), dict(device="tpu"), dict(seed=-1),
    dict(max_num_batched_tokens=1.5), dict(max_num_seqs=True), dict(enable_prefix_caching="no"), dict(async_scheduling=1.5), dict(skip_tokenizer_init=None),
    dict(enforce_eager=1), dict(model=None), dict(model=""), dict(model=5), dict(tokenizer=5), dict(tokenizer=""), dict(attention_backend="triton2"),
    dict(attention_backend=None),
])
def test_a_value_out_of_range_names_option_and_value(options):  # F68
    (name, value), = options.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"): EngineConfig(**{"model": "model", **options})


def test_integers_of_numpy_become_plain_ones():
    names = ("seed", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_kv_blocks")
    config = EngineConfig("model", **{name: np.int64(3) for name in names})
    assert all(type(getattr(config, name)) is int and getattr(config, name) == 3 for name in names)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_names_of_the_cpu(device):
    assert EngineConfig("model", device=device).device == "cpu"


def test_an_unknown_option_suggests_the_nearest():  # F68
    with pytest.raises(TypeError, match="max_model_len"): EngineConfig("model", max_model_length=128)


@pytest.mark.parametrize("name, value", [("max_num_seqs", 0), ("gpu_memory_utilization", 2), ("enforce_eager", 1), ("seed", None), ("model", ""), ("dtype", "int8")])
def test_a_later_value_is_checked_like_the_first(name, value):
    config = EngineConfig("model", device="cpu")
    before = dict(vars(config))
    with pytest.raises(ValueError, match=f"{name}={value!r}"): setattr(config, name, value)
    assert vars(config) == before


def test_a_later_value_is_stored_like_the_first():
    config = EngineConfig("model", device="cpu")
    config.max_num_seqs, config.dtype = np.int64(3), torch.float16
    assert type(config.max_num_seqs) is int and config.dtype == "float16"
    with pytest.raises(AttributeError, match="did you mean 'max_model_len'"): config.max_model_length = 5
    same = [pickle.loads(pickle.dumps(config)), copy.copy(config), dataclasses.replace(config)]
    assert all(other == config and vars(other) == vars(config) for other in same)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_asking_for_an_absent_gpu_says_so():
    assert EngineConfig("model").device == "cpu"
    with pytest.raises(ValueError, match="no CUDA device"): EngineConfig("model", device="cuda")


def test_a_gpu_that_is_not_there_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [config_module.resolve_device(device) for device in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    for device in ("cuda:2", "cuda:10"):
        with pytest.raises(ValueError, match=f"device='{device}'.*0 to 1"): config_module.resolve_device(device)


def test_attention_on_the_cpu():
    for name in ("auto", "torch"):
        config = EngineConfig("model", device="cpu", attention_backend=name)
        assert config.attention_backend == "torch" and config.block_size == 16
    assert EngineConfig("model", device="cpu", block_size=5).block_size == 5
    for name in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"attention_backend='{name}' can't run on cpu"): EngineConfig("model", device="cpu", attention_backend=name)


@pytest.mark.parametrize("capability, wish, chosen, block_size", [
    ((9, 0), "auto", "triton", 128), ((8, 6), "triton", "triton", 128), ((9, 0), "torch", "torch", 16),
    ((9, 0), "flash_attn", "flash_attn", 256), ((7, 5), "auto", "torch", 16),
])
def test_attention_on_a_gpu(capability, wish, chosen, block_size, monkeypatch):
    from minivllm.kernels.common import can_launch
    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = module.flash_attn_varlen_func = None
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(config_module, "resolve_device", lambda device: device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    can_launch.cache_clear()
    try:
        config = EngineConfig("model", device="cuda", attention_backend=wish)
        assert (config.attention_backend, config.block_size) == (chosen, block_size)
        if chosen == "flash_attn":
            assert EngineConfig("model", device="cuda", attention_backend=wish, block_size=512).block_size == 512
            with pytest.raises(ValueError, match="block_size=64.*256"): EngineConfig("model", device="cuda", attention_backend=wish, block_size=64)
    finally: can_launch.cache_clear()


def test_max_model_len_is_the_models_or_less():
    assert resolve_max_model_len(None, 256) == 256 and resolve_max_model_len(16, 256) == 16
    with pytest.raises(ValueError, match="512.*256"): resolve_max_model_len(512, 256)


def test_base_of_the_rotation_survives_auto_config():  # F40
    assert read_rope(AutoConfig.for_model("llama", **{**TINY, "rope_theta": 5e5}))[0] == 5e5


@pytest.mark.parametrize("config, window", [
    (transformers.MistralConfig(sliding_window=4), 4),
    (transformers.MistralConfig(sliding_window=None), None),
    (transformers.Qwen2Config(sliding_window=4, use_sliding_window=False), None),
    (transformers.Qwen2Config(sliding_window=4, use_sliding_window=True, max_window_layers=1, num_hidden_layers=2), 4),
    (transformers.Qwen2Config(sliding_window=4, use_sliding_window=True, max_window_layers=2, num_hidden_layers=2), None),
    (transformers.LlamaConfig(), None),
])
def test_a_window_counts_where_a_layer_uses_it(config, window):  # F52
    config.architectures = ["Any"]
    assert ModelConfig.from_hf(config).sliding_window == window


@pytest.mark.parametrize("used, window", [(False, None), (None, 4), (True, 4)])
def test_a_window_that_is_switched_off(used, window):  # F52: older versions leave its size beside the switch
    class Version4:
        sliding_window, use_sliding_window = 4, used
    assert read_sliding_window(Version4) == window


def test_a_window_bounds_the_sequence_and_the_error_gives_the_numbers():  # F52
    assert resolve_max_model_len(4096, 32768, sliding_window=4096) == 4096
    with pytest.raises(ValueError, match="32768.*4096"): resolve_max_model_len(None, 32768, sliding_window=4096)
    with pytest.raises(ValueError, match="4097.*4096"): resolve_max_model_len(4097, 32768, sliding_window=4096)


@pytest.mark.parametrize("changes, message", [
    (dict(num_key_value_heads=3), "num_key_value_heads=3.*num_attention_heads=4"), (dict(num_key_value_heads=8), "num_key_value_heads=8"),
    (dict(num_key_value_heads=0), "num_key_value_heads=0"), (dict(num_key_value_heads=-2), "num_key_value_heads=-2"),
    (dict(num_attention_heads=0), "."), (dict(num_attention_heads=5), "5"), (dict(num_attention_heads=128), "hidden_size|head"),
    (dict(hidden_size=-64), "hidden_size=-64"), (dict(vocab_size=0), "vocab_size=0"), (dict(vocab_size="260"), "vocab_size"),
    (dict(num_hidden_layers=0), "num_hidden_layers=0"), (dict(num_hidden_layers=2.5), "num_hidden_layers"),
    (dict(intermediate_size=-1), "intermediate_size=-1"), (dict(head_dim=-16), "head_dim=-16"), (dict(head_dim=15), "head_dim.*15"),
    (dict(max_position_embeddings=0), "max_position_embeddings=0"), (dict(rms_norm_eps=-1.0), "rms_norm_eps=-1.0"),
    (dict(rope_theta=0.0), "rope_theta=0.0"), (dict(rope_theta=-1.0), "rope_theta=-1.0"),
    (dict(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=0), "sliding_window=0"),
    (dict(architectures=[3]), "architectures"), (dict(torch_dtype="nonsense"), "nonsense"), (dict(dtype="load"), "."),
])
def test_a_number_that_builds_no_model_is_refused_by_its_name_in_the_file(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error: load_model_config(write(tmp_path, **changes))
    assert str(tmp_path) in str(error.value)


def test_one_architecture_may_stand_without_its_list(tmp_path):
    try: config = load_model_config(write(tmp_path, architectures="LlamaForCausalLM"))
    except ValueError as error: assert "architectures" in str(error)  # some versions of transformers refuse it themselves
    else: assert config.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("quantization", [dict(quant_method="gptq", bits=4, group_size=128), dict(quant_method="fp8")])
def test_a_quantised_checkpoint_is_refused(tmp_path, quantization):
    with pytest.raises(ValueError, match=f"quantization.*{quantization['quant_method']}"):
        load_model_config(write(tmp_path, quantization_config=quantization))


def test_rotary_settings_per_kind_of_layer_are_refused():
    class PerLayer:
        rope_parameters = {kind: dict(rope_type="default", rope_theta=1e6) for kind in ("full_attention", "sliding_attention")}
        max_position_embeddings = 64
    with pytest.raises(ValueError, match="full_attention"): read_rope(PerLayer)


@pytest.mark.parametrize("text", ["[1, 2]", "null", '"text"', "", "3"])
def test_a_config_that_is_no_object_is_a_value_error_that_names_its_folder(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="config.json") as error: load_model_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_another_kind_of_network_is_named_by_its_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gpt2", architectures=["GPT2LMHeadModel"])))
    with pytest.raises(ValueError, match="GPT2LMHeadModel.*intermediate_size"): load_model_config(tmp_path)


def test_code_beside_a_checkpoint_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("a question in the middle of loading"))
    write(tmp_path, model_type="foo", auto_map={"AutoConfig": "configuration_foo.FooConfig"})
    (tmp_path / "configuration_foo.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ValueError, match=str(tmp_path)): load_model_config(tmp_path)


def test_a_folder_without_a_config_says_so(tmp_path):
    with pytest.raises(ValueError, match="no config.json"): load_model_config(tmp_path / "absent")


@pytest.mark.parametrize("device, rank, expected", [("cpu", 3, "cpu"), ("cuda", 0, "cuda:0"), ("cuda", 3, "cuda:3"), ("cuda:2", 1, "cuda:3")])
def test_rank_device(device, rank, expected):
    assert rank_device(device, rank) == expected


@pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
def test_tensor_parallel_size_is_checked(value):
    with pytest.raises((ValueError, TypeError), match="tensor_parallel_size"):
        EngineConfig("some-model", device="cpu", tensor_parallel_size=value)


def test_every_rank_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_num_gpus("cuda", 4)
    check_num_gpus("cpu", 64)
    for device, size in (("cuda", 5), ("cuda:2", 3)):
        with pytest.raises(ValueError, match=f"tensor_parallel_size={size}.*4 CUDA devices"):
            check_num_gpus(device, size)


@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 32}])
def test_a_training_length_beside_the_scaling_is_the_one_that_counts(tmp_path, inside):
    scaling = {"rope_type": "yarn", "factor": 4.0, **inside}
    folder = write(tmp_path, max_position_embeddings=256, original_max_position_embeddings=128, rope_scaling=scaling)
    config = load_model_config(folder)
    assert config.rope_scaling["original_max_position_embeddings"] == 128
