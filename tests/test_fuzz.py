"""Arguments and files that nobody would write: only the documented exceptions, and the engine answers after each

A tenth of the examples in `make test`, all 2,000 in `make test-all`.
"""
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams

T0 = dict(dtype="float32", device="cpu", block_size=4, num_kv_blocks=24, max_model_len=64, max_num_batched_tokens=32, max_num_seqs=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
REASONS = {"stop", "length", "error"}
BAD_ARGUMENT = (ValueError, TypeError)                          # what a call may raise
BAD_MODEL = (ValueError, FileNotFoundError, MemoryError)        # CheckpointError is a ValueError


def fuzz(share, full=2000):
    "Run a test with its share of the 200 examples, and a slow twin of it with ten times as many"
    def settings_for(n): return settings(max_examples=n, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

    return pytest.mark.parametrize("examples", [settings_for(round(full * share / 10)),
                                                pytest.param(settings_for(round(full * share)), marks=pytest.mark.slow)], ids=["tenth", "all"])


def run(examples, strategies, body):
    "Give a body examples of these strategies"
    examples(given(*strategies)(body))()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **T0) as llm:
        llm.expected = [o.outputs[0].token_ids for o in llm.generate(["ok", "fine"], GREEDY, use_tqdm=False)]
        yield llm


def check_usable(llm):
    "Nothing is left of earlier calls, and the answers are what they were"
    manager = llm.engine.scheduler.block_manager
    assert not llm.engine.requests and not llm.outputs and not llm.given_up and not llm.lock.locked()
    assert manager.num_free_blocks == manager.num_blocks and not llm.engine.scheduler.has_unfinished()
    assert [o.outputs[0].token_ids for o in llm.generate(["ok", "fine"], GREEDY, use_tqdm=False)] == llm.expected


def check_outputs(outputs, num_answers=1):
    for output in outputs:
        assert output.finished and len(output.outputs) == num_answers
        assert all(o.finish_reason in REASONS and isinstance(o.text, str) and o.token_ids for o in output.outputs)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.sampled_from([2**31, 2**63, -2**63, 10**30]), st.floats(), st.text(max_size=4),
    st.binary(max_size=3), st.just([]), st.just({}), st.lists(st.one_of(st.integers(-2, 300), st.text(max_size=2), st.none()), max_size=3),
    st.just(object()), st.just(print), st.complex_numbers(max_magnitude=9),
)
SENSIBLE = {
    "n": st.integers(1, 3), "temperature": st.floats(0, 5), "top_p": st.floats(0.01, 1), "top_k": st.integers(-1, 400), "min_p": st.floats(0, 1),
    "max_tokens": st.integers(1, 70), "min_tokens": st.integers(0, 10), "stop": st.one_of(st.text(max_size=2), st.lists(st.text(max_size=2), max_size=3)),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=4), "seed": st.integers(0, 2**63 - 1), "logprobs": st.integers(0, 25),
    "presence_penalty": st.floats(-2, 2), "frequency_penalty": st.floats(-2, 2), "repetition_penalty": st.floats(0.1, 3),
    "ignore_eos": st.booleans(), "skip_special_tokens": st.booleans(), "include_stop_str_in_output": st.booleans(),
}
# at most one odd value beside sensible ones, else nearly everything would fail at the first look
PARAMS = st.tuples(st.fixed_dictionaries({}, optional=SENSIBLE), st.one_of(st.just({}), st.dictionaries(
    st.one_of(st.sampled_from(sorted(SENSIBLE)), st.text(max_size=9)), ODD, max_size=1))).map(lambda pair: {**pair[0], **pair[1]})


@fuzz(0.35)
def test_sampling_params(llm, examples):  # fails without `check_range` of any option, or the checks of `check_params`
    accepted = []

    def body(options, prompt):
        if type(options.get("n")) is int: options["n"] = min(options["n"], 4)  # thousands of answers are no mistake, but take their time
        try:
            params = SamplingParams(**options)
            check_outputs(llm.generate([prompt, "ok"], [params, GREEDY], use_tqdm=False)[:1], params.n)
            for output in llm.stream(prompt, params): assert len(output.outputs) == params.n
            accepted.append(1)
        except BAD_ARGUMENT as error: assert str(error)
        check_usable(llm)

    run(examples, (PARAMS, st.text(min_size=1, max_size=8)), body)
    assert len(accepted) > 10


PROMPT = st.recursive(
    st.one_of(ODD, st.text(max_size=70), st.lists(st.integers(0, 259), max_size=70), st.text(st.characters(), max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "text"]), inner, max_size=2),
                            st.tuples(inner)), max_leaves=4)


@fuzz(0.35)
def test_prompts_priorities_and_conversations(llm, examples):  # fails without the `surrogates` check in `encode`, or `is_conversation`
    def body(prompt, params, priority, message):
        for call in (lambda: llm.generate(prompt, params, use_tqdm=False, priority=priority),
                     lambda: list(llm.stream(prompt, GREEDY))[-1:],
                     lambda: llm.chat(message, GREEDY, use_tqdm=False)):
            try: check_outputs(call())
            except BAD_ARGUMENT as error: assert str(error)
        check_usable(llm)

    message = st.one_of(PROMPT, st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), st.one_of(ODD, st.text(max_size=5)), max_size=3), max_size=3))
    params = st.one_of(st.just(GREEDY), st.none(), ODD)
    run(examples, (PROMPT, params, st.one_of(st.none(), st.integers(-5, 5), ODD), message), body)


