"Who runs, with how many tokens, and how it ends; no model, every slot checked by the fake runner"
import time

import pytest
from host_rig import HostEngine, solo_output
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench import host_loop_seconds
from minivllm.engine.batch import prepare_decode, prepare_sample
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence, SequenceStatus
from minivllm.sampling_params import SamplingParams

POLICIES = pytest.mark.parametrize("policy", ["mixed", "prefill_first"])
AHEAD = pytest.mark.parametrize("steps_ahead", [0, 1], ids=["in step", "one ahead"])


def sevens(value):
    "A model without ideas"
    return 7


# admission

def test_prompt_that_can_never_fit_is_refused_with_need_and_capacity():  # F15 (a)
    engine = HostEngine(num_blocks=8)
    with pytest.raises(ValueError, match="40 tokens need 10 KV blocks of 4 tokens, and the pool has 8"):
        engine.add(range(40))
    assert not engine.scheduler.has_unfinished() and engine.manager.num_free_blocks == 8


def test_sequence_that_fills_the_pool_ends_with_length():  # F15 (b), (c)
    engine = HostEngine(num_blocks=8)
    seq = engine.generate(range(30), max_tokens=10)
    assert seq.finish_reason == "length" and seq.num_output_tokens == 3, "the 33rd token needs no slot"
    assert engine.manager.num_free_blocks == 8 and engine.scheduler.num_preemptions == 0


def test_sequence_that_could_fill_the_pool_ends_the_same_with_neighbours():  # F15
    engine = HostEngine(num_blocks=8)
    seqs = [engine.add(range(i, i + 20), max_tokens=40) for i in range(3)]
    engine.run()
    for seq in seqs:
        assert seq.finish_reason == "length" and seq.num_output_tokens == 13
        assert seq.output_token_ids == solo_output(seq.token_ids[:20], 13)


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("hit", [False, True])
def test_prompt_up_to_max_model_len(budget, hit):  # F17
    engine = HostEngine(max_model_len=16, budget=budget)
    if hit: engine.generate(range(12))
    with pytest.raises(ValueError, match="the prompt has 16 tokens: max_model_len=16"): engine.add(range(16))
    for length, tokens in (15, 1), (14, 2):
        seq = engine.generate(range(length), max_tokens=5)
        assert (seq.num_output_tokens, seq.finish_reason) == (tokens, "length")
        assert (seq.num_cached_tokens > 0) == (hit or length == 14)


def test_unknown_policy_is_an_error():
    with pytest.raises(ValueError, match="policy='fifo': must be one of mixed, prefill_first"):
        Scheduler(BlockManager(1, 1), policy="fifo")


@POLICIES
def test_running_sequences_never_exceed_max_num_seqs(policy):  # F20
    engine = HostEngine(max_num_seqs=2, policy=policy, model=sevens)
    seqs = [engine.add([i, 1, 2], max_tokens=5) for i in range(3)]
    while engine.scheduler.has_unfinished():
        engine.step()
        assert len(engine.scheduler.running) <= 2
    for seq in seqs:
        served = [i for i, step in enumerate(engine.steps) if seq.seq_id in step]
        assert all(b - a <= 2 for a, b in zip(served, served[1:]))
    assert len(engine.steps) <= 11 and all(seq.num_output_tokens == 5 for seq in seqs)
    if policy == "mixed": assert len(engine.steps) == 10


def test_partly_prefilled_sequences_count_as_running():  # F20
    engine = HostEngine(num_blocks=64, budget=4, max_num_seqs=2)
    for i in range(4): engine.add(range(i * 20, i * 20 + 20))
    while engine.scheduler.has_unfinished():
        engine.step()
        assert len(engine.scheduler.running) <= 2


@POLICIES
@AHEAD
@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(policy, max_tokens, steps_ahead):  # F19
    engine = HostEngine(policy=policy, steps_ahead=steps_ahead)
    seq = engine.generate([1, 2, 3], max_tokens)
    assert seq.num_output_tokens == max_tokens and seq.finish_reason == "length"
    assert len(engine.steps) == max_tokens  # also ahead: this end is known before its token is


