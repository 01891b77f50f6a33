"Greedy tokens equal transformers', in float32, whatever the engine does to the batch"
import random

import pytest
import torch
from rigs import DEVICE, RIGS, check_greedy, tiny_model

from minivllm import LLM, SamplingParams

LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 100, 150)
MAX_TOKENS = 12
SETTINGS = {
    "blocks of 4": dict(block_size=4, num_kv_blocks=400),
    "blocks of 16": dict(block_size=16, num_kv_blocks=100),
    "no prefix cache": dict(block_size=4, num_kv_blocks=400, enable_prefix_caching=False),
    "no prefix cache, blocks of 16": dict(block_size=16, num_kv_blocks=100, enable_prefix_caching=False),
    "small pool": dict(block_size=4, num_kv_blocks=44),
    "small pool of large blocks": dict(block_size=16, num_kv_blocks=12),
    "small pool, no prefix cache": dict(block_size=4, num_kv_blocks=44, enable_prefix_caching=False),
    "chunks of 1": dict(block_size=4, num_kv_blocks=400, max_num_batched_tokens=1),
    "chunks of 3": dict(block_size=16, num_kv_blocks=100, max_num_batched_tokens=3),
    "chunks of 16": dict(block_size=4, num_kv_blocks=400, max_num_batched_tokens=16),
    "chunks of 64": dict(block_size=16, num_kv_blocks=100, max_num_batched_tokens=64),
    "small pool, chunks of 7": dict(block_size=4, num_kv_blocks=44, max_num_batched_tokens=7),
    "prefill first": dict(block_size=4, num_kv_blocks=400, max_num_batched_tokens=64, scheduling_policy="prefill_first"),
    "prefill first, small pool": dict(block_size=4, num_kv_blocks=44, max_num_batched_tokens=64, scheduling_policy="prefill_first"),
    "one step ahead": dict(block_size=4, num_kv_blocks=44, max_num_batched_tokens=64, steps_ahead=1),
    "one at a time": dict(block_size=16, num_kv_blocks=100, max_num_seqs=1),
}


def tiny_llm(name, steps_ahead=None, **options):
    folder, _ = tiny_model(name)
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", **{"max_num_seqs": 8, **options})
    if steps_ahead is not None: llm.engine.steps_ahead = steps_ahead  # on a CPU nothing is gained by it, and all the rest is the same
    return llm


def mixed_prompts(seed=0):
    "Prompts of awkward lengths, some of which begin alike"
    rng = random.Random(seed)
    base = [rng.randrange(256) for _ in range(max(LENGTHS))]
    prompts = [base[:n] if i % 2 else [rng.randrange(256) for _ in range(n)] for i, n in enumerate(LENGTHS)]
    rng.shuffle(prompts)
    return prompts


def check_all(name, llm, prompts, max_tokens=MAX_TOKENS):
    "Run the prompts together, and hold every answer to transformers'"
    _, reference = tiny_model(name)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    ties = 0
    for prompt, output in zip(prompts, outputs):
        assert len(output.outputs[0].token_ids) == max_tokens and output.outputs[0].finish_reason == "length"
        ties += check_greedy(reference, prompt, output.outputs[0].token_ids)
    manager = llm.engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks
    return ties


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", RIGS)
def test_greedy_equals_transformers(name, setting):  # F41, F47 a, F48, F54: families and scalings of RIGS
    with tiny_llm(name, **SETTINGS[setting]) as llm:
        ties = check_all(name, llm, mixed_prompts())
        if "small pool" in setting or "ahead" in setting: assert llm.engine.scheduler.num_preemptions > 0
    assert ties <= 1  # ties are counted, and with these weights hardly occur


@pytest.mark.parametrize("name", RIGS)
def test_a_second_run_hits_the_prefix_cache_and_says_the_same(name):
    prompts = [p for p in mixed_prompts() if len(p) > 8]
    with tiny_llm(name, block_size=4, num_kv_blocks=800) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        first = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        check_all(name, llm, prompts)
    for prompt, a, b in zip(prompts, first, again):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert b.num_cached_tokens == (len(prompt) - 1) // 4 * 4


def test_positions_equal_transformers_logits_after_a_prefix_hit():  # F09 a
    "Not only the tokens: the logits of a request whose beginning was cached agree to rounding"
    folder, reference = tiny_model("qwen3")
    prompt = list(range(20, 28))
    with tiny_llm("qwen3", block_size=4, num_kv_blocks=40) as llm:
        llm.generate(prompt + [1], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        seen, sampler = [], llm.engine.runner.sampler
        sampler.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        output = llm.generate(prompt + [30, 31, 32], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)[0]
    assert output.num_cached_tokens == 8
    with torch.inference_mode(): expected = reference(torch.tensor([prompt + [30, 31, 32]], device=DEVICE)).logits[0, -1]
    torch.testing.assert_close(seen[0][0], expected, atol=1e-4, rtol=1e-4)
