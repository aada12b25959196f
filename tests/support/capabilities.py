"""What every backend supports: the requests, graphs and dtypes that tests try, and the page that lists the answers.

    python tests/support/capabilities.py      writes the answers into docs/backends.md

The page is what tests expect. They run each combination that it lists as supported, and fail if a backend refuses it.
A backend supports a request over a graph in a dtype if the page says yes to each of the three.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import engine, graphs
from mpnn.aggregate import SUM, Index, aggregator
from mpnn.backends import BACKENDS, Backend, csr, scatter, tiles
from mpnn.engine import plan
from mpnn.engine.rewrites.prepare import lower_score
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable, PerEdge
from mpnn.graph.relations import Offset, Relation
from mpnn.kernels.cuda import schedule
from mpnn.round import Round
from mpnn.round.needs import SENTENCES
from mpnn.scores import Activation, AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Role

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
HEADS, WIDTH = 4, 3
SEED = torch.tensor(2**60 + 7)


# ---------------------------------------------------------------------------------------- graphs


def shuffled(graph: Graph) -> Graph:
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(3))
    return graphs.from_edges(graph.edge_index[:, order], num_dst=graph.num_dst, num_src=graph.num_src)


GRAPHS: dict[str, Graph] = {
    "complete": graphs.complete().bind(7),
    "complete, more sources": graphs.complete().bind(3, 5),
    "complete, more destinations": graphs.complete().bind(5, 3),
    "complete, edges shuffled": shuffled(graphs.complete().bind(4)),
    "causal": graphs.causal().bind(13),
    "causal, more sources": graphs.causal().bind(7).rows(0, 3),
    "causal, more destinations": graphs.causal().bind(7, 3),
    "causal, edges shuffled": shuffled(graphs.causal().bind(5)),
    "strictly causal: an empty row": (graphs.causal() - graphs.identity()).bind(6),
    "causal, cached queries": graphs.causal().bind(7).rows(4, 7),
    "memory": graphs.memory(3).bind(4),
    "window": graphs.window(2).bind(11),
    "dilated window, causal": (graphs.window(2, dilation=3) & graphs.causal()).bind(17),
    "documents of unequal lengths": graphs.documents([3, 1, 4, 3]).bind(11),
    "causal documents": (graphs.causal() & graphs.documents([3, 1, 4])).bind(8),
    "swin, shifted": graphs.windows(4, 6, size=3, shift=1).bind(24),
    "longformer": graphs.longformer(4, globals=2).bind(13),
    "bigbird": graphs.bigbird(block=2, window=3, random=1, globals=1).bind(19),
    "permutation": graphs.permutation([2, 0, 4, 1, 3]).bind(5),
    "knn": graphs.knn(torch.arange(12.0).view(6, 2) ** 2, 2),
    "hashing": graphs.lsh(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), buckets=4),
    "repeated edges": graphs.from_edges(torch.tensor([[0, 0, 1, 2], [1, 1, 0, 1]]), 4),
    "one node": graphs.complete().bind(1),
    "one node without in-neighbors": (graphs.complete() - graphs.identity()).bind(1),
    "no edge": graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 3),
    "no node": graphs.complete().bind(0),
    "no source": graphs.complete().bind(3, 0),
    "no destination": graphs.complete().bind(0, 3),
}


# ---------------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Classes(Relation):
    """Edge types that no offset gives."""

    count: int

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (dst * 5 + src * src) % self.count


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def request(graph: Graph, batch: tuple[int, ...] = (), key_heads: int = HEADS, value_heads: int = HEADS) -> Round:
    """Dot-product attention with a softmax."""
    query = leaf(*batch, graph.num_dst, HEADS, WIDTH)
    key = leaf(*batch, graph.num_src, key_heads, WIDTH)
    return Round(graph, leaf(*batch, graph.num_src, value_heads, WIDTH + 2), Dot(query, key, 0.7))


def table(graph: Graph, heads: int = HEADS) -> BiasTable:
    """A bias for each type of the graph's own relation (as in Swin), or for each clipped offset."""
    relation = graph.relation or Offset(2)
    return BiasTable(leaf(relation.count, heads), relation)


