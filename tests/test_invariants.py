"Random adds, steps and aborts: whatever happens, the invariants of pool, index and queues hold"
from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from host_rig import FakeRunner, check_index, check_pool, check_queues, solo_output

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.sampling_params import SamplingParams


class WeakHash(BlockManager):
    "Collisions everywhere: all blocks share a few hashes"
    def __init__(self, *args, num_hashes=2):
        super().__init__(*args)
        self.num_hashes = num_hashes

    def block_hash(self, seq, i):
        return super().block_hash(seq, i) % self.num_hashes


# two letters, so that prompts share prefixes, and sometimes are equal
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class EngineMachine(RuleBasedStateMachine):
    "The engine's host side, driven at random"
    @initialize(
        block_size=st.integers(1, 4), num_blocks=st.integers(1, 9), budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5), max_model_len=st.sampled_from([8, 1000]),
        policy=st.sampled_from(["mixed", "prefill_first"]), caching=st.booleans(), num_hashes=st.sampled_from([1, 2, 2**64]),
        steps_ahead=st.integers(0, 1))
    def start(self, block_size, num_blocks, budget, max_num_seqs, max_model_len, policy, caching, num_hashes, steps_ahead):
        self.manager = WeakHash(num_blocks, block_size, caching, num_hashes=num_hashes)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget, max_model_len, policy)
        self.runner, self.seqs, self.reported = FakeRunner(block_size), [], []
        self.steps_ahead, self.in_flight = steps_ahead, deque()

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), stop=st.sampled_from([(), (), (2,)]))
    def add(self, prompt, max_tokens, stop):
        seq = Sequence(len(self.seqs), prompt, SamplingParams(max_tokens=max_tokens), self.manager.block_size, frozenset(stop))
        never = (self.manager.blocks_for(len(prompt)) > self.manager.num_blocks
                 or len(prompt) >= self.scheduler.max_model_len)
        try: self.scheduler.add(seq)
        except ValueError: assert never
        else:
            assert not never
            self.seqs.append(seq)

    @rule(prompt=prompts, max_tokens=st.integers(4, 9))
    def add_twins(self, prompt, max_tokens):
        for _ in range(2): self.add(prompt, max_tokens, ())

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(data=st.data(), abort=st.sampled_from([False, False, False, True]))
    def step(self, data, abort):
        # the model runs while a request may be aborted: its result comes too late
        self.run_step(lambda seqs: self.abort_one(data.draw(st.sampled_from(seqs))) if abort and seqs else None)

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule(steps=st.integers(1, 6))
    def several_steps(self, steps):
        for _ in range(steps):
            if self.scheduler.has_unfinished(): self.run_step()

    @precondition(lambda self: self.scheduler.has_unfinished())
    @rule()
    def lose_a_step(self):
        "The model fails: nothing is launched, and the next step starts over"
        self.check_step(self.scheduler.schedule())

    def run_step(self, meanwhile=lambda seqs: None):
        step = self.scheduler.schedule()
        self.check_step(step)
        self.check_all()
        if step.seqs: self.launch(step, meanwhile)
        self.check_all()
        while len(self.in_flight) > (self.steps_ahead if step.seqs else 0): self.resolve()
        self.check_all()

    def launch(self, step, meanwhile):
        tokens = self.runner.run(step.seqs, step.num_tokens, self.in_flight[-1][1] if self.in_flight else None)
        meanwhile(step.seqs)
        self.scheduler.advance(step)
        self.in_flight.append((step, dict(zip((seq.seq_id for seq in step.seqs), tokens))))

    def resolve(self):
        step, tokens = self.in_flight.popleft()
        ended = [seq for seq in self.seqs if seq.is_finished]
        finished = self.scheduler.resolve(step, list(tokens.values()))
        assert finished == [seq for seq in step.seqs if seq.is_finished and seq not in ended]
        self.reported += finished

    def check_step(self, step):
        assert step.seqs or self.in_flight, "work was there, but none was done"
        assert 0 <= step.total_tokens <= self.scheduler.max_num_batched_tokens
        assert len(set(step.seqs)) == len(step.seqs) and not set(step.seqs) & set(step.preempted)
        assert all(seq in self.scheduler.running for seq in step.seqs)
        assert step.num_tokens == sorted(step.num_tokens, key=lambda n: n > 1)
        for seq, n in zip(step.seqs, step.num_tokens):
            assert 1 <= n <= seq.num_uncomputed_tokens
            assert seq.num_computed_tokens + n <= len(seq.block_table) * seq.block_size

    def abort_one(self, seq):
        before = (seq.finish_reason, list(seq.token_ids)) if seq.is_finished else None
        self.scheduler.abort(seq)
        if before: assert (seq.finish_reason, seq.token_ids) == before
        else:
            assert seq.finish_reason == "abort"
            self.reported.append(seq)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def abort(self, data):
        self.abort_one(data.draw(st.sampled_from(self.seqs)))

    @invariant()
    def check_all(self):
        if not hasattr(self, "manager"): return
        check_pool(self.manager, [seq for seq in self.seqs if seq.block_table])
        check_index(self.manager)
        check_queues(self.scheduler, self.seqs)

    def teardown(self):
        if not hasattr(self, "manager"): return
        left = sum(seq.max_num_tokens for seq in self.seqs if not seq.is_finished)
        for _ in range(50 * left):
            if not self.scheduler.has_unfinished(): break
            self.run_step()
        assert not self.scheduler.schedule().seqs
        assert not self.scheduler.has_unfinished(), "does not end"
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert sorted(seq.seq_id for seq in self.reported) == list(range(len(self.seqs))), "one end for each"
        for seq in self.seqs: self.check_output(seq)

    def check_output(self, seq):
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        expected = solo_output(prompt, seq.max_num_tokens - len(prompt), seq.stop_token_ids)
        if seq.finish_reason == "abort":
            assert seq.output_token_ids == expected[: seq.num_output_tokens]
            return
        assert seq.output_token_ids == expected
        assert seq.finish_reason == ("stop" if expected[-1] in seq.stop_token_ids else "length")


def run_machine(examples, steps):
    options = dict(max_examples=examples, stateful_step_count=steps, deadline=None, print_blob=True,
                   suppress_health_check=list(HealthCheck))
    case = EngineMachine.TestCase()
    case.settings = settings(**options)
    case.runTest()


def test_invariants_hold():
    run_machine(150, 40)


@pytest.mark.slow
def test_invariants_hold_through_thousands_of_operations():
    run_machine(2000, 80)
