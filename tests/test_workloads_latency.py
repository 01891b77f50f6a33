"Bursts: gaps by hand, the same work under both policies, a token for each request and time, and who has to wait"
import pytest

from minivllm import LLM, SamplingParams
from minivllm.workloads import model_folder
from minivllm.workloads_latency import (
    BurstRun, BurstWorkload, add_requests, burst_workload, compare_settings, counted_clock, draw_requests, gap_percentiles,
    gaps_between, measure_bursts, note_tokens, percentile, run_bursts, scheduling, sort_times, start_decoding,
)

OPTIONS = dict(load_format="dummy", skip_tokenizer_init=True, device="cpu", num_kv_blocks=512, max_num_batched_tokens=256)
SIZES = dict(num_decoding=6, context=48, answer=40, num_bursts=2, burst_size=4, prompt=64, burst_answer=3, period=50)
SETTINGS = [("prefill_first", 256), ("prefill_first", 32), ("mixed", 32)]
PER_UNIT = 16


@pytest.fixture
def llm():
    with model_folder("tiny") as folder, LLM(folder, **OPTIONS) as llm:
        yield llm


@pytest.fixture(params=[0, 1], ids=["waiting", "ahead"])
def ahead(request, llm):
    "An engine that waits for each step, and one that launches the next before, as on a GPU"
    llm.engine.steps_ahead = request.param
    return llm


def run(llm, setting, **sizes):
    "A run on the counted clock, and its workload"
    workload = burst_workload("-".join(map(str, setting)), **SIZES | sizes)
    return workload, run_bursts(llm, workload, *setting, counted_clock(llm, PER_UNIT))


# Numbers by hand


def test_gaps():
    assert gaps_between([0, 10, 20, 70, 80]) == [10, 10, 50, 10]
    assert gaps_between([5]) == []


@pytest.mark.parametrize("percent,expected", [(1, 1), (25, 1), (26, 2), (50, 2), (51, 3), (75, 3), (76, 9), (99, 9), (100, 9)])
def test_percentile_is_one_of_the_values(percent, expected):
    assert percentile([9, 3, 1, 2], percent) == expected


def test_p99_sees_one_gap_in_a_hundred_and_not_a_rarer_one():
    assert percentile([1] * 98 + [50, 50], 99) == 50
    assert percentile([1] * 99 + [50], 99) == 1


def test_percentiles_take_the_gaps_of_all_requests_together():
    times = [[3, 5], [0, 10, 20, 70], [7]]  # gaps 2, 10, 10 and 50
    assert gap_percentiles(times) == {"p50": 10, "p95": 50, "p99": 50, "max": 50}


# The load


def test_workload_by_hand():
    workload = burst_workload(**SIZES)
    assert [len(r.prompt) for r in workload.decoding] == [48] * 6
    assert [[len(r.prompt) for r in burst] for burst in workload.bursts] == [[64] * 4] * 2
    assert workload.arrivals == [5, 55]
    assert workload.num_tokens == 2 * 4 * (64 + 3) + 6 * 39  # the first token is there when the clock starts


def test_load_of_the_gpu():
    workload = burst_workload()
    assert (len(workload.decoding), len(workload.bursts[0]), len(workload.bursts[0][0].prompt), workload.period) == (64, 32, 1024, 2)
    pauses, gaps = len(workload.bursts), workload.decoding[0].max_tokens - 1
    assert pauses / gaps > 0.01  # or a p99 could not see them


def test_bursts_begin_unlike_all_others():
    workloads = [burst_workload(variant, **SIZES | dict(context=context)) for variant in (0, 1, "x") for context in (48, 64)]
    starts = [tuple(r.prompt[:16]) for w in workloads for burst in w.bursts for r in burst]
    assert len(set(starts)) == len(starts)
    assert workloads[0].decoding == workloads[2].decoding == burst_workload(**SIZES).decoding


# The clock


