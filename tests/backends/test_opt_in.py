"""What a backend does not know is refused: a field added to a round, a subclass of a score, a rule or a table."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpnn import MessagePassing, engine, graphs, ops
from mpnn.attention import Attention
from mpnn.backends import BACKENDS
from mpnn.engine.plan import Refused
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import PARAMETER, AdditiveScore, Dot, LeakyReLU, Role, lowered

N, HEADS, WIDTH = 12, 2, 8
GRAPH = graphs.window(3).bind(N)
Q, K, V = torch.randn(3, N, HEADS, WIDTH)
EVERY = [b.NAME for b in BACKENDS]


@dataclass(eq=False)
class Later(Round):
    """A request of a version to come, with a plain field and a tensor."""

    twist: float = 0.0
    tilt: Tensor | None = None

    roles: ClassVar = {**Round.roles, "tilt": PARAMETER}


NEW: list[dict[str, Any]] = [{"twist": 0.5}, {"tilt": torch.ones(HEADS)}]


def later(graph: Graph = GRAPH, **new: Any) -> Later:
    return Later(graph, V, Dot(Q, K, 0.5), **new)


@pytest.mark.parametrize("new", NEW, ids=str)
@pytest.mark.parametrize("backend", ["auto", *EVERY])
def test_a_new_field_is_refused_by_every_backend(new: dict[str, Any], backend: str) -> None:
    why = (
        "no backend can run this: it does not support t"
        if backend == "auto"
        else f"backend '{backend}' cannot run this"
    )
    with pytest.raises(Refused, match=why):
        engine.run(later(**new), backend)


@pytest.mark.parametrize("new", NEW, ids=str)
def test_a_choice_that_was_cached_without_it_is_not_taken(new: dict[str, Any]) -> None:
    plain, _ = engine.run(Round(GRAPH, V, Dot(Q, K, 0.5)))
    assert engine.run(later())[0].equal(plain), "at its default the field changes nothing"
    with pytest.raises(Refused, match="no backend can run this: it does not support t"):
        engine.run(later(**new))


def _edges() -> Graph:
    return graphs.from_edges(torch.randint(0, N, (2, 3 * N), generator=torch.Generator().manual_seed(0)), N)


ROUNDS: dict[str, dict[str, Any]] = {
    "a sum": {"normalize": "none"},
    "dot products": {"score": Dot(Q, K, 0.5)},
    "additive": {"score": AdditiveScore(Q[..., 0], K[..., 0], LeakyReLU())},
}
DOORS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "eager": lambda run: run(V),
    "with a gradient": lambda run: run(V.clone().requires_grad_()).sum().backward(),
    "no_grad": lambda run: torch.no_grad()(run)(V),
    "inference mode": lambda run: torch.inference_mode()(run)(V),
    "autocast": lambda run: torch.autocast("cpu", torch.bfloat16)(run)(V),
    "vmap": lambda run: torch.func.vmap(run)(torch.stack([V, V])),
    "grad": lambda run: torch.func.grad(lambda x: run(x).sum())(V),
    "jvp": lambda run: torch.func.jvp(run, (V,), (V,)),
    "checkpoint": lambda run: checkpoint(run, V.clone().requires_grad_(), use_reentrant=False),
}


@pytest.mark.parametrize("new", NEW, ids=str)
@pytest.mark.parametrize("graph", [GRAPH, graphs.causal().bind(N), _edges()], ids=["window", "causal", "edges"])
@pytest.mark.parametrize("of", ROUNDS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_new_field_is_refused_at_every_door(door: str, of: str, graph: Graph, new: dict[str, Any]) -> None:
    """Also right after the same call without it, whose step must not be taken."""
    DOORS[door](lambda value: engine.run(Later(graph, value, **ROUNDS[of]))[0])
    with pytest.raises(Refused, match="it does not support t"):
        DOORS[door](lambda value: engine.run(Later(graph, value, **ROUNDS[of], **new))[0])


class Twisted(Attention):
    """Returns a round with a field that no backend serves."""

    def __init__(self, **new: Any) -> None:
        super().__init__()
        self.scale, self.new = nn.Parameter(torch.ones(())), new

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Later:
        x = (self.scale * src).unsqueeze(-2)
        return Later(graph, x, Dot(dst.unsqueeze(-2), x, 0.5), **self.new)


@pytest.mark.parametrize("new", NEW, ids=str)
def test_a_compiled_program_refuses_it(new: dict[str, Any]) -> None:
    op, x = MessagePassing(graphs.window(3), "sum", None, Twisted(**new)), torch.randn(N, WIDTH)
    with pytest.raises(Exception, match="not its subclass Later"):
        torch.compile(op, backend="aot_eager", fullgraph=True)(x)


def test_a_tensor_without_a_role_is_an_error_of_the_class() -> None:
    @dataclass(eq=False)
    class Careless(Round):
        tilt: Tensor | None = None

    with pytest.raises(TypeError, match=r"tilt of a round has no role in Round\.roles"):
        Careless(GRAPH, V, tilt=torch.ones(2)).map(lambda x, name, role: x)


def test_every_tensor_of_a_round_has_a_role_and_map_visits_it() -> None:
    tensors = {f.name for f in fields(Round) if "Tensor" in str(f.type) or "PerEdge" in str(f.type)}
    assert tensors == set(Round.roles)
    edges = torch.randn(GRAPH.num_edges, HEADS)
    seen: list[str] = []
    full = Round(
        GRAPH, V, Dot(Q, K, 1.0), (edges, BiasTable(torch.ones(3, 1), Offset(1))), edges[..., None],
        seed=torch.tensor(1), sinks=torch.ones(HEADS),
    )  # fmt: skip
    full.map(lambda x, name, role: seen.append(name) or x)  # type: ignore[func-returns-value]
    assert sorted(seen) == sorted(["value", "bias", "bias", "edge_value", "sinks", "seed", "query", "key"])


# ---------------------------------------------------------------------------------------- subclasses


class Cosine(Dot):
    """A user's score, written by overriding the reference."""

    def logits(self, query: Tensor, key: Tensor, edge_key: Tensor | None) -> Tensor:
        return torch.cosine_similarity(query, key, -1)


