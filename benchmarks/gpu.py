"""On a GPU: what is exact, what it costs, and compared with what; the cases of most worth first.

Kernels are compiled beforehand, by many processes at once (`prepare`): Triton keeps them on the disk. The cases of
"exact" are not timed, so those processes check them as well.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import gpu_models, gpu_plans, irregular, peers
from benchmarks.contest import BOTH, FORWARD, OURS, STEP, Case, Contest, Entry
from benchmarks.measure import usable, work
from benchmarks.run import Row, checked
from benchmarks.truth import Agreement, Sampled, Whole, of_layer
from mpnn import Graph, MessagePassing, Topology, engine, graphs, ops
from mpnn.attention import Additive, DotProduct
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.kernels.recurrent.selective import selective_scan
from mpnn.kernels.tiles.cuda import config as tile_config
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU
from mpnn.update import FeedForward, PreNorm

RECORD = Path(__file__).parent / "results" / "gpu.json"
COMPLETE = "torch SDPA"
SHARING = 4  # processes that hold memory of one card; eight ran out of 80 GB
EXACT, PEERS = "exact", "peers"
OUT_OF_MEMORY = "OutOfMemoryError"
STATES = 16  # of a channel of Mamba-1
LONGEST = 25.0  # seconds of a case, compilation included; a kernel that does not end would cost all others


@dataclass(frozen=True)
class Sizes:
    """Args:
    graph, large, cora: nodes and edges of graphs with hubs. hubs: of the one that is checked in whole.
    nodes, long: of sequences. heads, width: of attention over them. band: of Longformer and of windows.
    recurrent: nodes, heads and width of recurrences. models: of transformers. plan: of `gpu_plans`.
    """

    graph: tuple[int, int]
    large: tuple[int, int]
    cora: tuple[int, int]
    hubs: tuple[int, int]
    nodes: int
    long: int
    odd: int
    heads: int
    width: int
    band: int
    block: int
    recurrent: tuple[int, int, int]
    models: gpu_models.Shapes
    plan: gpu_plans.Shapes


DEFAULT = Sizes(
    graph=(169_343, 2_332_486),  # those of ogbn-arxiv made undirected
    large=(1_000_000, 10_000_000),
    cora=(2708, 10556),
    hubs=(2000, 60_000),
    nodes=8192,
    long=32768,
    odd=519,
    heads=8,
    width=64,
    band=256,
    block=64,
    recurrent=(4096, 32, 128),
    models=gpu_models.DEFAULT,
    plan=gpu_plans.DEFAULT,
)
SMALL = Sizes(
    graph=(200, 1500),
    large=(300, 2000),
    cora=(50, 200),
    hubs=(40, 300),
    nodes=128,
    long=256,
    odd=77,
    heads=2,
    width=16,
    band=16,
    block=8,
    recurrent=(48, 2, 16),
    models=gpu_models.SMALL,
    plan=gpu_plans.SMALL,
)
TYPES = (torch.bfloat16, torch.float32)


def cases(sizes: Sizes, device: str = "cuda") -> list[Case]:
    options = [{"dtype": dtype, "device": device} for dtype in TYPES]
    found = [case for each in options for case in _exact(sizes, each)]
    found += [case for each in options for case in _irregular(sizes, each)]
    found += [case for each in options for case in _structured(sizes, each)]
    found += gpu_models.cases(sizes.models, device)
    found += [case for each in options for case in _recurrences(sizes, each)]
    found += _host(sizes, options[1])
    found += gpu_plans.cases(sizes.plan, device)
    found += [case for each in options for case in _captured(sizes, each)]
    found += _large(sizes, options[0])
    found += _peers(sizes, options[0])
    known = timed_before()
    return sorted(found, key=lambda case: case.title in known)


def timed_before(record: Path = RECORD) -> frozenset[str]:
    """The titles of cases that the published record has results of."""
    return titles(json.loads(record.read_text())["rows"]) if record.is_file() else frozenset()


def titles(rows: Iterable[Row]) -> frozenset[str]:
    """The titles of cases whose rows have results."""
    return frozenset(f"{row['group']}: {row['case']}" for row in rows if "error" not in row)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leaf(options: dict[str, Any], *shape: int) -> Tensor:
    return torch.randn(shape, device=options["device"]).to(options["dtype"]).requires_grad_()


# ------------------------------------------------------------------------------------------------ irregular graphs


@dataclass(frozen=True)
class Kind:
    """A kind of attention over any graph. `leaves(nodes, heads, width)` are the shapes of its tensors, of which number
    1 belongs to destinations; `build(graph, *tensors)` is its round."""

    leaves: Callable[[int, int, int], list[tuple[int, ...]]]
    build: Callable[..., Round]

    def tensors(self, nodes: int, heads: int, width: int, options: dict[str, Any]) -> list[Tensor]:
        return [_leaf(options, *shape) for shape in self.leaves(nodes, heads, width)]

    def run(self, backend: str, graph: Graph, *given: Tensor) -> Tensor:
        return engine.run(self.build(graph, *given), backend)[0]


KINDS = {
    "GAT": Kind(
        lambda n, h, d: [(n, h, d), (n, h), (n, h)],
        lambda graph, value, dst, src: Round(graph, value, AdditiveScore(dst, src, LeakyReLU(0.2))),
    ),
    "GATv2": Kind(
        lambda n, h, d: [(n, h, d), (n, h, d), (n, h, d), (h, d)],
        lambda graph, value, dst, src, v: Round(graph, value, AdditiveV2Score(dst, src, v, LeakyReLU(0.2))),
    ),
    "dot": Kind(
        lambda n, h, d: [(n, h, d)] * 3,
        lambda graph, value, query, key: Round(graph, value, Dot(query, key, query.shape[-1] ** -0.5)),
    ),
}
SHAPES = (("GAT", 8, 8), ("GATv2", 8, 8), ("dot", 8, 16), ("dot", 8, 64))


@lru_cache(maxsize=2)
def _citations(nodes: int, edges: int, device: str) -> Graph:
    return irregular.citations(nodes, edges).to(device)


def _irregular(sizes: Sizes, options: dict[str, Any]) -> Iterator[Case]:
    nodes, edges = sizes.graph
    where = f"{nodes:,} nodes, {edges:,} edges, {_name(options['dtype'])}"
    for kind, heads, width in SHAPES:
        make = partial(_rows, kind, sizes.graph, heads, width, options)
        yield Case("irregular", f"{kind} {heads} x {width}, {where}", make)
    for name, make_contest, heads, width in (
        ("GATConv", irregular.gat, 8, 8),
        ("GATv2Conv", irregular.gatv2, 8, 8),
        ("TransformerConv", irregular.transformer, 8, 16),
        ("TransformerConv", irregular.transformer, 8, 64),
    ):
        make = partial(make_contest, nodes, edges, heads, width, "auto", (), **options)
        yield Case("irregular", f"{name} {heads} x {width}, a layer, {where}", make)
    for reduce, widths in (("sum", (16, 64, 128)), ("max", (64,))):
        for width in widths:
            directions = (FORWARD,) if reduce == "max" else (FORWARD, BOTH)
            make = partial(irregular.reduced, nodes, edges, width, reduce, "auto", (), **options)
            yield Case("reduce", f"{reduce} {width}, {where}", make, directions)


def _rows(kind: str, size: tuple[int, int], heads: int, width: int, options: dict[str, Any]) -> Contest:
    """The attention alone, without linear maps."""
    graph = _citations(*size, options["device"])
    given = KINDS[kind].tensors(graph.num_dst, heads, width, options)

    def compute(part: Graph, rows: Tensor, value: Tensor, dst: Tensor, *others: Tensor) -> Tensor:
        return KINDS[kind].run("edge_list", part, value, dst[rows], *others)

    exact = Sampled(graph, given, compute, heads * width)
    ours = Entry(OURS, lambda: KINDS[kind].run("auto", graph, *given), given)
    return Contest([ours], exact, exact.description, (), irregular.facts(graph, heads, width))


# ------------------------------------------------------------------------------------------------ sequences


def _topologies(sizes: Sizes, nodes: int) -> dict[str, Topology]:
    eighth = nodes // 8
    return {
        "complete": graphs.complete(),
        "causal": graphs.causal(),
        f"causal & window({sizes.band})": graphs.causal() & graphs.window(sizes.band),
        f"longformer({sizes.band}, globals=1)": graphs.longformer(sizes.band, globals=1),
        f"bigbird({sizes.block}, 3, 2, 1)": graphs.bigbird(sizes.block, window=3, random=2, globals=1),
        "documents of an eighth": graphs.documents([eighth] * 7 + [nodes - 7 * eighth]),
    }


def _structured(sizes: Sizes, options: dict[str, Any]) -> Iterator[Case]:
    kind = _name(options["dtype"])
    heads, width = sizes.heads, sizes.width
    for name, topology in _topologies(sizes, sizes.nodes).items():
        where = f"{name}, N {sizes.nodes}, B 2, {heads} x {width}, {kind}"
        for dropout in (0.0, 0.1):
            make = partial(_attention, topology, sizes.nodes, 2, heads, width, dropout, options)
            yield Case("structured", f"{where}{', dropout by words' if dropout else ''}", make)
        yield Case("structured", f"{where}, a layer", partial(_layer, topology, sizes.nodes, heads, width, options))
    for name, topology in _topologies(sizes, sizes.long).items():
        if options["dtype"] == torch.bfloat16 or name not in ("complete", "causal"):
            make = partial(_attention, topology, sizes.long, 1, 2 * heads, width, 0.0, options)
            yield Case("structured", f"{name}, N {sizes.long}, B 1, {2 * heads} x {width}, {kind}", make)
    if options["dtype"] == torch.bfloat16:
        name = f"longformer({sizes.band}, globals=1), N {sizes.long}, in steps of 64 keys, {kind}"
        yield Case("structured", name, partial(_in_steps, sizes, options), (FORWARD,))


def _in_steps(sizes: Sizes, options: dict[str, Any]) -> Contest:
    """Beside steps of 64 keys and two stages: compiled for sm_90 a full tile takes 302 instructions a thread instead of
    434, with as many programs on a multiprocessor."""
    topology = graphs.longformer(sizes.band, globals=1)
    contest = _attention(topology, sizes.long, 1, 2 * sizes.heads, sizes.width, 0.0, options)
    ours = contest.entries[0]
    assert isinstance(ours, Entry)
    configs, size = tile_config._CONFIGS, (2, 64)
    other = configs[size]._replace(forward=tile_config.Launch(64, 64, 64, 4, 2))

    def call() -> Tensor:
        with patch.dict(configs, {size: other}):
            return ours.call()

    return replace(contest, entries=[ours, Entry("mpnn, steps of 64 keys", call, ours.leaves)])


def _attention(
    topology: Topology, nodes: int, batch: int, heads: int, width: int, dropout: float, options: dict[str, Any]
) -> Contest:
    graph = topology.bind(nodes).to(options["device"])
    given = [_leaf(options, batch, nodes, heads, width) for _ in range(3)]

    def compute(part: Graph, rows: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        part.node_ids = rows.int(), torch.arange(nodes, device=rows.device, dtype=torch.int32)
        torch.manual_seed(0)
        return ops.attend(part, query[:, rows], key, value, dropout=dropout, backend="edge_list")

    def call() -> Tensor:
        return ops.attend(graph, *given, dropout=dropout)

    def seeded() -> Tensor:
        torch.manual_seed(0)
        return call()

    exact = Sampled(graph, given, compute, batch * heads * width, dim=1)
    entries = [Entry(OURS, call, given, answer=seeded)]
    if topology in (graphs.complete(), graphs.causal()) and not dropout:
        entries.append(_sdpa(given, topology == graphs.causal()))
    facts = irregular.facts(graph, heads, width) | {"flops": 4.0 * graph.num_edges * batch * heads * width}
    return Contest(entries, exact, exact.description, (), facts)


def _sdpa(given: Sequence[Tensor], causal: bool) -> Entry:
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in given]

    def call() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=causal).transpose(1, 2)

    return Entry(COMPLETE, call, leaves, lambda x: x.transpose(1, 2))


def _layer(topology: Topology, nodes: int, heads: int, width: int, options: dict[str, Any]) -> Contest:
    dim = heads * width
    torch.manual_seed(0)
    op = MessagePassing(topology, "sum", PreNorm(dim, FeedForward(dim)), DotProduct(dim, heads)).to(**options)
    graph = topology.bind(nodes).to(options["device"])
    x = _leaf(options, 2, nodes, dim)
    exact = of_layer(op, graph, x, 2 * dim)
    ours = Entry(OURS, lambda: op(x), (x, *op.parameters()))
    return Contest([ours], exact, exact.description, (), irregular.facts(graph, heads, width))


# ------------------------------------------------------------------------------------------------ recurrences


@dataclass(frozen=True)
class Recurrence:
    """gate: "head", "feature" or "". delta: the delta rule."""

    gate: str
    delta: bool
    deep: int
    width: int

    def tensors(self, nodes: int, heads: int, options: dict[str, Any]) -> list[Tensor]:
        """Queries, keys, values, the gates if there are any, and the rates of the delta rule."""
        narrow = options | {"dtype": torch.float32}
        key = F.normalize(_leaf(options, 1, nodes, heads, self.deep).detach().float(), dim=-1)
        found = [_leaf(options, 1, nodes, heads, self.deep), key.to(options["dtype"]).requires_grad_()]
        found.append(_leaf(options, 1, nodes, heads, self.width))
        if self.gate:
            gate = -0.1 * _leaf(narrow, 1, nodes, heads, *[self.deep] * (self.gate == "feature")).detach().abs()
            found.append(gate.requires_grad_())
        if self.delta:
            found.append(_leaf(narrow, 1, nodes, heads).detach().sigmoid().requires_grad_())
        return found

    def run(self, graph: Graph, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        gate = more[0] if self.gate else None
        beta = more[-1] if self.delta else None
        return ops.attend(graph, query, key, value, normalize="none", log_gate=gate, beta=beta)

    def walk(self, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
        """One node after the other, by the definition."""
        gates = more[0].exp() if self.gate else None
        gates = gates[..., None] if self.gate == "feature" else None if gates is None else gates[..., None, None]
        state = value.new_zeros(query.shape[0], *query.shape[2:], self.width)
        outs = []
        for i in range(query.shape[1]):
            state = state if gates is None else state * gates[:, i]
            sent = value[:, i]
            if self.delta:
                sent = more[-1][:, i, :, None] * (sent - (key[:, i, :, :, None] * state).sum(-2))
            state = state + key[:, i, :, :, None] * sent[..., None, :]
            outs.append((query[:, i, :, :, None] * state).sum(-2))
        return self.deep**-0.5 * torch.stack(outs, 1)


def _recurrent(width: int) -> dict[str, Recurrence]:
    return {
        f"gated {width} x {width // 2}": Recurrence("head", False, width, width // 2),
        f"gated delta {width} x {width}": Recurrence("head", True, width, width),
        f"delta with gates a feature {width} x {width}": Recurrence("feature", True, width, width),
        f"gates a feature {width} x {width}": Recurrence("feature", False, width, width),
    }


class OneHead(Sampled):
    """The first head or channel in float64, one node after the other; `compute` gives it."""

    description = "float64, the first head, one node after the other"

    def __init__(self, inputs: Sequence[Tensor], compute: Callable[..., Tensor]) -> None:
        self.dim, self.rows = 2, torch.zeros(1, dtype=torch.int64, device=inputs[0].device)
        self.inputs = inputs
        self.compute = compute


def _recurrences(sizes: Sizes, options: dict[str, Any]) -> Iterator[Case]:
    nodes, heads, width = sizes.recurrent
    for name, kind in _recurrent(width).items():
        make = partial(_recurrence, kind, nodes, heads, options)
        yield Case("recurrence", f"{name}, N {nodes}, {heads} heads, {_name(options['dtype'])}", make)
    channels = heads * width // 2
    what = f"Mamba-1's scan, {channels:,} channels of {STATES} states"
    yield Case(
        "recurrence", f"{what}, N {nodes}, {_name(options['dtype'])}", partial(_selective, nodes, channels, options)
    )


def _selective(nodes: int, channels: int, options: dict[str, Any]) -> Contest:
    given = _of_selective(nodes, channels, options)

    def first(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return _selective_walk(x[:, :, :1], dt[:, :, :1], A[:1], B, C)

    facts = {"nodes": nodes, "channels": channels, "states": STATES}
    exact = OneHead(given, first)
    return Contest([Entry(OURS, lambda: selective_scan(*given)[0], given)], exact, exact.description, (), facts)


def _of_selective(nodes: int, channels: int, options: dict[str, Any]) -> list[Tensor]:
    """x, steps, rates, B and C. Steps and rates are those that a Mamba begins with, and float32."""
    narrow = options | {"dtype": torch.float32}
    step = 0.1 * _leaf(narrow, 1, nodes, channels).detach().sigmoid()
    rate = -torch.arange(1.0, STATES + 1, device=options["device"]).repeat(channels, 1)
    received, sent = (_leaf(options, 1, nodes, STATES) for _ in range(2))
    return [_leaf(options, 1, nodes, channels), step.requires_grad_(), rate.requires_grad_(), received, sent]


def _selective_walk(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """Mamba's recurrence, one node after the other, by its definition."""
    h, outs = x.new_zeros(len(x), *A.shape), []
    for t in range(x.shape[1]):
        h = (dt[:, t, :, None] * A).exp() * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        outs.append((h * C[:, t, None]).sum(-1))
    return torch.stack(outs, 1)


