"""Transformer layers of the operator by one compiled call, against the rounds that they replace."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import mpnn
from mpnn import MessagePassing, Topology, graphs
from mpnn.aggregate import Sum, segment_sum
from mpnn.attention import DotProduct, whole_layer
from mpnn.kernels.cpu import library
from mpnn.kernels.layers.encoder_layer import EncoderLayer
from mpnn.position import ALiBi, Rotary
from mpnn.update import FeedForward, GatedFeedForward, PostNorm, PreNorm

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="there are no compiled kernels")

DIM, HEADS = 64, 2
COMPLETE = graphs.complete()


def layer(kind: Any = PostNorm, graph: Any = COMPLETE, activation: Any = nn.GELU, **attention: Any) -> Any:
    norm = partial(nn.LayerNorm, eps=1e-3)
    update = kind(DIM, FeedForward(DIM, 192, activation, 0.1), dropout=0.1, norm=norm)
    op = MessagePassing(graph, "sum", update, DotProduct(DIM, HEADS, dropout=0.1, **attention))
    for weight in op.parameters():
        if weight.dim() == 1:
            nn.init.normal_(weight, float(weight.detach().mean()), 0.1)
    return op.eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows for which the kernel ran."""
    rows: list[int] = []
    run = EncoderLayer.__call__

    def counted(self: EncoderLayer, x: Tensor, weights: Any, parts: Any, *others: Any) -> Tensor:
        rows.append(parts.num_nodes)
        return run(self, x, weights, parts, *others)

    monkeypatch.setattr(EncoderLayer, "__call__", counted)
    return rows


def by_rounds(op: Any, x: Tensor, *arguments: Any) -> Tensor:
    """The layer in float64, where there is no kernel."""
    with torch.no_grad():
        out: Tensor = copy.deepcopy(op).double()(x.double(), *arguments)
        return out


CAUSAL = graphs.causal()
GRAPHS = {
    "causal": CAUSAL,
    "causal documents": CAUSAL & graphs.documents([5, 1, 11]),
    "joined causal": graphs.batch([CAUSAL.bind(n) for n in (3, 14)]),
    "complete": COMPLETE,
    "documents": graphs.documents([5, 1, 11]),
    "bound": COMPLETE.bind(17),
    "joined": graphs.batch([COMPLETE.bind(n) for n in (3, 14)]),
}


@pytest.mark.parametrize("shape", [(17, DIM), (3, 17, DIM), (2, 2, 17, DIM)], ids=str)
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("kind", [PreNorm, PostNorm])
def test_a_layer(kind: Any, graph: str, shape: tuple[int, ...], calls: list[int]) -> None:
    op, x = layer(kind, GRAPHS[graph]), torch.randn(shape)
    expected = by_rounds(op, x)
    assert not calls
    with torch.no_grad():
        found = op(x)
    assert calls == [x[..., 0].numel()]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


def gated(heads: int = 4, kv_heads: int = 2, head_dim: int = 32, graph: Any = CAUSAL) -> Any:
    """A layer as Llama's."""
    update = PreNorm(DIM, GatedFeedForward(DIM, 192), norm=partial(nn.RMSNorm, eps=1e-5))
    attention = DotProduct(
        DIM, heads, kv_heads=kv_heads, head_dim=head_dim, position=Rotary(head_dim), bias=False, dropout=0.1
    )
    return MessagePassing(graph, "sum", update, attention).eval()


@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize(
    "make",
    [
        partial(layer, PreNorm, CAUSAL),
        partial(layer, PostNorm, CAUSAL),
        gated,
        partial(gated, 1, 1, 64),
        partial(gated, 8, 2),
        partial(gated, graph=COMPLETE),
    ],
    ids=["pre-norm", "post-norm", "gated", "one head", "8/2", "gated, complete"],
)
def test_a_causal_layer(make: Callable[[], Any], tokens: int, calls: list[int]) -> None:
    op, x = make(), torch.randn(2, tokens, DIM)
    expected = by_rounds(op, x, graphs.from_edges(op.graph.bind(tokens).edge_index, tokens))
    with torch.no_grad():
        found = op(x)
        assert calls == [2 * tokens]
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
        if op.graph != COMPLETE:
            changed = x.clone()
            changed[:, 5:] = torch.nan
            assert op(changed)[:, :5].equal(found[:, :5])
            assert op(x[:, :5]).equal(found[:, :5]), "a prefix has the bits that it has alone"
            lengths = [tokens, 5]
            packed = op(torch.cat([x[0], x[1, :1].expand(5, -1)]), op.graph & graphs.documents(lengths))
            assert packed[:tokens].equal(found[0])


def test_heads_for_which_there_is_no_kernel(calls: list[int]) -> None:
    op, x = layer(PreNorm, CAUSAL, head_dim=40), torch.randn(9, DIM)
    with torch.no_grad():
        torch.testing.assert_close(op(x).double(), by_rounds(op, x), rtol=0, atol=5e-6)
    assert not calls


