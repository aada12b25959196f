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
from mpnn.engine import steps
from mpnn.engine.compile.graph_tensor import ADVICE, expression, graph_to_tensor
from mpnn.engine.compile.names import describe, restore
from mpnn.engine.compile.traced_graph import Built, TracedGraph, constant
from mpnn.graph import Graph
from mpnn.graph.edge_tables import TABLES, EmbeddingTable
from mpnn.graph.relations import Offset, Relation
from mpnn.round import Result, Round, validation
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU


class Call(NamedTuple):
    """The arguments of `torch.ops.mpnn.run`.

    `token`: the number of the graph or topology, int64 scalar; or the graph serialized by `graph_to_tensor`, uint8.
    `sizes`: number of destinations, sources and edges (0 if nothing depends on them), destinations and sources of the
    graph before `derive`, then the clips of relations. `tensors`: in the order of the form's fields, value first, then
    its parameters. `form`: a `Form` as text. `numbers`: in the order of its fields. `needs`: which tensors need
    gradients.
    """

    token: Tensor
    sizes: Sequence[int]
    tensors: Sequence[Tensor]
    form: str
    numbers: Sequence[float]
    needs: Sequence[bool]


class Form(NamedTuple):
    """A round without its tensors, numbers and sizes.

    `derived`: the function that derives the graph from the operator's graph, and its arguments. `fields`: the name of
    each field of the round and, after "score.", of its score, what it holds, and details: the relation of a table, the
    name of an object, or the value itself. `parameters`: the names of the parameters of modules, whose tensors are the
    last. `reduced`: the last two dimensions of aggregated messages, or None if the aggregator does not change them.
    `topology`: the text of the topology in a program that `torch.export` makes; empty in others, and for graphs.
    """

    backend: str
    derived: tuple[Any, ...]
    score: str
    fields: tuple[tuple[str, str, Any], ...]
    parameters: tuple[str, ...]
    reduce: str
    reduced: tuple[int, int] | None
    topology: str = ""


# ---------------------------------------------------------------------------------------------------- while tracing


def flatten(round: Round, backend: str) -> Call:
    """Flattens a round to a call. Sizes may be symbols."""
    # A subclass may have fields that the text does not name, and they would be lost without a word.
    if type(round) is not Round:
        raise TypeError(
            f"torch.compile traces a Round, and not its subclass {type(round).__name__}; leave it uncompiled"
        )
    graph = cast(TracedGraph, round.graph)
    score = round.score
    flat = _Flat()
    # These three are no data: the graph becomes the token, the score has fields of its own, the aggregator a name.
    flat.add(round, "", ("graph", "score", "reduce"))
    if score is not None:
        flat.add(score, "score.", ())
    reduce = flat.named("reduce", round.reduce)
    reduced = None
    topology = ""
    if reduce not in _PLAIN:
        reduced = _reduced(reduce, operator.index(round.heads), operator.index(round.value.shape[-1]))
    if torch.compiler.is_exporting() and not isinstance(graph, Built):
        token = graph_to_tensor(graph)
        recipe = ()
        topology = "" if graph.recipe else expression(graph.original)
    else:
        token = graph.token
        recipe = (_name_of(graph.recipe[0]), *graph.recipe[1:]) if graph.recipe else ()
    kind = "" if score is None else _score_name(type(score))
    form = Form(backend, recipe, kind, tuple(flat.fields), tuple(flat.parameters), reduce, reduced, topology)
    # To read the number of edges of a topology would specialize the program to one length.
    num_edges = graph.num_edges if round.return_weights or flat.per_edge else 0
    sizes = [graph.num_dst, graph.num_src, num_edges, *graph.base, *flat.clips]
    tensors = [*flat.tensors, *flat.parameters.values()]
    # A parameter requires gradients under no_grad, too, where nothing may be recorded for it.
    needs = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
    return Call(token, sizes, tensors, _to_text(*form), flat.numbers, needs)


