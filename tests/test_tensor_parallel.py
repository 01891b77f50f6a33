"Engines of several ranks: the same tokens as one rank, and an end for everybody when one of them ends"
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from paging import Pages
from processes import LIMIT, is_alive, within
from rigs import DEVICE, RIGS, TINY, load, tiny_model

import minivllm
import tp_rig
from minivllm import LLM, SamplingParams
from minivllm.distributed import SINGLE, PretendGroup, TensorParallelGroup, run_ranks
from minivllm.engine import model_runner
from minivllm.engine.model_runner import ModelRunner, check_shards
from minivllm.engine.worker import WorkerError, Workers
from minivllm.layers.attention import ForwardContext, TorchAttentionBackend, TritonAttentionBackend
from minivllm.layers.linear import linear_split_k

T0 = dict(skip_tokenizer_init=True, device="cpu", dtype="float32", block_size=4, num_kv_blocks=16, max_model_len=64,
          max_num_batched_tokens=16, max_num_seqs=4)


def workload(vocab_size=256, num_requests=8, seed=0):
    "Prompts with a common beginning, longer than a step's budget, more than the pool has blocks for"
    rng = random.Random(seed)
    start = [rng.randrange(vocab_size) for _ in range(9)]
    prompts = [start + [rng.randrange(vocab_size) for _ in range(n)] for n in (3, 8, 30, 1, 7, 12, 20, 3)][:num_requests]
    greedy = dict(temperature=0.0, ignore_eos=True)
    drawn = dict(temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
    penalized = dict(greedy, repetition_penalty=1.4, frequency_penalty=0.5, logprobs=2)  # what rank 0 alone knows of
    return prompts, [SamplingParams(max_tokens=10 + i, **(greedy, penalized, drawn)[i % 3]) for i in range(len(prompts))]


def tokens_of(llm, *args, **options):
    return [output.outputs[0].token_ids for output in llm.generate(*workload(*args, **options), use_tqdm=False)]


def start(folder, world_size, **options):
    return LLM(str(folder), tensor_parallel_size=world_size, **{**T0, **options})


def pids_of(llm):
    return [process.pid for process in llm.engine.runner.workers.processes]


@pytest.fixture(scope="module")
def expected():
    "The tokens of one rank, by rig"
    found = {}

    def tokens(name):
        if name not in found:
            with start(tiny_model(name)[0], 1) as llm:
                found[name] = tokens_of(llm)
        return found[name]

    return tokens


@pytest.fixture(scope="module")
def llama():
    with start(tiny_model("llama")[0], 2) as llm:
        yield llm


@pytest.fixture(scope="module")
def qwen3():
    "Four ranks and two key/value heads: every head is held twice"
    with start(tiny_model("qwen3")[0], 4) as llm:
        yield llm


# The same tokens


def check_workload_is_hard(llm):
    "Prefix hits, chunks and preemptions are among what it does"
    scheduler, seen = llm.engine.scheduler, {"preempted": 0, "chunks": 0}
    preempt, schedule = scheduler._preempt, scheduler.schedule

    def counted_preempt(*args):
        seen["preempted"] += 1
        return preempt(*args)

    def counted_schedule():
        step = schedule()
        seen["chunks"] += any(1 < n < seq.num_uncomputed_tokens for seq, n in zip(step.seqs, step.num_tokens))
        return step

    scheduler._preempt, scheduler.schedule = counted_preempt, counted_schedule
    try:
        outputs = llm.generate(*workload(), use_tqdm=False)
    finally:
        del scheduler._preempt, scheduler.schedule
    assert seen["preempted"] and seen["chunks"] and any(output.num_cached_tokens for output in outputs), seen
    return [output.outputs[0].token_ids for output in outputs]


def test_two_ranks_say_the_same(llama, expected):
    assert check_workload_is_hard(llama) == expected("llama")


def test_four_ranks_say_the_same_with_copied_heads(qwen3, expected):
    assert tokens_of(qwen3) == expected("qwen3")
    assert qwen3.engine.runner.num_kv_heads == 1
    k_cache, _ = qwen3.engine.runner.kv_caches[0]
    assert k_cache.shape == (16, 4, 1, 16)
    assert qwen3.engine.runner.block_bytes == 2 * 2 * 4 * 1 * 16 * 4


def test_two_engines_at_once(llama, qwen3, expected):
    segments = [llm.engine.runner.workers.ring.shm.name for llm in (llama, qwen3)]
    ports = [llm.engine.runner.tp.store.port for llm in (llama, qwen3)]
    assert len(set(segments)) == len(set(ports)) == 2
    prompts, params = workload()
    for i, (prompt, param) in enumerate(zip(prompts, params)):
        for llm in (llama, qwen3):
            llm.engine.add_request(f"both-{i}", prompt, param)
    final = {}
    while llama.engine.has_unfinished_requests() or qwen3.engine.has_unfinished_requests():
        for name, llm in (("llama", llama), ("qwen3", qwen3)):
            for output in llm.engine.step():
                if output.finished:
                    final[name, output.request_id] = output.outputs[0].token_ids
    for name in ("llama", "qwen3"):
        assert [final[name, f"both-{i}"] for i in range(len(prompts))] == expected(name)


def test_one_step_ahead_says_the_same(llama, expected, monkeypatch):
    monkeypatch.setattr(llama.engine, "steps_ahead", 1)
    assert tokens_of(llama) == expected("llama")


def test_a_refused_request_harms_nobody(llama, expected):
    for prompt in ([], [260], [5] * 64, "text"):
        with pytest.raises((ValueError, TypeError)):
            llama.generate([[1, 2, 3], prompt], use_tqdm=False)
    assert tokens_of(llama) == expected("llama")


def test_what_crosses_is_the_step(llama, monkeypatch):
    "A decode step's message doesn't grow with the history, but for its block table"
    sizes, ring = [], llama.engine.runner.workers.ring
    write_slot = ring.write_slot
    monkeypatch.setattr(ring, "write_slot", lambda part, check: (sizes.append(len(part)), write_slot(part, check)))
    for penalty in (1.0, 1.5):
        sizes.clear()
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=penalty)
        llama.generate([[7, 8, 9]], params, use_tqdm=False)
        assert len(sizes) == 40 and max(sizes[1:]) - min(sizes[1:]) <= 4 * 10 + 16


