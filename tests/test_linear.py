"Linear layers: the ranks' shards are the checkpoint, and their product is the whole product"
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from kernel_targets import pretend_gpu
from minivllm.distributed import SINGLE, TensorParallelGroup, run_ranks
from minivllm.layers.activation import silu_and_mul
from minivllm.layers.linear import (
    MIN_ONEDNN_SIZE, SPLIT_ROWS, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear,
    RowParallelLinear, copy_shard, linear, linear_split_k, load_whole, pack_weights, packed, split_k, uses_onednn,
)

WORLD_SIZES = st.sampled_from([1, 2, 4])
SIZES = st.integers(1, 5)


def load(layer, tensors, *shard_ids):
    "Fill `layer` from `{'weight': ..., 'bias': ...}`, or from one such dict per shard id"
    parts = tensors if shard_ids else [tensors]
    for part, shard_id in zip(parts, [(s,) for s in shard_ids] or [()]):
        for name, tensor in part.items():
            param = getattr(layer, name)
            param.weight_loader(param, tensor, *shard_id)
    return layer


def tensors(rows, columns):
    return {"weight": torch.randn(rows, columns), "bias": torch.randn(rows)}


def ranks_hold(world_size, make, *shards):
    "The weights and biases of every rank"
    layers = [load(make(TensorParallelGroup(rank, world_size)), *shards) for rank in range(world_size)]
    return [layer.weight for layer in layers], [layer.bias for layer in layers]


@settings(max_examples=50, deadline=None)
@given(n=WORLD_SIZES, rows=SIZES, columns=SIZES)
def test_column_shards_are_the_checkpoint(n, rows, columns):
    full = tensors(rows * n, columns)
    weights, biases = ranks_hold(n, lambda tp: ColumnParallelLinear(columns, rows * n, True, tp), full)
    assert torch.equal(torch.cat(weights), full["weight"]) and torch.equal(torch.cat(biases), full["bias"])


@settings(max_examples=50, deadline=None)
@given(n=WORLD_SIZES, rows=SIZES, columns=SIZES)
def test_row_shards_are_the_checkpoint(n, rows, columns):
    full = tensors(rows, columns * n)
    weights, biases = ranks_hold(n, lambda tp: RowParallelLinear(columns * n, rows, True, tp), full)
    assert torch.equal(torch.cat(weights, 1), full["weight"])
    assert all(torch.equal(bias, full["bias"]) for bias in biases)


@settings(max_examples=50, deadline=None)
@given(n=WORLD_SIZES, sizes=st.lists(SIZES, min_size=1, max_size=4), columns=SIZES)
def test_merged_shards_are_the_checkpoint(n, sizes, columns):
    full = [tensors(size * n, columns) for size in sizes]

    def make(tp):
        return MergedColumnParallelLinear(columns, [size * n for size in sizes], True, tp)

    weights, biases = ranks_hold(n, make, full, *range(len(sizes)))
    for held, name in [(weights, "weight"), (biases, "bias")]:
        for i, parts in enumerate(zip(*[w.split(sizes) for w in held])):
            assert torch.equal(torch.cat(parts), full[i][name])


