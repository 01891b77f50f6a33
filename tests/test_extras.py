"What a request may ask for beside plain sampling: stop strings, minimum length, penalties, log-probabilities, several answers"
import random

import pytest
import torch
import transformers
from byte_tokenizer import EOS
from rigs import TIE, reference_logits, tiny_model
from test_engine import T0, drain, folder, listed, one, steps_ahead  # noqa: F401 (fixtures)

from minivllm import LLM, LLMEngine, SamplingParams

TOKENS = dict(skip_tokenizer_init=True)
PROMPTS = [[10, 11, 12, 13, 14], [20, 21, 10, 11], [30] * 9, [7, 8]]


def make_engine(**options):
    "The tiny Llama of the rigs; prompts are token ids"
    return LLMEngine(str(tiny_model("llama")[0]), **{**T0, **TOKENS, "num_kv_blocks": 32, **options})


def answers(engine, *requests) -> list:
    "The first answer of each (prompt, parameters)"
    for i, (prompt, params) in enumerate(requests): engine.add_request(str(i), prompt, SamplingParams(**params))
    final = drain(engine)
    return [final[str(i)].outputs[0] for i in range(len(requests))]


# Stop strings


def watched(engine, **params):
    "Texts that a stream shows, and its last output"
    engine.add_request("a", "x", SamplingParams(temperature=0.0, **params))
    outputs = []
    while engine.has_unfinished_requests(): outputs += engine.step()
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks and not engine.scheduler.has_unfinished() and not engine.request_ids
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    texts = [o.outputs[0].text for o in outputs]
    assert all(after.startswith(before) for before, after in zip(texts, texts[1:])), "text was taken back"
    return texts, outputs[-1].outputs[0]


@pytest.mark.parametrize("stop, include, text, reason", [
    ("END", False, "ab", "END"), (["END"], True, "abEND", "END"), (["b", "abE"], False, "a", "b"), (["bE", "b"], True, "ab", "b"),
    (["zz", "EN"], False, "ab", "EN"), ("a", False, "", "a"),
])
def test_stop_strings_end_the_text(folder, stop, include, text, reason):  # F35
    engine = listed(folder, *b"abENDx")
    texts, answer = watched(engine, stop=stop, include_stop_str_in_output=include)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, "stop", reason)
    assert bytes(answer.token_ids).decode().endswith(reason)  # all that was sampled
    if not include: assert all(reason[0] not in t for t in texts)


def test_nothing_is_computed_after_a_stop_string(folder, steps_ahead):  # F35
    engine = listed(folder, *b"abENDx")
    _, answer = watched(engine, stop="END", max_tokens=20)
    # one that runs ahead has launched a step before it knows, and forgets its token
    assert len(engine.runner.computed) == 5 + steps_ahead and answer.token_ids == list(b"abEND")
    assert engine.stats.num_output_tokens == 5


def test_what_could_have_become_a_stop_string_comes_late_or_with_the_end(folder):  # F35
    texts, answer = watched(listed(folder, *b"abENxEN"), stop="END", max_tokens=7)
    assert texts == ["a", "ab", "ab", "ab", "abENx", "abENx", "abENxEN"]
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)


def test_a_stop_string_in_the_last_token_is_a_stop(folder):
    answer = one(listed(folder, *b"abEND"), max_tokens=5, stop="END")
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "END")
    answer = one(listed(folder, *b"abEN", EOS), max_tokens=9, stop="END")
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abEN", "stop", None)


def test_stop_strings_work_where_nobody_watches(folder):
    engine = listed(folder, *b"abENDx")
    engine.add_request("a", "x", SamplingParams(stop="END"), final_only=True)
    assert drain(engine)["a"].outputs[0].text == "ab"


def test_stop_strings_do_not_count_before_min_tokens(folder):
    answer = one(listed(folder, *b"ENDaENDb"), max_tokens=20, min_tokens=3, stop="END")
    assert (answer.text, len(answer.token_ids)) == ("ENDa", 7)
    answer = one(listed(folder, *b"ENDaENDb"), max_tokens=20, min_tokens=2, stop="END")  # it is complete with the third
    assert (answer.text, len(answer.token_ids)) == ("", 3)


