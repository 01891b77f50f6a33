"Who runs in this step, and with how many tokens"
from collections import deque
from dataclasses import dataclass, field

from minivllm.engine.block_manager import BlockManager
from minivllm.engine.sequence import Sequence, SequenceStatus


@dataclass
class SchedulerOutput:
    "One step's work: who runs, and with how many tokens"
    seqs: list[Sequence] = field(default_factory=list)  # those with a single token first
    num_tokens: list[int] = field(default_factory=list)  # of each sequence, in this step
    preempted: list[Sequence] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)  # ended here: the pool can't hold another of their tokens

    @property
    def total_tokens(self) -> int: return sum(self.num_tokens)


class Scheduler:
    "Continuous batching over a paged cache: a token budget per step, chunked prompts, preemption by recomputation"
    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int = 256,  # sequences that run at the same time
        max_num_batched_tokens: int = 8192,  # token budget of a step
        max_model_len: int = 2**31 - 1,  # tokens of one sequence, prompt and output together
        policy: str = "mixed",  # "mixed": decodes and prompt chunks share a step; "prefill_first": prompts go alone
    ):
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.max_model_len, self.policy = max_model_len, policy
        self.waiting = deque()
        self.running = deque()  # in the order in which they are served
        self.num_admissions = self.num_preemptions = 0

    def has_unfinished(self) -> bool: return bool(self.waiting or self.running)

    def add(self, seq: Sequence):
        "Queue a sequence; one that can never run is a ValueError that gives need and capacity"
        if seq.num_tokens >= self.max_model_len:
            raise ValueError(f"the prompt has {seq.num_tokens} tokens: max_model_len={self.max_model_len} "
                             "leaves no room for an output token")
        need, capacity = self.block_manager.blocks_for(seq.num_tokens), self.block_manager.num_blocks
        if need > capacity:
            raise ValueError(f"the prompt's {seq.num_tokens} tokens need {need} KV blocks of {seq.block_size} tokens, "
                             f"and the pool has {capacity}: raise num_kv_blocks or gpu_memory_utilization")
        self.waiting.append(seq)

    def schedule(self) -> SchedulerOutput:
        "Choose this step's sequences, and see to it that each of their tokens has a slot"
        step, chosen = SchedulerOutput(), {}
        if self.policy == "prefill_first":
            self._serve([seq for seq in self.running if seq.num_uncomputed_tokens > 1], chosen, step)
            self._admit(chosen, step)
            if not chosen: self._serve(list(self.running), chosen, step)
        else:
            self._serve(list(self.running), chosen, step)
            self._admit(chosen, step)
        # the decode kernel wants its rows together
        rows = sorted(chosen.items(), key=lambda row: row[1] > 1)
        step.seqs, step.num_tokens = [seq for seq, _ in rows], [n for _, n in rows]
        return step

    def _serve(self, seqs, chosen, step):
        "Give running sequences their next tokens, in turn, until the budget is spent"
        budget = self.max_num_batched_tokens - sum(chosen.values())
        for seq in seqs:
            if budget == 0: break
            if seq.status is not SequenceStatus.RUNNING: continue  # preempted for the sake of an earlier one
            n = min(seq.num_uncomputed_tokens, budget)
            budget += self._make_room(seq, seq.num_computed_tokens + n, chosen, step)
            if seq.status is SequenceStatus.RUNNING:
                chosen[seq] = n
                budget -= n
        # whoever got nothing is first in the next step
        if budget == 0 and chosen and len(chosen) < len(self.running):
            while self.running[0] in chosen: self.running.rotate(-1)

    def _make_room(self, seq, num_tokens, chosen, step):
        "See that `seq` has slots for `num_tokens` tokens, preempting if need be; returns the budget that became free"
        manager, budget = self.block_manager, 0
        if num_tokens <= len(seq.block_table) * manager.block_size: return 0
        if manager.blocks_for(num_tokens) > manager.num_blocks:
            self._end(seq, "length")
            step.finished.append(seq)
            return 0
        while not manager.can_append(seq, num_tokens):
            victim = max(self.running, key=lambda s: s.admission)
            self._preempt(victim)
            step.preempted.append(victim)
            budget += chosen.pop(victim, 0)
            if victim is seq: return budget
        manager.append(seq, num_tokens)
        return budget

    def _preempt(self, seq):
        "Back to the head of the queue; its K/V will be computed again, as far as the prefix cache has lost it"
        self.block_manager.deallocate(seq)
        self.running.remove(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _admit(self, chosen, step):
        "Start waiting sequences, first come first served, while budget, places and blocks last"
        budget = self.max_num_batched_tokens - sum(chosen.values())
        # in a step that had to preempt there is no room, and what was preempted must not come straight back
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs and not step.preempted:
            seq = self.waiting[0]
            hits = self.block_manager.lookup(seq)
            if not self.block_manager.can_allocate(seq, hits): break
            self.waiting.popleft()
            self.block_manager.allocate_with_cache(seq, hits)
            if seq.admission < 0: seq.num_cached_tokens = seq.num_computed_tokens
            seq.admission = self.num_admissions = self.num_admissions + 1
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            # cached tokens cost nothing: the budget pays for what is computed
            chosen[seq] = min(seq.num_uncomputed_tokens, budget)
            budget -= chosen[seq]

    def postprocess(
        self,
        step: SchedulerOutput,
        token_ids: list[int],  # sampled per sequence of the step; ignored while a prompt is unfinished, -1 is an error
    ) -> list[Sequence]:  # those that this step finished
        "Take the step's results: count what is computed, append the new tokens, end what is over"
        finished = list(step.finished)
        for seq, n, token_id in zip(step.seqs, step.num_tokens, token_ids, strict=True):
            if seq.is_finished: continue  # aborted since
            before = seq.num_computed_tokens
            seq.num_computed_tokens = before + n
            if seq.num_computed_tokens // seq.block_size > before // seq.block_size:
                self.block_manager.cache_full_blocks(seq, before)
            if seq.num_computed_tokens < seq.num_tokens: continue  # a chunk of a prompt says nothing yet
            reason = self._accept(seq, token_id)
            if reason:
                self._end(seq, reason)
                finished.append(seq)
        return finished

    def _accept(self, seq, token_id):
        "Append a sampled token; returns why the sequence ends with it, or None"
        if token_id < 0: return "error"
        seq.append_token(token_id)
        if token_id in seq.stop_token_ids: return "stop"
        limit = min(seq.num_prompt_tokens + seq.sampling_params.max_tokens, self.max_model_len)
        return "length" if seq.num_tokens >= limit else None

    def _end(self, seq, reason):
        "Finish a running sequence and take its blocks back"
        self.block_manager.deallocate(seq)
        self.running.remove(seq)
        seq.finish(reason)

    def abort(self, seq: Sequence):
        "End a sequence at any moment of its life; one that has finished stays as it is"
        if seq.is_finished: return
        if seq.status is SequenceStatus.RUNNING: return self._end(seq, "abort")
        self.waiting.remove(seq)
        seq.finish("abort")