def of_nodes(plain: Round, heads: int = HEADS, batch: tuple[int, ...] = (), **options: Any) -> Round:
    """The request with a bias by the nodes of each edge."""
    dst, src = (leaf(*batch, n, heads) for n in (plain.graph.num_dst, plain.graph.num_src))
    return replace(plain, dst_bias=dst, src_bias=src, **options)


def vectors(relation: Relation, heads: int, width: int) -> EmbeddingTable:
    return EmbeddingTable(leaf(relation.count, heads, width), relation)


def with_edge_key(plain: Round, edge_key: PerEdge) -> Round:
    return replace(plain, score=replace(plain.score, edge_key=edge_key))


def on_keys(plain: Round, relation: Relation, heads: int = HEADS) -> Round:
    """The request with vectors by edge type on the keys (Shaw, Transformer-XL)."""
    return with_edge_key(plain, vectors(relation, heads, WIDTH))


def on_both(plain: Round, relation: Relation, heads: int = HEADS) -> Round:
    """The request with vectors by edge type on keys and values."""
    return replace(on_keys(plain, relation, heads), edge_value=vectors(relation, heads, WIDTH + 2))


def with_biases(plain: Round) -> Round:
    """The request with biases by the same edge types as `edge_key`, and others."""
    rule = plain.score.edge_key.relation
    tables = BiasTable(leaf(rule.count, HEADS), rule), BiasTable(leaf(rule.count, 1), rule)
    return replace(plain, bias=(*tables, table(plain.graph)))


def with_spare_rows(plain: Round) -> Round:
    """The request with tables of different lengths, each with more rows than its rule has edge types."""
    rule = Offset(1)
    tables = [BiasTable(leaf(rule.count + spare, HEADS), rule) for spare in (4, 1)]
    edge_key, edge_value = (EmbeddingTable(leaf(rule.count + 2, HEADS, w), rule) for w in (WIDTH, WIDTH + 2))
    return replace(with_edge_key(plain, edge_key), edge_value=edge_value, bias=tuple(tables))


LEAKY = LeakyReLU()


def additive(graph: Graph, activation: Activation = LEAKY, edge: bool = False) -> Round:
    score = AdditiveScore(leaf(graph.num_dst, HEADS), leaf(graph.num_src, HEADS), activation)
    return replace(request(graph), score=replace(score, edge=leaf(graph.num_edges, HEADS)) if edge else score)


def additive_v2(graph: Graph, activation: Activation = LEAKY, edge: bool = False) -> Round:
    dst, src = (leaf(n, HEADS, WIDTH) for n in (graph.num_dst, graph.num_src))
    added = leaf(graph.num_edges, HEADS, WIDTH) if edge else None
    return replace(request(graph), score=AdditiveV2Score(dst, src, leaf(HEADS, WIDTH), activation, added))


@dataclass(eq=False)
class Distance:
    """`-|query_i - key_j|^2`: a score as users write it, computed by its reference."""

    query: Tensor
    key: Tensor
    roles = {"query": Role("dst"), "key": Role("src")}  # noqa: RUF012

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        return -(query - key).square().sum(-1)


@dataclass(eq=False)
class Product(Distance):
    """`<query_i, key_j>`: a score as users write it, in a form that fused kernels know."""

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        return (query * key).sum(-1)

    def lower(self) -> Dot:
        return Dot(self.query, self.key, 1.0)


def own_score(graph: Graph, score: type[Distance]) -> Round:
    plain = request(graph)
    return replace(plain, score=score(plain.score.query, plain.score.key))


def sum_of_doubled(messages: Tensor, index: Index) -> Tensor:
    """An aggregator that is a user's function."""
    return aggregator("sum").reduce(2 * messages, index)


def aggregation(graph: Graph, reduce: str = "sum", weighted: bool = False) -> Round:
    """Aggregation of features [2, N_src, 1, F] as by `ops.aggregate`."""
    bias = (leaf(graph.num_edges, 1),) if weighted else ()
    how = SUM if reduce == "sum" else aggregator(reduce)
    return Round(graph, leaf(2, graph.num_src, 1, WIDTH), bias=bias, normalize="none", reduce=how)


