"What the engine gives back: tokens, text, reasons and times"
import time
from dataclasses import dataclass, field


@dataclass
class CompletionOutput:
    "One answer to a request"
    index: int  # which of the request's parallel outputs
    text: str  # without special tokens, unless they were asked for
    token_ids: list[int]  # all of them, the one that ended it included
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | None = None  # the stop token id, where one of the request's own ended it


@dataclass
class RequestMetrics:
    "When what happened to a request, in seconds of `time.perf_counter`"
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        "Seconds from arrival to the first output token"
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    "A request's state: its prompt, its answers, and whether they are complete"
    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens whose K/V was found in the prefix cache
    metrics: RequestMetrics


class Detokenizer:
    "Token ids to text, one at a time, never splitting a character"
    def __init__(self, tokenizer, skip_special_tokens: bool = True):
        from tokenizers.decoders import DecodeStream
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.stream, self.text, self.num_tokens = DecodeStream(skip_special_tokens=skip_special_tokens), "", 0

    def update(self, token_ids: list[int]) -> str:  # the text so far
        "Take in the tokens that are new since the last call"
        backend = self.tokenizer._tokenizer
        for token_id in token_ids[self.num_tokens:]: self.text += self.stream.step(backend, token_id) or ""
        self.num_tokens = len(token_ids)
        return self.text

