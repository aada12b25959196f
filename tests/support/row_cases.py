"""The kernels of `csr` (C++ on CPU, Triton on GPU), what tests of both run, and the comparison with `edge_list`.

`TRITON_INTERPRET=1 pytest -m triton` runs Triton's kernels on CPU tensors in its interpreter; where there is a GPU,
`pytest -m triton` runs what is compiled for it.
"""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import interpreter
import pytest
import torch
from capabilities import converted
from torch import Tensor
from torch.nn import functional as F

from mpnn import engine, graphs
from mpnn.aggregate import Mean
from mpnn.backends import csr
from mpnn.engine import choice
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.kernels.cuda import launch
from mpnn.kernels.cuda.launch import Arguments, Launches
from mpnn.kernels.rows import attention as row_attention
from mpnn.round import Result, Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MARKS = [
    pytest.mark.triton,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: set TRITON_INTERPRET=1"),
    # numpy, which interprets, warns of overflows and NaN where a GPU does not
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def on_triton(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs Triton's kernels."""
    for mark in MARKS:
        test = mark(test)
    return test


START = Launches.start


def check_key(
    self: Launches, key: Hashable, kernel: Any, operands: Sequence[Any], arguments: Callable[[], Arguments]
) -> None:
    """`Launches.start` by the interpreter, which keeps no kernels: whatever has the same form must have the same
    arguments besides addresses."""
    given = arguments()
    form = [id(kernel), key]
    launch._read(operands, form)
    told = str(given)
    assert self._kept.setdefault(tuple(form), told) == told  # type: ignore[arg-type, comparison-overlap]
    kernel[(given.programs,)](*operands, *given.numbers, **given.constants, num_warps=given.warps)


ATTENTION, AGGREGATION = csr.ATTENTION["cuda"], csr.AGGREGATION["cuda"]
if INTERPRETED:  # on CPU tensors, which the compiled kernels do not take
    interpreter.mend()
    Launches.start = check_key  # type: ignore[method-assign]
    ATTENTION.SERVES |= {"cpu"}
    AGGREGATION.SERVES |= {"cpu"}


@dataclass(frozen=True)
class Kernels:
    """The kernels for one kind of device: the backend's functions for attention and for plain aggregation."""

    device: str
    attention: Any
    reduce: Any


class Triton:
    """`csr` as it is on a GPU."""

    NAME = "csr"

    @staticmethod
    def half(given: Round) -> csr.Way:
        return AGGREGATION if csr.is_plain(given) else ATTENTION

    def serves(self, given: Round) -> tuple[frozenset[str], dict[str, str]]:
        return self.half(given).SERVES, self.half(given).REASONS

    def refusal(self, given: Round) -> str | None:
        reason: str | None = self.half(given).refusal(given)
        return reason

    def run(self, given: Round) -> Result:
        result: Result = self.half(given).run(given)
        return result


CPU = Kernels("cpu", csr, csr)
TRITON = Kernels("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda", ATTENTION, AGGREGATION)
BOTH = [pytest.param(CPU, id="cpu"), pytest.param(TRITON, id="triton", marks=MARKS)]
SEED = torch.tensor(2**60 + 7)
# Sums of at most 60 float64 terms of size about 10, twice over (softmax, then values): 60 * 10 * 2 * 1.1e-16 < 2e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh memory that Triton's kernels write is full of NaN, so that whatever is not written shows."""
    if request.node.get_closest_marker("triton") is None:
        yield
        return
    if INTERPRETED:
        torch.use_deterministic_algorithms(True)
    else:  # what is freed here is what is handed out next
        torch.cuda.empty_cache()
        _ = [torch.full((1 << k,), torch.nan, device=TRITON.device) for k in range(7, 22)]
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are divided as if the graph were large: into 32 parts and after 70 edges on CPU, after 20 on GPU."""
    monkeypatch.setattr(row_attention, "_MIN_COMPONENTS", 1)
    monkeypatch.setattr("mpnn.kernels.rows.rows.MIN_PIECE", 70)
    monkeypatch.setattr("mpnn.kernels.cuda.schedule._PIECE", 20)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def halves(*shape: int) -> Tensor:
    """So that sums are exact in any order and many messages are equal."""
    return (2 * torch.randn(*shape, dtype=torch.float64)).round().div(2).requires_grad_()


def scattered(nodes: int = 9, edges: int = 40) -> Graph:
    """Edges in no order, some of them repeated, with classes; node 0 has no in-edges, node 1 no out-edges."""
    generator = torch.Generator().manual_seed(5)
    src, dst = torch.randint(1, nodes, (2, edges), generator=generator)
    return graphs.from_edges(torch.stack([src + (src == 1), dst]), nodes + 1, edge_type=torch.arange(edges) % 3)


def without_edges() -> Graph:
    none = torch.zeros(2, 0, dtype=torch.int64)
    return graphs.from_edges(none, 3, edge_type=none[0])


def hubs(degree: int = 40) -> Graph:
    """Node 0 has at least so many in-edges, node 1 out-edges; the other edges are a fifth of all, at random."""
    generator, edges = torch.Generator().manual_seed(7), degree * 5 // 2
    nodes = max(9, degree // 10)
    src, dst = torch.randint(0, nodes, (2, edges), generator=generator)
    dst[:degree], src[degree : 2 * degree] = 0, 1
    order = torch.randperm(edges, generator=generator)
    return graphs.from_edges(torch.stack([src, dst])[:, order], nodes, edge_type=torch.arange(edges) % 2)


def dot(graph: Graph, batch: tuple[int, ...] = (), heads: int = 3, width: int = 5, shared: int = 3) -> Round:
    query, key = leaf(*batch, graph.num_dst, heads, width), leaf(*batch, graph.num_src, shared, width)
    return Round(graph, leaf(*batch, graph.num_src, shared, width + 2), Dot(query, key, 0.6))


def additive(
    graph: Graph, activation: Callable[[Tensor], Tensor], batch: tuple[int, ...] = (), heads: int = 3
) -> Round:
    ends = [leaf(*batch, n, heads) for n in (graph.num_dst, graph.num_src)]
    edge = leaf(graph.num_edges, heads)
    return Round(graph, leaf(*batch, graph.num_src, heads, 4), AdditiveScore(*ends, activation, edge))


def additive_v2(graph: Graph, activation: Callable[[Tensor], Tensor], edge_heads: int = 3) -> Round:
    ends = [leaf(n, 3, 5) for n in (graph.num_dst, graph.num_src)]
    edge = leaf(graph.num_edges, edge_heads, 5)
    return Round(graph, leaf(graph.num_src, 3, 4), AdditiveV2Score(*ends, leaf(3, 5), activation, edge))


def with_vectors(graph: Graph, edge_key: Tensor | EmbeddingTable, edge_value: Tensor | EmbeddingTable) -> Round:
    given = dot(graph, (2,))
    return replace(given, score=replace(given.score, edge_key=edge_key), edge_value=edge_value)


REQUESTS: dict[str, Callable[[Graph], Round]] = {
    "dot": dot,
    "grouped heads, batch, dropout": lambda g: replace(dot(g, (2, 1), heads=4, shared=2), dropout=0.5, seed=SEED),
    "one key for all heads": lambda g: dot(g, heads=5, shared=1),
    "twelve heads, four keys": lambda g: dot(g, heads=12, shared=4),
    "twelve heads, dropout": lambda g: replace(dot(g, heads=12, shared=12), dropout=0.5, seed=SEED),
    "wide heads": lambda g: dot(g, heads=2, width=70, shared=1),
    "sigmoid": lambda g: replace(dot(g), normalize="sigmoid", dropout=0.25, seed=SEED),
    "no normalizer": lambda g: replace(dot(g), normalize="none", bias=(leaf(g.num_edges, 3),)),
    "softcap, biases and tables": lambda g: replace(
        (r := dot(g, (2,))),
        score=replace(r.score, softcap=0.7),
        bias=(leaf(g.num_edges, 1), leaf(2, g.num_edges, 3), BiasTable(leaf(3, 3)), BiasTable(leaf(3, 1), Offset(1))),
    ),
    "everything": lambda g: replace(
        (r := dot(g, heads=2, width=8, shared=1)),
        score=replace(r.score, edge_key=EmbeddingTable(leaf(3, 2, 8))),
        bias=(leaf(g.num_edges, 1), BiasTable(leaf(3, 2))),
        edge_value=EmbeddingTable(leaf(3, 1, 10)),
        dropout=0.5,
        seed=SEED,
        return_weights=True,
    ),
    "vectors on edges": lambda g: with_vectors(g, leaf(g.num_edges, 3, 5), leaf(g.num_edges, 1, 7)),
    "vectors on edges, one key for all heads": lambda g: with_vectors(
        g, leaf(g.num_edges, 1, 5), leaf(g.num_edges, 3, 7)
    ),
    "vectors by rule": lambda g: with_vectors(
        g, EmbeddingTable(leaf(7, 1, 5), Offset(3)), EmbeddingTable(leaf(3, 3, 7))
    ),
    "vectors by class and on edges": lambda g: with_vectors(g, EmbeddingTable(leaf(3, 3, 5)), leaf(g.num_edges, 3, 7)),
    "vectors by class": lambda g: replace(
        with_vectors(g, EmbeddingTable(leaf(3, 3, 5)), EmbeddingTable(leaf(7, 1, 7), Offset(3))), dropout=0.5, seed=SEED
    ),
    "additive": lambda g: replace(additive(g, LeakyReLU(0.3), (2,)), dropout=0.5, seed=SEED),
    "additive, torch's leaky_relu": lambda g: additive(g, F.leaky_relu, heads=8),
    "additive, tanh": lambda g: replace(additive(g, torch.tanh), bias=(leaf(g.num_edges, 3), BiasTable(leaf(3, 1)))),
    "additive v2": lambda g: additive_v2(g, LeakyReLU()),
    "additive v2, tanh": lambda g: additive_v2(g, torch.tanh, edge_heads=1),
    "additive v2 without edges": lambda g: replace(
        (r := additive_v2(g, torch.tanh)), score=replace(r.score, edge=None), bias=(BiasTable(leaf(3, 3)),)
    ),
    "weights by bias alone": lambda g: replace(dot(g), score=None, bias=(leaf(g.num_edges, 3),)),
    "sigmoid of biases alone": lambda g: replace(dot(g), score=None, bias=(leaf(g.num_edges, 3),), normalize="sigmoid"),
    "mean": lambda g: replace(dot(g), reduce=Mean()),
}


def moved(given: Round, device: str) -> Round:
    """The request with all of its tensors on this device."""
    if device == "cpu":
        return given
    there = converted(given, lambda x: x.detach().to(device).requires_grad_(x.requires_grad))
    return replace(there, graph=given.graph.to(device), seed=None if given.seed is None else given.seed.to(device))


def run(kernels: Kernels, given: Round) -> tuple[Tensor, Tensor | None]:
    """By name, as users run it; Triton's kernels also in the interpreter, where the engine does not choose them."""
    if kernels is CPU:
        return engine.run(given, "csr")
    found = choice._by(Triton(), given)
    assert isinstance(found, choice.Choice), found
    result = found.run(given)
    return result.out, result.weights


def check(kernels: Kernels, given: Round, close: dict[str, float] = CLOSE, what: str = "") -> None:
    """Output and gradients are those of the specification."""
    given = moved(given, kernels.device)
    leaves, found = [t for t in given.tensors if t.requires_grad], []
    for out, _ in (run(kernels, given), engine.run(given, "edge_list")):
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, direction, materialize_grads=True)])
    for k, (ours, expected) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(ours, expected, **close, msg=lambda m, k=k: f"{what}, {k}: {m}")


def rounding(kernels: Kernels, dtype: torch.dtype) -> float:
    """What one rounding loses at most, relatively; Triton's interpreter truncates bfloat16."""
    truncates = kernels is TRITON and INTERPRETED and dtype == torch.bfloat16
    return torch.finfo(dtype).eps / (1 if truncates else 2)
