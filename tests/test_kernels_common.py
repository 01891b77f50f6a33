"What all kernels share: the import, rounding and products in the interpreter, where kernels run, and who touches what"
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minivllm.kernels import common
from minivllm.kernels.common import MissingTriton, can_launch, dot, record_accesses, reserve_shared, round_to, tl, triton
from paging import KERNEL_DEVICES
from rigs import tiny_model

ROOT = Path(__file__).parents[1]
interpreted = pytest.mark.skipif(not common.INTERPRETED.value, reason="kernels are compiled here")


def run(script, **env):
    "What a script prints in a Python of its own, where Triton has not been imported"
    outside = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment = outside | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# Without Triton

WITHOUT_TRITON = "import sys; sys.modules['triton'] = None\n"


def test_without_triton_the_twins_run_and_a_launch_says_what_to_do():
    lines = run(WITHOUT_TRITON + """
import torch
from minivllm.layers.activation import gelu_and_mul_triton, silu_and_mul, silu_and_mul_torch, silu_and_mul_triton
x = torch.randn(3, 3000)
assert silu_and_mul(x).equal(silu_and_mul_torch(x))
for launch in (silu_and_mul_triton, gelu_and_mul_triton):
    try:
        launch(x)
    except RuntimeError as e:
        print(e)
""")
    assert lines == ["Triton is not installed: call the torch twin, whose name ends in _torch"] * 2


def test_without_triton_the_engine_generates():
    script = f"""
from minivllm import LLM, SamplingParams
with LLM({str(tiny_model("llama")[0])!r}, skip_tokenizer_init=True, dtype="float32", num_kv_blocks=8, device="cpu") as llm:
    outputs = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
print(outputs[0].outputs[0].token_ids)
"""
    assert run(WITHOUT_TRITON + script)[-1] == run(script)[-1]


def test_every_module_imports_without_triton():
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "minivllm").rglob("[a-z]*.py")]
    lines = run(WITHOUT_TRITON + f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint('all')")
    assert lines == ["all"]


def test_the_stand_in_swallows_definitions_and_computes_what_launchers_need():
    stub = MissingTriton()

    @stub.jit
    def kernel(x_ptr, BLOCK: stub.constexpr):
        stub.store(x_ptr + stub.arange(0, BLOCK), 0.0)

    with pytest.raises(RuntimeError, match="_torch"):
        kernel[(1,)](torch.zeros(4), BLOCK=4)
    for n in range(1, 70):
        assert stub.next_power_of_2(n) == triton.next_power_of_2(n) and stub.cdiv(n, 8) == triton.cdiv(n, 8)
    assert not hasattr(stub, "__wrapped__")  # what inspect and doctest look for in everything


# The choice at import

PRINT_CHOICE = "import os, minivllm.kernels.common as c; print(os.environ.get('TRITON_INTERPRET'), c.INTERPRETED.value)"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_kernels_are_interpreted_unless_told_otherwise():
    assert run(PRINT_CHOICE) == ["1 True"]
    assert run(PRINT_CHOICE, TRITON_INTERPRET="0") == ["0 False"]
    assert run("import triton; " + PRINT_CHOICE) == ["None False"]  # too late to choose


# Where kernels run


@pytest.fixture
def fresh():
    "`can_launch` without what it remembers of this machine"
    can_launch.cache_clear()
    yield can_launch
    can_launch.cache_clear()


def test_kernels_run_from_sm_80_on(fresh, monkeypatch, caplog):
    capability = {0: (7, 5), 1: (8, 0), 2: (12, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    with caplog.at_level(logging.WARNING, "minivllm"):
        for _ in range(3):  # it is asked in every call
            assert [fresh(torch.device("cuda", i)) for i in range(3)] == [False, True, True]
    assert [record.getMessage() for record in caplog.records] == ["cuda:0 has compute capability 7.5, Triton needs 8.0: kernels run in torch"]
    assert not fresh(torch.device("cpu"))


def test_kernels_run_nowhere_without_triton(fresh, monkeypatch, caplog):
    monkeypatch.setattr(common, "triton", MissingTriton())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with caplog.at_level(logging.WARNING, "minivllm"):
        assert not fresh(torch.device("cuda", 0))
    assert "not installed" in caplog.text


# Arithmetic


@triton.jit
def round_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, round_to(x, out_ptr.dtype.element_ty), mask=offsets < n)


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr, ADD: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + tile), tl.load(b_ptr + tile)
    if ADD:
        tl.store(out_ptr + tile, dot(a, b, tl.load(out_ptr + tile)))
    else:
        tl.store(out_ptr + tile, dot(a, b))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_to_rounds_as_torch_does(dtype, device):
    ties = 1 + torch.arange(16) / 2**8 + torch.tensor([[0], [2**-20], [-(2**-20)]])
    ends = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-30, -6e4, 3.4e38 if dtype == torch.bfloat16 else 6e4])
    x = torch.cat((ties.flatten(), -ties.flatten(), ends, torch.randn(2000))).to(device)
    out = torch.empty(len(x), dtype=dtype, device=device)
    round_kernel[(triton.cdiv(len(x), 256),)](x, out, len(x), BLOCK=256)
    assert out.equal(x.to(dtype))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_has_the_full_precision_of_its_operands(dtype, add, device):
    a, b = torch.randn(2, 32, 32, device=device).to(dtype)
    out = torch.randn(32, 32, device=device)
    expected = a.double() @ b.double() + (out.double() if add else 0)
    product_kernel[(1,)](a, b, out, N=32, ADD=add)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)  # TF32 would be off by 1e-2


