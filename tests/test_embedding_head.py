"Embedding and head: cut by vocabulary they are the whole; tied they are one"
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from minivllm.distributed import TensorParallelGroup, run_ranks
from minivllm.layers import embedding_head
from minivllm.layers.embedding_head import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import pack_weights

VOCAB, HIDDEN = 261, 8


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