def test_length_beyond_the_limit_ends_too():  # F19: compared by >=, not by ==
    scheduler = Scheduler(BlockManager(8, 4))
    seq = Sequence(0, [1, 2, 3], SamplingParams(max_tokens=10), 4)
    scheduler.add(seq)
    seq.max_num_tokens = 2
    assert scheduler.postprocess(scheduler.schedule(), [7]) == [seq] and seq.finish_reason == "length"


# conservation and preemption

@POLICIES
@AHEAD
def test_nobody_is_lost_at_the_cap(policy, steps_ahead):  # F21 (a); HostEngine.check counts after each schedule and result
    engine = HostEngine(max_num_seqs=2, policy=policy, steps_ahead=steps_ahead)
    seqs = [engine.add([i, 1, 2], max_tokens=3) for i in range(3)]
    engine.run()
    assert all(seq.num_output_tokens == 3 for seq in seqs)


@POLICIES
@AHEAD
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_give_the_same_tokens(policy, caching, steps_ahead):  # F21 (b)
    engine = HostEngine(num_blocks=4, policy=policy, caching=caching, steps_ahead=steps_ahead)
    seqs = [engine.add(range(10 * i, 10 * i + 7), max_tokens=6) for i in range(2)]
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for seq in seqs: assert seq.output_token_ids == solo_output(seq.token_ids[:7], 6)


def test_most_recently_admitted_is_preempted_and_comes_back_first():
    engine = HostEngine(num_blocks=6, block_size=2, model=sevens)
    a, b, c = (engine.add([i, i, i, i], max_tokens=4) for i in range(3))
    d = engine.add([9], max_tokens=1)
    engine.step()
    assert list(engine.scheduler.waiting) == [d], "three times two blocks: no room for the fourth"
    step = engine.step()
    assert step.preempted == [c] and step.seqs == [a, b] and list(engine.scheduler.waiting) == [c, d]
    assert c.status is SequenceStatus.WAITING and not c.block_table and c.output_token_ids == [7]
    engine.run()
    assert all(seq.num_output_tokens == 4 for seq in (a, b, c)) and c.admission > b.admission


def test_several_victims_come_back_in_their_order():
    engine = HostEngine(num_blocks=4, block_size=2, model=sevens)
    a, b, c, d = (engine.add([i, i], max_tokens=3) for i in range(4))
    engine.step()
    step = engine.step()
    assert step.seqs == [a, b] and step.preempted == [d, c] and list(engine.scheduler.waiting) == [c, d]
    engine.run()
    assert all(seq.output_token_ids == [7] * 3 for seq in (a, b, c, d))


def test_preempted_sequence_finds_its_blocks_again():
    engine = HostEngine(num_blocks=7)
    a, b = engine.add(range(12), max_tokens=3), engine.add(range(20, 35), max_tokens=4)
    engine.step()
    assert engine.step().preempted == [b] and b.num_computed_tokens == 0 and b.num_tokens == 16
    while b.status is SequenceStatus.WAITING: engine.step()
    assert a.is_finished and engine.steps[-1] == {1: 4}, "12 of its tokens were still in the cache"
    assert b.num_cached_tokens == 0, "what it found when it came back is no hit of the prompt"
    engine.run()
    assert b.output_token_ids == solo_output(range(20, 35), 4)


def test_tokens_of_a_victim_that_was_served_already_go_to_others():
    engine = HostEngine(num_blocks=6, block_size=1, model=sevens)
    a, b, c = (engine.add([i], max_tokens=4) for i in range(3))
    engine.step()
    engine.scheduler.max_num_batched_tokens = 2
    assert engine.step().seqs == [a, b]
    step = engine.step()  # c is served first and takes the last block; then a needs one
    assert step.preempted == [c] and step.seqs == [a, b] and step.num_tokens == [1, 1]
    engine.run()


def test_most_recent_one_preempts_itself():
    engine = HostEngine(num_blocks=2, block_size=2, model=sevens)
    a, b = engine.add([1], max_tokens=2), engine.add([2, 3], max_tokens=2)
    engine.step()
    step = engine.step()
    assert step.seqs == [a] and step.preempted == [b] and b.status is SequenceStatus.WAITING
    engine.run()
    assert b.output_token_ids == [7, 7]


