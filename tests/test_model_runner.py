"One runner, driven by hand: chunks, batches, start-up and what happens when it fails"
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rigs import DEVICE, RIGS, check_greedy, reference_logits, tiny_model

from minivllm.config import EngineConfig, load_model_config
from minivllm.engine import model_runner
from minivllm.engine.batch import prepare_extras, prepare_sample
from minivllm.engine.block_manager import BlockManager
from minivllm.engine.kv_pool import GIB
from minivllm.engine.model_runner import (
    ModelRunner, dummy_seqs, largest_step, measure_budget, peak_of, warmup_model,
)
from minivllm.engine.sequence import Sequence
from minivllm.layers.attention import ATTENTION_BACKENDS, FlashAttentionBackend, TritonAttentionBackend
from minivllm.models.loader import CheckpointError
from minivllm.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(30, 50))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_runner(name="qwen3", max_model_len=64, **options):
    "A runner for a tiny model of the rig"
    folder, _ = tiny_model(name)
    options = {**dict(device=DEVICE, dtype="float32", block_size=4, num_kv_blocks=64, max_num_seqs=4, max_num_batched_tokens=64),
               **options}
    return ModelRunner(EngineConfig(str(folder), **options), load_model_config(folder), folder, max_model_len)


def admit(runner, manager, *prompts, params=GREEDY):
    "Sequences with blocks for all their tokens"
    seqs = [Sequence(i, prompt, params, runner.block_size) for i, prompt in enumerate(prompts)]
    for seq in seqs: manager.allocate_with_cache(seq, manager.lookup(seq))
    return seqs


def advance(runner, manager, seqs, num_tokens):
    "One step, its results noted down"
    for seq, n in zip(seqs, num_tokens): manager.append(seq, seq.num_computed_tokens + n)
    token_ids = runner.run(seqs, num_tokens)
    for seq, n, token_id in zip(seqs, num_tokens, token_ids):
        before = seq.num_computed_tokens
        seq.num_computed_tokens += n
        manager.cache_full_blocks(seq, before)
        if token_id >= 0: seq.append_token(token_id)
    return token_ids


def generate(runner, prompt, budget=64, num_output_tokens=6):
    "Greedy tokens of one request in chunks of at most `budget`, and what every step returned"
    manager, returned = BlockManager(runner.num_kv_blocks, runner.block_size), []
    seq, = admit(runner, manager, prompt)
    while seq.num_output_tokens < num_output_tokens:
        returned += advance(runner, manager, [seq], [min(seq.num_uncomputed_tokens, budget)])
    return seq.output_token_ids, returned


# steps