DROPOUT: dict[str, Any] = {"dropout": 0.4, "seed": SEED}
REQUESTS: dict[str, Callable[[Graph], Round]] = {
    "dot product": request,
    "batched": lambda g: request(g, (2,)),
    "batched twice": lambda g: request(g, (2, 1)),
    "grouped heads": lambda g: request(g, (2,), 2, 2),
    "grouped keys and values, unequal": lambda g: request(g, (2,), 1, 2),
    "softcap": lambda g: replace(request(g), score=replace(request(g).score, scale=2.0, softcap=1.5)),
    "sinks": lambda g: replace(request(g), sinks=leaf(HEADS)),
    "sinks, grouped heads, softcap": lambda g: replace(
        request(g, (2,), 2, 2), score=replace(request(g, (2,), 2, 2).score, softcap=1.5), sinks=leaf(HEADS)
    ),
    "sinks, dropout, bias by edge type": lambda g: replace(
        request(g, (2,)), sinks=leaf(HEADS), bias=(table(g),), **DROPOUT
    ),
    "sinks, returned weights": lambda g: replace(request(g, (2,)), sinks=leaf(HEADS), return_weights=True),
    "sigmoid": lambda g: replace(request(g, (2,)), normalize="sigmoid", bias=(table(g),)),
    "unnormalized": lambda g: replace(request(g, (2,)), normalize="none"),
    "dropout": lambda g: replace(request(g, (2,)), **DROPOUT),
    "dropout, grouped heads, bias": lambda g: replace(request(g, (2,), 2, 2), bias=(table(g),), **DROPOUT),
    "returned weights": lambda g: replace(request(g, (2,)), return_weights=True),
    "mean of attended values": lambda g: replace(request(g), reduce=aggregator("mean")),
    "maximum of attended values": lambda g: replace(request(g), reduce=aggregator("max")),
    "bias per edge": lambda g: replace(request(g, (2,)), bias=(leaf(g.num_edges, HEADS),)),
    "bias per batch and edge": lambda g: replace(request(g, (2,)), bias=(leaf(2, g.num_edges, 1),)),
    "bias by edge type": lambda g: replace(request(g), bias=(table(g),)),
    "bias by edge type, batched": lambda g: replace(request(g, (2,)), bias=(table(g),)),
    "bias by edge type, spare rows": lambda g: replace(request(g), bias=(BiasTable(leaf(9, HEADS), Offset(1)),)),
    "several biases": lambda g: replace(request(g, (2,)), bias=(table(g, 1), table(g), leaf(g.num_edges, HEADS))),
    "`edge_key` per edge": lambda g: with_edge_key(request(g), leaf(g.num_edges, HEADS, WIDTH)),
    "`edge_value` per edge": lambda g: replace(request(g), edge_value=leaf(g.num_edges, HEADS, WIDTH + 2)),
    "`edge_key` by offset, grouped heads": lambda g: on_keys(request(g, (2,), 2, 1), Offset(2)),
    "`edge_key` by offset, shared by heads": lambda g: on_keys(request(g), Offset(3), 1),
    "`edge_key` by offset, and biases": lambda g: with_biases(on_keys(request(g, (2, 1)), Offset(40))),
    "`edge_key` by offset, softcap": lambda g: on_keys(REQUESTS["softcap"](g), Offset(2)),
    "`edge_key`, one type": lambda g: on_keys(request(g), Offset(0)),
    "`edge_key` and `edge_value` by offset": lambda g: on_both(request(g, (2,), 2, 1), Offset(2), 1),
    "`edge_key` and `edge_value` by another rule": lambda g: with_biases(on_both(request(g, (2,)), Classes(3))),
    "`edge_key` and `edge_value`, spare rows": lambda g: with_spare_rows(request(g, (2,))),
    "`edge_key` and `edge_value`, dropout": lambda g: with_biases(
        on_both(replace(request(g, (2,)), **DROPOUT), Offset(4))
    ),
    "`edge_value` by offset, sigmoid": lambda g: replace(
        request(g, (2,)), normalize="sigmoid", edge_value=vectors(Offset(2), HEADS, WIDTH + 2)
    ),
    "additive (GAT)": additive,
    "additive, with edge terms": lambda g: additive(g, edge=True),
    "additive, tanh": lambda g: additive(g, torch.tanh),
    "additive, another activation": lambda g: additive(g, F.elu),
    "additive v2 (GATv2)": additive_v2,
    "additive v2, tanh, with edge terms": lambda g: additive_v2(g, torch.tanh, edge=True),
    "own score": lambda g: own_score(g, Distance),
    "own score that lowers": lambda g: own_score(g, Product),
    "bias by nodes": lambda g: of_nodes(request(g)),
    "bias by nodes, shared by heads, batched": lambda g: of_nodes(request(g, (2, 1)), 1, (2, 1), bias=(table(g),)),
    "bias by sources, sinks, grouped heads, softcap": lambda g: replace(
        of_nodes(REQUESTS["sinks, grouped heads, softcap"](g), HEADS, (2,)), dst_bias=None
    ),
    "bias by nodes, dropout, `edge_key`": lambda g: of_nodes(
        on_keys(request(g, (2,)), Offset(2)), HEADS, (2,), bias=(leaf(g.num_edges, 1),), **DROPOUT
    ),
    "bias by nodes, sigmoid": lambda g: of_nodes(request(g), normalize="sigmoid"),
    "bias by nodes, unnormalized": lambda g: of_nodes(request(g), normalize="none"),
    "bias by nodes, returned weights": lambda g: of_nodes(request(g, (2,)), 1, (2,), return_weights=True),
    "additive, bias by nodes": lambda g: of_nodes(additive(g, torch.tanh)),
    "softmax of biases of nodes": lambda g: of_nodes(replace(request(g), score=None)),
    "softmax over destinations": lambda g: replace(request(g), normalize="softmax_dst"),
    "softmax over destinations, grouped heads, softcap, biases": lambda g: of_nodes(
        replace(REQUESTS["softcap"](g), value=request(g, (), 2, 2).value), normalize="softmax_dst",
        bias=(table(g), leaf(g.num_edges, HEADS)),
    ),
    "softmax over destinations, batched, dropout": lambda g: replace(
        request(g, (2,), 2, 1), normalize="softmax_dst", **DROPOUT
    ),
    "softmax over destinations, returned weights": lambda g: replace(
        request(g, (2,)), normalize="softmax_dst", return_weights=True
    ),
    "softmax over destinations, `edge_key` by offset": lambda g: replace(
        on_keys(request(g), Offset(2)), normalize="softmax_dst"
    ),
    "softmax over destinations, additive with edge terms": lambda g: replace(
        additive(g, edge=True), normalize="softmax_dst"
    ),
    "softmax over destinations, additive v2 with edge terms": lambda g: replace(
        additive_v2(g, edge=True), normalize="softmax_dst"
    ),
    "softmax over destinations of biases": lambda g: replace(
        request(g), score=None, bias=(leaf(g.num_edges, HEADS),), normalize="softmax_dst"
    ),
    "softmax of biases": lambda g: replace(request(g), score=None, bias=(leaf(g.num_edges, HEADS),)),
    **{
        f"aggregation: {reduce}": lambda g, reduce=reduce: aggregation(g, reduce)
        for reduce in ("sum", "mean", "max", "min", "var", "std", "median", "softmax", "powermean", "pna")
    },
    "aggregation: max, without gradients": lambda g: converted(aggregation(g, "max"), Tensor.detach),
    "aggregation: own function": lambda g: replace(aggregation(g), reduce=aggregator(sum_of_doubled)),
    **{
        f"weighted aggregation: {reduce}": lambda g, reduce=reduce: aggregation(g, reduce, weighted=True)
        for reduce in ("sum", "mean", "max")
    },
    "aggregation: a weight for each feature": lambda g: replace(
        aggregation(g), value=leaf(2, g.num_src, WIDTH, 1), bias=(leaf(g.num_edges, WIDTH),)
    ),
}  # fmt: skip
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def converted(asked: Round, convert: Callable[[Tensor], Tensor]) -> Round:
    """The request with each of its tensors converted."""

    def one(x: Any) -> Any:
        if isinstance(x, EmbeddingTable):
            return replace(x, table=convert(x.table))
        return convert(x) if isinstance(x, Tensor) else x

    score = asked.score and replace(asked.score, **{name: one(x) for name, x in vars(asked.score).items()})
    bias = tuple(map(one, asked.bias))
    rest = {name: one(getattr(asked, name)) for name in ("value", "edge_value", "sinks", "dst_bias", "src_bias")}
    return replace(asked, score=score, bias=bias, **rest)


