"""How each Triton launcher of the package is called: what `kernel_targets.py` compiles

An example is named like its launcher, gets it as its first argument and is called with every combination of the values beside it, so that the launcher makes all the choices that it can make.
"""
import importlib
import itertools
from dataclasses import dataclass

import torch

from minivllm.distributed import PushTarget, ScatteredPart, place_start


DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass
class Launcher:
    "A launcher of the package, how to call it, and the values of each parameter of the call"

    name: str
    module: str
    example: object  # called with the launcher first, then with one value of each parameter
    values: dict
    dtypes: tuple = DTYPES
    targets: tuple | None = None  # where it can be called; None: everywhere
    attention: bool = False  # its tiles grow with head_dim, and with them what it needs of shared memory
    dispatcher: str | None = None  # module of the function that chooses between it and its twin, where not its own

    @property
    def toy(self):
        return self.module == "toy_kernels"  # not of the package: for the checks on the checks

    def find(self):
        return getattr(importlib.import_module(self.module), self.name)

    def cases(self):
        "Every combination of values in each dtype; `kernel_targets.select` says what is compiled of it"
        for dtype, *row in itertools.product(self.dtypes, *self.values.values()):
            yield dict(zip(self.values, row)) | {"dtype": dtype}

    def call(self, **case):
        self.example(self.find(), **case)


LAUNCHERS = {}


def launcher(module, dtypes=DTYPES, targets=None, attention=False, dispatcher=None, **values):
    "Registers an example under its own name, which is the launcher's"

    def register(example):
        name = example.__name__
        LAUNCHERS[name] = Launcher(name, module, example, values, dtypes, targets, attention, dispatcher)
        return example

    return register


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def integers(*shape, dtype=torch.int32):
    return empty(*shape, dtype=dtype)


# Sizes: of SmolLM2 (no powers of two), of Qwen3 from 0.6B to 32B, and odd ones. Heads: queries, keys.

TOKENS = (1, 65536)
HIDDEN = (576, 1024, 4096, 5120, 100)
INTERMEDIATE = (1536, 3072, 9728, 25600, 100)
HEADS = ((32, 8), (9, 3), (4, 1))
HEAD_DIMS = (128, 64, 80, 96, 256)


@launcher("minivllm.layers.activation", size=INTERMEDIATE, tokens=TOKENS)
def silu_and_mul_triton(launch, dtype, size, tokens):
    launch(empty(tokens, 2 * size, dtype=dtype))


@launcher("minivllm.layers.activation", size=INTERMEDIATE, tokens=TOKENS, approximate=("none", "tanh"))
def gelu_and_mul_triton(launch, dtype, size, tokens, approximate):
    launch(empty(tokens, 2 * size, dtype=dtype), approximate)


@launcher("minivllm.layers.layernorm", size=HIDDEN + HEAD_DIMS, tokens=TOKENS)
def rms_norm_triton(launch, dtype, size, tokens):
    weight = empty(size, dtype=dtype)
    launch(empty(tokens, size, dtype=dtype), weight, 1e-6)
    launch(empty(tokens, 24 * size, dtype=dtype).unflatten(1, (24, size))[:, :16], weight, 1e-6)  # heads in packed qkv


SPLITS = (1, 2, 8)  # of a product along its inputs; 1: whole


def in_splits(x, splits):
    "What is summed to something like `x`"
    return x if splits == 1 else x.new_empty(splits, *x.shape)


@launcher("minivllm.layers.layernorm", size=HIDDEN, tokens=TOKENS, splits=SPLITS)
def add_rms_norm_triton(launch, dtype, size, tokens, splits):
    x, residual = empty(2, tokens, size, dtype=dtype)
    launch(in_splits(x, splits), residual, empty(size, dtype=dtype), 1e-6)


@launcher("minivllm.layers.embedding_head", size=HIDDEN, tokens=(1, 16384), rank=(0, 1))
def embed_part_triton(launch, dtype, size, tokens, rank):
    ids, rows = integers(tokens + 1, dtype=torch.int64), 75968
    launch(ids[1:], empty(rows, size, dtype=dtype), rank * rows, (rank + 1) * rows)


