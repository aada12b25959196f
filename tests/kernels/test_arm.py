"""The kernels for arm64, as the wheel for Linux holds them, run by an emulator on what the kernels of this machine
computed: the same results, without a machine with such a processor and without torch there.

Each case is a real call of the library. What its kernels read and wrote is recorded, a program for arm64 runs them
again, and all that they wrote is compared.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kernel_calls
import pytest
import torch
from kernel_calls import Call
from torch import Tensor

from mpnn import MessagePassing, graphs, ops
from mpnn.attention import Additive, AdditiveV2
from mpnn.kernels.cpu import library
from mpnn.kernels.dense import drop_features
from mpnn.kernels.recurrent.selective import selective_scan
from mpnn.kernels.recurrent.state import state_update
from mpnn.kernels.rows import attention as row_attention, reduce as row_reduce

EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LIBC = Path("/usr/aarch64-linux-gnu")
WHY_MISSING = {
    EMULATOR is None: "there is no qemu-aarch64: on Debian, apt install qemu-user",
    not LIBC.exists(): f"there is no {LIBC}: on Debian, apt install libc6-arm64-cross",
    library.why_missing() is not None: "there are no compiled kernels to compare with",
}.get(True)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_MISSING is not None, reason=str(WHY_MISSING))]
# Sums have the same order in both libraries, but compilers fuse other products with sums: measured 1.8 at most.
ROUNDINGS = 8
WIDE, NARROW = [torch.float32, torch.float64], [torch.bfloat16, torch.float16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def edges(num_dst: int = 37, num_src: int = 41, count: int = 300) -> graphs.Graph:
    """A hub, nodes without in-neighbors, and edges in no order."""
    dst = torch.cat([torch.zeros(60, dtype=torch.int64), torch.randint(num_dst - 3, (count - 60,))])
    return graphs.from_edges(torch.stack([torch.randint(num_src, (count,)), dst]), num_src=num_src, num_dst=num_dst)


def backward(out: Tensor) -> None:
    out.backward(torch.randn_like(out))


def row_attention_calls() -> None:
    graph = edges()
    for dtype in WIDE:
        for heads, kv, options in ((4, 2, {}), (8, 8, {"softcap": 2.0}), (3, 1, {"normalize": "sigmoid"})):
            q, k, v = (randn(2, n, h, 16, dtype=dtype) for n, h in ((37, heads), (41, kv), (41, kv)))
            bias = randn(graph.num_edges, heads, dtype=dtype)
            backward(ops.attend(graph, q, k, v, bias=bias, dropout=0.2, backend="csr", **options))
    square = edges(40, 40)
    for attention in (Additive(12, 8, 4, edge_dim=5), AdditiveV2(12, 8, 2)):
        op, e = MessagePassing(square, "sum", None, attention, backend="csr"), randn(square.num_edges, 5)
        backward(op(randn(40, 12), edge_attr=e if isinstance(attention, Additive) else None))
    for heads, kv in ((8, 1), (8, 2)):  # enough heads and edges that kernels copy keys
        q, k, v = (randn(2, n, h, 16) for n, h in ((37, heads), (41, kv), (41, kv)))
        backward(ops.attend(edges(count=700), q, k, v, dropout=0.2, backend="csr"))


def row_reduce_calls() -> None:
    graph = edges()
    for reduce in ("sum", "mean", "max", "min", "std"):
        for dtype in WIDE:
            weight = randn(graph.num_edges, dtype=dtype)
            backward(ops.aggregate(graph, randn(2, 41, 33, dtype=dtype), reduce, weight=weight, backend="csr"))
        ops.aggregate(graph, randn(41, 33, dtype=torch.bfloat16, grad=False), reduce, backend="csr")


def tile_attention_calls() -> None:
    for topology in (graphs.causal() & graphs.window(9), graphs.longformer(8, globals=2), graphs.complete()):
        graph = topology.bind(133)
        for dtype in WIDE + NARROW:
            q, k, v = (randn(2, 133, h, 24, dtype=dtype) for h in (4, 2, 2))
            backward(ops.attend(graph, q, k, v, softcap=3.0, dropout=0.1, backend="tiles"))
    graph = (graphs.causal() & graphs.window(20)).bind(70)
    q, k, v = (randn(1, 70, 2, 8) for _ in range(3))
    backward(ops.attend(graph, q, k, v, bias=randn(graph.num_edges, 2), backend="tiles"))


def recurrence_calls() -> None:
    for topology in (graphs.causal(), graphs.causal() & graphs.documents([20, 90])):
        graph = topology.bind(110)
        for dtype in WIDE + NARROW:
            q, k, v = (randn(2, 110, 2, width, dtype=dtype) for width in (16, 16, 24))
            gates = [None, -torch.rand(2, 110, 2), -torch.rand(2, 110, 2, 16)]
            for gate in gates:
                for beta in (None, torch.rand(2, 110, 2)):
                    options = {"log_gate": gate, "beta": beta}
                    options = {name: x.to(dtype).requires_grad_() for name, x in options.items() if x is not None}
                    backward(ops.attend(graph, q, k * 0.2, v, normalize="none", backend="scan", **options))


def few_nodes_calls() -> None:
    for dtype in WIDE + NARROW:
        q, k, v = (randn(2, 3, 2, width, dtype=dtype, grad=False) for width in (16, 16, 24))
        gate, beta = -torch.rand(2, 3, 2).to(dtype), torch.rand(2, 3, 2).to(dtype)
        for options in ({}, {"log_gate": gate}, {"log_gate": gate, "beta": beta}):
            ops.attend(graphs.causal().bind(3), q, k, v, normalize="none", backend="scan", **options)


def state_space_calls() -> None:
    for dtype in WIDE:
        x, dt, z = (randn(2, 75, 24, dtype=dtype) for _ in range(3))
        B, C = (randn(2, 75, 16, dtype=dtype) for _ in range(2))
        A = -torch.arange(1.0, 17).repeat(24, 1).to(dtype)
        for training in (True, False):
            with torch.set_grad_enabled(training):
                y, last = selective_scan(x, dt, A, B, C, documents=[0, 32, 43], softplus=True, z=z)
                if training:
                    backward(y + last.sum())
    x, z, dt, (B, C) = randn(2, 6, 20), randn(2, 6, 20), randn(2, 6), (randn(2, 3, 40) for _ in range(2))
    with torch.no_grad():
        options = {"softplus": True, "bias": randn(6), "D": randn(6), "z": z}
        state_update(randn(2, 6, 20, 40), x, dt, -torch.rand(6), B, C, **options)


def feature_dropout_calls() -> None:
    for dtype in WIDE:
        backward(drop_features(randn(3, 50, 37, dtype=dtype), 77, 0.3))


CASES = [
    row_attention_calls,
    row_reduce_calls,
    tile_attention_calls,
    recurrence_calls,
    few_nodes_calls,
    state_space_calls,
    feature_dropout_calls,
]


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Call]]:
    """The calls of each case. Chunks are small, so that they share rows."""
    calls = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_attention, "_MIN_COMPONENTS", 4096)
        patch.setattr(row_reduce, "_MIN_COMPONENTS", 4096)
        for case in CASES:
            torch.manual_seed(0)
            with kernel_calls.recording() as calls[case.__name__]:
                case()
    return calls


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs calls by the library for arm64. Compiling that takes a minute, if it is not up to date."""
    pytest.importorskip("ziglang", reason="ziglang compiles for arm64: pip install ziglang hatchling")
    hatch_build = pytest.importorskip("hatch_build", reason="hatch_build.py needs hatchling: pip install hatchling")
    (arm64,) = hatch_build.build(hatch_build.TARGETS["linux-arm64"])
    program, source = tmp_path_factory.mktemp("arm64") / "replay", Path(__file__).with_name("replay.cpp")
    clang = [sys.executable, "-m", "ziglang", "c++", "-target", hatch_build.TARGETS["linux-arm64"].triple]
    subprocess.run([*clang, "-O1", "-nostdlib++", str(source), "-ldl", "-o", str(program)], check=True)
    return [str(EMULATOR), "-L", str(LIBC), str(program), str(arm64)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_arm64_computes_what_this_machine_does(
    case: Callable[[], None], recorded: dict[str, list[Call]], replay: list[str], tmp_path: Path
) -> None:
    calls = recorded[case.__name__]
    kernel_calls.write(calls, tmp_path / "calls")
    subprocess.run([*replay, str(tmp_path / "calls"), str(tmp_path / "results")], check=True)
    results = kernel_calls.read_results(calls, tmp_path / "results")
    errors: dict[str, float] = {}
    for call, result in zip(calls, results, strict=True):
        for region, other in zip(call.regions, result, strict=True):
            error = difference(region.before, region.after, other)
            errors[call.name] = max(errors.get(call.name, 0.0), error)
        assert not all(same(region.before, region.after) for region in call.regions), f"{call.name} wrote nothing"
    assert all(error <= ROUNDINGS for error in errors.values()), errors


def difference(before: Tensor, after: Tensor, other: Tensor) -> float:
    """How far two results are apart, in roundings of the largest number that the call wrote. Integers and numbers that
    it left alone must be the same."""
    if not after.is_floating_point():
        return 0.0 if torch.equal(after, other) else torch.inf
    if same(after, other):
        return 0.0
    equal, written = bits(after) == bits(other), bits(before) != bits(after)
    scale = after[written & after.isfinite()].double().abs().max()
    error = (after.double() - other.double()).abs().where(~equal, 0).nan_to_num(nan=torch.inf).max()
    return float(error / (scale * torch.finfo(after.dtype).eps))


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


def bits(x: Tensor) -> Tensor:
    """Of numbers, so that NaN equals itself: memory that nothing was written to may hold it."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
