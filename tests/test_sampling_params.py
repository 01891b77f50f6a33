"What a user may ask of one request: ranges, names, messages"

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.sampling_params import SamplingParams, check_option_names, check_range

finite = st.floats(allow_nan=False, allow_infinity=False)
VALID = {
    "temperature": st.floats(0, 3.4e38) | st.integers(0, 10),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 10**6),
    "min_p": st.floats(0, 1),
    "n": st.integers(1, 16384),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2) | st.integers(-2, 2),
    "repetition_penalty": st.floats(1e-30, 3.4e38),
    "max_tokens": st.integers(1, 10**6),
    "min_tokens": st.integers(0, 10**6),
    "logprobs": st.none() | st.integers(0, 20),
    "stop": st.none() | st.lists(st.text(min_size=1)),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": st.none() | st.lists(st.integers(0, 10**6)),
    "ignore_eos": st.booleans(),
    "seed": st.none() | st.integers(0, 2**63 - 1),
    "skip_special_tokens": st.booleans(),
}
NOT_NUMBERS = st.none() | st.booleans() | st.text() | st.just(math.nan) | st.just([1]) | st.just(1j)
INVALID = {
    "temperature": NOT_NUMBERS
    | st.floats(max_value=0, exclude_max=True)
    | st.just(math.inf)
    | st.floats(3.5e38, 1e300),
    "top_p": NOT_NUMBERS | st.floats(max_value=0) | st.floats(min_value=1, exclude_min=True),
    "top_k": NOT_NUMBERS | st.integers(max_value=-2) | st.integers(min_value=2**63) | finite,
    "min_p": NOT_NUMBERS
    | st.floats(max_value=0, exclude_max=True)
    | st.floats(min_value=1, exclude_min=True),
    "n": NOT_NUMBERS | st.integers(max_value=0) | st.integers(min_value=16385) | finite,
    "presence_penalty": NOT_NUMBERS | st.floats(max_value=-2, exclude_max=True) | st.floats(min_value=2, exclude_min=True),
    "frequency_penalty": NOT_NUMBERS | st.floats(max_value=-2, exclude_max=True) | st.floats(min_value=2, exclude_min=True),
    "repetition_penalty": NOT_NUMBERS | st.floats(max_value=1e-30, exclude_max=True) | st.just(math.inf),
    "max_tokens": NOT_NUMBERS | st.integers(max_value=0) | finite,
    "min_tokens": NOT_NUMBERS | st.integers(max_value=-1) | finite,
    "logprobs": st.text() | st.booleans() | st.integers(max_value=-1) | st.integers(min_value=21) | finite,
    "stop": st.integers() | st.booleans() | st.just("") | st.just(["a", ""]) | st.just([b"a"]) | st.just([5]) | st.just({"a": 1}),
    "include_stop_str_in_output": st.none() | st.integers() | st.text(),
    "stop_token_ids": st.integers()
    | st.text()
    | st.lists(st.integers(max_value=-1), min_size=1)
    | st.just([1.5])
    | st.just({5: 1}),
    "ignore_eos": st.none() | st.integers() | st.text(),
    "seed": st.text()
    | st.booleans()
    | st.integers(max_value=-1)
    | st.integers(min_value=2**63)
    | finite,
    "skip_special_tokens": st.none() | st.integers() | st.text(),
}


@given(st.fixed_dictionaries({}, optional=VALID))
def test_valid_values_are_stored(options):
    if options.get("min_tokens", 0) > options.get("max_tokens", 16):
        options["max_tokens"] = options["min_tokens"]
    if options.get("temperature") == 0:
        options.pop("n", None)
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == (
            [] if name in ("stop", "stop_token_ids") and value is None else value
        )


@pytest.mark.parametrize(
    "options, change, message",
    [
        (dict(max_tokens=4), dict(min_tokens=5), "min_tokens=5: must be at most max_tokens=4"),
        (dict(min_tokens=16), dict(max_tokens=15), "min_tokens=16: must be at most max_tokens=15"),
        (dict(n=2), dict(temperature=0), "n=2: must be 1 where temperature=0"),
        (dict(temperature=0), dict(n=3), "n=3: must be 1 where temperature=0"),
    ],
)
def test_options_that_do_not_go_together(options, change, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options, **change)
    params = SamplingParams(**options)
    before = copy.copy(params)
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=message):
        setattr(params, name, value)
    assert params == before
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(params, **change)


@pytest.mark.parametrize("stop, stored", [(None, []), ("END", ["END"]), (["a", "bc"], ["a", "bc"]), (("a",), ["a"])])
def test_stop_strings(stop, stored):  # F35
    params = SamplingParams(stop=stop)
    assert params.stop == stored and SamplingParams(stop=params.stop).stop is not params.stop


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 5, [5], b"a"])
def test_an_empty_stop_string_is_refused(stop):  # F35
    with pytest.raises(ValueError, match="stop=.*: must be a string or strings, none of them empty"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    "options, extras",
    [({}, False), (dict(temperature=0, top_k=5, stop="a", n=1), False), (dict(logprobs=0), True), (dict(min_tokens=1), True),
     (dict(presence_penalty=-0.1), True), (dict(frequency_penalty=0.1), True), (dict(repetition_penalty=1.1), True)],
)
def test_who_needs_more_than_the_samplers_own_parameters(options, extras):
    assert SamplingParams(**options).has_extras is extras


