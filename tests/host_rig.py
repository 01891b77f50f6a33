"The engine's host side without a model: a scheduler, its pool, and a runner that checks every slot"
from collections import deque

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import UNKNOWN, Sequence
from minivllm.sampling_params import SamplingParams


def content(previous: int, token_id: int) -> int:
    "What K/V of a token stands for: it depends on the token and on everything before it"
    return hash((previous, token_id)) % (2**61 - 1)


def contents(token_ids) -> list[int]:
    "The content of every position of a text"
    values, value = [], 0
    for token_id in token_ids:
        value = content(value, token_id)
        values.append(value)
    return values


def next_token(value: int, vocab_size: int = 3) -> int:
    "The model: a token that depends on the whole text before it, and on nothing else"
    return value // 7 % vocab_size


def solo_output(prompt, num_tokens: int, stop=(), model=next_token) -> list[int]:
    "What a request gives when it is alone in the world"
    token_ids = list(prompt)
    value = contents(prompt)[-1]
    while len(token_ids) < len(prompt) + num_tokens:
        token_ids.append(model(value))
        value = content(value, token_ids[-1])
        if token_ids[-1] in stop: break
    return token_ids[len(prompt):]


class FakeRunner:
    """Writes the K/V of a step into its slots and reads all that the step attends to

    A slot that was given away, shared wrongly, never written or written twice shows at once.
    """
    def __init__(self, block_size: int, model=next_token):
        self.block_size, self.model = block_size, model
        self.slots = {}  # slot -> content

    def slot(self, seq, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def run(self, seqs, num_tokens, previous=None) -> list[int]:
        "One step; `previous`: seq_id -> the token that the step in flight has sampled, and the host doesn't know"
        written = set()
        assert all(seq.num_unknown_tokens <= 1 for seq in seqs)
        texts = [seq.token_ids[: seq.first_unknown] + [previous[seq.seq_id]] * seq.num_unknown_tokens
                 if seq.num_unknown_tokens else seq.token_ids for seq in seqs]
        expected = [contents(text) for text in texts]
        for seq, n, values in zip(seqs, num_tokens, expected):
            for position in range(seq.num_computed_tokens, seq.num_computed_tokens + n):
                slot = self.slot(seq, position)
                assert slot not in written, f"slot {slot} is written twice in one step"
                written.add(slot)
                self.slots[slot] = values[position]
        token_ids = []
        for seq, n, values in zip(seqs, num_tokens, expected):
            end = seq.num_computed_tokens + n
            for position in range(end):
                assert self.slots.get(self.slot(seq, position)) == values[position], f"{seq}: foreign K/V at {position}"
            token_ids.append(self.model(values[end - 1]) if end == seq.num_tokens else -1)
        return token_ids


class HostEngine:
    "Scheduler, block manager and fake runner, which may run ahead of the results; every step is recorded"
    def __init__(self, block_size=4, num_blocks=16, budget=64, max_num_seqs=4, max_model_len=2**31 - 1, policy="mixed",
                 caching=True, model=next_token, manager=None, steps_ahead=0):
        self.manager = manager or BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget, max_model_len, policy)
        self.runner, self.seqs, self.steps = FakeRunner(block_size, model), [], []
        self.steps_ahead, self.in_flight = steps_ahead, deque()

    def add(self, prompt, max_tokens=1, stop=(), priority=0) -> Sequence:
        "A request in the queue"
        params = SamplingParams(max_tokens=max_tokens)
        seq = Sequence(len(self.seqs), prompt, params, self.manager.block_size, frozenset(stop), priority=priority)
        self.scheduler.add(seq)
        self.seqs.append(seq)
        return seq

    def step(self):  # the scheduler's output
        "Launch a step, and take the results of as many as may not stay in flight"
        step = self.scheduler.schedule()
        self.check()
        assert step.seqs or self.in_flight or not self.scheduler.has_unfinished(), "no work although somebody waits"
        if step.seqs: self.launch(step)
        while len(self.in_flight) > (self.steps_ahead if step.seqs else 0): self.resolve()
        return step

    def launch(self, step):
        "Send a step off"
        previous = self.in_flight[-1][2] if self.in_flight else None
        token_ids = self.runner.run(step.seqs, step.num_tokens, previous)
        self.scheduler.advance(step)
        self.in_flight.append((step, token_ids, {seq.seq_id: token_id for seq, token_id in zip(step.seqs, token_ids)}))
        self.steps.append({seq.seq_id: n for seq, n in zip(step.seqs, step.num_tokens)})
        self.check()

    def resolve(self):  # the sequences that end
        "Take the results of the oldest step in flight"
        step, token_ids, _ = self.in_flight.popleft()
        finished = self.scheduler.resolve(step, token_ids)
        self.check()
        return finished

    def run(self, limit=10_000):
        "Steps until nobody is left"
        while self.scheduler.has_unfinished():
            self.step()
            assert len(self.steps) < limit, "does not end"
        assert self.manager.num_free_blocks == self.manager.num_blocks

    def generate(self, prompt, max_tokens=1, stop=()) -> Sequence:
        "One request to its end, with whatever else is queued"
        seq = self.add(prompt, max_tokens, stop)
        self.run()
        return seq

    def check(self):
        "The invariants of pool, index and queues"
        check_pool(self.manager, [seq for seq in self.seqs if seq.block_table])
        check_index(self.manager)
        check_queues(self.scheduler, self.seqs)


