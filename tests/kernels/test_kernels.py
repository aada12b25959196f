"""Compiled kernels: what people see of the compiler, of threads and of memory."""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from threads import same_bits, threads

from mpnn import graphs, ops
from mpnn.graph.topology import Topology
from mpnn.kernels.cpu import threads as pool
from mpnn.kernels.rows.rows import MIN_PIECE, Rows
from mpnn.kernels.tiles import attention as tile_attention
from mpnn.position import ALiBi

FIRST_CALLS = """
import sys
sys.modules["numba"] = None  # importing it raises
import torch
from mpnn import graphs, ops
x = torch.randn(9, 1, 8, requires_grad=True)
ops.attend(graphs.window(1).bind(9), x, x, x, backend="tiles").sum().backward()
ops.attend(graphs.window(2).bind(9), x.double(), x.double(), x.double(), backend="tiles")
ops.attend(graphs.window(1).bind(9), x, x, x, backend="csr").sum().backward()
ops.aggregate(graphs.window(1).bind(9), x.squeeze(1), "max", backend="csr").sum().backward()
"""


@pytest.mark.slow
def test_the_first_calls_compile_nothing_and_need_no_numba() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FIRST_CALLS],
        capture_output=True,
        text=True,
        env={"PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    "topology", [graphs.causal(), graphs.bigbird(block=16), graphs.longformer(40, globals=3)], ids=str
)
@pytest.mark.parametrize("heads", [1, 6])
def test_tiles_give_the_same_bits_on_any_number_of_threads(topology: Topology, heads: int) -> None:
    graph, bias = topology.bind(500), ALiBi(heads).bias(topology.bind(500))
    leaves = [torch.randn(2, 500, heads, 24, requires_grad=True) for _ in range(3)]

    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        out = ops.attend(graph, *leaves, bias=bias, dropout=0.1, backend="tiles")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    assert same_bits(results, 1, 2, 3)


