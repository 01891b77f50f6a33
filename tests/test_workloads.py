"The workloads: the same ids everywhere, floors by hand, rows that say what happened, and gaps in a trace"
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer, model_folder as byte_folder

from minivllm import LLM
from minivllm.bench import Ceilings, save_result
from minivllm.config import load_model_config
from minivllm.workloads import (
    MEASURED, PEERS, SHAPES, WORKLOADS, ModelCosts, Workload, WorkloadRequest, add_comparison, best_peer, ceilings_of,
    decode_work, engine_settings, first_token_only, idle_times, in_words, measure_workload, model_folder, peers_of,
    prefill_work, profile_steps, run_requests, run_workload, run_workloads, scaled, show_figure, w1, w2, w3, w4, w5,
    warm_up_batches, workload_floor,
)

TINY = dict(load_format="dummy", skip_tokenizer_init=True, device="cpu", num_kv_blocks=256)
CEILINGS = Ceilings(read=10e9, copy=10e9, matmul=100e9)


@pytest.fixture(scope="module")
def llm():
    with model_folder("tiny") as folder, LLM(folder, **TINY) as llm:
        yield llm


def digest(before, requests):
    "A hash of every prompt, length and temperature"
    rows = [[r.prompt, r.max_tokens, r.temperature, timed] for timed, part in ((False, before), (True, requests)) for r in part]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


# The draws


GOLDEN = {  # of the workloads that the other engines ran, variants 0 to 2
    "W1": ["b7623954efda1be9", "4f5c08718e6bfe9a", "7e60baebcfde1e02"],
    "W2": ["ac18b98c43fbe082", "e2cdde42d36c4c02", "d3bde248ef4516d4"],
    "W3": ["bd77817e03eee9fe", "1f6d39416a404ffa", "58f36b86d5f21393"],
    "W4": ["9efb686d91e1dbca", "665590197b34865f", "a5e9adbdde39dce0"],
    "W5": ["7d94a5957a96445f", "6567520c01446261", "665ed1052d28d64d"],
}


@pytest.mark.parametrize("variant", range(3))
@pytest.mark.parametrize("name", WORKLOADS)
def test_draws_are_those_of_the_other_engines(name, variant):
    workload = WORKLOADS[name](variant)
    assert digest(workload.before, workload.requests) == GOLDEN[name][variant]


def test_warm_up_is_theirs_too():
    assert [digest([], batch) for batch in warm_up_batches()] == ["0ceabefcdd09ec00", "c8b08bffb5d8404e", "c2634eab32918679"]


def test_totals():
    assert (w1().num_prompt_tokens, w1().num_output_tokens) == (142_827, 133_966)
    assert (len(w5().requests), w3().num_prompt_tokens, w2().num_output_tokens) == (1024, 131_072, 512)
    assert w4().longest == 2048 + 64 + 64


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_variant_has_the_lengths_and_not_the_ids(name):
    first, second = WORKLOADS[name](0), WORKLOADS[name](1)
    lengths = [[(len(r.prompt), r.max_tokens) for r in w.before + w.requests] for w in (first, second)]
    assert lengths[0] == lengths[1]
    assert not {tuple(r.prompt[:16]) for r in first.requests} & {tuple(r.prompt[:16]) for r in second.requests}


def test_shapes_are_those_published():
    names = ("head_dim", "vocab_size", "rope_theta", "rms_norm_eps", "max_position_embeddings", "hidden_size",
             "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "tie_word_embeddings",
             "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    golden = {"A": "e22b98e04b7706c9", "B": "8e0424a7d2efad40", "M": "9381d63b170f5278"}
    for shape, expected in golden.items():
        numbers = {name: SHAPES[shape][name] for name in sorted(names) if name in SHAPES[shape]}
        assert hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16] == expected, shape


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_a_config_that_the_engine_reads(shape):
    with model_folder(shape) as folder:
        config = load_model_config(folder)
    assert config.hidden_size == SHAPES[shape]["hidden_size"] and config.dtype == torch.bfloat16