class Sine(LeakyReLU):
    """A user's activation."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Odd(Offset):
    """A user's rule of edge types."""

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (src - dst) % 3


class Twice(BiasTable):
    """A user's table."""

    def ids(self, graph: Graph) -> Tensor:
        return 1 + super().ids(graph)


TABLE, VECTORS = torch.randn(5, HEADS), torch.randn(5, HEADS, WIDTH)
SUBCLASSES = {
    "score": Round(GRAPH, V, Cosine(Q, K, 1.0)),
    "activation": Round(GRAPH, V, AdditiveScore(Q[..., 0], K[..., 0], Sine(0.2))),
    "rule of a bias": Round(GRAPH, V, Dot(Q, K, 1.0), bias=(BiasTable(TABLE, Odd(2)),)),
    "rule of keys": Round(GRAPH, V, Dot(Q, K, 1.0, EmbeddingTable(VECTORS, Odd(2)))),
    "rule of values": Round(GRAPH, V, Dot(Q, K, 1.0), edge_value=EmbeddingTable(VECTORS, Odd(2))),
}


@pytest.mark.parametrize("name", SUBCLASSES)
@pytest.mark.parametrize("backend", ["auto", *EVERY])
def test_a_subclass_gives_its_own_numbers_or_is_refused(name: str, backend: str) -> None:
    asked = SUBCLASSES[name]
    expected = engine.run(asked, "edge_list")[0]
    try:
        torch.testing.assert_close(engine.run(asked, backend)[0], expected)
    except Refused:
        assert backend != "auto"


def test_a_subclass_of_a_table_is_refused_everywhere() -> None:
    with pytest.raises(Refused, match="it does not support bias of type Twice"):
        engine.run(Round(GRAPH, V, Dot(Q, K, 1.0), bias=(Twice(TABLE, Offset(1)),)))


# ---------------------------------------------------------------------------------------- lowering


@dataclass(eq=False)
class Tempered:
    """`t_h <query_i, key_j>`: a score with a learned number for each head, in a form that kernels know."""

    query: Tensor
    key: Tensor
    temperature: Tensor  # [H]

    roles: ClassVar = Dot.roles

    def logits(self, query: Tensor, key: Tensor, edge_key: Tensor | None = None) -> Tensor:
        return self.temperature * (query * key).sum(-1)

    def lower(self) -> Dot:
        return Dot(self.query * self.temperature[:, None], self.key, 1.0)


Tempered.roles = {name: Dot.roles[name] for name in ("query", "key")}


@pytest.mark.parametrize("backend", ["dense", "tiles", "csr", "auto"])
def test_a_score_that_lowers_runs_on_every_backend_of_what_it_lowers_to(backend: str) -> None:
    learned = torch.tensor([0.3, 1.7], requires_grad=True)
    asked = Round(GRAPH, V.double(), Tempered(Q.double(), K.double(), learned.double()))
    out, reference = engine.run(asked, backend)[0], engine.run(asked, "edge_list")[0]
    torch.testing.assert_close(out, reference)
    gradient, expected = (torch.autograd.grad(x.square().sum(), learned)[0] for x in (out, reference))
    torch.testing.assert_close(gradient, expected)


def test_lower_returns_a_built_in_score() -> None:
    class Loose(Tempered):
        def lower(self) -> Any:
            return Tempered(self.query, self.key, self.temperature)

    with pytest.raises(TypeError, match=r"lower\(\) of Loose must return a Dot.*; it returned Tempered"):
        lowered(Loose(Q, K, torch.ones(HEADS)))


# ---------------------------------------------------------------------------------------- attentions and keywords


@pytest.mark.parametrize("option", [{"normalize": "sigmoid"}, {"dropout": 0.5}, {"return_weights": True}], ids=str)
def test_an_attention_does_not_set_what_the_operator_sets(option: dict[str, Any]) -> None:
    class Hasty(Attention):
        def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
            return replace(Round(graph, src.unsqueeze(-2)), **option)

    with pytest.raises(ValueError, match="Hasty set normalize, dropout, reduce or return_weights of its round"):
        MessagePassing(graphs.window(2), "sum", None, Hasty())(torch.randn(5, 4))


