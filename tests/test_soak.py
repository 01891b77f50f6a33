"""One engine, thousands of requests of all kinds: every answer as when alone, memory flat, not a block lost

A tenth of it runs in `make test`, all of it in `make test-all`.
"""
import gc
import os
import random
import resource

import pytest
import torch
from byte_tokenizer import byte_tokenizer, model_folder

from minivllm import LLMEngine, SamplingParams

# a pool for about four of the longest requests, sixteen places, and prompts in chunks
CROWDED = dict(dtype="float32", block_size=4, num_kv_blocks=72, max_model_len=72, max_num_batched_tokens=40, max_num_seqs=16)
ALONE = {**CROWDED, "num_kv_blocks": 64, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("soak") / "model", byte_tokenizer(), {"eos_token_id": [256, 40, 41]})


def rss() -> int:
    "Bytes of memory that this process holds"
    try: return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError: return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def random_prompt(rng, shared) -> list[int]:
    "New, or the beginning of one that others have too"
    start = rng.choice(shared)[: rng.randrange(30)] if rng.random() < 0.5 else []
    return start + [rng.randrange(256) for _ in range(rng.randint(1, 40 - len(start)))]


def random_params(rng) -> SamplingParams:
    "Any combination of what there is; two thirds can be repeated"
    def sometimes(p, **options): return options if rng.random() < p else {}

    options = dict(max_tokens=rng.randint(1, 20), temperature=rng.choice((0.0, 0.5, 1.0, 3.0)), ignore_eos=rng.random() < 0.5,
                   seed=rng.randrange(2**63) if rng.random() < 0.7 else None, skip_special_tokens=rng.random() < 0.8,
                   **sometimes(0.3, top_k=rng.choice((-1, 1, 5, 50, 1000))), **sometimes(0.3, top_p=rng.uniform(0.05, 1)),
                   **sometimes(0.2, min_p=rng.random()), **sometimes(0.2, stop_token_ids=rng.sample(range(256), 3)),
                   **sometimes(0.1, n=rng.randint(2, 3)), **sometimes(0.2, stop=[rng.choice("aeiou"), "xy"]),
                   **sometimes(0.1, logprobs=rng.randint(0, 3)), **sometimes(0.1, min_tokens=1),
                   **sometimes(0.15, repetition_penalty=rng.uniform(0.8, 1.5)), **sometimes(0.1, presence_penalty=rng.uniform(-1, 1)),
                   **sometimes(0.1, frequency_penalty=rng.uniform(-1, 1)))
    if options["temperature"] == 0: options.pop("n", None)  # all the same
    return SamplingParams(**options)