def test_stop_strings_across_bytes_of_a_character(folder):
    answer = one(listed(folder, *"aé☃b".encode()), max_tokens=20, stop="é☃")
    assert (answer.text, answer.stop_reason, answer.token_ids) == ("a", "é☃", list("aé☃".encode()))


def test_a_stop_string_in_an_unfinished_character(folder):
    answer = one(listed(folder, 97, 240), max_tokens=2, stop="\ufffd")
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", "stop", "\ufffd")


def test_stop_strings_want_a_tokenizer():
    engine = make_engine()
    with pytest.raises(ValueError, match="stop=.*END.*skip_tokenizer_init=True"):
        engine.add_request("a", [1], SamplingParams(stop="END"))
    assert not engine.has_unfinished_requests()
    assert len(answers(engine, ([1, 2], dict(temperature=0.0, max_tokens=3)))[0].token_ids) == 3


def test_a_stop_string_ends_its_own_request(folder):
    engine = listed(folder, *b"abENDxyz")
    for name, stop in (("a", None), ("b", "END"), ("c", None)):
        engine.add_request(name, name, SamplingParams(max_tokens=8, stop=stop))
    final = drain(engine)
    assert [final[name].outputs[0].text for name in "abc"] == ["abENDxyz", "ab", "abENDxyz"]


# Penalties and minimum length: greedy, against transformers' processors


def penalized(logits, prompt, output, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0,
              stop_token_ids=(), **_):
    "A row of logits as transformers' processors leave it; presence and frequency by hand"
    ids, row = torch.tensor([prompt + output]), logits[None].clone()
    row = transformers.RepetitionPenaltyLogitsProcessor(repetition_penalty)(ids, row)
    for token_id in set(output): row[0, token_id] -= frequency_penalty * output.count(token_id) + presence_penalty
    if min_tokens and stop_token_ids:
        ban = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, list(stop_token_ids), device=row.device)
        row = ban(ids, row)
    return row[0]


def check_penalized(prompt, params, output):
    "Assert that these are the greedy tokens of the processed logits, up to a first tie"
    logits = reference_logits(tiny_model("llama")[1], prompt + output).cpu()[len(prompt) - 1 :]
    for i, token_id in enumerate(output):
        best = penalized(logits[i], prompt, output[:i], **params).topk(2)
        if best.indices[0] != token_id:
            assert best.indices[1] == token_id and best.values[0] - best.values[1] < TIE, f"token {i}"
            return
        assert i == len(output) - 1 or token_id not in params.get("stop_token_ids", ())


PENALTIES = [
    dict(repetition_penalty=1.8), dict(repetition_penalty=0.6), dict(presence_penalty=2.0), dict(frequency_penalty=1.0),
    dict(presence_penalty=-1.0, frequency_penalty=-0.5), dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7), {},
]


@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=3), dict(num_kv_blocks=9)])
def test_greedy_with_penalties_is_transformers(options):
    "Together in one batch, whole or in chunks, with preemption: each row by its own penalties"
    engine = make_engine(**options)
    requests = [(prompt, dict(penalties, temperature=0.0, max_tokens=10)) for penalties in PENALTIES for prompt in PROMPTS]
    changed = 0
    for (prompt, params), answer in zip(requests, answers(engine, *requests)):
        assert len(answer.token_ids) == 10
        check_penalized(prompt, params, answer.token_ids)
        plain = reference_logits(tiny_model("llama")[1], prompt + answer.token_ids).argmax(-1)[len(prompt) - 1 : -1].tolist()
        changed += plain != answer.token_ids
    assert changed > len(PENALTIES)  # without penalties it would be others
    if "num_kv_blocks" in options: assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 6])