class _Flat:
    """The fields of a round and its score, their tensors and numbers, and the clips of relations."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, str, Any]] = []
        self.tensors: list[Tensor] = []
        self.parameters: dict[str, Tensor] = {}
        self.numbers: list[Any] = []  # which may be symbols
        self.clips: list[int] = []
        self.per_edge = False

    def add(self, holder: Any, prefix: str, apart: tuple[str, ...]) -> None:
        """Adds all fields of a round or score but those that are kept separately."""
        for field in _fields(type(holder)):
            name = prefix + field
            data = getattr(holder, field)
            # `bias` is a tuple of any length. Each of its entries becomes a field under the same name.
            for one in data if name == "bias" else (data,):
                if one is not None and field not in apart:
                    self.fields.append((name, *self._kind(name, one)))
                    if isinstance(one, Tensor) and field in holder.roles and holder.roles[field].of == "edge":
                        self.per_edge = True

    def _kind(self, name: str, data: Any) -> tuple[str, Any]:
        if isinstance(data, EmbeddingTable):
            # A subclass may look rows up in a way that the text cannot say.
            if type(data) not in TABLES:
                raise TypeError(f"torch.compile traces tables of this library, and not {type(data).__name__}")
            self.tensors.append(data.table)
            return type(data).__name__, self._relation(data.relation)
        if isinstance(data, Tensor):
            self.tensors.append(data)
            return "tensor", None
        # A flag is part of the form. It is tested before numbers, because bool is a subclass of int.
        if isinstance(data, (bool, str)):
            return "value", data
        if type(data) is LeakyReLU:  # a number, because its slope is all that differs between models
            self.numbers.append(data.slope)
            return "LeakyReLU", None
        if isinstance(data, (int, float, torch.SymInt, torch.SymFloat)):
            self.numbers.append(data)
            return "number", None
        return "object", self.named(name, data)

    def named(self, role: str, value: Any) -> str:
        """The name of an object. Adds the parameters of a module."""
        if isinstance(value, nn.Module):
            self.parameters |= {f"{role}.{name}": parameter for name, parameter in value.named_parameters()}
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
    # Two rows of one message each show what the aggregator does to heads and width.
    index = Index.of(*(torch.arange(n, device=like.device) for n in (2, 3)))
    with torch.no_grad():
        out = module.reduce(like.new_zeros(2, heads, width), index)
    return out.shape[-2], out.shape[-1]


# ---------------------------------------------------------------------------------------------------- objects by name

_PLAIN_TYPES = (Sum, Mean, Max, Min, Var, Median)
_PLAIN: dict[str, Any] = {kind.__name__: kind() for kind in _PLAIN_TYPES}
# None of these objects is one that a user's operator holds, see `mpnn.aggregate.plain_sum`.
_BY_NAME: dict[str, Any] = {name: aggregator(name) for name in NAMED} | {"sum": Sum()}
_TABLES: dict[str, Any] = {kind.__name__: kind for kind in TABLES}
_SCORES: dict[str, Any] = {kind.__name__: kind for kind in (Dot, AdditiveScore, AdditiveV2Score)}
_NUMBERS = count()
_PROCESS = token_hex(4)
# Modules are held weakly, so that a compiled program does not keep a model in memory.
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
    objects = any(kind == "object" for _, kind, _ in form.fields)
    return form.reduce not in _PLAIN or objects or bool(form.score and form.score not in _SCORES)


def _object(name: str) -> Any:
    for known in (_PLAIN, _OBJECTS, _MODULES):
        if name in known:
            return known[name]
    # Descriptions hold a parenthesis or a dot, and names that this process gave hold neither.
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
    form = read(call.form)
    data = (iter(call.tensors), iter(call.numbers), iter(call.sizes[5:]))
    # All fields share the iterators: each takes its next tensor, number or clip in the order of `flatten`.
    fields = [(name, _value(kind, detail, *data)) for name, kind, detail in form.fields]
    of_score = {name.removeprefix("score."): x for name, x in fields if name.startswith("score.")}
    of_round = {name: x for name, x in fields if name != "bias" and not name.startswith("score.")}
    score = None
    bias = tuple(x for name, x in fields if name == "bias")
    if form.score:
        score = (_SCORES[form.score] if form.score in _SCORES else _object(form.score))(**of_score)
    return Round(graph, score=score, bias=bias, reduce=aggregator(_object(form.reduce)), **of_round)


def _value(kind: str, detail: Any, tensors: Iterator[Tensor], numbers: Iterator[float], clips: Iterator[int]) -> Any:
    """Returns the value of a field."""
    if kind in _TABLES:
        relation = Offset(next(clips)) if detail == "offset" else None if detail == "graph" else _object(detail)
        return _TABLES[kind](next(tensors), relation)
    readers: dict[str, Callable[[], Any]] = {
        "number": lambda: next(numbers),
        "LeakyReLU": lambda: LeakyReLU(next(numbers)),
        "tensor": lambda: next(tensors),
        "object": lambda: _object(detail),
        "value": lambda: detail,
    }
    return readers[kind]()


def result(call: Call, graph: Graph) -> list[Tensor]:
    """Out, and what else the round returns. Modules run with the call's tensors as parameters."""
    form = read(call.form)
    round = unflatten(call, graph)
    count = len(call.tensors) - len(form.parameters)
    own = dict(zip(form.parameters, call.tensors[count:], strict=True))

    def run() -> Result:
        return steps.result(round, form.backend)

    # Gradients belong to the tensors of the call. The module's own parameters are unknown to the program.
    results = torch.func.functional_call(_Modules(round), own, (run,)) if own else run()
    return [x for x in results if x is not None]