@pytest.mark.parametrize(
    "activation",
    [nn.GELU, partial(nn.GELU, approximate="tanh"), nn.ReLU, nn.SiLU],
    ids=["gelu", "tanh", "relu", "silu"],
)
def test_activations(activation: Any, calls: list[int]) -> None:
    op, x = layer(activation=activation), torch.randn(9, DIM)
    with torch.inference_mode():
        torch.testing.assert_close(op(x).double(), by_rounds(op, x), rtol=0, atol=5e-6)
    assert calls == [9]


def test_a_sequence_has_the_bits_that_it_has_alone(calls: list[int]) -> None:
    op, lengths = layer(), (5, 1, 130, 37)
    x = torch.randn(sum(lengths), DIM)
    with torch.no_grad():
        alone = [op(part) for part in x.split(lengths)]
        assert torch.cat(alone).equal(op(x, graphs.documents(list(lengths))))
        pair = torch.stack([x[:37], torch.full((37, DIM), torch.nan)])
        assert op(pair)[0].equal(op(x[:37]))
    assert len(calls) == 7


def no_change(op: Any, x: Tensor) -> Any:
    return op(x)


def with_gradients(op: Any, x: Tensor) -> Any:
    with torch.enable_grad():
        return op(x)


def in_training(op: Any, x: Tensor) -> Any:
    torch.manual_seed(3)
    return op.train()(x)


def under_autocast(op: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return op(x)


def of_vmap(op: Any, x: Tensor) -> Any:
    return torch.vmap(op)(x[None])[0]


def with_hook(op: Any, x: Tensor) -> Any:
    op.attention.to_out.register_forward_hook(lambda module, inputs, out: 2 * out)
    return op(x)


class Mine(MessagePassing):
    def _run(self, round: Any) -> Any:
        out, rest = super()._run(round)
        return 2 * out, rest


def of_subclass(op: Any, x: Tensor) -> Any:
    op.__class__ = Mine
    return op(x)


def double(module: nn.Module, name: str) -> None:
    """Gives an instance a method of its own."""
    own = getattr(module, name)
    setattr(module, name, lambda *arguments: 2 * own(*arguments))


def with_merge(op: Any, x: Tensor) -> Any:
    double(op.attention, "merge")
    return op(x)


def with_prepare(op: Any, x: Tensor) -> Any:
    double(op.update, "prepare")
    return op(x)


def with_alpha(op: Any, x: Tensor) -> Any:
    op.update.alpha = 2.0
    return op(x)


def with_longer_network(op: Any, x: Tensor) -> Any:
    op.update.ffn.append(nn.Tanh())
    return op(x)


def with_gate(op: Any, x: Tensor) -> Any:
    op.update.ffn.activation = nn.Tanh()
    return op(x)


def with_residual_module(op: Any, x: Tensor) -> Any:
    op.update.dropout = nn.Tanh()
    return op(x)


def with_path_module(op: Any, x: Tensor) -> Any:
    op.update.drop_path = nn.Tanh()
    return op(x)


ORDINARY: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Any]]] = {
    "gradients": (layer, with_gradients),
    "training": (layer, in_training),
    "autocast": (layer, under_autocast),
    "vmap": (layer, of_vmap),
    "a hook": (layer, with_hook),
    "a subclass": (layer, of_subclass),
    "a merge of its own": (layer, with_merge),
    "a preparation of its own": (partial(layer, PreNorm), with_prepare),
    "alpha": (layer, with_alpha),
    "a longer network": (layer, with_longer_network),
    "another module for dropout": (layer, with_residual_module),
    "another module for paths": (partial(layer, PreNorm), with_path_module),
    "a negative scale": (partial(layer, scale=-0.3), no_change),
    "weights": (layer, lambda op, x: op(x, return_weights=True)[0]),
    "sources": (layer, lambda op, x: op(x, source=x.flip(0))),
    "a window": (partial(layer, graph=graphs.window(2)), no_change),
    "edges": (partial(layer, graph=graphs.from_edges(torch.tensor([[0, 1], [1, 0]]), 9)), no_change),
    "a causal window": (partial(layer, graph=CAUSAL & graphs.window(2)), no_change),
    "ALiBi": (partial(layer, graph=CAUSAL, position=ALiBi(HEADS)), no_change),
    "gated, with gradients": (gated, with_gradients),
    "gated, with a hook": (gated, with_hook),
    "another gate": (lambda: gated(graph=COMPLETE), with_gate),
    "a softcap": (partial(layer, softcap=3.0), no_change),
    "sigmoid": (partial(layer, normalize="sigmoid"), no_change),
    "tanh": (partial(layer, activation=nn.Tanh), no_change),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ORDINARY)
