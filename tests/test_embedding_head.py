"Embedding and head: cut by vocabulary they are the whole; tied they are one"
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minivllm.distributed import TensorParallelGroup, run_ranks
from minivllm.layers import embedding_head
from minivllm.kernels.common import INTERPRETED, record_accesses
from minivllm.layers.embedding_head import (
    ParallelLMHead,
    VocabParallelEmbedding,
    embed_part,
    embed_part_kernel,
    embed_part_torch,
    embed_part_triton,
)
from minivllm.layers.linear import pack_weights
from paging import KERNEL_DEVICES

VOCAB, HIDDEN = 261, 8
DEVICE = KERNEL_DEVICES[-1]


def loaded(cls, full, tp=None):
    layer = cls(*full.shape, *([tp] if tp else []))
    layer.weight.weight_loader(layer.weight, full)
    return layer


@settings(max_examples=60, deadline=None)
@given(vocab=st.integers(1, 40), n=st.sampled_from([1, 2, 3, 4, 7]))
def test_shards_are_the_checkpoint(vocab, n):
    full = torch.randn(vocab, 3)
    layers = [loaded(VocabParallelEmbedding, full, TensorParallelGroup(rank, n)) for rank in range(n)]
    assert torch.equal(torch.cat([layer.weight for layer in layers])[:vocab], full)
    assert torch.cat([layer.weight for layer in layers])[vocab:].eq(0).all()  # padding
    assert len({layer.weight.shape for layer in layers}) == 1
    owned = [i for layer in layers for i in range(layer.start, layer.end)]
    assert owned == list(range(vocab))


def test_261_tokens_on_two_ranks():
    held = [VocabParallelEmbedding(VOCAB, HIDDEN, TensorParallelGroup(rank, 2)) for rank in range(2)]
    assert [layer.end - layer.start for layer in held] == [131, 130]


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_embedding_has_the_same_bits_on_any_number_of_ranks(n):
    full, ids = torch.randn(VOCAB, HIDDEN), torch.randint(VOCAB, (50,))
    ids[:4] = torch.tensor([0, 130, 131, 260])
    for y in run_ranks(lambda tp: loaded(VocabParallelEmbedding, full, tp)(ids), n):
        assert torch.equal(y, full[ids])


def test_a_damaged_row_spoils_no_other_token():
    full = torch.randn(6, 2)
    full[0] = torch.inf
    for y in run_ranks(lambda tp: loaded(VocabParallelEmbedding, full, tp)(torch.tensor([4, 1])), 2):
        assert torch.equal(y, full[[4, 1]])


def test_one_rank_refuses_unknown_ids():
    with pytest.raises(IndexError):
        loaded(VocabParallelEmbedding, torch.randn(VOCAB, HIDDEN))(torch.tensor([VOCAB]))


# A rank's part


def with_holes(ids):
    "The same ids, two elements apart in a longer tensor that holds no id between them"
    return torch.stack([ids, torch.full_like(ids, 1 << 40)], 1).flatten()[::2]


IDS = {
    "borders": lambda start, end: torch.tensor([start, start - 1, end - 1, end, end + 1, 0]),
    "shuffled": lambda start, end: torch.randint(VOCAB, (21,)),
    "far off": lambda start, end: torch.tensor([-1, 1 << 31, start + (1 << 32), -(1 << 62), start]),
    "strided": lambda start, end: with_holes(torch.randint(VOCAB, (16,))),
    "backwards": lambda start, end: torch.arange(VOCAB).flip(0)[3::7],
    "one everywhere": lambda start, end: torch.tensor([start]).expand(5),
    "a slice": lambda start, end: torch.randint(VOCAB, (9,))[1:2],
    "none": lambda start, end: torch.arange(0),
}
RANGES = {"first": (0, 131), "last": (131, 261), "middle": (66, 132), "one id": (77, 78), "no id": (264, 261), "empty": (50, 50)}


