"""Recurrences as rounds: `edge_list` and `scan` against one node after the other, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpnn import graphs, ops
from mpnn.backends import BACKENDS
from mpnn.engine.plan import refusal
from mpnn.graph import Graph
from mpnn.kernels.cpu import library
from mpnn.round import Round
from mpnn.scores import Dot
from tests.support import recurrences as twin

NODES, HEADS, WIDTH, DEEP = 61, 4, 6, 5
GRAPHS: dict[str, tuple[Graph, list[int] | None]] = {
    "causal": (graphs.causal().bind(NODES), None),
    "documents": ((graphs.causal() & graphs.documents([20, 0, 1, 1, 39])).bind(NODES), [20, 1, 1, 39]),
}
KINDS = ["state", "gate", "gate a feature", "delta", "gated delta", "gated delta a feature"]
BACKENDS_HERE = ["edge_list"] + ["scan"] * (library.why_missing() is None)


def inputs(kind: str, batch: Sequence[int] = (2,), heads: tuple[int, int, int] = (4, 2, 4)) -> dict[str, Tensor]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, dtype=torch.float64)

    found = {"query": numbers(NODES, heads[0], WIDTH), "key": numbers(NODES, heads[1], WIDTH) / WIDTH**0.5}
    found |= {"value": numbers(NODES, heads[2], DEEP), "state": numbers(HEADS, WIDTH, DEEP)}
    if "gate" in kind:
        found["log_gate"] = -torch.rand(*batch, NODES, HEADS, *[WIDTH] * ("feature" in kind), dtype=torch.float64)
        found["log_gate"].select(len(batch), 30).fill_(-torch.inf)
    if "delta" in kind:
        found["beta"] = torch.rand(*batch, NODES, HEADS, dtype=torch.float64)
    return found


def results(given: dict[str, Tensor], graph: Graph, backend: str, directions: list[Tensor]) -> list[Tensor]:
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    out, state = ops.attend(graph, **leaves, scale=0.4, normalize="none", return_state=True, backend=backend)
    loss = sum((x * d).sum() for x, d in zip((out, state), directions, strict=True))
    return [out.detach(), state.detach(), *torch.autograd.grad(loss, list(leaves.values()))]


@pytest.mark.parametrize("heads", [(4, 2, 4), (1, 1, 4), (2, 4, 1)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.covering
def test_values_and_gradients(kind: str, name: str, heads: tuple[int, int, int]) -> None:
    (graph, documents), given = GRAPHS[name], inputs(kind, heads=heads)
    expected = twin.recurrence(**given, scale=0.4, documents=documents)
    directions = [torch.randn_like(x) for x in expected]
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    loss = sum(
        (x * d).sum()
        for x, d in zip(twin.recurrence(**leaves, scale=0.4, documents=documents), directions, strict=True)
    )
    expected = [*expected, *torch.autograd.grad(loss, list(leaves.values()))]
    for backend in BACKENDS_HERE:
        for found, exact in zip(results(given, graph, backend, directions), expected, strict=True):
            assert (found - exact).abs().max() <= 1e-12 * exact.abs().max()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_weights_are_those_of_the_values(kind: str) -> None:
    given = inputs(kind, (2, 3))
    del given["state"]
    graph = GRAPHS["documents"][0]
    out, weights = ops.attend(graph, **given, normalize="none", return_weights=True)
    rows, columns = graph.edge_index[1], graph.edge_index[0]
    dense = torch.zeros(2, 3, HEADS, NODES, NODES, dtype=torch.float64)
    dense[..., rows, columns] = weights.transpose(-1, -2)
    torch.testing.assert_close((dense @ given["value"].transpose(-2, -3)).transpose(-2, -3), out)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_continues_a_sequence(kind: str, backend: str) -> None:
    given = inputs(kind)
    state = given.pop("state")
    options = {"normalize": "none", "backend": backend, "return_state": True}
    whole, last = ops.attend(GRAPHS["causal"][0], **given, state=state, **options)
    pieces = []
    for first, stop in ((0, 40), (40, 41), (41, NODES)):
        piece = {name: x[:, first:stop] for name, x in given.items()}
        out, state = ops.attend(graphs.causal().bind(stop - first), **piece, state=state, **options)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_dtypes_empty_graphs_and_batches(backend: str) -> None:
    given = inputs("gated delta", ())
    exact = ops.attend(GRAPHS["causal"][0], **given, normalize="none", backend=backend)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        low = {name: x.to(dtype) for name, x in given.items()}
        out, state = ops.attend(GRAPHS["causal"][0], **low, normalize="none", backend=backend, return_state=True)
        assert (out.dtype, state.dtype) == (dtype, torch.float32)
        assert (out - exact).abs().max() < error * exact.abs().max()
    none = {name: x if name == "state" else x[:0] for name, x in given.items()}
    out, state = ops.attend(graphs.causal().bind(0), **none, normalize="none", backend=backend, return_state=True)
    assert out.shape == (0, HEADS, DEEP)
    assert state.equal(given["state"])
    empty = {name: x[None][:0].requires_grad_() for name, x in given.items()}
    out = ops.attend(GRAPHS["causal"][0], **empty, normalize="none", backend=backend)
    assert out.shape == (0, NODES, HEADS, DEEP)
    out.sum().backward()
    assert empty["log_gate"].grad.shape == (0, NODES, HEADS)


def test_all_other_backends_refuse_and_the_plan_takes_the_scan() -> None:
    given = inputs("gated delta")
    score = Dot(given["query"], given["key"], 1.0)
    round = Round(GRAPHS["causal"][0], given["value"], score, normalize="none", beta=given["beta"])
    for change in ({}, {"log_gate": given["log_gate"][..., None]}, {"state": given["state"]}, {"return_state": True}):
        reasons = {b.NAME: refusal(b, replace(round, **change)) for b in BACKENDS}
        assert {name for name, reason in reasons.items() if reason is None} == set(BACKENDS_HERE)
    assert "recurrences" in reasons["csr"]


def test_the_plan_is_explained_and_programs_are_traced() -> None:
    given = inputs("gated delta")
    graph = GRAPHS["documents"][0]

    def step(query: Tensor, key: Tensor, value: Tensor, state: Tensor, log_gate: Tensor, beta: Tensor) -> Tensor:
        options = {"log_gate": log_gate, "beta": beta, "state": state, "return_state": True}
        out, state = ops.attend(graph, query, key, value, normalize="none", **options)
        return out.sum() + state.sum()

    leaves = [x.detach().clone().requires_grad_() for x in given.values()]
    expected = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"graph": graphs.complete().bind(NODES)}, "need causal.* got"),
        ({"graph": (graphs.causal() & graphs.window(3)).bind(NODES)}, "need causal"),
        ({"graph": graphs.causal().bind(NODES + 1).rows(1, NODES + 1)}, "nodes|need causal"),
        ({"normalize": "softmax"}, "normalize='none'"),
        ({"dropout": 0.1}, "without bias, softcap"),
        ({"softcap": 2.0}, "without bias, softcap"),
        ({"bias": torch.zeros(NODES * (NODES + 1) // 2, 1, dtype=torch.float64)}, "without bias"),
        ({"log_gate": torch.zeros(2, NODES, HEADS + 1)}, "must have shape"),
        ({"log_gate": torch.zeros(2, NODES, HEADS, 2)}, r"log_gate must have shape \[2, 61, 4, 1\] or \[2, 61, 4, 6\]"),
        ({"beta": torch.zeros(2, NODES, HEADS, dtype=torch.int64)}, "beta must be floating point"),
        ({"state": torch.zeros(2, HEADS, DEEP, WIDTH)}, "state must have shape"),
        ({"state": torch.zeros(HEADS, DEEP)}, r"state must have shape \[\.\.\., H, D, D_v\]"),
        ({"beta": torch.zeros(HEADS)}, r"beta must have shape \[\.\.\., N, H\]"),
        ({"log_gate": 0.5}, "log_gate must be a tensor"),
        ({"return_weights": True, "return_state": True}, "return_state cannot be combined"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(x),
)
def test_what_is_no_recurrence_is_refused(change: dict[str, object], sentence: str) -> None:
    given = {"graph": GRAPHS["causal"][0], "normalize": "none", **inputs("gated delta"), **change}
    with pytest.raises((ValueError, TypeError), match=sentence):
        ops.attend(**given)


def test_a_sparse_tensor_is_refused_after_a_dense_one_of_its_shape() -> None:
    given, graph = inputs("gate"), graphs.causal().bind(NODES)
    ops.attend(graph, **given, normalize="none")
    with pytest.raises(TypeError, match="log_gate must be a dense tensor"):
        ops.attend(graph, **given | {"log_gate": torch.zeros(2, NODES, HEADS).double().to_sparse()}, normalize="none")


def test_parts_of_graphs() -> None:
    for graph, lengths in GRAPHS.values():
        assert graph.parts is not None
        assert graph.parts.is_causal
        assert graph.parts.lengths.tolist() == (lengths or [NODES])


@pytest.mark.parametrize("nodes", [5, 70, 131], ids=str)
@pytest.mark.parametrize("form", ["a head", "a feature"])
@pytest.mark.parametrize("delta", [False, True])
def test_nodes_behind_the_last_one_that_is_read_get_a_gradient_of_exactly_0(nodes: int, form: str, delta: bool) -> None:
    torch.manual_seed(0)
    shape = (nodes, 2, 6) if form == "a feature" else (nodes, 2)
    read, last = nodes // 2, nodes // 2 + 1
    features = [torch.randn(nodes, 2, 6, requires_grad=True) for _ in range(3)]
    gates = torch.nn.functional.logsigmoid(torch.randn(*shape)).requires_grad_()
    beta = torch.rand(nodes, 2, requires_grad=True) if delta else None
    options = {"normalize": "none", "log_gate": gates, "beta": beta, "backend": "scan"}
    out = ops.attend(graphs.causal().bind(nodes), *features, **options)
    out[: read + 1].square().sum().backward()
    for x in (*features, gates, *([beta] if delta else [])):
        assert x.grad is not None
        assert not x.grad[last:].any()
        assert x.grad[1:last].any()