def _recurrence(kind: Recurrence, nodes: int, heads: int, options: dict[str, Any]) -> Contest:
    graph = graphs.causal().bind(nodes).to(options["device"])
    given = kind.tensors(nodes, heads, options)
    exact = OneHead(given, lambda *of_all: kind.walk(*(x[:, :, :1] for x in of_all)))
    facts = {"nodes": nodes, "heads": heads, "width": kind.width}
    return Contest([Entry(OURS, lambda: kind.run(graph, *given), given)], exact, exact.description, (), facts)


# ------------------------------------------------------------------------------------------------ exact


def _exact(sizes: Sizes, options: dict[str, Any]) -> Iterator[Case]:
    """Every kernel in whole: each output, each gradient."""
    name = _name(options["dtype"])
    for kind, heads, width in (*SHAPES, ("dot", 2, 128)):
        make = partial(_exact_rows, kind, sizes.hubs, heads, width, options)
        yield Case(EXACT, f"csr, {kind} {heads} x {width}, a graph with hubs, {name}", make)
    for reduce in ("sum", "mean", "max", "var"):
        for width in (64, 200):
            make = partial(_exact_reduction, reduce, width, sizes.hubs, options)
            yield Case(EXACT, f"csr, {reduce} {width}, a graph with hubs, {name}", make)
    for topology_name, topology in _topologies(replace(sizes, band=sizes.odd // 8), sizes.odd).items():
        for extra in ("", "dropout", "bias by offset"):
            make = partial(_exact_tiles, topology, sizes, extra, options)
            yield Case(EXACT, f"tiles, {topology_name}, N {sizes.odd}{', ' * bool(extra)}{extra}, {name}", make)
    for recurrence_name, recurrence in _recurrent(sizes.recurrent[2]).items():
        make = partial(_exact_recurrence, recurrence, min(sizes.odd, 203), options)
        yield Case(EXACT, f"scan, {recurrence_name}, {name}", make)
    yield Case(EXACT, f"Mamba-1's scan, {name}", partial(_exact_selective, min(sizes.odd, 203), options))


def _exact_rows(kind: str, size: tuple[int, int], heads: int, width: int, options: dict[str, Any]) -> Contest:
    graph = _citations(*size, options["device"])
    return _whole(partial(KINDS[kind].run, "csr", graph), partial(KINDS[kind].run, "edge_list", graph),
        KINDS[kind].tensors(graph.num_dst, heads, width, options))  # fmt: skip


def _exact_reduction(reduce: str, width: int, size: tuple[int, int], options: dict[str, Any]) -> Contest:
    graph = _citations(*size, options["device"])

    def run(backend: str, x: Tensor) -> Tensor:
        return ops.aggregate(graph, x, reduce, backend=backend)

    return _whole(partial(run, "csr"), partial(run, "edge_list"), [_leaf(options, graph.num_src, width)])


def _exact_tiles(topology: Topology, sizes: Sizes, extra: str, options: dict[str, Any]) -> Contest:
    graph = topology.bind(sizes.odd).to(options["device"])
    given = [_leaf(options, 2, sizes.odd, sizes.heads, sizes.width) for _ in range(3)]
    if extra == "bias by offset":
        given.append(_leaf(options | {"dtype": torch.float32}, 65, sizes.heads))

    def run(backend: str, query: Tensor, key: Tensor, value: Tensor, *table: Tensor) -> Tensor:
        torch.manual_seed(0)
        bias = BiasTable(table[0], Offset(32)) if table else None
        dropout = 0.1 * (extra == "dropout")
        return ops.attend(graph, query, key, value, bias=bias, dropout=dropout, backend=backend)

    return _whole(partial(run, "tiles"), partial(run, "edge_list"), given)


def _exact_recurrence(kind: Recurrence, nodes: int, options: dict[str, Any]) -> Contest:
    graph = graphs.causal().bind(nodes).to(options["device"])
    return _whole(partial(kind.run, graph), kind.walk, kind.tensors(nodes, 2, options))


def _exact_selective(nodes: int, options: dict[str, Any]) -> Contest:
    return _whole(lambda *given: selective_scan(*given)[0], _selective_walk, _of_selective(nodes, 72, options))


def _whole(ours: Callable[..., Tensor], exact: Callable[..., Tensor], given: list[Tensor]) -> Contest:
    return Contest([Entry(OURS, lambda: ours(*given), given)], Whole(given, exact), Whole.description)


# ------------------------------------------------------------------------------------------------ host, capture, large


def _host(sizes: Sizes, options: dict[str, Any]) -> list[Case]:
    """Where the processor that launches takes longer than the GPU."""
    nodes, edges = sizes.cora
    layer = partial(irregular.gat, nodes, edges, 8, 8, "auto", (), **options)
    molecule = partial(irregular.reduced, 30, 64, 64, "sum", "auto", (), **options)
    short = partial(_attention, graphs.causal(), sizes.odd, 2, sizes.heads, sizes.width, 0.0, options)
    return [
        Case("host", f"GAT 8 x 8, {nodes:,} nodes, {edges:,} edges", partial(_rows, "GAT", sizes.cora, 8, 8, options)),
        Case("host", f"GATConv 8 x 8, a layer, {nodes:,} nodes, {edges:,} edges", layer),
        Case("host", "sum 64 over a molecule of 30 atoms", molecule),
        Case("host", f"causal, N {sizes.odd}, B 2", short),
    ]


def _captured(sizes: Sizes, options: dict[str, Any]) -> Iterator[Case]:
    """CUDA graphs: a call that waits for the device, or copies from it, cannot be captured."""
    name = _name(options["dtype"])
    sparse = list(_topologies(sizes, sizes.nodes).items())[2:]
    contests: list[tuple[str, Callable[[], Contest]]] = []
    for title, topology in sparse:
        make = partial(_attention, topology, sizes.nodes, 2, sizes.heads, sizes.width, 0.0, options)
        contests.append((f"{title}, N {sizes.nodes}, B 2", make))
    title, topology = sparse[1]
    contests += [
        (f"{title}, a layer", partial(_layer, topology, sizes.nodes, sizes.heads, sizes.width, options)),
        (f"GAT 8 x 8, {sizes.cora[0]:,} nodes", partial(_rows, "GAT", sizes.cora, 8, 8, options)),
        (f"dot 8 x 16, {sizes.graph[0]:,} nodes", partial(_rows, "dot", sizes.graph, 8, 16, options)),
    ]
    for recurrence, kind in list(_recurrent(sizes.recurrent[2]).items())[:2]:
        contests.append((recurrence, partial(_recurrence, kind, *sizes.recurrent[:2], options)))
    for what, contest in contests:
        for direction in (FORWARD, BOTH):
            yield Case("capture", f"{what}, {direction}, {name}", partial(_replayed, contest, direction), (STEP,))
    what = f"GAT 8 x 8, {sizes.cora[0]:,} nodes, a training step in two lines, {name}"
    yield Case("capture", what, partial(_in_two_lines, sizes.cora, options), (STEP,))
    if options["dtype"] == torch.bfloat16:
        trained = partial(gpu_models.trained, sizes.models, options["device"])
        what = f"Llama, a training step on {sizes.models.length} tokens, {name}"
        yield Case("capture", what, partial(_replayed, trained, STEP), (STEP,))


def _replayed(make: Callable[[], Contest], direction: str) -> Contest:
    """A contest's first entry as a CUDA graph, compared with its ordinary call."""
    contest = make()
    ours = contest.entries[0]
    assert isinstance(ours, Entry)
    call = work(ours, direction)
    replay = _capture(call)
    entries = [
        Entry(OURS, replay, answer=lambda: _together(replay())),
        Entry("mpnn, called", call, answer=lambda: _together(call())),
    ]
    return Contest(entries, Agreement(), Agreement.description)


def _in_two_lines(size: tuple[int, int], options: dict[str, Any]) -> Contest:
    """A training step of a layer as docs/gpu.md says to capture it, and as it is called."""
    graph = _citations(*size, options["device"])
    x = _leaf(options, graph.num_src, 64)
    layer = MessagePassing(graph, "sum", None, Additive(64, 8, 8)).to(**options)

    def step(model: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.enable_grad():
            out = model(x)
            return torch.autograd.grad(out.float().square().mean(), [x])[0]

    def entry(name: str, wrap: Callable[[MessagePassing], Any]) -> Entry:
        model = deepcopy(layer)
        call = partial(step, wrap(model) if options["device"] != "cpu" else model)
        return Entry(name, call, answer=lambda: call().clone())

    entries = [
        entry(OURS, lambda model: torch.cuda.make_graphed_callables(model, (x,))),
        entry("mpnn, reduce-overhead", lambda model: torch.compile(model, mode="reduce-overhead")),
        entry("mpnn, called", lambda model: model),
    ]
    return Contest(entries, Agreement(), Agreement.description)


def _together(results: Any) -> Tensor:
    """The result, or the first number of each."""
    if isinstance(results, Tensor):
        return results
    return torch.cat([x.flatten()[:1].float() for x in results])


def _capture(once: Callable[[], Any]) -> Callable[[], Any]:
    """A function that replays a call and gives its results; without a GPU, the call itself."""
    if not torch.cuda.is_available():
        return once
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = once()
    except Exception:
        _end_capture()
        raise

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def _end_capture() -> None:
    """Random numbers again after a capture that failed: torch's generator would go on to count for its graph."""
    fresh = torch.Generator("cuda")
    torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh.graphsafe_get_state())


def _large(sizes: Sizes, options: dict[str, Any]) -> list[Case]:
    nodes, edges = sizes.large
    where = f"{nodes:,} nodes, {edges:,} edges, {_name(options['dtype'])}"
    layer = partial(irregular.gat, nodes, edges, 8, 16, "auto", (), **options)
    total = partial(irregular.reduced, nodes, edges, 128, "sum", "auto", (), **options)
    return [
        Case("irregular", f"dot 8 x 16, {where}", partial(_rows, "dot", sizes.large, 8, 16, options)),
        Case("irregular", f"GATConv 8 x 16, a layer, {where}", layer),
        Case("reduce", f"sum 128, {where}", total),
    ]


# ------------------------------------------------------------------------------------------------ slow peers


def _peers(sizes: Sizes, options: dict[str, Any]) -> Iterator[Case]:
    """Peers that compile for long: flash-linear-attention, whose autotuner tries many kernels, and FlexAttention."""
    nodes, heads, width = sizes.recurrent
    for name, kind in list(_recurrent(width).items())[:3]:
        make = partial(_beside_fla, kind, nodes, heads, options)
        what = f"{name}, N {nodes}, {heads} heads, against flash-linear-attention, {_name(options['dtype'])}"
        yield Case(PEERS, what, make)
    few, channels = nodes // 8, heads * width // 2
    size = f"{channels:,} channels of {STATES} states, N {few}"
    what = f"Mamba-1's scan, {size}, against transformers, {_name(options['dtype'])}"
    yield Case(PEERS, what, partial(_selective_beside_hf, few, channels, options))
    for name, (topology, mask) in _masks(sizes).items():
        where = f"N {sizes.nodes}, {sizes.heads} x {sizes.width}"
        what = f"{name}, {where}, against FlexAttention, {_name(options['dtype'])}"
        yield Case(PEERS, what, partial(_beside_flex, topology, mask, sizes, options))


Mask = Callable[[Graph], Callable[..., Tensor]]


def _masks(sizes: Sizes) -> dict[str, tuple[Topology, Mask]]:
    """Topologies, and functions of their graph that return FlexAttention's function of (batch, head, i, j)."""
    band, block, eighth = sizes.band, sizes.block, sizes.nodes // 8

    def of_blocks(graph: Graph) -> Callable[..., Tensor]:
        table = graph.dense()[::block, ::block].contiguous().to(graph.device)
        return lambda b, h, i, j: table[i // block, j // block]

    functions: list[Mask] = [
        lambda _: lambda b, h, i, j: (i >= j) & (i - j <= band),
        lambda _: lambda b, h, i, j: ((i - j).abs() <= band // 2) | (i < 1) | (j < 1),
        of_blocks,
        lambda _: lambda b, h, i, j: (i // eighth).clamp(max=7) == (j // eighth).clamp(max=7),
    ]
    sparse = list(_topologies(sizes, sizes.nodes).items())[2:]
    named = {name: (topology, mask) for (name, topology), mask in zip(sparse, functions, strict=True)}
    window: Mask = lambda _: lambda b, h, i, j: (i - j).abs() <= band  # noqa: E731
    return {f"window({band})": (graphs.window(band), window), **named}


def _selective_beside_hf(nodes: int, channels: int, options: dict[str, Any]) -> Contest:
    """Beside the code of transformers, which walks from node to node: the model in place runs ours instead."""
    from transformers.models.falcon_mamba.modeling_falcon_mamba import mamba_selective_scan

    contest = _selective(nodes, channels, options)
    ours = contest.entries[0]
    assert isinstance(ours, Entry)
    given = ours.leaves

    def call() -> Tensor:
        x, dt, A, B, C = given
        return mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT).mT

    return replace(contest, entries=[ours, Entry(gpu_models.HF, call, given)])


def _beside_fla(kind: Recurrence, nodes: int, heads: int, options: dict[str, Any]) -> Contest:
    contest = _recurrence(kind, nodes, heads, options)
    ours = contest.entries[0]
    assert isinstance(ours, Entry)
    given = ours.leaves

    def make() -> Entry:
        return Entry("flash-linear-attention", lambda: _fla(kind, *given), given)

    return replace(contest, entries=[ours, peers.unless_missing("flash-linear-attention", "fla", make)])


def _fla(kind: Recurrence, query: Tensor, key: Tensor, value: Tensor, *more: Tensor) -> Tensor:
    scale = kind.deep**-0.5
    if not kind.delta:
        from fla.ops.simple_gla import chunk_simple_gla

        return chunk_simple_gla(query, key, value, more[0], scale=scale)[0]
    if kind.gate == "feature":
        from fla.ops.kda import chunk_kda

        return chunk_kda(query, key, value, *more, scale=scale)[0]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(query, key, value, *more, scale=scale)[0]


def _beside_flex(topology: Topology, mask: Mask, sizes: Sizes, options: dict[str, Any]) -> Contest:
    given = tuple(_leaf(options, sizes.nodes, sizes.heads, sizes.width) for _ in range(3))
    graph = topology.bind(sizes.nodes).to(options["device"])

    def compute(part: Graph, rows: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.attend(part, query[rows], key, value, backend="edge_list")

    exact = Sampled(graph, given, compute, sizes.heads * sizes.width)
    ours = Entry(OURS, lambda: ops.attend(graph, *given), given)
    flex = peers.flex(given, mask(graph), compiled=options["device"] != "cpu")
    return Contest([ours, flex], exact, exact.description, (), irregular.facts(graph, sizes.heads, sizes.width))


# ------------------------------------------------------------------------------------------------ many processes


def prepare(cases: Sequence[Case], processes: int, seconds: float) -> list[Row]:
    """Compiles the kernels of all cases, and checks those of "exact", in processes that are forked from this one, which
    must not have used the GPU yet. Where a kernel leaves the GPU unusable for a process, or does not end, another takes
    its place. Gives up after this many seconds.

    Returns:
        The rows of "exact".
    """
    order = sorted(range(len(cases)), key=lambda i: cases[i].group != PEERS)  # the longest first
    until = time.monotonic() + seconds
    context = get_context("fork")
    taken, results = context.Value("i", 0), context.SimpleQueue()
    tasks = [(i, cases[i]) for i in order]
    workers = [_Worker(context, tasks, taken, results) for _ in range(processes)]
    found: dict[int, list[Row]] = {}
    while time.monotonic() < until and any(worker.process.is_alive() for worker in workers):
        while not results.empty():
            i, rows = results.get()
            found[i] = rows
        for k, worker in enumerate(workers):
            i = worker.task.value
            if i >= 0 and cases[i].group != PEERS and time.monotonic() - worker.began.value > LONGEST:
                found[i] = unfinished(cases[i]) if cases[i].group == EXACT else []
                worker.process.kill()
                worker.process.join()
            if worker.process.exitcode and taken.value < len(order):
                workers[k] = _Worker(context, tasks, taken, results)
        if taken.value >= len(order) and all(i in found for i in order if cases[i].group != PEERS):
            break
        time.sleep(0.05)
    while not results.empty():
        i, rows = results.get()
        found[i] = rows
    for worker in workers:
        worker.process.kill()
    return [row for i in sorted(found) for row in found[i]]


def unfinished(case: Case) -> list[Row]:
    """Rows of a case that had to be stopped."""
    row = {"group": case.group, "case": case.name, "series": "", "x": "", "error": f"did not end in {LONGEST:.0f} s"}
    return [row | {"direction": direction} for direction in case.directions]


class _Worker:
    """A process that works on tasks: the number of the present one, -1 if there is none, and when it began."""

    def __init__(self, context: Any, tasks: Sequence[tuple[int, Case]], taken: Any, results: Any) -> None:
        self.task, self.began = context.Value("i", -1), context.Value("d", 0.0)
        self.process = context.Process(target=_take, args=(tasks, taken, results, self.task, self.began))
        self.process.start()


def _take(tasks: Sequence[tuple[int, Case]], taken: Any, results: Any, task: Any, began: Any) -> None:
    """Works on tasks until all are taken. Exits with 1 where a kernel left the GPU unusable."""
    torch.set_num_threads(1)
    while True:
        with taken.get_lock():
            k = taken.value
            taken.value += 1
        if k >= len(tasks):
            return
        index, case = tasks[k]
        began.value, task.value = time.monotonic(), index
        rows: list[Row] = []
        with suppress(Exception):  # the same happens again when the case has its turn, and is written down then
            rows = rows_of_exact([case]) if case.group == EXACT else _compile(case)
        if any(OUT_OF_MEMORY in row.get("error", "") for row in rows):
            rows = []  # processes share the memory: it is checked again when it has its turn alone
        task.value = -1
        results.put((index, rows))
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
        if not usable():
            os._exit(1)


def _compile(case: Case) -> list[Row]:
    if case.group == "capture":
        return []
    contest = case.make()
    for entry in contest.entries if case.group in ("plan", PEERS) else contest.entries[:1]:
        if isinstance(entry, Entry):
            for direction in case.directions:
                work(entry, direction)()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return []


def rows_of_exact(cases: Iterable[Case]) -> list[Row]:
    return [row for case in cases if case.group == EXACT for row in checked(case)]


def processes() -> int:
    """As many as share the memory of a card, and at most as many as there are processors, but for two."""
    return min(max((os.cpu_count() or 1) - 2, 1), SHARING)
