"""Functions of rows in blocks, `maps.rows.mapped`, against the same in torch: values and two derivatives."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from live_memory import LiveMemory
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.attention import EdgeFilter
from mpnn.kernels.rows import edge_sum
from mpnn.models.layers.interaction import interaction
from mpnn.models.layers.molecules import RadialFilter, ShiftedSoftplus
from mpnn.update import MLP, rows

FILTER = nn.Sequential(nn.Linear(4, 6), ShiftedSoftplus(), nn.Linear(6, 3)).double()


class Doubled(RadialFilter):
    """A subclass whose function is another."""

    def forward(self, basis: Tensor) -> Tensor:
        return 2 * super().forward(basis)


def derivatives(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """First derivatives of a function of y, and derivatives of a function of these."""
    first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
    return y, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("f", [RadialFilter(FILTER), Doubled(FILTER), RadialFilter(MLP(4, 3, 5).double())])
@pytest.mark.parametrize("frozen", [False, True])
def test_blocks_are_the_function(
    f: nn.Module, batch: tuple[int, ...], frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(*batch, 20, 5, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for k, p in enumerate(f.parameters()) if not (frozen and k == 1))]
    for parameter in f.parameters():
        parameter.requires_grad_(any(parameter is p for p in inputs))
    expected = derivatives(f(x), inputs)
    plain = torch.autograd.grad(f(x).sin().sum(), inputs)
    monkeypatch.setattr(edge_sum, "BLOCK", 7 * 3)  # seven rows in a block
    monkeypatch.setattr(rows, "KEPT", 0)
    found = derivatives(rows.mapped(f, x), inputs)
    once = torch.autograd.grad(rows.mapped(f, x).sin().sum(), inputs)
    of_parameters = torch.autograd.grad(rows.mapped(f, x.detach()).sin().sum(), inputs[1:])
    for a, b in zip((*found, *once, *of_parameters), (*expected, *plain, *plain[1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_which_functions_run_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_sum, "BLOCK", 10)
    monkeypatch.setattr(rows, "KEPT", 0)
    x = torch.randn(20, 5, dtype=torch.float64)
    hooked = copy.deepcopy(RadialFilter(FILTER))
    hooked.network[0].register_forward_hook(lambda module, inputs, out: 2 * out)
    watched, replaced = copy.deepcopy(RadialFilter(FILTER)), copy.deepcopy(RadialFilter(FILTER))
    watched.network[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    first = replaced.network[0]
    first.forward = lambda x: 2 * type(first).forward(first, x)  # as accelerate does
    called = nn.SiLU()
    called.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    unusual = (watched, False), (replaced, False), (called, False), (lambda z: z + z.mean(0), False)
    for f, served in (
        (RadialFilter(FILTER), True), (Doubled(FILTER), False), (hooked, False), (nn.Softmax(0), False), *unusual
    ):  # fmt: skip
        out = rows.mapped(f, x)
        torch.testing.assert_close(out, f(x), rtol=1e-12, atol=1e-12)
        before = [] if out.grad_fn is None else [node.name() for node, _ in out.grad_fn.next_functions if node]
        assert ("_LaunchBackward" in before) is served


@pytest.mark.parametrize("f", [torch.relu, nn.SiLU(), nn.Identity()], ids=["relu", "SiLU", "Identity"])
def test_a_function_without_parameters_runs_in_blocks(f: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_sum, "BLOCK", 10)
    x = torch.randn(20, 5)
    torch.testing.assert_close(rows.mapped(f, x), f(x), rtol=0, atol=0)


def test_a_function_that_overwrites_its_input_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks read the input again in the backward pass."""
    f, x = nn.Sequential(nn.SiLU(inplace=True), nn.Linear(5, 3)), torch.randn(20, 5)
    expected = torch.autograd.grad(f(x.clone()).sum(), list(f.parameters()))
    monkeypatch.setattr(edge_sum, "BLOCK", 10)
    monkeypatch.setattr(rows, "KEPT", 0)
    assert all(map(torch.equal, torch.autograd.grad(rows.mapped(f, x.clone()).sum(), list(f.parameters())), expected))
    layer = interaction(4, activation=partial(nn.ReLU, inplace=True))
    edges = torch.randint(8, (2, 40))
    y, e = layer(torch.randn(8, 4), graphs.from_edges(edges, 8), edge_attr=torch.randn(40, 4))
    (y.sum() + e.sum()).backward()


@pytest.mark.parametrize("whole", [False, True])
def test_a_filter_keeps_nothing_between_its_layers(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward hold the weights and their gradient, and no other tensor of E x F numbers. A filter that
    would keep little is not computed twice, and may keep it."""
    monkeypatch.setattr(edge_sum, "BLOCK", 64 * 100)
    monkeypatch.setattr(rows, "KEPT", 15_000 * 4 * 256 if whole else 15_000 * 4 * 256 - 1)
    graph = graphs.from_edges(torch.randint(50, (2, 15_000)), 50)
    filter = RadialFilter(nn.Sequential(nn.Linear(4, 64), ShiftedSoftplus(), nn.Linear(64, 64)))
    layer = MessagePassing(graph, "sum", attention=EdgeFilter(filter))
    x, basis = torch.randn(50, 64, requires_grad=True), torch.randn(15_000, 5)
    layer(x, edge_attr=basis).sum().backward()  # sorts the edges
    x.grad = None
    layer.zero_grad()
    with LiveMemory() as memory:
        layer(x, edge_attr=basis).sum().backward()
    assert (memory.peak < 2.5 * 15_000 * 64 * 4) is not whole