def check_pool(manager, holders):
    "Free and used blocks make up the pool; a block is counted once for every table that holds it"
    held = [0] * manager.num_blocks
    for seq in holders:
        assert len(set(seq.block_table)) == len(seq.block_table)
        for block_id in seq.block_table: held[block_id] += 1
    assert [block.ref_count for block in manager.blocks] == held
    free = list(manager.free_block_ids)
    assert len(free) + sum(n > 0 for n in held) == manager.num_blocks
    assert not any(held[block_id] for block_id in free)
    for seq in holders:
        slots = len(seq.block_table) * manager.block_size
        # as many blocks as its tokens need, the newest token excepted, whose slot comes with its step
        assert seq.num_tokens - 1 <= slots < seq.num_tokens + manager.block_size
        assert seq.num_computed_tokens <= slots


def check_index(manager):
    "Whatever can be found is there under its own hash, and can be reached from its root"
    indexed = [block for blocks in manager.hash_to_blocks.values() for block in blocks]
    assert all(blocks for blocks in manager.hash_to_blocks.values())
    assert {b.block_id for b in indexed} == {b.block_id for b in manager.blocks if b.hash is not None}
    assert len(indexed) == len({b.block_id for b in indexed})
    identities, reachable = {}, {0, *(b.content_id for b in indexed)}
    for block_hash, blocks in manager.hash_to_blocks.items():
        for block in blocks:
            assert block.hash == block_hash and len(block.token_ids) == manager.block_size
            key = block.parent_id, tuple(block.token_ids)
            assert identities.setdefault(key, block.content_id) == block.content_id
            assert block.parent_id in reachable, "a cached block whose root is gone"
    assert len(set(identities.values())) == len(identities)


def check_queues(scheduler, seqs):
    "Nobody is lost, and nobody is in two places"
    waiting, running, ending = list(scheduler.waiting), list(scheduler.running), list(scheduler.ending)
    assert len(running) <= scheduler.max_num_seqs
    assert len({s.seq_id for s in waiting + running + ending}) == len(waiting) + len(running) + len(ending)
    for seq in seqs:
        assert (seq in waiting, seq in running + ending, seq.is_finished) == tuple(
            seq.status.name == name for name in ("WAITING", "RUNNING", "FINISHED"))
        if seq not in running + ending: assert not seq.block_table and seq.num_computed_tokens == 0
        else: assert 0 <= seq.num_computed_tokens < seq.num_tokens <= seq.max_num_tokens
        # the last token of those who are ending, and of nobody else, is the last that there may be
        if not seq.is_finished: assert (seq in ending) == (seq.num_unknown_tokens > 0 and seq.num_tokens == seq.max_num_tokens)
        else: assert seq.num_unknown_tokens == 0
        assert seq.token_ids.count(UNKNOWN) == seq.num_unknown_tokens
