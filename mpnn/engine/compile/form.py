"""Rounds as arguments of an operator: tensors, sizes, numbers, and a string that describes the rest.

The string refers by name to objects that text cannot describe, such as a user's aggregator. The object is looked up
when the program runs. Parameters of such modules are among the tensors, so that they get gradients.
"""

import operator
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import count
from secrets import token_hex
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from mpnn.aggregate import NAMED, Index, Max, Mean, Median, Min, Sum, Var, aggregator
from mpnn.edge_tables import TABLES, BiasTable, EmbeddingTable, PerEdge
from mpnn.engine import dispatch
from mpnn.engine.compile.graph_tensor import ADVICE, graph_to_tensor
from mpnn.engine.compile.names import describe, restore
from mpnn.engine.compile.outline import Built, Outline, constant
from mpnn.graph import Graph
from mpnn.graph.relations import Offset, Relation
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Score


class Call(NamedTuple):
    """The arguments of `torch.ops.mpnn.run`.

    `token`: the number of the graph or topology, int64 scalar; or the graph serialized by `graph_to_tensor`, uint8.
    `sizes`: number of destinations, sources and edges (0 if nothing depends on them), destinations and sources of the
    graph before `derive`, then the clips of relations. `tensors`: in the order of the form's slots, value first.
    `form`: a `Form` as text. `numbers`: dropout, then the numbers of the score. `needs`: which tensors need gradients.
    """

    token: Tensor
    sizes: Sequence[int]
    tensors: Sequence[Tensor]
    form: str
    numbers: Sequence[float]
    needs: Sequence[bool]


class Form(NamedTuple):
    """A round without its numbers and sizes.

    `derived`: the function that derives the graph from the operator's graph, and its arguments. `slots` describe the
    tensors: `name`, `name@relation` for a table, `=role.name` for a module's parameter. `numbers` and `objects` are the
    other fields of the score: the names of its numbers, and the name of each object. `reduced`: the last two dimensions
    of aggregated messages, or None if the aggregator does not change them.
    """

    backend: str
    derived: tuple[Any, ...]
    score: str
    slots: tuple[str, ...]
    numbers: tuple[str, ...]
    objects: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, Any], ...]
    reduce: str
    reduced: tuple[int, int] | None


# ---------------------------------------------------------------------------------------------------- while tracing


def flatten(round: Round, backend: str) -> Call:
    """Flattens a round to a call. Sizes may be symbols."""
    if type(round) is not Round:
        raise TypeError(
            f"torch.compile traces a Round, and not its subclass {type(round).__name__}; leave it uncompiled"
        )
    graph, score, parts = cast(Outline, round.graph), round.score, _Parts()
    options: list[tuple[str, Any]] = []
    for name in _fields(type(round)):
        data = getattr(round, name)
        if isinstance(data, (Tensor, EmbeddingTable)):
            parts.add(name, data, round.roles[name].of == "edge")
        elif name == "bias":
            for bias in data:
                parts.add(name, bias, True)
        elif name not in _APART and data is not None and data is not False:
            options.append((name, data))
    if score is not None:
        parts.add_score(score)
    reduce, reduced = parts.named("reduce", round.reduce), None
    if reduce not in _PLAIN:
        reduced = _reduced(reduce, operator.index(round.heads), operator.index(round.value.shape[-1]))
    if torch.compiler.is_exporting() and not isinstance(graph, Built):
        token, recipe = graph_to_tensor(graph), ()
    else:
        token, recipe = graph.token, (_name_of(graph.recipe[0]), *graph.recipe[1:]) if graph.recipe else ()
    form = Form(
        backend,
        recipe,
        "" if score is None else _score_name(type(score)),
        tuple(parts.slots),
        tuple(parts.numbers),
        tuple(parts.objects),
        tuple(options),
        reduce,
        reduced,
    )
    num_edges = graph.num_edges if round.return_weights or parts.per_edge else 0
    return Call(
        token,
        [graph.num_dst, graph.num_src, num_edges, *graph.base, *parts.clips],
        parts.tensors,
        _to_text(*form),
        [round.dropout, *parts.numbers.values()],
        [torch.is_grad_enabled() and t.requires_grad for t in parts.tensors],
    )