@launcher("minivllm.layers.sampler", vocab_size=(151936, 49152, 32001, 100), rows=(256, 1), filters=("", "kpm", "k", "p"))
def sample_triton(launch, dtype, vocab_size, rows, filters):
    seeds, positions, top_k = integers(3, rows, dtype=torch.int64)
    temperature, top_p, min_p = empty(3, rows, dtype=torch.float32)
    chosen = [x if name in filters else None for name, x in zip("kpm", (top_k, top_p, min_p))]
    launch(empty(rows, vocab_size, dtype=dtype), temperature, seeds, positions, *chosen, choices=seeds)


def packed_qkv(tokens, heads, head_dim, dtype):
    num_heads, num_kv_heads = heads
    qkv = empty(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    return qkv, *qkv.unflatten(1, (-1, head_dim)).split([num_heads, num_kv_heads, num_kv_heads], dim=1)


def caches(heads, head_dim, dtype, block_size=256):
    return empty(2, 4096, block_size, heads[1], head_dim, dtype=dtype)


@launcher("minivllm.layers.rotary_embedding", head_dim=HEAD_DIMS, heads=HEADS)
def apply_rotary_triton(launch, dtype, head_dim, heads):
    _, q, k, _ = packed_qkv(64, heads, head_dim, dtype)
    for x in (q, k):
        launch(x, empty(64, 2, head_dim, dtype=torch.float32))


@launcher("minivllm.kernels.kv_cache", head_dim=HEAD_DIMS, heads=HEADS)
def store_kv_triton(launch, dtype, head_dim, heads):
    _, _, k, v = packed_qkv(64, heads, head_dim, dtype)
    launch(k, v, *caches(heads, head_dim, dtype), integers(64, dtype=torch.int64))


@launcher("minivllm.kernels.kv_cache", head_dim=HEAD_DIMS, heads=HEADS, norm=(True, False), tokens=(64, 8192), splits=SPLITS)
def norm_rope_store_triton(launch, dtype, head_dim, heads, norm, tokens, splits):
    qkv, *_ = packed_qkv(tokens, heads, head_dim, dtype)
    weights = empty(2, head_dim, dtype=dtype) if norm else (None, None)
    table, slots = empty(40960, 2, head_dim, dtype=torch.float32), integers(2, tokens, dtype=torch.int64)
    launch(in_splits(qkv, splits), slots[0], table, *weights, 1e-6, *caches(heads, head_dim, dtype), slots[1])


# Attention. A batch: query and key heads, sequences, block size; whether some begin with the same blocks

BATCHES = (((64, 8), 256, 256, True), ((9, 3), 8, 16, True), ((32, 8), 1, 64, False))


def attention_arguments(dtype, head_dim, batch, queries_each):
    "Queries, caches, block tables and context lengths of a batch"
    heads, num_seqs, block_size, _ = batch
    q = empty(num_seqs * queries_each, heads[0], head_dim, dtype=dtype)
    return q, *caches(heads, head_dim, dtype, block_size), integers(num_seqs, 128), integers(num_seqs)


@launcher("minivllm.kernels.prefill", dispatcher="minivllm.kernels.prefill_hopper", attention=True, head_dim=HEAD_DIMS, batch=BATCHES)
def paged_prefill_triton(launch, dtype, head_dim, batch):
    q, k_cache, v_cache, block_tables, context_lens = attention_arguments(dtype, head_dim, batch, queries_each=64)
    launch(q, k_cache, v_cache, block_tables, integers(len(context_lens) + 1), context_lens, head_dim**-0.5)


@launcher("minivllm.kernels.prefill_hopper", DTYPES[::2], targets=(90,), attention=True, head_dim=(128, 64), block_size=(256, 64, 16), overlap=(True, False))
def paged_prefill_hopper(launch, dtype, head_dim, block_size, overlap):
    q, k_cache, v_cache, block_tables, context_lens = attention_arguments(dtype, head_dim, ((32, 8), 8, block_size, False), queries_each=64)
    launch(q, k_cache, v_cache, block_tables, integers(9), context_lens, head_dim**-0.5, overlap=overlap)


@launcher("minivllm.kernels.decode", attention=True, head_dim=HEAD_DIMS, batch=BATCHES)
def paged_decode_triton(launch, dtype, head_dim, batch):
    from minivllm.kernels.decode import TILE_ROWS, SharedPrefixes
    arguments = attention_arguments(dtype, head_dim, batch, queries_each=1)
    num_seqs = len(arguments[-1])
    prefixes = SharedPrefixes(integers(num_seqs, TILE_ROWS), integers(num_seqs), integers(num_seqs))
    launch(*arguments, head_dim**-0.5, shared=prefixes if batch[-1] else None)


# Mixture of experts. Sizes: hidden, an expert's, number of experts, experts a token. Qwen3-30B-A3B, Mixtral, a rank of eight, and odd ones

EXPERTS = ((2048, 768, 128, 8), (4096, 14336, 8, 2), (2048, 96, 128, 8), (100, 36, 6, 3))
MOE_TOKENS = (1, 16, 256, 1024, 8192)


@launcher("minivllm.kernels.fused_moe", sizes=EXPERTS, tokens=(1, 8192), normalize=(True, False))
def route_triton(launch, dtype, sizes, tokens, normalize):
    launch(empty(tokens, sizes[2], dtype=dtype), sizes[3], normalize)


@launcher("minivllm.kernels.fused_moe", DTYPES[:1], sizes=EXPERTS, tokens=MOE_TOKENS, tile=(16, 128))
def align_triton(launch, dtype, sizes, tokens, tile):
    launch(integers(tokens, sizes[3]), sizes[2], tile)


@launcher("minivllm.kernels.fused_moe", sizes=EXPERTS, tokens=MOE_TOKENS)
def fused_moe_triton(launch, dtype, sizes, tokens):
    hidden, size, num_experts, top_k = sizes
    w13, w2 = empty(num_experts, 2 * size, hidden, dtype=dtype), empty(num_experts, hidden, size, dtype=dtype)
    launch(empty(tokens, hidden, dtype=dtype), w13, w2, empty(tokens, top_k, dtype=torch.float32), integers(tokens, top_k))


# Recorded steps: tokens from step to step


@launcher("minivllm.engine.cuda_graph", DTYPES[:1], rows=(256, 1))
def take_tokens(launch, dtype, rows):
    token_ids, unknown = integers(2, rows, dtype=torch.int64)
    launch(token_ids, unknown, integers(1, dtype=torch.int64), integers(2, 256, dtype=torch.int64))


@launcher("minivllm.engine.cuda_graph", DTYPES[:1], rows=(256, 1))
def leave_tokens(launch, dtype, rows):
    launch(integers(rows, dtype=torch.int64), integers(1, dtype=torch.int64), integers(2, 256, dtype=torch.int64))


# Sums over ranks: hidden states of a decode step, and the largest that go the short way


@launcher("minivllm.distributed", world_size=(2, 3, 8), nbytes=(8192, 2 << 20))
def one_shot_all_reduce(launch, dtype, world_size, nbytes):
    launch(empty(nbytes // dtype.itemsize, dtype=dtype), integers(world_size, dtype=torch.int64), 1)


@launcher("minivllm.distributed", world_size=(2, 3, 8))
def push_all_reduce(launch, dtype, world_size):
    launch(empty(4096, dtype=dtype), integers(world_size, dtype=torch.int64), 1)


@launcher("minivllm.distributed", size=HIDDEN, world_size=(2, 3, 8), tokens=(16, 8192))
def sum_add_norm(launch, dtype, size, world_size, tokens):
    addresses = integers(world_size, dtype=torch.int64)
    for which in (0, 1):
        launch(empty(tokens, size, dtype=dtype), empty(size, dtype=dtype), 1e-6, addresses, 1, place_start(world_size, which))


@launcher("minivllm.distributed", size=HIDDEN, world_size=(2, 3, 8), tokens=(2048, 8192))
def scattered_add_norm(launch, dtype, size, world_size, tokens):
    rows, rank = -(-tokens // world_size), world_size - 1
    targets = [empty(rows if r < rank else tokens - rank * rows, size, dtype=dtype) for r in range(world_size)]
    places = [place_start(world_size, which) for which in (0, 1)]
    for stream_rows in (tokens, len(targets[rank]), None):
        stream, weight = None if stream_rows is None else empty(stream_rows, size, dtype=dtype), empty(size, dtype=dtype)
        launch(ScatteredPart(targets), stream, weight, 1e-6, integers(world_size, dtype=torch.int64), rank, places, empty(tokens, size, dtype=dtype))


DTYPES_OF_WORDS = torch.bfloat16, torch.float16


@launcher("minivllm.distributed", DTYPES_OF_WORDS, size=HIDDEN, world_size=(2, 3, 8), rank=(0, 1, 2), splits=SPLITS)
def push_add_norm(launch, dtype, size, world_size, rank, splits):
    part = empty(16, size, dtype=dtype)
    for residual in (part, None):
        launch(in_splits(part, splits), residual, empty(size, dtype=dtype), 1e-6, integers(world_size, dtype=torch.int64), min(rank, world_size - 1))


@launcher("minivllm.distributed", DTYPES[:1], world_size=(2, 8))
def push_broadcast(launch, dtype, world_size):
    launch(integers(256, dtype=torch.int64), integers(world_size, dtype=torch.int64), 1, 0)


@launcher("minivllm.kernels.decode_fused", head_dim=(128, 64), batch=(((32, 8), 1, 64, False), ((9, 3), 2, 16, False)), norm=(True, False))
def rope_attend_triton(launch, dtype, head_dim, batch, norm):
    q, k_cache, v_cache, block_tables, context_lens = attention_arguments(dtype, head_dim, batch, queries_each=1)
    heads, num_seqs, *_ = batch
    qkv, *_ = packed_qkv(num_seqs, heads, head_dim, dtype)
    weights = empty(2, head_dim, dtype=dtype) if norm else (None, None)
    table, ids = empty(40960, 2, head_dim, dtype=torch.float32), integers(2, num_seqs, dtype=torch.int64)
    launch(qkv, ids[0], table, *weights, 1e-6, k_cache, v_cache, ids[1], block_tables, context_lens, head_dim**-0.5)


# Linear layers of few rows: outputs, inputs

FEW_ROWS = (1, 2)
PRODUCTS = ((4096, 1024), (960, 576), (6144, 4096), (1024, 3072), (4096, 12288), (100, 100))


def few_rows(dtype, rows, sizes, bias, gated=False):
    "Input, weight, and what a bias adds to the arguments"
    outputs, inputs = sizes
    size = 2 * outputs if gated else outputs
    return empty(rows, inputs, dtype=dtype), empty(size, inputs, dtype=dtype), [empty(size, dtype=dtype)] if bias else []


@launcher("minivllm.kernels.decode_linear", sizes=PRODUCTS, rows=FEW_ROWS, bias=(False, True), norm=(True, False))
def norm_linear_triton(launch, dtype, sizes, rows, bias, norm):
    x, weight, tail = few_rows(dtype, rows, sizes, bias)
    launch(x, empty(sizes[1], dtype=dtype) if norm else None, 1e-6, weight, *tail)


@launcher("minivllm.kernels.decode_linear", sizes=PRODUCTS, rows=FEW_ROWS, bias=(False, True))
def norm_gate_up_silu_triton(launch, dtype, sizes, rows, bias):
    x, weight, tail = few_rows(dtype, rows, sizes, bias, gated=True)
    launch(x, empty(sizes[1], dtype=dtype), 1e-6, weight, *tail)


@launcher("minivllm.kernels.decode_linear", sizes=PRODUCTS, rows=FEW_ROWS, bias=(False, True))
def linear_residual_triton(launch, dtype, sizes, rows, bias):
    x, weight, tail = few_rows(dtype, rows, sizes, bias)
    launch(x, weight, empty(rows, sizes[0], dtype=dtype), *tail)


@launcher("minivllm.kernels.decode_push", DTYPES_OF_WORDS, sizes=PRODUCTS, rows=(1, 2, 4), bias=(False, True), world_size=(2, 8))
def push_product(launch, dtype, sizes, rows, bias, world_size):
    x, weight, _ = few_rows(dtype, rows, sizes, False)
    target = PushTarget(integers(world_size, dtype=torch.int64), 1)
    launch(x, weight, empty(sizes[0], dtype=dtype) if bias else None, None if bias else empty(rows, sizes[0], dtype=dtype), target)


@launcher("minivllm.kernels.decode_push", DTYPES_OF_WORDS, size=(100, 1024, 4096), rows=(1, 3, 4), world_size=(2, 3, 8))
def collect(launch, dtype, size, rows, world_size):
    launch(rows, size, dtype, PushTarget(integers(world_size, dtype=torch.int64), 1))


# Toys


@launcher("toy_kernels", DTYPES[:1], num_stages=(2, 5))
def toy_matmul_triton(launch, dtype, num_stages):
    launch(empty(128, 1024, dtype=dtype), empty(1024, 128, dtype=dtype), num_stages=num_stages)


@launcher("toy_kernels", DTYPES[:1])
def toy_peek_triton(launch, dtype):
    launch(empty(128, 1024, dtype=dtype), empty(1024, 128, dtype=dtype))
