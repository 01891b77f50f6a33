"""Compiles the package's kernels for every GPU generation, on a machine without a GPU

The launchers themselves say what to compile: they are called on tensors that claim to lie on a GPU, and what they would launch is recorded. `tests/test_kernel_targets.py` runs this file as a program, because in its own process kernels are interpreted. `python tests/kernel_targets.py --table` shows what every kernel needs.
"""
import os

if __name__ == "__main__":  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # a tenth of the time
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default, but Triton 3.9 warns if nothing is said

import argparse
import contextlib
import json
import math
import multiprocessing
import multiprocessing.connection
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

if __name__ == "__main__":  # beside a script Python does not look in the folder above
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from minivllm.kernels.common import triton

from kernel_launches import LAUNCHERS


@dataclass(frozen=True)
class Target:
    "A GPU generation: what a kernel gets there, and a device of it"

    shared: int  # bytes of shared memory that one program can have
    num_sms: int


TARGETS = {
    80: Target(163 * 1024, 108),
    86: Target(99 * 1024, 82),
    89: Target(99 * 1024, 128),
    90: Target(227 * 1024, 132),
    100: Target(227 * 1024, 148),
    120: Target(99 * 1024, 170),
}
TENSOR_MEMORY = 512  # columns, on sm_100


# Tensors of a GPU that is not there