@pytest.mark.parametrize("name", RIGS)
def test_any_chunk_size_gives_transformers_tokens(name):
    runner, (_, reference) = make_runner(name), tiny_model(name)
    whole, _ = generate(runner, PROMPT)
    check_greedy(reference, PROMPT, whole)
    for budget in (1, 3, 7, 8, 20):
        output, returned = generate(runner, PROMPT, budget)
        assert output == whole
        chunks = -(-20 // budget)
        assert returned[: chunks - 1] == [-1] * (chunks - 1) and returned[chunks - 1 :] == whole


def test_after_a_prefix_hit_positions_go_on_and_logits_are_those_of_the_whole():  # F09 a
    runner, (_, reference) = make_runner(), tiny_model("qwen3")
    manager = BlockManager(runner.num_kv_blocks, 4)
    first, = admit(runner, manager, [*range(20, 28), 1])
    advance(runner, manager, [first], [9])
    second, = admit(runner, manager, [*range(20, 28), 30, 31, 32])
    assert second.num_computed_tokens == 8
    seen = []
    runner.model.register_forward_pre_hook(lambda module, args: seen.append(args[1].tolist()))
    logits = runner.run_model(runner.prepare_prefill([second], [3]))
    assert seen == [[8, 9, 10]]
    torch.testing.assert_close(logits[0], reference_logits(reference, second.token_ids)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_layer_gives_transformers_hidden_states(name):  # F54
    runner, (_, reference) = make_runner(name), tiny_model(name)
    ours, theirs = [], []
    for layer in runner.model.model.layers: layer.register_forward_hook(lambda module, args, out: ours.append(out[0] + out[1]))
    hooks = [layer.register_forward_hook(lambda module, args, out: theirs.append(out[0] if isinstance(out, tuple) else out))
             for layer in reference.model.layers]
    try: reference_logits(reference, PROMPT)
    finally: [hook.remove() for hook in hooks]
    seq, = admit(runner, BlockManager(runner.num_kv_blocks, 4), PROMPT)
    runner.run_model(runner.prepare_prefill([seq], [20]))
    assert len(ours) == len(theirs) == 2
    tolerance = 5e-5 if DEVICE == "cuda" else 1e-5  # the reference runs on the CPU; a GPU adds in another order
    for mine, other in zip(ours, theirs): torch.testing.assert_close(mine, other.reshape(mine.shape), atol=tolerance, rtol=tolerance)


def test_only_sampled_rows_reach_the_head():
    runner = make_runner()
    manager, seen = BlockManager(64, 4), []
    runner.model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    a, b = admit(runner, manager, PROMPT, [1, 2, 3])
    assert advance(runner, manager, [b, a], [3, 5])[1] == -1
    advance(runner, manager, [a], [5])
    advance(runner, manager, [b, a], [1, 10])
    assert seen == [1, 0, 2]


def test_decodes_chunks_and_prompts_in_one_step_equal_solo_runs():
    runner = make_runner()
    manager = BlockManager(64, 4, enable_prefix_caching=False)
    long, short, middle = admit(runner, manager, PROMPT, [3], list(range(9)))
    steps = [([short, middle, long], [1, 9, 6]), ([short, middle, long], [1, 1, 1]), ([middle, long], [1, 13]), ([middle, long], [1, 1])]
    for seqs, num_tokens in steps:
        returned = advance(runner, manager, seqs, num_tokens)
        assert [token_id >= 0 for token_id in returned] == [seq.num_uncomputed_tokens == 1 for seq in seqs]
    for seq in (long, short, middle):
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        assert seq.output_token_ids == generate(runner, prompt, num_output_tokens=seq.num_output_tokens)[0]


def launch_ahead(runner, manager, schedule):
    "Launch step after step, the results of each taken when the next is on its way; the launched steps"
    launched, previous = [], None
    for seqs, num_tokens in schedule:
        for seq, n in zip(seqs, num_tokens): manager.append(seq, seq.num_computed_tokens + n)
        step = runner.launch(seqs, num_tokens, previous)
        for seq, n in zip(seqs, num_tokens):
            seq.num_computed_tokens += n
            if seq.num_uncomputed_tokens == 0: seq.append_unknown_token()
        for earlier, token_ids in launched[-1:]:
            for seq, token_id in zip(earlier, previous.wait()):
                token_ids.append(token_id)
                if token_id >= 0: seq.set_unknown_token(token_id)
        launched.append((seqs, []))
        previous = step
    return launched, previous


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, top_k=20)], ids=["greedy", "sampled"])
def test_a_launch_with_unknown_tokens_gives_the_tokens_of_a_run(params):
    "Decodes alone, and beside chunks of a prompt, with rows that change places between the steps"
    runner = make_runner()

    def requests():
        manager = BlockManager(64, 4, enable_prefix_caching=False)
        return manager, admit(runner, manager, PROMPT, [3], list(range(9)), params=params)

    def schedule(long, short, middle):
        return [([short, middle, long], [1, 9, 6]), ([short, middle, long], [1, 1, 1]), ([middle, short, long], [1, 1, 13]),
                ([long, middle], [1, 1]), ([middle, long], [1, 1])]

    manager, seqs = requests()
    expected = [advance(runner, manager, *step) for step in schedule(*seqs)]
    manager, again = requests()
    launched, last = launch_ahead(runner, manager, schedule(*again))
    assert [token_ids for _, token_ids in launched[:-1]] + [last.wait()] == expected
    assert any(seq.num_unknown_tokens for seq in again) and last.rows == {2: 0, 0: 1}


