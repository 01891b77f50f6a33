"Models that are damaged, incomplete or not what they say: a clear exception that names the file, or a request that says why it ended"
import json
import logging
import shutil
import struct
import warnings
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer, model_folder
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.engine.scheduler import NOT_FINITE
from minivllm.models.loader import CheckpointError, build_model

T0 = dict(dtype="float32", block_size=4, num_kv_blocks=32, max_model_len=64, max_num_seqs=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def folder(original, tmp_path):
    "A copy to be damaged"
    return Path(shutil.copytree(original, tmp_path / "model"))


def weights(folder): return folder / "model.safetensors"


def load(folder, **options):
    with LLM(str(folder), **{**T0, **options}) as llm: return llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0]


# files


@pytest.mark.parametrize("size", [0, 4, 8, 20, 3000, -1, -5000])
def test_truncated_weights_name_the_file(folder, size):  # fails without the `except` in `iter_checkpoint`
    content = weights(folder).read_bytes()
    weights(folder).write_bytes(content[:size])
    with pytest.raises(CheckpointError, match="model.safetensors can't be read"): load(folder)
    weights(folder).write_bytes(content)
    assert load(folder).finish_reason == "length"


def rewrite_header(folder, change):
    "Change the description of the tensors and leave their bytes alone"
    content = weights(folder).read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    header = json.dumps(header).encode()
    weights(folder).write_bytes(struct.pack("<Q", len(header)) + header + content[8 + size :])


@pytest.mark.parametrize("change, message", [
    (dict(dtype="F7"), "can't be read"), (dict(dtype="I32"), "model.norm.weight: stored as I32"), (dict(shape=[8, 8]), r"\(8, 8\).*\(64,\)"),
    (dict(shape=[-64]), "can't be read"), (dict(shape="x"), "can't be read"), (dict(data_offsets=[0, 10]), "can't be read"),
])
def test_a_header_that_lies(folder, change, message):
    rewrite_header(folder, lambda header: header["model.norm.weight"].update(change))
    with pytest.raises(CheckpointError, match=message): load(folder)


@pytest.mark.parametrize("content", [
    b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", struct.pack("<Q", 2**62) + b"{}", b"\x10" + b"\0" * 7 + b"\xff" * 16,
    b"<html>404</html>", struct.pack("<Q", 2) + b"{}",
])
def test_what_is_no_safetensors_file(folder, content):
    weights(folder).write_bytes(content)
    with pytest.raises(CheckpointError): load(folder)


def test_a_missing_shard_is_named(folder):
    tensors = load_file(weights(folder))
    first = sorted(tensors)[: len(tensors) // 2]
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": sorted(set(tensors) - set(first))}
    for file, names in files.items(): save_file({name: tensors[name] for name in names}, folder / file)
    weights(folder).unlink()
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(folder).finish_reason == "length"
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not there.*model-00002-of-00002"): load(folder)
    (folder / "model.safetensors.index.json").unlink()  # without the index: what it would have held is missing
    with pytest.raises(CheckpointError, match="missing:\n"): load(folder)


def test_other_formats_are_no_weights(folder):
    weights(folder).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="no .*safetensors"): load(folder)


# config.json


def config_of(folder): return json.loads((folder / "config.json").read_text())


def write_config(folder, config): (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "{}", '{"model_type": "llama"}', '{"model_type": "nope"}', "\xff\xfe"])
def test_what_is_no_config(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="config.json"): load(folder)


@pytest.mark.parametrize("name", ["architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                  "num_attention_heads", "num_key_value_heads"])
def test_a_config_without_a_field(folder, name):
    "Of some fields transformers has defaults: then the weights don't fit, and the error has both shapes"
    config = config_of(folder)
    del config[name]
    write_config(folder, config)
    with pytest.raises(ValueError, match="config|checkpoint shape|missing"): load(folder)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "rms_norm_eps",
                                  "max_position_embeddings", "hidden_act", "dtype"])
@pytest.mark.parametrize("value", [-1, "x", [], {}])
def test_fields_that_are_no_numbers(folder, name, value):
    write_config(folder, {**config_of(folder), name: value})
    with pytest.raises(ValueError): load(folder)


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "x", "Qwen3ForCausalLM"])
def test_a_wrong_architecture(folder, architecture):
    "One that isn't there names those that are; one that is doesn't find its weights"
    write_config(folder, {**config_of(folder), "architectures": [architecture]})
    with pytest.raises(ValueError, match="supported: LlamaForCausalLM" if architecture != "Qwen3ForCausalLM" else "q_norm"): load(folder)