def test_a_model_that_is_no_shape_stays_what_it_is():
    with model_folder("some/where") as folder:
        assert folder == "some/where"


# Scaling


@pytest.mark.parametrize("name", WORKLOADS)
def test_scaled_by_one_changes_nothing(name):
    assert scaled(WORKLOADS[name](), 1.0) == WORKLOADS[name]()


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scale", [0.001, 0.05, 0.5])
def test_scaled_keeps_the_form(name, scale):
    workload, whole = scaled(WORKLOADS[name](), scale), WORKLOADS[name]()
    assert len(workload.requests) == max(1, round(scale * len(whole.requests)))
    assert all(r.prompt and r.max_tokens >= 1 for r in workload.before + workload.requests)
    assert len(workload.before) == len(whole.before)
    n = workload.num_shared
    assert n == round(whole.num_shared * scale) or n == 1
    prompts = [r.prompt for r in workload.before + workload.requests]
    assert len({tuple(prompt[:n]) for prompt in prompts}) <= 1 or not n
    assert all(len(prompt) > n for prompt in prompts)


@pytest.mark.parametrize("scale", [0, -1, 1.01, float("nan")])
def test_scale_out_of_range(scale):
    with pytest.raises(ValueError, match="scale=.*above 0, at most 1"):
        scaled(w1(), scale)


# Floors


def test_costs_of_the_shapes():
    "Weights in the layers and in the head, bytes of K/V per token, FLOPs of W3: as counted for the other engines"
    golden = {"A": (440401920, 155582464, 114688, 146269993435136), "B": (6945767424, 622329856, 147456, 1900074405724160),
              "M": (2730491904, 311164928, 98304, 821426554667008)}
    for shape, (layers, head, kv_bytes, flops) in golden.items():
        costs = ModelCosts.from_config(SHAPES[shape])
        assert (costs.layer_params, costs.head_params, 2 * costs.kv_size) == (layers, head, kv_bytes)
        assert prefill_work(w3(), costs, 2)[1] == flops


def test_costs_of_a_config_that_leaves_things_out():
    config = dict(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, vocab_size=100)
    costs = ModelCosts.from_config(config)
    assert costs.layer_params == 3 * (8 * 8 * 4 + 3 * 8 * 16)
    assert (costs.head_params, costs.kv_size, costs.attention_flops) == (800, 2 * 3 * 8, 4 * 3 * 8)


def test_experts_read_grow_with_the_tokens():
    costs = ModelCosts.from_config(SHAPES["M"])
    assert costs.params_read(1) == pytest.approx(costs.layer_params + costs.head_params)
    everything = costs.dense_params + 128 * costs.expert_params + costs.head_params
    assert costs.params_read(64) == pytest.approx(everything, rel=0.03) and costs.params_read(10**6) == everything


COSTS = ModelCosts(dense_params=100, expert_params=0, num_experts=0, experts_per_token=0, head_params=10, kv_size=4, attention_flops=8)


def requests(*lengths):
    return [WorkloadRequest([1] * n, out, 0.0) for n, out in lengths]


def test_work_by_hand():
    workload = Workload("", requests((3, 3), (2, 1)))
    assert prefill_work(workload, COSTS, 2) == (2 * 110, 2 * 100 * 5 + 8 * (6 + 3) + 2 * 10 * 2)
    assert list(decode_work(workload, COSTS, 2)) == [(2 * (110 + 4 * 4), 2 * 110 + 8 * 4), (2 * (110 + 4 * 5), 2 * 110 + 8 * 5)]


def test_what_is_shared_is_read_once_and_not_computed():
    workload = Workload("", requests((5, 2), (5, 2)), num_shared=4)
    pairs = 2 * 5  # one new query each, which sees all five
    assert prefill_work(workload, COSTS, 2) == (2 * (110 + 4 * 4), 2 * 100 * 2 + 8 * pairs + 2 * 10 * 2)
    assert list(decode_work(workload, COSTS, 2)) == [(2 * (110 + 4 * (4 + 2 * 2)), 2 * 110 * 2 + 8 * 12)]