def test_a_token_that_could_not_be_sampled_disturbs_nobody_in_the_next_launch():
    runner = make_runner()
    manager = BlockManager(64, 4, enable_prefix_caching=False)
    seqs = admit(runner, manager, PROMPT, [1, 2, 3])
    previous = runner.launch(seqs, [20, 3])
    with torch.inference_mode(): previous.tokens[1] = -1
    for seq, n in zip(seqs, [20, 3]):
        seq.num_computed_tokens = n
        seq.append_unknown_token()
        manager.append(seq, n + 1)
    expected, _ = generate(make_runner(), PROMPT, num_output_tokens=2)
    assert runner.launch(seqs, [1, 1], previous).wait()[0] == expected[1]


def test_a_chunk_brings_nothing_and_knows_all():
    runner = make_runner()
    seq, = admit(runner, BlockManager(64, 4), PROMPT)
    step = runner.launch([seq], [8])
    assert step.tokens is None and step.rows == {} and step.wait() == [-1]
    seq.num_computed_tokens = 8
    assert runner.launch([seq], [12], step).wait() == generate(make_runner(), PROMPT, num_output_tokens=1)[0]


def test_greedy_and_sampled_rows_of_one_step_keep_to_themselves():
    runner = make_runner()
    alone, _ = generate(runner, PROMPT, num_output_tokens=8)
    manager = BlockManager(64, 4, enable_prefix_caching=False)
    greedy, = admit(runner, manager, PROMPT)
    hot = Sequence(7, [5, 6, 7], SamplingParams(temperature=1.5, top_p=0.9), 4, seed=3)
    manager.allocate_with_cache(hot, [])
    advance(runner, manager, [hot, greedy], [3, 20])
    for _ in range(7): advance(runner, manager, [greedy, hot], [1, 1])
    assert greedy.output_token_ids == alone and len(set(hot.output_token_ids)) > 1


def test_contents_of_neighbours_change_no_bit():
    runner = make_runner()

    def logits_beside(neighbour):
        seqs = admit(runner, BlockManager(64, 4), PROMPT, neighbour)
        return runner.run_model(runner.prepare_prefill(seqs, [20, len(neighbour)]))[0]

    assert torch.equal(logits_beside(list(range(100, 111))), logits_beside([7] * 11))


def test_a_row_that_can_not_be_sampled_harms_nobody():  # F39
    runner = make_runner()
    a, b = admit(runner, BlockManager(64, 4), PROMPT, [1, 2, 3])
    run_model = runner.run_model

    def spoiled(inputs):
        logits = run_model(inputs)
        logits[1] = torch.nan
        return logits

    runner.run_model = spoiled
    assert runner.run([a, b], [20, 3]) == [generate(make_runner(), PROMPT, num_output_tokens=1)[0][0], -1]


# the largest step

@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 100))
def test_largest_step_uses_up_whatever_is_allowed(max_num_seqs, budget, longest):
    num_tokens = largest_step(max_num_seqs, budget, longest)
    assert len(num_tokens) == min(max_num_seqs, budget)
    assert sum(num_tokens) == min(budget, longest * len(num_tokens))
    assert all(1 <= n <= longest for n in num_tokens)
    assert num_tokens == sorted(num_tokens, key=lambda n: n > 1)
    assert num_tokens[-1] == min(longest, budget - len(num_tokens) + 1)


@pytest.mark.parametrize("options", [{}, dict(max_num_batched_tokens=3), dict(max_num_seqs=1), dict(max_model_len=2), dict(block_size=16)])
def test_warmup_runs_the_largest_step_and_leaves_no_cache(options, monkeypatch):
    runner, ran = make_runner(**options), []

    def peak_of(runner, seqs, num_tokens):
        assert len(runner.kv_caches[0][0]) == 1  # one block is enough
        ran.append((seqs, num_tokens, runner.run(seqs, num_tokens)))
        return 123

    monkeypatch.setattr(model_runner, "peak_of", peak_of)
    assert warmup_model(runner) == 123 and runner.kv_caches == []
    (seqs, num_tokens, token_ids), = ran
    config, longest = runner.config, runner.max_model_len - 1
    assert num_tokens == largest_step(config.max_num_seqs, config.max_num_batched_tokens, longest)
    assert all(seq.num_tokens == longest and seq.num_uncomputed_tokens == n for seq, n in zip(seqs, num_tokens))
    assert all(token_id >= 0 for token_id in token_ids)  # every row is sampled