def test_preempted_twin_comes_back_a_step_later_and_shares():
    engine = HostEngine(num_blocks=5, model=sevens)
    a, b = engine.add(range(8), max_tokens=5), engine.add(range(8), max_tokens=5)
    engine.step()
    assert not set(a.block_table) & set(b.block_table), "both were computed at the same time"
    step = engine.step()
    assert step.preempted == [b] and step.seqs == [a], "it would fit at once, in the blocks of its twin"
    assert engine.step().seqs == [a, b] and list(b.block_table[:2]) == list(a.block_table[:2])
    engine.run()


def test_preempted_in_a_step_means_not_in_its_rows():
    engine = HostEngine(num_blocks=4, block_size=1, budget=2, max_num_seqs=4, model=sevens)
    for i in range(3): engine.add([i], max_tokens=3)
    while engine.scheduler.has_unfinished():
        step = engine.step()
        assert not set(step.preempted) & set(step.seqs)
        assert step.total_tokens <= 2
    assert engine.scheduler.num_preemptions > 0


def test_error_ends_one_sequence_and_leaves_nothing_in_the_cache():
    engine = HostEngine(model=sevens)
    good, bad = engine.add(range(8), max_tokens=2), engine.add(range(50, 58), max_tokens=2)
    step = engine.scheduler.schedule()
    assert engine.scheduler.postprocess(step, [7, -1]) == [bad]
    assert bad.finish_reason == "error" and bad.output_token_ids == [] and good.output_token_ids == [7]
    assert engine.manager.lookup(Sequence(9, range(50, 60), SamplingParams(), 4)) == []
    assert len(engine.manager.lookup(Sequence(9, range(10), SamplingParams(), 4))) == 2


# ends

def test_stop_token_ends_and_beats_length():
    engine = HostEngine(model=sevens)
    assert engine.generate([1], 5, stop=[7]).finish_reason == "stop"
    assert engine.generate([1], 1, stop=[7]).finish_reason == "stop"
    assert engine.generate([1], 2, stop=[8]).finish_reason == "length"


@pytest.mark.parametrize("own", [True, False])
def test_stop_reason_names_a_token_that_the_request_asked_for(own):
    engine = HostEngine(model=sevens)
    params = SamplingParams(max_tokens=5, stop_token_ids=[7] if own else [])
    seq = Sequence(0, [1, 2], params, 4, frozenset([7]))
    engine.seqs.append(seq)
    engine.scheduler.add(seq)
    engine.run()
    assert seq.finish_reason == "stop" and seq.stop_reason == (7 if own else None) and seq.output_token_ids == [7]


@pytest.mark.parametrize("when", ["waiting", "running", "preempted", "finished"])
def test_abort_at_any_moment(when):
    engine = HostEngine(num_blocks=4, model=sevens)
    other, seq = engine.add(range(7), max_tokens=6), engine.add(range(10, 17), max_tokens=6)
    if when != "waiting": engine.step()
    if when == "preempted":
        while seq.status is SequenceStatus.RUNNING: engine.step()
    if when == "finished": engine.run()
    engine.scheduler.abort(seq)
    engine.scheduler.abort(seq)
    engine.check()
    assert seq.finish_reason == ("length" if when == "finished" else "abort") and not seq.block_table
    engine.run()
    assert other.num_output_tokens == 6


@pytest.mark.parametrize("at", range(20))
def test_abort_while_the_model_runs(at):  # F72, without running ahead
    engine = HostEngine(num_blocks=40, max_num_seqs=9, model=sevens)
    seqs = [engine.add([i, 1, 2], max_tokens=20) for i in range(8)]
    for _ in range(at): engine.step()
    step = engine.scheduler.schedule()
    victim, before = seqs[at % 8], list(seqs[at % 8].token_ids)
    engine.scheduler.abort(victim)
    late = engine.add([50 + at, 1], max_tokens=2)
    finished = engine.scheduler.postprocess(step, [7] * len(step.seqs))
    engine.check()
    assert victim not in finished and victim.token_ids == before and victim.finish_reason == "abort"
    engine.runner.slots = SlotsOfAnybody()
    engine.run()
    assert all(seq.num_output_tokens == 20 for seq in seqs if seq is not victim) and late.num_output_tokens == 2