class CudaTensor(torch.Tensor):
    "A meta tensor (sizes and strides, no values) that says it is on cuda:0"

    DEVICE = torch.device("cuda", 0)
    device = property(lambda self: self.DEVICE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    def data_ptr(self):
        "Allocations are aligned; a view is as far off as its offset"
        return self.storage_offset() * self.element_size()

    def get_device(self):
        return 0


def to_meta(x):
    if isinstance(x, CudaTensor):
        return x.as_subclass(torch.Tensor)
    return torch.device("meta") if isinstance(x, (str, torch.device)) and str(x).startswith("cuda") else x


def to_cuda(x):
    if type(x) in (tuple, list):
        return type(x)(map(to_cuda, x))
    return x.as_subclass(CudaTensor) if type(x) is torch.Tensor and x.device.type == "meta" else x


class CudaTensors(TorchFunctionMode):
    "Under this mode what torch makes on a GPU is a `CudaTensor`; to look at values is an error"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(to_meta, (args, kwargs or {}))
        return to_cuda(func(*args, **kwargs))


def forget_cached_choices():
    "Empty the caches of the package's functions: they may hold choices for another GPU"
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "minivllm":
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()


@contextlib.contextmanager
def pretend_gpu(capability):
    "torch answers as on a machine whose GPU has this capability, 90 for 9.0"
    target = TARGETS.get(capability, Target(64 * 1024, 40))
    version = divmod(capability, 10)
    properties = SimpleNamespace(
        name=f"sm_{capability}", major=version[0], minor=version[1], warp_size=32,
        multi_processor_count=target.num_sms, shared_memory_per_block_optin=target.shared,
        L2_cache_size=50 << 20, total_memory=80 << 30, regs_per_multiprocessor=65536,
    )
    answers = {
        "get_device_capability": lambda device=None: version,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "device": lambda device=None: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        forget_cached_choices()
        stack.callback(forget_cached_choices)
        stack.enter_context(CudaTensors())
        yield


class PretendDriver:
    "What Triton's compiler asks of a driver; its devices are numbered by their capability"

    def __init__(self, capability):
        self.capability = capability
        properties = {"max_shared_mem": TARGETS[capability].shared, "multiprocessor_count": TARGETS[capability].num_sms, "warpSize": 32}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # Triton keeps one cache a device

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return CudaTensor.DEVICE


# Launches: recorded, then compiled


@dataclass
class Launch:
    "One kernel as a launcher of the package calls it"

    op: str
    case: dict  # what the launcher was called with, for people
    target: int
    kernel: object
    args: tuple
    kwargs: dict
    grid: tuple
    key: tuple  # tells configurations apart: target, kernel, dtype of the case, types and tile
    tile: dict  # the kernel's constants, and how many warps and stages
    hints: int  # arguments that Triton knows to be divisible by 16: copies are pipelined, in shared memory

    def run(self):
        triton.runtime.driver.set_active(PretendDriver(self.target))
        return self.kernel.run(*self.args, grid=self.grid, warmup=True, **self.kwargs)

    def rank(self):
        "Grows with the tile: to compare launches of one kernel. Among equals, one with all optional pointers"
        sizes = [v for v in self.tile.values() if isinstance(v, int) and v > 0]
        return math.prod(sizes), -sum(v is None for v in self.tile.values()), self.case["dtype"].itemsize

    @property
    def main_dtype(self):
        return self.case["dtype"] == LAUNCHERS[self.op].dtypes[0]


def check_launch(kernel, bound, grid):
    "What a compiler does not see: a grid and arguments that a GPU would refuse"
    for name, value in bound.items():
        value = getattr(value, "base", value)  # of a tensor descriptor
        if isinstance(value, torch.Tensor) and not isinstance(value, CudaTensor):
            raise ValueError(f"{kernel.__name__}: {name} is on {value.device}")
    limits = (2**31 - 1, 65535, 65535)
    if not all(isinstance(n, int) and 0 < n <= limit for n, limit in zip(grid, limits)):
        raise ValueError(f"{kernel.__name__}: grid {grid}")


def recorder(launches, op, case, target):
    "Stands in for the method of Triton's kernels that compiles and launches"

    def run(kernel, *args, grid, warmup, **kwargs):
        _, _, _, _, binder = kernel.device_caches[target]
        bound, specialization, options = binder(*args, **kwargs)
        grid = tuple(grid(bound) if callable(grid) else grid)
        check_launch(kernel, bound, grid)
        tile = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr or bound[p.name] is None}
        tile |= {k: v for k, v in options.items() if k in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
        types, hints = zip(*((str(s[0]), s[1]) for s in specialization))
        types = tuple(t for t in types if t[0] == "*" or t.startswith("tensordesc"))
        key = (target, kernel.module, kernel.__name__, case["dtype"], types, str(tile))
        launches.append(Launch(op, case, target, kernel, args, kwargs, grid, key, tile, sum(h == "D" for h in hints)))

    return run


def choose_launchers(names=None):
    "The registered launchers of the package, or those of these names"
    return [LAUNCHERS[name] for name in names] if names else [one for one in LAUNCHERS.values() if not one.toy]


def record(launcher, target):
    "The configurations that a launcher chooses over all its cases, each with the most that Triton can know of it"
    from triton.runtime.jit import JITFunction
    triton.runtime.driver.set_active(PretendDriver(target))
    launches = {}
    with pretend_gpu(target):
        for case in launcher.cases():
            found = []
            with mock.patch.object(JITFunction, "run", recorder(found, launcher.name, case, target)):
                launcher.call(**case)
            for launch in found:
                if launch.key not in launches or launch.hints > launches[launch.key].hints:
                    launches[launch.key] = launch
    return list(launches.values())


def largest(launches):
    "Of every kernel the largest tile for each target and dtype: for each head_dim in attention, else in each mode of its code, such as with splits to sum"
    best = {}
    for launch in launches:
        if LAUNCHERS[launch.op].attention:
            part = launch.case["head_dim"]
        else:
            part = (*(v for v in launch.tile.values() if isinstance(v, (str, bool))), launch.tile.get("SPLITS", 1) > 1)
        group = (launch.op, launch.kernel.__name__, launch.target, launch.case["dtype"], part)
        if group not in best or launch.rank() > best[group].rank():
            best[group] = launch
    return list(best.values())


MAIN_TARGET = 90


def select(launches, everything=False):
    "The largest tiles of every dtype, in all but a launcher's first for one target only; or every configuration of the first, the largest tiles of the others"
    main = [launch for launch in launches if launch.main_dtype]
    others = largest(launch for launch in launches if not launch.main_dtype)
    if everything:
        return main + others
    # Another dtype changes loads and conversions, for every target in much the same way; compiling
    # all of them for all six takes three times as long.
    return largest(main) + [launch for launch in others if launch.target == MAIN_TARGET]


MATRIX = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"mma\.sync"}


def resource_usage(cubin):
    "Registers a thread, and bytes of its stack (spilled registers, mostly)"
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", out))
    return int(found.get("REG", -1)), int(found.get("STACK", -1))


def widest_load(ptx):
    "Bits that a thread's widest load from global memory brings, or TMA"
    if "cp.async.bulk.tensor" in ptx:
        return "TMA"
    bits = [8 * int(n, 0) for n in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*\], (\w+)", ptx)]
    bits += [int(n or 1) * int(b) for n, b in re.findall(r"ld\.global[.\w:]*?(?:\.v(\d))?\.[bfus](\d+)\b", ptx)]
    return f"{max(bits, default=0)}b"


def hinted_fetches(ptx):
    "Copies by descriptor, those that carry a cache policy, and descriptors that are fetched in advance"
    copies = re.findall(r"cp\.async\.bulk\.tensor[^;]*;", ptx)
    return len(copies), sum("L2::cache_hint" in copy for copy in copies), ptx.count("prefetch.tensormap")


def cpu_seconds():
    "Of this process and the tools that it ran"
    spent = os.times()
    return round(spent.user + spent.system + spent.children_user + spent.children_system, 2)


def compile_launch(launch):
    "What the compiled kernel needs, as plain values"
    compiled = launch.run()
    ptx, ttir = compiled.asm["ptx"], compiled.asm.get("ttir", "")
    registers, stack = resource_usage(compiled.asm["cubin"])
    return dict(
        shared=compiled.metadata.shared, tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0, registers=registers, stack=stack,
        num_warps=compiled.metadata.num_warps, num_stages=compiled.metadata.num_stages,
        matrix=[name for name, pattern in MATRIX.items() if re.search(pattern, ptx)],
        wants_matrix=bool(re.search(r"tt\.dot .*tensor<\w+x(?:bf16|f16)>", ttir)),
        loads=widest_load(ptx), hinted=hinted_fetches(ptx), seconds=cpu_seconds(),
    )


def describe(launch):
    case = {k: str(v).removeprefix("torch.") for k, v in launch.case.items()}
    tile = {k: v if isinstance(v, (int, float)) else str(v) for k, v in launch.tile.items()}
    return dict(op=launch.op, kernel=launch.kernel.__name__, target=launch.target, limit=TARGETS[launch.target].shared, case=case, tile=tile, grid=launch.grid)


def compile_into(launch, path):
    try:
        row = compile_launch(launch)
    except Exception as error:
        row = dict(error=f"{type(error).__name__}: {error}")
    pathlib.Path(path).write_text(json.dumps(row))


def compile_all(launches, workers=2):
    "A process for each launch: the compiler keeps nothing, and may abort"
    from triton.runtime.cache import triton_key
    triton_key()  # reads all of Triton: once, and not in every process
    fork = multiprocessing.get_context("fork")
    waiting = deque(sorted(launches, key=Launch.rank, reverse=True))
    rows, running = [], {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < workers:
                launch, path = waiting.popleft(), pathlib.Path(folder, str(len(waiting)))
                process = fork.Process(target=compile_into, args=(launch, path))
                process.start()
                running[process.sentinel] = (process, launch, path)
            for sentinel in multiprocessing.connection.wait(running):
                process, launch, path = running.pop(sentinel)
                process.join()
                died = dict(error=f"the compiler ended with code {process.exitcode}")
                rows.append(describe(launch) | (json.loads(path.read_text()) if path.exists() else died))
    return sorted(rows, key=lambda row: (row["op"], row["kernel"], row["target"], str(row["case"])))


def complaint(row):
    "What is wrong with a compiled kernel; None: nothing"
    where = f"{row['op']}: {row['kernel']} for sm_{row['target']} at {row['case']} with {row['tile']}"
    if "error" in row:
        return f"{where}: {row['error']}"
    if row["shared"] > row["limit"]:
        return f"{where} needs {row['shared'] / 1024:.1f} KiB of shared memory, the limit is {row['limit'] // 1024} KiB"
    if row["tensor_memory"] > TENSOR_MEMORY:  # Triton makes a kernel of it that only traps
        return f"{where} needs {row['tensor_memory']} columns of tensor memory, there are {TENSOR_MEMORY}"
    if row["wants_matrix"] and not row["matrix"]:
        return f"{where} has a dot of 16-bit floats and no matrix instruction"


def locate(error):
    "The error and the last line of the package that led to it"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "torch" not in f.filename and f.filename != __file__]
    where = "".join(f" ({pathlib.Path(f.filename).name}:{f.lineno}: {f.line})" for f in frames[-1:])
    return f"{type(error).__name__}: {error}{where}"


def failures(rows):
    "Complaints about kernels, one a line"
    return [text for text in map(complaint, rows) if text]


def table(rows):
    "What every kernel needs, one line each"
    titles = ["kernel", "sm", "case", "tile", "grid", "warps", "stages", "KiB", "of", "regs", "stack", "load", "matrix"]
    lines = []
    for row in rows:
        case, tile = (" ".join(f"{k}={v}" for k, v in row[key].items() if k not in ("num_warps", "num_stages")) for key in ("case", "tile"))
        line = [row["kernel"], row["target"], case, tile, "x".join(map(str, row["grid"]))]
        if "error" in row:
            lines.append([*line, row["error"].splitlines()[0][:100]])
            continue
        needs = [row[k] for k in ("num_warps", "num_stages")] + [f"{row['shared'] / 1024:.1f}", row["limit"] // 1024]
        lines.append([*line, *needs, row["registers"], row["stack"], row["loads"], "+".join(row["matrix"]) or "-"])
    lines = [[str(cell) for cell in line] for line in [titles, *lines]]
    widths = [max(len(line[i]) for line in lines if len(line) == len(titles)) for i in range(len(titles))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def main():
    parser = argparse.ArgumentParser(description="Compile the package's Triton kernels for GPUs that are not here")
    parser.add_argument("--all", action="store_true", help="every configuration, not only the largest tiles; these in every dtype for every target")
    parser.add_argument("--launchers", nargs="*", help="only these")
    parser.add_argument("--targets", nargs="*", type=int, default=list(TARGETS), help="such as 90 for sm_90")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print what every kernel needs")
    parser.add_argument("--list", action="store_true", help="record the launches, compile nothing")
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args()
    start, rows, launches = time.perf_counter(), [], []
    for chosen in choose_launchers(options.launchers):
        for target in options.targets:
            if chosen.targets and target not in chosen.targets:
                continue
            try:
                found = record(chosen, target)
            except Exception as error:
                rows.append(dict(op=chosen.name, kernel="-", target=target, limit=0, case={}, tile={}, grid=[], error=locate(error)))
            else:
                launches += select(found, options.all)
    print(f"{len(launches)} launches recorded in {time.perf_counter() - start:.1f} s", flush=True)
    if options.list:
        rows += map(describe, launches)
        print(*(f"{r['kernel']} sm_{r['target']} {r['case']} {r['tile']} {r['grid']} {r.get('error', '')}" for r in rows), sep="\n")
        return
    rows += compile_all(launches, options.workers)
    print(f"compiled in {time.perf_counter() - start:.1f} s")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows))
    if options.table:
        print(table(rows))
    print(*failures(rows), sep="\n")
    sys.exit(bool(failures(rows)))


if __name__ == "__main__":
    main()