def test_the_rounds_run_where_something_else_is_asked(
    name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, run = ORDINARY[name]
    op, x = make(), torch.randn(9, DIM)
    with torch.no_grad():
        twin = copy.deepcopy(op)
        found = run(twin, x)
        assert not calls
        monkeypatch.setattr(whole_layer, "find", lambda *arguments: None)
        assert found.equal(run(op, x))


def scale(op: Any) -> None:
    op.attention.scale *= 2


def weight(op: Any) -> None:
    op.update.ffn[3].weight.detach().mul_(2)


def data(op: Any) -> None:
    op.attention.to_key.weight.data *= 2


def replaced(op: Any) -> None:
    op.update.norm = nn.LayerNorm(DIM, eps=2.0)


def loaded(op: Any) -> None:
    op.load_state_dict(layer().state_dict())


def softcapped(op: Any) -> None:
    op.attention.softcap = 0.5


@pytest.mark.parametrize("change", [scale, weight, data, replaced, loaded, softcapped])
def test_changes_take_effect(change: Callable[[Any], None]) -> None:
    op, x = layer(), torch.randn(3, 9, DIM)
    with torch.no_grad():
        before = op(x)
        change(op)
        found = op(x)
        assert not found.equal(before)
        torch.testing.assert_close(found.double(), by_rounds(op, x), rtol=0, atol=5e-6)


def test_copies_have_weights_of_their_own() -> None:
    op, x = layer(), torch.randn(9, DIM)
    with torch.no_grad():
        expected = op(x)
        copies = copy.deepcopy(op), pickle.loads(pickle.dumps(op))
        op.attention.to_out.weight.mul_(3)
        assert all(twin(x).equal(expected) for twin in copies)
        zeros = {name: torch.zeros_like(weight) for name, weight in op.named_parameters()}
        zeros["update.ffn_norm.bias"] = torch.ones(DIM)
        assert functional_call(op, zeros, (x,)).eq(1).all()
        assert not op(x).eq(1).any()


def test_an_operator_that_ran_is_freed() -> None:
    op = layer()
    with torch.no_grad():
        op(torch.randn(9, DIM))
    known, kernel = weakref.ref(op), weakref.ref(whole_layer._KNOWN[op].kernel)
    del op
    gc.collect()
    assert known() is None
    assert kernel() is None


def test_explain_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    op, x = layer(), torch.randn(9, DIM)
    with torch.no_grad():
        assert mpnn.explain(op, x).is_whole_layer
        assert not mpnn.explain(op, x, return_weights=True).is_whole_layer
    assert not mpnn.explain(op, x).is_whole_layer
    assert capsys.readouterr().out.count("layer   one call") == 1


def test_errors_are_those_of_the_operator() -> None:
    op = layer()
    with torch.no_grad():
        op(torch.randn(9, DIM))
        with pytest.raises(ValueError, match="width"):
            op(torch.randn(9, DIM + 1))
        with pytest.raises(ValueError, match="8 destinations"):
            op(torch.randn(9, DIM), COMPLETE.bind(8))
        assert op(torch.randn(2, 0, DIM)).shape == (2, 0, DIM)


def test_a_model_runs_by_it(calls: list[int]) -> None:
    from mpnn.models.text.bert import Bert, BertConfig

    torch.manual_seed(0)
    model = Bert(BertConfig(vocabulary=50, dim=DIM, layers=2, heads=HEADS, hidden=128, context=32)).eval()
    tokens = torch.randint(1, 50, (3, 12))
    padding = torch.arange(12) >= torch.tensor([[12], [5], [1]])
    with torch.no_grad():
        states = model(tokens, padding_mask=padding).last
        assert calls == [18, 18]
        for text, n, found in zip(tokens, (12, 5, 1), states, strict=True):
            assert found[:n].equal(model(text[None, :n]).last[0])
    expected = model(tokens, padding_mask=padding).last  # gradients are on
    torch.testing.assert_close(states, expected.detach(), rtol=0, atol=5e-6)


def test_a_topology_of_ones_own(calls: list[int]) -> None:
    """What an expression of topologies binds to decides, not its name."""
    both: Topology = CAUSAL | graphs.window(99)
    op, x = layer(graph=both), torch.randn(9, DIM)
    with torch.no_grad():
        torch.testing.assert_close(op(x).double(), by_rounds(op, x), rtol=0, atol=5e-6)
    assert calls == [9]


@pytest.mark.parametrize("size", [1e10, 1e18, 1e25])
@pytest.mark.parametrize("nodes", [9, 40])
def test_huge_logits_and_rows_of_minus_infinity_are_finite(nodes: int, size: float) -> None:
    """The products of 1e25 and -1e25 are -inf: such a row has no weights, as for every backend."""
    op, x = layer(PreNorm), torch.randn(nodes, DIM)
    with torch.no_grad():
        for to, bias in ((op.attention.to_query, size), (op.attention.to_key, -size)):
            to.weight.zero_()
            to.bias.fill_(bias)
        found = op(x)
        op.backend = "edge_list"
        torch.testing.assert_close(found, op(x), rtol=0, atol=1e-5)


def test_an_aggregate_with_a_reduce_of_its_own_is_not_summed() -> None:
    layer = MessagePassing(graphs.complete(), Sum(), PreNorm(64, FeedForward(64)), DotProduct(64, 2)).eval()
    x = torch.randn(16, 64)
    with torch.no_grad():
        before = layer(x)
        layer.aggregate.reduce = lambda messages, index: 2 * segment_sum(messages, index)
        assert (layer(x) - before).abs().max() > 1e-3
