"The engine: what comes in is checked, what goes wrong stays with whoever caused it, and every request ends once"
import random
import signal
import threading
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from byte_tokenizer import BOS, CHAT_TEMPLATE, EOS, EOT, byte_tokenizer, model_folder
from rigs import tiny_model

from minivllm import LLMEngine, SamplingParams
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.llm_engine import Request, chat_end_token_ids
from minivllm.engine.model_runner import ModelRunner
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.outputs import Detokenizer

T0 = dict(dtype="float32", block_size=4, num_kv_blocks=16, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture
def engine(folder):
    engine = LLMEngine(str(folder), **T0)
    yield engine
    engine.exit()


class ListedRunner:
    "Gives every request the next of the listed tokens; -1 is a row that can't be sampled"

    def __init__(self, *token_ids):
        self.token_ids, self.computed = token_ids, []

    def run(self, seqs, num_tokens):
        self.computed.append(dict(zip((seq.seq_id for seq in seqs), num_tokens)))
        outputs = [min(seq.num_tokens - seq.num_prompt_tokens, len(self.token_ids) - 1) for seq in seqs]
        return [self.token_ids[i] if seq.num_computed_tokens + n == seq.num_tokens else -1
                for seq, n, i in zip(seqs, num_tokens, outputs)]

    def launch(self, seqs, num_tokens, previous=None):
        return SimpleNamespace(wait=lambda token_ids=self.run(seqs, num_tokens): token_ids, rows={}, logprobs=dict)

    def exit(self): pass


@pytest.fixture(autouse=True, params=["in step", "one ahead", "one ahead, recorded"])
def steps_ahead(request, monkeypatch):
    "Every test with the engine waiting for each step, with it running one ahead, and with decode steps as graphs"
    num_ahead = int("ahead" in request.param)
    ahead = property(lambda engine: num_ahead, lambda engine, value: None)
    monkeypatch.setattr(LLMEngine, "steps_ahead", ahead, raising=False)
    if "recorded" in request.param:
        monkeypatch.setattr(ModelRunner, "uses_graphs", lambda runner: True)
    return num_ahead


def listed(folder, *token_ids, **options):
    "An engine whose model says what it is told to"
    engine = LLMEngine(str(folder), **{**T0, **options})
    engine.runner.exit()
    engine.runner = ListedRunner(*token_ids)
    return engine


def drain(engine, limit=1000) -> dict:
    "Steps until nobody is left: the final output of every request, and that there was just one"
    final = {}
    for _ in range(limit):
        if not engine.has_unfinished_requests(): break
        for output in engine.step():
            if output.finished: assert final.setdefault(output.request_id, output) is output
    assert not engine.has_unfinished_requests(), "does not end"
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks and not engine.scheduler.has_unfinished()
    return final


def one(engine, prompt=(1, 2, 3), **params):
    "The answer to one request"
    engine.add_request("only", list(prompt), SamplingParams(**{"temperature": 0.0, **params}))
    return drain(engine)["only"].outputs[0]


# Which tokens end an answer


def test_any_end_token_that_a_file_names(tmp_path):  # F33
    folder = model_folder(tmp_path / "m", generation_config={"eos_token_id": [256, 257]}, eos_token_id=257)
    engine = listed(folder, 65, 66, EOT, 67)
    assert engine.stop_token_ids == {EOS, EOT}
    answer = one(engine)
    # the token that ended it stays in the ids, and out of the text
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason, answer.text) == ([65, 66, EOT], "stop", None, "AB")


@pytest.mark.parametrize("generation, config, eos, expected", [
    (None, None, "<eos>", {EOS}),
    (None, EOT, "<eos>", {EOS, EOT}),
    (None, [EOT, BOS], None, {EOT, BOS}),
    ({}, EOT, None, {EOT}),
    ({"eos_token_id": EOT}, None, None, {EOT}),
    ({"eos_token_id": [EOT, BOS]}, None, "<eos>", {EOS, EOT, BOS}),
    ({"eos_token_id": None}, None, None, set()),
])
def test_each_source_alone(tmp_path, generation, config, eos, expected):  # F33
    tokenizer = byte_tokenizer(eos_token=eos)
    engine = listed(model_folder(tmp_path / "m", tokenizer, generation, eos_token_id=config), 65, EOS, EOT, BOS, 66)
    assert engine.stop_token_ids == expected
    answer = one(engine, max_tokens=5)
    ends = [n for n, token_id in enumerate((65, EOS, EOT, BOS, 66)) if token_id in expected]
    assert len(answer.token_ids) == (ends[0] + 1 if ends else 5)
    assert answer.finish_reason == ("stop" if ends else "length")


def test_the_chat_template_names_one_too(tmp_path):
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    assert tokenizer.eos_token_id == EOS and EOT not in tokenizer.all_special_ids  # only its file says that it is special
    engine = listed(model_folder(tmp_path / "m", tokenizer), 72, 105, EOT)
    assert engine.stop_token_ids == {EOS, EOT}
    answer = one(engine)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hi", [72, 105, EOT], "stop")