# Interrupts


def test_ctrl_c_leaves_the_engine_usable(llama, expected):
    for delay in (0.03, 0.1, 0.2):
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(200):
                tokens_of(llama)
        timer.join()
        assert not llama.engine.has_unfinished_requests()
        assert tokens_of(llama) == expected("llama")


# Products that are split along their inputs: the same model


EXPERTS = "Qwen3Moe", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
SPLIT = {"llama": 3, "qwen2": 2, "qwen3": 3, "experts": 2, "llama-biased": 0}  # of a layer's products; none that has a bias
STEPS = [{0: 9, 1: 5}, {0: 1, 1: 1, 2: 12}, {0: 1, 2: 3, 1: 1}, {0: 1, 1: 1, 2: 1}]  # tokens of each request


@torch.inference_mode()
def logits_of_steps(model, tp=SINGLE):
    "Of all tokens of some steps: prompts, chunks, decodes"
    for module in model.modules():
        if hasattr(module, "tp"):
            module.tp = tp
    config, heads, pages, logits = model.config, model.model.layers[0].self_attn.attn.num_kv_heads, Pages(4, num_blocks=32), []
    caches = [(k, v) for k, v in torch.zeros(config.num_layers, 2, 32, 4, heads, config.head_dim, device=DEVICE)]
    for number, step in enumerate(STEPS):
        for request in step.keys() - pages.tables.keys():
            pages.start(request)
        ctx, positions, _ = pages.step(step, caches, lambda *args: ForwardContext(*(arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args)))
        token_ids = (37 * positions + 11 * number) % 256
        logits.append(model.compute_logits(model(token_ids.to(DEVICE), positions.to(DEVICE), ctx)))
    return None if logits[0] is None else torch.cat(logits)


