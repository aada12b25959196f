"""Work on points and molecules: neighbors of points compared with scipy and torch, and networks over batches of 32
molecules, whose edges are new in each step, compared with PyTorch Geometric.

Times are the processor's, the minimum of interleaved rounds: other programs of a shared machine only add.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import molecules, report, units
from benchmarks.contest import FORWARD, OURS, STEP, Case, Contest, Entry, Missing
from benchmarks.peers import unless_missing
from benchmarks.truth import Agreement
from mpnn import graphs
from mpnn.models import DimeNet, SchNet

SCIPY, TORCH, PYG = "scipy", "plain torch", "PyG"
KNOWN = "mpnn, known edges"
GEOMETRY, MOLECULES, NEW = "geometry", "molecules", "new edges"
LIMITS = {GEOMETRY: 1.2, MOLECULES: 1.0, NEW: 1.15}  # mpnn's time / that of the fastest peer, at most
IN_PLACE = "GCN", "GAT", "SAGE", "GIN", "PNA", "Transformer", "EdgeCNN"
WIDTH, BATCH, ATOMS = 64, 32, 18


def cases(small: bool = False) -> Iterator[Case]:
    many, clouds, batch, together = (500, 2, 4, 4) if small else (12_000, 8, 128, BATCH)
    made: list[tuple[str, Callable[[], Contest]]] = [
        (f"knn(8) of {many:,} points", partial(_knn, many, False)),
        (f"knn(8) of {many:,} points with ties: 3 integers from 0 to 5", partial(_knn, many, True)),
        (f"knn(20, labels=) of {clouds} clouds of 1,024 points, 64 features", partial(_knn_of_clouds, clouds)),
        (f"radius(5, labels=) of {batch} molecules of {ATOMS} atoms", partial(_radius, batch)),
        (f"farthest(256, labels=) of {clouds} clouds of 1,024 points", partial(_farthest, clouds)),
        (f"line_graph(backtrack=False) of {batch} molecules of {ATOMS} atoms", partial(_line_graph, batch)),
    ]
    for name, make in made:
        yield Case(GEOMETRY, name, make, (FORWARD,))
    for name in IN_PLACE:
        yield Case(MOLECULES, f"{name}, mpnn.pyg.use", partial(_in_place, name, together), (STEP,))
    for name in ("SAGE", "GIN", "GCN"):
        yield Case(MOLECULES, f"{name}, layers of mpnn", partial(_own, name, together))
    for name in ("SchNet", "DimeNet"):
        yield Case(MOLECULES, name, partial(_atoms, name, together))
    for name in IN_PLACE:
        yield Case(NEW, f"{name}, mpnn.pyg.use", partial(_new_edges, name, together), (STEP,))


# ------------------------------------------------------------------------------------------------ points


class Same(Agreement):
    """Compares what `answer` gives: a form of the edges that does not depend on their order, or on which of two nodes
    at one distance is taken."""


def _geometry(ours: Callable[[], Any], answer: Callable[[Any], Tensor], peers: Sequence[Entry]) -> Contest:
    found = Entry(OURS, lambda: answer(ours()))
    own = Entry(OURS, ours, answer=found.call)
    return Contest([own, *peers], Same(), "each other's edges or distances")


def _peer(name: str, call: Callable[[], Any], answer: Callable[[Any], Tensor]) -> Entry:
    return Entry(name, call, answer=lambda: answer(call()))


def _knn(count: int, ties: bool) -> Contest:
    from scipy.spatial import cKDTree

    x = torch.randint(0, 6, (count, 3)).double() if ties else torch.rand(count, 3).double()
    at = x.numpy()

    def distances(found: Any) -> Tensor:
        return torch.as_tensor(found[0][:, 1:])

    def of_graph(graph: Any) -> Tensor:
        src, dst = graph.edge_index
        return (x[src] - x[dst]).norm(dim=1).view(count, 8)

    tree = _peer(SCIPY, lambda: cKDTree(at).query(at, 9), distances)
    return _geometry(lambda: graphs.knn(x, 8), of_graph, [tree])


def _knn_of_clouds(clouds: int) -> Contest:
    x, label = torch.randn(clouds * 1024, WIDTH), torch.arange(clouds).repeat_interleave(1024)

    def dense() -> Tensor:
        distance = torch.cdist(x.view(clouds, 1024, -1), x.view(clouds, 1024, -1))
        distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        return distance.topk(20, largest=False).values

    def of_graph(graph: Any) -> Tensor:
        src, dst = graph.edge_index
        return (x[src] - x[dst]).norm(dim=1).view(clouds, 1024, 20)

    return _geometry(lambda: graphs.knn(x, 20, labels=label), of_graph, [_peer(TORCH, dense, lambda found: found)])


def _cloud(batch: int) -> tuple[Tensor, Tensor]:
    """Atoms of molecules of `ATOMS`, and the molecule of each."""
    return 2 * torch.randn(batch * ATOMS, 3), torch.arange(batch).repeat_interleave(ATOMS)


def _keys(edges: Tensor, count: int) -> Tensor:
    return (edges[1] * count + edges[0]).sort().values.double()


def _radius(batch: int) -> Contest:
    from scipy.spatial import cKDTree

    at, label = _cloud(batch)
    parts = at.view(batch, ATOMS, 3)

    def dense() -> Tensor:
        near = torch.cdist(parts, parts) <= 5
        near.diagonal(dim1=1, dim2=2).fill_(False)
        molecule, dst, src = near.nonzero().T
        return torch.stack([src, dst]) + ATOMS * molecule

    def trees() -> Tensor:
        pairs = [
            cKDTree(part).query_pairs(5, output_type="ndarray") + ATOMS * k for k, part in enumerate(parts.numpy())
        ]
        found = torch.from_numpy(np.concatenate(pairs).T)
        return torch.cat([found, found.flip(0)], 1)

    keys = partial(_keys, count=len(at))
    peers = [_peer(TORCH, dense, keys), _peer(SCIPY, trees, keys)]
    return _geometry(lambda: graphs.radius(at, 5.0, labels=label), lambda graph: keys(graph.edge_index), peers)


def _farthest(clouds: int) -> Contest:
    at, label = torch.rand(clouds * 1024, 3), torch.arange(clouds).repeat_interleave(1024)
    parts = at.view(clouds, 1024, 3)

    def plain() -> Tensor:
        last, distance = torch.zeros(clouds, dtype=torch.int64), torch.full((clouds, 1024), torch.inf)
        row, found = torch.arange(clouds), []
        for _ in range(256):
            found.append(last)
            distance = torch.minimum(distance, (parts - parts[row, last][:, None]).square().sum(2))
            last = distance.argmax(1)
        return (torch.stack(found, 1) + 1024 * row[:, None]).flatten()

    def answer(found: Tensor) -> Tensor:
        """How near the last point is to those before: rounding to float32 may choose another of two points."""
        chosen = at[found].view(clouds, 256, 3)
        return torch.cdist(chosen[:, -1:], chosen[:, :-1]).amin()

    return _geometry(lambda: graphs.farthest(at, 256, label), answer, [_peer(TORCH, plain, answer)])


def _line_graph(batch: int) -> Contest:
    from scipy.sparse import csr_array

    at, label = _cloud(batch)
    made = graphs.radius(at, 5.0, labels=label)
    edges, count = made.edge_index, len(at)
    src, dst = edges.numpy()

    def of_matrix() -> Tensor:
        """Computes what PyTorch Geometric's DimeNet computes by torch_sparse."""
        into = csr_array((np.arange(len(src)) + 1, (dst, src)), (count, count))[src]
        receiver = np.repeat(np.arange(len(src)), np.diff(into.indptr))
        forth = into.indices != dst[receiver]
        return torch.from_numpy(np.stack([into.data[forth] - 1, receiver[forth]]))

    keys = partial(_keys, count=len(src))

    def ours() -> Any:
        return graphs.line_graph(graphs.from_edges(edges, count), backtrack=False)

    return _geometry(ours, lambda graph: keys(graph.edge_index), [_peer(SCIPY, of_matrix, keys)])