@pytest.mark.parametrize("template", [
    None,
    "{{ raise_exception('not in this house') }}",
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",  # ends turns with a newline, which is no end of an answer
    "{% for m in messages %}{{ m['role'] }}{% endfor %}",  # without the answer
    "{% for m in messages if m['role'] == 'user' %}<bos>{{ m['content'] }}{% endfor %}",  # no answer in it
    "{% for m in messages %}<bos>{{ m['content'] | upper }}<eot>{% endfor %}",
])
def test_templates_that_name_none(template):
    assert chat_end_token_ids(byte_tokenizer(chat_template=template)) == []


def test_the_rule_for_ids_and_text_is_one_for_all_ends(folder):  # F38
    "token_ids hold every sampled token; the text leaves out what is special"
    answer = one(listed(folder, 72, 105, EOS))
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("Hi", [72, 105, EOS], None)
    answer = one(listed(folder, 72, 105, EOS), skip_special_tokens=False)
    assert (answer.text, answer.token_ids) == ("Hi<eos>", [72, 105, EOS])
    answer = one(listed(folder, 72, 105, EOT), stop_token_ids=[EOT])
    assert (answer.text, answer.token_ids, answer.stop_reason, answer.finish_reason) == ("Hi", [72, 105, EOT], EOT, "stop")
    answer = one(listed(folder, 72, 105, 33, 34), stop_token_ids=[33])
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("Hi!", [72, 105, 33], 33)
    answer = one(listed(folder, 72, EOS, 105), ignore_eos=True, max_tokens=3)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hi", [72, EOS, 105], "length")
    answer = one(listed(folder, 72, EOS, EOT, 105), ignore_eos=True, stop_token_ids=[EOT])
    assert (answer.token_ids, answer.finish_reason) == ([72, EOS, EOT], "stop")
    # whoever wants the end alone gets the same text
    for skip, text in ((True, "Hi"), (False, "Hi<eos>")):
        engine = listed(folder, 72, 105, EOS)
        engine.add_request("final", "x", SamplingParams(skip_special_tokens=skip), final_only=True)
        assert drain(engine)["final"].outputs[0].text == text


# What comes in


BAD_PROMPTS = {
    "": "empty", (): "empty", (0, 260): "260", (-1,): "-1", (3.0,): "3.0", (True,): "True", (1, "a"): "'a'", (None,): "None",
}


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_a_bad_prompt_harms_nobody(engine, prompt):  # F66, F69
    engine.add_request("good", [1, 2, 3], GREEDY)
    engine.step()
    before = engine.stats.num_steps
    with pytest.raises(ValueError, match=BAD_PROMPTS[prompt]):
        engine.add_request("bad", prompt if isinstance(prompt, str) else list(prompt), GREEDY)
    assert set(engine.requests) == {"good"} and engine.stats.num_steps == before
    assert len(drain(engine)["good"].outputs[0].token_ids) == 4
    assert len(one(engine, max_tokens=2).token_ids) == 2


@pytest.mark.parametrize("prompt", [None, 5, {}, {"prompt": None}, {"promt": "a"}, {"prompt": 5}, {"prompt_token_ids": "abc"},
                                    {"prompt": "a", "images": []}, np.array([1, 2]), {1, 2}, b"a"])
def test_what_is_no_prompt_is_a_type_error(engine, prompt):
    with pytest.raises(TypeError, match="a prompt is a string"): engine.add_request("bad", prompt, GREEDY)
    assert not engine.requests


def test_forms_of_a_prompt(engine):
    for prompt, text in [("Hi", "Hi"), ([72, 105], None), ((72, 105), None), ({"prompt": "Hi"}, "Hi"),
                         ({"prompt_token_ids": [72, 105]}, None), ({"prompt": "x", "prompt_token_ids": [72, 105]}, "x"),
                         (list(np.array([72, 105])), None)]:
        assert engine.encode(prompt) == (text, [72, 105])
        assert all(type(token_id) is int for token_id in engine.encode(prompt)[1])


def test_text_that_is_none(engine):
    "A lone half of a surrogate pair can't be encoded: an error of this request alone"
    with pytest.raises(ValueError, match="surrogates"): engine.add_request("bad", "a\ud800", GREEDY)
    assert not engine.requests and len(one(engine, max_tokens=2).token_ids) == 2


def test_an_empty_text_may_be_one_token(tmp_path):  # F66
    engine = listed(model_folder(tmp_path / "m", byte_tokenizer(add_bos=True)), 65, EOS)
    engine.add_request("empty", "", GREEDY)
    output = drain(engine)["empty"]
    assert output.prompt_token_ids == [BOS] and output.outputs[0].text == "A"