def mostly(*values, seldom=()): return st.sampled_from([v for v in values for _ in range(12 // len(values))] + list(seldom))


OPTIONS = {
    "tokenizer": mostly(None, seldom=["/nowhere"]), "skip_tokenizer_init": st.booleans(), "dtype": mostly("auto", "float32", "bfloat16", seldom=["x"]),
    "device": mostly("cpu", seldom=["cpu:3", "cuda:99"]), "seed": st.integers(0, 9), "tensor_parallel_size": mostly(1, seldom=[3]),
    "max_model_len": st.integers(1, 262), "max_num_seqs": st.integers(1, 9), "max_num_batched_tokens": st.integers(1, 50),
    "block_size": mostly(1, 2, 4, 16, seldom=[3, 64]), "num_kv_blocks": mostly(1, 2, 7, 30, seldom=[10**12]), "gpu_memory_utilization": st.floats(0.01, 1),
    "enable_prefix_caching": st.booleans(), "enforce_eager": st.booleans(), "async_scheduling": st.booleans(),
    "scheduling_policy": mostly("mixed", "prefill_first", seldom=["x"]), "attention_backend": mostly("auto", "torch", seldom=["flash_attn", "x"]),
    "load_format": mostly("auto", "dummy", seldom=["x"]),
}


@fuzz(0.15)
def test_options_of_the_engine(folder, examples):  # fails without `check_choice` or `check_range` of any field of `EngineConfig`
    built = []

    def body(options, odd):
        odd = {name: value for name, value in odd.items() if name != "tensor_parallel_size"}  # no hundreds of processes
        options = {**{k: T0[k] for k in ("device", "num_kv_blocks")}, **options, **odd}
        try: llm = LLM(str(folder), **options)
        except BAD_MODEL + (TypeError,) as error:
            assert str(error)
            return
        with llm:
            built.append(1)
            try: check_outputs(llm.generate([[1, 2], [3, 4, 5], [1, 2, 3, 4, 5, 6]], GREEDY, use_tqdm=False))
            except ValueError as error: assert "prompt" in str(error)  # too long for this engine

    run(examples, (st.fixed_dictionaries({}, optional=OPTIONS), st.one_of(st.just({}), st.dictionaries(
        st.one_of(st.sampled_from(sorted(OPTIONS)), st.text(max_size=9)), ODD, max_size=1))), body)
    assert len(built) > 5


@st.composite
def damages(draw):
    "A function that damages a file's bytes"
    kind = draw(st.sampled_from(["cut", "overwrite", "insert", "remove", "json"]))
    place, junk = draw(st.floats(0, 1)) ** draw(st.sampled_from([1, 6])), draw(st.binary(min_size=1, max_size=12))  # mostly near the front
    key, value = draw(st.integers(0, 60)), draw(st.one_of(st.none(), st.integers(-3, 300), st.floats(), st.text(max_size=5), st.just([]), st.just({}),
                                                          st.just([1.5, None]), st.sampled_from(["F16", "I8", [64], [260, 64], [0, 0]])))

    def damage(content: bytes) -> bytes:
        at = int(place * len(content))
        if kind == "json":
            size = int.from_bytes(content[:8], "little")
            is_weights = 0 < size < len(content)
            try: data = json.loads(content[8 : 8 + size] if is_weights else content)
            except ValueError: return content[:at]
            if not isinstance(data, dict) or not data: return junk
            name = sorted(data)[key % len(data)]
            if is_weights and isinstance(data[name], dict): data[name][sorted(data[name])[key % len(data[name])]] = value
            else: data[name] = value
            text = json.dumps(data).encode()
            return len(text).to_bytes(8, "little") + text + content[8 + size :] if is_weights else text
        return {"cut": content[:at], "overwrite": content[:at] + junk + content[at + len(junk) :], "insert": content[:at] + junk + content[at:],
                "remove": content[:at] + content[at + len(junk) :]}[kind]

    return damage


@fuzz(0.15)
def test_files_of_a_model(folder, llm, examples):  # fails without any of the `except` clauses of the loader and of `load_model_config`
    files = ["config.json", "model.safetensors", "model.safetensors", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
    (folder / "generation_config.json").write_text('{"eos_token_id": [256], "transformers_version": "5.0"}')
    loaded = []

    def body(file, damage, remove):
        with tempfile.TemporaryDirectory() as place:
            copy = Path(shutil.copytree(folder, Path(place) / "model"))
            content = (copy / file).read_bytes()
            if remove: (copy / file).unlink()
            else: (copy / file).write_bytes(damage(content))
            try:
                with LLM(str(copy), **T0) as damaged:
                    loaded.append(1)
                    check_broken(damaged)
            except BAD_MODEL as error: assert str(error)
        check_usable(llm)

    def check_broken(damaged):
        "It has loaded, so it answers, if only with an error"
        for output in damaged.generate([[1, 2, 3], [4]], GREEDY, use_tqdm=False):
            assert output.finished and output.outputs[0].finish_reason in REASONS
            assert (output.outputs[0].finish_reason == "error") == isinstance(output.outputs[0].stop_reason, str)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(examples, (st.sampled_from(files), damages(), st.sampled_from([False] * 9 + [True])), body)
    assert loaded
