"""Steps: what rounds of one form over graphs of one kind have in common, so that the next one decides nothing again.

    run(round, backend)      the step of its form runs it; if there is none, `learn` plans one and teaches it

It is the one way from a round to a kernel. A step does not decide what is computed: it repeats what the plan decided
for rounds of its form. The form is everything of a round but the numbers in it, and it is read from the class: each
field of the round and of its score that holds tensors is compared by the guard (`mpnn/graph/guard.py`), each other
field by its value. So a field, an option or a mode of torch that somebody adds makes another form, which is planned,
and which a backend refuses until it says that it serves it (`mpnn/round/needs.py`).

Lists of edges on a CPU are one kind of graph, because they run row by row whatever their edges are: a layer whose graph
is new in each call plans nothing. Any other graph is of its own kind, and keeps its own steps.
"""

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn import backends
from mpnn.aggregate import Max, Mean, Min, Sum, Var
from mpnn.engine import listeners, slowness
from mpnn.engine.choice import FORWARD, TRANSFORMED, Choice, choose, is_matrix
from mpnn.engine.rewrites.prepare import PREPARATIONS, Preparation, as_planned, lower_score
from mpnn.graph import batches
from mpnn.graph.bound import BoundGraph
from mpnn.graph.edge_tables import EmbeddingTable, numbers
from mpnn.graph.exchange import LOCAL
from mpnn.graph.guard import guard, is_special
from mpnn.graph.modes import is_forward_mode, is_transformed, outside_modes
from mpnn.graph.registry import FUNCTIONS
from mpnn.round import Result, Round, plain_form, table_form, validation
from mpnn.scores import BUILT_IN, PARAMETER, LeakyReLU, Role

_MOST_STEPS = 8  # of one key
_MOST_KEYS = 256  # of one kind of graph
_SIZES = {"dst": "num_dst", "src": "num_src", "edge": "num_edges"}
Run = Callable[[Round], Result]


class Step(NamedTuple):
    """The step that runs the rounds of a form. `by`: the backend or the rewrite. `own`: its `run` when the step was
    taught."""

    form: "Form"
    registered: tuple[Any, ...]
    by: Any
    own: Any
    run: Run


Steps = dict[Hashable, tuple[Step, ...]]
_OF_LISTS: dict[Hashable, Steps] = {}
"""The steps of rounds over lists of edges, by what distinguishes these."""


