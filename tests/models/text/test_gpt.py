"""GPT: its graph is its attention mask, and on GPT-2's weights its logits are GPT-2's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpnn.graphs import causal, complete, documents, global_nodes, identity, prefix, window
from mpnn.models import GPT, GPT2, GPTConfig

GRAPHS = (causal(), causal() & window(5), causal() - identity() | identity(), causal() & (window(2) | global_nodes(1)))


def small(graph=causal(), **options) -> GPT:  # noqa: B008  a topology is immutable
    return GPT(11, 16, 4, 2, graph, **{"context": 24, **options})


def tokens(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(11, (batch, length))


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_a_later_token_changes_nothing_before_it(graph) -> None:
    model, before = small(graph).eval(), tokens()
    after = before.clone()
    after[:, 13] = (after[:, 13] + 1) % 11
    changed = (model(before) != model(after)).any(-1)
    assert not changed[:, :13].any()
    assert changed[:, 13].all()


def test_a_window_forgets_what_lies_further_back_than_its_layers_reach() -> None:
    model, before = small(causal() & window(5)).eval(), tokens()
    after = before.clone()
    after[:, 3] = (after[:, 3] + 1) % 11
    changed = (model(before) != model(after)).any(-1)
    assert changed[:, 3:14].all()  # two layers of five
    assert not changed[:, 14:].any()


def test_the_graph_is_one_argument_and_no_weight() -> None:
    full, banded = small(), small(causal() & window(3))
    banded.load_state_dict(full.state_dict())
    x = tokens()
    torch.testing.assert_close(full(x)[:, :4], banded(x)[:, :4])  # the first four attend to every earlier token in both
    assert not torch.allclose(full(x)[:, 4:], banded(x)[:, 4:])


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


def test_loss_falls_on_a_sequence_that_can_be_learned() -> None:
    model = small()
    x = torch.arange(25).remainder(11).expand(4, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model.loss(x[:, :-1], x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert torch.equal(model.generate(x[:1, :5], steps=15, temperature=0), x[:1, :20])


def test_targets_of_minus_100_do_not_count() -> None:
    model, x, y = small(), tokens(), tokens()
    y[:, 10:] = -100
    torch.testing.assert_close(model.loss(x, y), model.loss(x[:, :10], y[:, :10]))


def test_generation_keeps_the_prompt_and_goes_past_the_context() -> None:
    model, prompt = small(), tokens(3, 20)
    out = model.generate(prompt, steps=10)
    assert out.shape == (3, 30)
    assert torch.equal(out[:, :20], prompt)
    assert model.training  # as it was


def test_generation_with_top_1_is_greedy_and_a_generator_repeats_it() -> None:
    model, prompt = small(), tokens(1, 3)
    assert torch.equal(model.generate(prompt, 8, top_k=1), model.generate(prompt, 8, temperature=0))
    draws = [model.generate(prompt, 8, generator=torch.Generator().manual_seed(s)).tolist() for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_top_k_draws_only_the_likeliest() -> None:
    model, prompt = small().eval(), tokens(1, 5).expand(200, -1)
    likeliest = set(model(prompt[:1])[0, -1].topk(3).indices.tolist())
    assert set(model.generate(prompt, 1, top_k=3)[:, -1].tolist()) == likeliest


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


def test_the_first_gpt_norms_what_its_layers_add() -> None:
    """Post-norm: after each layer every token's features have mean 0 and variance 1."""
    model = GPT2(GPTConfig(11, 16, 2, 4, context=24, norm_first=False, dropout=0.0)).eval()
    last = model.decode(tokens()).last
    torch.testing.assert_close(last.mean(-1), torch.zeros(2, 24), atol=1e-6, rtol=0)
    torch.testing.assert_close(last.var(-1, correction=0), torch.ones(2, 24), atol=1e-3, rtol=0)
