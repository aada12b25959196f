"""Launches of Triton's kernels on a driver without a GPU: what a later call passes is what Triton itself would pass."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import row_cases

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not row_cases.INTERPRETED, reason="a GPU has a driver of its own"),
]

# A driver whose launcher writes down what it is given, and a compiler that gives empty kernels; all between them, from
# what Triton specializes on to the call of the launcher, is Triton's own.
DRIVER = """
import json, sys, time
from types import SimpleNamespace
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

launched, through_triton = [], []

class Launcher:
    def __init__(self, source, metadata):
        self.name = source.fn.__name__

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        launched.append((self.name, (x, y, z), stream, arguments))

class Utilities:
    load_binary = staticmethod(lambda name, kernel, shared, device: (1, 2, 32, 0, 1024))
    get_device_properties = staticmethod(lambda device: {"max_shared_mem": 232448})

class NoDevice:
    launcher_cls, utils, stream = Launcher, Utilities, 7
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: NoDevice.stream

def compile(source, target, options, **_):
    kernel = object.__new__(triton.compiler.CompiledKernel)
    kernel.src, kernel.asm, kernel.kernel, kernel.name, kernel.hash = source, {}, b"", source.fn.__name__, ""
    kernel.metadata = SimpleNamespace(shared=0, num_warps=1, name=kernel.name)
    kernel.metadata_group, kernel.packed_metadata = {}, ()
    kernel.module = kernel.function = kernel._run = None
    return kernel

triton.compiler.compile = compile
triton.runtime.driver.set_active(NoDevice())
run = JITFunction.run

def counted(self, *arguments, **options):
    through_triton.append(self.fn.__name__)
    return run(self, *arguments, **options)

JITFunction.run = counted
from mpnn.kernels.cuda import launch
sys.path[:0] = sys.argv[1:]

def plain(x):
    if isinstance(x, tuple):
        return [plain(y) for y in x]
    return x.data_ptr() if isinstance(x, torch.Tensor) else getattr(x, "value", getattr(x, "name", x))
"""

CALLS = """
import row_cases as rows
import test_cuda_tiles as tiles
from mpnn import graphs
from mpnn.backends import tiles as tile_backend
from mpnn.kernels.recurrent.cuda.chunks import function as chunks
from mpnn.kernels import derivatives
from mpnn.kernels.recurrent.cuda.recurrence import KERNEL
from mpnn.kernels.recurrent.cuda.selective_scan import scan

tiles.TRITON = rows.CPU
leaf = lambda *shape: torch.randn(shape).requires_grad_()
graph = rows.scattered()
n = graph.num_src
gat = rows.Round(graph, leaf(n, 2, 8), rows.AdditiveScore(leaf(graph.num_dst, 2), leaf(n, 2), rows.LeakyReLU(0.2)))
total = rows.Round(graph, leaf(n, 1, 8), normalize="none")
window = graphs.longformer(64, globals=1).bind(300)
exact, narrow = (tiles.attending(window, dtype, widths=(64, 64)) for dtype in (torch.float32, torch.bfloat16))
x, gate, beta, state = leaf(1, 9, 2, 16), leaf(1, 9, 2), leaf(1, 9, 2), leaf(1, 2, 16, 16)
steps, rates = leaf(1, 40, 64), (leaf(16, 64), leaf(1, 40, 16), leaf(1, 40, 16), leaf(1, 16, 64))
calls = {
    "GAT": lambda: rows.ATTENTION.run(gat).out,
    "sum": lambda: rows.AGGREGATION.run(total).out,
    "tiles, float32": lambda: tile_backend.WAYS["cuda"].run(exact).out,
    "tiles, bfloat16": lambda: tile_backend.WAYS["cuda"].run(narrow).out,
    "recurrence": lambda: derivatives.launch(KERNEL, (0.1, 2, (4, 9)), None, x, x, x, gate, beta, state)[0],
    "chunks": lambda: chunks.run(x, x, x, gate, beta, state, 0.1, 2, (4, 9), torch.float32)[0],
    "Mamba-1's scan": lambda: scan(steps, steps, *rates, [4, 40])[0],
}
found = {}
for name, call in calls.items():
    turns = []
    for stream in (7, 8, 9):
        NoDevice.stream = stream
        launched.clear(), through_triton.clear()
        call().sum().backward()
        turns.append(([*through_triton], [(*x[:3], plain(x[3])) for x in launched]))
    found[name] = turns