class SlotsOfAnybody(dict):
    "The step above was not really run: its slots are not checked"
    def get(self, slot): return AnyValue()


class AnyValue:
    def __eq__(self, other): return True


# one step ahead of the results

@pytest.mark.parametrize("at", range(20))
def test_abort_of_a_request_that_is_in_flight(at):  # F72
    engine = HostEngine(num_blocks=60, max_num_seqs=9, steps_ahead=1)
    seqs = [engine.add([i, 1, 2], max_tokens=20) for i in range(8)]
    for _ in range(at + 1): engine.step()
    assert len(engine.in_flight) == 1 and len(engine.in_flight[0][0].seqs) == 8
    victim = seqs[at % 8]
    engine.scheduler.abort(victim)
    engine.check()
    assert victim.num_output_tokens == at and victim.finish_reason == "abort"  # the token in flight comes too late
    seqs.append(engine.add([50 + at, 1], max_tokens=2))  # into the blocks that were given back
    finished = []
    while engine.scheduler.has_unfinished():
        step = engine.scheduler.schedule()
        if step.seqs: engine.launch(step)
        while len(engine.in_flight) > bool(step.seqs): finished += engine.resolve()
    assert victim.num_output_tokens == at and engine.manager.num_free_blocks == 60
    assert sorted(seq.seq_id for seq in finished) == [seq.seq_id for seq in seqs if seq is not victim]
    for seq in finished: assert seq.output_token_ids == solo_output(seq.token_ids[: seq.num_prompt_tokens], 20 if seq.seq_id < 8 else 2)


def test_a_stop_token_is_noticed_a_step_late_and_what_came_after_it_is_dropped():
    prompt = next(p for p in ([i, 5, 6] for i in range(50)) if 3 < len(solo_output(p, 20, stop={2})) < 9)
    expected = solo_output(prompt, 20, stop={2})
    engine = HostEngine(steps_ahead=1)
    seq = engine.add(prompt, max_tokens=20, stop={2})
    engine.run()
    assert seq.output_token_ids == expected and (seq.finish_reason, seq.num_unknown_tokens) == ("stop", 0)
    assert len(engine.steps) == len(expected) + 1 and len(engine.in_flight) == 1  # nobody waits for the last step
    again = engine.add(prompt, max_tokens=20, stop={2})
    engine.run()
    assert again.output_token_ids == expected and again.num_cached_tokens == 0


def test_blocks_are_kept_until_the_last_token_is_here():
    engine = HostEngine(steps_ahead=1)
    seq = engine.add([1, 2, 3], max_tokens=1)
    engine.step()
    assert seq in engine.scheduler.ending and not engine.scheduler.running and engine.scheduler.has_unfinished()
    assert len(seq.block_table) == 1 and seq.output_token_ids == [] and not seq.is_finished
    assert engine.resolve() == [seq] and not seq.block_table and not engine.scheduler.has_unfinished()


def test_blocks_of_a_request_that_stopped_are_taken_while_it_is_in_flight():
    "Two blocks: the second request writes into those that the discarded step has just written into"
    prompt, other = [4, 5, 6], list(range(20, 27))
    engine = HostEngine(num_blocks=2, steps_ahead=1)
    first, second = engine.add(prompt, max_tokens=4, stop={solo_output(prompt, 2)[1]}), engine.add(other, max_tokens=2)
    while not first.is_finished: engine.step()
    assert len(engine.in_flight) == 1 and engine.in_flight[0][0].seqs == [first]
    engine.step()
    assert engine.in_flight[0][0].seqs == [second]
    engine.run()
    assert second.output_token_ids == solo_output(other, 2)


def test_a_token_comes_to_a_request_that_was_preempted_meanwhile():
    engine = HostEngine(num_blocks=4, block_size=2, steps_ahead=1)
    seqs = [engine.add([10 * i, 1, 2], max_tokens=5) for i in range(2)]
    preempted = []
    while not preempted:
        known = seqs[1].num_output_tokens
        preempted = engine.step().preempted
    assert preempted == [seqs[1]] and seqs[1].num_output_tokens == known + 1 and not seqs[1].block_table
    engine.run()
    for seq in seqs: assert seq.output_token_ids == solo_output(seq.token_ids[:3], 5)