def test_floor_takes_the_larger_term_of_each_step():
    workload = Workload("", requests((3, 2)))
    slow_memory, slow_math = Ceilings(1.0, 1.0, 1e9), Ceilings(1e9, 1e9, 1.0)
    assert workload_floor(workload, COSTS, slow_memory).total == 2 * 110 + 2 * (110 + 4 * 4)
    assert workload_floor(workload, COSTS, slow_math).total == pytest.approx(2 * 100 * 3 + 8 * 6 + 20 + 220 + 8 * 4)


def test_floors_on_an_h200():
    "Near the figures that the other engines' were put beside: 3.6 s, 0.26 ms without K/V, 0.216 s"
    ceilings, costs = Ceilings(4.53e12, 4.3e12, 680e12), ModelCosts.from_config(SHAPES["A"])
    assert workload_floor(w1(), costs, ceilings).total == pytest.approx(3.6, rel=0.03)
    assert workload_floor(w2(), costs, ceilings).decode / 511 == pytest.approx(0.272e-3, rel=0.02)
    assert workload_floor(w3(), costs, ceilings).total == pytest.approx(0.215, rel=0.01)


# Running


def test_run_gives_each_request_its_tokens(llm):
    before = llm.engine.stats.num_output_tokens
    assert run_workload(llm, scaled(w4(), 0.02)) > 0
    assert llm.engine.stats.num_output_tokens - before == 1 + 5


def test_shared_prefix_is_computed_by_what_runs_before(llm):
    workload = scaled(w4(7), 0.02)
    before = llm.engine.stats.num_prompt_tokens
    run_workload(llm, workload)
    found = workload.num_shared // llm.engine.config.block_size * llm.engine.config.block_size
    lengths = [len(r.prompt) for r in workload.before + workload.requests]
    assert llm.engine.stats.num_prompt_tokens - before == sum(lengths) - found * len(workload.requests)


def test_answers_that_end_early_are_an_error(llm, monkeypatch):
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda prompts, params, **options: generate(
        prompts, [type(p)(temperature=0.0, max_tokens=1) for p in params], **options))
    with pytest.raises(RuntimeError, match="a request for 3 tokens ended with 1"):
        run_requests(llm, requests((2, 3)))


def test_a_workload_that_is_too_long(llm):
    with pytest.raises(ValueError, match="W9 has sequences of 4097 tokens, and max_model_len is 4096"):
        run_workload(llm, Workload("W9", requests((4090, 7))))


def test_a_model_whose_vocabulary_is_too_small(tmp_path):
    folder = byte_folder(tmp_path / "model", byte_tokenizer())
    with LLM(str(folder), device="cpu", num_kv_blocks=16) as small:
        with pytest.raises(ValueError, match="token ids up to 10000, the model has 260"):
            run_workload(small, scaled(w1(), 0.01))


def test_row(llm):
    row = measure_workload(llm, "W1", repeat=2, scale=0.01)
    workload = scaled(w1(), 0.01)
    assert len(row["all_seconds"]) == 2 and min(row["all_seconds"]) <= row["seconds"] <= max(row["all_seconds"])
    assert row["num_output_tokens"] == workload.num_output_tokens
    assert row["output_tokens_per_second"] == pytest.approx(workload.num_output_tokens / row["seconds"])
    assert row["host_loop_seconds"] > 0 and "seconds_per_token" not in row
    assert show_figure(row).endswith(" output tokens/s")


def test_repetitions_find_nothing_in_the_cache(llm):
    before = llm.engine.stats.num_prompt_tokens
    row = measure_workload(llm, "W3", repeat=2, scale=0.03)
    assert llm.engine.stats.num_prompt_tokens - before == 2 * row["num_prompt_tokens"]


