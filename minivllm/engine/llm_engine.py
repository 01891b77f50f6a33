"The engine: requests in, steps, outputs out"
import random
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from minivllm.config import EngineConfig, as_list, load_model_config, resolve_max_model_len
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.model_runner import ModelRunner
from minivllm.engine.scheduler import Scheduler
from minivllm.engine.sequence import Sequence
from minivllm.models.loader import resolve_model
from minivllm.outputs import CompletionOutput, Detokenizer, RequestMetrics, RequestOutput
from minivllm.sampling_params import SamplingParams


@dataclass
class Request:
    "What the engine keeps of a request beside its sequence"
    request_id: str
    prompt: str | None
    seq: Sequence
    metrics: RequestMetrics
    detokenizer: Detokenizer | None  # None where only the final text is wanted


@dataclass
class EngineStats:
    "What the engine has done since it was built"
    num_steps: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed, those found in the prefix cache not among them
    num_output_tokens: int = 0


def end_token_ids(
    folder: Path,  # of the model
    config_ids: list[int],  # `eos_token_id` of config.json
    tokenizer=None,
) -> set[int]:
    "Every token that ends an answer: those of both configs, the tokenizer's own, and the one its chat template ends turns with"
    ids = set(config_ids)
    if (folder / "generation_config.json").is_file():
        ids.update(as_list(GenerationConfig.from_pretrained(folder).eos_token_id))
    if tokenizer is not None: ids.update(as_list(tokenizer.eos_token_id), chat_end_token_ids(tokenizer))
    return ids


def chat_end_token_ids(tokenizer) -> list[int]:
    "The special token that the chat template writes after an assistant's answer, if there is one"
    if not getattr(tokenizer, "chat_template", None): return []
    answer = "@answer@"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    try: text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception: return []  # a template may refuse such a short conversation: then the configs must do
    after = tokenizer.encode(text.rpartition(answer)[2].lstrip(), add_special_tokens=False)
    return [token_id for token_id in after[:1] if token_id in tokenizer.all_special_ids]


