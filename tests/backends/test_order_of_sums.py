"""Gradients are sums in one order. torch adds those of `x[index]` where indices repeat in an order that threads decide,
those of `x.index_select(0, index)` in one."""

from typing import Any

import pytest
import torch
from small_models import EVERY
from torch import Tensor

from mpnn import graphs, ops
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset

CAUSAL = graphs.causal().bind(12)


def repeated(*results: Tensor) -> list[str]:
    """The functions of autograd that read an entry more than once by `x[index]`."""
    waiting, seen, found = [x.grad_fn for x in results], set(), []
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        if node.name().startswith("IndexBackward"):
            indices = [index for index in node._saved_indices if index is not None and index.dtype != torch.bool]
            at = torch.stack([x.flatten() for x in torch.broadcast_tensors(*indices)]) if indices else torch.zeros(1, 0)
            if at.unique(dim=1).shape != at.shape:
                found.append(f"{node.name()} of {list(node._saved_self_sym_sizes)}")
    return found


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_it_finds_what_repeats() -> None:
    x = leaf(4, 3)
    assert repeated(x[torch.tensor([0, 2, 0])]) == ["IndexBackward0 of [4, 3]"]
    assert not repeated(x[torch.tensor([0, 2])], x[x[:, 0] > 0], x.index_select(0, torch.tensor([0, 0])))


@pytest.mark.parametrize("backend", ["edge_list", "scan"])
def test_of_recurrences(backend: str) -> None:
    inputs = leaf(12, 4, 3), leaf(12, 2, 3), leaf(12, 2, 5)
    gates: Any = {"log_gate": leaf(12, 4), "beta": leaf(12, 4), "state": leaf(4, 3, 5)}
    assert not repeated(*ops.attend(CAUSAL, *inputs, normalize="none", return_state=True, backend=backend, **gates))


def test_of_tables() -> None:
    chosen = graphs.blocks(torch.rand(2, 2, 12, 3) < 0.8, 4, 12) & graphs.causal()
    x, table = leaf(2, 12, 2, 4), BiasTable(leaf(5, 2), Offset(2))
    assert not repeated(ops.attend(chosen, x, x, x, bias=table))
    short = (graphs.causal() & graphs.window(4)).bind(12)
    weights = ops.Round(short, leaf(12, 2, 4), bias=(table,), normalize="none")
    assert not repeated(ops.engine.run(weights, "scan")[0])


@pytest.mark.parametrize("name", EVERY)
def test_of_models(name: str) -> None:
    make, call = EVERY[name]
    assert not repeated(call(make()))
