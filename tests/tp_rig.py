"Ranks as processes: what workers run must be found in a module"
import time
from multiprocessing import shared_memory
from unittest import mock

import torch

from minivllm import distributed
from minivllm.distributed import PLACE_BYTES, PeerMemory, ProcessGroup, buffer_bytes, open_store, place_start
from minivllm.engine.worker import Workers
from minivllm.kernels.decode_push import linear_sum
from minivllm.layers.layernorm import RMSNorm
from minivllm.layers.linear import RowParallelLinear


class Rank:
    "Runs functions of this module in its group"

    def __init__(self, rank, world_size, port):
        self.tp = ProcessGroup(rank, world_size, open_store(world_size, port))

    def run(self, name, *args):
        self.result = globals()[name](self.tp, *args)

    def get(self):
        return self.result


class Ranks:
    "All of them: this process is rank 0"

    def __init__(self, world_size):
        store = open_store(world_size)
        self.workers = Workers(world_size - 1, Rank, lambda rank: (rank, world_size, store.port))
        self.tp = ProcessGroup(0, world_size, store, check=self.workers.check)
        self.workers.on_failure.append(self.tp.abort)

    def run(self, name, *args):
        "Results of all ranks"
        self.workers.call("run", name, *args)
        with self.workers.guard():
            mine = globals()[name](self.tp, *args)
        return [mine, *self.workers.ask("get")]

    def close(self):
        self.workers.close()
        self.tp.close()


def collectives(tp, dst):
    x = torch.arange(6.0).view(2, 3) + 10 * tp.rank
    gathers = tp.all_gather(x), tp.all_gather(x, dim=0), tp.gather(x, dst=dst), tp.gather(x[:, :0], dst=dst)
    changed = tp.all_reduce(x.clone()), tp.broadcast(x.clone(), src=dst), tp.all_reduce(x[:0])
    return [None if y is None else y.numpy() for y in gathers + changed]


def wait_for_nobody(tp, seconds):
    "Rank 1 comes to its collective late"
    if tp.rank == 1:
        time.sleep(seconds)
    return tp.all_reduce(torch.ones(3)).numpy()


def fail_on(tp, bad_rank):
    if tp.rank == bad_rank:
        raise KeyError("a mistake")
    return tp.all_reduce(torch.ones(3)).numpy()


def biased_row_parallel(tp, x, weight, bias):
    layer = RowParallelLinear(x.shape[1], 6, bias=True, tp=tp)
    for param, loaded in ((layer.weight, weight), (layer.bias, bias)):
        layer.weight_loader(param, torch.from_numpy(loaded))
    return layer(torch.from_numpy(x).chunk(tp.world_size, dim=1)[tp.rank]).numpy()


def peers_of(tp, names):
    "This rank's view of memory that the processes share"
    segments = [shared_memory.SharedMemory(name) for name in names]
    buffers = [torch.frombuffer(segment.buf, dtype=torch.uint8)[: buffer_bytes(len(names))] for segment in segments]
    table = torch.frombuffer(segments[0].buf, dtype=torch.uint8)[buffer_bytes(len(names)) : buffer_bytes(len(names), with_table=True)]
    start = place_start(len(names), 0)
    places = [buffer[start : start + PLACE_BYTES] for buffer in buffers]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    peers = PeerMemory(tp.rank, buffers[tp.rank], addresses, table if len(table) else None, first_places=places)
    keep.append((segments, buffers, table))  # views of the segments must not outlive them
    tp.all_reduce(torch.ones(1))  # nobody's flags are reset any more
    return peers


def peer_sums(tp, names, sizes, num_calls, way):
    "Sums by a kernel, in the interpreter, through memory that the processes share"
    peers = peers_of(tp, names)
    sums = []
    for call in range(num_calls):
        x = peer_input(tp.rank, call, sizes)
        if call % 3 == tp.rank % 3:
            time.sleep(0.02)  # now this rank is late, now that
        x = getattr(distributed, way)(x, peers.addresses, tp.rank)
        sums.append(x.float().numpy())
    return sums