@pytest.mark.parametrize("budget", [64, 4])
@pytest.mark.parametrize("cached", [False, True])
def test_prompts_up_to_the_last_position(folder, budget, cached):  # F17
    engine = LLMEngine(str(folder), **{**T0, "max_model_len": 16, "max_num_batched_tokens": budget})
    prompt = list(range(30, 46))
    if cached: one(engine, prompt[:13], max_tokens=1)
    with pytest.raises(ValueError, match="16 tokens.*max_model_len=16"): engine.add_request("bad", prompt, GREEDY)
    for length, num_tokens in ((15, 1), (14, 2), (13, 3)):
        answer = one(engine, prompt[:length], max_tokens=5)
        assert len(answer.token_ids) == num_tokens and answer.finish_reason == "length"


def test_prompts_that_can_never_fit_the_pool(folder):
    engine = LLMEngine(str(folder), **{**T0, "num_kv_blocks": 8})
    with pytest.raises(ValueError, match="40 tokens need 10 KV blocks.*has 8"): engine.add_request("bad", [1] * 40, GREEDY)
    assert engine.stats.num_steps == 0
    answer = one(engine, [1] * 30, max_tokens=10)
    # 32 slots; the 33rd token is sampled, and needs none
    assert len(answer.token_ids) == 3 and answer.finish_reason == "length"


def test_parameters_are_checked_and_copied(engine):
    for bad in (dict(temperature=0), "greedy", 0):
        with pytest.raises(TypeError, match="sampling_params"): engine.add_request("bad", [1], bad)
    with pytest.raises(ValueError, match="stop_token_ids=260"):
        engine.add_request("bad", [1], SamplingParams(stop_token_ids=[260]))
    assert not engine.requests
    params = SamplingParams(temperature=0.0, max_tokens=4)
    engine.add_request("a", [1, 2, 3], params)
    params.temperature = 100.0
    engine.add_request("b", [1, 2, 3], GREEDY)
    final = drain(engine)
    assert final["a"].outputs[0].token_ids == final["b"].outputs[0].token_ids


def test_request_ids_are_unique_while_they_run(engine):
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(ValueError, match="'a' is in use"): engine.add_request("a", [2], GREEDY)
    drain(engine)
    engine.add_request("a", [1], GREEDY)
    assert "a" in drain(engine)


def test_no_tokenizer_no_text():
    folder, _ = tiny_model("llama")
    engine = LLMEngine(str(folder), skip_tokenizer_init=True, **T0)
    with pytest.raises(ValueError, match="skip_tokenizer_init"): engine.add_request("bad", "Hi", GREEDY)
    answer = one(engine, max_tokens=4)
    assert answer.text == "" and len(answer.token_ids) == 4


def test_a_folder_without_a_tokenizer():
    folder, _ = tiny_model("llama")
    with pytest.raises(ValueError, match="has no tokenizer.*skip_tokenizer_init=True"): LLMEngine(str(folder), **T0)


def test_a_tokenizer_larger_than_the_vocabulary_is_a_warning(tmp_path, folder):  # F69
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    larger = model_folder(tmp_path / "m", tokenizer)
    with pytest.warns(UserWarning, match="tokenizer has 261 tokens, the model 260"): engine = LLMEngine(str(larger), **T0)
    with pytest.raises(ValueError, match="260"): engine.add_request("bad", "a<one more>", GREEDY)
    assert len(one(engine, max_tokens=2).token_ids) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLMEngine(str(folder), **T0).exit()


def test_options(folder):  # F68
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"): LLMEngine(str(folder), max_model_length=128)
    with pytest.raises(ValueError, match="max_num_seqs=0"): LLMEngine(str(folder), max_num_seqs=0)
    with pytest.raises(ValueError, match="max_model_len=300.*256"): LLMEngine(str(folder), max_model_len=300)
    with pytest.raises(FileNotFoundError, match="no config.json"): LLMEngine(str(folder.parent))


# Steps


def test_outputs_of_a_stream_and_of_the_end_alone(folder):
    engine = listed(folder, *b"Hello", EOS)
    engine.add_request("stream", "a", SamplingParams())
    engine.add_request("final", "bc", SamplingParams(), final_only=True)
    seen = {"stream": [], "final": []}
    while engine.has_unfinished_requests():
        for output in engine.step(): seen[output.request_id].append(output)
    assert [o.outputs[0].text for o in seen["stream"]] == ["H", "He", "Hel", "Hell", "Hello", "Hello"]
    assert [o.finished for o in seen["stream"]] == [False] * 5 + [True]
    assert [o.outputs[0].finish_reason for o in seen["stream"]] == [None] * 5 + ["stop"]
    assert [len(o.outputs[0].token_ids) for o in seen["stream"]] == [1, 2, 3, 4, 5, 6]
    assert [o.outputs[0].text for o in seen["final"]] == ["Hello"]
    assert seen["stream"][0].prompt == "a" and seen["final"][0].prompt_token_ids == list(b"bc")
    # an output is a snapshot: what comes later doesn't change it
    assert [o.metrics.num_output_tokens for o in seen["stream"]] == [1, 2, 3, 4, 5, 6]
    assert seen["stream"][0].metrics.finished_time is None and seen["stream"][-1].metrics.finished_time is not None