@settings(max_examples=80, deadline=None)
@given(n=WORLD_SIZES, kv_heads=st.sampled_from([1, 2, 4, 8]), group=SIZES, head_dim=SIZES, columns=SIZES)
def test_qkv_shards_are_the_checkpoint(n, kv_heads, group, head_dim, columns):
    heads = kv_heads * group * n  # always divisible
    full = [tensors(count * head_dim, columns) for count in (heads, kv_heads, kv_heads)]
    weights, biases = ranks_hold(n, lambda tp: QKVParallelLinear(columns, head_dim, heads, kv_heads, True, tp), full, *"qkv")
    copies = max(1, n // kv_heads)
    q_rows, kv_rows = heads // n * head_dim, max(1, kv_heads // n) * head_dim
    for held, name in [(weights, "weight"), (biases, "bias")]:
        q, k, v = zip(*[w.split([q_rows, kv_rows, kv_rows]) for w in held])
        assert torch.equal(torch.cat(q), full[0][name])
        for parts, whole in [(k, full[1][name]), (v, full[2][name])]:
            assert torch.equal(torch.cat(parts[::copies]), whole)
            assert all(torch.equal(parts[i], parts[i - i % copies]) for i in range(n))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_query_heads_find_their_key_value_heads_on_the_same_rank(n):
    heads, kv_heads = 8, 4
    full = [{"weight": torch.arange(float(count)).view(count, 1)} for count in (heads, kv_heads, kv_heads)]
    for rank in range(n):
        layer = load(QKVParallelLinear(1, 1, heads, kv_heads, tp=TensorParallelGroup(rank, n)), full, *"qkv")
        q, k, v = layer.weight.flatten().split([layer.num_heads, layer.num_kv_heads, layer.num_kv_heads])
        group = layer.num_heads // layer.num_kv_heads
        for i, head in enumerate(q.tolist()):
            assert k[i // group] == v[i // group] == head // (heads // kv_heads)


def test_replicated_and_parameters_without_a_loader():
    full = tensors(3, 5)
    for rank in range(2):
        layer = load(ReplicatedLinear(5, 3, True, TensorParallelGroup(rank, 2)), full)
        assert torch.equal(layer.weight, full["weight"]) and torch.equal(layer.bias, full["bias"])
    norm = nn.Parameter(torch.ones(4))
    load_whole(norm, torch.arange(4.0))
    assert norm.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_row_parallel_bias_counts_once(n):  # F48
    full, x = {"weight": torch.randn(6, 8), "bias": torch.arange(6.0)}, torch.randn(3, 8)

    def rank_main(tp):
        return load(RowParallelLinear(8, 6, True, tp), full)(x.chunk(n, 1)[tp.rank])

    for y in run_ranks(rank_main, n):
        assert torch.allclose(y, F.linear(x, full["weight"], full["bias"]), atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_mlp_of_several_ranks_is_the_mlp(n):
    gate, up, down, x = tensors(12, 8), tensors(12, 8), tensors(8, 12), torch.randn(5, 8)

    def rank_main(tp):
        gate_up = load(MergedColumnParallelLinear(8, [12, 12], True, tp), [gate, up], 0, 1)
        return load(RowParallelLinear(12, 8, True, tp), down)(silu_and_mul(gate_up(x)))

    hidden = F.silu(F.linear(x, **gate)) * F.linear(x, **up)
    for y in run_ranks(rank_main, n):
        assert torch.allclose(y, F.linear(hidden, **down), atol=1e-4)


class Slice:
    "A lazy tensor that notes how much of it was read"

    def __init__(self, file, name):
        self.slice, self.read = file.get_slice(name), 0
        self.shape = tuple(self.slice.get_shape())

    def __getitem__(self, index):
        part = self.slice[index]
        self.read += part.numel()
        return part


def test_a_rank_reads_only_its_part_of_a_file(tmp_path):
    full = {"qkv": torch.randn(16, 8), "o": torch.randn(6, 8), "b": torch.randn(6)}
    save_file(full, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        for rank in range(4):
            tp = TensorParallelGroup(rank, 4)
            column, row = ColumnParallelLinear(8, 16, tp=tp), RowParallelLinear(8, 6, True, tp)
            slices = {name: Slice(file, name) for name in full}
            load(column, {"weight": slices["qkv"]})
            load(row, {"weight": slices["o"], "bias": slices["b"]})
            assert (slices["qkv"].read, slices["o"].read, slices["b"].read) == (32, 12, 6)
            assert torch.equal(column.weight, full["qkv"][4 * rank : 4 * rank + 4])
            assert torch.equal(row.weight, full["o"][:, 2 * rank : 2 * rank + 2])
            assert torch.equal(row.bias, full["b"])


def test_copy_shard_converts_the_dtype():
    target = torch.empty(2, 3)
    copy_shard(target, torch.ones(4, 3, dtype=torch.bfloat16), 0, 4, 2)
    assert target.dtype == torch.float32 and target.eq(1).all()


@pytest.mark.parametrize("make, shape, shard_id", [
    (lambda tp: ColumnParallelLinear(8, 12, tp=tp), (16, 8), ()),
    (lambda tp: ColumnParallelLinear(8, 12, tp=tp), (12, 9), ()),
    (lambda tp: RowParallelLinear(8, 12, tp=tp), (12, 4), ()),
    (lambda tp: ReplicatedLinear(8, 12, tp=tp), (6, 8), ()),
    (lambda tp: MergedColumnParallelLinear(8, [12, 12], tp=tp), (24, 8), (0,)),
    (lambda tp: QKVParallelLinear(8, 4, 4, 2, tp=tp), (16, 8), ("k",)),
])
def test_a_wrong_shape_is_refused_with_both_shapes(make, shape, shard_id):
    layer = make(TensorParallelGroup(1, 2))
    before = layer.weight.data.fill_(7).clone()
    with pytest.raises(ValueError, match=rf"checkpoint shape \({shape[0]}, {shape[1]}\).*\(\d+, \d+\)"):
        layer.weight.weight_loader(layer.weight, torch.zeros(shape), *shard_id)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("make, message", [
    (lambda tp: ColumnParallelLinear(8, 9, tp=tp), "output size 9 .* 2 ranks"),
    (lambda tp: RowParallelLinear(9, 8, tp=tp), "input size 9 .* 2 ranks"),
    (lambda tp: MergedColumnParallelLinear(8, [9, 11], tp=tp), "output size 9 .* 2 ranks"),
    (lambda tp: QKVParallelLinear(8, 4, 9, 3, tp=tp), "query heads 9 .* 2 ranks"),
    (lambda tp: QKVParallelLinear(8, 4, 6, 3, tp=tp), "key/value heads 3 .* 2 ranks"),
])
def test_what_does_not_divide_is_refused_with_the_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make(TensorParallelGroup(0, 2))


def test_ranks_that_can_not_share_the_key_value_heads():
    with pytest.raises(ValueError, match="4 ranks .* 3 key/value heads"):
        QKVParallelLinear(8, 4, 12, 3, tp=TensorParallelGroup(0, 4))


LARGE = (512, 384)  # more than MIN_ONEDNN_SIZE elements


@pytest.mark.parametrize("shape", [LARGE, (5, 7), (261, 64)])
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 64])
def test_linear_is_the_product(shape, rows):
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(rows, shape[1])
    for w in (weight, packed(nn.Parameter(weight, requires_grad=False))):
        for b in (None, bias):
            torch.testing.assert_close(linear(x, w, b), F.linear(x, weight, b), atol=1e-3, rtol=1e-4)


def test_linear_takes_strided_and_higher_dimensional_inputs():
    weight, wide = torch.randn(LARGE), torch.randn(2, 3, 2 * LARGE[1])
    for x in (wide[..., : LARGE[1]], wide[0, :, ::2], torch.randn(LARGE[1], 4).t()):
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", [LARGE, (5, 7)])
def test_an_input_of_the_wrong_size_is_refused_with_both_shapes(shape):
    with pytest.raises(ValueError, match=rf"\(2, {shape[1] + 1}\).*\({shape[0]}, {shape[1]}\)"):
        linear(torch.randn(2, shape[1] + 1), torch.randn(shape))


def test_only_large_float32_weights_go_to_onednn():
    assert LARGE[0] * LARGE[1] >= MIN_ONEDNN_SIZE
    assert uses_onednn(torch.empty(LARGE)) == torch.backends.mkldnn.is_available()
    assert not uses_onednn(torch.empty(8, 8)) and not uses_onednn(torch.empty(LARGE, dtype=torch.bfloat16))
    assert not uses_onednn(torch.empty(LARGE, device="meta"))


def test_half_precision_layers_compute():
    layer = ColumnParallelLinear(LARGE[1], LARGE[0]).to(torch.bfloat16)
    layer.weight.data.normal_()
    pack_weights(layer)
    assert layer(torch.randn(2, LARGE[1]).bfloat16()).dtype == torch.bfloat16


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_packing_keeps_the_product_and_refuses_to_be_loaded():
    small, large = ColumnParallelLinear(8, 8), RowParallelLinear(LARGE[1], LARGE[0], bias=True)
    model, x = nn.ModuleList([small, nn.LayerNorm(3), large]), torch.randn(8, LARGE[1])
    for param in model.parameters():
        param.data.normal_()
    before, weight = large(x), large.weight.data.clone()
    pack_weights(model)
    assert large.weight.is_mkldnn and not small.weight.is_mkldnn
    assert large.weight.shape == LARGE and torch.equal(large.weight.to_dense(), weight)
    torch.testing.assert_close(large(x), before, atol=1e-3, rtol=1e-4)
    again = large.weight
    pack_weights(model)
    assert large.weight is again
    with pytest.raises(ValueError, match="packed already"):
        large.weight.weight_loader(large.weight, torch.zeros(LARGE))


def test_layers_need_no_group():
    assert ColumnParallelLinear(4, 4).tp is SINGLE


# Products that are split along their inputs, whose sum a kernel behind them forms


WIDTHS = st.one_of(st.integers(1, 300).map(lambda n: 64 * n), st.integers(1, 20_000))
HALF = st.sampled_from([torch.bfloat16, torch.float16])


@pytest.mark.parametrize("capability", [80, 90])
@settings(max_examples=200, deadline=None)
@given(num_rows=st.one_of(st.sampled_from(SPLIT_ROWS), st.integers(0, 5000)), output_size=WIDTHS, input_size=WIDTHS, dtype=HALF)
def test_shares_of_a_split_are_equal_and_whole(capability, num_rows, output_size, input_size, dtype):
    with pretend_gpu(capability):
        splits = split_k(num_rows, torch.empty(output_size, input_size, device="cuda", dtype=dtype))
    assert splits >= 1 and splits & (splits - 1) == 0
    if splits > 1:
        assert input_size % splits == 0 and input_size // splits % 64 == 0 and num_rows in SPLIT_ROWS


def test_what_is_split():
    "On a GPU a deep and narrow product of a decode step, in bfloat16"
    with pretend_gpu(90):
        weight = torch.empty(1024, 8192, device="cuda", dtype=torch.bfloat16)
        assert split_k(64, weight) > 1 and split_k(64, weight.half()) == 1
        assert split_k(64, weight.float()) == split_k(64, weight.double()) == 1
        for num_rows in (0, SPLIT_ROWS.start - 1, SPLIT_ROWS.stop, 100_000):
            assert split_k(num_rows, weight) == 1
    for dtype in (torch.bfloat16, torch.float32):
        assert split_k(64, torch.empty(1024, 8192, dtype=dtype)) == 1


@settings(max_examples=60, deadline=None)
@given(
    splits=st.sampled_from([1, 2, 3, 4, 8]), share=st.integers(1, 70), rows=st.integers(0, 20), size=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), strided=st.booleans(),
)
def test_splits_add_up_to_the_product(splits, share, rows, size, dtype, strided):
    x, weight = (torch.randn(n, 2 * splits * share).to(dtype) for n in (rows, size))
    x, weight = (t[:, : splits * share] if strided else t[:, : splits * share].contiguous() for t in (x, weight))
    parts = linear_split_k(x, weight, splits)
    assert parts.shape == (splits, rows, size) and parts.dtype == dtype and parts.is_contiguous()
    each = x.double().unflatten(1, (splits, share)).transpose(0, 1) @ weight.double().unflatten(1, (splits, share)).permute(1, 2, 0)
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(parts.double(), each, rtol=tolerance, atol=20 * share * 2**-23 + 1e-3 * (dtype != torch.float32))
    whole = x.double() @ weight.double().T
    assert ((parts.double().sum(0) - whole).abs() <= tolerance * each.abs().sum(0) + 20 * share * splits * 2**-23 + 1e-3 * (dtype != torch.float32)).all()


def split_into(monkeypatch, splits, seen=None):
    "Every product is split"
    monkeypatch.setattr("minivllm.layers.linear.split_k", lambda *args: [splits, seen is None or seen.append(args)][0])


class Summing(TensorParallelGroup):
    "One of two ranks, whose norms sum splits of some shapes"

    def __init__(self, *shapes):
        super().__init__(1, 2)
        self.shapes, self.asked = shapes, []

    def sums_splits(self, shape, dtype):
        self.asked.append((tuple(shape), dtype))
        return tuple(shape) in self.shapes

    def all_reduce(self, x):
        return x


@pytest.mark.parametrize("tp", [SINGLE, Summing((5, 6))])
def test_a_row_parallel_product_in_front_of_a_norm_is_split(tp, monkeypatch):
    seen = []
    split_into(monkeypatch, 4, seen)
    layer, x = RowParallelLinear(16 * tp.world_size, 6, tp=tp, place=0), torch.randn(5, 16)
    layer.weight.normal_()
    parts = layer(x)
    assert torch.equal(parts, linear_split_k(x, layer.weight, 4)) and parts.shape == (4, 5, 6)
    torch.testing.assert_close(parts.sum(0), F.linear(x, layer.weight))
    assert [(num_rows, weight is layer.weight) for num_rows, weight in seen] == [(5, True)]


@pytest.mark.parametrize("tp", [SINGLE, Summing((5, 6))])
@pytest.mark.parametrize("options", [dict(place=0, bias=True), dict(place=1, bias=True), dict(place=None), dict(place=None, bias=True)])
def test_a_row_parallel_product_that_no_norm_sums_stays_whole(tp, options, monkeypatch):
    split_into(monkeypatch, 4)
    layer, x = RowParallelLinear(16 * tp.world_size, 6, tp=tp, **options), torch.randn(5, 16)
    for param in layer.parameters():
        param.data.normal_()
    bias = layer.bias if tp.rank == 0 else None
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, bias))


