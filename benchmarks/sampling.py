"""Sampled training: batches of `data.neighbor_batches` against those of PyTorch Geometric's NeighborLoader.

Both read one graph and one tensor of features, and sample for the same nodes, with the same numbers of in-neighbors.
With all in-neighbors instead of some, their batches must hold the same nodes and edges and their networks must agree;
then they are timed, interleaved pass by pass: batches only, and a training step of GraphSAGE on each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine import about
from mpnn import MessagePassing
from mpnn.data import NeighborBatch, neighbor_batches
from mpnn.graphs import CompressedGraph
from mpnn.update import Concat

BAR = 2.0
OURS = "mpnn"
CLASSES = 32
Pass = Callable[[], Any]  # over all batches


@dataclass(frozen=True)
class Size:
    nodes: int
    edges: int
    width: int = 128  # of the features, and of the hidden layer
    fanouts: tuple[int, int] = (10, 15)  # of the first and the second layer
    batch: int = 1024
    batches: int = 10  # of a pass


SIZES = {
    "small": Size(2000, 20_000, 8, (3, 5), 64, 3),
    "10M edges": Size(1_000_000, 10_000_000),
    "100M edges": Size(10_000_000, 100_000_000),
}


def measure(out: Path, *, names: list[str], repeats: int, workers: list[int], note: str) -> dict[str, Any]:
    """Measures sizes of `SIZES`, and writes the file of results after each."""
    command = " ".join(["python -m benchmarks sampling", *(f"--size {name!r}" for name in names)])
    results = {"command": command, "note": note, **about(), "rows": []}
    for name in names:
        results["rows"] += rows(name, SIZES[name], repeats, workers)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def rows(name: str, size: Size, repeats: int, workers: list[int]) -> list[dict[str, Any]]:
    """Batches alone, and with training."""
    torch.manual_seed(0)
    graph, features = random_graph(size.nodes, size.edges), torch.randn(size.nodes, size.width)
    labels = torch.randint(CLASSES, (size.nodes,))
    nodes = torch.randperm(size.nodes)[: size.batch * size.batches]
    ours = Ours(graph, features, labels, nodes, size)
    missing = why_missing()
    theirs = None if missing else Peer(graph, features, labels, nodes, size)
    error = disagreement(ours, theirs) if theirs else None
    found = []
    for work, train in (("batches", False), ("training", True)):
        passes: dict[str, Pass] = {OURS: partial(ours.run, train)}
        if theirs:
            passes |= {f"PyG, {count} workers": partial(theirs.run, count, train) for count in workers}
        entries = {peer: size.batches / seconds for peer, seconds in in_turns(passes, repeats).items()}
        row = {"case": f"{name}, {work}", **asdict(size), "batches_per_second": entries, "error": error}
        peers = [rate for peer, rate in entries.items() if peer != OURS]
        row |= {"ratio": entries[OURS] / max(peers)} if peers else {"skipped": missing}
        found.append(row)
    return found


def random_graph(nodes: int, edges: int) -> CompressedGraph:
    """Edges between nodes drawn uniformly: a cache helps them less than any others."""
    draw = np.random.default_rng(0)
    keys = draw.integers(nodes, size=edges) << 32 | draw.integers(nodes, size=edges)
    keys.sort()
    offsets = np.zeros(nodes + 1, np.int64)
    np.cumsum(np.bincount(keys >> 32, minlength=nodes), out=offsets[1:])
    return CompressedGraph(offsets, (keys & 0xFFFFFFFF).astype(np.int32), nodes)


def in_turns(passes: dict[str, Pass], repeats: int) -> dict[str, float]:
    """Seconds of a pass of each entry: the median, after a pass that warms up."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    for repeat in range(repeats + 1):
        for name, run in passes.items():
            began = perf_counter()
            run()
            if repeat:
                times[name].append(perf_counter() - began)
    return {name: median(taken) for name, taken in times.items()}


# ------------------------------------------------------------------------------------------------ ours