def run(round: Round, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Validates, plans and runs a round.

    The dtype of the features decides the arithmetic. Autocast acts on linear maps, and not on rounds.

    Args:
        backend: "auto", or the name of a backend. A named backend runs, or raises an error that states the reason.

    Returns:
        out [..., N_dst, H, D], and the other results that the round asks for: the weights [..., E, H], the lse [...,
        N_dst, H], the state [..., H, D, D_v], or None.

    Raises:
        ValueError, TypeError: the parts of the round do not fit together, or no backend (or not the named one) serves
            all its needs.
    """
    if torch.compiler.is_compiling():
        traced: tuple[Tensor, Tensor | None] = FUNCTIONS["run in a program"](round, backend)
        return traced
    if listeners.of_rounds:
        listeners.notify(round, backend)
    out, weights, lse, state = result(round, backend)
    return out, weights if lse is None and state is None else lse if state is None else state


def result(round: Round, backend: str = "auto") -> Result:
    """Returns what `run` does outside of traced programs, by name."""
    if round.score is not None and type(round.score) not in BUILT_IN:
        round = lower_score(round, backend)
    # Each call of a layer passes here, so what is as it should be is tested without a call of its validation.
    graph: object = round.graph
    if not isinstance(graph, BoundGraph):
        validation.graph(graph)
    step = find(round, backend) or learn(round, backend)
    return step(round)


def find(round: Round, backend: str) -> Run | None:
    """The step that runs a round, or None if its form is not known or a mode asks for more than a guard sees."""
    value = round.value
    if not isinstance(value, Tensor) or type(backend) is not str or is_special(value):
        return None
    # Of what distinguishes most forms: so a look-up compares few. It stands here, and in `teach`, to save a call.
    reduce = round.reduce
    of_reduce = None if "reduce" in getattr(reduce, "__dict__", ()) else type(reduce)  # as `class_of`
    of_value = value.shape[-1], value.dtype, value.requires_grad
    modes = torch.is_grad_enabled(), batches.STATE.padding is None
    key = backend, type(round.score), of_reduce, of_value, modes
    memo = round.graph._memo
    for steps in memo["steps"] if "steps" in memo else steps_of(round.graph):
        for form, registered, by, own, run in steps.get(key, ()):
            if form.fits(round) and registered is backends._registered and getattr(by, "run", None) == own:
                return run
    return None


class Planned(NamedTuple):
    """The plan of all rounds of one form over graphs of one kind: `run` runs a round that `preparations` prepared, by
    the `choice`."""

    preparations: tuple[Preparation, ...]
    run: Run
    choice: Choice


def learn(round: Round, backend: str) -> Run:
    """Plans a round, and returns what runs it and those of its form."""
    transformed = is_transformed()
    if backend == "auto" and transformed:
        # Kernels read addresses, and a transform of torch.func wraps tensors that have none.
        backend = FORWARD if is_forward_mode() else TRANSFORMED
    # Plans keep what they derive from graphs, which serves later calls in any mode.
    plan = outside_modes(lambda: planned(round, backend, transformed))
    step = plan.run
    if plan.preparations:
        step = partial(_prepare_and_run, plan)
    device = round.value.device.type
    if torch.is_autocast_enabled(device):
        step = partial(_run_outside_autocast, device, step)
    if backend not in (TRANSFORMED, FORWARD):
        teach(round, backend, plan.choice, step)
    return step


def _prepare_and_run(plan: Planned, round: Round) -> Result:
    # A seed is drawn here, once a call, and not where plans are made, which would move torch's generator.
    for preparation in plan.preparations:
        round = preparation.prepare(round)
    return plan.run(round)


def _run_outside_autocast(device: str, step: Run, round: Round) -> Result:
    """The dtype of the features decides the arithmetic: autocast acts on the linear maps around a round."""
    with torch.autocast(device, enabled=False):
        return step(round)


def planned(round: Round, backend: str, transformed: bool = False) -> Planned:
    """Validates and plans a round.

    Args:
        transformed: whether a transform of torch.func wraps its tensors, so that no address is known beforehand.

    Raises:
        ValueError, TypeError: the parts of the round do not fit together, or the named backend refuses it.
    """
    needed = tuple(preparation for preparation in PREPARATIONS if preparation.applies(round))
    # From here on the round is what backends see: its own score is lowered, its tables and its seed are there.
    round = as_planned(round, backend)
    validation.round(round)
    if round.value.is_meta:
        raise ValueError("tensors on the device meta hold no numbers; move the graph and the features elsewhere")
    choice = choose(round, backend)
    if backend == "auto" and slowness.estimated(choice):
        slowness.warn(round, choose(round, backend, estimated=True))
    return Planned(needed, choice.run if transformed else choice.bind(round), choice)


def teach(round: Round, backend: str, choice: Choice, run: Run) -> None:
    """Keeps what runs the rounds of the form of this one."""
    if is_special(round.value) or not is_dataclass(round.score or round):
        return
    of_all, *others = steps_of(round.graph)
    is_open = bool(others) and choice.is_of_any_edges and backends.registered() is backends.BACKENDS
    steps = others[0] if others and not is_open else of_all
    value = round.value
    reduce = round.reduce
    of_reduce = None if "reduce" in getattr(reduce, "__dict__", ()) else type(reduce)  # as `class_of`
    of_value = value.shape[-1], value.dtype, value.requires_grad
    modes = torch.is_grad_enabled(), batches.STATE.padding is None
    key = backend, type(round.score), of_reduce, of_value, modes
    if len(steps) >= _MOST_KEYS:
        steps.clear()
    by = choice.by
    step = Step(Form(round, is_open), backends._registered, by, getattr(by, "run", None), run)
    # The tuple is replaced and never changed, because another thread may go over it.
    steps[key] = (step, *steps.get(key, ())[: _MOST_STEPS - 1])


def steps_of(graph: BoundGraph) -> tuple[Steps, ...]:
    """The steps of rounds over a graph: of a list of edges, those of all such lists, and its own."""
    tables: tuple[Steps, ...] | None = graph._memo.get("steps")
    if tables is None:
        own: Steps = {}
        tables = (own,)
        if _is_list(graph):
            kind: Any = graph
            tables = _OF_LISTS.setdefault((kind.stored_edges.dtype, kind.order is None), {}), own
        tables = graph._memo.setdefault("steps", tables)
    return tables


def _is_list(graph: Any) -> bool:
    """Whether only the numbers of nodes and edges distinguish this graph from others for a plan: it is a list of edges
    on a CPU, without types, positions or numbers of nodes of its own."""
    if graph.stack or not graph.is_explicit:
        return False
    edges = graph.stored_edges
    num_edges = edges.shape[1]
    num_dst, num_src = graph.num_dst, graph.num_src
    return bool(
        edges.is_cpu
        and graph.exchange is LOCAL
        and graph.node_ids is None
        and graph.positions is None
        and graph._edge_type is None
        and graph.relation is None
        and min(num_dst, num_src, num_edges) > 0
        and max(num_dst, num_src) < 2**31
        and not is_matrix(num_dst, num_src, num_edges)
    )


class Form:
    """The form of a round: its class, its options, and the guards of its tensors.

    Args:
        is_open: whether rounds of this form may have any number of nodes and edges. Their tensors then have to fit the
            graph of their round.
    """

    def __init__(self, round: Round, is_open: bool) -> None:
        score = round.score
        fields = _fields(round)
        single = [field for field in fields if isinstance(field.value, _HELD)]
        several = [field for field in fields if _holds_several(field.value)]
        plain = [field for field in fields if field not in single and field not in several]
        exact = [field for field in plain if type(field.value) in _VALUES]
        self._others = [field for field in plain if field not in exact]
        self._kind = type(round)
        self._score = type(score)
        # More than the class has fields if an object has a method of its own.
        self._num_attributes = len(getattr(score, "__dict__", ()))
        self._num_single = len(single)
        self._read_exact = _reader([field.path for field in exact])
        self._exact = self._read_exact(round)
        # Of numbers, which are read in each call, only the signs decide what runs. Objects of the caller's are not
        # kept, because graphs keep forms: of those, too, only what plans depend on is compared.
        self._read_others = _reader([field.path for field in self._others])
        values = self._read_others(round)
        self._values = tuple([x if type(x) in _EQUAL else None for x in values])
        self._forms = self._forms_of(values)
        self._read_tensors = _reader([field.path + ".table" * _is_table(field.value) for field in single])
        self._several = [attrgetter(field.path) for field in several]
        with_rules = [field for field in (*single, *several) if field in several or _is_table(field.value)]
        self._rules = [(attrgetter(field.path), _rules_of(field.value)) for field in with_rules]
        held = [(numbers(field.value), field.role) for field in single]
        held += [(numbers(x), field.role) for field in several for x in field.value]
        self._guards = [_guard(x, role, is_open) for x, role in held]
        sizes = [(k, -1 - role.trailing, _SIZES.get(role.of)) for k, (_, role) in enumerate(held) if is_open]
        self._sizes = [(k, dim, size) for k, dim, size in sizes if size is not None]

    def fits(self, round: Round) -> bool:
        """Whether a round has this form, in the modes that are on."""
        score = round.score
        if type(round) is not self._kind or type(score) is not self._score:
            return False
        try:
            if self._read_exact(round) != self._exact:
                return False
            others = self._read_others(round)
            if others != self._values and self._forms_of(others) != self._forms:
                return False
        except (RuntimeError, ValueError):  # a tensor or an array is where none was
            return False
        if self._rules and not self._has_rules(round):
            return False
        tensors = self._read_tensors(round)
        if self._several:
            tensors = (*tensors[: self._num_single], *(numbers(x) for read in self._several for x in read(round)))
        for fits, x in zip(self._guards, tensors):  # noqa: B905  # `strict` takes as long as a guard
            # The guard ends the process at a nested tensor without strides.
            if getattr(x, "is_nested", True) or not fits(x):
                return False
        if self._sizes:
            graph = round.graph
            for k, dim, size in self._sizes:
                if tensors[k].shape[dim] != getattr(graph, size):
                    return False
        return score is None or len(getattr(score, "__dict__", ())) == self._num_attributes

    def _has_rules(self, round: Round) -> bool:
        """Whether tables of edges are looked up by the same rules, and there are as many biases of the same kinds."""
        held = [(read(round), rules) for read, rules in self._rules]
        return all(value is not None and _rules_of(value) == rules for value, rules in held)

    def _forms_of(self, values: tuple[Any, ...]) -> list[Hashable]:
        return [plain_form(field.path, x, field.default) for field, x in zip(self._others, values, strict=False)]


class _Field(NamedTuple):
    """A field of a round or of its score: what it holds, its default, and the role of its tensors."""

    path: str
    value: Any
    default: Any
    role: Role


_HELD = (Tensor, EmbeddingTable)
_VALUES = frozenset({type(None), bool, str, tuple, torch.dtype, LeakyReLU})
_EQUAL = frozenset({int, float, str, Sum, Mean, Max, Min, Var})
"""Values that have equal forms if they are equal."""
_NO_ROLE = Role("none")


def _fields(round: Round) -> list[_Field]:
    """The fields of a round but for its graph, by which steps are kept, and those of its score."""
    of_round = [field for field in fields(round) if field.name not in ("graph", "score")]
    form = [_Field(f.name, getattr(round, f.name), f.default, round.roles.get(f.name, _NO_ROLE)) for f in of_round]
    score: Any = round.score
    for field in () if score is None else fields(score):
        role = score.roles.get(field.name, PARAMETER)
        form.append(_Field(f"score.{field.name}", getattr(score, field.name), field.default, role))
    return form


def _holds_several(value: Any) -> bool:
    return type(value) is tuple and bool(value) and all(isinstance(x, _HELD) for x in value)


def _is_table(value: Any) -> bool:
    return isinstance(value, EmbeddingTable)


def _rules_of(held: Any) -> list[Any]:
    """Of a table of edges, or of a tuple of tables and tensors: the kinds of all, and the rules of tables."""
    several = held if type(held) is tuple else (held,)
    return [table_form(x) if isinstance(x, EmbeddingTable) else isinstance(x, Tensor) for x in several]


def _reader(paths: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads the attributes of these dotted names, as a tuple, followed by others."""
    # attrgetter returns a tuple of two names or more.
    return attrgetter(*paths, *["normalize"] * max(2 - len(paths), 0))


def _guard(x: Tensor, role: Role, is_open: bool) -> Callable[[Tensor], bool]:
    """The guard of a tensor. If it may be of any number of nodes or edges, so are the strides of its batch."""
    if not is_open or role.of not in _SIZES:
        return guard(x)
    batch = x.dim() - role.trailing - 1
    sizes = [*x.shape[:batch], None, *x.shape[batch + 1 :]]
    return guard(x, sizes, [*[None] * batch, *x.stride()[batch:]])