# ---------------------------------------------------------------------------------------- what backends answer

SIMPLE = ("dot product", "unnormalized", "aggregation: sum")  # each backend supports one of these
ON_CUDA = ("tiles", "csr")  # the others answer alike on all devices
COLUMNS = [(b, "cpu") for b in BACKENDS] + [(b, "cuda") for b in BACKENDS if b.NAME in ON_CUDA]


class OnCuda(Tensor):
    """A tensor that says it is on a GPU. Rewrites may compute with it when they are planned."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cpu, is_cuda = False, True  # type: ignore[assignment]


@contextmanager
def all_installed() -> Iterator[None]:
    """Backends answer as if torch_sparse and triton were installed."""
    extra = mock.patch.object(scatter, "_installed", return_value=True)
    with extra, mock.patch.object(schedule, "unusable", return_value=None):
        yield


def refusal(backend: Backend, asked: Round, dtype: torch.dtype = torch.float32, device: str = "cpu") -> str | None:
    """Why the backend refuses the request on this device, which need not exist, or None."""

    def claim(x: Tensor) -> Tensor:
        x = x.detach().to(dtype).requires_grad_(x.requires_grad)
        return x if device == "cpu" else x.as_subclass(OnCuda)

    with all_installed():
        return plan.refusal(backend, lower_score(converted(asked, claim), backend.NAME))


def simple(backend: Backend, device: str = "cpu") -> Callable[[Graph], Round]:
    """A request that the backend supports over a causal graph."""
    makers = (REQUESTS[name] for name in SIMPLE)
    return next(make for make in makers if refusal(backend, make(GRAPHS["causal"]), device=device) is None)


def _twice(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "`backward()`, `torch.autograd.grad`": lambda f, x: torch.autograd.grad(f(x.requires_grad_()), x),
    "second derivatives (`create_graph=True`)": _twice,
    "`torch.func.grad`, `jacrev`": lambda f, x: torch.func.grad(f)(x),
    "`torch.func.jvp`": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "`torch.vmap`": lambda f, x: torch.vmap(f)(torch.stack([x, x])),
}


def differentiates(backend: Backend, how: str) -> bool:
    """Whether a derivative works, tried on a small float64 request whose heads are all of one width. A derivative that
    works must be that of `edge_list`."""
    make = simple(backend)
    asked = converted(make(GRAPHS["causal"]), Tensor.detach)
    asked = replace(asked, value=torch.randn(*asked.batch, 13, HEADS, WIDTH, dtype=torch.float64))

    def derivative(name: str) -> Any:
        def loss(value: Tensor) -> Tensor:
            score = asked.score and replace(asked.score, query=value)
            return engine.run(replace(asked, value=value, score=score), name)[0].square().sum()

        return DERIVATIVES[how](loss, asked.value.clone())

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap warns where it computes the items one by one
            found = derivative(backend.NAME)
    except RuntimeError:
        return False
    torch.testing.assert_close(found, derivative("edge_list"))
    return True


# ---------------------------------------------------------------------------------------- the page

_TRIAL_TOKENS = """
## Rounds, graphs and dtypes