def test_an_unfinished_character_comes_with_the_end(folder):
    engine = listed(folder, 97, 240, 159, 140)
    engine.add_request("a", "x", SamplingParams(max_tokens=3))
    texts = []
    while engine.has_unfinished_requests(): texts += [o.outputs[0].text for o in engine.step()]
    assert texts == ["a", "a", "a\ufffd"]


def test_a_row_that_cannot_be_sampled_ends_its_own_request(folder):  # F39
    engine = listed(folder, 65, 66, 67)
    run = engine.runner.launch

    def spoil(seqs, *args):
        bad = [seq.seq_id == 1 and seq.num_tokens - seq.num_prompt_tokens == 1 for seq in seqs]
        token_ids = [-1 if b else t for b, t in zip(bad, run(seqs, *args).wait())]
        return SimpleNamespace(wait=lambda: token_ids, rows={}, logprobs=dict)

    engine.runner.launch = spoil
    for name in "abc": engine.add_request(name, name, SamplingParams(max_tokens=3))
    final = drain(engine)
    assert final["b"].outputs[0].finish_reason == "error" and final["b"].outputs[0].token_ids == [65]
    assert [final[name].outputs[0].token_ids for name in "ac"] == [[65, 66, 67]] * 2
    assert engine.stats.num_output_tokens == 7 and final["b"].metrics.num_output_tokens == 1


def test_a_first_row_that_cannot_be_sampled_has_no_first_token(folder):
    engine = listed(folder, -1)
    engine.add_request("a", "x", SamplingParams())
    output = drain(engine)["a"]
    assert output.outputs[0].finish_reason == "error" and output.metrics.time_to_first_token is None
    assert output.metrics.latency > 0


def test_stats_count_computed_tokens(folder):
    engine = LLMEngine(str(folder), **{**T0, "max_num_batched_tokens": 8})
    engine.add_request("a", list(range(20)), SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    drain(engine)
    assert (engine.stats.num_prompt_tokens, engine.stats.num_output_tokens, engine.stats.num_steps) == (20, 5, 3 + 4)
    engine.add_request("b", list(range(20)), SamplingParams(temperature=0.0, max_tokens=1))
    assert drain(engine)["b"].num_cached_tokens == 16
    assert engine.stats.num_prompt_tokens == 24


def test_times_are_in_order(folder, steps_ahead):
    engine = listed(folder, 65, 66, 67, max_num_seqs=1)
    for name in "ab": engine.add_request(name, name, SamplingParams(max_tokens=3))
    final = drain(engine)
    for m in (output.metrics for output in final.values()):
        assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time < m.last_token_time <= m.finished_time
    # one at a time: the second waits until nothing of the first is left to compute
    first, second = final["a"].metrics, final["b"].metrics
    assert second.first_scheduled_time >= (first.first_token_time if steps_ahead else first.finished_time)
    assert second.first_token_time > first.finished_time


def test_a_step_without_work_does_nothing(engine):
    assert engine.step() == [] and engine.stats.num_steps == 0


# What goes wrong


PROMPTS = [list(range(10, 10 + n)) for n in (3, 9, 14, 6)]


def solo(folder, max_tokens=8, **options):
    "What each of the prompts gives alone"
    engine = LLMEngine(str(folder), **{**T0, **options})
    return [one(engine, prompt, max_tokens=max_tokens, ignore_eos=True).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 5}, {"num_kv_blocks": 9},
                                     {"scheduling_policy": "prefill_first"}, {"enable_prefix_caching": False}])
def test_a_failing_step_can_be_repeated(folder, where, error, options):
    "Whatever a step had done when it failed, its repetition gives the same tokens, and every token once"
    expected = solo(folder)
    engine = LLMEngine(str(folder), **{**T0, **options})
    run, calls = engine.runner.launch, 0

    def failing(*args):
        nonlocal calls
        calls += 1
        if calls % 2: # every other call fails: every step of the run once
            if where == "after": run(*args)  # K/V was written, the tokens are lost
            raise error("in the step")
        return run(*args)

    engine.runner.launch = failing
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS): engine.add_request(str(i), prompt, params)
    final, failures = {}, 0
    while engine.has_unfinished_requests():
        try: final.update({o.request_id: o for o in engine.step() if o.finished})
        except error: failures += 1
    assert failures == calls // 2 + calls % 2 and failures > 5
    assert [final[str(i)].outputs[0].token_ids for i in range(len(PROMPTS))] == expected
    assert engine.stats.num_output_tokens == 8 * len(PROMPTS) and engine.stats.num_steps == failures
    if "num_kv_blocks" in options: assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.block_manager.num_free_blocks == engine.scheduler.block_manager.num_blocks