@pytest.mark.parametrize("name", INVALID)
def test_invalid_values_are_refused(name):
    params = SamplingParams()

    @given(INVALID[name])
    def check(value):
        before = getattr(params, name)
        for action in (
            lambda: SamplingParams(**{name: value}),
            lambda: setattr(params, name, value),
        ):
            with pytest.raises(ValueError, match=f"^{name}=.*: must be "):
                action()
        assert getattr(params, name) == before

    check()


def test_every_option_is_covered():
    assert (
        set(VALID) == set(INVALID) == {field.name for field in dataclasses.fields(SamplingParams)}
    )


def test_defaults_are_vllms():
    assert SamplingParams() == SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        n=1,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        max_tokens=16,
        min_tokens=0,
        stop=[],
        include_stop_str_in_output=False,
        logprobs=None,
        stop_token_ids=[],
        ignore_eos=False,
        seed=None,
        skip_special_tokens=True,
    )


@pytest.mark.parametrize("max_tokens", [0, -1, 1.5, None, "5", True])
def test_max_tokens_below_one(max_tokens):  # F19
    with pytest.raises(
        ValueError, match=f"max_tokens={max_tokens!r}: must be an integer, at least 1"
    ):
        SamplingParams(max_tokens=max_tokens)


def test_message_names_value_range_and_option():  # F29
    with pytest.raises(ValueError, match=r"top_p=1\.5: must be a number, above 0\.0, at most 1\.0"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"temperature=-0\.1: must be a number, at least 0\.0"):
        SamplingParams(temperature=-0.1)


@pytest.mark.parametrize(
    "typo, meant",
    [
        ("tempature", "temperature"),
        ("topp", "top_p"),
        ("max_new_tokens", "max_tokens"),
        ("stop_string", "stop_token_ids"),
        ("repeat_penalty", "repetition_penalty"),
    ],
)
def test_unknown_option_suggests_the_nearest(typo, meant):  # F68
    with pytest.raises(
        TypeError, match=rf"SamplingParams\(\) has no option '{typo}'; did you mean '{meant}'\?"
    ):
        SamplingParams(**{typo: 0})
    with pytest.raises(AttributeError, match=f"no option '{typo}'; did you mean '{meant}'"):
        setattr(SamplingParams(), typo, 0)


@pytest.mark.parametrize("name", ["best_of", "logit_bias", "prompt_logprobs", "output_kind", "x"])
def test_options_that_do_not_exist_are_refused(name):
    with pytest.raises(TypeError, match=f"no option '{name}'"):
        SamplingParams(**{name: 1})


def test_options_are_keywords():
    with pytest.raises(TypeError):
        SamplingParams(0.7)


def test_lists_are_copied():
    mine = [2, 5]
    params = SamplingParams(stop_token_ids=mine)
    mine.append(7)
    assert params.stop_token_ids == [2, 5]


def test_numbers_become_plain():
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=Fraction(1, 2), seed=np.int64(3), top_k=np.int32(4)
    )
    assert [type(x) for x in (params.temperature, params.top_p, params.seed, params.top_k)] == [
        float,
        float,
        int,
        int,
    ]


def test_copies():
    params = SamplingParams(temperature=0.5, stop_token_ids=[1])
    for other in (
        copy.copy(params),
        copy.deepcopy(params),
        pickle.loads(pickle.dumps(params)),
        dataclasses.replace(params),
    ):
        assert other == params
    with pytest.raises(ValueError, match="max_tokens=0"):
        dataclasses.replace(params, max_tokens=0)


@pytest.mark.parametrize(
    "options, greedy",
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"top_k": 1}, True),
        ({"temperature": 1e-6}, False),
        ({"top_k": 2}, False),
    ],
)
def test_greedy(options, greedy):
    assert SamplingParams(**options).greedy is greedy


def test_check_option_names_keeps_the_function():
    class Engine:
        @check_option_names
        def __init__(self, model, *, max_model_len=None):
            "Make one"
            self.max_model_len = max_model_len

    assert (
        Engine("tiny", max_model_len=5).max_model_len == 5
        and Engine(model="tiny").max_model_len is None
    )
    assert Engine.__init__.__doc__ == "Make one"
    with pytest.raises(
        TypeError, match="Engine.*no option 'max_model_length'; did you mean 'max_model_len'"
    ):
        Engine("tiny", max_model_length=128)
    with pytest.raises(TypeError, match="options: model, max_model_len"):
        Engine("tiny", quantisation=4)


@given(st.integers() | st.floats(), st.integers(-5, 5), st.integers(6, 20))
def test_check_range_admits_exactly_the_range(value, low, high):
    def accepted(**options):
        try:
            return check_range("x", value, low, high, **options) == value
        except ValueError:
            return False

    assert accepted(kind=float) == (low <= value <= high)
    assert accepted() == (isinstance(value, int) and low <= value <= high)
    assert accepted(kind=float, above=True) == (low < value <= high)


def test_torch_is_not_imported():
    code = "import sys, minivllm.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