def answer(output): return [(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in output.outputs]


def repeatable(params): return params.greedy or params.seed is not None


class Alone:
    "What a request gives when nobody else is there"

    def __init__(self, folder): self.engine = LLMEngine(str(folder), **ALONE)

    def answer(self, prompt, params) -> list:
        self.engine.add_request("", prompt, params, final_only=True)
        outputs = []
        while self.engine.has_unfinished_requests(): outputs += self.engine.step()
        return answer(outputs[-1])

    def might_say(self, prompt, params, found) -> bool:
        "Whether logits that differ by what rounding may do give the other token too: where two tokens lie that close, both are right"
        generator = torch.Generator().manual_seed(0)

        def disturb(module, args): return (args[0] + 2e-5 * torch.randn(args[0].shape, generator=generator), *args[1:])

        expected = self.answer(prompt, params)
        choice = next(i for i, pair in enumerate(zip(expected, found)) if pair[0] != pair[1])
        token_ids, end = found[choice][0], 0
        while end < len(token_ids) and expected[choice][0][end : end + 1] == token_ids[end : end + 1]: end += 1
        hook = self.engine.runner.sampler.register_forward_pre_hook(disturb)
        try: return any(self.answer(prompt, params)[choice][0][: end + 1] == token_ids[: end + 1] for _ in range(40))
        finally: hook.remove()


class Soak:
    "Requests come, go, are refused and aborted at random; about forty are in the engine at any time"

    def __init__(self, folder, seed, steps_ahead):
        self.engine, self.rng = LLMEngine(str(folder), **CROWDED), random.Random(seed)
        self.engine.steps_ahead = steps_ahead
        self.shared = [[self.rng.randrange(256) for _ in range(30)] for _ in range(4)]
        self.requests, self.answers, self.aborted, self.refused, self.count = {}, {}, 0, 0, 0

    def add(self):
        "One more, or one that is refused"
        rng, name = self.rng, str(self.count)
        if rng.random() < 0.05:
            self.refused += 1
            with pytest.raises(ValueError): self.engine.add_request("bad", rng.choice(([], [260], [1] * 72)), SamplingParams())
        prompt, params = random_prompt(rng, self.shared), random_params(rng)
        self.engine.add_request(name, prompt, params, final_only=rng.random() < 0.5, priority=rng.choice((0, 0, 0, 1, -1)))
        self.requests[name] = prompt, params
        self.count += 1

    def take(self, output):
        "A request has ended; each does so once"
        assert output.request_id not in self.answers and len(output.outputs[0].token_ids) <= self.requests[output.request_id][1].max_tokens
        self.answers[output.request_id] = output

    def step(self):
        "A step, and now and then an abort"
        if self.rng.random() < 0.04 and self.engine.requests:
            name = self.rng.choice(list(self.requests))
            output = self.engine.abort_request(name)
            if output:
                assert output.finished and any(o.finish_reason == "abort" for o in output.outputs)
                del self.requests[name]
                self.aborted += 1
        for output in self.engine.step():
            if output.finished: self.take(output)

    def run(self, num_requests, compare):
        "So many requests to their ends; `compare` looks at each of the answers"
        last = self.count + num_requests
        while self.count < last or self.engine.has_unfinished_requests():
            while self.count < last and len(self.requests) < 40 and self.rng.random() < 0.8: self.add()
            self.step()
            for name, output in self.answers.items(): compare(*self.requests.pop(name), output)
            self.answers.clear()
        while self.engine.in_flight: self.engine.step()
        manager = self.engine.scheduler.block_manager
        assert not self.requests and manager.num_free_blocks == manager.num_blocks and not self.engine.scheduler.has_unfinished()


def soak(folder, num_requests, share, steps_ahead, seed=0):
    "Run it in two halves; `share` of the repeatable answers are compared with what they are alone"
    alone, work, sample, checked, ties = Alone(folder), Soak(folder, seed, steps_ahead), random.Random(1), [], []

    def compare(prompt, params, output):
        if not repeatable(params) or sample.random() >= share: return
        checked.append(1)
        if alone.answer(prompt, params) == answer(output): return
        ties.append(1)
        assert alone.might_say(prompt, params, answer(output)), (prompt, params, answer(output))

    sizes = []
    for _ in range(2):
        work.run(num_requests // 2, compare)
        gc.collect()
        sizes.append(rss())
    metrics = work.engine.scheduler.num_preemptions, work.aborted, work.refused, len(checked)
    assert all(n > num_requests * part for n, part in zip(metrics, (0.02, 0.02, 0.02, share / 2))), metrics
    assert work.engine.stats.num_cached_tokens > num_requests
    assert len(ties) <= 1 + len(checked) // 200
    work.engine.exit(), alone.engine.exit()
    return sizes


@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["in step", "one ahead"])
def test_a_tenth_of_the_soak(folder, steps_ahead):
    # fails without `self.block_manager.deallocate(seq)` in the scheduler's `_end`, and with `seq.seed + i` in `prepare_sample`; what
    # has a second guard behind it (hashes, say, behind which tokens and parents are compared) needs a test of its own: see cases.py
    soak(folder, 250, 1, steps_ahead, seed=steps_ahead)


@pytest.mark.slow
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["in step", "one ahead"])
def test_five_thousand_requests(folder, steps_ahead):
    before, after = soak(folder, 5000, 0.2, steps_ahead, seed=2 + steps_ahead)
    assert after < 1.05 * before, f"{before / 2**20:.0f} MiB after the first half, {after / 2**20:.0f} after the second"