def test_time_of_a_token_is_the_difference_of_two_runs(llm, monkeypatch):
    seen = []

    def run(llm, workload):
        seen.append(workload)
        return 0.5 + 0.25 * workload.num_output_tokens

    monkeypatch.setattr("minivllm.workloads.run_workload", run)
    row = measure_workload(llm, "W2", repeat=2)
    assert row["seconds_per_token"] == pytest.approx(0.25) and show_figure(row) == "250 ms/token"
    assert [w.num_output_tokens for w in seen] == [512, 1, 512, 1]
    assert len({tuple(w.requests[0].prompt) for w in seen}) == 4  # none is in the cache


def test_first_token_only():
    assert first_token_only(w2()).num_output_tokens == 1 and first_token_only(w2()).requests[0].prompt == w2().requests[0].prompt


# The comparison


def test_peers():
    assert best_peer("A", "W1") == ("vLLM 0.26.0", 5.85) and best_peer("A", "W4") == ("nano-vllm", 0.94)
    assert best_peer("tiny", "W1") == best_peer("B", "W4") == (None, None)
    assert w1().num_output_tokens / PEERS["A"]["W1"]["vLLM 0.26.0"] == pytest.approx(22.9e3, rel=1e-3)
    assert w5().num_output_tokens / PEERS["A"]["W5"]["nano-vllm"] == pytest.approx(22.9e3, rel=0.01)
    assert w3().num_prompt_tokens / PEERS["B"]["W3"]["vLLM 0.26.0"] == pytest.approx(41.3e3, rel=2e-3)


def test_rows_beside_floor_and_peer():
    costs, ceilings = ModelCosts.from_config(SHAPES["A"]), Ceilings(4.53e12, 4.3e12, 680e12)
    row = dict(workload="W1", scale=1.0, seconds=4.68)
    add_comparison(row, "A", costs, ceilings, 2)
    assert row["peer"] == "vLLM 0.26.0" and row["ratio_to_peer"] == pytest.approx(0.8)
    assert row["share_of_floor"] == pytest.approx(row["floor_seconds"] / 4.68)
    row = dict(workload="W2", scale=1.0, seconds=1.0, seconds_per_token=0.81e-3)
    add_comparison(row, "A", costs, ceilings, 2)
    assert row["ratio_to_peer"] == pytest.approx(0.5) and row["share_of_floor"] == pytest.approx(0.272 / 0.81, rel=0.02)
    row = dict(workload="W1", scale=0.5, seconds=1.0)
    add_comparison(row, "A", costs, ceilings, 2)
    assert row["peer"] is row["ratio_to_peer"] is None  # the others ran the whole


def test_a_row_in_words():
    row = dict(workload="W2", scale=1.0, seconds=1.0, seconds_per_token=0.81e-3, host_loop_seconds=2e-3)
    add_comparison(row, "A", ModelCosts.from_config(SHAPES["A"]), Ceilings(4.53e12, 4.3e12, 680e12), 2)
    assert in_words(row) == {"workload": "W2", "figure": "0.81 ms/token", "seconds": "810 µs", "floor": "273 µs", "share": "34%",
                             "fastest peer": "vLLM 0.26.0: 1.62 ms", "ours / theirs": "0.50", "Python loop": "2 ms"}
    assert in_words({**row, "peer": None})["ours / theirs"] == ""


def test_several_gpus_read_and_multiply_side_by_side():
    settings = dict(dtype="bfloat16", tensor_parallel_size=2)
    assert ceilings_of({**settings, "device": "cuda"}, CEILINGS) == Ceilings(20e9, 20e9, 200e9)
    assert ceilings_of({**settings, "device": "cpu"}, CEILINGS) == CEILINGS


