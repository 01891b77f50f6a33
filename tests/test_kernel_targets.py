"Every kernel of the package compiles for every GPU generation, and fits into its shared memory."
import importlib
import json
import logging
import os
import pathlib
import pkgutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import kernel_targets
import minivllm
from kernel_launches import LAUNCHERS
from kernel_targets import MAIN_TARGET, TARGETS, CudaTensor, complaint, pretend_gpu
from minivllm.kernels.common import MissingTriton, can_launch, triton

pytestmark = pytest.mark.skipif(isinstance(triton, MissingTriton), reason="Triton has no build for this machine")
PACKAGE = [one.name for one in LAUNCHERS.values() if not one.toy]


def compile_kernels(folder, *options, limit=3600):
    "Rows of `kernel_targets.py`, which runs as a program of its own: here kernels are interpreted"
    results = pathlib.Path(folder, "results.json")
    command = [sys.executable, pathlib.Path(__file__).with_name("kernel_targets.py"), "--json", results, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert results.exists(), done.stdout + done.stderr
    return json.loads(results.read_text())


@pytest.fixture(scope="module", params=["largest", pytest.param("all", marks=pytest.mark.slow)])
def rows(request, tmp_path_factory):
    "The largest tiles, or every configuration that a launcher chooses: `kernel_targets.select`"
    options = ["--all"] if request.param == "all" else []
    return compile_kernels(tmp_path_factory.mktemp("kernels"), *options)


@pytest.mark.parametrize("name, target", [
    pytest.param(name, target, id=f"{name}-sm_{target}") for name in PACKAGE for target in LAUNCHERS[name].targets or TARGETS
])
def test_compiles_and_fits(rows, name, target):
    found = [row for row in rows if (row["op"], row["target"]) == (name, target)]
    assert found, "nothing was launched"
    complaints = [text for text in map(complaint, found) if text]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("name", PACKAGE)
def test_every_kernel_is_compiled_in_the_dtypes_that_its_launcher_declares(rows, name):
    declared, compiled = {str(dtype).removeprefix("torch.") for dtype in LAUNCHERS[name].dtypes}, {}
    for row in rows:
        if (row["op"], row["target"]) == (name, MAIN_TARGET) and "error" not in row:
            compiled.setdefault(row["kernel"], set()).add(row["case"]["dtype"])
    assert compiled and all(dtypes == declared for dtypes in compiled.values()), compiled


@pytest.mark.parametrize("kernel", ["rms_norm_kernel", "norm_rope_store_kernel", "push_add_norm_kernel"])
def test_what_sums_splits_is_compiled_with_several_and_with_one(rows, kernel):
    "For every target, and in every dtype of the launcher"
    found = [row for row in rows if row["kernel"] == kernel and row["op"] != "rms_norm_triton" and "error" not in row]
    declared = {str(dtype).removeprefix("torch.") for dtype in LAUNCHERS[found[0]["op"]].dtypes}
    for several in (True, False):
        chosen = [row for row in found if (row["tile"]["SPLITS"] > 1) == several]
        assert {row["target"] for row in chosen} == set(TARGETS)
        assert {row["case"]["dtype"] for row in chosen if row["target"] == MAIN_TARGET} == declared
        assert all(row["stack"] == 0 for row in chosen), chosen  # in registers


@pytest.mark.parametrize("target, instruction", [(80, "mma"), (90, "wgmma"), (100, "tcgen05"), (120, "mma")])
def test_prefill_uses_the_matrix_units_of_its_generation(rows, target, instruction):
    found = [row for row in rows if row["target"] == target and row["kernel"] in ("paged_prefill_kernel", "paged_prefill_hopper_kernel")]
    found = [row for row in found if row["case"]["dtype"] != "float32"]
    assert found and all(instruction in row["matrix"] for row in found)


def modules():
    "The package's modules that may define kernels"
    return [importlib.import_module(m.name) for m in pkgutil.walk_packages(minivllm.__path__, "minivllm.") if ".kernels." in m.name or ".layers." in m.name]


def test_no_launcher_is_forgotten():
    defined = {name for module in modules() for name, value in vars(module).items()
               if name.endswith("_triton") and getattr(value, "__module__", "") == module.__name__}
    assert defined <= set(LAUNCHERS)


def test_no_kernel_is_forgotten(rows):
    kernels = {name for module in modules() for name in vars(module) if name.endswith("_kernel") and not name.startswith("_")}
    assert kernels <= {row["kernel"] for row in rows}


def test_the_kernel_for_hopper_uses_its_units(rows):
    found = [row for row in rows if row["kernel"] == "paged_prefill_hopper_kernel"]
    assert {row["target"] for row in found} == {90}
    assert all(row["matrix"] == ["wgmma"] and row["loads"] == "TMA" and row["stack"] <= 64 for row in found), found


def test_decode_tells_the_cache_that_keys_and_values_are_read_once(rows):
    "What Triton's own PTX doesn't say: a policy in every copy, and the descriptors of K and V asked for in advance"
    by_descriptor = [row for row in rows if row["kernel"] == "paged_decode_kernel" and row["tile"]["DESCRIPTORS"]]
    assert {row["target"] for row in by_descriptor} == {90, 100, 120}
    for row in by_descriptor:
        copies, with_policy, in_advance = row["hinted"]
        assert copies == with_policy >= 2 and in_advance == 2, (row["target"], row["tile"], row["hinted"])
    others = [row for row in rows if row.get("loads") == "TMA" and row["kernel"] != "paged_decode_kernel"]
    assert others and all(row["hinted"][1:] == [0, 0] for row in others)


# The checks bite


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return compile_kernels(tmp_path_factory.mktemp("toys"), "--all", "--launchers", "toy_matmul_triton", "toy_peek_triton", "--targets", 86, 90)


def test_a_tile_too_large_fails(toys):
    by_target = {row["target"]: row for row in toys if row["op"] == "toy_matmul_triton" and row["num_stages"] == 5}
    text = complaint(by_target[86])
    for part in ("toy_kernel for sm_86", "needs 128.0 KiB", "limit is 99 KiB", "'M': 128"):
        assert part in text
    assert complaint(by_target[90]) is None


def test_the_compiled_code_is_looked_at(toys):
    small = {row["target"]: row for row in toys if row["op"] == "toy_matmul_triton" and row["num_stages"] == 2}
    assert (small[86]["matrix"], small[90]["matrix"]) == (["mma"], ["wgmma"])
    assert all(32 < row["registers"] <= 255 and row["stack"] == 0 for row in small.values())
    assert "no matrix instruction" in complaint(small[90] | {"matrix": []})
    assert "576 columns" in complaint(small[90] | {"tensor_memory": 576})


def test_a_launcher_that_looks_at_values_fails(toys):
    texts = [complaint(row) for row in toys if row["op"] == "toy_peek_triton"]
    assert len(texts) == 2 and all("a.max() > 0" in text for text in texts)


def test_a_compiler_that_aborts_is_a_failure(monkeypatch):
    launch = kernel_targets.Launch("op", {"dtype": torch.bfloat16}, 90, torch.empty, (), {}, (1,), (), {}, 0)
    monkeypatch.setattr(kernel_targets, "compile_into", lambda launch, path: os.kill(os.getpid(), signal.SIGKILL))
    (row,) = kernel_targets.compile_all([launch])
    assert "the compiler ended with code -9" in complaint(row)


@pytest.mark.parametrize("arguments, grid, text", [
    ({"n": 3}, (0,), "grid"), ({"n": 3}, (8, 65536), "grid"), ({"x": torch.ones(2)}, (1,), "x is on cpu"),
])
def test_a_launch_that_a_gpu_refuses_fails(arguments, grid, text):
    with pytest.raises(ValueError, match=text):
        kernel_targets.check_launch(SimpleNamespace(__name__="kernel"), arguments, grid)


def test_tensors_of_the_pretended_gpu():
    with pretend_gpu(90):
        x = torch.empty(4, 8, device="cuda:0", dtype=torch.bfloat16)
        assert x.device == torch.device("cuda", 0) and torch.cuda.get_device_capability(x.device) == (9, 0)
        assert x[1:, 3:].data_ptr() == 22 and x[1:, 3:].stride() == (8, 1)
        made = [torch.empty_like(x), x.new_empty(2), torch.zeros(2, device=x.device), x.float(), *x.split(2)]
        assert all(isinstance(t, CudaTensor) for t in made)
        assert not isinstance(torch.empty(2), CudaTensor)
    assert torch.empty(2).device.type == "cpu"


# Older than any generation that Triton has matrix instructions for


def test_sm_75_falls_back_to_torch(caplog):
    with pretend_gpu(75), caplog.at_level(logging.WARNING, "minivllm"):
        device = torch.device("cuda", 0)
        assert not can_launch(device) and not can_launch(device)
    assert [r.getMessage() for r in caplog.records] == ["cuda:0 has compute capability 7.5, Triton needs 8.0: kernels run in torch"]
    with pretend_gpu(80):
        assert can_launch(device)


@pytest.mark.parametrize("name", [name for name in PACKAGE if name.endswith("_triton")])
@pytest.mark.parametrize("capability, expected", [(75, "torch"), (80, "triton")])
def test_dispatchers_choose_by_capability(name, capability, expected, monkeypatch):
    one, op, called = LAUNCHERS[name], name.removesuffix("_triton"), []
    module = importlib.import_module(one.dispatcher or one.module)
    for kind in ("torch", "triton"):
        monkeypatch.setattr(module, f"{op}_{kind}", lambda *args, kind=kind, **kwargs: called.append(kind))
    with pretend_gpu(capability):
        case = next(case for case in one.cases() if case.get("batch", [False])[-1] is False)  # no shared prefix
        one.example(getattr(module, op), **case)
    assert set(called) == {expected}