def test_after_a_failing_step_its_requests_can_be_given_up(folder):
    expected = solo(folder)
    engine = LLMEngine(str(folder), **T0)
    run = engine.runner.launch
    for i, prompt in enumerate(PROMPTS[:2]): engine.add_request(str(i), prompt, GREEDY)
    engine.runner.launch = lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError): engine.step()
    engine.runner.launch = run
    for i in range(2): assert engine.abort_request(str(i)).outputs[0].finish_reason == "abort"
    assert drain(engine) == {}
    answers = [one(engine, prompt, max_tokens=8, ignore_eos=True).token_ids for prompt in PROMPTS]
    assert answers == expected


PLACES = {
    "schedule": (Scheduler, "schedule"), "admit": (BlockManager, "allocate_with_cache"), "take": (BlockManager, "append"),
    "count": (BlockManager, "cache_full_blocks"), "append": (Sequence, "set_unknown_token"), "end": (BlockManager, "deallocate"),
    "finish": (Sequence, "finish"), "text": (Detokenizer, "update"), "output": (Request, "output"), "add": (Scheduler, "add"),
    "abort": (Scheduler, "abort"), "advance": (Scheduler, "advance"), "resolve": (Scheduler, "resolve"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", [1, 2, 6])
def test_ctrl_c_does_not_tear_the_bookkeeping(folder, monkeypatch, place, call):
    "The signal comes in the middle of it, and is answered when it is whole; no output is lost"
    expected, calls = solo(folder), 0
    cls, name = PLACES[place]
    function = getattr(cls, name)

    def interrupted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call: signal.raise_signal(signal.SIGINT)
        result = function(*args, **kwargs)
        if calls == call + 1: signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(cls, name, interrupted)
    engine = LLMEngine(str(folder), **{**T0, "num_kv_blocks": 9})
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    final, interrupts = {}, 0
    for i in range(12):
        prompt = PROMPTS[i % 4]
        try: engine.add_request(str(i), prompt, params)
        except KeyboardInterrupt: interrupts += 1
        try:
            if i >= 4: assert engine.abort_request(str(i)).finished
        except KeyboardInterrupt: interrupts += 1
    while engine.has_unfinished_requests():
        try: final.update({o.request_id: o for o in engine.step() if o.finished})
        except KeyboardInterrupt: interrupts += 1
    assert calls >= call and interrupts in (1, 2)  # two signals during one piece of bookkeeping are one interrupt
    assert [final[str(i)].outputs[0].token_ids for i in range(4)] == expected and len(final) == 4
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks and not engine.scheduler.has_unfinished()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_have_no_signals(folder):
    "Only the main thread may set a handler: elsewhere the shield has nothing to do"
    expected, answers = solo(folder), []

    def work():
        engine = LLMEngine(str(folder), **T0)
        answers.extend(one(engine, prompt, max_tokens=8, ignore_eos=True).token_ids for prompt in PROMPTS)
        engine.exit()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert answers == expected


def test_abort_at_every_moment(folder):
    "Waiting, in the middle of a prompt, decoding, preempted: the others' tokens don't change, no block is lost"
    expected = solo(folder, max_tokens=12)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for victim in range(4):
        for moment in range(0, 24, 2):
            engine = LLMEngine(str(folder), **{**T0, "num_kv_blocks": 10, "max_num_seqs": 3, "max_num_batched_tokens": 6})
            for i, prompt in enumerate(PROMPTS): engine.add_request(str(i), prompt, params)
            final = {}
            for _ in range(moment): final.update({o.request_id: o for o in engine.step() if o.finished})
            output = engine.abort_request(str(victim))
            assert (output is None) == (str(victim) in final)
            assert engine.abort_request(str(victim)) is None
            if output:
                assert output.finished and output.outputs[0].finish_reason == "abort"
                assert output.outputs[0].token_ids == expected[victim][: len(output.outputs[0].token_ids)]
            rest = drain(engine)
            assert str(victim) not in rest
            final.update(rest)
            for i, token_ids in enumerate(expected):
                if i != victim: assert final[str(i)].outputs[0].token_ids == token_ids
            engine.exit()


def test_exit_twice(folder):
    engine = LLMEngine(str(folder), **T0)
    model = weakref.ref(engine.runner.model)
    runner_exit, calls = engine.runner.exit, []
    engine.runner.exit = lambda: (calls.append(1), runner_exit())
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    engine.exit()
    engine.exit()
    assert len(calls) == 1
    assert not engine.has_unfinished_requests() and model() is None
    for call in (lambda: engine.add_request("b", [1], GREEDY), engine.step):
        with pytest.raises(RuntimeError, match="closed"): call()
    assert engine.abort_request("a") is None


def test_the_pool_is_as_large_as_the_runner_says(folder, monkeypatch):
    "The scheduler comes after the runner: only that one knows how many blocks fit"
    monkeypatch.setattr(ModelRunner, "choose_num_kv_blocks", lambda self: 7, raising=False)
    monkeypatch.setattr(ModelRunner, "num_blocks_that_fit", lambda self: 7, raising=False)
    engine = LLMEngine(str(folder), **{**T0, "num_kv_blocks": None})
    assert engine.scheduler.block_manager.num_blocks == engine.runner.num_kv_blocks == 7


# Chance


SAMPLED = dict(temperature=0.8, max_tokens=16, ignore_eos=True)
R1 = list(range(10, 16))


def sample(folder, requests, **options):
    "The tokens of several requests that run together"
    engine = LLMEngine(str(folder), **{**T0, **options})
    for i, (prompt, params) in enumerate(requests): engine.add_request(str(i), prompt, SamplingParams(**{**SAMPLED, **params}))
    final = drain(engine)
    return [final[str(i)].outputs[0].token_ids for i in range(len(requests))], engine


def test_a_seeded_request_depends_on_nobody(folder):  # F32
    mine, others = (R1, dict(seed=42)), [(list(range(n, n + 5)), {}) for n in (50, 80, 110)]
    (alone,), _ = sample(folder, [mine])
    assert len(alone) == 16
    assert sample(folder, [mine, others[0]])[0][0] == alone
    assert sample(folder, [mine, (others[0][0], dict(seed=42))])[0][0] == alone
    assert sample(folder, [mine, *others])[0][0] == alone
    assert sample(folder, [*others, mine])[0][3] == alone
    assert sample(folder, [mine], max_num_batched_tokens=4)[0][0] == alone
    assert sample(folder, [*others, mine], max_num_batched_tokens=4)[0][3] == alone
    tokens, engine = sample(folder, [*others, mine], num_kv_blocks=9)
    assert tokens[3] == alone and engine.scheduler.num_preemptions > 0
    tokens, _ = sample(folder, [mine, mine])
    assert tokens == [alone, alone]
    # a prefix that is found, not computed
    assert sample(folder, [(R1, dict(max_tokens=1)), mine], max_num_seqs=1)[0][1] == alone


def test_seeds_differ(folder):  # F32
    tokens = {seed: tuple(sample(folder, [(R1, dict(seed=seed))])[0][0]) for seed in (42, 43, 0)}
    assert len(set(tokens.values())) == 3
    # 0 is a seed: it gives the same tokens in engines whose own seeds differ
    assert all(tuple(sample(folder, [(R1, dict(seed=0))], seed=s)[0][0]) == tokens[0] for s in (0, 1))


def test_unseeded_requests_draw_from_the_engine(folder):
    requests = [(R1, {}), (R1, {}), (R1, {})]
    first, again, other = (sample(folder, requests, seed=seed)[0] for seed in (7, 7, 8))
    assert first == again != other
    assert len(set(map(tuple, first))) == 3, "requests of one engine are independent of each other"


def test_a_refused_request_draws_no_seed(folder):
    expected, _ = sample(folder, [(R1, {})])
    engine = LLMEngine(str(folder), **T0)
    for bad in ([], [260], [1] * 64):
        with pytest.raises(ValueError): engine.add_request("bad", bad, SamplingParams())
    engine.add_request("0", R1, SamplingParams(**SAMPLED))
    assert drain(engine)["0"].outputs[0].token_ids == expected[0]


# All of it together


def test_random_traffic(folder):
    "Requests come, are refused, aborted, streamed and fail at random; each good one gets its own tokens, once"
    rng = random.Random(0)
    solo_engine = LLMEngine(str(folder), **{**T0, "num_kv_blocks": 32})
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 24))] for _ in range(12)]
    expected = [one(solo_engine, p, max_tokens=10, ignore_eos=True).token_ids for p in prompts]
    engine = LLMEngine(str(folder), **{**T0, "num_kv_blocks": 14, "max_num_batched_tokens": 16})
    run = engine.runner.launch

    def sometimes(*args):
        if rng.random() < 0.2: raise RuntimeError("now and then")
        return run(*args)

    engine.runner.launch = sometimes
    final, aborted, wanted = {}, set(), {}
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for n in range(400):
        if rng.random() < 0.3 and n < 300:
            i = rng.randrange(len(prompts))
            wanted[str(n)] = i
            engine.add_request(str(n), prompts[i], params, final_only=rng.random() < 0.5)
        if rng.random() < 0.1:
            with pytest.raises(ValueError): engine.add_request("bad", [1, 300], params)
        if rng.random() < 0.05 and engine.requests:
            name = rng.choice(list(engine.requests))
            aborted.add(name)
            assert engine.abort_request(name).finished
        try:
            for output in engine.step():
                if output.finished: assert final.setdefault(output.request_id, output) is output
        except RuntimeError: pass
    engine.runner.launch = run
    final.update(drain(engine))
    assert final.keys() | aborted == wanted.keys() and not final.keys() & aborted
    for name, output in final.items(): assert output.outputs[0].token_ids == expected[wanted[name]]
    assert len(final) > 50 and len(aborted) > 5 and engine.scheduler.num_preemptions > 0


