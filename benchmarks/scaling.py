"""Weak scaling: a layer over n nodes on one process, and over 2 n nodes on two, one thread each.

Both are measured in one run: first process 0, while the other waits, then both. Times are those of the
processor, of process 0, the best of several, so that other work on the machine counts little. Efficiency is the time of
one over the time of two; 1 means that dividing costs nothing. Beside the time of two stands a computed one: the time of
one, and the bytes of the halo, there and back, at the rate of a large exchange.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.machine import about
from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import Additive, DotProduct
from mpnn.distributed import partition
from mpnn.update import FeedForward, PreNorm

RANKS = 2


def grid(nodes: int) -> Graph:
    """A mesh of nodes with shuffled numbers, as METIS would get it: four neighbors each."""
    rows = int(nodes**0.5)
    order = torch.randperm(rows * rows, generator=torch.Generator().manual_seed(0))
    edges = order[graphs.grid(rows, rows).bind(rows * rows).edge_index]
    return graphs.from_edges(edges, rows * rows)


def transformer() -> MessagePassing:
    return MessagePassing(None, "sum", PreNorm(256, FeedForward(256)), DotProduct(256, 4))


def gat() -> MessagePassing:
    return MessagePassing(None, "sum", None, Additive(128, 16, heads=8))


CASES: dict[str, tuple[Callable[[int], Graph], Callable[[], MessagePassing], int, int, str, float]] = {
    # graph of a number of nodes, layer, width, nodes of a process, balance, and the lowest efficiency
    "transformer layer of 256 over window(256)": (graphs.window(256).bind, transformer, 256, 4096, "nodes", 0.92),
    "GAT, 8 x 16, over a mesh cut by METIS": (grid, gat, 128, 90_000, "metis", 0.88),
}


def measure(out: Path, *, repeats: int, divide: int) -> dict[str, Any]:
    """Runs the processes and writes what they measured."""
    with TemporaryDirectory() as folder:
        environment = os.environ | {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1", "MEETING": f"{folder}/meeting"}
        command = [sys.executable, "-m", "benchmarks.scaling", str(repeats), str(divide), f"{folder}/rows.json"]
        processes = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(RANKS)]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes of the measurement ended with {codes}")
        rows = json.loads(Path(f"{folder}/rows.json").read_text())
    results = {"command": "python -m benchmarks scaling", **about(), "threads": 1, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def worker(repeats: int, divide: int, file: str) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=RANKS)
    rows, rate = [], exchange_rate()
    for name, (build, layer, width, nodes, balance, bar) in CASES.items():
        torch.manual_seed(0)
        nodes //= divide
        op, alone = layer(), build(nodes)
        part = partition(build(RANKS * nodes), balance=balance)
        shard = part.shard()
        x_alone = torch.randn(alone.num_dst, width, requires_grad=True)
        x = torch.randn(shard.num_dst, width, requires_grad=True)
        times: dict[str, list[float]] = {"one": [], "two": []}
        for repeat in range(repeats + 1):
            with timed(times["one"], repeat):
                if rank == 0:
                    step(op, x_alone, alone)
            with timed(times["two"], repeat):
                step(op, x, shard)
        one, two = min(times["one"]), min(times["two"])
        fetched = [plan.fetches for plan in part.plans()]
        computed = one + 2 * max(part.fetched_bytes(width)) / rate
        row = {"case": name, "nodes": nodes, "one": one, "two": two, "efficiency": one / two, "bar": bar}
        rows.append(row | {"fetches": fetched, "computed": computed, "bytes_per_second": rate})
    if rank == 0:
        Path(file).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def exchange_rate() -> float:
    """Bytes a second that a process receives in an all-to-all of 8 MB."""
    sent = torch.zeros(RANKS, 1 << 20)
    received, times = torch.empty_like(sent), []
    for _ in range(6):
        dist.barrier()
        began = perf_counter()
        dist.all_to_all_single(received, sent)
        times.append(perf_counter() - began)
    return sent.nbytes * (RANKS - 1) / RANKS / median(times)


@contextmanager
def timed(times: list[float], repeat: int) -> Any:
    """The processor's time; the first round warms up."""
    dist.barrier()
    began = process_time()
    yield
    if repeat:
        times.append(process_time() - began)
    dist.barrier()


def step(op: MessagePassing, x: Tensor, graph: Graph) -> None:
    """Forward and backward."""
    op(x, graph).sum().backward()
    op.zero_grad()
    x.grad = None


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
