"The demo model, end to end: real text through our own engine"
import pytest
import torch
from rigs import DEVICE, check_greedy

from minivllm import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?", "Name the three primary colours.", "Why is the sky blue?", "Write one sentence about the sea.",
    "What is 12 times 12?", "Who wrote Hamlet?", "Give me a synonym for 'happy'.", "How do plants make their food?",
    "What do you call a baby dog?", "List five kinds of fruit.", "Translate 'good morning' into French.", "What is a noun?",
    "Explain gravity to a child.", "What is the largest planet?", "Write a haiku about rain.", "How many days has a leap year?",
    "What is the opposite of 'cold'?", "Describe a sunset in ten words.", "Why do we sleep?",
    "Summarise in one sentence: the quick brown fox jumps over the lazy dog, and the dog, who had been asleep, does not mind at all.",
]


@pytest.fixture(scope="module")
def llm(smollm2_folder):
    with LLM("smollm2-135m", dtype="float32", max_model_len=2048) as llm: yield llm


def chat(question): return [{"role": "user", "content": question}]


def test_twenty_chat_prompts_equal_transformers(llm, smollm2_folder):
    from transformers import AutoModelForCausalLM
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).to(DEVICE).eval()
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    outputs = llm.chat([chat(question) for question in QUESTIONS], params, use_tqdm=False)
    ties = sum(check_greedy(reference, output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs)
    assert all(len(output.outputs[0].token_ids) == 64 for output in outputs)
    assert ties <= 1


def test_answers_make_sense_and_end_where_the_model_ends_them(llm):
    outputs = llm.chat([chat(question) for question in QUESTIONS[:4]], SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    answer = outputs[0].outputs[0]
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop" and answer.token_ids[-1] == llm.engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert not any("<|" in output.outputs[0].text for output in outputs)


def test_a_shared_system_prompt_is_computed_once(llm):
    "The second request computes its own tokens and, of the shared ones, no more than the last unfilled block"
    system = {"role": "system", "content": " ".join(f"Rule {i}: answer in one short sentence, and be kind." for i in range(15))}
    params = SamplingParams(temperature=0.0, max_tokens=4)
    first = llm.chat([system, *chat("What is the capital of Italy?")], params, use_tqdm=False)[0]
    computed = llm.engine.stats.num_prompt_tokens
    second = llm.chat([system, *chat("Name a river in Egypt.")], params, use_tqdm=False)[0]
    computed = llm.engine.stats.num_prompt_tokens - computed
    shared = next(i for i, (a, b) in enumerate(zip(first.prompt_token_ids, second.prompt_token_ids)) if a != b)
    assert shared >= 200
    assert second.num_cached_tokens == shared // 16 * 16
    assert computed == len(second.prompt_token_ids) - second.num_cached_tokens
