"""Where tests of Triton's kernels run, the graphs and requests that they share, and the comparison with `edge_list`.

`TRITON_INTERPRET=1 pytest -m triton` runs the kernels on CPU tensors in Triton's interpreter; where there is a GPU,
`pytest -m triton` runs what is compiled for it.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpnn import graphs
from mpnn.aggregate import Mean
from mpnn.backends import csr, edge_list
from mpnn.backends.csr import cuda_attention, cuda_reduce
from mpnn.edge_tables import BiasTable, EmbeddingTable
from mpnn.engine.plan import refusal as why_not
from mpnn.graph import Graph
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MARKS = [
    pytest.mark.triton,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: set TRITON_INTERPRET=1"),
    # numpy, which interprets, warns of overflows and NaN where a GPU does not
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
SEED = torch.tensor(2**60 + 7, device=DEVICE)
# Sums of at most 60 float64 terms of size about 10, twice over (softmax, then values): 60 * 10 * 2 * 1.1e-16 < 2e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN, so that whatever is not written shows."""
    if INTERPRETED:
        torch.use_deterministic_algorithms(True)
    else:  # what is freed here is what is handed out next
        torch.cuda.empty_cache()
        _ = [torch.full((1 << k,), torch.nan, device=DEVICE) for k in range(7, 22)]
    yield
    torch.use_deterministic_algorithms(False)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def halves(*shape: int) -> Tensor:
    """So that sums are exact in any order and many messages are equal."""
    return (2 * torch.randn(*shape, dtype=torch.float64)).round().div(2).to(DEVICE).requires_grad_()


def scattered(nodes: int = 9, edges: int = 40) -> Graph:
    """Edges in no order, some of them repeated, with classes; node 0 has no in-edges, node 1 no out-edges."""
    generator = torch.Generator().manual_seed(5)
    src, dst = torch.randint(1, nodes, (2, edges), generator=generator)
    edge_index = torch.stack([src + (src == 1), dst]).to(DEVICE)
    return graphs.from_edges(edge_index, nodes + 1, edge_type=torch.arange(edges, device=DEVICE) % 3)


def without_edges() -> Graph:
    none = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE)
    return graphs.from_edges(none, 3, edge_type=none[0])


def hubs() -> Graph:
    """Node 0 has 40 in-edges, node 1 has 40 out-edges; the other rows are short."""
    src, dst = torch.randint(0, 9, (2, 100), generator=torch.Generator().manual_seed(7))
    dst[:40], src[40:80] = 0, 1
    order = torch.randperm(100, generator=torch.Generator().manual_seed(7))
    classes = torch.arange(100, device=DEVICE) % 2
    return graphs.from_edges(torch.stack([src, dst])[:, order].to(DEVICE), 9, edge_type=classes)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 20 edges are divided, as those of more than 256 are otherwise."""
    monkeypatch.setattr("mpnn.kernels.cuda.schedule._PIECE", 20)


def dot(graph: Graph, batch: tuple[int, ...] = (), heads: int = 3, width: int = 5, shared: int = 3) -> Round:
    query, key = leaf(*batch, graph.num_dst, heads, width), leaf(*batch, graph.num_src, shared, width)
    return Round(graph, leaf(*batch, graph.num_src, shared, width + 2), Dot(query, key, 0.6))


def additive(graph: Graph, activation: Callable[[Tensor], Tensor], batch: tuple[int, ...] = ()) -> Round:
    ends = [leaf(*batch, n, 3) for n in (graph.num_dst, graph.num_src)]
    return Round(graph, leaf(*batch, graph.num_src, 3, 4), AdditiveScore(*ends, activation, leaf(graph.num_edges, 3)))


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
    "vectors by class": lambda g: replace(
        with_vectors(g, EmbeddingTable(leaf(3, 3, 5)), EmbeddingTable(leaf(7, 1, 7), Offset(3))), dropout=0.5, seed=SEED
    ),
    "additive": lambda g: replace(additive(g, LeakyReLU(0.3), (2,)), dropout=0.5, seed=SEED),
    "additive, tanh": lambda g: replace(additive(g, torch.tanh), bias=(leaf(g.num_edges, 3),)),
    "additive v2": lambda g: additive_v2(g, LeakyReLU()),
    "additive v2, tanh": lambda g: additive_v2(g, torch.tanh, edge_heads=1),
    "weights by bias alone": lambda g: replace(dot(g), score=None, bias=(leaf(g.num_edges, 3),)),
    "mean": lambda g: replace(dot(g), reduce=Mean()),
}


def check(given: Round, close: dict[str, float] = CLOSE, what: str = "") -> None:
    """Output and gradients are those of the specification."""
    kernels = cuda_reduce if csr.reduce.is_plain(given) else cuda_attention
    assert why_not(kernels, given) is None
    leaves = [t for t in given.tensors if t.requires_grad]
    found = []
    for backend in (kernels, edge_list):
        out, _ = backend.run(given)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=DEVICE).view(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, direction, materialize_grads=True)])
    for k, (ours, expected) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(ours, expected, **close, msg=lambda m, k=k: f"{what}, {k}: {m}")


def rounding(dtype: torch.dtype) -> float:
    """What one rounding loses at most, relatively; the interpreter truncates bfloat16."""
    truncates = INTERPRETED and dtype == torch.bfloat16
    return torch.finfo(dtype).eps / (1 if truncates else 2)