def peer_norms(tp, names, steps, late, way):
    "Sums with their norms, in the interpreter, one after another; parts stand in places 0 and 1 in turn"
    peers = peers_of(tp, names)
    results = []
    for call, (rows, hidden, dtype) in enumerate(steps):
        parts, residual, weight = norm_input(len(names), call, rows, hidden, dtype)
        if tp.rank == late:
            time.sleep(0.05)  # the others would have come and gone
        part = peers.place(call % 2, (rows, hidden), dtype)
        part.copy_(parts[tp.rank])
        assert peers.holds(part)
        if way == "pushed" and call % 3 == 2:
            residual = None  # the first sum of a step
        given, rest = None if residual is None else residual.clone(), (residual, weight, 1e-5, peers.addresses, tp.rank)
        if way == "pushed":
            assert distributed.fits_lines(part, len(names))
            normed, stream = distributed.push_add_norm(part, *rest)
        else:
            normed, stream = distributed.sum_add_norm(*rest, peers.places[call % 2])
        assert residual is None or torch.equal(residual, given)
        results.append((normed.float().numpy(), stream.float().numpy()))
    return results


def split_input(world_size, call, splits, rows, hidden, dtype):
    "`norm_input`, every rank's part in splits, and what they add up to, rounded"
    _, residual, weight = norm_input(world_size, call, rows, hidden, dtype)
    parts = torch.randn(world_size, splits, rows, hidden, generator=torch.Generator().manual_seed(1000 + call)).to(dtype)
    whole = parts[:, 0].float()
    for i in range(1, splits):
        whole = whole + parts[:, i].float()
    return parts, whole.to(dtype), residual, weight


def split_norms(tp, names, steps, late):
    "Sums of parts in splits, in the interpreter, each in front of that of the same parts in one piece"
    peers, results = peers_of(tp, names), []
    for call, step in enumerate(steps):
        parts, whole, residual, weight = split_input(len(names), call, *step)
        if call % 3 == 2:
            residual = None  # the first sum of a step
        for part in (parts[tp.rank], whole[tp.rank]):
            if tp.rank == late:
                time.sleep(0.02)  # the others would have come and gone
            given = part.clone()
            assert distributed.fits_lines(part, len(names))
            pair = distributed.push_add_norm(part, residual, weight, 1e-5, peers.addresses, tp.rank)
            assert torch.equal(part, given)
            results.append([y.float().numpy() for y in pair])
    return results


@mock.patch.object(distributed, "PUSH_NUMBERS", distributed.PUSH_BLOCK)  # the interpreter is slow; a count for each block of them
@mock.patch("minivllm.layers.linear.split_k", lambda num_rows, weight: 4)
def split_layers(tp, names, steps):
    "What a layer whose product may be split adds to the stream, with peers and without; whether it was split"
    results, peers = [], peers_of(tp, names)
    for call, (rows, hidden, inputs, dtype) in enumerate(steps):
        xs, weights, _, _ = product_input(len(names), call, rows, hidden, inputs, dtype)
        _, residual, weight = norm_input(len(names), call, rows, hidden, dtype)
        norm = RMSNorm(hidden, 1e-5).requires_grad_(False).to(dtype)
        norm.weight.copy_(weight)
        layer = RowParallelLinear(inputs * len(names), hidden, tp=tp, place=call % 2).to(dtype)
        layer.weight.copy_(weights[tp.rank])
        try:
            for tp.peers in (peers, None):
                part = layer(xs[tp.rank])
                x, stream = tp.add_rms_norm(part, residual, norm)
                results.append((part.dim() == 3, x.float().numpy().copy(), stream.float().numpy().copy()))
        finally:
            tp.peers = None
    return results


def scattered_norms(tp, names, steps, late):
    "Branches of decoder layers, in the interpreter: by product, by product, by anything else; long ones go to the rows' owners"
    tp.peers, distributed.SCATTER_ROWS = peers_of(tp, names), 6  # the test gives it back
    results = []
    for call, (rows, hidden, inputs, dtype) in enumerate(steps):
        xs, residual, weight = norm_input(len(names), call, rows, hidden, dtype)
        norm, g = RMSNorm(hidden, 1e-5).requires_grad_(False).to(dtype), torch.Generator().manual_seed(tp.rank)
        norm.weight.copy_(weight)
        x, residual = xs[tp.rank], residual if call % 2 else None
        for place in (0, 1, None):
            tp.rank == late and time.sleep(0.05)  # the others would have come and gone
            layer = RowParallelLinear(inputs * len(names), hidden, bias=True, tp=tp, place=place).to(dtype)
            layer.weight.copy_(torch.randn(hidden, inputs, generator=g) / 4)
            layer.bias.fill_(0.25)
            x = x[:, :inputs].contiguous()
            part = x.repeat(1, hidden)[:, :hidden] if place is None else layer(x)
            plain = part if place is None else torch.nn.functional.linear(x, layer.weight, layer.bias if tp.rank == 0 else None)
            assert isinstance(part, distributed.ScatteredPart) == (place is not None and rows >= 6)
            x, residual = tp.add_rms_norm(part, residual, norm)
            results.append([y.float().numpy().copy() for y in (plain, x, residual)])
    return results