def test_the_first_page_shows_what_is_stored(tmp_path, monkeypatch, capsys):
    "As soon as a file lies there, and says so where there is none"
    page = json.loads((Path(__file__).parents[1] / "nbs" / "index.ipynb").read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in page["cells"] if cell["cell_type"] == "code"]
    names = {"show_table": list}  # rows as they are
    for word in ("import caption", "def show_measured"):
        source, = (source for source in sources if word in source)
        exec(source.replace("from minivllm.viz import show_table", "").replace("\nshow_measured()", ""), names)
    monkeypatch.setenv("MINIVLLM_RESULTS", str(tmp_path))
    monkeypatch.setattr("minivllm.bench._repository_results", lambda: tmp_path)
    assert names["show_measured"]() is None and "Not measured yet" in capsys.readouterr().out
    row = dict(workload="W1", scale=1.0, seconds=4.68, output_tokens_per_second=28625.2, host_loop_seconds=2e-3)
    add_comparison(row, "A", ModelCosts.from_config(SHAPES["A"]), Ceilings(4.53e12, 4.3e12, 680e12), 2)
    save_result("36_workloads-A", [dict(model="A"), row, dict(workload="W1, steps 100 to 200", host_share=0.01)], MEASURED)
    shown, = names["show_measured"]()
    assert (shown["model"], shown["workload"], shown["figure"]) == ("Qwen3-0.6B", "W1 throughput", "28,625 output tokens/s")
    assert shown["ours / theirs"] == "0.80" and "Qwen3-0.6B: Measured on" in capsys.readouterr().out


def test_run_workloads():
    rows = run_workloads("tiny", ["W2", "W4"], scale=0.02, device="cpu", num_kv_blocks=256, ceilings=CEILINGS)
    about = rows[0]
    assert about["model"] == "tiny" and about["start_up_seconds"] > 0 and about["host_loop_seconds"] > 0
    assert about["ceilings"] == dict(read=10e9, copy=10e9, matmul=100e9)
    assert about["settings"]["max_model_len"] == 4096 and about["settings"]["load_format"] == "dummy"
    assert about["settings"]["num_kv_blocks"] == 256 and about["settings"]["dtype"] == "float32"
    assert [row["workload"] for row in rows[1:]] == ["W2", "W4"] and all(row["floor_seconds"] > 0 for row in rows[1:])
    assert json.loads(json.dumps(rows)) == rows


def test_settings_are_the_defaults(llm):
    from minivllm.config import EngineConfig
    settings = engine_settings(llm)
    assert settings["max_num_seqs"] == EngineConfig("x").max_num_seqs and settings["enable_prefix_caching"] is True
    assert not settings.keys() & {"model", "tokenizer"}


@pytest.mark.parametrize("names, scale, message", [(["W1", "W7"], 1.0, "no W7, only W1, W2"), (["W1"], 2.0, "scale=2.0")])
def test_mistakes_are_known_before_anything_is_built(names, scale, message, monkeypatch):
    monkeypatch.setattr("minivllm.workloads.LLM", None)
    with pytest.raises(ValueError, match=message):
        run_workloads("tiny", names, scale=scale)


def test_profile_wants_a_gpu(llm):
    with pytest.raises(ValueError, match="wants a CUDA device"):
        profile_steps(llm, scaled(w1(), 0.01))
    assert not llm.engine.has_unfinished_requests()


# Gaps in a trace


def event(category, start, duration, correlation):
    return {"ph": "X", "cat": category, "name": "", "ts": start, "dur": duration, "args": {"correlation": correlation}}


def microseconds(*events, **others):
    times = idle_times({"traceEvents": list(events), **others})
    return {name: round(1e6 * times[name], 6) for name in ("window", "idle", "inside_launches", "waiting_for_host")}


def test_no_gap():
    assert microseconds(event("kernel", 5, 10, 1), event("kernel", 15, 10, 1)) == dict(
        window=20, idle=0, inside_launches=0, waiting_for_host=0)


def test_a_gap_inside_a_launch_is_never_the_hosts():
    found = microseconds(event("cuda_runtime", 0, 50, 1), event("kernel", 5, 10, 1), event("kernel", 18, 10, 1))
    assert found == dict(window=23, idle=3, inside_launches=3, waiting_for_host=0)