def test_results_of_before_a_preemption_index_no_block_of_after_it():
    "Preempted, and admitted again before its earlier step has its results: other blocks, in which that step has written nothing"
    engine = HostEngine(num_blocks=8, steps_ahead=1)
    seq = engine.add([1, 2, 3], max_tokens=6)
    engine.launch(engine.scheduler.schedule())
    engine.launch(engine.scheduler.schedule())  # fills the first block, with a token that nobody knows yet
    engine.resolve()
    engine.scheduler._preempt(seq)
    engine.scheduler.max_num_batched_tokens = 2
    engine.launch(engine.scheduler.schedule())  # from the start: half of a block
    engine.resolve()
    assert not engine.manager.hash_to_blocks
    engine.run()
    assert seq.output_token_ids == solo_output([1, 2, 3], 6)


@AHEAD
def test_a_prompt_is_found_from_the_step_after_its_own(steps_ahead):
    "Not only when its results are here: whoever finds it runs later"
    engine = HostEngine(num_blocks=40, budget=20, steps_ahead=steps_ahead)
    seqs = [engine.add([*range(12), 50 + i], max_tokens=3) for i in range(3)]
    engine.run()
    # the second prompt's chunk shares the first step; the third comes in the second
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 12]
    for seq in seqs: assert seq.output_token_ids == solo_output(seq.token_ids[:13], 3)


def test_an_error_in_flight_ends_one_sequence_and_leaves_nothing_in_the_cache():
    engine = HostEngine(model=sevens, steps_ahead=1)
    bad, good = engine.add([1, 2, 3, 4], max_tokens=9), engine.add([11, 2, 3, 4], max_tokens=9)
    engine.step()
    step, token_ids, tokens = engine.in_flight[0]
    token_ids[0] = -1
    engine.step()
    assert bad.finish_reason == "error" and bad.output_token_ids == [] and good.output_token_ids == [7]
    assert engine.in_flight[0][0].seqs == [bad, good]  # its next token is computed for nothing
    engine.run()
    assert good.num_output_tokens == 9 and bad.output_token_ids == []
    assert not engine.manager.lookup(Sequence(9, [1, 2, 3, 4, 5], SamplingParams(), 4))


# chunks, budget, order

def test_cached_length_is_known_before_the_tokens_are_counted():  # F06
    engine = HostEngine(budget=8)
    engine.generate(range(12))
    seq = engine.add([*range(12), 50, 51], max_tokens=4)
    step = engine.scheduler.schedule()
    assert (seq.num_cached_tokens, seq.num_computed_tokens, step.num_tokens, len(seq.block_table)) == (12, 12, [2], 4)


def test_recomputed_chunks_never_run_past_the_sequence():  # F06
    engine = HostEngine(budget=8, num_blocks=6, max_num_seqs=4)
    engine.generate(range(12))
    seqs = [engine.add(p, max_tokens=6) for p in ([*range(12), 50, 51], range(60, 70), range(70, 80))]
    while engine.scheduler.has_unfinished():
        step = engine.scheduler.schedule()
        for seq, n in zip(step.seqs, step.num_tokens):
            assert seq.num_computed_tokens + n <= seq.num_tokens <= len(seq.block_table) * 4
        engine.scheduler.postprocess(step, engine.runner.run(step.seqs, step.num_tokens))
    assert engine.scheduler.num_preemptions > 0
    for seq in seqs: assert seq.output_token_ids == solo_output(seq.token_ids[:-6], 6)


def test_repeated_prompt_has_a_token_to_compute():  # F04
    for length in 4, 8, 12, 16:
        engine = HostEngine()
        first, second = (engine.generate(range(10, 10 + length), max_tokens=4) for _ in range(2))
        assert second.num_cached_tokens == length - 4 and min(n for step in engine.steps for n in step.values()) >= 1
        assert first.output_token_ids == second.output_token_ids


@pytest.mark.parametrize("budget", [1, 3, 7, 8, 20, 64])
@POLICIES
@AHEAD
def test_same_tokens_for_any_budget(budget, policy, steps_ahead):  # F25
    engine = HostEngine(budget=budget, policy=policy, steps_ahead=steps_ahead)
    seqs = [engine.add(range(start, start + 20), max_tokens=6) for start in (30, 60)]
    engine.run()
    assert all(sum(step.values()) <= budget for step in engine.steps)
    for seq in seqs: assert seq.output_token_ids == solo_output(seq.token_ids[:20], 6)