def test_a_warmup_that_does_not_fit_says_what_to_lower(monkeypatch):
    runner = make_runner()

    def peak_of(*args): raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model_runner, "peak_of", peak_of)
    with pytest.raises(MemoryError, match="64 tokens of 4 sequences.*63.*lower max_num_batched_tokens"): warmup_model(runner)
    assert runner.kv_caches == []


def test_the_peak_counts_neither_workspaces_nor_first_choices(monkeypatch):
    "What libraries take once, in the first small or large run, isn't counted as the price of every step; what is freed is"
    state = dict(kept=100, reserved=100, peak=100, runs=0)

    def empty_cache(): state["reserved"] = state["kept"]

    def run(seqs, num_tokens):
        large = num_tokens == [8]
        if not state["runs"]: state["kept"] += 40  # a workspace
        once = 500 if large and state["runs"] == 1 else 0
        state["reserved"] = state["kept"] + (7 if large else 1)
        state["peak"] = max(state["peak"], state["reserved"] + once)
        state["runs"] += 1

    fake = dict(empty_cache=empty_cache, memory_reserved=lambda device: state["reserved"],
                reset_peak_memory_stats=lambda device: state.update(peak=state["reserved"]),
                max_memory_reserved=lambda device: state["peak"], memory_allocated=lambda device: 90 + state["runs"],
                max_memory_allocated=lambda device: 91 + state["inside"])
    for name, function in fake.items(): monkeypatch.setattr(torch.cuda, name, function)
    runner = SimpleNamespace(device="cuda", block_size=4, run=run)
    state["inside"] = 6
    assert peak_of(runner, [None], [8]) == 7
    state.update(inside=9, runs=0)  # of it 2 in segments that were there before
    assert peak_of(runner, [None], [8]) == 9


def test_budget_on_a_gpu(monkeypatch):
    "Who holds what is told apart, in bytes, and kept; workspaces are ours, not others'"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 11 * GIB)
    monkeypatch.setattr(model_runner, "warmup_model", lambda runner: 5 * GIB)
    runner = SimpleNamespace(device="cuda", memory={"weights": 10 * GIB}, uses_graphs=lambda: False, reserved_before=0,
                             config=SimpleNamespace(gpu_memory_utilization=0.9))
    assert measure_budget(runner) == 35 * GIB
    assert runner.memory == {"weights": 10 * GIB, "others": 29 * GIB, "activations": 5 * GIB, "total": 80 * GIB}
    # 9 GiB are another engine's of this process: this one has its own share of 40 GiB all the same
    runner.reserved_before, runner.config.gpu_memory_utilization = 9 * GIB, 0.5
    assert measure_budget(runner) == (40 - 2 - 5) * GIB and runner.memory["others"] == 38 * GIB


# start and end

def test_number_of_blocks():
    assert make_runner(num_kv_blocks=7).num_kv_blocks == 7
    # without a wish: what all sequences together can fill, as it fits
    assert make_runner(num_kv_blocks=None).num_kv_blocks == 4 * 16
    assert make_runner(num_kv_blocks=None, block_size=16, max_num_seqs=3, max_model_len=65).num_kv_blocks == 3 * 5


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied"])
def test_memory_is_told(name):  # F47 a: a shared matrix is counted once
    runner = make_runner(name, num_kv_blocks=10)
    _, reference = tiny_model(name)
    table = 64 * 2 * 16 * 4  # of the rotary embedding
    assert runner.memory["weights"] == sum(p.nbytes for p in reference.parameters()) + table
    assert runner.memory["KV cache"] == 10 * 2048 == sum(c.nbytes for layer in runner.kv_caches for c in layer)