def test_the_short_way_of_attend_compares_every_keyword() -> None:
    keywords = {p.name for p in signature(ops.attend).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert len(ops._NO_OPTIONS) == len(keywords - {"scale", "backend"})
    recurrent = {"log_gate": torch.zeros(N, HEADS), "beta": torch.ones(N, HEADS), "return_state": True}
    recurrent |= {"state": torch.zeros(HEADS, WIDTH, V.shape[-1])}
    of_heads = {"mix_logits", "mix_weights"}
    for name in of_heads:
        assert not ops.attend(GRAPH, Q, K, V, **{name: torch.ones(HEADS, HEADS)}).equal(ops.attend(GRAPH, Q, K, V))
    assert not ops.attend(GRAPH, Q, K, V, reduce="max").equal(ops.attend(GRAPH, Q, K, V))
    vectors = torch.ones(GRAPH.num_edges, HEADS, V.shape[-1])
    assert not ops.attend(GRAPH, Q, K, V, edge_value=vectors).equal(ops.attend(GRAPH, Q, K, V))
    others = {"scale", "backend", "bias", "sinks", "softcap", "normalize", "dropout", "reduce", "edge_value"}
    for name in keywords - others - of_heads - recurrent.keys():
        assert isinstance(ops.attend(GRAPH, Q, K, V, **{name: True}), tuple)
    for name, x in recurrent.items():
        with pytest.raises(ValueError, match="log_gate, beta and states go with sums"):
            ops.attend(GRAPH, Q, K, V, **{name: x})


# ---------------------------------------------------------------------------------------- cached choices


@pytest.mark.parametrize("subclass_first", [False, True])
def test_a_table_and_its_subclass_do_not_share_a_choice(subclass_first: bool) -> None:
    graph = graphs.window(3).bind(N + 1 + subclass_first)  # sizes that no other test has cached
    query, key, value = torch.randn(3, graph.num_dst, HEADS, WIDTH)
    plain, own = (
        Round(graph, value, Dot(query, key, 1.0), bias=(kind(TABLE, Offset(1)),)) for kind in (BiasTable, Twice)
    )

    def refused() -> None:
        with pytest.raises(Refused, match="bias of type Twice"):
            engine.run(own)

    if subclass_first:
        refused()
    assert engine.run(plain)[0].shape == value.shape
    refused()


def test_a_number_that_differs_from_its_default_is_not_taken_for_it() -> None:
    @dataclass(eq=False)
    class Heated(Round):
        temperature: float = 1.0

    engine.run(Heated(GRAPH, V, Dot(Q, K, 0.5)))
    with pytest.raises(Refused, match="it does not support temperature"):
        engine.run(Heated(GRAPH, V, Dot(Q, K, 0.5), temperature=2.0))


def test_a_field_of_the_name_of_another_need_is_not_served() -> None:
    @dataclass(eq=False)
    class Mean(Round):
        mean: bool = False

    with pytest.raises(Refused, match="it does not support field mean"):
        engine.run(Mean(GRAPH, V, Dot(Q, K, 0.5), mean=True))


def test_a_method_set_on_an_instance_is_not_overlooked() -> None:
    score = Dot(Q, K, 1.0)
    score.logits = lambda query, key, edge_key: (query - key).sum(-1)  # type: ignore[method-assign]
    asked = Round(GRAPH, V, score)
    torch.testing.assert_close(engine.run(asked)[0], engine.run(asked, "edge_list")[0])
    with pytest.raises(Refused, match="no kernel for Dot"):
        engine.run(asked, "csr")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"key": Role("scr")}, 'the role of key in Bent must be "dst", "src" or "edge"; got'),  # type: ignore[arg-type]
        ({"keys": Role("src")}, "Bent has a role for 'keys', and no field of this name"),
    ],
)
def test_roles_of_a_score_are_checked(key: dict[str, Role], message: str) -> None:
    class Bent(Tempered): ...

    Bent.roles = {"query": Role("dst"), **key}
    with pytest.raises(TypeError, match=message):
        engine.run(Round(GRAPH, V, Bent(Q, K, torch.ones(HEADS))), "edge_list")


def test_lower_runs_outside_of_autocast() -> None:
    @dataclass(eq=False)
    class Bilinear:
        query: Tensor
        key: Tensor
        weight: Tensor
        roles: ClassVar = {name: Dot.roles[name] for name in ("query", "key")}

        def logits(self, query: Tensor, key: Tensor) -> Tensor:
            return ((query @ self.weight) * key).sum(-1)

        def lower(self) -> Dot:
            return Dot(self.query @ self.weight, self.key, 1.0)

    asked = Round(GRAPH, V, Bilinear(Q, K, torch.randn(WIDTH, WIDTH)))
    with torch.autocast("cpu", torch.bfloat16):
        found = engine.run(asked)[0]
    torch.testing.assert_close(found, engine.run(asked)[0])