@pytest.mark.parametrize("hidden, dtype", [
    (1, torch.float32), (8, torch.float16), (100, torch.bfloat16), (576, torch.float32), (576, torch.bfloat16), (1300, torch.float16),
])
@pytest.mark.parametrize("start, end", RANGES.values(), ids=RANGES)
def test_kernel_gives_the_bits_of_its_twin(start, end, hidden, dtype):
    weight = torch.randn(max(end - start, 0) + 2, hidden, device=DEVICE).to(dtype)  # two rows of padding
    for name, make in IDS.items():
        with torch.device(DEVICE):
            ids = make(start, end)
        y = embed_part_triton(ids, weight, start, end)
        assert y.shape == (len(ids), hidden) and y.dtype == dtype and y.is_contiguous()
        assert torch.equal(y, embed_part_torch(ids, weight, start, end)), name
        mine = (ids >= start) & (ids < end)
        assert torch.equal(y[mine], weight[ids[mine] - start]) and not y[~mine].any(), name


def test_rows_may_lie_apart():
    wide, ids = torch.randn(6, 40, device=DEVICE), torch.tensor([3, 9, 5], device=DEVICE)
    assert torch.equal(embed_part_triton(ids, wide[:, 4:20], 3, 9), embed_part_torch(ids, wide[:, 4:20], 3, 9))
    with pytest.raises(ValueError, match="stride is 40"):
        embed_part_triton(ids, wide.T, 3, 9)
    with pytest.raises(ValueError):
        embed_part_triton(ids.view(1, 3), wide, 3, 9)


@pytest.mark.skipif(not INTERPRETED.value, reason="only the interpreter can be watched")
def test_no_row_is_read_but_the_ranks_own():
    weight, ids = torch.randn(7, 6), torch.tensor([12, 10, 13, 14, 9, 8, 15])  # rows 4 to 6 belong to no id of 10 to 13
    accesses = record_accesses(embed_part_kernel, (7, 2), ids, weight, torch.empty(7, 6), 1, 10, 14, 6, 6, BLOCK=4)
    loads = [access["elements"] for access in accesses if access["kind"] == "load"]
    columns = [range(4), range(4, 6)]
    expected = [x for block in columns for i, token in enumerate(ids.tolist())
                for x in ([i], [6 * (token - 10) + c for c in block] if 10 <= token < 14 else [])]
    assert sorted(loads) == sorted(expected)
    stored = [x for access in accesses if access["kind"] == "store" for x in access["elements"]]
    assert sorted(stored) == list(range(42))  # each number once


def test_the_kernel_blanks_what_is_no_number():
    weight = torch.full((4, 5), torch.nan, device=DEVICE)
    assert embed_part_triton(torch.tensor([3, 8], device=DEVICE), weight, 4, 8).eq(0).all()


COMPILE = """
from unittest import mock
import torch
import kernel_targets
from minivllm.kernels.common import triton
from minivllm.layers.embedding_head import embed_part_triton

launches, seen = [], set()
compile_and_launch = triton.runtime.jit.JITFunction.run

def run(kernel, *args, grid, warmup, **kwargs):
    bound, specialization, options = kernel.device_caches[90][4](*args, **kwargs)
    kernel_targets.check_launch(kernel, bound, grid)
    seen.add(f"{specialization} {options}")
    launches.append((kernel, args, grid, kwargs))

triton.runtime.driver.set_active(kernel_targets.PretendDriver(90))
with kernel_targets.pretend_gpu(90), mock.patch.object(triton.runtime.jit.JITFunction, "run", run):
    ids = torch.empty(40000, dtype=torch.int64, device="cuda")
    weight = torch.empty(75968, 4096, dtype=torch.bfloat16, device="cuda")
    for some in [ids[:n] for n in (0, 1, 2, 15, 16, 17, 256, 16384)] + [ids[1:9], ids[:32:2], ids[:64:16], ids[:1].expand(4)]:
        for start in (0, 1, 16, 17, 75968):
            embed_part_triton(some, weight, start, start + 75968)
kernel, args, grid, kwargs = launches[0]
print(len(launches), len(seen))
print(compile_and_launch(kernel, *args, grid=grid, warmup=True, **kwargs).asm["ptx"])
"""


@pytest.fixture(scope="module")
def compiled():
    "Launches for every number of tokens and rank, kernels that Triton compiles for them, and the PTX of the first"
    here = pathlib.Path(__file__).parent
    outside = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=outside, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    counts, ptx = done.stdout.split("\n", 1)
    return *map(int, counts.split()), ptx


def test_one_kernel_serves_any_number_of_tokens_and_every_rank(compiled):
    assert compiled[:2] == (55, 1)  # nothing to launch for no token


