"""What `csr` says of GPUs: what it refuses, what `auto` chooses, and that its kernels compile; all without a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import row_cases
import torch
from row_cases import INTERPRETED, MARKS, TRITON, dot, leaf, moved, scattered
from torch._subclasses.fake_tensor import FakeTensorMode

from mpnn import graphs
from mpnn.backends import csr
from mpnn.engine.plan import plan, refusal as why_not
from mpnn.graph import Graph
from mpnn.round import Round
from mpnn.scores import AdditiveScore, Dot, LeakyReLU

pytestmark = MARKS
installed_triton = version("triton") if find_spec("triton") else ""


def test_features_wider_than_its_kernels_take_are_refused() -> None:
    wide = moved(replace(dot(scattered()), value=leaf(10, 3, 5000)), TRITON.device)
    assert "at most 4,096 wide, and these are 5,000 wide" in why_not(csr.ATTENTION["cuda"], wide)


def on_cuda(graph: Graph, kind: str) -> Round:
    """A request with features that are nowhere, but claim to be on a GPU."""
    with FakeTensorMode():
        query, key, value, dst, src, gate = (
            torch.empty(n, *shape, dtype=torch.bfloat16, device="cuda:0", requires_grad=True)
            for n, *shape in (
                (graph.num_dst, 8, 64), (graph.num_src, 8, 64), (graph.num_src, 8, 64), (graph.num_dst, 8),
                (graph.num_src, 8), (graph.num_dst, 8, 1),
            )
        )  # fmt: skip
    if kind == "aggregation":
        return Round(graph, value, normalize="none")
    score = Dot(query, key, 0.1) if kind == "dot" else AdditiveScore(dst, src, LeakyReLU())
    if kind == "recurrence":
        return Round(graph, value, Dot(query, key, 0.1), normalize="none", log_gate=gate)
    return Round(graph, value, score)


def citations() -> Graph:
    return graphs.from_edges(torch.randint(0, 20_000, (2, 200_000)), 20_000)


@pytest.mark.parametrize(
    ("kind", "graph", "backend"),
    [
        ("dot", graphs.complete().bind(4096), "dense"),
        ("dot", graphs.causal().bind(4096), "dense"),
        ("dot", citations(), "csr"),
        ("GAT", citations(), "csr"),
        ("aggregation", citations(), "csr"),
        ("GAT", graphs.complete().bind(64), "csr"),
        ("recurrence", graphs.causal().bind(4096), "scan"),
    ],
)
def test_the_plan_for_a_gpu_is_sensible_where_it_is_clear(kind: str, graph: Graph, backend: str) -> None:
    found = plan(on_cuda(graph, kind))
    assert found.backend == backend
    assert all(0 < c.seconds < 1 for c in found.candidates if c.reason is None)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, sentence in (
        (None, "triton is not installed: pip install triton"),
        (SimpleNamespace(__version__="3.5.1"), "need triton 3.6, which PyTorch 2.11 and newer install"),
    ):
        monkeypatch.setitem(sys.modules, "triton", module)
        for kind in ("dot", "aggregation"):
            assert sentence in why_not(csr, on_cuda(graphs.causal().bind(3), kind))


# ---------------------------------------------------------------------------------------- for a GPU, without one

COMPILING = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class NoDevice:
    get_current_target = lambda self: GPUTarget("cuda", int(sys.argv[1]), 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

triton.runtime.driver.set_active(NoDevice())
launch, compiled = JITFunction.run, []

def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    name = f"{self.fn.__module__}.{self.fn.__name__}".removeprefix("mpnn.kernels.")
    compiled.append((name, len(kernel.asm["cubin"])))

JITFunction.run = compile_only
sys.path.insert(0, sys.argv[2])
import row_cases as given
from mpnn.kernels.cuda import schedule
schedule._PIECE = 20
in_double = given.leaf, given.halves  # which takes long to compile
given.leaf, given.halves = (
    lambda *shape, make=make: make(*shape).detach().float().requires_grad_() for make in in_double
)
attending = given.REQUESTS["everything"](given.hubs())
from mpnn.aggregate import Max
plain = given.Round(
    attending.graph, given.halves(9, 2, 8), bias=(given.halves(100, 2),), normalize="none", reduce=Max()
)
for request in (attending, plain):
    backend = given.AGGREGATION if given.csr.is_plain(request) else given.ATTENTION
    backend.run(request).out.sum().backward()
from mpnn.kernels import derivatives
from mpnn.kernels.recurrent.cuda.recurrence import KERNEL
x = given.leaf(1, 9, 2, 8)
numbers = given.leaf(1, 9, 2, 8), given.leaf(1, 9, 2), given.leaf(1, 2, 8, 8)
derivatives.launch(KERNEL, (0.1, 2, (4, 9)), None, x, x, x, *numbers)[0].sum().backward()
from mpnn.kernels.recurrent.cuda.chunks import function
gate, beta, state = numbers
for gates in (gate, given.leaf(1, 9, 2)):
    function.run(*[x.bfloat16()] * 3, gates, beta, state, 0.1, 2, (4, 9), torch.bfloat16)[0].sum().backward()
from mpnn.kernels.recurrent.cuda.selective_scan import scan
x, B = given.leaf(1, 40, 64), given.leaf(1, 40, 16)
for narrow in (torch.bfloat16, torch.float32):
    rest = given.leaf(16, 64), B.to(narrow), B.to(narrow), given.leaf(1, 16, 64)
    scan(x.to(narrow), x, *rest, [4, 40])[0].sum().backward()
print(json.dumps([triton.__version__, *sorted(set(compiled))]))
"""


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU to compile for")
@pytest.mark.parametrize("architecture", ["80", "90"])
@pytest.mark.parametrize("triton", ["installed", "MPNN_OTHER_TRITON"])
def test_every_kernel_compiles_for_a_gpu(triton: str, architecture: str, tmp_path: Path) -> None:
    """What the interpreter takes, the compiler might not: here it compiles what calls would launch, for an A100 and an
    H100, by the Triton that is installed and by the one in the folder that MPNN_OTHER_TRITON names."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if triton != "installed":
        if triton not in os.environ:
            pytest.skip(f"{triton} names no folder: pip install --no-deps --target FOLDER triton==3.6.0")
        environment["PYTHONPATH"] = os.pathsep.join([os.environ[triton], environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, architecture, str(Path(row_cases.__file__).parent)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used, *kernels = json.loads(done.stdout)
    assert (used == installed_triton) == (triton == "installed")
    assert {name for name, _ in kernels} == {
        *(f"rows.cuda.{name}" for name in (
            "forward.attend", "forward.join", "backward.deltas", "backward.gradients", "aggregate.segment_reduce",
            "aggregate.join", "aggregate.segment_reduce_backward",
        )),
        *(f"recurrent.cuda.{name}" for name in (
            "recurrence.forward", "recurrence.backwards", "recurrence.forwards", "chunks.within.gates",
            "chunks.within.scores", "chunks.within.solve", "chunks.states.walk", "chunks.states.walk_back",
            "chunks.outputs.outputs", "chunks.outputs.sent", "chunks.gradients.values", "chunks.gradients.keys",
            "selective_scan.passed", "selective_scan.walk", "selective_scan.gradients",
        )),
    }  # fmt: skip
    assert all(size > 0 for _, size in kernels)