def test_chunk_that_is_not_the_last_gives_no_token():  # F25
    engine = HostEngine(budget=8)
    seq, seen = engine.add(range(30, 50), max_tokens=6), []
    for _ in range(3):
        step = engine.step()
        seen.append((step.num_tokens, seq.num_output_tokens))
    assert seen == [([8], 0), ([8], 0), ([4], 1)]


def test_sample_of_an_unfinished_prompt_is_ignored():  # F25
    engine = HostEngine(budget=8)
    seq = engine.add(range(30, 50), max_tokens=6, stop=[3])
    engine.scheduler.postprocess(engine.scheduler.schedule(), [3])
    assert seq.num_tokens == 20 and seq.num_computed_tokens == 8 and not seq.is_finished


def test_budget_pays_for_computed_tokens_only():  # F26
    engine = HostEngine(num_blocks=64, budget=32, max_model_len=256)
    engine.generate(range(96))
    assert [sum(step.values()) for step in engine.steps] == [32, 32, 32]
    long, short = engine.add([*range(96), *range(200, 232)]), engine.add([5])
    assert engine.step().seqs == [long] and engine.steps[-1] == {1: 32} and long.is_finished
    assert engine.step().seqs == [short]
    engine = HostEngine(num_blocks=64, budget=33)
    engine.generate(range(96))
    engine.add([*range(96), *range(200, 232)]), engine.add([5])
    assert engine.step().num_tokens == [1, 32], "one token of the budget was left"


def test_single_token_rows_come_first():
    engine = HostEngine(num_blocks=64, budget=32)
    a, b = engine.add(range(3), max_tokens=9), engine.add(range(10, 14), max_tokens=9)
    engine.step()
    c, d = engine.add(range(20, 26)), engine.add([40])
    step = engine.step()
    assert step.seqs == [a, b, d, c] and step.num_tokens == [1, 1, 1, 6]


# slots

def test_slots_at_the_block_boundary():  # F22
    engine = HostEngine(num_blocks=1)
    seq = engine.add([1, 2, 3], max_tokens=2)
    engine.step()
    assert len(seq.block_table) == 1
    engine.run()
    assert seq.num_output_tokens == 2 and seq.finish_reason == "length"
    seq = HostEngine(num_blocks=1).generate([1, 2, 3, 4], max_tokens=2)
    assert seq.num_output_tokens == 1 and seq.finish_reason == "length"
    engine = HostEngine()
    seq = engine.add(range(8), max_tokens=3)
    engine.step()
    assert len({engine.runner.slot(seq, p) for p in range(8)}) == 8 and len(seq.block_table) == 2
    engine.scheduler.schedule()
    assert engine.runner.slot(seq, 8) == seq.block_table[2] * 4