def test_an_abort_while_the_model_runs_harms_nobody(folder, monkeypatch):  # F72
    engine = LLMEngine(str(folder), **T0)
    expected = one(engine, PROMPTS[0], max_tokens=6, ignore_eos=True).token_ids
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for request_id, prompt in (("stays", PROMPTS[0]), ("goes", PROMPTS[1])): engine.add_request(request_id, prompt, params)
    run, aborted = engine.runner.launch, []

    def run_and_abort(*args):
        token_ids = run(*args)
        if not aborted: aborted.append(engine.abort_request("goes"))
        return token_ids

    monkeypatch.setattr(engine.runner, "launch", run_and_abort)
    outputs = drain(engine)
    assert aborted[0].outputs[0].finish_reason == "abort" and set(outputs) == {"stays"}
    assert outputs["stays"].outputs[0].token_ids == expected
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks


# A step in flight


def test_a_step_that_nobody_waits_for_any_more_keeps_nobody(folder, steps_ahead):
    "A stop token is noticed when the next step is on its way: that one is discarded"
    engine = listed(folder, 65, 66, EOS, 67, 68)
    assert one(engine).token_ids == [65, 66, EOS]
    assert len(engine.in_flight) == steps_ahead and not engine.has_unfinished_requests()
    assert engine.step() == [] and not engine.in_flight
    assert engine.stats.num_output_tokens == 3 and engine.stats.num_prompt_tokens == 3
    assert one(engine).token_ids == [65, 66, EOS]
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))  # the last step is still in flight
    assert drain(engine)["a"].outputs[0].token_ids == [65, 66]
    assert engine.stats.num_output_tokens == 8 and engine.stats.num_prompt_tokens == 8


