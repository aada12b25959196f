"""GPT: which graphs it takes, its loss, and its errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpnn import Graph
from mpnn.graphs import causal, complete, documents, global_nodes, prefix, window
from mpnn.models import GPT


def small(graph=causal(), **options) -> GPT:  # noqa: B008  a topology is immutable
    return GPT(11, 16, 4, 2, graph, **{"context": 24, **options})


def tokens(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(11, (batch, length))


@pytest.mark.parametrize(
    ("graph", "node", "later"),
    [(complete(), 0, 23), (prefix(4), 0, 3), (window(2), 0, 2), (causal() | global_nodes([7]), 0, 7)],
    ids=str,
)
def test_a_graph_that_attends_to_the_future_is_refused(graph, node: int, later: int) -> None:
    with pytest.raises(ValueError, match=f"node {node} attends to node {later}; use causal"):
        small(graph)


def test_a_graph_that_does_not_exist_at_the_context_says_so() -> None:
    with pytest.raises(ValueError, match="add up to 20, but the graph has 24 nodes"):
        small(causal() & documents([10, 10]))


def test_starts_out_undecided() -> None:
    """With GPT-2's small initial weights every token is about equally likely: a loss of log(vocabulary)."""
    x = tokens(16)
    loss = small().loss(x[:, :-1], x[:, 1:])
    assert abs(loss.item() - torch.tensor(11.0).log().item()) < 0.05


def test_targets_of_minus_100_do_not_count() -> None:
    model, x, y = small(), tokens(), tokens()
    y[:, 10:] = -100
    torch.testing.assert_close(model.loss(x, y), model.loss(x[:, :10], y[:, :10]))


def test_bad_input_gets_a_sentence() -> None:
    model = small()
    with pytest.raises(ValueError, match="got 25 tokens, but this model was made with context=24"):
        model(tokens(1, 25))
    with pytest.raises(TypeError, match=r"tokens must be integers \[B, N\]; got torch.float32"):
        model(torch.rand(1, 5))
    with pytest.raises(IndexError, match="token 11 is out of range: the model has 0 to 10"):
        model(torch.tensor([[3, 11]]))
    with pytest.raises(ValueError, match="temperature must be at least 0 and top_k at least 1; got -1 and None"):
        model.generate(tokens(1, 5), 1, temperature=-1)
    with pytest.raises(ValueError, match="temperature must be at least 0 and top_k at least 1; got nan and None"):
        model.generate(tokens(1, 5), 1, temperature=float("nan"))
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(tokens(1, 0), 1)


def test_generation_leaves_the_model_in_training() -> None:
    model = small()
    model.generate(tokens(1, 5), 2)
    assert model.training


def test_a_graph_of_another_size_is_refused_in_terms_of_tokens() -> None:
    model = small(causal() & window(4))
    graph: Graph = causal().bind(9)
    for call in (lambda: model(tokens(), graph=graph), lambda: model.loss(tokens(), tokens(), graph=graph)):
        with pytest.raises(
            ValueError, match=r"for texts of 24 tokens.* pass a Graph of 24 nodes, or a Topology"
        ) as info:
            call()
        assert str(info.value).endswith(f"the model uses its own topology, {causal() & window(4)}")
    assert model(tokens(2, 9), graph=graph).shape == (2, 9, 11)
    with pytest.raises(TypeError, match=r"graph must be a Topology, such as .*, or a Graph; got 'causal'"):
        model(tokens(), graph="causal")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the second argument is the cache; .* write model\(tokens, graph=\.\.\.\)"):
        model(tokens(2, 9), graph)  # type: ignore[arg-type]