@pytest.mark.parametrize("topology", [graphs.causal(), graphs.longformer(40, globals=3)], ids=str)
def test_tiles_that_find_no_room_are_read_again(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    features, found = [torch.randn(2, 500, 4, 24, requires_grad=True) for _ in range(3)], []
    for room in (tile_attention.MAX_KEPT, 1 << 15, 1):
        monkeypatch.setattr(tile_attention, "MAX_KEPT", room)
        out = ops.attend(topology.bind(500), *features, backend="tiles")
        found.append([out, *torch.autograd.grad(out.square().sum(), features)])
    for other in found[1:]:
        assert all(a.equal(b) for a, b in zip(found[0], other, strict=True))


PEAK = """
import resource, torch
from mpnn import graphs, ops

def units(nodes, heads, width, **more):
    features = [torch.randn(nodes, heads, width, requires_grad=True) for _ in range(3)]
    graph = graphs.window(64).bind(nodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ops.attend(graph, *features, backend="tiles", **more).sum().backward()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * 1024 / (4 * nodes * heads * width)

units(64, 2, 8), units(64, 2, 8, dropout=0.1)
print(units(4096, 8, 64), units(32768, 1, 64), units(8192, 8, 64, dropout=0.1))
"""


@pytest.mark.slow
def test_tiles_need_memory_for_nodes_and_not_for_edges() -> None:
    """Peak beyond inputs, forward and backward, in units of N x H x D floats; the graph has 129 edges a node, which
    would be 129 units if vectors were made for them, and 2 for one number an edge and head."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert all(float(x) <= 10 for x in done.stdout.split()), done.stdout


def test_torchs_threads_and_pythons_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's threads replace torch's in a forked process, and where torch has another OpenMP runtime."""
    graph = graphs.from_edges(torch.randint(0, 300, (2, 40_000)), 300)
    x = torch.randn(2, 300, 4, 32)

    def results() -> list[torch.Tensor]:
        leaf, window = x.clone().requires_grad_(), graphs.window(40).bind(300)
        bias = torch.ones(graph.num_edges, 4, requires_grad=True)  # shared by the batch: one entry after the other
        outs = [
            ops.attend(window, leaf, leaf, leaf, backend="tiles"),
            ops.attend(graph, leaf, leaf, leaf, bias=bias, dropout=0.0, backend="csr"),
            ops.aggregate(graph, leaf.flatten(2), "max", backend="csr"),
        ]
        sum(y.square().sum() for y in outs).backward()
        assert leaf.grad is not None
        assert bias.grad is not None
        return [*(y.detach() for y in outs), leaf.grad, bias.grad]

    with threads(3):
        if sys.platform == "linux":
            assert pool.team() is not None
        from_torch = results()
        monkeypatch.setattr(pool, "team", lambda: None)
        from_python = results()
    assert all(a.equal(b) for a, b in zip(from_torch, from_python, strict=True))


def test_parts_that_two_threads_build_point_to_memory_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread must not free the cuts of the first one's struct."""
    rows = Rows(torch.tensor([0, 2, 4]), torch.zeros(4, dtype=torch.int32))
    cuts, others = rows._cuts, []

    def interrupted(count: int, piece: int) -> Any:
        if not others:
            others.append(None)
            others[0] = rows.chunks(1, 2, 1)
        return cuts(count, piece)

    monkeypatch.setattr(rows, "_cuts", interrupted)
    assert rows.chunks(1, 2, 1) is others[0]
    assert rows.chunks(1, 2, 1).cuts.tolist() == [0, 2, 4]


def test_parts_begin_at_rows_and_at_pieces_of_long_ones() -> None:
    """Pieces are counted from the beginning of their row, wherever it lies and however many edges there are."""
    degrees = torch.tensor([3, 0, 2 * MIN_PIECE + 5, 7, MIN_PIECE])
    for order in ([0, 1, 2, 3, 4], [2, 4, 0, 1, 3], [2]):
        ptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees[order].cumsum(0)])
        rows = Rows(ptr, torch.zeros(int(ptr[-1]), dtype=torch.int32))
        for most in (1, 2, 7):
            cuts = set(rows.chunks(8, most, 1).cuts.tolist())
            first = int(ptr[order.index(2)])
            long_row = {first, first + MIN_PIECE, first + 2 * MIN_PIECE, first + 2 * MIN_PIECE + 5}
            assert {first, *long_row} <= cuts
            assert cuts <= {*ptr.tolist(), *long_row}


def test_parts_run_side_by_side_and_what_one_raises_is_raised() -> None:
    with threads(3):
        assert pool.each(range(100), lambda k: k * k) == [k * k for k in range(100)]
        nested = pool.each(range(8), lambda k: sum(pool.each(range(k), lambda j: j)))
        assert nested == [k * (k - 1) // 2 for k in range(8)]
        with pytest.raises(ZeroDivisionError):
            pool.each([3, 2, 1, 0, 1], lambda k: 1 // k)


def test_no_part_begins_after_the_caller_was_interrupted() -> None:
    caller, begun = threading.current_thread(), []

    def part(k: int) -> None:
        begun.append(k)
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        time.sleep(0.001)

    with threads(3), pytest.raises(KeyboardInterrupt):
        pool.each(range(1000), part)
    assert len(begun) < 500


def test_an_exception_is_raised_when_the_running_parts_have_finished_and_no_other_begins() -> None:
    caller, begun, running = threading.current_thread(), [], []

    def part(k: int) -> None:
        begun.append(k)
        if threading.current_thread() is not caller and not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        running.append(k)
        time.sleep(0.005)
        running.remove(k)

    with threads(4):
        for _ in range(5):
            failed = threading.Event()
            begun.clear()
            with pytest.raises(ZeroDivisionError):
                pool.each(range(1000), part)
            assert not running
            assert len(begun) < 500