# ------------------------------------------------------------------------------------------------ molecules


def _bonds(batch: int) -> tuple[Tensor, int]:
    """Bonds both ways of a batch of molecules of 13 to 23 atoms: chains with branches and rings."""
    found, first = [], 0
    for _ in range(batch):
        atoms = int(torch.randint(ATOMS - 5, ATOMS + 6, (1,)))
        own = torch.arange(1, atoms)
        chain = torch.stack([own, torch.maximum((torch.rand(atoms - 1) * own).long(), own - 3)])
        ring = torch.randint(atoms, (2, 2))
        bonds = torch.cat([chain, ring[:, ring[0] != ring[1]]], 1)
        found += [bonds + first, bonds.flip(0) + first]
        first += atoms
    return torch.cat(found, 1), first


def _in_place(name: str, batch: int) -> Contest:
    """Training steps with Adam, over edges that are new in each."""
    edges, count = _bonds(batch)
    x = torch.randn(count, WIDTH)

    def make() -> list[Entry]:
        from mpnn.pyg import use

        theirs = _model_of_pyg(name)
        ours = copy.deepcopy(theirs)
        use(ours)
        return [_training(who, model, x, edges.clone) for who, model in ((OURS, ours), (PYG, theirs))]

    facts = {"nodes": count, "edges": edges.shape[1]}
    return Contest(_both(make), Agreement(), "each other's results and gradients", facts=facts)