def held_error(monkeypatch, expected, **options):
    "Fail to build a runner; the error, still held, and weak references to the models that were built"
    models, build = [], model_runner.build_model

    def build_and_note(*args, **kwargs):
        model = build(*args, **kwargs)
        models.append(weakref.ref(model))
        models.append(weakref.ref(model.lm_head.weight))
        return model

    monkeypatch.setattr(model_runner, "build_model", build_and_note)
    with pytest.raises(expected) as info: make_runner(**options)
    gc.collect()
    return info, models


def test_a_pool_that_does_not_fit_leaves_nothing_behind(monkeypatch):
    info, models = held_error(monkeypatch, MemoryError, num_kv_blocks=10**10)
    assert "10,000,000,000 KV blocks" in str(info.value)
    assert models and all(ref() is None for ref in models)


def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(monkeypatch):
    def read(model): raise OSError("disk")

    def fail(model, folder):
        # the first error's frames hold the model, too
        try: read(model)
        except OSError as error: raise CheckpointError("unreadable") from error

    monkeypatch.setattr(model_runner, "load_weights", fail)
    info, models = held_error(monkeypatch, CheckpointError)
    assert models and all(ref() is None for ref in models)


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    def interrupt(self, num_blocks): raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "allocate_kv_cache", interrupt)
    info, models = held_error(monkeypatch, KeyboardInterrupt)
    assert models and all(ref() is None for ref in models)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="attention_backend='triton2'"): make_runner(attention_backend="triton2")


def test_a_backend_that_can_not_run_the_model_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(model_runner, "get_attention_backend", lambda name, device: FlashAttentionBackend)
    monkeypatch.setattr(model_runner, "build_model", None)
    with pytest.raises(ValueError, match="flash_attn.*float32"): make_runner()


# shared prefixes

def shared_seqs(runner, num_seqs, num_shared=4):
    "Decodes that begin with the same blocks"
    manager = BlockManager(runner.num_kv_blocks, runner.block_size)
    first, = admit(runner, manager, [*PROMPT[: 4 * num_shared], 1])
    advance(runner, manager, [first], [4 * num_shared + 1])
    others = admit(runner, manager, *([*PROMPT[: 4 * num_shared], 2 + i] for i in range(num_seqs - 1)))
    for seq in others: advance(runner, manager, [seq], [1])
    seqs = [first, *others]
    for seq in seqs: manager.append(seq, seq.num_tokens)
    return seqs


@pytest.mark.parametrize("saved, expected", [(3 * 16, True), (3 * 16 + 1, False)])
def test_a_prefix_is_shared_where_enough_bytes_are_not_read_again(saved, expected, monkeypatch):
    runner = make_runner()
    seqs = shared_seqs(runner, 4)
    token_bytes = 2 * 2 * 16 * 4
    monkeypatch.setattr(model_runner, "SHARED_PREFIX_BYTES", saved * token_bytes)
    assert runner.prepare_decode(seqs)["shared_prefixes"] is None or runner.config.attention_backend == "triton"
    runner.config.attention_backend = "triton"
    shared = runner.prepare_decode(seqs)["shared_prefixes"]
    assert (shared is not None) == expected
    if expected: assert shared.lens.tolist() == [16, 0] and shared.starts.tolist() == [16] * 4
    runner.config.enable_prefix_caching = False
    assert runner.prepare_decode(seqs)["shared_prefixes"] is None


def test_a_small_batch_is_not_looked_at(monkeypatch):
    runner = make_runner()
    seqs = shared_seqs(runner, 4)
    runner.config.attention_backend = "triton"
    monkeypatch.setattr(model_runner.batch, "find_shared_prefixes", None)
    assert runner.prepare_decode(seqs)["shared_prefixes"] is None