@pytest.mark.parametrize("prompt", range(1, 14))
def test_every_position_has_its_slot(prompt):  # F22
    for max_tokens in range(1, 10):
        engine = HostEngine()
        seq = engine.add(range(prompt), max_tokens)
        tables = []
        while engine.scheduler.has_unfinished():
            step = engine.scheduler.schedule()
            tables.append((seq.num_computed_tokens + step.num_tokens[0], len(seq.block_table)))
            engine.scheduler.postprocess(step, engine.runner.run(step.seqs, step.num_tokens))
        assert [end for end, _ in tables] == list(range(prompt, prompt + max_tokens))
        assert all(blocks == -(-end // 4) for end, blocks in tables)
        slots = {slot // 4 for slot in engine.runner.slots}
        assert len(engine.runner.slots) == prompt + max_tokens - 1 and len(slots) == tables[-1][1]


# fairness

def test_steady_arrivals_do_not_starve_running_requests():  # F24
    engine = HostEngine(num_blocks=1000, max_num_seqs=64)
    first = engine.add([1, 2, 3], max_tokens=10)
    engine.step()
    for i in range(50):
        engine.add(range(10 * i, 10 * i + 8))
        engine.step()
    served = [i for i, step in enumerate(engine.steps) if 0 in step]
    assert first.is_finished and served[-1] <= 25 and all(b - a <= 2 for a, b in zip(served, served[1:]))


def test_prefill_first_lets_running_requests_wait():
    engine = HostEngine(num_blocks=1000, max_num_seqs=64, policy="prefill_first")
    first = engine.add([1, 2, 3], max_tokens=10)
    engine.step()
    for i in range(50):
        engine.add(range(10 * i, 10 * i + 8))
        engine.step()
    assert first.num_output_tokens == 1
    engine.run()
    assert first.num_output_tokens == 10


@POLICIES
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_no_more_run_than_a_step_has_tokens(policy, budget):
    "fails without `min(..., self.max_num_batched_tokens)` in `_admit`: the last of five would wait for its turn"
    engine = HostEngine(num_blocks=64, max_num_seqs=5, budget=budget, policy=policy, model=sevens)
    seqs = [engine.add([i], max_tokens=12) for i in range(5)]
    engine.run()
    for seq in seqs:
        served = [i for i, step in enumerate(engine.steps) if seq.seq_id in step]
        assert len(served) == 12 and all(b - a <= 1 + (policy == "prefill_first") for a, b in zip(served, served[1:]))


requests = st.tuples(st.integers(1, 14), st.integers(1, 9), st.integers(-2, 2), st.integers(0, 6))  # prompt, output, priority, pause before it


@settings(max_examples=150, deadline=None)
@given(st.lists(requests, min_size=1, max_size=14), st.integers(1, 9), st.integers(1, 6), st.integers(6, 20), st.integers(0, 1))
def test_nobody_waits_while_running_and_equals_start_in_order(trace, budget, max_num_seqs, num_blocks, steps_ahead):
    """Any traffic: whoever runs has a token in every second step at least, whoever waits is overtaken by the more urgent alone,
    a victim is the least urgent and of those the last to start, and all of them end

    Fails if `_make_room` takes the last to start alone, if `_enqueue` appends, if `_admit` passes over the head of the queue.
    """
    engine = HostEngine(num_blocks=num_blocks, budget=budget, max_num_seqs=max_num_seqs, steps_ahead=steps_ahead)
    scheduler, last, trace = engine.scheduler, {}, list(trace)
    preempt, start = scheduler._preempt, scheduler._start

    def preempt_and_look(victim):
        assert all((seq.priority, seq.admission) <= (victim.priority, victim.admission) for seq in scheduler.running)
        preempt(victim)

    def start_and_look(seq):
        assert all((seq.priority, seq.seq_id) < (other.priority, other.seq_id) for other in scheduler.waiting)
        start(seq)

    scheduler._preempt, scheduler._start = preempt_and_look, start_and_look
    pause = 0
    while trace or scheduler.has_unfinished():
        while trace and pause >= trace[0][3]:
            prompt, output, priority, _ = trace.pop(0)
            engine.add(range(len(engine.seqs) * 20, len(engine.seqs) * 20 + prompt), output, priority=priority)
            pause = 0
        pause += 1
        before = set(scheduler.running)
        if not scheduler.has_unfinished(): continue
        step = engine.step()
        for seq in before:
            idle = 0 if seq in step.seqs or seq not in scheduler.running else last.get(seq, 0) + 1
            assert idle < 2, f"{seq} has run for two steps without a token"
            last[seq] = idle
        assert [(s.priority, s.seq_id) for s in scheduler.waiting] == sorted((s.priority, s.seq_id) for s in scheduler.waiting)
    while engine.in_flight: engine.resolve()
    for seq in engine.seqs:
        assert seq.output_token_ids == solo_output(seq.token_ids[: seq.num_prompt_tokens], seq.max_num_tokens - seq.num_prompt_tokens)


def test_the_more_urgent_start_first():
    engine = HostEngine(max_num_seqs=1)
    for priority in (3, 0, 3, -1, 0): engine.add([1, 2], max_tokens=1, priority=priority)
    engine.run()
    assert [list(step) for step in engine.steps] == [[3], [1], [4], [0], [2]]


def test_the_least_urgent_is_preempted_even_if_it_started_first():
    engine = HostEngine(num_blocks=4)
    low, high = engine.add([1, 2, 3, 4, 5, 6, 7], max_tokens=8, priority=1), engine.add([11, 12, 13, 14, 15, 16, 17], max_tokens=8)
    preempted = []
    while engine.scheduler.has_unfinished(): preempted += engine.step().preempted
    assert preempted and set(preempted) == {low} and high.num_output_tokens == low.num_output_tokens == 8


def test_a_stream_of_equals_starves_nobody():
    "Requests keep coming, one in each step: each starts before all that came later"
    engine = HostEngine(num_blocks=12, budget=16, max_num_seqs=3)
    for i in range(60):
        engine.add(range(20 * i, 20 * i + 3 + 9 * (i % 2)), max_tokens=4)
        engine.step()
    engine.run()
    first = [min(i for i, step in enumerate(engine.steps) if seq.seq_id in step) for seq in engine.seqs]
    assert first == sorted(first)


def test_long_prompt_leaves_running_requests_their_tokens():
    engine = HostEngine(num_blocks=64, budget=8)
    a, b = engine.add([1, 2], max_tokens=20), engine.add([3, 4], max_tokens=20)
    engine.step()
    engine.add(range(100, 160))
    for _ in range(9): assert engine.step().total_tokens == 8
    assert a.num_output_tokens == b.num_output_tokens == 10


# cost

def test_host_work_of_a_decode_step_fits_in_the_yardstick():
    "schedule + prepare + postprocess for 256 sequences against a Python loop of 40,000 rounds, both at their best"
    manager = BlockManager(20_000, 16)
    scheduler = Scheduler(manager, 256, 8192)
    for i in range(256):
        scheduler.add(Sequence(i, range(i, 2 * i + 20), SamplingParams(max_tokens=500), 16))
    while scheduler.waiting:
        step = scheduler.schedule()
        scheduler.postprocess(step, [1] * len(step.seqs))
    scheduler.postprocess(scheduler.schedule(), [1] * 256)
    spans = []
    for i in range(100):
        start = time.perf_counter()
        step = scheduler.schedule()
        prepare_decode(step.seqs)
        prepare_sample(step.seqs)
        scheduler.postprocess(step, [i] * 256)
        spans.append(time.perf_counter() - start)
    spans.sort()
    assert spans[len(spans) // 4] < host_loop_seconds()


def full_house(max_num_seqs, num_waiting):
    "A scheduler in which everybody decodes, and others wait"
    scheduler = Scheduler(BlockManager(1024, 16), max_num_seqs, 4096)
    for i in range(max_num_seqs + num_waiting):
        scheduler.add(Sequence(i, [i % 200, 3], SamplingParams(max_tokens=500, ignore_eos=True), 16))
    step = scheduler.schedule()
    assert len(step.seqs) == max_num_seqs
    scheduler.postprocess(step, [7] * len(step.seqs))
    return scheduler, step.seqs


def admitted(scheduler):
    "Who starts in the next step"
    step = scheduler.schedule()
    scheduler.postprocess(step, [7] * len(step.seqs))
    return sum(n > 1 for n in step.num_tokens)


def test_in_a_full_house_places_are_taken_some_at_a_time():
    "A step with prompts is launched kernel by kernel: with one prompt it costs nearly what it costs with several"
    scheduler, seqs = full_house(128, num_waiting=20)
    assert admitted(scheduler) == 0
    for i, expected in enumerate([0, 0, 0, 4]):
        scheduler.abort(seqs[i])
        assert admitted(scheduler) == expected


def test_nobody_waits_long_for_others_to_start_with():
    scheduler, seqs = full_house(128, num_waiting=20)
    scheduler.abort(seqs[0])
    assert [admitted(scheduler) for _ in range(34)] == [0] * 32 + [1, 0]
    scheduler.abort(seqs[1])  # the count begins anew
    assert [admitted(scheduler) for _ in range(33)] == [0] * 32 + [1]


@pytest.mark.parametrize("max_num_seqs, num_waiting", [(128, 1), (63, 20), (4, 20)])
def test_the_last_in_the_queue_and_small_houses_wait_for_nobody(max_num_seqs, num_waiting):
    scheduler, seqs = full_house(max_num_seqs, num_waiting)
    scheduler.abort(seqs[0])
    assert admitted(scheduler) == 1
