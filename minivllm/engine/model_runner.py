"Where the parts meet: weights, KV pool, batch, model and sampler turn a schedule into tokens"
from pathlib import Path

import torch

from minivllm.config import EngineConfig, ModelConfig, resolve_dtype
from minivllm.engine.batch import Batch, prepare_decode, prepare_prefill, prepare_sample, to_device
from minivllm.engine.kv_pool import allocate_kv_cache, block_bytes, cpu_budget, kv_budget, num_blocks_for
from minivllm.engine.sequence import Sequence
from minivllm.layers.attention import ForwardContext, get_attention_backend
from minivllm.layers.sampler import Sampler
from minivllm.models.loader import build_model, init_dummy_weights, load_weights
from minivllm.models.registry import get_model_class
from minivllm.sampling_params import SamplingParams


class ModelRunner:
    "Holds the model and its KV cache on one device, and runs one step at a time"
    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        folder: Path,  # with the checkpoint
        max_model_len: int,  # tokens of the longest sequence
    ):
        self.config, self.model_config, self.max_model_len = config, model_config, max_model_len
        self.device, self.block_size = config.device, config.block_size
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.model = build_model(get_model_class(model_config.architecture), model_config, self.dtype, self.device,
                                 max_position=max_model_len, backend=get_attention_backend(config.attention_backend))
        if config.load_format == "dummy": init_dummy_weights(self.model, config.seed)
        else: load_weights(self.model, folder)
        self.sampler = Sampler()
        self.kv_caches = []
        self.num_kv_blocks = config.num_kv_blocks or self.num_blocks_that_fit()
        self.kv_caches = self.allocate(self.num_kv_blocks)

    @property
    def block_bytes(self) -> int:
        "Bytes of one KV block over all layers"
        c = self.model_config
        return block_bytes(c.num_layers, self.block_size, c.num_kv_heads, c.head_dim, self.dtype)

    def allocate(self, num_blocks: int) -> list:
        "KV tensors for `num_blocks` blocks"
        c = self.model_config
        return allocate_kv_cache(c.num_layers, num_blocks, self.block_size, c.num_kv_heads, c.head_dim, self.dtype, self.device)

    def num_blocks_that_fit(self) -> int:
        "How many KV blocks the device has room for, once the largest step has shown what it needs"
        if self.device == "cpu": budget = cpu_budget()
        else: budget = self.measure_budget()
        return num_blocks_for(budget, self.block_bytes, self.config.max_num_seqs, -(-self.max_model_len // self.block_size))

    def measure_budget(self) -> float:  # bytes
        "Memory left for the KV cache on a GPU: what others and weights hold, and the peak of a warm-up step, are taken off"
        free, total = torch.cuda.mem_get_info(self.device)
        weights = torch.cuda.memory_allocated(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        peak = self.warmup_model() - weights
        return kv_budget(total, others, weights, peak, self.config.gpu_memory_utilization)

    def warmup_model(self) -> int:  # bytes allocated at the peak, without the K/V of the warm-up itself
        "Run the largest step that the configuration admits"
        budget, longest = self.config.max_num_batched_tokens, self.max_model_len - 1
        num_seqs = min(self.config.max_num_seqs, budget)
        # as many sequences as may run, the budget spread over them
        lengths = [min(longest, budget // num_seqs + (i < budget % num_seqs)) for i in range(num_seqs)]
        blocks = sum(-(-n // self.block_size) for n in lengths)
        self.kv_caches = self.allocate(blocks)
        seqs, first = [], 0
        for i, n in enumerate(lengths):
            seq = Sequence(i, [0] * n, SamplingParams(), self.block_size)
            needed = -(-n // self.block_size)
            seq.block_table.extend(range(first, first + needed))
            first += needed
            seqs.append(seq)
        for _ in range(2):  # the first pass also pays for what libraries set up once
            torch.cuda.reset_peak_memory_stats(self.device)
            self.run(seqs, lengths)
        peak = torch.cuda.max_memory_allocated(self.device) - blocks * self.block_bytes
        self.kv_caches = []
        torch.cuda.empty_cache()
        return peak

    def prepare(self, seqs: list[Sequence], num_tokens: list[int]) -> Batch:
        "The step as flat arrays"
        # a chunk of one token is no decode: it isn't the last of its sequence
        decode = all(seq.num_uncomputed_tokens == 1 for seq in seqs)
        return prepare_decode(seqs) if decode else prepare_prefill(seqs, num_tokens)

    @torch.inference_mode()
    def run_model(self, batch: Batch) -> torch.Tensor:  # `[num_sampled, vocab_size]`
        "One forward pass: logits of the rows that are sampled"
        t = to_device(batch, self.device)
        ctx = ForwardContext(t["slot_mapping"], t["block_tables"], t["context_lens"], t["cu_seqlens_q"], t["num_decodes"],
                             self.kv_caches)
        hidden_states = self.model(t["token_ids"], t["positions"], ctx)
        return self.model.compute_logits(hidden_states[t["sample_rows"]])

    @torch.inference_mode()
    def run(
        self,
        seqs: list[Sequence],  # those with a single token first
        num_tokens: list[int],  # of each sequence, in this step
    ) -> list[int]:  # per sequence; -1 where nothing was sampled, or nothing could be
        "Prepare, run, sample"
        batch = self.prepare(seqs, num_tokens)
        sampled = [i for i, (seq, n) in enumerate(zip(seqs, num_tokens)) if seq.num_computed_tokens + n == seq.num_tokens]
        token_ids = [-1] * len(seqs)
        logits = self.run_model(batch)
        if sampled:
            sampling = to_device(prepare_sample([seqs[i] for i in sampled]), self.device)
            for i, token_id in zip(sampled, self.sampler(logits, **sampling).tolist()): token_ids[i] = token_id
        return token_ids

    def exit(self):
        "Give weights and cache back"
        self.model, self.kv_caches = None, []
        if self.device != "cpu": torch.cuda.empty_cache()