def test_shared_prefixes_change_no_token(monkeypatch):
    "On the CPU the kernels are interpreted"
    runner = make_runner()
    expected = runner.run(shared_seqs(runner, 3), [1] * 3)
    runner, used, decode = make_runner(enforce_eager=True), [], TritonAttentionBackend.decode  # a recorded step calls nothing
    monkeypatch.setattr(type(runner.model.model), "has_few_rows", lambda *args: False)  # their kernel attends to rows one by one
    seqs = shared_seqs(runner, 3)
    monkeypatch.setattr(model_runner, "SHARED_PREFIX_BYTES", 1)
    monkeypatch.setattr(TritonAttentionBackend, "decode", lambda *args: used.append(args[3].shared_prefixes is not None) or decode(*args))
    runner.config.attention_backend = "triton"
    for layer in runner.model.model.layers: layer.self_attn.attn.backend = TritonAttentionBackend
    assert runner.run(seqs, [1] * 3) == expected and used == [True, True]


def test_kernels_are_launched_on_the_runners_device(monkeypatch):
    "The start and every step; the CPU needs none of it"
    current, seen = [], []

    class Device:
        def __init__(self, device): self.device = device
        def __enter__(self): current.append(self.device)
        def __exit__(self, *error): current.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with model_runner.current_device("cpu"): assert current == []
    with model_runner.current_device("cuda:1"): assert current == ["cuda:1"]
    monkeypatch.setattr(model_runner, "current_device", lambda device: Device("cuda:1"))
    for owner, name in ((model_runner, "load_model"), (ModelRunner, "choose_num_kv_blocks"),
                        (ModelRunner, "allocate_kv_cache"), (ModelRunner, "run_model")):
        fn = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, name=name, fn=fn: seen.append((name, *current)) or fn(*args))
    runner = make_runner(device="cpu")
    generate(runner, PROMPT, num_output_tokens=2)
    assert [name for name, *_ in seen] == ["load_model", "choose_num_kv_blocks", "allocate_kv_cache", "run_model", "run_model"]
    assert all(devices == ["cuda:1"] for _, *devices in seen) and current == []


