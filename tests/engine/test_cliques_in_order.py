"""Attention within cliques of scattered nodes, such as Swin's windows, runs in tiles over the nodes in their order."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import Graph, engine, graphs
from mpnn.aggregate import Max
from mpnn.engine.plan import plan
from mpnn.graph.edge_tables import BiasTable
from mpnn.round import Round
from mpnn.scores import Dot

GRAPHS = {
    "windows": graphs.windows(6, 6, size=3).bind(36),
    "shifted windows": graphs.windows(6, 9, size=3, shift=1).bind(54),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a table by offset": {"table": True},
    "a bias of edges": {"edges": True},
    "biases of nodes": {"dst": True},
    "dropout": {"dropout": 0.4, "seed": torch.tensor(3)},
    "lse": {"return_lse": True},
}


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _round(graph: Graph, batch: tuple[int, ...] = (), **options: Any) -> Round:
    query, key, value = (_leaf(*batch, graph.num_dst, heads, 8) for heads in (4, 2, 2))
    if options.pop("table", False):
        assert graph.relation is not None
        options["bias"] = (BiasTable(_leaf(graph.relation.count, 4), graph.relation),)
    if options.pop("edges", False):
        options["bias"] = (_leaf(graph.num_edges, 4), _leaf(*batch, graph.num_edges, 1))
    if options.pop("dst", False):
        options |= {"dst_bias": _leaf(*batch, graph.num_dst, 4), "src_bias": _leaf(*batch, graph.num_src, 4)}
    return Round(graph, value, Dot(query, key, 0.5), **options)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_results_and_gradients_are_those_of_the_specification(graph: str, options: str, batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    given = _round(GRAPHS[graph], batch, **OPTIONS[options])
    assert plan(given).rewrites == "cliques in order (tiles)"
    leaves = [x for x in given.tensors if x.requires_grad]
    found = []
    for backend in ("auto", "tiles", "edge_list"):
        results = [x for x in engine.run(given, backend) if x is not None]
        total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in results)
        found.append([*results, *torch.autograd.grad(total, leaves)])
    for ours in found[:2]:
        for x, expected in zip(ours, found[2], strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-10)


def test_second_derivatives() -> None:
    graph = graphs.windows(2, 4, size=2).bind(8)
    query, key, value = (_leaf(8, 1, 8) for _ in range(3))

    def attend(*terms: Tensor) -> Tensor:
        return engine.run(Round(graph, terms[2], Dot(*terms[:2], 0.5)), "tiles")[0]

    assert torch.autograd.gradgradcheck(attend, (query, key, value), fast_mode=True)


def test_a_window_has_the_bits_that_it_has_in_any_batch() -> None:
    graph = GRAPHS["windows"]
    query, key, value = (torch.randn(5, 36, 4, 16) for _ in range(3))
    together = engine.run(Round(graph, value, Dot(query, key, 0.5)))[0]
    for k in range(5):
        alone = engine.run(Round(graph, value[k], Dot(query[k], key[k], 0.5)))[0]
        assert alone.equal(together[k])


def test_other_rounds_and_graphs_do_not_run_so() -> None:
    x = torch.randn(36, 4, 8)
    for graph, options in (
        (GRAPHS["windows"], {"return_weights": True}),
        (GRAPHS["windows"], {"reduce": Max()}),
        (GRAPHS["windows"], {"normalize": "sigmoid"}),
        (graphs.documents([20, 16]).bind(36), {}),
        (graphs.window(3).bind(36), {}),
    ):
        assert "in order" not in plan(Round(graph, x, Dot(x, x, 1.0), **options)).rewrites
