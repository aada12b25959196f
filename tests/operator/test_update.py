"""Updates against the equations that they state."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.update import GRU, MLP, Add, Concat, EdgeUpdate, FeedForward, PostNorm, PreNorm, Update, as_update

DIM = 4


def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, DIM), torch.randn(2, 3, DIM)


def test_add_is_a_residual_connection_or_gin() -> None:
    x, message = pair()
    assert Add()(x, message).equal(x + message)
    mlp = MLP(DIM, 5)
    torch.testing.assert_close(Add(mlp, eps=0.5)(x, message), mlp(1.5 * x + message))
    assert [name for name, p in Add(learn_eps=True).named_parameters() if p.requires_grad] == ["eps"]
    assert not any(p.requires_grad for p in Add().parameters())


def test_concat_is_graphsage() -> None:
    x, message = pair()
    update = Concat(DIM, 5)
    expected = x @ update.linear.weight[:, :DIM].T + message @ update.linear.weight[:, DIM:].T + update.linear.bias
    torch.testing.assert_close(update(x, message), expected)
    assert Concat(DIM, 5, message_dim=2, bias=False)(x, message[..., :2]).shape == (2, 3, 5)


@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_pre_hook"])
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooked_maps_are_called(hook: str, everywhere: bool) -> None:
    """Hooks of a map, and those that torch calls for all modules."""
    graph, (x, message), calls = graphs.window(1).bind(3), pair(), []
    concat, of_edges = Concat(DIM, 5), EdgeUpdate(DIM, 4)
    edge = torch.randn(2, graph.num_edges, 4)

    def results() -> list[Tensor]:
        own = x.clone().requires_grad_()  # else torch warns that backward hooks see no inputs
        y, (e, _) = concat(own, message), of_edges(edge.clone().requires_grad_(), own, own, graph)
        return [y, e, *torch.autograd.grad(y.sum() + e.sum(), [*concat.parameters(), *of_edges.parameters()])]

    def called(module: nn.Module, *_: object) -> None:
        calls.append(module)

    expected = results()
    if everywhere:
        handles = [getattr(nn.modules.module, f"register_module_{hook}")(called)]
    else:
        handles = [getattr(module, f"register_{hook}")(called) for module in (concat.linear, of_edges.of_edge)]
    try:
        torch.testing.assert_close(results(), expected)
    finally:
        for handle in handles:
            handle.remove()
    assert calls.count(concat.linear) == calls.count(of_edges.of_edge) == 1


def test_concat_calls_an_adapted_linear() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x, message = pair()
    update = Concat(DIM, 5)
    expected, adapted = 2 * update(x, message), Doubled(2 * DIM, 5)
    adapted.load_state_dict(update.linear.state_dict())
    update.linear = adapted
    torch.testing.assert_close(update(x, message), expected)


def test_gru_keeps_x_in_the_hidden_state() -> None:
    x, message = pair()
    update = GRU(DIM)
    expected = torch.stack([update.cell(m, h) for m, h in zip(message, x, strict=True)])
    torch.testing.assert_close(update(x, message), expected)
    assert GRU(DIM, message_dim=2)(x, message[..., :2]).shape == x.shape


@pytest.mark.parametrize("norm_first", [True, False])
def test_one_operator_is_one_transformer_layer_of_torch(norm_first: bool) -> None:
    torchs = nn.TransformerEncoderLayer(
        DIM, 2, 4 * DIM, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    ).double()
    update = (PreNorm if norm_first else PostNorm)(DIM, FeedForward(DIM))
    ours = MessagePassing(graphs.complete(), "sum", update, DotProduct(DIM, 2)).double()
    with torch.no_grad():
        q, k, v = torchs.self_attn.in_proj_weight.chunk(3)
        for linear, weight in ((ours.attention.to_query, q), (ours.attention.to_key, k), (ours.attention.to_value, v)):
            linear.weight.copy_(weight)
            linear.bias.zero_()
    ours.attention.to_out.load_state_dict(torchs.self_attn.out_proj.state_dict())
    update.ffn[0].load_state_dict(torchs.linear1.state_dict())
    update.ffn[3].load_state_dict(torchs.linear2.state_dict())
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    torch.testing.assert_close(ours(x), torchs(x))


@pytest.mark.parametrize("make", [PreNorm, PostNorm])
def test_dropout_of_a_layer_acts_in_training_only(make: Callable[..., Update]) -> None:
    x, message = pair()
    update = make(DIM, dropout=0.5)
    assert not update(x, message).equal(update(x, message))
    update.eval()
    assert update(x, message).equal(update(x, message))


def test_a_function_or_module_of_ones_own() -> None:
    x, message = pair()
    assert as_update(lambda x, m: x * m)(x, message).equal(x * message)
    bilinear = nn.Bilinear(DIM, DIM, 2)
    op = MessagePassing(graphs.identity(), "sum", bilinear)
    assert set(op.parameters()) == set(bilinear.parameters())
    torch.testing.assert_close(op(x), bilinear(x, x))