def test_nothing_is_read_before_the_kernel_in_front_has_ended(compiled):
    ptx = compiled[2]
    assert 0 < ptx.find("griddepcontrol.wait") < ptx.find("ld.global")


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_the_sum_of_the_parts_is_the_embedding(n):
    full, ids = torch.randn(VOCAB, HIDDEN), torch.tensor([0, 130, 131, 260, 7, 7, 66])
    layers = [loaded(VocabParallelEmbedding, full, TensorParallelGroup(rank, n)) for rank in range(n)]  # which can't exchange
    parts = torch.stack([layer.part(ids) for layer in layers])
    assert torch.equal(parts.sum(0), full[ids])
    assert parts.ne(0).any(-1).sum(0).eq(1).all()  # each row from one rank
    assert all(torch.equal(y, full[ids]) for y in run_ranks(lambda tp: loaded(VocabParallelEmbedding, full, tp)(ids), n))


def test_a_rank_without_ids_has_zeros_to_give():
    full, ids = torch.randn(5, HIDDEN), torch.arange(5)
    layers = [loaded(VocabParallelEmbedding, full, TensorParallelGroup(rank, 4)) for rank in range(4)]
    assert layers[3].start >= layers[3].end
    assert torch.equal(layers[3].part(ids), torch.zeros(5, HIDDEN))
    assert torch.equal(sum(layer.part(ids) for layer in layers), full)
    layers[3].weight.fill_(torch.nan)  # what stands in padding is nobody's
    assert torch.equal(layers[3].part(torch.arange(8)), torch.zeros(8, HIDDEN))


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens(n):
    layer = loaded(VocabParallelEmbedding, torch.randn(VOCAB, HIDDEN), TensorParallelGroup(n - 1, n))
    assert layer.part(torch.arange(0)).shape == (0, HIDDEN)