def test_no_end_before_min_tokens(min_tokens):
    engine = make_engine()
    plain = [a.token_ids for a in answers(engine, *((p, dict(temperature=0.0, max_tokens=6)) for p in PROMPTS))]
    requests = [(p, dict(temperature=0.0, max_tokens=8, min_tokens=min_tokens, stop_token_ids=ids[:2])) for p, ids in zip(PROMPTS, plain)]
    for (prompt, params), ids, answer in zip(requests, plain, answers(engine, *requests)):
        check_penalized(prompt, params, answer.token_ids)
        assert len(answer.token_ids) > min_tokens or answer.finish_reason == "length"
        if min_tokens == 0: assert answer.token_ids == ids[:1] and answer.stop_reason == ids[0]


def test_min_tokens_is_about_the_models_end_tokens_too(tmp_path):
    from byte_tokenizer import model_folder
    first = one(LLMEngine(str(model_folder(tmp_path / "a")), **T0), ignore_eos=True, max_tokens=1).token_ids[0]
    engine = LLMEngine(str(model_folder(tmp_path / "b", eos_token_id=first)), **T0)
    assert one(engine, max_tokens=5).token_ids == [first]
    later = one(engine, max_tokens=5, min_tokens=4)
    assert first not in later.token_ids[:4] and len(later.token_ids) >= 4


def test_a_row_with_nothing_left_ends_in_error():
    engine = make_engine()
    everything = list(range(260))
    bad, good = answers(engine, (PROMPTS[0], dict(min_tokens=2, stop_token_ids=everything)), (PROMPTS[1], dict(temperature=0.0, max_tokens=3)))
    assert (bad.finish_reason, bad.token_ids) == ("error", []) and len(good.token_ids) == 3


SEEDED = dict(temperature=0.9, seed=5, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.3, min_tokens=4, logprobs=2)


def test_seeded_with_extras_depends_on_nobody_else(steps_ahead):  # F32
    alone = answers(make_engine(), (PROMPTS[0], SEEDED))[0]
    for options in ({}, dict(max_num_batched_tokens=4), dict(num_kv_blocks=9)):
        neighbours = [(p, dict(temperature=1.0, max_tokens=9, seed=i, **extra)) for i, (p, extra) in
                      enumerate(zip(PROMPTS, ({}, dict(presence_penalty=1.0), {}, dict(logprobs=20))))]
        together = answers(make_engine(**options), *neighbours[:2], (PROMPTS[0], SEEDED), *neighbours[2:])
        assert together[2].token_ids == alone.token_ids
        assert together[2].cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
        for (prompt, params), answer in zip(neighbours[::3], (together[0], together[4])):
            plain = {k: v for k, v in params.items() if k != "logprobs"}
            assert answers(make_engine(), (prompt, plain))[0].token_ids == answer.token_ids


# Log-probabilities


def test_logprobs_are_the_models(steps_ahead):
    engine = make_engine(max_num_batched_tokens=7)
    requests = [(prompt, dict(temperature=t, seed=1, max_tokens=6, logprobs=n, presence_penalty=p, top_k=50))
                for prompt, t, n, p in zip(PROMPTS, (0.0, 0.7, 3.0, 1.0), (0, 1, 5, 20), (0.0, 1.5, 0.0, 0.0))]
    found = answers(engine, *requests, (PROMPTS[0], dict(temperature=0.0)))
    assert found[-1].logprobs is found[-1].cumulative_logprob is None
    for (prompt, params), answer in zip(requests, found):
        expected = reference_logits(tiny_model("llama")[1], prompt + answer.token_ids).log_softmax(-1).cpu()[len(prompt) - 1 :]
        n = params["logprobs"]
        assert len(answer.logprobs) == len(answer.token_ids) == 6
        for row, token_id, entry in zip(expected, answer.token_ids, answer.logprobs):
            ids = list(entry)
            assert ids[0] == token_id and n <= len(ids) <= n + 1
            for found_id, value in entry.items():
                assert value.logprob == pytest.approx(row[found_id].item(), abs=1e-3) and value.decoded_token is None
                assert abs(row.sort(descending=True).values[value.rank - 1] - row[found_id]) < 1e-3
            ranks = sorted(value.rank for value in entry.values())
            assert ranks[:n] == list(range(1, n + 1))
        total = sum(entry[t].logprob for t, entry in zip(answer.token_ids, answer.logprobs))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_logprobs_come_with_texts_and_token_by_token(folder):
    engine = LLMEngine(str(folder), **T0)
    engine.add_request("a", "hello", SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True))
    outputs = []
    while engine.has_unfinished_requests(): outputs += engine.step()
    assert [len(o.outputs[0].logprobs) for o in outputs] == [1, 2, 3, 4]  # each a snapshot
    for entry in outputs[-1].outputs[0].logprobs:
        for token_id, value in entry.items():
            assert value.decoded_token == engine.tokenizer.decode([token_id])