_APART = ("graph", "score", "bias", "reduce", "dropout")


class _Parts:
    """The tensors of a round, their slots, the clips of relations, and the numbers and objects of the score."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.slots: list[str] = []
        self.clips: list[int] = []
        self.numbers: dict[str, Any] = {}  # which may be symbols
        self.objects: list[tuple[str, str]] = []
        self.per_edge = False

    def add(self, name: str, data: PerEdge | None, per_edge: bool = False) -> None:
        if isinstance(data, EmbeddingTable) and type(data) not in TABLES:
            raise TypeError(f"torch.compile traces tables of this library, and not {type(data).__name__}")
        if isinstance(data, EmbeddingTable):
            self.tensors.append(data.table)
            self.slots.append(name + "@" + self._relation(data.relation))
        elif data is not None:
            self.tensors.append(data)
            self.slots.append(name)
            self.per_edge = self.per_edge or per_edge

    def add_score(self, score: Any) -> None:
        for name in _fields(type(score)):
            data = getattr(score, name)
            if isinstance(data, (Tensor, EmbeddingTable)):
                self.add("score_" + name, data, name in score.roles and score.roles[name].of == "edge")
            elif type(data) is LeakyReLU:  # a number, because its slope is all that differs between models
                self.numbers[name + "@LeakyReLU"] = data.slope
            elif isinstance(data, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(data, bool):
                self.numbers[name] = data
            elif data is not None:
                self.objects.append((name, self.named("score_" + name, data)))

    def named(self, role: str, value: Any) -> str:
        """The name of an object. Adds the parameters of a module."""
        if isinstance(value, nn.Module):
            for name, parameter in value.named_parameters():
                self.tensors.append(parameter)
                self.slots.append("=" + role + "." + name)
        return type(value).__name__ if type(value) in _PLAIN_TYPES else _name_of(value)

    def _relation(self, relation: Relation | None) -> str:
        if relation is None:
            return "graph"
        if type(relation) is Offset:  # the clip may be a symbol: T5's and ALiBi's tables are as long as the graph
            self.clips.append(relation.clip)
            return "offset"
        return _name_of(relation)


def aggregator_of(reduce: Any) -> Any:
    """The aggregator of this name. Returns objects and functions unchanged, as tracing cannot create modules."""
    return _BY_NAME[reduce] if isinstance(reduce, str) and reduce in _BY_NAME else reduce


@constant
def _fields(kind: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(field.name for field in fields(kind))


@constant
def _to_text(*fields: Any) -> str:
    return repr(fields)


@constant
def _reduced(reduce: str, heads: int, width: int) -> tuple[int, int]:
    module = aggregator(_object(reduce))
    like = next(module.parameters(), torch.zeros(())) if isinstance(module, nn.Module) else torch.zeros(())
    index = Index.of(*(torch.arange(n, device=like.device) for n in (2, 3)))
    with torch.no_grad():
        out = module.reduce(like.new_zeros(2, heads, width), index)
    return out.shape[-2], out.shape[-1]


# ---------------------------------------------------------------------------------------------------- objects by name

_PLAIN_TYPES = (Sum, Mean, Max, Min, Var, Median)
_PLAIN: dict[str, Any] = {kind.__name__: kind() for kind in _PLAIN_TYPES}
_BY_NAME: dict[str, Any] = {name: aggregator(name) for name in NAMED}
_SCORES: dict[str, Any] = {kind.__name__: kind for kind in (Dot, AdditiveScore, AdditiveV2Score)}
_NUMBERS, _PROCESS = count(), token_hex(4)
_MODULES: WeakValueDictionary[str, nn.Module] = WeakValueDictionary()
_OBJECTS: dict[str, Any] = {}


@constant
def _score_name(kind: type) -> str:
    return kind.__name__ if _SCORES.get(kind.__name__) is kind else _name_of(kind)


@constant
def _name_of(value: Any) -> str:
    """The name of an object in a program. Names that are not descriptions are unique to this process, so that programs
    cached by another process do not match."""
    if torch.compiler.is_exporting():
        return _describe(value)
    name = f"{(value if isinstance(value, type) else type(value)).__name__} {_PROCESS}{next(_NUMBERS)}"
    (_MODULES if isinstance(value, nn.Module) else _OBJECTS)[name] = value
    return name


def names_objects(call: Call) -> bool:
    """Whether the round runs code that is not the library's."""
    form = read(call.form)
    return form.reduce not in _PLAIN or bool(form.objects) or bool(form.score and form.score not in _SCORES)