class LLMEngine:
    "Tokenizer, scheduler and runner behind four calls: add_request, step, abort_request, exit"
    def __init__(
        self,
        model: str,  # local folder, Hub id, or "smollm2-135m"
        **options,  # the other fields of `EngineConfig`
    ):
        self.runner = None
        self.config = config = EngineConfig(model, **options)
        folder = resolve_model(config.model)
        self.model_config = load_model_config(folder)
        self.max_model_len = resolve_max_model_len(config.max_model_len, self.model_config.max_position_embeddings)
        self.tokenizer = None if config.skip_tokenizer_init else AutoTokenizer.from_pretrained(config.tokenizer or folder)
        self.stop_token_ids = frozenset(end_token_ids(folder, self.model_config.eos_token_ids, self.tokenizer))
        # the runner comes before the scheduler: only it knows how many blocks there are
        self.runner = ModelRunner(config, self.model_config, folder, self.max_model_len)
        self.scheduler = Scheduler(
            BlockManager(self.runner.num_kv_blocks, config.block_size, config.enable_prefix_caching),
            config.max_num_seqs, config.max_num_batched_tokens, self.max_model_len, config.scheduling_policy)
        self.requests = {}  # request_id -> Request, the unfinished
        self.request_ids = {}  # seq_id -> request_id
        self.stats = EngineStats()
        self.seq_ids, self.random = count(), random.Random(config.seed)

    def encode(
        self,
        prompt,  # a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}
    ) -> tuple[str | None, list[int]]:  # (the text where there is one, token ids)
        "A prompt's token ids, checked; ValueError or TypeError says what is wrong with it"
        text, token_ids = (prompt.get("prompt"), prompt.get("prompt_token_ids")) if isinstance(prompt, dict) else (None, prompt)
        if isinstance(token_ids, str): text, token_ids = token_ids, None
        if token_ids is None and text is not None:
            if self.tokenizer is None: raise ValueError("skip_tokenizer_init=True: prompts must be token ids, not text")
            token_ids = self.tokenizer.encode(text)
        if not isinstance(token_ids, (list, tuple)):
            raise TypeError(f"a prompt is a string, a list of token ids, or a dict with one of these under 'prompt' or "
                            f"'prompt_token_ids', not {prompt!r}")
        if not token_ids: raise ValueError("the prompt is empty")
        vocab_size = self.model_config.vocab_size
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise ValueError(f"token id {token_id!r} is not an integer in 0..{vocab_size - 1}")
        return text, list(token_ids)

    def add_request(
        self,
        request_id: str,  # unique among the unfinished
        prompt,  # as for `encode`
        sampling_params: SamplingParams | None = None,
        final_only: bool = False,  # no outputs before the last: saves the text of every step
    ):
        "Queue a request; a bad one raises ValueError or TypeError and changes nothing"
        if self.runner is None: raise RuntimeError("the engine is closed")
        if request_id in self.requests: raise ValueError(f"request_id {request_id!r} is in use")
        params = sampling_params or SamplingParams()
        text, token_ids = self.encode(prompt)
        stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_token_ids)
        seed = params.seed if params.seed is not None else self.random.getrandbits(63)
        seq = Sequence(next(self.seq_ids), token_ids, params, self.config.block_size, stop, seed)
        self.scheduler.add(seq)
        detokenizer = None if final_only or self.tokenizer is None else Detokenizer(self.tokenizer, params.skip_special_tokens)
        self.requests[request_id] = Request(request_id, text, seq, RequestMetrics(), detokenizer)
        self.request_ids[seq.seq_id] = request_id

    def has_unfinished_requests(self) -> bool: return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        "One round of schedule, run and postprocess; outputs of the requests that ended or, unless final_only, got a token"
        if self.runner is None: raise RuntimeError("the engine is closed")
        step = self.scheduler.schedule()
        for seq, n in zip(step.seqs, step.num_tokens):
            self.stats.num_prompt_tokens += max(0, min(n, seq.num_prompt_tokens - seq.num_computed_tokens))
        token_ids = self.runner.run(step.seqs, step.num_tokens) if step.seqs else []
        finished = self.scheduler.postprocess(step, token_ids)
        now = time.perf_counter()
        self.stats.num_steps += 1
        progressed = [seq for seq, token_id in zip(step.seqs, token_ids) if token_id >= 0]
        self.stats.num_output_tokens += len(progressed)
        outputs = []
        for seq in dict.fromkeys(progressed + finished):
            request = self.requests[self.request_ids[seq.seq_id]]
            if request.metrics.first_token_time is None: request.metrics.first_token_time = now
            if seq.is_finished: outputs.append(self.close_request(request, now))
            elif request.detokenizer: outputs.append(self.output(request))
        return outputs

    def output(self, request: Request) -> RequestOutput:
        "The state of a request as the user sees it"
        seq, params = request.seq, request.seq.sampling_params
        token_ids = seq.output_token_ids
        if self.tokenizer is None: text = ""
        elif seq.is_finished: text = self.tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        else: text = request.detokenizer.update(token_ids)
        completion = CompletionOutput(0, text, token_ids, seq.finish_reason, seq.stop_reason)
        return RequestOutput(request.request_id, request.prompt, seq.token_ids[: seq.num_prompt_tokens], [completion],
                             seq.is_finished, seq.num_cached_tokens, request.metrics)

    def close_request(self, request: Request, now: float) -> RequestOutput:
        "The last output of a request; the engine forgets it"
        request.metrics.finished_time = now
        del self.requests[request.request_id], self.request_ids[request.seq.seq_id]
        return self.output(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:  # its last output; None if it isn't there any more
        "End a request at any moment and take its blocks back"
        request = self.requests.get(request_id)
        if request is None: return None
        self.scheduler.abort(request.seq)
        return self.close_request(request, time.perf_counter())

    def exit(self):
        "Give the model and the cache back; calling it again is harmless"
        if self.runner is None: return
        for request_id in list(self.requests): self.abort_request(request_id)
        self.runner.exit()
        self.runner = None