def _new_edges(name: str, batch: int) -> Contest:
    """The same steps over edges that are new in each, and over those of the step before."""
    edges, count = _bonds(batch)
    x = torch.randn(count, WIDTH)

    def make() -> list[Entry]:
        from mpnn.pyg import use

        ours = _model_of_pyg(name)
        use(ours)
        known = copy.deepcopy(ours)
        return [_training(OURS, ours, x, edges.clone), _training(KNOWN, known, x, lambda: edges)]

    facts = {"nodes": count, "edges": edges.shape[1]}
    return Contest(_both(make), Agreement(), "each other's results and gradients", facts=facts)


def _training(who: str, model: nn.Module, x: Tensor, edges: Callable[[], Tensor]) -> Entry:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x, edges()).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def results() -> Tensor:
        with torch.enable_grad():
            out: Tensor = model(x, edges())
            gradients = torch.autograd.grad(out.square().mean(), list(model.parameters()))
        return torch.cat([part.detach().flatten() for part in (out, *gradients)])

    return Entry(who, step, answer=results)


def _model_of_pyg(name: str) -> nn.Module:
    from torch_geometric import nn as pyg

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(pyg.TransformerConv(WIDTH, WIDTH // 8, heads=8) for _ in range(4))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, edges).relu()
            return x

    of_pna = {
        "aggregators": ["mean", "min", "max", "std"],
        "scalers": ["identity", "amplification", "attenuation"],
        "deg": torch.tensor([0, 10, 20, 20, 5]),
    }
    build: dict[str, Callable[[], nn.Module]] = {
        "GCN": lambda: pyg.GCN(WIDTH, WIDTH, 4, WIDTH),
        "GAT": lambda: pyg.GAT(WIDTH, WIDTH, 4, WIDTH, heads=8),
        "SAGE": lambda: pyg.GraphSAGE(WIDTH, WIDTH, 4, WIDTH),
        "GIN": lambda: pyg.GIN(WIDTH, WIDTH, 4, WIDTH),
        "PNA": lambda: pyg.PNA(WIDTH, WIDTH, 2, WIDTH, **of_pna),
        "Transformer": Transformer,
        "EdgeCNN": lambda: pyg.EdgeCNN(WIDTH, WIDTH, 4, WIDTH),
    }
    return build[name]()


def _own(name: str, batch: int) -> Contest:
    contest = molecules.contest(name, PYG, *_bonds(batch))
    contest.bars = ()
    return contest


def _atoms(name: str, batch: int) -> Contest:
    """Whole models of atoms, with their graph, and DimeNet's pairs of edges, made before. They are compared, with the
    same weights, by tests/models/graph/test_atoms.py."""
    positions, molecule = _cloud(batch)
    kinds, count = torch.randint(1, 10, (len(positions),)), len(positions)
    graph = graphs.radius(positions, 5.0, labels=molecule)
    pool = graphs.from_edges(torch.stack([torch.arange(count), molecule]), num_src=count, num_dst=batch)
    angular = (7, 6) if batch == BATCH else (2, 2)  # functions, which sympy derives for PyTorch Geometric
    ours = SchNet(128, 128, 6, 50, 5.0) if name == "SchNet" else DimeNet(128, 4, 64, *angular, 5.0, types=95)

    def make() -> list[Entry]:
        theirs = _schnet_of_pyg(graph) if name == "SchNet" else _dimenet_of_pyg(graph, *angular)
        calls: list[tuple[str, nn.Module, Callable[[], Tensor]]] = [
            (OURS, ours, lambda: ours(kinds, positions, graph, pool)),
            (PYG, theirs, lambda: theirs(kinds, positions, molecule)),
        ]
        return [Entry(who, call, [p for p in model.parameters() if p.requires_grad]) for who, model, call in calls]

    return Contest(_both(make), facts={"nodes": count, "edges": graph.num_edges})


def _both(make: Callable[[], list[Entry]]) -> list[Entry | Missing]:
    made: list[Entry] = []
    first = unless_missing(PYG, "torch_geometric", lambda: made.extend(make()) or made[0])
    return [*made] if made else [first]


def _schnet_of_pyg(graph: Any) -> Any:
    from torch_geometric.nn import SchNet as Theirs

    src, dst = graph.edge_index

    class Given(nn.Module):
        def forward(self, positions: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            return graph.ends, (positions[src] - positions[dst]).norm(dim=-1)

    return Theirs(128, 128, 6, 50, 5.0, interaction_graph=Given())


def _dimenet_of_pyg(graph: Any, spherical: int, radial: int) -> Any:
    from torch_geometric.nn.models import dimenet

    src, dst = graph.edge_index
    kj, ji = graphs.line_graph(graph, backtrack=False).edge_index
    pairs = dst, src, dst[ji], src[ji], src[kj], kj, ji

    class Given(dimenet.DimeNetPlusPlus):
        """Its edges and pairs come from functions of its module, which need torch_cluster and torch_sparse."""

        def forward(self, *inputs: Any) -> Tensor:
            before = dimenet.radius_graph, dimenet.triplets
            dimenet.radius_graph, dimenet.triplets = (lambda *_, **__: graph.ends), (lambda *_, **__: pairs)
            try:
                return super().forward(*inputs)
            finally:
                dimenet.radius_graph, dimenet.triplets = before

    return Given(128, 1, 4, 64, 8, 256, spherical, radial, 5.0, output_initializer="glorot_orthogonal")


# ------------------------------------------------------------------------------------------------ the page


def section(results: dict[str, Any]) -> list[str]:
    """The part of the page: a line for each row, with the minimum times."""
    lines = [
        "# Points and molecules",
        "",
        f"`{results['command']}` measured these times. They are processor times, the minimum of interleaved rounds. "
        f"{units.MEANING} If a row has several peers, the fastest one counts. The rows of models read {BATCH} "
        f"molecules of {ATOMS} atoms, whose edges are new in each call; only SchNet and DimeNet get a known graph. The "
        "backward pass computes the gradients of the weights, and a step is a training step with Adam. The last rows "
        f"compare a step over new edges with a step over known edges. The goal is at least {1 / LIMITS[GEOMETRY]:.2f} "
        f"for points, {1 / LIMITS[MOLECULES]:.1f} for molecules, and {1 / LIMITS[NEW]:.2f} for new edges over known "
        "ones. torch_cluster was not installed." + (f" {results['note']}" if results.get("note") else ""),
        "",
        *report._machine(results),
        "",
        f"| case | direction | mpnn | peers | {units.RATIO} |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if "entries" not in row:
            lines.append(f"| {row['case']} | {row['direction']} | {row.get('error') or row.get('skipped')} | | |")
            continue
        times = {name: entry["least"] for name, entry in row["entries"].items() if "least" in entry}
        ours = times.pop(OURS)
        peers = ", ".join(f"{name} {report.duration(seconds)}" for name, seconds in times.items())
        ratio = min(times.values()) / ours if times else float("inf")
        shown = f"{ratio:.2f}" if ratio * LIMITS[row["group"]] >= 1 else f"**{ratio:.2f}**"
        lines.append(f"| {row['case']} | {row['direction']} | {report.duration(ours)} | {peers} | {shown} |")
    return lines