@pytest.fixture
def split(monkeypatch):
    "Has every product split that allows it, and notes the shapes of the results"
    monkeypatch.setitem(RIGS, "experts", EXPERTS)
    monkeypatch.setattr("minivllm.models.llama.LlamaModel.has_few_rows", lambda self, x: False)
    seen = []

    def noted(x, weight, splits):
        seen.append(tuple((y := linear_split_k(x, weight, splits)).shape))
        return y

    def split_all(splits):
        monkeypatch.setattr("minivllm.layers.linear.split_k", lambda num_rows, weight: splits if weight.shape[1] % splits == 0 else 1)
        monkeypatch.setattr("minivllm.layers.linear.linear_split_k", noted)
        return seen

    return split_all


def assert_same_logits(ours, expected):
    assert ours.shape == expected.shape and expected.abs().max() > 1
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("name, by_kernels", [
    *((name, False) for name in SPLIT), ("qwen2", True), ("qwen3", True), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("llama", "experts", "llama-biased")),
])
def test_a_model_whose_products_are_split_says_the_same(name, by_kernels, split, monkeypatch):
    "With the torch backend, and with Triton's, whose kernels are interpreted where there is no GPU"
    shapes = split(1)
    model = load(tiny_model(name)[0], backend=TritonAttentionBackend if by_kernels else TorchAttentionBackend)
    for module in ("layers.layernorm", "kernels.kv_cache"):
        monkeypatch.setattr(f"minivllm.{module}.can_launch", lambda device: by_kernels)
    expected = logits_of_steps(model)
    assert not shapes
    for splits in (4,) if by_kernels else (2, 4):
        shapes.clear()
        split(splits)
        assert_same_logits(logits_of_steps(model), expected)
        assert len(shapes) == SPLIT[name] * model.config.num_layers * len(STEPS) and all(shape[0] == splits for shape in shapes)


@pytest.mark.skipif(DEVICE != "cpu", reason="threads that share tensors")
@pytest.mark.parametrize("promised", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "experts"])
def test_ranks_whose_products_are_split_say_the_same(name, world_size, promised, split, monkeypatch):
    "Where the group sums splits, and where it does not, and only the projection into heads is split"
    monkeypatch.setattr(PretendGroup, "sums_splits", lambda self, shape, dtype: promised)
    shapes, folder = split(1), tiny_model(name)[0]
    expected = logits_of_steps(load(folder))
    # building sets a default dtype, which threads share: one after another
    models = [load(folder, tp=TensorParallelGroup(rank, world_size)) for rank in range(world_size)]
    split(2)
    ours, *others = run_ranks(lambda tp: logits_of_steps(models[tp.rank], tp), world_size)
    assert_same_logits(ours, expected)
    assert all(logits is None for logits in others)
    of_a_layer = SPLIT[name] if promised else int(name != "qwen2")
    assert len(shapes) == of_a_layer * models[0].config.num_layers * len(STEPS) * world_size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_engines_whose_products_are_split_say_the_same(name, expected, monkeypatch):
    tokens = expected(name)
    monkeypatch.setattr("minivllm.layers.linear.split_k", tp_rig.split_in_two)
    monkeypatch.setattr(model_runner, "make_worker", tp_rig.splitting_worker)
    for world_size in (1, 2):
        with start(tiny_model(name)[0], world_size) as llm:
            assert tokens_of(llm) == tokens


# Sizes


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory):
    "A vocabulary of 261, tied"
    config = transformers.Qwen3Config(**{**TINY, "vocab_size": 261, "tie_word_embeddings": True})
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("odd")
    transformers.Qwen3ForCausalLM(config).eval().float().save_pretrained(folder)
    return folder


def test_a_vocabulary_that_does_not_divide(odd_folder):
    hot = SamplingParams(temperature=100.0, max_tokens=50, seed=1, ignore_eos=True)
    seen = []
    for world_size in (1, 2):
        options = dict(num_kv_blocks=2000, max_num_seqs=100, max_num_batched_tokens=256)
        with start(odd_folder, world_size, **options) as llm:
            drawn = llm.generate([[260, i] for i in range(100)], hot, use_tqdm=False)
            seen.append((tokens_of(llm, 261), [output.outputs[0].token_ids for output in drawn]))
            with pytest.raises(ValueError, match="261"):
                llm.generate([261], use_tqdm=False)
    assert seen[0] == seen[1]
    assert max(max(token_ids) for token_ids in seen[1][1]) <= 260


