"""A graph larger than memory: an R-MAT graph written by `graphs.write_csr`, and GraphSAGE trained on samples of it.

Each phase reports its seconds and the most anonymous memory that the process held: RssAnon of Linux'
/proc/self/status, looked at twenty times a second. Pages of mapped files do not count: the system drops them when it
needs memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.machine import about
from benchmarks.sampling import Sage, step
from mpnn import graphs
from mpnn.data import neighbor_batches
from mpnn.graphs import CompressedGraph

EDGES_A_NODE = 16  # as in Graph500
QUADRANTS = (0.57, 0.19, 0.19)  # a, b, c of Graph500: the shares of three quarters of the adjacency matrix
BAR = 2 * 10**9  # bytes of anonymous memory
BATCH, FANOUTS, CLASSES = 1024, (10, 15), 32


def rmat(scale: int, chunk: int = 1 << 20, seed: int = 0) -> Iterator[NDArray[np.int64]]:
    """16 * 2^scale edges among 2^scale nodes, in chunks [2, n] (R-MAT, Chakrabarti et al. 2004).

    Every edge chooses a quarter of the matrix, a quarter of this, and so on. Nodes are renumbered, so that hubs do not
    lie side by side.
    """
    draw, mask = np.random.default_rng(seed), (1 << scale) - 1
    a, b, c = (round(65536 * share) for share in QUADRANTS)
    left = EDGES_A_NODE << scale
    while left:
        edges = np.zeros((2, min(chunk, left)), np.int64)
        for _ in range(scale):
            quarter = np.frombuffer(draw.bytes(2 * edges.shape[1]), np.uint16)
            lower = quarter >= a + b
            edges <<= 1
            edges[1] |= lower  # the row of the matrix
            edges[0] |= (quarter >= a + b + c) | ((quarter >= a) & ~lower)
        edges *= 0x9E3779B1  # odd, so that different numbers stay different
        edges &= mask
        yield edges
        left -= edges.shape[1]


def measure(out: Path, *, scale: int, width: int, batches: int, parent: Path | None, note: str) -> dict[str, Any]:
    """Runs all phases in a temporary folder inside `parent`, and writes what was measured."""
    command = f"python -m benchmarks disk --scale {scale} --width {width} --batches {batches}"
    results: dict[str, Any] = {"command": command, "note": note, **about(), "nodes": 1 << scale}
    results |= {"edges": EDGES_A_NODE << scale, "width": width, "batch": BATCH, "fanouts": FANOUTS, "phases": []}
    phases = results["phases"]
    with TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        with phase(phases, "write_csr, from a generator"):
            graphs.write_csr(folder / "graph", rmat(scale), 1 << scale)
        with phase(phases, "write the features"):
            write_features(folder / "features.npy", 1 << scale, width)
        with phase(phases, "open"):
            graph = graphs.open_csr(folder / "graph")
            features = np.load(folder / "features.npy", mmap_mode="r")
        results["bytes"] = {"graph": graph.nbytes, "features": features.nbytes}
        with phase(phases, f"train on {batches} batches"):
            results["losses"] = train(graph, features, batches)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def needed(scale: int, width: int) -> int:
    """The bytes that the files take when there are most of them."""
    edges, nodes = EDGES_A_NODE << scale, 1 << scale
    return 8 * nodes + 4 * edges + max(8 * edges, 4 * width * nodes)


def free(parent: Path | None) -> int:
    """Free bytes on the disk of `parent`, or of the folder for temporary files."""
    with TemporaryDirectory(dir=parent) as folder:
        return shutil.disk_usage(folder).free


def write_features(file: Path, nodes: int, width: int) -> None:
    draw = np.random.default_rng(1)
    features = np.lib.format.open_memmap(file, "w+", np.float32, (nodes, width))
    block = max((1 << 24) // width, 1)
    for start in range(0, nodes, block):
        rows = features[start : start + block]
        draw.standard_normal(out=(drawn := np.empty(rows.shape, np.float32)), dtype=np.float32)
        rows[:] = drawn
    features.flush()


def train(graph: CompressedGraph, features: NDArray[np.float32], batches: int) -> list[float]:
    """The losses of the first and of the last batch. The class of a node is its largest feature."""
    torch.manual_seed(0)
    classes = min(features.shape[1], CLASSES)
    nodes = torch.randint(graph.num_dst, (batches * BATCH,)).unique()
    network = Sage(features.shape[1])
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    losses = []
    for batch in neighbor_batches(graph, nodes, FANOUTS, features, batch_size=BATCH):
        assert batch.x is not None
        labels = batch.x[: len(batch.nodes), :classes].argmax(-1)
        losses.append(step(network(batch), labels, optimizer))
    return [losses[0], losses[-1]]


@contextmanager
def phase(phases: list[dict[str, Any]], name: str) -> Iterator[None]:
    """Times what it contains, and watches its memory."""
    most, stop = [anonymous_memory()], Event()

    def watch() -> None:
        while not stop.wait(0.05):
            most.append(max(most.pop(), anonymous_memory()))

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    began = perf_counter()
    try:
        yield
    finally:
        seconds = perf_counter() - began
        stop.set()
        watcher.join()
    phases.append({"phase": name, "seconds": seconds, "anonymous_bytes": max(most[0], anonymous_memory())})


def anonymous_memory() -> int:
    """RssAnon of this process; 0 where the system does not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)
