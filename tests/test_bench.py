"What the instruments of minivllm.bench promise"
import getpass
import importlib
import json
import linecache
import platform
import subprocess
import sys
import textwrap

import pytest
import torch

from minivllm import bench
from minivllm.bench import (Ceilings, Timing, Traffic, caption, compare, floor_seconds, gpu_here, graphed, load_result,
                            measure, measure_compile, save_result, si, source_hash, stale_results)


@pytest.fixture
def define(tmp_path, monkeypatch):
    "Write a module `measured` with the given source and import it anew"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions within one second

    def write(source):
        (tmp_path / "measured.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        linecache.clearcache()
        sys.modules.pop("measured", None)
        return importlib.import_module("measured")

    return write


ORIGINAL = "def f(x, by=2):\n    return x * by\n"
SAME = "import math\n\n\ndef f(x,\n      by=2):\n    'Explained'\n    # at length\n    return (x * by)\n"
OTHER = "def f(x, by=3):\n    return x * by\n"


@pytest.mark.parametrize("value, unit, text", [
    (0, "s", "0 s"), (0.00123, "s", "1.23 ms"), (4.5e12, "B/s", "4.5 TB/s"), (999.96, "B", "1 kB"), (999.4, "B", "999 B"),
    (-2e-6, "s", "-2 µs"), (7e14, "FLOP/s", "700 TFLOP/s"), (2.5e15, "FLOP/s", "2.5 PFLOP/s"),
])
def test_si(value, unit, text):
    assert si(value, unit) == text


def test_timing_is_robust_to_an_outlier():
    timing = Timing.of([1.0] * 99 + [1000.0])
    assert (timing.median, timing.p10, timing.p90, timing.n) == (1, 1, 1, 100)
    assert Timing.of(list(range(11))) == Timing(5, 1, 9, 11)


def test_measure_warms_up_and_counts_calls():
    calls = []
    timing = measure(lambda: calls.append(0), warmup=4, repeat=7)
    assert len(calls) == 11 and timing.n == 7


def test_measure_stops_when_time_is_up_but_not_before_three():
    calls = []
    timing = measure(lambda: calls.append(0), seconds=0)
    assert timing.n == 3 and len(calls) == 4


def test_measured_time_excludes_the_eviction(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def evict():
        now[0] += 100

    def work():
        now[0] += 1

    assert bench.host_clock(work, evict) == 1


def test_compare_measures_in_turns():
    order = []
    rows = compare({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, warmup=2, repeat=3)
    assert "".join(order) == "abab" + "ababab"
    assert [row["name"] for row in rows] == ["a", "b"] and rows[0]["ratio"] == 1
    assert json.loads(json.dumps(rows)) == rows  # plain data
    assert "a" in repr(rows) and rows._repr_markdown_().count("\n") == 3


def test_ratios_are_paired(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def taking(*seconds):
        left = iter(seconds)

        def work():
            now[0] += next(left)
        return work

    # the machine slows down, and speeds up in the middle of the last round
    rows = compare({"one": taking(1, 10, 100), "three": taking(3, 30, 3)}, warmup=0, repeat=3)
    assert [row["median"] for row in rows] == [10, 3]
    assert rows[1]["ratio"] == 3


def test_graphed_without_a_gpu_calls_in_order(monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    order = []
    replay = graphed(iter([lambda: order.append("a"), lambda: order.append("b")]))
    assert order == []
    replay()
    replay()
    assert "".join(order) == "abab"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records a CUDA graph")
def test_graphed_replays_on_what_the_inputs_hold_then():
    inputs, outputs = [torch.ones(2, 1000, device="cuda") for _ in range(2)]
    replay = graphed([lambda x=x, y=y: y.copy_(2 * x) for x, y in zip(inputs, outputs)])
    inputs += 1
    replay()
    assert outputs.unique().tolist() == [4]


def test_traffic_counts_operations_and_not_views():
    x = torch.ones(10, 20)
    with Traffic() as traffic:
        (2 * x[:5].T).sum()
    assert [(row["operation"], row["read"], row["written"]) for row in traffic.rows] == [("mul", 400, 400), ("sum", 400, 4)]
    assert traffic.nbytes == 1204


def test_measure_compile_rows(monkeypatch):
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: False)
    monkeypatch.setattr(bench.torch, "compile", lambda fn, dynamic: fn)
    monkeypatch.setattr(bench, "compare", lambda variants, **options: [dict(name=name) for name in variants])

    def double(x):
        return x + x

    rows = measure_compile([(double, lambda shape: (torch.ones(shape),))], [(5, 10)], "cpu")
    assert [(row["function"], row["variant"], row["nbytes"]) for row in rows] == [("double", "eager", 600), ("double", "compiled", 400)]
    assert {row["floor"] for row in rows} == {400 / 1e9} and rows[0]["shape"] == [5, 10]


def test_floor_names_the_binding_term():
    toy = Ceilings(read=100.0, copy=80.0, matmul=1000.0)
    assert floor_seconds(100, 500, toy) == (1.0, "bytes")
    assert floor_seconds(100, 5000, toy) == (5.0, "flops")
    assert floor_seconds(100, 1000, toy).seconds == 1.0 and toy.ridge == 10
    assert floor_seconds(0, 1000, toy).bound == "flops"


def test_hash_sees_code_and_nothing_else(define):
    original = source_hash(define(ORIGINAL).f)
    assert source_hash(define(SAME).f) == original
    assert source_hash(define(OTHER).f) != original
    assert source_hash(define(ORIGINAL.replace("x * by", "x / by")).f) != original


def test_hash_of_classes_methods_and_wrapped_functions(define):
    source = """
        import functools
        def loud(fn):
            @functools.wraps(fn)
            def inner(*args): return fn(*args)
            return inner
        @loud
        def g(x): return x
        class C:
            "Doc"
            def m(self):
                "Doc"
                return 1
        class Kernel:
            def __init__(self, fn): self.fn = fn
        k = Kernel(g)
    """

    def hashes(source):
        module = define(source)
        return [source_hash(o) for o in (module.C, module.C.m, module.g, module.k, module.g.__wrapped__)]

    before = hashes(source)
    assert hashes(source.replace('"Doc"', "'Other'")) == before
    assert before[2] == before[3] == before[4]
    after = hashes(source.replace("return 1", "return 2"))
    assert after[0] != before[0] and after[1] != before[1] and after[2:] == before[2:]


def test_hash_is_the_same_in_every_python(define):
    # measured under one Python, read under another: this value must not depend on the version
    source = """
        def f(x: int, *a, k=None, **kw) -> str:
            return f'{x!r:>{k}}' + str([y for y in a[1:] if y])
    """
    assert source_hash(define(source).f) == "05f523584b85"


def test_round_trip_and_stale_flag(define, tmp_path):
    f = define(ORIGINAL).f
    rows = [{"name": "f", "median": 1.5}]
    path = save_result("99_toy", rows, functions=(f,), folder=tmp_path / "results", device="cpu")
    assert path.name == "99_toy.cpu.json" and [p.name for p in path.parent.iterdir()] == [path.name]

    fresh = load_result("99_toy", functions=(f,), folder=path.parent)
    assert fresh.rows == rows and not fresh.stale and "STALE" not in caption(fresh)
    assert fresh.machine["date"] in caption(fresh) and "torch" in caption(fresh)
    fresh.machine["gpu"] = "NVIDIA X"
    assert "on one NVIDIA X, " in caption(fresh) and "on 2 NVIDIA X, " in caption(fresh, num_gpus=2)
    assert stale_results(path.parent) == []

    define(SAME)
    assert stale_results(path.parent) == []  # found by import, without the function in hand

    g = define(OTHER).f
    assert load_result("99_toy", folder=path.parent).stale == ("measured:f",)
    assert "STALE" in caption(load_result("99_toy", functions=(g,), folder=path.parent))
    assert stale_results(path.parent) == ["99_toy.cpu.json: measured:f"]

    define("")  # renamed or removed
    assert load_result("99_toy", folder=path.parent).stale == ("measured:f",)


def test_a_function_that_was_not_measured_is_stale(define, tmp_path):
    f = define(ORIGINAL).f
    save_result("99_toy", [], functions=(), folder=tmp_path, device="cpu")
    assert load_result("99_toy", folder=tmp_path).stale == ()
    assert load_result("99_toy", functions=(f,), folder=tmp_path).stale == ("measured:f",)


def test_nothing_stored(tmp_path):
    assert load_result("99_toy", folder=tmp_path) is None
    assert caption(None) == "Not measured yet."


def test_which_result_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)

    def store(label, gpu, date):
        text = json.dumps(dict(name="t", rows=[label], functions={}, machine=dict(gpu=gpu, date=date)))
        (tmp_path / f"t.{label}.json").write_text(text)

    store("cpu", "", "2026-12-31")
    assert load_result("t", folder=tmp_path).rows == ["cpu"]
    store("a100", "NVIDIA A100", "2026-01-01")
    store("h200", "NVIDIA H200", "2026-02-01")
    assert load_result("t", folder=tmp_path).rows == ["h200"]
    assert load_result("t", folder=tmp_path, device="cpu").rows == ["cpu"]
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert load_result("t", folder=tmp_path).rows == ["a100"]


def test_results_dir_from_the_root_from_nbs_and_by_override(tmp_path, monkeypatch):
    monkeypatch.delenv("MINIVLLM_RESULTS", raising=False)
    results = tmp_path / "nbs" / "results"
    results.mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "nbs", results):
        monkeypatch.chdir(folder)
        assert bench.results_dir() == results
    (results / "t.cpu.json").write_text(json.dumps(dict(name="t", rows=["old"], functions={}, machine=dict(gpu="", date="1"))))
    monkeypatch.setenv("MINIVLLM_RESULTS", str(tmp_path / "out"))
    assert bench.results_dir() == tmp_path / "out"
    assert load_result("t").rows == ["old"]  # what the override doesn't have is still found
    assert save_result("u", [], device="cpu") == tmp_path / "out" / "u.cpu.json"


def test_machine_names_no_host_no_user_and_no_path():
    values = [str(value) for value in bench.machine().values()]
    assert not any("/" in value for value in values)
    assert not {platform.node(), getpass.getuser()} & set(values)


def test_gpu_guard_says_what_stands_in(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MINIVLLM_RESULTS", str(tmp_path))
    assert gpu_here("99_toy") is False
    assert "Not measured yet" in capsys.readouterr().out
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    assert gpu_here("99_toy") is True and capsys.readouterr().out == ""


def test_gauges():
    assert 1e-5 < bench.host_loop_seconds() < 1
    assert 50e6 < bench.peak_rss() < 1e12


def test_importing_it_leaves_triton_alone():
    # TRITON_INTERPRET has to be set before triton is imported, and notebooks import this module first
    code = "import sys, minivllm.bench, minivllm.viz; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
