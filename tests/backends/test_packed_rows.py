"""Rows of a graph as groups, and attention within them, as torch's flash kernel computes it on CUDA."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import flash
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from mpnn import Graph, graphs, ops
from mpnn.backends import dense
from mpnn.graph.row_groups import row_groups
from mpnn.integrations.hf import masks
from mpnn.kernels.dense import varlen
from mpnn.round import Round
from mpnn.scores import Dot

PADDED = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1], [0] * 7]).bool()


def texts(function: Any, keep: Tensor) -> Graph:
    """The graph over the tokens of a padded batch."""
    mask = masks.mask(len(keep), 7, 7, mask_function=function, attention_mask=keep)
    return mask.graph(None, len(keep), 7, torch.device("cpu"))[0]


GRAPHS: dict[str, Graph] = {
    "documents": graphs.documents([3, 1, 4]).bind(8),
    "causal documents": (graphs.causal() & graphs.documents([3, 1, 1, 4])).bind(9),
    "complete": graphs.complete().bind(5, 3),
    "prefix": graphs.prefix(3).bind(9),
    "one node": graphs.complete().bind(1),
    "new tokens": graphs.causal().bind(9).rows(6, 9),
    "padded texts": texts(bidirectional_mask_function, PADDED),
    "padding on the left": texts(causal_mask_function, PADDED[:1]),
    "padding on both sides": texts(causal_mask_function, PADDED),
}
OTHERS: dict[str, Graph] = {
    "window": graphs.window(1).bind(9),
    "causal window": (graphs.causal() & graphs.window(3)).bind(9),
    "several runs": graphs.longformer(4, globals=1).bind(9),
    "explicit": graphs.from_edges(torch.tensor([[0, 1], [1, 1]]), 2),
    "no edges": graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 3),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_groups_are_the_edges(name: str) -> None:
    graph = GRAPHS[name]
    groups = row_groups(graph)
    assert groups is not None
    found = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.int64)
    for group in groups:
        dst = torch.arange(graph.num_dst) if group.dst is None else torch.from_numpy(group.dst)
        src = torch.arange(graph.num_src) if group.src is None else torch.from_numpy(group.src)
        rows, columns = dst.split(group.num_dst.tolist()), src.split(group.num_src.tolist())
        for i, j in zip(rows, columns, strict=True):
            fewer = torch.arange(len(i)).flip(0) if group.is_causal else torch.zeros(len(i), dtype=torch.int64)
            found[i[:, None], j] += torch.arange(len(j)) < len(j) - fewer[:, None]
    assert found.equal(graph.dense().long())


@pytest.mark.parametrize("name", OTHERS)
def test_other_graphs_have_none(name: str) -> None:
    assert row_groups(OTHERS[name]) is None


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.covering(times=2)
def test_attention_within_groups(
    name: str, groups: int, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = GRAPHS[name]
    sizes = ((graph.num_dst, 4), (graph.num_src, groups), (graph.num_src, groups))
    features = [torch.randn(*batch, *size, 8, dtype=torch.float64, requires_grad=True) for size in sizes]
    expected = ops.attend(graph, *features, scale=0.3, backend="edge_list")
    direction = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, features, direction)
    monkeypatch.setattr(dense.varlen, "runs_here", lambda *_: True)
    packed = Mock(side_effect=flash.packed)
    monkeypatch.setattr(dense.varlen, "packed", packed)
    monkeypatch.setattr(dense, "_DIRECT", {})
    again = Graph.from_runs(graph.runs)
    out = ops.attend(again, *features, scale=0.3, backend="dense")
    assert packed.called
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for found, gradient in zip(torch.autograd.grad(out, features, direction), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)


def test_cliques_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(40, 2, 8, dtype=torch.float64)
    graph = graphs.lsh(torch.randn(40, 4), 6, seed=1)
    expected = ops.attend(graph, x, x, x, backend="edge_list")
    monkeypatch.setattr(dense.varlen, "runs_here", lambda *_: True)
    packed = Mock(side_effect=flash.packed)
    monkeypatch.setattr(dense.varlen, "packed", packed)
    assert len(graph.cliques) > 1
    found = ops.attend(graph, x, x, x, backend="dense")
    assert packed.called
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, ""), (torch.bfloat16, "narrow ")], ids=str)
def test_groups_have_a_price(
    name: str, batch: tuple[int, ...], dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense.varlen, "runs_here", lambda *_: True)
    monkeypatch.setattr(dense, "_TILE", 2)
    graph = Graph.from_runs(GRAPHS[name].runs)
    query, x = (torch.zeros(*batch, n, 2, 8, dtype=dtype) for n in (graph.num_dst, graph.num_src))
    round = Round(graph, x, Dot(query, x, 0.3))
    groups = row_groups(graph)
    assert groups is not None
    pairs = copied = 0.0
    for group in groups:
        for num_dst, num_src in zip(group.num_dst.tolist(), group.num_src.tolist(), strict=True):
            pairs += math.ceil(num_dst / 2) * 2 * num_src * (0.5 if group.is_causal else 1)
        copied += sum(len(nodes) for nodes in (group.dst, group.src) if nodes is not None)
    heads = 2 * math.prod(batch)
    shape = "packed " if kind and name not in ("complete", "one node") else ""
    assert dense._bytes(dense._Facts(round)) == copied * heads * 8 * dtype.itemsize
    assert dense.counts(round) == {
        "call": 1,
        "size call": len(groups) - 1,
        f"{kind}{shape}pair": pairs * heads,
        f"{kind}number": pairs * heads * 8,
        "clique number": copied * heads * 8,
    }
    assert kind or 0 < dense.estimate(round).seconds < 1e-2


def test_which_rounds_run_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense.varlen, "runs_here", lambda *_: True)
    graph = GRAPHS["documents"]
    x, none, one_head = torch.zeros(2, 8, 2, 8), torch.zeros(0, 8, 2, 8), torch.zeros(2, 8, 1, 8)
    rounds = {
        "plain": Round(graph, x, Dot(x, x, 0.3)),
        "shared heads": Round(graph, one_head, Dot(x, one_head, 0.3)),
        "other heads": Round(graph, one_head, Dot(x, x, 0.3)),
        "a bias": Round(graph, x, Dot(x, x, 0.3), bias=(torch.zeros(graph.num_edges, 2),)),
        "softcap": Round(graph, x, Dot(x, x, 0.3, softcap=1.0)),
        "no scale": Round(graph, x, Dot(x, x, 0.0)),
        "a negative scale": Round(graph, x, Dot(x, x, -0.3)),
        "no entries": Round(graph, none, Dot(none, none, 0.3)),
    }
    assert [name for name, round in rounds.items() if dense._Facts(round).groups is not None] == list(rounds)[:2]


@pytest.mark.parametrize(
    ("dtype", "widths", "runs"),
    [
        (torch.float16, (64, 64), True),
        (torch.bfloat16, (256, 256), True),
        (torch.float32, (64, 64), False),
        (torch.float16, (60, 60), False),
        (torch.float16, (64, 32), False),
        (torch.float16, (264, 264), False),
    ],
    ids=str,
)
def test_which_heads_torchs_flash_kernel_takes(dtype: torch.dtype, widths: tuple[int, int], runs: bool) -> None:
    """Of tensors on CUDA, of which only these attributes are read."""
    query, value = (SimpleNamespace(is_cuda=True, dtype=dtype, shape=(9, 4, width)) for width in widths)
    assert varlen.runs_here(query, value) == runs  # type: ignore[arg-type]
    query.is_cuda = False
    assert not varlen.runs_here(query, value)  # type: ignore[arg-type]