def pushed_products(tp, names, steps, late):
    "Sums of products that push, in the interpreter, one after another; rank 1 has the residual, rank 2 the bias"
    peers, sums = peers_of(tp, names), []
    for call, (rows, size, inputs, dtype) in enumerate(steps):
        xs, weights, bias, residual = product_input(len(names), call, rows, size, inputs, dtype)
        if tp.rank == late:
            time.sleep(0.05)
        target = peers.push_target((rows, size), dtype)
        mine = bias if tp.rank == 2 else None, residual if tp.rank == 1 else None
        sums.append(linear_sum(xs[tp.rank], weights[tp.rank], *mine, target).float().numpy())
    return sums


def product_input(world_size, call, rows, size, inputs, dtype):
    "Every rank's input and weight, and what is added once"
    g = torch.Generator().manual_seed(call)
    xs, weights = torch.randn(world_size, rows, inputs, generator=g).to(dtype), torch.randn(world_size, size, inputs, generator=g).to(dtype) / 8
    return xs, weights, torch.randn(size, generator=g).to(dtype), torch.randn(rows, size + 3, generator=g).to(dtype)[:, :size]


def peer_tables(tp, names, shapes, late):
    "Tables of which each rank writes some columns, one after another, with a sum between them as in a step"
    peers, tables = peers_of(tp, names), []
    for call, (rows, size) in enumerate(shapes):
        tp.rank == late and time.sleep(0.05)
        columns = peers.columns((rows, size), torch.float32)
        columns.copy_(torch.arange(float(rows * size)).view(rows, size) + 1000 * tp.rank + call)
        table = peers.assemble(columns)
        tables.append(None if table is None else table.numpy().copy())
        peers.all_reduce(torch.ones(3))
    return tables


def norm_input(world_size, call, rows, hidden, dtype):
    "Every rank's part, the stream, and the weight of the norm"
    g = torch.Generator().manual_seed(call)
    parts = torch.randn(world_size, rows, hidden, generator=g).to(dtype)
    return parts, torch.randn(rows, hidden, generator=g).to(dtype), torch.randn(hidden, generator=g).to(dtype)


def peer_input(rank, call, sizes):
    "Numbers of a rank; those of every fifth call in half precision"
    x = torch.randn(sizes[call % len(sizes)], generator=torch.Generator().manual_seed(100 * call + rank))
    return x.to((torch.float32, torch.bfloat16, torch.float16)[(call % 5) % 3])


keep = []


# Runners of other ranks, for engines


def failing_worker(config, model_config, folder, max_model_len, rank, *args):
    "A rank whose model can't be loaded, as it looks when its memory or its disk is at an end"
    from minivllm.engine import model_runner

    def load_weights(*args):
        raise OSError(f"rank {rank} has lost its disk")

    model_runner.load_weights = load_weights
    return model_runner.make_worker(config, model_config, folder, max_model_len, rank, *args)


def short_worker(config, model_config, folder, max_model_len, rank, *args):
    "A rank with memory for five blocks"
    from minivllm.engine.model_runner import ModelRunner, make_worker

    ModelRunner.choose_num_kv_blocks = lambda self: 5
    return make_worker(config, model_config, folder, max_model_len, rank, *args)


def recording_worker(*args):
    "A rank that repeats decode steps as a GPU does with graphs"
    from minivllm.engine.model_runner import ModelRunner, make_worker

    ModelRunner.uses_graphs = lambda self: True
    return make_worker(*args)


def splitting_worker(*args):
    "A rank that splits every product that it may split"
    from minivllm.engine.model_runner import make_worker
    from minivllm.layers import linear

    linear.split_k = split_in_two
    return make_worker(*args)


def split_in_two(num_rows, weight):
    return 2


def slow_worker(*args):
    "A rank whose third step takes very long"
    from minivllm.engine.model_runner import ModelRunner, make_worker

    run_model, steps = ModelRunner.run_model, []

    def slow(self, inputs):
        steps.append(1)
        if len(steps) == 3:
            time.sleep(100)
        return run_model(self, inputs)

    ModelRunner.run_model = slow
    return make_worker(*args)