class _Modules(nn.Module):
    """The modules of a round: its aggregator, and those of its score. `forward` calls a function."""

    def __init__(self, round: Round) -> None:
        super().__init__()
        self.reduce = round.reduce
        self.score = nn.Module()
        for name, module in () if round.score is None else vars(round.score).items():
            if isinstance(module, nn.Module):
                self.score.add_module(name, module)

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


# ---------------------------------------------------------------------------------------------------- shapes of results


def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Empty results of the operator, for whose shapes torch asks while it traces a program."""
    call = Call(*arguments)
    form = read(call.form)
    value = call.tensors[0]
    round = unflatten(call, cast(Graph, Sizes(call.sizes, value.device)))
    # Wrong shapes are refused while the program is traced: the traceback then shows the caller's line.
    validation.round(round)
    # Most aggregators keep heads and width. `reduced` holds both for one that does not.
    heads, width = form.reduced or (round.heads, value.shape[-1])
    out = value.new_empty(*round.batch, call.sizes[0], heads, width)
    # A log-sum-exp has a row for each destination, weights have one for each edge.
    rows = call.sizes[0] if round.return_lse else call.sizes[2]
    more = value.new_empty((*round.batch, rows, round.heads) if round.return_weights or round.return_lse else (0,))
    if round.return_state:
        shape = (*round.batch, round.heads, cast(Dot, round.score).key.shape[-1], value.shape[-1])
        more = value.new_empty(shape, dtype=round.accumulate_dtype)
    return out, more, torch.empty((), dtype=torch.int64)


class Sizes:
    """A stand-in for a graph, of whose numbers of nodes and edges some may be symbols."""

    positions = types = None
    shift = 0
    num_edge_types = 0

    def __init__(self, sizes: Sequence[Any], device: torch.device | None = None) -> None:
        self.num_dst, self.num_src, self.num_edges = sizes[:3]
        self.device = device

    def cached(self, key: Any, build: Callable[[], Any]) -> Any:
        return build()

    def __repr__(self) -> str:
        return f"the graph ({self.num_dst} x {self.num_src})"