print(json.dumps(found))
"""


def in_process(program: str, triton: str, tmp_path: Path) -> Any:
    """The JSON that a program prints, by the Triton that is installed or by the one of MPNN_OTHER_TRITON."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = [str(Path(row_cases.__file__).parent), str(Path(__file__).parent / "tiles")]
    paths = [environment.get("PYTHONPATH", "")]
    if triton != "installed":
        if triton not in os.environ:
            pytest.skip(f"{triton} names no folder: pip install --no-deps --target FOLDER triton==3.6.0")
        paths.insert(0, os.environ[triton])
    file = tmp_path / "program.py"  # Triton reads the source of kernels
    file.write_text(DRIVER + program)
    done = subprocess.run(
        [sys.executable, str(file), *folders],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


both = pytest.mark.parametrize("triton", ["installed", "MPNN_OTHER_TRITON"])


def like(x: Any, y: Any) -> bool:
    """Whether arguments of two calls are the same but for addresses."""
    if isinstance(x, list):
        return isinstance(y, list) and len(x) == len(y) and all(map(like, x, y))
    return x == y or (isinstance(x, int) and isinstance(y, int) and min(x, y) > 2**32)


@both
def test_later_calls_of_every_kernel_pass_what_triton_would_pass(triton: str, tmp_path: Path) -> None:
    for name, turns in in_process(CALLS, triton, tmp_path).items():
        (by_triton, first), *others = turns
        assert 1 < len(by_triton) <= len(first), name
        for stream, (again, launched) in zip((8, 9), others, strict=True):
            assert again == [], name
            assert len(launched) == len(first)
            for (kernel, grid, _, arguments), (later, later_grid, later_stream, passed) in zip(
                first, launched, strict=True
            ):
                assert (later, later_grid, later_stream) == (kernel, grid, stream)
                assert like(arguments, passed), (name, kernel)


CHANGES = """
import triton.language as tl

@triton.jit
def add(x, y, n, more, SIZE: tl.constexpr, REAL: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at, mask=at < n, other=0.0).to(REAL)
    if more is not None:
        value += tl.load(more.data + at * more.step, mask=at < n, other=0.0)
    tl.store(y + at, value, mask=at < n)

from typing import Any, NamedTuple

class Vector(NamedTuple):
    data: Any
    step: int

launches = launch.Launches()
x, y = torch.zeros(64), torch.zeros(64)

def start(x, y, n, more):
    launches.start("key", add, (x, y, n, more), lambda: launch.Arguments(1, (), {"REAL": tl.float32, "SIZE": 32}))

cases = {
    "first": (x, y, 32, None),
    "other memory": (y.clone(), x.clone(), 32, None),
    "not aligned": (x[1:], y, 32, None),
    "another type": (x.double(), y, 32, None),
    "1": (x, y, 1, None),
    "another number": (x, y, 31, None),
    "in a tuple": (x, y, 32, Vector(x, 2)),
    "in a tuple, not aligned": (x, y, 32, Vector(x[1:], 2)),
    "in a tuple, another number": (x, y, 32, Vector(x, 1)),
}
new = {}
for name, arguments in [*cases.items(), *cases.items()]:
    launched.clear(), through_triton.clear()
    start(*arguments)
    (_, grid, _, passed), = launched
    assert plain(passed) == [*map(plain, arguments), 32, "fp32"], (name, passed)
    new.setdefault(name, []).append(len(through_triton))
print(json.dumps(new))
"""


@both
def test_whatever_triton_specializes_on_is_compiled_for(triton: str, tmp_path: Path) -> None:
    found = in_process(CHANGES, triton, tmp_path)
    assert found.pop("other memory") == [0, 0]
    assert set(map(tuple, found.values())) == {(1, 0)}, found


WAITS = (
    CALLS.split("found = {}")[0]
    + """
from watched import COPIES, LOOKS, Watched
found = {}
for name, call in calls.items():
    call().sum().backward()
    with Watched(LOOKS | COPIES) as watched:
        out = call()
        out.backward(torch.ones_like(out))
    found[name] = watched.looks
print(json.dumps(found))
"""
)


@both
def test_later_calls_neither_wait_for_the_device_nor_copy_from_it(triton: str, tmp_path: Path) -> None:
    """So that CUDA graphs capture them, as far as operators of torch show it."""
    found = in_process(WAITS, triton, tmp_path)
    assert found == {name: [] for name in found}


COSTS = (
    CALLS.replace("print(json.dumps(found))", "")
    + """
def cost(call):
    frames = []
    sys.setprofile(lambda frame, event, _: frames.append(event) if event == "call" else None)
    call()
    sys.setprofile(None)
    best = 1.0
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(10):
            call()
        best = min(best, (time.perf_counter() - began) / 10)
    return len(frames), best

def costs(call):
    with torch.no_grad():
        call()
        launched.clear()
        kept = cost(call)
        return kept, launched

keep = launch.Launches.start

def by_triton(self, key, kernel, operands, arguments):
    given = arguments()
    kernel[(given.programs,)](*operands, *given.numbers, **given.constants, num_warps=given.warps,
        num_stages=given.stages, maxnreg=given.registers)

found = {}
for name, call in calls.items():
    kept, _ = costs(call)
    launch.Launches.start = by_triton
    plain_launch, _ = costs(call)
    launch.Launches.start = keep
    found[name] = kept, plain_launch
print(json.dumps(found))
"""
)


@both
def test_a_kept_launch_takes_the_host_a_fraction_of_triton_s_own(
    triton: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Python frames of a forward pass, launches included, by kept launches and by `kernel[grid](...)`."""
    for name, ((frames, seconds), (before, longer)) in in_process(COSTS, triton, tmp_path).items():
        record_property(name, f"{frames} frames, {seconds * 1e6:.0f} us; by Triton {before}, {longer * 1e6:.0f} us")
        print(f"{name}: {frames} frames, {seconds * 1e6:.0f} us; by Triton {before}, {longer * 1e6:.0f} us")
        assert frames < before, name