@pytest.mark.parametrize("world_size, change, message", [
    (3, {}, "query heads 4 .* 3 ranks"),
    (8, {}, "query heads 4 .* 8 ranks"),
    (4, dict(intermediate_size=130), "output size 130 .* 4 ranks"),
    (4, dict(num_key_value_heads=6, num_attention_heads=12, hidden_size=192), "key/value heads 6 .* 4 ranks"),
    (4, dict(num_key_value_heads=3, num_attention_heads=12, hidden_size=192), "4 ranks can't share 3 key/value heads"),
])
def test_other_sizes_are_refused_before_anything_is_started(tmp_path, monkeypatch, world_size, change, message):
    transformers.LlamaConfig(**{**TINY, **change}, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    monkeypatch.setattr(model_runner, "Workers", None)  # calling it would fail otherwise
    with pytest.raises(ValueError, match=message):
        start(tmp_path, world_size, load_format="dummy")


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_family_can_be_shared_out(world_size):
    for name in ("llama", "llama-biased", "qwen3", "qwen3-tied", "qwen2", "mistral", "yarn"):
        folder = tiny_model(name)[0]
        config = minivllm.config.EngineConfig(str(folder), tensor_parallel_size=world_size, device="cpu")
        check_shards(config, minivllm.config.load_model_config(folder))


# Failures


def check_tokens_after_restart(name, expected):
    with start(tiny_model(name)[0], 2) as llm:
        assert tokens_of(llm) == expected(name)


def test_a_killed_rank_ends_the_engine_and_a_new_one_starts(expected):
    llm = start(tiny_model("llama")[0], 2)
    pids, begin = pids_of(llm), []

    def kill():
        begin.append(time.monotonic())
        os.kill(pids[0], signal.SIGKILL)

    threading.Timer(0.1, kill).start()
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        for _ in range(1000):
            tokens_of(llm)
    assert time.monotonic() - begin[0] < LIMIT
    assert within(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], use_tqdm=False)
    llm.close()
    check_tokens_after_restart("llama", expected)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_fails_while_it_loads(monkeypatch, world_size):
    monkeypatch.setattr(model_runner, "make_worker", tp_rig.failing_worker)
    started, make = [], Workers.start
    monkeypatch.setattr(Workers, "start", lambda self, *args: (make(self, *args), started.append(self.processes[-1]))[0])
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="(?s)rank . failed.*rank . has lost its disk"):
        start(tiny_model("llama")[0], world_size)
    assert time.monotonic() - begin < 3 * LIMIT  # most of it is the start of Python
    assert len(started) == world_size - 1 and not any(process.is_alive() for process in started)


def test_rank_0_that_fails_while_it_loads(monkeypatch):
    "It says what happened to itself, and nobody is left"
    groups, make = [], Workers.start
    monkeypatch.setattr(Workers, "start", lambda self, *args: (make(self, *args), groups.append(self))[0])
    with pytest.raises(MemoryError, match="KV blocks"):
        start(tiny_model("llama")[0], 2, num_kv_blocks=10**10)
    (workers,) = groups
    assert len(workers.processes) == 1 and not workers.processes[0].is_alive() and not workers.watcher.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-tied", "llama-biased", "qwen2"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_families(name, world_size, expected):
    with start(tiny_model(name)[0], world_size) as llm:
        assert tokens_of(llm) == expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_experts(world_size, tmp_path):
    config = transformers.Qwen3MoeConfig(**{**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32})
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).eval().float().save_pretrained(tmp_path)
    seen = []
    for n in (1, world_size):
        with start(tmp_path, n) as llm:
            seen.append(tokens_of(llm))
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_one_key_value_head_on_two_ranks(tmp_path):
    config = transformers.Qwen3Config(**{**TINY, "num_key_value_heads": 1})
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).eval().float().save_pretrained(tmp_path)
    seen = []
    for world_size in (1, 2):
        with start(tmp_path, world_size) as llm:
            seen.append(tokens_of(llm))
            assert llm.engine.runner.num_kv_heads == 1
    assert seen[0] == seen[1]