def test_a_gap_is_the_hosts_as_far_as_the_launch_was_late():
    kernels = event("kernel", 0, 10, 1), event("kernel", 20, 10, 2)
    assert microseconds(*kernels, event("cuda_runtime", 2, 3, 2))["waiting_for_host"] == 0  # in time
    assert microseconds(*kernels, event("cuda_driver", 8, 6, 2))["waiting_for_host"] == 4   # 4 late, 6 to start
    assert microseconds(*kernels, event("cuda_runtime", 12, 99, 2))["waiting_for_host"] == 10  # not more than the gap
    assert microseconds(*kernels)["waiting_for_host"] == 10  # a launch that isn't in the trace
    assert microseconds(*kernels)["idle"] == 10


def test_kernels_side_by_side():
    "A long one covers the gaps of others, and the launch that ends last is the one before the gap"
    found = microseconds(event("kernel", 0, 100, 1), event("kernel", 10, 5, 2), event("kernel", 30, 5, 2), event("kernel", 104, 6, 1))
    assert found == dict(window=110, idle=4, inside_launches=4, waiting_for_host=0)


def test_copies_and_the_host_are_no_kernels():
    events = [event("kernel", 0, 10, 1), event("gpu_memcpy", 10, 10, 9), event("cpu_op", 0, 99, 9), event("kernel", 20, 10, 1),
              {"ph": "i", "cat": "kernel", "ts": 500}]
    assert microseconds(*events) == dict(window=30, idle=10, inside_launches=10, waiting_for_host=0)


def test_shares():
    times = idle_times({"traceEvents": [event("kernel", 90, 10, 2), event("kernel", 0, 80, 1), event("cuda_runtime", 85, 4, 2)]})
    assert times["idle_share"] == pytest.approx(0.1) and times["host_share"] == pytest.approx(0.09) and times["num_kernels"] == 2


def test_a_trace_without_kernels():
    with pytest.raises(ValueError, match="no kernels"):
        idle_times({"traceEvents": [event("cpu_op", 0, 1, 1)]})


def test_profile_traces_the_steps_of_its_window(llm, monkeypatch):
    "Without a GPU: the profiler is a stand-in that counts; all else is the real way"
    steps, step, window = [], llm.step, []

    class Profiler:
        def __init__(self, activities): pass
        def __enter__(self):
            window.append(len(steps))
            return self
        def __exit__(self, *error): window.append(len(steps))
        def export_chrome_trace(self, path): Path(path).write_text(json.dumps({"traceEvents": [event("kernel", 0, 10, 1)]}))

    monkeypatch.setattr("minivllm.workloads.check_profiling", lambda llm: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr(llm, "step", lambda: (steps.append(1), step())[1])
    times = profile_steps(llm, scaled(w1(), 0.02), skip=3, steps=4)
    assert window == [3, 7] and (times["workload"], times["num_steps"], times["num_kernels"]) == ("W1, steps 3 to 7", 4, 1)
    assert not llm.engine.has_unfinished_requests() and not llm.outputs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wants a GPU")
def test_profile_of_a_gpu():
    with model_folder("tiny") as folder, LLM(folder, load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=256) as llm:
        times = profile_steps(llm, scaled(w1(), 0.2), skip=20, steps=10)
        assert not llm.engine.has_unfinished_requests()
    assert times["num_kernels"] > 10 and 0 <= times["host_share"] <= times["idle_share"] < 1


def test_floor_follows_numpy_and_python_alike():
    assert np.isclose(sum(n for n, _ in decode_work(w2(), ModelCosts.from_config(SHAPES["A"]), 2)),
                      sum(2 * (595984384 + 57344 * (128 + k)) for k in range(1, 512)))


def test_peers_on_as_many_gpus():
    about = dict(model="B", settings=dict(tensor_parallel_size=2))
    assert best_peer(peers_of(about), "W1") == ("vLLM 0.26.0", 9.40)
    assert peers_of(dict(model="A", settings=dict(tensor_parallel_size=1))) == "A"
    assert best_peer(peers_of(dict(model="A", settings=dict(tensor_parallel_size=2))), "W1") == (None, None)