def _object(name: str) -> Any:
    for known in (_PLAIN, _OBJECTS, _MODULES):
        if name in known:
            return known[name]
    if "(" in name or "." in name:
        return restore(name)
    raise RuntimeError(f"a compiled program uses a {name.split()[0]!r} that was freed; keep a reference to it")


def _describe(value: Any) -> str:
    """The text of an object in a program that another process will run."""
    text = describe(value)
    if text is None:
        value = getattr(value, "function", value)  # an aggregator may be a function
        name = getattr(value, "__qualname__", type(value).__name__)
        raise ValueError(
            f"torch.export cannot save {name}: a saved program holds the aggregators, scores and relations of this "
            f"library and torch's activations, and no code of your own; {ADVICE}"
        )
    return text


# ---------------------------------------------------------------------------------------------------- at run time


@lru_cache(maxsize=1024)
def read(form: str) -> Form:
    return Form(*literal_eval(form))


def derived_graph(call: Call, graph: Graph) -> Graph:
    """The graph of a round, derived from the operator's graph."""
    build, *arguments = read(call.form).derived or ("",)
    return graph.derive(_object(build), *arguments, num_dst=call.sizes[0]) if build else graph


def unflatten(call: Call, graph: Graph) -> Round:
    """Unflattens a call to a round over `graph`."""
    form, clips = read(call.form), iter(call.sizes[5:])
    parts: dict[str, Any] = {}
    bias: list[PerEdge] = []
    for slot, tensor in zip(form.slots, call.tensors, strict=True):
        name, _, relation = slot.partition("@")
        table = BiasTable if name == "bias" else EmbeddingTable
        data = table(tensor, _relation(relation, clips)) if relation else tensor
        if name == "bias":
            bias.append(data)
        else:
            parts[name] = data
    tensors = {name: x for name, x in parts.items() if name[0] != "=" and not name.startswith("score_")}
    score, reduce = _score(form, parts, call.numbers[1:]), aggregator(_object(form.reduce))
    apart: dict[str, Any] = {"score": score, "bias": tuple(bias), "dropout": call.numbers[0], "reduce": reduce}
    return Round(graph, **tensors, **dict(form.options), **apart)


def _relation(name: str, clips: Iterator[int]) -> Relation | None:
    if name == "graph":
        return None
    return Offset(next(clips)) if name == "offset" else _object(name)


def _score(form: Form, parts: dict[str, Any], numbers: Sequence[float]) -> Score | None:
    if not form.score:
        return None
    kind = _SCORES[form.score] if form.score in _SCORES else _object(form.score)
    values: dict[str, Any] = {name: parts["score_" + name] for name in _fields(kind) if "score_" + name in parts}
    values |= {name: _object(of) for name, of in form.objects}
    for slot, number in zip(form.numbers, numbers, strict=True):
        name, _, function = slot.partition("@")
        values[name] = LeakyReLU(number) if function else number
    score: Score = kind(**values)
    return score


def result(call: Call, graph: Graph) -> list[Tensor]:
    """Out, and the weights if the round returns them. Modules run with the call's tensors as parameters."""
    form, round = read(call.form), unflatten(call, graph)
    own = {slot[1:]: tensor for slot, tensor in zip(form.slots, call.tensors, strict=True) if slot[0] == "="}

    def run() -> tuple[Tensor, Tensor | None]:
        return dispatch.run(round, form.backend)

    results = torch.func.functional_call(_Modules(round), own, (run,)) if own else run()
    return [x for x in results if x is not None]


class _Modules(nn.Module):
    """The modules of a round by role. `forward` calls a function."""

    def __init__(self, round: Round) -> None:
        super().__init__()
        parts = {} if round.score is None else vars(round.score)
        for role, module in {"reduce": round.reduce, **{"score_" + name: x for name, x in parts.items()}}.items():
            if isinstance(module, nn.Module):
                self.add_module(role, module)

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()