def test_a_group_decides_whether_its_parts_are_split(monkeypatch):
    split_into(monkeypatch, 2)
    tp = Summing((5, 6), (9, 6))
    layer = RowParallelLinear(32, 6, tp=tp, place=1).to(torch.bfloat16)
    layer.weight.normal_()
    assert [layer(torch.ones(n, 16).bfloat16()).dim() for n in (5, 6, 9)] == [3, 2, 3]
    assert tp.asked == [((n, 6), torch.bfloat16) for n in (5, 6, 9)]
    assert RowParallelLinear(32, 6, tp=TensorParallelGroup(1, 2), place=0)(torch.ones(5, 16)).shape == (5, 6)
    split_into(monkeypatch, 1)
    assert RowParallelLinear(16, 6, place=0)(torch.ones(5, 16)).shape == (5, 6)
    assert len(tp.asked) == 3  # the rule is asked first


@pytest.mark.parametrize("tp", [SINGLE, TensorParallelGroup(1, 2)])
@pytest.mark.parametrize("options", [dict(may_split=True), dict(may_split=True, bias=True), dict(), dict(bias=True)])
def test_a_qkv_product_is_split_where_the_layer_behind_sums(options, tp, monkeypatch):
    seen = []
    split_into(monkeypatch, 4, seen)
    layer, x = QKVParallelLinear(16, 3, 4, 2, tp=tp, **options), torch.randn(5, 16)
    for param in layer.parameters():
        param.data.normal_()
    y, split = layer(x), options == dict(may_split=True)
    assert y.shape == ((4,) if split else ()) + (5, 24 // tp.world_size) and len(seen) == split
    torch.testing.assert_close(y.sum(0) if split else y, F.linear(x, layer.weight, layer.bias))
    if split:
        assert torch.equal(y, linear_split_k(x, layer.weight, 4)) and seen[0][0] == 5 and seen[0][1] is layer.weight
        split_into(monkeypatch, 1)
        assert torch.equal(layer(x), F.linear(x, layer.weight))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_layers_whose_products_may_be_split_hold_the_same_shards(n):
    row, qkv = tensors(6, 8 * n), [tensors(count * 2, 8) for count in (4, 2, 2)]
    for bias in (False, True):
        full_row, *full_qkv = [full if bias else {"weight": full["weight"]} for full in (row, *qkv)]
        for rank in range(n):
            tp = TensorParallelGroup(rank, n)
            plain, placed = (load(RowParallelLinear(8 * n, 6, bias, tp, place), full_row) for place in (None, 1))
            whole, split = (load(QKVParallelLinear(8, 2, 4, 2, bias, tp, may_split), full_qkv, *"qkv") for may_split in (False, True))
            for ours, expected in ((placed, plain), (split, whole)):
                states = ours.state_dict(), expected.state_dict()
                assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_a_split_product_of_a_packed_weight_is_never_asked_for():
    "oneDNN's layout can't be cut; it is for the CPU, where nothing is split"
    layer = RowParallelLinear(LARGE[1], LARGE[0], place=0)
    layer.weight.data.normal_()
    pack_weights(layer)
    x = torch.randn(64, LARGE[1])
    assert torch.equal(layer(x), linear(x, layer.weight))