def test_with_nothing_to_launch_a_step_takes_what_is_in_flight(folder, steps_ahead):
    engine = listed(folder, 65, 66)
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=2))
    outputs = [[o.outputs[0].token_ids for o in engine.step()] for _ in range(3)]
    assert outputs == ([[], [[65]], [[65, 66]]] if steps_ahead else [[[65]], [[65, 66]], []])
    assert engine.runner.computed == [{0: 2}, {0: 1}]  # an end by length is known in advance


def test_every_token_is_counted_once(folder, monkeypatch):
    "Stats and metrics are those of an engine that waits for each step, in chunks, with prompts that begin alike"
    def served(ahead):
        monkeypatch.setattr(LLMEngine, "steps_ahead", property(lambda engine: ahead, lambda engine, value: None))
        engine = LLMEngine(str(folder), **{**T0, "max_num_batched_tokens": 6, "num_kv_blocks": 24})
        for i, prompt in enumerate(PROMPTS): engine.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=9))
        final = drain(engine)
        final["again"] = (engine.add_request("again", PROMPTS[2], GREEDY), drain(engine)["again"])[1]
        counts = {name: (o.metrics.num_output_tokens, len(o.outputs[0].token_ids), o.num_cached_tokens) for name, o in final.items()}
        return counts, engine.stats.num_prompt_tokens, engine.stats.num_output_tokens

    assert served(1) == served(0)
    assert served(1)[0]["again"] == (4, 4, 12)  # found in the cache


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_wait_can_be_repeated(folder, error):
    "The step is on its way, whoever stops waiting for it: the next call takes its results first"
    expected = solo(folder)
    engine = LLMEngine(str(folder), **T0)
    launch, waits = engine.runner.launch, 0

    def launch_that_is_waited_for_in_vain(*args):
        launched = launch(*args)
        wait = launched.wait

        def interrupted():
            nonlocal waits
            waits += 1
            if waits % 3: raise error("not now")
            return wait()

        launched.wait = interrupted
        return launched

    engine.runner.launch = launch_that_is_waited_for_in_vain
    for i, prompt in enumerate(PROMPTS): engine.add_request(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    final, failures = {}, 0
    while engine.has_unfinished_requests():
        assert len(engine.in_flight) <= 2
        try: final.update({o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished})
        except error: failures += 1
    assert [final[str(i)] for i in range(len(PROMPTS))] == expected and failures > 10
    assert engine.stats.num_output_tokens == 8 * len(PROMPTS)


def test_exit_with_a_step_in_flight(folder, steps_ahead):
    engine = LLMEngine(str(folder), **T0)
    model = weakref.ref(engine.runner.model)
    engine.add_request("a", [1, 2, 3], GREEDY)
    for _ in range(2): engine.step()
    assert len(engine.in_flight) == steps_ahead
    engine.exit()
    assert not engine.in_flight and model() is None and not engine.has_unfinished_requests()


def test_abort_with_a_step_in_flight_and_a_newcomer_at_once(folder, steps_ahead):  # F72
    expected = solo(folder, max_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for moment in range(1, 8):
        engine = LLMEngine(str(folder), **{**T0, "num_kv_blocks": 14})
        for i, prompt in enumerate(PROMPTS[:3]): engine.add_request(str(i), prompt, params)
        for _ in range(moment): engine.step()
        assert len(engine.in_flight) == steps_ahead
        output = engine.abort_request("1")
        # what is in flight comes too late for it
        assert output.outputs[0].token_ids == expected[1][: len(output.outputs[0].token_ids)]
        assert output.metrics.num_output_tokens == len(output.outputs[0].token_ids)
        engine.add_request("3", PROMPTS[3], params)  # into the blocks that came back
        final = drain(engine)
        assert {name: o.outputs[0].token_ids for name, o in final.items()} == {str(i): expected[i] for i in (0, 2, 3)}


def test_changing_the_stop_tokens_later_has_no_effect(folder):
    engine = LLMEngine(str(folder), **T0)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    first = one(engine, PROMPTS[0], max_tokens=20, ignore_eos=True).token_ids
    params.stop_token_ids = [first[2]]
    engine.add_request("0", PROMPTS[0], params)
    params.stop_token_ids.clear()
    answer = drain(engine)["0"].outputs[0]
    assert answer.finish_reason == "stop" and answer.stop_reason == first[2]


def test_steps_give_outputs_without_a_tokenizer_too(folder):
    engine = LLMEngine(str(folder), **{**T0, "skip_tokenizer_init": True})
    engine.add_request("0", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    lengths = []
    while engine.has_unfinished_requests(): lengths += [len(o.outputs[0].token_ids) for o in engine.step()]
    assert lengths == [1, 2, 3, 4]


# what is wrong with one request, or with the model's files, harms nobody else


@pytest.mark.parametrize("eos", [338, -1])
def test_an_end_token_that_the_model_cannot_say_bans_nothing(tmp_path, eos, caplog):
    folder = model_folder(tmp_path / "model", eos_token_id=eos)
    long, prompts = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=3), ([1, 2, 3], [4, 5, 6])

    def answers(params):
        engine = LLMEngine(str(folder), **T0)
        assert all(0 <= token_id < 260 for token_id in engine.stop_token_ids)
        for i, (prompt, p) in enumerate(zip(prompts, params)): engine.add_request(str(i), prompt, p)
        outputs = drain(engine)
        engine.exit()
        return [outputs[str(i)].outputs[0].token_ids for i in range(2)]

    alone = answers([GREEDY, GREEDY])
    assert str(eos) in caplog.text
    assert answers([long, GREEDY])[1] == alone[1]


@pytest.mark.parametrize("name, value", [("stop", None), ("stop", ""), ("stop", 7), ("stop_token_ids", "x"), ("stop_token_ids", -1)])
def test_a_list_that_was_changed_in_place_is_checked(engine, name, value):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    getattr(params, name).append(value)
    with pytest.raises(ValueError, match=name): engine.add_request("bad", [3, 4], params)
    assert not engine.has_unfinished_requests()


def test_a_text_that_cannot_be_made_keeps_nobody_waiting(engine, monkeypatch):
    engine.add_request("good", [1, 2], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    engine.add_request("bad", [3, 4], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=["never"]))

    def broken(self, token_ids): raise MemoryError("no room for a text")

    outputs = []
    with monkeypatch.context() as patched:
        for name in ("update", "finish"): patched.setattr("minivllm.outputs.StoppingDetokenizer." + name, broken)
        with pytest.raises(MemoryError):
            for _ in range(8): outputs += engine.step()
    engine.abort_request("bad")
    outputs += drain(engine).values()
    assert [output.request_id for output in outputs if output.finished and output.outputs[0].finish_reason == "length"] == ["good"]
    assert not engine.requests and not engine.has_unfinished_requests()


def test_a_text_that_cannot_be_made_does_not_keep_the_engine_open(folder, monkeypatch):
    engine = LLMEngine(str(folder), **T0)
    engine.add_request("bad", [3, 4], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=["never"]))

    def broken(self, token_ids): raise MemoryError("no room for a text")

    for name in ("update", "finish"): monkeypatch.setattr("minivllm.outputs.StoppingDetokenizer." + name, broken)
    engine.exit()
    assert engine.runner is None


def test_a_forked_process_leaves_the_engine_alone(engine):
    engine.pid += 1  # as if this process had been forked off the engine's
    with pytest.raises(RuntimeError, match=f"belongs to process {engine.pid}"): engine.add_request("a", [1, 2], GREEDY)
    engine.exit()
    engine.pid -= 1
    engine.add_request("a", [1, 2], GREEDY)
    assert len(drain(engine)["a"].outputs[0].token_ids) == 4