class Sage(nn.Module):
    """GraphSAGE with means, as PyTorch Geometric's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MessagePassing(None, "mean", Concat(width, wide)) for wide in (width, CLASSES))

    def forward(self, batch: NeighborBatch) -> Tensor:
        first, second = batch.graphs
        h = self.layers[0](batch.x[: first.num_dst], first, source=batch.x).relu()
        return self.layers[1](h[: second.num_dst], second, source=h)


@dataclass
class Ours:
    graph: CompressedGraph
    features: Tensor
    labels: Tensor
    nodes: Tensor
    size: Size
    passed: int = 0  # the seed of the next pass

    def __post_init__(self) -> None:
        self.network = Sage(self.size.width)

    def batches(self, nodes: Tensor, fanouts: Sequence[int]) -> Iterator[NeighborBatch]:
        self.passed += 1
        options = {"batch_size": self.size.batch, "seed": self.passed, "shuffle": False}
        return neighbor_batches(self.graph, nodes, fanouts, self.features, **options)

    def run(self, train: bool) -> None:
        optimizer = torch.optim.SGD(self.network.parameters(), 0.01)
        for batch in self.batches(self.nodes, self.size.fanouts):
            if train:
                step(self.network(batch), self.labels[batch.nodes], optimizer)


def step(logits: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> float:
    """One step of training; the loss."""
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# ------------------------------------------------------------------------------------------------ PyTorch Geometric


def why_missing() -> str | None:
    """Why NeighborLoader cannot be measured here."""
    try:
        from torch_geometric import typing
    except ImportError:
        return "torch_geometric is not installed"
    if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
        return "PyTorch Geometric samples with torch-sparse or pyg-lib, and neither is installed"
    return None


class Peer:
    """NeighborLoader over the same edges, already sorted, and PyTorch Geometric's GraphSAGE. Where pyg-lib samples, the
    network leaves out of each layer what its outputs do not need; torch-sparse does not say what that is."""

    def __init__(self, graph: CompressedGraph, features: Tensor, labels: Tensor, nodes: Tensor, size: Size) -> None:
        from torch_geometric.data import Data
        from torch_geometric.nn import GraphSAGE

        dst = torch.repeat_interleave(torch.arange(size.nodes), graph.degree())
        edges = torch.stack([torch.from_numpy(graph.columns).long(), dst])
        self.data = Data(x=features, y=labels, edge_index=edges)
        self.nodes, self.size = nodes, size
        self.network = GraphSAGE(size.width, size.width, 2, CLASSES)
        self.loaders: dict[int, Any] = {}

    def loader(self, nodes: Tensor, fanouts: Sequence[int], workers: int) -> Any:
        from torch_geometric.loader import NeighborLoader

        options = {"batch_size": self.size.batch, "num_workers": workers, "persistent_workers": workers > 0}
        return NeighborLoader(self.data, list(reversed(fanouts)), nodes, is_sorted=True, **options)

    def logits(self, batch: Any) -> Tensor:
        kinds = [kind for kind in ("nodes", "edges") if f"num_sampled_{kind}" in batch]
        trim = {f"num_sampled_{kind}_per_hop": batch[f"num_sampled_{kind}"] for kind in kinds}
        return self.network(batch.x, batch.edge_index, **trim)[: batch.batch_size]

    def run(self, workers: int, train: bool) -> None:
        if workers not in self.loaders:
            self.loaders[workers] = self.loader(self.nodes, self.size.fanouts, workers)
        optimizer = torch.optim.SGD(self.network.parameters(), 0.01)
        for batch in self.loaders[workers]:
            if train:
                step(self.logits(batch), batch.y[: batch.batch_size], optimizer)


def disagreement(ours: Ours, theirs: Peer) -> float:
    """The largest difference between the outputs of both networks, with the same weights, for all in-neighbors of eight
    nodes.

    Raises:
        RuntimeError: the batches hold other nodes or edges, or the outputs differ.
    """
    for layer, conv in zip(ours.network.layers, theirs.network.convs, strict=True):
        linear = layer.update.linear
        with torch.no_grad():
            for mine, other in zip(linear.weight.split(conv.in_channels, 1), (conv.lin_r, conv.lin_l), strict=True):
                other.weight.copy_(mine)
            conv.lin_l.bias.copy_(linear.bias)
    nodes = ours.nodes[:8]
    (mine,) = ours.batches(nodes, (-1, -1))
    (other,) = theirs.loader(nodes, (-1, -1), 0)
    error = float((ours.network(mine) - theirs.logits(other)).detach().abs().max())
    same = torch.equal(mine.sources.sort().values, other.n_id.sort().values)
    if not same or mine.graphs[0].num_edges != other.num_edges or not error < 1e-4:
        raise RuntimeError(f"the batches of all in-neighbors of {nodes.tolist()} differ, and the outputs by {error}")
    return error
