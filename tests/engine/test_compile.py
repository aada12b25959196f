"""`torch.compile(fullgraph=True)`: whole programs, the numbers of eager mode, and no compilation for each new size.

Most programs are compiled with "aot_eager", which traces forward and backward as any backend does but generates no C++.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpnn import Graph, MessagePassing, aggregate, graphs, ops
from mpnn.attention import Additive, AdditiveV2, Attention, Degree, DotProduct, Kernel, Typed
from mpnn.engine.compile.form import flatten
from mpnn.engine.compile.operator import _RECORDS
from mpnn.engine.compile.traced_graph import EdgeListGraph, traced_graph
from mpnn.graph.handles import resolve
from mpnn.graph.relations import GridOffset
from mpnn.models.layers.propagation import Propagation
from mpnn.models.layers.relative import RelativeDotProduct
from mpnn.position import T5, ALiBi, EdgeBias, Rotary, Shaw, Table
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.update import Activate, FeedForward, PreNorm

Call = dict[str, Any]
WIDTH = 16


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def layer(graph: Any, **attention: Any) -> MessagePassing:
    return MessagePassing(graph, "sum", None, DotProduct(WIDTH, 2, **attention))


class _SumsFirst(nn.Module):
    """An operator after functions of the library that sum, too."""

    def __init__(self, op: MessagePassing) -> None:
        super().__init__()
        self.op = op
        self.graph = graphs.causal().bind(9)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1))
        sums = ops.attend(self.graph, heads, heads, heads) + ops.aggregate(self.graph, x).view(heads.shape)
        return self.op(sums.flatten(-2))


@pytest.mark.parametrize("attention", [None, DotProduct(WIDTH, 2)], ids=["sum", "attention"])
@pytest.mark.parametrize("names", [("sum", "max"), ("sum", "mean"), ("max", "sum")], ids=" then ".join)
@pytest.mark.parametrize("of", [lambda op: op, _SumsFirst], ids=["operator", "model that sums first"])
def test_operators_that_differ_by_their_aggregator_get_programs_of_their_own(
    of: Callable[[MessagePassing], nn.Module], names: tuple[str, str], attention: Any
) -> None:
    """Programs belong to the code, which all operators share, and an operator's aggregator may be replaced."""
    x = torch.randn(2, 9, WIDTH)
    for name in names:
        op = MessagePassing(graphs.window(2), name, None, attention)
        model = of(op)
        program = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(program(x), model(x))
    op.aggregate = aggregate.aggregator(names[0])
    torch.testing.assert_close(program(x), model(x))


def explicit(n: int, edge_dim: int | None = None) -> Graph:
    generator = torch.Generator().manual_seed(n)
    edges = torch.randint(0, n, (2, 3 * n + 5), generator=generator)
    attr = None if edge_dim is None else torch.randn(edges.shape[1], edge_dim, generator=generator)
    return graphs.from_edges(edges, n, edge_attr=attr)


def initialized(position: nn.Module) -> nn.Module:
    """Tables start at zero, where a wrong entry would not show."""
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    return position