def test_a_model_that_fits_into_no_memory(folder):  # fails without the `except` in `build_model`
    write_config(folder, {**config_of(folder), "intermediate_size": 10**12})
    with pytest.raises(MemoryError, match="LlamaForCausalLM doesn't fit on cpu"): load(folder, device="cpu")
    assert torch.get_default_dtype() is torch.float32

    def broken(config): raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"): build_model(broken, None, torch.float32, "cpu")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"eos_token_id": "x"}', '{"eos_token_id": [1.5]}', '{"eos_token_id": {"a": 1}}'])
def test_what_is_no_generation_config(folder, text):  # fails without the two checks in `end_token_ids`
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="generation_config.json"): load(folder)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_tokenizer(folder, file, text):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match="no tokenizer that can be read.*skip_tokenizer_init"): load(folder)
    assert load(folder, skip_tokenizer_init=True).token_ids


# numbers


def spoil(folder, name, value, row=None):
    tensors = load_file(weights(folder))
    (tensors[name] if row is None else tensors[name][row]).fill_(value)
    save_file(tensors, weights(folder))


@pytest.mark.parametrize("name, value, row", [
    ("model.norm.weight", float("nan"), None), ("lm_head.weight", float("nan"), 7), ("lm_head.weight", float("inf"), None),
    ("model.layers.1.mlp.down_proj.weight", float("nan"), 3), ("model.embed_tokens.weight", float("nan"), None),
])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_no_numbers_end_the_request_and_say_so(folder, caplog, name, value, row, temperature):
    # F39; fails without `if token_id < 0` in the scheduler's `_accept`, and without NOT_FINITE in `_end`
    spoil(folder, name, value, row)
    with LLM(str(folder), **T0) as llm:
        with caplog.at_level(logging.WARNING, "minivllm"):
            output, = llm.generate([[1, 2, 3]], SamplingParams(temperature=temperature, max_tokens=8), use_tqdm=False)
        answer = output.outputs[0]
        assert (answer.finish_reason, answer.stop_reason, answer.token_ids, answer.text) == ("error", NOT_FINITE, [], "")
        assert repr(output.request_id) in caplog.text and "not finite" in caplog.text
        assert [o.outputs[0].finish_reason for o in llm.stream([1, 2], GREEDY)] == ["error"]
        manager = llm.engine.scheduler.block_manager
        assert manager.num_free_blocks == manager.num_blocks


def test_a_nan_in_one_tokens_row_ends_those_who_say_it(folder):
    "The neighbours of the same batch go on, and nothing that the sick one computed is found by another"
    with LLM(str(folder), **T0) as llm: expected = [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3, 4, 5], [4, 5, 6]], GREEDY, use_tqdm=False)]
    token_id = next(i for i in range(100, 200) if not any(i in answer for answer in expected))
    spoil(folder, "model.embed_tokens.weight", float("nan"), token_id)
    with LLM(str(folder), **T0) as llm:
        for _ in range(2):
            outputs = llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, token_id, 6, 7, 8, 9], [4, 5, 6]], GREEDY, use_tqdm=False)
            assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
            assert [o.outputs[0].token_ids for o in outputs[::2]] == expected
        assert outputs[1].num_cached_tokens <= 4


def test_a_vocabulary_smaller_than_the_tokenizers(folder):  # F69: fails without the warning in `load_tokenizer`
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra{i}>" for i in range(5)])
    tokenizer.save_pretrained(folder)
    with pytest.warns(UserWarning, match="the tokenizer has 265 tokens, the model 260"):
        llm = LLM(str(folder), **T0)
    with llm:
        with pytest.raises(ValueError, match="prompt 1: token id=262"): llm.generate(["fine", "a<extra2>"], GREEDY, use_tqdm=False)
        assert llm.generate(["fine"], GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_a_vocabulary_larger_than_the_tokenizers_is_silent_and_has_no_text(tmp_path):
    "Models pad theirs: ids that the tokenizer doesn't know are computed, and are nothing in the text"
    folder = model_folder(tmp_path / "m", byte_tokenizer())
    backend = json.loads((folder / "tokenizer.json").read_text())
    backend["added_tokens"] = backend["added_tokens"][:1]
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with LLM(str(folder), **T0) as llm:
            output, = llm.generate([[259, 258, 65]], GREEDY, use_tqdm=False)
            assert output.outputs[0].finish_reason == "length"
