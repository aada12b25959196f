"""A processor without AVX2 has no compiled kernels: rounds run by torch, with the results of the specification."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpnn.kernels.cpu import library

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from mpnn import MessagePassing, explain, graphs, ops
from mpnn.attention import Additive, AdditiveV2, DotProduct, Kernel
from mpnn.kernels.cpu import library

print(library.why_missing())
torch.manual_seed(0)
torch.set_num_threads(1)
edges = graphs.from_edges(torch.randint(0, 20, (2, 90)), 23)
x = torch.randn(23, 8)


def run(op, backend):
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = op(leaf, backend)
    out.square().sum().backward()
    return out.detach(), leaf.grad


def compare(name, op):
    for one, other in zip(run(op, "auto"), run(op, "edge_list"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    print(name)


def attend(graph, **options):
    heads = lambda x: x.view(23, 2, 4)
    return lambda x, backend: ops.attend(graph, heads(x), heads(x * 2), heads(x), backend=backend, **options)


for graph in (graphs.complete(), graphs.causal() & graphs.window(3), graphs.longformer(4, globals=1)):
    compare(str(graph), attend(graph.bind(23), softcap=3.0, dropout=0.2))
compare("edges", attend(edges, bias=torch.randn(90, 2)))
for attention in (Additive(8, 4, 2), AdditiveV2(8, 4, 2), Kernel(8, 2)):
    layers = {
        backend: MessagePassing(edges, "sum", None, attention, backend=backend)
        for backend in ("auto", "edge_list")
    }
    compare(type(attention).__name__, lambda x, backend: layers[backend](x))
for reduce in ("sum", "mean", "max", "min", "std"):
    compare(reduce, lambda x, backend: ops.aggregate(edges, x, reduce, backend=backend))
layer = MessagePassing(graphs.causal(), "sum", None, DotProduct(8, 2))
print(explain(layer, x).backend)
gates = -torch.rand(23, 2)
compare("gates", attend(graphs.causal().bind(23), normalize="none", log_gate=gates))
"""
RAN = ["complete()", "window(2) | global_nodes(1)", "edges", "Additive", "AdditiveV2", "Kernel", "std", "dense"]
RAN += ["gates"]
EMULATOR = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")


@pytest.mark.skipif(library.processor() == "arm64", reason="this processor is no x86-64")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([], id="by torch's variable"),
        pytest.param(
            [EMULATOR, "-cpu", "Nehalem"],
            id="emulated Nehalem",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    EMULATOR is None, reason="there is no qemu-x86_64: on Debian, apt install qemu-user"
                ),
            ],
        ),
    ],
)
def test_torch_computes_every_round(command: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("OPENBLAS_CORETYPE", None)  # which may name a processor with AVX2
    if not command:
        environment["ATEN_CPU_CAPABILITY"] = "default"
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("its kernels need AVX2 or arm64, and this processor")
    assert not [line for line in RAN if line not in lines], lines