@pytest.mark.slow
def test_repeated_decode_steps_say_the_same(monkeypatch, expected):
    "What a graph does on a GPU, without one: the same buffers again, on all ranks"
    monkeypatch.setattr(ModelRunner, "uses_graphs", lambda self: True)
    monkeypatch.setattr(model_runner, "make_worker", tp_rig.recording_worker)
    with start(tiny_model("qwen3")[0], 2) as llm:
        for steps_ahead in (0, 1):
            llm.engine.steps_ahead = steps_ahead
            assert tokens_of(llm) == expected("qwen3")


@pytest.mark.slow
def test_all_ranks_take_the_smallest_number_of_blocks(monkeypatch):
    monkeypatch.setattr(model_runner, "make_worker", tp_rig.short_worker)
    with start(tiny_model("llama")[0], 2) as llm:
        assert llm.engine.runner.num_kv_blocks == llm.engine.scheduler.block_manager.num_blocks == 5


@pytest.mark.slow
def test_a_rank_killed_while_rank_0_waits_inside_a_collective(monkeypatch):
    monkeypatch.setattr(model_runner, "make_worker", tp_rig.slow_worker)
    llm = start(tiny_model("llama")[0], 4)
    pids = pids_of(llm)
    threading.Timer(1.0, os.kill, (pids[1], signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="rank 2 was killed"):
        tokens_of(llm)
    assert time.monotonic() - begin < 1 + LIMIT
    assert within(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_rank_0_that_fails_in_a_step(expected, monkeypatch):
    "Its error comes out, the engine is closed, and a new one starts"
    llm = start(tiny_model("llama")[0], 2)
    pids = pids_of(llm)
    monkeypatch.setattr(llm.engine.runner, "run_model", lambda inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tokens_of(llm)
    assert within(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([[1]], use_tqdm=False)


@pytest.mark.slow
def test_an_engine_that_is_dropped_ends_its_workers():
    llm = start(tiny_model("llama")[0], 2)
    pids = pids_of(llm)
    del llm
    gc.collect()
    assert within(lambda: not any(map(is_alive, pids)))


# Whole programs

SCRIPT = """
import sys, time
sys.path[:0] = {path}
from minivllm import LLM, SamplingParams
llm = LLM({folder!r}, tensor_parallel_size=2, **{options})
print(llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0].outputs[0].token_ids, flush=True)
print(*[p.pid for p in llm.engine.runner.workers.processes], llm.engine.runner.workers.ring.shm.name, flush=True)
{end}
"""


def script(tmp_path, end):
    path = tmp_path / "script.py"
    root = [str(Path(minivllm.__file__).parent.parent)]
    path.write_text(SCRIPT.format(path=root, folder=str(tiny_model("llama")[0]), options=T0, end=end))
    return subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "llm.close()"])
def test_a_script_without_a_guard(tmp_path, end):
    program = script(tmp_path, end)
    output, errors = program.communicate(timeout=120)
    tokens, names = output.strip().split("\n")
    *pids, segment = names.split()
    assert len(json.loads(tokens)) == 5 and not errors and program.returncode == 0
    assert within(lambda: not any(map(is_alive, pids)) and not Path("/dev/shm", segment).exists())


@pytest.mark.slow
def test_a_killed_program_leaves_nothing_and_starts_again(tmp_path):
    program = script(tmp_path, "time.sleep(1000)")
    program.stdout.readline()
    *pids, segment = program.stdout.readline().split()
    program.kill()
    program.communicate()
    assert within(lambda: not any(map(is_alive, pids)) and not Path("/dev/shm", segment).exists())
    test_a_script_without_a_guard(tmp_path, "")


@pytest.mark.slow
def test_the_command_line(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama")[0], folder)
    byte_tokenizer().save_pretrained(folder)
    root = str(Path(minivllm.__file__).parent.parent)
    command = [sys.executable, "-m", "minivllm", "generate", "--model", str(folder), "--device", "cpu"]
    command += ["--max-tokens", "4", "--temperature", "0", "Hello"]
    outputs = []
    for more in ([], ["--tensor-parallel-size", "2"]):
        done = subprocess.run(command + more, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root})
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines()[0])
    assert outputs[0] == outputs[1]
