"""Steps: how few calls of this library a warm call takes, and what a step must not outlive."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from frames import frames
from torch import Tensor
from torch.autograd import forward_ad

from mpnn import MessagePassing, engine, graphs, ops
from mpnn.attention import Additive, DotProduct
from mpnn.engine import steps
from mpnn.graph import guard as guards
from mpnn.round import Round
from mpnn.update import Activate, FeedForward, PreNorm

NODES = 20


def _edges() -> Tensor:
    return torch.randint(NODES, (2, 60), generator=torch.Generator().manual_seed(0))


def _sum() -> Callable[[], Any]:
    layer, x = MessagePassing(graphs.from_edges(_edges(), NODES)), torch.randn(NODES, 8)
    return lambda: layer(x)


def _gat() -> Callable[[], Any]:
    graph = graphs.from_edges(_edges(), NODES)
    layer, x = (
        MessagePassing(graph, "sum", Activate(torch.nn.functional.elu), Additive(64, 8, 8)),
        torch.randn(NODES, 64),
    )
    return lambda: layer(x)


def _gat_over_a_new_graph() -> Callable[[], Any]:
    layer, x, edges = MessagePassing(None, "sum", None, Additive(64, 8, 8)), torch.randn(NODES, 64), _edges()
    return lambda: layer(x, graphs.from_edges(edges, NODES))


def _longformer() -> Callable[[], Any]:
    update = PreNorm(64, FeedForward(64))
    layer, x = MessagePassing(graphs.longformer(16, 2), "sum", update, DotProduct(64, 4)).eval(), torch.randn(1, 64, 64)
    return lambda: layer(x)


def _attend() -> Callable[[], Any]:
    graph, x = (graphs.causal() & graphs.window(16)).bind(64), torch.randn(64, 4, 16)
    return lambda: ops.attend(graph, x, x, x)


MOST: dict[str, tuple[Callable[[], Callable[[], Any]], int, int]] = {
    "a sum": (_sum, 23, 10),
    "GAT": (_gat, 33, 13),
    "GAT over a new graph": (_gat_over_a_new_graph, 85, 24),
    "Longformer": (_longformer, 60, 18),
    "ops.attend": (_attend, 15, 9),
}
"""The calls of functions that a warm call may take, and the files that it may cross."""


@pytest.mark.parametrize("name", MOST)
def test_a_warm_call_takes_few_calls_of_this_library(name: str) -> None:
    """What a small graph waits for. A check that is added to each call should be a comparison where it can."""
    make, most, files = MOST[name]
    steps._OF_LISTS.clear()  # the forms of other tests, which a look-up compares first
    with torch.no_grad():
        found = frames(make())
    assert any("engine/steps.py:find" in call for call in found)
    assert len(found) <= most, "\n".join(found)
    assert len({call.split(":")[0] for call in found}) <= files, "\n".join(found)


def test_without_a_guard_of_torch_the_one_in_python_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "TensorGuards", None)
    steps._OF_LISTS.clear()
    with torch.no_grad():
        call = _gat()
        expected = call()
        monkeypatch.setattr(steps, "planned", None)
        assert call().equal(expected)
    steps._OF_LISTS.clear()


def test_copies_and_saved_graphs_have_no_steps() -> None:
    graph, x = graphs.window(2).bind(9), torch.randn(9, 2, 8)
    ops.attend(graph, x, x, x)
    assert "steps" in graph._memo
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert "steps" not in other._memo


def test_steps_of_a_graph_are_bounded() -> None:
    graph = graphs.window(2).bind(9)
    for width in range(1, 300):
        engine.run(Round(graph, torch.randn(9, 1, width), normalize="none"))
    for batch in range(1, 30):
        engine.run(Round(graph, torch.randn(batch, 9, 1, 4), normalize="none"))
    (kept,) = graph._memo["steps"]
    assert len(kept) <= steps._MOST_KEYS
    assert max(map(len, kept.values())) == steps._MOST_STEPS


def test_a_method_patched_on_the_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = MessagePassing(graphs.window(2), "sum", None, DotProduct(8, 2)), torch.randn(9, 8)
    layer(x)
    seen: list[Any] = []
    run = MessagePassing._run
    monkeypatch.setattr(MessagePassing, "_run", lambda self, round: seen.append(round) or run(self, round))
    layer(x)
    assert len(seen) == 1


def test_memory_that_was_freed_is_not_read() -> None:
    graph, x = graphs.window(2).bind(9), torch.randn(9, 2, 8)
    with torch.no_grad():
        ops.attend(graph, x, x, x, backend="tiles")
        x.untyped_storage().resize_(0)
        with pytest.raises(TypeError, match="was freed"):
            ops.attend(graph, x, x, x, backend="tiles")


def test_a_tensor_that_outlives_a_transform_is_read() -> None:
    """torch.func leaves a wrapper of a tensor that was kept inside. The step of plain tensors does not run for it."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x * 1.0)
        return x.sum()

    graph, x = graphs.window(2).bind(NODES), torch.randn(NODES, 2, 8)
    query = torch.randn(NODES, 2, 8, requires_grad=True)
    torch.func.grad(keep)(x)

    def gradient(x: Tensor) -> Tensor:
        out = ops.attend(graph, query, x, x, backend="tiles")
        (found,) = torch.autograd.grad(out.sum(), query)
        return found

    expected = gradient(x)
    assert gradient(kept[0]).equal(expected)
    assert gradient(x).equal(expected)


@pytest.mark.parametrize(
    "graph", [graphs.from_edges(_edges(), NODES), graphs.window(3).bind(NODES)], ids=["list", "runs"]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_dual_numbers_after_plain_ones_keep_their_tangents(graph: Any, weighted: bool) -> None:
    """The guard of a step does not see forward-mode derivatives."""
    x, tangent = torch.randn(2, NODES, 2, 8).unbind()

    def call(value: Tensor) -> Tensor:
        return ops.attend(graph, x, x, value) if weighted else ops.aggregate(graph, value.flatten(1))

    with torch.no_grad():
        expected = [call(x), call(tangent)]
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close([found.primal, found.tangent], expected)