# Several answers


def all_answers(engine, prompt, request_id="n", **params):
    engine.add_request(request_id, prompt, SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **params}))
    output = drain(engine)[request_id]
    assert [a.index for a in output.outputs] == list(range(params.get("n", 1)))
    return output


@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=3), dict(max_num_seqs=1), dict(num_kv_blocks=8), dict(enable_prefix_caching=False)])
def test_several_answers_are_different_and_the_same_again(options):
    expected = [a.token_ids for a in all_answers(make_engine(), PROMPTS[2], n=5, seed=3).outputs]
    assert len({tuple(ids) for ids in expected}) == 5
    assert all_answers(make_engine(), PROMPTS[2], seed=3).outputs[0].token_ids == expected[0]
    engine = make_engine(**options)
    neighbour = dict(temperature=0.0, max_tokens=10)
    engine.add_request("other", PROMPTS[0], SamplingParams(**neighbour))
    output = all_answers(engine, PROMPTS[2], n=5, seed=3)
    assert [a.token_ids for a in output.outputs] == expected and output.metrics.num_output_tokens == 40
    assert [a.token_ids for a in all_answers(engine, PROMPTS[2], n=5, seed=4).outputs] != expected
    assert not engine.held and not engine.requests and not engine.request_ids


def test_the_others_find_the_prompts_full_blocks():
    engine = make_engine()
    prompt = list(range(40, 51))  # two full blocks, and a part of a third
    engine.add_request("n", prompt, SamplingParams(n=4, max_tokens=6, seed=1))
    seqs = [answer.seq for answer in engine.requests["n"].answers]
    assert len(engine.scheduler.waiting) == 1 and len(engine.held) == 1  # the others wait for the first
    engine.step()
    engine.step()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8, 8, 8]
    assert len({tuple(seq.block_table[:2]) for seq in seqs}) == 1 and len({seq.block_table[2] for seq in seqs}) == 4
    drain(engine)
    assert engine.stats.num_prompt_tokens == 11 + 3 * 3 and engine.stats.num_cached_tokens == 24


def test_the_others_wait_for_a_prompt_that_comes_in_chunks():
    engine = make_engine(max_num_batched_tokens=4)
    engine.add_request("n", list(range(40, 51)), SamplingParams(n=3, max_tokens=2, seed=1))
    seqs = [answer.seq for answer in engine.requests["n"].answers]
    for _ in range(2):
        engine.step()
        assert engine.scheduler.waiting == type(engine.scheduler.waiting)() and seqs[1].num_computed_tokens == 0
    drain(engine)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8, 8]


def test_a_stream_shows_all_answers():
    engine = make_engine()
    engine.add_request("n", PROMPTS[0], SamplingParams(n=3, max_tokens=4, seed=1))
    outputs = []
    while engine.has_unfinished_requests(): outputs += engine.step()
    assert all([a.index for a in o.outputs] == [0, 1, 2] for o in outputs)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in zip(outputs, outputs[1:]):
        assert all(a.token_ids == b.token_ids[: len(a.token_ids)] for a, b in zip(before.outputs, after.outputs))
    assert all(a.finish_reason == "length" and len(a.token_ids) == 4 for a in outputs[-1].outputs)


