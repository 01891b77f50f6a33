"LLM: prompts in, answers out"
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

from tqdm import tqdm

from minivllm.engine.llm_engine import LLMEngine
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams


def as_prompts(prompts) -> list:
    "One prompt or many, as a list of prompts"
    if isinstance(prompts, (str, dict)): return [prompts]
    if not isinstance(prompts, (list, tuple)): raise TypeError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    # a flat list of integers is one prompt of token ids
    return [prompts] if prompts and all(isinstance(p, int) for p in prompts) else list(prompts)


def as_params(sampling_params, num_prompts: int) -> list[SamplingParams]:
    "One SamplingParams for each prompt"
    if sampling_params is None: sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams): return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        raise ValueError(f"{len(sampling_params)} sampling_params for {num_prompts} prompts")
    return list(sampling_params)


class ThroughputBar:
    "A progress bar over requests that shows prompt and output tokens per second"
    def __init__(
        self,
        engine: LLMEngine,
        total: int,  # requests
        show: bool,
    ):
        self.engine, self.before, self.start = engine, replace(engine.stats), time.perf_counter()
        self.bar = tqdm(total=total, desc="requests", unit="req", disable=not show, dynamic_ncols=True)

    def update(self, done: int):
        "Show that `done` requests are finished, and the rates up to now"
        seconds, stats = time.perf_counter() - self.start, self.engine.stats
        prompt = (stats.num_prompt_tokens - self.before.num_prompt_tokens) / seconds
        output = (stats.num_output_tokens - self.before.num_output_tokens) / seconds
        self.bar.set_postfix_str(f"prompt {prompt:.0f} tok/s, output {output:.0f} tok/s", refresh=False)
        self.bar.update(done - self.bar.n)

    def __enter__(self): return self

    def __exit__(self, *error): self.bar.close()


class LLM:
    "Offline inference with vLLM's names: generate, chat, stream"
    def __init__(
        self,
        model: str,  # local folder, Hub id, or "smollm2-135m"
        **options,  # the other fields of `EngineConfig`
    ):
        self.engine = LLMEngine(model, **options)
        self.request_ids = count()
        self.outputs = {}  # request_id -> its latest output, until its own loop takes it

    def add(self, prompts: list, params: list[SamplingParams], final_only: bool) -> list[str]:  # request ids
        "Queue all prompts or, if one is bad, none; the error names its index"
        ids = []
        for i, (prompt, p) in enumerate(zip(prompts, params)):
            request_id = str(next(self.request_ids))
            try: self.engine.add_request(request_id, prompt, p, final_only)
            except (ValueError, TypeError) as error:
                for added in ids: self.engine.abort_request(added)
                raise type(error)(f"prompt {i}: {error}") from None
            ids.append(request_id)
        return ids

    def step(self):
        "One engine step; several loops may take turns, so each output waits for the loop that asked for it"
        for output in self.engine.step(): self.outputs[output.request_id] = output

    def finish(self, ids: list[str]):
        "After a loop, however it ended: nothing of its requests stays behind"
        for request_id in ids:
            self.outputs.pop(request_id, None)
            self.engine.abort_request(request_id)

    def generate(
        self,
        prompts,  # a prompt (string, token ids, dict with "prompt" or "prompt_token_ids") or a list of prompts
        sampling_params: SamplingParams | list[SamplingParams] | None = None,  # one for all, or one each
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:  # in the order of the prompts
        "Answer all prompts, batched together; a bad one is an error that names its index, and nothing runs"
        prompts = as_prompts(prompts)
        ids = self.add(prompts, as_params(sampling_params, len(prompts)), final_only=True)
        try:
            with ThroughputBar(self.engine, len(ids), use_tqdm) as bar:
                while (done := sum(request_id in self.outputs for request_id in ids)) < len(ids):
                    self.step()
                    bar.update(done)
                bar.update(done)
            return [self.outputs[request_id] for request_id in ids]
        finally: self.finish(ids)

    def stream(
        self,
        prompt,  # one prompt, as for `generate`
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[RequestOutput]:
        "The request's output after each token, with the text so far; leaving the loop early aborts the request"
        ids = self.add([prompt], as_params(sampling_params, 1), final_only=False)
        try:
            while True:
                self.step()
                output = self.outputs.pop(ids[0], None)
                if output is not None: yield output
                if output is not None and output.finished: return
        finally: self.finish(ids)

    def chat(
        self,
        messages,  # one conversation (a list of {"role": ..., "content": ...}) or a list of conversations
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: dict | None = None,  # for the template, such as enable_thinking
    ) -> list[RequestOutput]:
        "Answer conversations, each written out by the model's own chat template"
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        return self.generate([self.chat_prompt(c, chat_template_kwargs) for c in conversations], sampling_params, use_tqdm)

    def chat_prompt(self, messages: list[dict], chat_template_kwargs: dict | None = None) -> dict:
        "A conversation as a prompt: text and token ids by the model's template"
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("chat needs a tokenizer with a chat template; use generate, or give one by tokenizer=...")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {}))
        # the template has written the special tokens: the tokenizer must not add its own
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def close(self):
        "Give the model and the cache back; closing twice is harmless"
        self.engine.exit()

    def __enter__(self): return self

    def __exit__(self, *error): self.close()