# Who touches what


@triton.jit
def row_kernel(x_ptr, y_ptr, n, x_stride, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * x_stride + columns, mask=columns < n)
    tl.store(y_ptr + tl.program_id(0) * n + columns, 2 * x, mask=columns < n)


@triton.jit
def corner_kernel(x_ptr):
    tl.store(x_ptr + tl.program_id(0) * 10 + tl.program_id(1), tl.load(x_ptr))


@interpreted
def test_accesses_are_elements_of_the_right_tensor():
    x, y = torch.randn(2, 5)[:, 1:4], torch.empty(2, 3)
    accesses = record_accesses(row_kernel, (2,), x, y, 3, 5, BLOCK=4)
    assert y.equal(2 * x)
    assert accesses == [
        dict(program=0, kind="load", tensor="x", elements=[0, 1, 2], masked=[3]),
        dict(program=0, kind="store", tensor="y", elements=[0, 1, 2], masked=[3]),
        dict(program=1, kind="load", tensor="x", elements=[5, 6, 7], masked=[8]),
        dict(program=1, kind="store", tensor="y", elements=[3, 4, 5], masked=[6]),
    ]


@interpreted
def test_accesses_of_a_grid_of_two_and_of_single_elements():
    accesses = record_accesses(corner_kernel, (1, 2), torch.zeros(20))
    assert [(a["program"], a["kind"], a["elements"]) for a in accesses] == [
        ((0, 0), "load", [0]), ((0, 0), "store", [0]), ((0, 1), "load", [0]), ((0, 1), "store", [1])]


@interpreted
def test_recording_ends_with_the_kernel():
    from triton.runtime.interpreter import interpreter_builder

    record_accesses(corner_kernel, (1, 1), torch.zeros(20))
    with pytest.raises(Exception):
        record_accesses(row_kernel, (1,), torch.zeros(4))  # arguments are missing
    assert not {"create_masked_load", "create_masked_store"} & vars(interpreter_builder).keys()


def test_compiled_kernels_cannot_be_watched(capsys):
    class Compiled:
        fn = None

    assert record_accesses(Compiled(), (1,)) == []
    assert "TRITON_INTERPRET=1" in capsys.readouterr().out


def test_shared_memory_is_reserved_for_as_many_programs_as_run(monkeypatch):
    set_to = []
    driver = SimpleNamespace(cuFuncSetAttribute=lambda function, attribute, value: set_to.append((function.value, attribute, value)))
    monkeypatch.setattr(common, "_cuda_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(shared_memory_per_multiprocessor=228 * 1024))
    kernel = SimpleNamespace(function=1234, metadata=SimpleNamespace(shared=96 * 1024))
    for num_programs in (1, 1, 2, 3, None):
        reserve_shared(kernel, num_programs)
    # 97 of 228 KB, once; as much of it for two; all there is; and what the driver likes
    assert set_to == [(1234, 9, percent) for percent in (43, 86, 100, -1)]
    reserve_shared(None, 1)  # what the interpreter returns
    monkeypatch.setattr(common, "_cuda_driver", lambda: None)
    reserve_shared(SimpleNamespace(), 1)  # no driver to be asked


def test_no_driver_is_asked_where_nothing_starts_early(monkeypatch):
    monkeypatch.setattr(common.ctypes, "CDLL", lambda name: name)
    for options, driver in (({}, None), (dict(PDL=True), "libcuda.so.1")):
        monkeypatch.setattr(common, "early_launch", lambda device: options)
        assert common._cuda_driver.__wrapped__() == driver