def test_counted_clock(llm):
    clock = counted_clock(llm, 8)
    start = clock()
    llm.generate([[1] * 20, [2] * 10], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert clock() - start == 3 + (30 + 6) / 8


# Policies


def test_scheduling_lasts_as_long_as_its_block(llm):
    scheduler = llm.engine.scheduler
    with pytest.raises(KeyError), scheduling(llm, "prefill_first", 32):
        assert (scheduler.policy, scheduler.max_num_batched_tokens) == ("prefill_first", 32)
        raise KeyError
    assert (scheduler.policy, scheduler.max_num_batched_tokens) == ("mixed", 256)


@pytest.mark.parametrize("policy,budget", [("fair", 32), ("mixed", 0), ("mixed", -1), ("mixed", 257)])
def test_scheduling_refuses_what_the_engine_cannot_do(llm, policy, budget):
    with pytest.raises(ValueError, match=f"{policy!r}" if policy == "fair" else "1 to 256"):
        with scheduling(llm, policy, budget):
            pass
    assert llm.engine.scheduler.policy == "mixed" and llm.engine.scheduler.max_num_batched_tokens == 256


# Runs


def test_all_start_with_one_token(ahead):
    times, requests = {}, draw_requests("many", 12, 48, 10)
    start_decoding(ahead, requests, times)
    assert list(times.values()) == [[0.0]] * 12
    computed = ahead.engine.stats.num_prompt_tokens
    assert computed == 12 * (48 + 16)  # once for the cache; after it a block each
    for request_id in times:
        assert len(ahead.engine.abort_request(request_id).outputs[0].token_ids) == 1


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_request_gets_its_tokens_in_order(ahead, setting):
    workload, found = run(ahead, setting)
    assert [len(times) for times in found.decoding] == [40] * 6
    assert [[len(times) for times in burst] for burst in found.bursts] == [[3] * 4] * 2
    for times in found.decoding + [times for burst in found.bursts for times in burst]:
        assert times == sorted(times)
    assert all(times[0] == 0 for times in found.decoding)
    assert found.end == max(times[-1] for group in (found.decoding, *found.bursts) for times in group)
    assert not ahead.engine.requests and ahead.engine.scheduler.policy == "mixed"


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_burst_comes_before_it_is_due_nor_gets_a_token_before_it_comes(ahead, setting):
    workload, found = run(ahead, setting)
    longest = max(max(gaps_between(times)) for times in found.decoding)
    for due, arrival, burst in zip(workload.arrivals, found.arrivals, found.bursts, strict=True):
        assert due <= arrival <= due + longest
        assert min(times[0] for times in burst) > arrival
    assert found.first_tokens == [t[0] - a for a, burst in zip(found.arrivals, found.bursts) for t in burst]


def test_the_work_is_the_same(llm):
    computed, rows, stats = [], [], llm.engine.stats
    for setting in SETTINGS:
        workload = burst_workload("-".join(map(str, setting)), **SIZES)
        start_decoding(llm, workload.decoding, times := {})  # their prompts are in the cache from here on
        for request_id in times:
            llm.engine.abort_request(request_id)
        before = stats.num_prompt_tokens, stats.num_output_tokens
        rows.append(measure_bursts(llm, workload, *setting, counted_clock(llm, PER_UNIT)))
        computed.append((stats.num_prompt_tokens - before[0], stats.num_output_tokens - before[1]))
    assert len(set(computed)) == 1
    assert {row["num_tokens"] for row in rows} == {workload.num_tokens}
    for row in rows:
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(row["num_tokens"])


def test_prefill_first_stalls_and_mixed_does_not(llm):
    # with a budget of 32, a burst of 256 tokens takes eight steps in which nothing else happens
    rows = dict(zip(SETTINGS, compare_settings(llm, SETTINGS, counted_clock(llm, PER_UNIT), **SIZES)))
    whole, cut, mixed = (rows[setting] for setting in SETTINGS)
    decode = 1 + 6 / PER_UNIT
    burst = (256 + 4) / PER_UNIT  # each prompt brings a token too
    assert whole["p50"] == cut["p50"] == decode
    assert whole["max"] == pytest.approx(1 + burst + 1 + 10 / PER_UNIT)
    assert cut["max"] == pytest.approx(8 + burst + 1 + 10 / PER_UNIT)
    assert mixed["max"] <= 1 + (32 + 4) / PER_UNIT
    assert whole["p99"] > 3 * mixed["p99"]
    assert max(mixed["first_token_max"], whole["first_token_max"]) == mixed["first_token_max"]  # the price


def test_rows_say_what_happened(llm):
    clock = counted_clock(llm, PER_UNIT)
    workload = burst_workload("row", **SIZES)
    row = measure_bursts(llm, workload, "mixed", 32, clock)
    gaps = gaps_between(row["times"])
    assert row["same_steps"] and row["num_gaps"] == 6 * 39 == 6 * len(gaps)
    assert row["max"] == pytest.approx(max(gaps)) and row["p50"] == pytest.approx(percentile(gaps, 50))
    assert (row["policy"], row["budget"], row["context"], row["num_met"]) == ("mixed", 32, 48, 2)


def test_a_burst_that_nobody_waits_for_comes_early(llm):
    row = measure_bursts(llm, burst_workload("early", **SIZES | dict(answer=8, period=200)), "mixed", 32, counted_clock(llm, PER_UNIT))
    assert row["num_met"] == 0 and row["arrivals"][0] < 20 < row["arrivals"][1] < 220


def test_prompts_that_are_in_the_cache_are_an_error(llm):
    run(llm, SETTINGS[2])
    with pytest.raises(RuntimeError, match="in the prefix cache"):
        run(llm, SETTINGS[2])
    assert not llm.engine.requests


def test_nothing_stays_behind_after_an_error(llm):
    workload = burst_workload(**SIZES)
    workload.bursts[1][2].prompt = []  # refused when it is added, with others running
    with pytest.raises(ValueError, match="empty"):
        run_bursts(llm, workload, "prefill_first", 64, counted_clock(llm, PER_UNIT))
    assert not llm.engine.requests and not llm.engine.scheduler.has_unfinished()
    assert llm.engine.scheduler.policy == "mixed"


def test_an_answer_of_another_length_is_an_error():
    workload = BurstWorkload(draw_requests("a", 1, 4, 3), [draw_requests("b", 1, 4, 2)], 1)
    times = {"decoding-0": [0, 1, 2], "burst-0-0": [1, 2]}
    assert sort_times(workload, times, [0.5]) == BurstRun([[0, 1, 2]], [[[1, 2]]], [0.5])
    for request_id in times:
        with pytest.raises(RuntimeError, match="were asked for"):
            sort_times(workload, times | {request_id: [1]}, [0.5])


def test_an_output_without_a_new_token_is_not_noted(llm):
    times = {}
    add_requests(llm, "one", draw_requests("one", 1, 8, 4), times)
    outputs = llm.engine.step()
    for _ in range(2):
        note_tokens(outputs, times, 7.0)
    assert times == {"one-0": [7.0]}
    llm.engine.abort_request("one-0")


def test_settings_are_compared_in_order(llm):
    rows = compare_settings(llm, SETTINGS[1:], counted_clock(llm, PER_UNIT), **SIZES)
    assert [(row["policy"], row["budget"]) for row in rows] == SETTINGS[1:]
    other = compare_settings(llm, SETTINGS[2:], counted_clock(llm, PER_UNIT), **SIZES | dict(context=64))
    assert [row["context"] for row in other] == [64]  # with bursts of other ids, or they would be in the cache