The first table asks each backend about rounds, over a causal graph in float32. The second table asks about graphs,
and the third about dtypes. Their rounds are dot-product attention, or, for a backend without it, unnormalized dot
products or plain sums. The columns of `scatter` and CUDA assume that the extra packages are installed. No GPU is
needed, because the answers depend only on shapes and dtypes.
"""
_TABLES = re.compile(r"(?<=<!-- tables -->\n).*?(?=<!-- end -->)", re.S)


def updated(text: str) -> str:
    """The page with the answers that backends give now."""

    def rows(title: str, names: Any, ask: Callable[[str, Backend, str], str | None]) -> Iterator[str]:
        reasons: dict[str, int] = {}

        def cell(reason: str | None) -> str:
            return "yes" if reason is None else str(reasons.setdefault(reason, len(reasons) + 1))

        heads = [b.NAME if device == "cpu" else f"{b.NAME}, CUDA" for b, device in COLUMNS]
        yield f"\n<details>\n<summary>{len(names)} {title}s</summary>\n"
        yield f"| {title} | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}"
        for name in names:
            yield f"| {name} | {' | '.join(cell(ask(name, b, device)) for b, device in COLUMNS)} |"
        yield "\n" + "\n".join(f"{number}. {reason}" for reason, number in reasons.items()) + "\n\n</details>"

    def serves(backend: Backend, device: str) -> frozenset[str]:
        if backend is csr:
            return csr.AGGREGATION[device].SERVES | csr.ATTENTION[device].SERVES
        return tiles.WAYS[device].SERVES if backend is tiles else backend.SERVES

    causal = GRAPHS["causal"]
    heads = [b.NAME if device == "cpu" else f"{b.NAME}, CUDA" for b, device in COLUMNS]
    lines = [
        f"<details>\n<summary>{len(SENTENCES)} needs</summary>\n",
        f"| need | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}",
        *(f"| {need} | {' | '.join('yes' if need in serves(*c) else '' for c in COLUMNS)} |" for need in SENTENCES),
        "\n</details>",
        _TRIAL_TOKENS,
        *rows("request", REQUESTS, lambda name, b, device: refusal(b, REQUESTS[name](causal), device=device)),
        *rows("graph", GRAPHS, lambda name, b, device: refusal(b, simple(b, device)(GRAPHS[name]), device=device)),
        *rows("dtype", DTYPES, lambda name, b, device: refusal(b, simple(b, device)(causal), DTYPES[name], device)),
        "\n## Derivatives\n\nThese derivatives were computed on a CPU. Where the table says no, the call raises an "
        "error.\n",
    ]
    differentiable = [b for b in BACKENDS if b is not scatter]
    lines.append(f"| | {' | '.join(b.NAME for b in differentiable)} |\n|{'---|' * (len(differentiable) + 1)}")
    for how in DERIVATIVES:
        lines.append(f"| {how} | {' | '.join('yes' if differentiates(b, how) else 'no' for b in differentiable)} |")
    return _TABLES.sub(lambda _: "\n".join(lines) + "\n", text)


@cache
def _answers() -> dict[tuple[str, str], bool]:
    """Whether the page says yes, by row and column."""
    answers, heads = {}, [""]
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "edge_list" in cells:
            heads = cells
        elif line.startswith("| ") and len(cells) == len(heads):
            answers |= {(cells[0], column): x == "yes" for column, x in zip(heads[1:], cells[1:], strict=True)}
    return answers


def supported(backend: Backend, *rows: str) -> bool:
    """Whether docs/backends.md says yes to all of the rows (a request, a graph, a dtype) for this backend on CPU."""
    return all(_answers()[row, backend.NAME] for row in rows)


def run(backend: Backend, asked: Round) -> tuple[Tensor, Tensor | None]:
    """Runs a request that the backend must support."""
    asked = lower_score(asked, backend.NAME)
    reason = plan.refusal(backend, asked)
    assert reason is None, f"{backend.NAME} refuses what docs/backends.md lists as supported: {reason}"
    return engine.run(asked, backend.NAME)


if __name__ == "__main__":
    torch.manual_seed(0)
    PAGE.write_text(updated(PAGE.read_text()))