@pytest.mark.skipif(DEVICE != "cuda", reason="the dispatcher chooses the kernel on a GPU only")
@pytest.mark.parametrize("num_tokens", [1, 256, 16384])
def test_dispatcher_on_the_gpu(num_tokens, monkeypatch):
    weight = torch.randn(5000, 4096, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(10000, (num_tokens,), device="cuda")
    expected = embed_part_torch(ids, weight, 5000, 10000)
    monkeypatch.delattr(embedding_head, "embed_part_torch")
    assert torch.equal(embed_part(ids, weight, 5000, 10000), expected)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU's memory")
def test_offsets_beyond_32_bits():
    "Row 2**18 of 8192 numbers begins at element 2**31, of the weight and of the result"
    weight = torch.ones(2**18 + 1, 8192, dtype=torch.bfloat16, device="cuda")
    weight[-1] = torch.arange(8192, device="cuda")
    ids = torch.arange(2**18 + 1, device="cuda") + 100
    y = embed_part_triton(ids, weight, 100, 100 + len(weight))
    assert torch.equal(y, weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_logits_are_those_of_the_whole_and_only_on_rank_0(n, tied):  # F47 e
    full, head_full, x = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(5, HIDDEN)

    def rank_main(tp):
        if not tied:
            return loaded(ParallelLMHead, head_full, tp)(x)
        head = ParallelLMHead(VOCAB, HIDDEN, tp)
        head.tie(loaded(VocabParallelEmbedding, full, tp))
        return head(x)

    logits, *others = run_ranks(rank_main, n)
    assert torch.allclose(logits, F.linear(x, full if tied else head_full), atol=1e-5)
    assert logits.shape == (5, VOCAB) and all(y is None for y in others)


class TableGroup(TensorParallelGroup):
    "Ranks one after another, the last of them first; each writes its columns where rank 0 reads"

    def __init__(self, rank, world_size, table):
        super().__init__(rank, world_size)
        self.table = table

    def columns(self, shape, dtype):
        assert shape == (5, len(self.table[0]) // 2) and dtype == self.table.dtype
        return self.table[:, self.rank * shape[1] : (self.rank + 1) * shape[1]]

    def assemble(self, columns):
        return self.table if self.rank == 0 else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("product", [None, lambda x, weight: 2 * x @ weight.T])
def test_columns_are_written_where_rank_0_wants_them(product, dtype, monkeypatch):
    full, x, table = torch.randn(VOCAB, HIDDEN).to(dtype), torch.randn(5, HIDDEN).to(dtype), torch.full((5, VOCAB + 1), torch.nan, dtype=dtype)
    written, linear_into = [], embedding_head.linear_into
    monkeypatch.setattr(embedding_head, "linear_into", lambda *args: written.append(0) or linear_into(*args))
    heads = [loaded(ParallelLMHead, full, TableGroup(rank, 2, table)).to(dtype) for rank in (1, 0)]
    *others, logits = [head(x, *([product] if product else [])) for head in heads]
    assert torch.allclose(logits, (2 if product else 1) * F.linear(x, full), atol=1e-5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert len(written) == (0 if product else 2)  # the library's product needs no copy
    assert logits.shape == (5, VOCAB) and logits.data_ptr() == table.data_ptr() and others == [None]


def test_padding_is_never_sampled():
    full = torch.rand(VOCAB, HIDDEN)
    x = -torch.rand(2000, HIDDEN)  # every real logit is negative, padding would score 0
    logits = run_ranks(lambda tp: loaded(ParallelLMHead, full, tp)(x), 2)[0]
    assert logits.argmax(-1).max() < VOCAB
    assert torch.multinomial((logits / 100).softmax(-1), 5, replacement=True).max() < VOCAB


@pytest.mark.parametrize("shape", [(260, HIDDEN), (262, HIDDEN), (VOCAB, 7)])
def test_a_wrong_shape_is_refused_with_both_shapes(shape):
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, TensorParallelGroup(1, 2))
    with pytest.raises(ValueError, match=rf"\({shape[0]}, {shape[1]}\).*\({VOCAB}, {HIDDEN}\)"):
        layer.weight.weight_loader(layer.weight, torch.zeros(shape))


def tied_model(vocab=VOCAB, hidden=HIDDEN):
    embedding, head = VocabParallelEmbedding(vocab, hidden), ParallelLMHead(vocab, hidden)
    head.tie(embedding)
    return nn.ModuleDict({"embed_tokens": embedding, "lm_head": head})


def test_tied_weights_are_one_parameter_and_counted_once():  # F47 a
    model = tied_model()
    assert [name for name, _ in model.named_parameters()] == ["embed_tokens.weight"]
    assert sum(p.nbytes for p in model.parameters()) == 4 * VOCAB * HIDDEN


def test_the_tie_survives_conversion():  # F47 f
    model = tied_model().to(torch.bfloat16)
    embedding, head = model["embed_tokens"], model["lm_head"]
    assert embedding.weight.dtype == torch.bfloat16
    assert embedding.weight.data_ptr() == head.weight.data_ptr()
    embedding.weight.data.fill_(1)
    assert head(torch.ones(1, HIDDEN).bfloat16()).eq(HIDDEN).all()


def test_loading_the_embedding_after_the_tie_fills_the_head():
    model, full = tied_model(), torch.randn(VOCAB, HIDDEN)
    weight = model["embed_tokens"].weight
    weight.weight_loader(weight, full)
    x = torch.randn(2, HIDDEN)
    assert torch.allclose(model["lm_head"](x), F.linear(x, full), atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_packing_a_head_keeps_the_embedding_and_the_logits():
    full, x, ids = torch.randn(4096, 64), torch.randn(3, 64), torch.tensor([0, 4095])
    tied, untied = tied_model(4096, 64), loaded(ParallelLMHead, full)
    weight = tied["embed_tokens"].weight
    weight.weight_loader(weight, full)
    pack_weights(nn.ModuleList([tied, untied]))
    assert untied.weight.is_mkldnn and untied.packed_copy is None
    assert tied["lm_head"].packed_copy.is_mkldnn and tied["lm_head"].weight is tied["embed_tokens"].weight
    assert [name for name, _ in tied.named_parameters()] == ["embed_tokens.weight"]
    assert torch.equal(tied["embed_tokens"](ids), full[ids])
    for head in (tied["lm_head"], untied):
        torch.testing.assert_close(head(x), F.linear(x, full), atol=1e-3, rtol=1e-4)


def test_packing_a_small_tied_head_makes_no_copy():
    model = tied_model()
    pack_weights(model)
    assert model["lm_head"].packed_copy is None