def test_exit_gives_everything_back_and_may_be_called_twice():
    runner = make_runner()
    refs = [weakref.ref(runner.model), weakref.ref(runner.kv_caches[0][0])]
    runner.exit()
    runner.exit()
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_the_cpu_touches_no_cuda(monkeypatch):
    def refuse(*args, **kwargs): raise AssertionError("CUDA was asked")
    for name in ("mem_get_info", "memory_allocated", "memory_reserved", "max_memory_reserved", "max_memory_allocated", "empty_cache",
                 "reset_peak_memory_stats", "synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    for num_kv_blocks in (64, None):
        runner = make_runner(device="cpu", num_kv_blocks=num_kv_blocks)
        generate(runner, PROMPT)
        runner.exit()


def test_weights_are_packed_once_after_loading_and_only_on_the_cpu(monkeypatch):
    order = []
    for name in ("load_weights", "pack_weights"):
        function = getattr(model_runner, name)
        monkeypatch.setattr(model_runner, name, lambda *args, name=name, function=function: (order.append(name), function(*args)))
    make_runner()
    assert order == ["load_weights", "pack_weights"] if DEVICE == "cpu" else ["load_weights"]


def test_dummy_weights_need_no_checkpoint_and_follow_the_seed():
    folder, _ = tiny_model("qwen3")
    outputs = []
    for seed in (0, 0, 1):
        config = EngineConfig("dummy", device=DEVICE, dtype="float32", load_format="dummy", seed=seed, block_size=4, num_kv_blocks=64)
        outputs.append(generate(ModelRunner(config, load_model_config(folder), None, 64), PROMPT)[0])
    assert outputs[0] == outputs[1] != outputs[2]


# on a GPU

@needs_gpu
@pytest.mark.parametrize("name", RIGS)
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_gpu_and_cpu_agree(name, device):
    on_cpu = generate(make_runner(name, device="cpu"), PROMPT)[0]
    runner = make_runner(name, device=device)
    assert generate(runner, PROMPT)[0] == generate(runner, PROMPT, budget=7)[0] == on_cpu
    assert all(tensor.is_cuda for tensor in (*runner.model.parameters(), *runner.model.buffers()))


@needs_gpu
@pytest.mark.parametrize("name", RIGS)
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_triton_gives_the_tokens_of_torch(name, block_size):
    "In float32; and transformers' own"
    (_, reference), prompts = tiny_model(name), [PROMPT, list(range(7)), [3], list(range(100, 133))]
    options = dict(block_size=block_size, num_kv_blocks=64, max_model_len=128)
    runners = [make_runner(name, attention_backend=backend, **options) for backend in ("torch", "triton")]
    for prompt in prompts:
        by_torch, by_triton = (generate(runner, prompt, num_output_tokens=20)[0] for runner in runners)
        assert by_triton == by_torch == generate(runners[1], prompt, budget=7, num_output_tokens=20)[0]
        check_greedy(reference, prompt, by_triton)


@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "flash_attn"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_in_half_precision(name, backend, dtype):
    "Against transformers' in float32: as near as the torch backend is, up to a factor of 2"
    if ATTENTION_BACKENDS[backend].unavailable(torch.device("cuda")): pytest.skip(f"{backend} can't run here")
    if (backend, dtype) == ("flash_attn", "float16"): pytest.skip("bfloat16 stands for both")
    (_, reference), prompt = tiny_model(name), list(range(20, 120))
    expected = reference_logits(reference, prompt)[-1].cpu()

    def error(backend):
        runner = make_runner(name, max_model_len=256, attention_backend=backend, dtype=dtype, block_size=256, num_kv_blocks=4)
        logits = []
        for budget in (100, 37):  # a prompt; chunks, and a decode at the end
            seq, = admit(runner, BlockManager(4, 256), prompt)
            while seq.num_uncomputed_tokens > 1: seq.num_computed_tokens += step(runner, seq, min(budget, seq.num_uncomputed_tokens - 1))[0]
            logits.append(step(runner, seq, 1)[1])
        return max((row.float().cpu() - expected).square().mean().sqrt().item() for row in logits)

    def step(runner, seq, num_tokens):
        return num_tokens, runner.run_model(runner.prepare_prefill([seq], [num_tokens]))[-1:].squeeze(0)

    assert error(backend) <= 2 * error("torch")


@needs_gpu
def test_the_largest_step_runs_beside_the_pool_and_within_its_reserve():
    runner = make_runner(num_kv_blocks=None, max_model_len=256, max_num_seqs=32, max_num_batched_tokens=2048)
    num_tokens = largest_step(32, 2048, 255)
    for params in (SamplingParams(top_k=259), SamplingParams(), GREEDY):
        seqs = dummy_seqs(num_tokens, 255, 4, params)
        assert peak_of(runner, seqs, num_tokens) <= runner.memory["activations"] + 20 * 2**20  # a segment of the allocator


@needs_gpu
def test_a_second_engine_finds_its_share_beside_the_first():
    first = make_runner(num_kv_blocks=None, gpu_memory_utilization=0.4)
    held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    second = make_runner(num_kv_blocks=None, gpu_memory_utilization=0.4)
    pool = sum(cache.nbytes for layer in first.kv_caches for cache in layer)
    assert second.memory["others"] >= held.nbytes + pool
    assert generate(second, PROMPT)[0] == generate(first, PROMPT)[0]


@needs_gpu
def test_a_failed_start_gives_the_gpu_its_memory_back():
    before = torch.cuda.memory_reserved()
    with pytest.raises(MemoryError) as info: make_runner(num_kv_blocks=10**10)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before and "KV blocks" in str(info.value)


def test_a_rank_that_is_told_its_tokens_needs_no_logits():
    "In the warm-up all ranks have a request with penalties and log-probabilities; only rank 0 has logits"
    runner = make_runner()
    runner.tp = SimpleNamespace(rank=1, world_size=2, broadcast=lambda tokens: tokens.fill_(7))
    seq = Sequence(0, PROMPT, SamplingParams(presence_penalty=1.0, logprobs=2), runner.block_size)
    newest = torch.tensor(PROMPT[-1:], device=DEVICE)
    tokens, logprobs = runner.draw(None, newest, prepare_sample([seq]), prepare_extras([seq]))
    assert tokens.tolist() == [7] and len(logprobs) == 0