def program(model: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    """The model compiled whole, and how often it was compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True, **options), counter


def outcome(model: Callable[..., Any], parameters: list[nn.Parameter], x: Tensor, **call: Any) -> list[Tensor | None]:
    """Everything the model returns, and the gradients of its inputs and parameters."""
    torch.manual_seed(7)
    out = model(x, **call)
    outs = list(out) if isinstance(out, tuple) else [out]
    wanted = [x, *parameters]
    return outs + list(torch.autograd.grad(sum(o.square().sum() for o in outs), wanted, allow_unused=True))


def check_against_eager(model: nn.Module, sizes: tuple[int, ...], call: Callable[[int], Call] = lambda n: {}) -> int:
    """Compares outputs and gradients at each size; returns how often the model was compiled, sizes being dynamic."""
    compiled_model, counter = program(model, dynamic=True)
    for n in sizes:
        x = torch.randn(2, n, WIDTH, requires_grad=True)
        arguments, parameters = call(n), list(model.parameters())
        expected = outcome(model, parameters, x, **arguments)
        torch.testing.assert_close(outcome(compiled_model, parameters, x, **arguments), expected)
    return compilations(counter)


def compilations(counter: CompileCounterWithBackend) -> int:
    """How many programs there are, but for empty ones."""
    return sum(len(graph.graph.nodes) > 1 for graph in counter.graphs)


# ---------------------------------------------------------------------------------------------------- equal to eager

ON_SEQUENCES: dict[str, Callable[[], MessagePassing]] = {
    "complete": lambda: MessagePassing(
        graphs.complete(), "sum", PreNorm(WIDTH, FeedForward(WIDTH)), DotProduct(WIDTH, 2)
    ),
    "causal, dropout": lambda: layer(graphs.causal(), dropout=0.25),
    "window, grouped, soft cap": lambda: layer(graphs.window(3), kv_heads=1, softcap=5.0, normalize="sigmoid"),
    "algebra": lambda: layer(graphs.causal() & (graphs.window(2) | graphs.global_nodes(1))),
    "rotary": lambda: layer(graphs.causal(), position=Rotary(8)),
    "alibi": lambda: layer(graphs.window(4), position=ALiBi(2)),
    "t5": lambda: layer(graphs.complete(), position=initialized(T5(2, buckets=8, max_distance=8))),
    "shaw": lambda: layer(graphs.window(3), position=Shaw(8, 2)),
    "transformer-xl": lambda: MessagePassing(graphs.causal(), "sum", None, RelativeDotProduct(WIDTH, 2, dropout=0.25)),
    "kernel": lambda: MessagePassing(graphs.causal(), "sum", None, Kernel(WIDTH, 2, features=8)),
    "aggregation": lambda: MessagePassing(graphs.window(2), "mean", None, None),
}


# A compilation takes seconds. These share their code paths with the others.
SLOW = ("window, grouped, soft cap", "alibi", "shaw", "aggregation", "bahdanau", "gcn", "edges add numbers", "std")
SLOW += ("pna, wider than its messages", "a learned aggregator", "kernel", "rotary", "transformer-xl", "diffusion")
SLOW += ("a learned activation", "edges add vectors", "causal, dropout", "t5", "gatv2", "a map for each type of edges")
SLOW += ("algebra", "max", "a function", "returned weights over a topology, as no rule tells the edges")
SLOW += ("other nodes as sources", "returned weights", "a relation that is no offset", "a graph of its own")


def some_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@pytest.mark.parametrize("name", some_slow(ON_SEQUENCES))
def test_topologies_are_compiled_once_for_all_lengths(name: str) -> None:
    assert check_against_eager(ON_SEQUENCES[name](), sizes=(6, 13)) == 1


ON_GRAPHS: dict[str, Callable[[Graph | None], MessagePassing]] = {
    "gat, dropout": lambda g: MessagePassing(g, "sum", Activate(F.elu), Additive(WIDTH, 4, 2, dropout=0.25)),
    "gatv2": lambda g: MessagePassing(g, "sum", Activate(F.elu), AdditiveV2(WIDTH, 4, 2)),
    "bahdanau": lambda g: MessagePassing(g, "sum", None, AdditiveV2(WIDTH, 4, 2, activation=torch.tanh)),
    "a learned activation": lambda g: MessagePassing(g, "sum", None, AdditiveV2(WIDTH, 4, 2, activation=nn.PReLU())),
    "gcn": lambda g: MessagePassing(g, "sum", Activate(F.relu), Degree(WIDTH, 4)),
    "edges add vectors": lambda g: layer(g, edge_dim=3),
    "edges add numbers": lambda g: layer(g, position=EdgeBias(3, 2)),
    "diffusion": lambda g: Propagation(g, "sum", None, Additive(WIDTH, 4, 2), hops=3, teleport=0.2),
    "max": lambda g: MessagePassing(g, "max", None, None),
    "std": lambda g: MessagePassing(g, "std", None, None),
    "pna, wider than its messages": lambda g: MessagePassing(g, "pna", None, None),
    "a learned aggregator": lambda g: MessagePassing(g, aggregate.Softmax(learn=True), None, None),
    "a function": lambda g: MessagePassing(g, lambda m, index: 2 * aggregate.segment_sum(m, index), None, None),
}


@pytest.mark.parametrize("name", some_slow(ON_GRAPHS))
def test_graphs_that_change_from_call_to_call_run_through_one_program(name: str) -> None:
    model = ON_GRAPHS[name](None)
    edge_dim = 3 if "edges" in name else None
    assert check_against_eager(model, (6, 13), lambda n: {"graph": explicit(n, edge_dim)}) == 1


def typed(n: int) -> Graph:
    edges = explicit(n).edge_index
    return graphs.from_edges(edges, n, edge_type=edges.sum(0) % 3)


# The model, the sizes, what a call takes beside features, and how many programs these need.
OTHERS: dict[str, tuple[Callable[[], MessagePassing], tuple[int, ...], Callable[[int], Call], int]] = {
    "a graph of its own": (lambda: ON_GRAPHS["gatv2"](explicit(9)), (9,), lambda n: {}, 1),
    "a relation that is no offset": (
        lambda: layer(graphs.neighborhood(4, 4, 1), position=initialized(Table(2, GridOffset(4, rows=1, columns=1)))),
        (16,),
        lambda n: {},
        1,
    ),
    "a convolution": (
        lambda: MessagePassing(graphs.neighborhood(4, 4, 1), "sum", None, Typed(WIDTH, 4, relations=9)),
        (16,),
        lambda n: {},
        1,
    ),
    "other nodes as sources": (
        lambda: layer(graphs.complete()), (5, 11), lambda n: {"source": torch.randn(2, 3 * n, WIDTH)}, 1
    ),
    "a map for each type of edges": (
        lambda: MessagePassing(None, "mean", None, Typed(WIDTH, 4, relations=3)),
        (6, 13),
        lambda n: {"graph": typed(n)},
        1,
    ),
    "returned weights": (lambda: layer(None), (5, 7), lambda n: {"graph": explicit(n), "return_weights": True}, 1),
    "returned weights over a topology, as no rule tells the edges": (
        lambda: layer(graphs.window(1)), (5, 6), lambda n: {"return_weights": True}, 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some_slow(OTHERS))
def test_other_models(name: str) -> None:
    make, sizes, call, programs = OTHERS[name]
    assert check_against_eager(make(), sizes, call) == programs


class ByDistance(Attention):
    """A user's attention, which makes a number for each edge from `graph.edge_index`."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Any:
        from mpnn.round import Round

        j, i = graph.edge_index
        return Round(graph, src.unsqueeze(-2), bias=(-self.rate * (i - j).abs()[:, None].to(src.dtype),))


@pytest.mark.parametrize("graph", [graphs.window(2), explicit(9)], ids=["topology", "explicit"])
@pytest.mark.sample(2)
def test_an_attention_of_ones_own(graph: Any) -> None:
    check_against_eager(MessagePassing(graph, "sum", None, ByDistance()), (9,))


# ---------------------------------------------------------------------------------------------------- functional core


def test_attend_and_aggregate() -> None:
    def both(q: Tensor, graph: Graph, weight: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = ops.attend(graph, q, q.flip(-1), q, dropout=0.5, return_weights=True)
        return ops.aggregate(graph, out.flatten(-2), "softmax", weight=weight * weights[:, 0]), weights

    compiled_both, counter = program(both)
    for n in (6, 7, 13):
        graph, q = explicit(n), torch.randn(n, 2, 8, requires_grad=True)
        call = {"graph": graph, "weight": torch.rand(graph.num_edges)}
        torch.testing.assert_close(outcome(compiled_both, [], q, **call), outcome(both, [], q, **call))
    assert compilations(counter) <= 2


@pytest.mark.parametrize("reduce", [*aggregate.NAMED, lambda m, index: aggregate.segment_sum(m, index)])
@pytest.mark.sample(3)
def test_every_aggregator_by_its_name_or_as_a_function(reduce: Any) -> None:
    compiled_aggregate, _ = program(lambda x, graph: ops.aggregate(graph, x, reduce))
    graph, x = explicit(7), torch.rand(7, 3)
    torch.testing.assert_close(compiled_aggregate(x, graph), ops.aggregate(graph, x, reduce))


# ---------------------------------------------------------------------------------------------------- sizes


@pytest.mark.slow
def test_fifty_lengths_take_two_compilations() -> None:
    model = layer(graphs.causal() & graphs.window(4))
    compiled_model, counter = program(model)
    for n in range(11, 61):
        x = torch.randn(2 + n % 3, n, WIDTH)
        torch.testing.assert_close(compiled_model(x), model(x))
        compiled_model(x).sum().backward()
    assert compilations(counter) <= 2


# ---------------------------------------------------------------------------------------------------- dropout, autocast


def test_dropout_differs_from_call_to_call_and_acts_alike_in_forward_and_backward() -> None:
    model = MessagePassing(graphs.complete(), "sum", None, DotProduct(WIDTH, 2, dropout=0.5)).double()
    compiled_model, _ = program(model)
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    assert not torch.equal(compiled_model(x), compiled_model(x))

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return compiled_model(x)

    assert torch.autograd.gradcheck(seeded, x)  # numbers that wobble with the mask have no gradient


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.sample(2)
def test_autocast(inside: bool) -> None:
    model = layer(graphs.window(3), dropout=0.25)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compiled_model, _ = program(cast if inside else model)
    x, parameters = torch.randn(2, 9, WIDTH, requires_grad=True), list(model.parameters())
    expected = outcome(cast, parameters, x)
    if inside:
        found = outcome(compiled_model, parameters, x)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            found = outcome(compiled_model, parameters, x)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)  # some roundings to bfloat16, 2^-8 each


def test_checkpointing_computes_the_forward_again() -> None:
    model = layer(graphs.window(3), dropout=0.25)

    def checkpointed(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    compiled_model, _ = program(checkpointed)
    x, parameters = torch.randn(2, 9, WIDTH, requires_grad=True), list(model.parameters())
    torch.testing.assert_close(outcome(compiled_model, parameters, x), outcome(model, parameters, x))


# ---------------------------------------------------------------------------------------------------- the operator


def arguments(dropout: float = 0.25) -> tuple[Any, ...]:
    """Those of `mpnn::run` for attention on a small graph, its tensors ready to be differentiated."""
    graph = arguments.graph = graphs.window(2).bind(6)  # type: ignore[attr-defined]  # held as long as its number is
    query, key, value = (torch.randn(3, 6, 2, 4, requires_grad=True) for _ in range(3))
    round = Round(graph, value, Dot(query, key, 0.5), dropout=dropout, seed=torch.tensor(5))
    return flatten(replace(round, graph=traced_graph(graph, 6, 6, value.device)), "auto")


def test_torch_approves_of_the_operator() -> None:
    torch.library.opcheck(torch.ops.mpnn.run.default, arguments())


def test_memory_that_was_written_over_is_not_differentiated() -> None:
    """Compilers reuse the memory of tensors that only the operator still knows."""
    token, sizes, tensors, *rest = arguments()
    tensors = [t.detach() for t in tensors]
    copies = [t.clone() for t in tensors]
    out, weights, record_key = torch.ops.mpnn.run(token, sizes, tensors, *rest)
    recorded = [torch.ones_like(out), weights], [out, weights], record_key
    expected = torch.ops.mpnn.run_backward(*recorded, token, sizes, tensors, *rest)
    for t in tensors:
        t.zero_()
    torch.testing.assert_close(torch.ops.mpnn.run_backward(*recorded, token, sizes, copies, *rest), expected)


def test_a_key_that_was_copied_is_worth_as_much() -> None:
    token, sizes, tensors, *rest = arguments()
    out, weights, record_key = torch.ops.mpnn.run(token, sizes, [t.detach() for t in tensors], *rest)
    total = torch.ops.mpnn.run(token, sizes, tensors, *rest)[0].sum()
    expected = torch.autograd.grad(total, [tensors[0], *tensors[2:]])
    given = [torch.ones_like(out), weights], [out, weights], record_key.clone()
    found = torch.ops.mpnn.run_backward(*given, token, sizes, [t.detach() for t in tensors], *rest)
    torch.testing.assert_close(tuple(found), expected)


def test_what_a_forward_keeps_goes_with_its_key() -> None:
    before = len(_RECORDS)
    out, weights, record_key = torch.ops.mpnn.run(*arguments())
    assert len(_RECORDS) == before + 1
    del out, weights, record_key
    assert len(_RECORDS) == before


def test_tensors_that_no_result_depends_on_have_gradients_of_zeros() -> None:
    graph = graphs.from_edges([[], []], 6)
    value = torch.randn(6, 2, 4, requires_grad=True)
    round = Round(graph, value, normalize="none", reduce=_Unused())  # type: ignore[arg-type]
    token, sizes, tensors, *rest = flatten(replace(round, graph=traced_graph(graph, 6, 6, value.device)), "auto")
    out, _, _ = torch.ops.mpnn.run(token, sizes, tensors, *rest)
    assert len(tensors) == 2
    of_value, of_weight = torch.autograd.grad(out.sum(), tensors, materialize_grads=False)
    assert of_value.equal(torch.zeros_like(value))
    assert of_weight.equal(torch.zeros(3))


class _Unused(nn.Module):
    """A sum with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def reduce(self, messages: Tensor, index: aggregate.Index) -> Tensor:
        return aggregate.segment_sum(messages, index)


def test_stand_ins_of_lists_of_edges() -> None:
    """What a program knows of edges that are its input."""
    edges = torch.tensor([[0, 1, 2], [1, 0, 1]])
    attr = torch.zeros(3, 5)
    stand_in = EdgeListGraph(edges, 2, 3, attr)
    assert stand_in.edge_index is edges
    assert stand_in.num_edges == 3
    assert not stand_in.has_edge_types
    assert stand_in.edge_attr is attr
    derived: Any = stand_in.derive(lambda graph: graph, num_dst=7)
    assert (derived.num_dst, derived.num_src, derived.base) == (7, 3, (2, 3))
    assert derived.edge_attr is None
    with pytest.raises(AttributeError, match="'num_edges' of a graph is not known while torch"):
        _ = derived.num_edges


# ---------------------------------------------------------------------------------------------------- numbers of graphs


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("original", [graphs.causal() & graphs.window(2), explicit(5)], ids=["topology", "graph"])
def test_copies_have_numbers_of_their_own(copied: Callable[[Any], Any], original: Any) -> None:
    twin = copied(original)
    assert int(twin.token) != int(original.token)
    assert resolve(twin.token) is twin


# ---------------------------------------------------------------------------------------------------- errors


def test_wrong_shapes_are_named() -> None:
    model, _ = program(ON_GRAPHS["gatv2"](explicit(9)))
    with pytest.raises(Exception, match="the graph has 9 destinations and 9 sources, but the features have 8"):
        model(torch.randn(8, WIDTH))
    attend, _ = program(lambda q, k, graph: ops.attend(graph, q, k, k))
    with pytest.raises(Exception, match="query and key must be equally wide; got 4 and 3"):
        attend(torch.randn(9, 1, 4), torch.randn(9, 1, 3), explicit(9))


def test_a_backend_that_refuses_gives_its_reason() -> None:
    model, _ = program(MessagePassing(graphs.causal(), "sum", None, AdditiveV2(WIDTH, 4, 2), backend="dense"))
    with pytest.raises(ValueError, match="backend 'dense' cannot run this: it does not compute additive scores"):
        model(torch.randn(5, WIDTH))


def test_learning_out_of_sight_is_refused_rather_than_forgotten() -> None:
    rate = nn.Parameter(torch.tensor(0.5))
    model, _ = program(MessagePassing(graphs.window(2), lambda m, index: rate * aggregate.segment_sum(m, index)))
    with pytest.raises(RuntimeError, match="has the tensor as a parameter"):
        model(torch.randn(5, WIDTH, requires_grad=True))


def test_what_no_program_can_know_is_named() -> None:
    class Curious(ByDistance):
        def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Any:
            return super().forward(dst, src, graph) if graph.diameter() else None

    model, _ = program(MessagePassing(graphs.window(2), "sum", None, Curious()))
    with pytest.raises(Exception, match="'diameter' of a graph is not known while torch"):
        model(torch.randn(5, WIDTH))


# ---------------------------------------------------------------------------------------------------- inductor


@pytest.mark.slow
def test_inductor_which_reuses_memory(monkeypatch) -> None:
    monkeypatch.setenv("CI", "1")  # there Inductor refuses operators that torch.onnx.export replaces
    with torch._inductor.config.patch(fallback_random=True):
        models = [layer(graphs.window(3), dropout=0.25, position=Rotary(8)) for _ in range(2)]
        model = nn.Sequential(*models)
        compiled_model = torch.compile(model, fullgraph=True, dynamic=True)
        for n in (37, 41):
            x, parameters = torch.randn(2, n, WIDTH, requires_grad=True), list(model.parameters())
            torch.testing.assert_close(outcome(compiled_model, parameters, x), outcome(model, parameters, x))