def test_answers_end_each_in_its_own_way(folder):
    engine = LLMEngine(str(folder), **T0)
    output = all_answers(engine, "hello", n=4, seed=2, max_tokens=20, temperature=2.0, stop=[chr(i) for i in range(0, 128, 5)], logprobs=1)
    for answer in output.outputs:
        assert (answer.finish_reason == "stop") == (answer.stop_reason is not None or answer.token_ids[-1] in engine.stop_token_ids)
        assert len(answer.logprobs) == len(answer.token_ids)
    assert len({len(answer.token_ids) for answer in output.outputs}) > 1
    # of who has ended, no token on its way is counted
    assert output.metrics.num_output_tokens == engine.stats.num_output_tokens == sum(len(a.token_ids) for a in output.outputs)


@pytest.mark.parametrize("steps", range(8))
def test_abort_ends_all_answers(steps):
    engine = make_engine(max_num_batched_tokens=6)
    engine.add_request("n", list(range(40, 51)), SamplingParams(n=4, max_tokens=6, seed=1))
    for _ in range(steps): engine.step()
    output = engine.abort_request("n")
    assert output.finished and {a.finish_reason for a in output.outputs} <= {"abort", "length"}
    assert not (engine.requests or engine.request_ids or engine.held)
    after = answers(engine, (PROMPTS[1], dict(temperature=0.0, max_tokens=5)))[0]
    check_penalized(PROMPTS[1], {}, after.token_ids)


def test_a_bad_request_for_several_answers_changes_nothing():
    engine = make_engine()
    for prompt, params in (([1] * 64, dict(n=3)), ([300], dict(n=3)), ([1], dict(n=3, stop="a"))):
        with pytest.raises(ValueError): engine.add_request("n", prompt, SamplingParams(**params))
    assert not (engine.has_unfinished_requests() or engine.held or engine.request_ids)


def test_random_mixes_equal_solo_runs():
    "Whatever is asked for together, each request gets what it gets alone"
    rng = random.Random(0)
    def params():
        extra = rng.choice([{}, dict(n=rng.randint(1, 3))])
        for name, values in dict(repetition_penalty=(1.2, 0.9), presence_penalty=(0.5, -0.5), frequency_penalty=(0.4,), min_tokens=(2, 5),
                                 logprobs=(0, 3), top_k=(5, 40), top_p=(0.8,), min_p=(0.05,)).items():
            if rng.random() < 0.3: extra[name] = rng.choice(values)
        return dict(temperature=rng.choice([0.7, 1.0]), seed=rng.randrange(100), max_tokens=rng.randint(5, 9), stop_token_ids=[rng.randrange(260)], **extra)
    requests = [(rng.choices(range(256), k=rng.randint(1, 14)), params()) for _ in range(14)]
    solo, together = make_engine(), make_engine(max_num_batched_tokens=9, num_kv_blocks=16)
    for i, (prompt, p) in enumerate(requests): together.add_request(str(i), prompt, SamplingParams(**p))
    final = drain(together)
    for i, (prompt, p) in enumerate(requests):
        alone = all_answers(solo, prompt, f"solo{i}", **p)
        assert [a.token_ids for a in final[str(i)].outputs] == [a.token_ids for a in alone.outputs], p
        assert [a.finish_reason for a in final[str(i)].outputs] == [a.finish_reason for a in alone.outputs]


def test_the_users_face_has_it_all(folder):
    params = SamplingParams(n=2, seed=1, max_tokens=6, logprobs=1, stop="\u00ff", ignore_eos=True)
    with LLM(str(folder), **T0) as llm:
        first, second = llm.generate(["hello", "you"], params, use_tqdm=False)
        assert [[a.index for a in output.outputs] for output in (first, second)] == [[0, 1]] * 2
        assert all(len(a.logprobs) == len(a.token_ids) == 6 for a in first.outputs)
        *_, last = llm.stream("hello", params)
        assert [a.token_ids for a in last.outputs] == [a.token_ids for a in first.outputs]
        for _ in llm.stream("hello", params): break  # leaving the loop aborts all of them
        assert not (llm.engine.requests or llm.engine.request_ids or llm.engine.held or llm.engine.scheduler.has_unfinished())
