"""The choice: which backend runs a round, or which rewrite replaces it by rounds that are chosen in the same way.

Each backend that serves the round estimates its cost, and so does each rewrite that applies: its own operations and its
rounds. The lowest estimate is chosen. A backend chosen by name runs the round itself, or all rounds of a rewrite, or is
`Refused` with its reason; there is no silent fallback.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn.backends import BACKENDS, Backend, csr, dense, edge_list, registered, tiles
from mpnn.backends.cost_model import Estimate
from mpnn.engine import rewrites
from mpnn.engine.rewrites.rewrite import Rewrite
from mpnn.graph import Graph, batches
from mpnn.graph.bound import cached_on_graph
from mpnn.graph.modes import is_transformed
from mpnn.round import Result, Round
from mpnn.round.needs import missing


class Refused(ValueError):
    """The backend chosen by name cannot run the round."""


class Choice(NamedTuple):
    """The choice that runs all rounds of one form over a graph: a tree of rewrites, whose leaves are backends.

    Attributes:
        by: a backend, or a rewrite.
        steps: what runs the rounds of a rewrite, in their order; empty for a backend.
        estimate: None if it was the only candidate and was not priced.
    """

    by: Any
    steps: "tuple[Choice, ...]" = ()
    estimate: Estimate | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        """The names of the backends that run, each once."""
        if not self.steps:
            return (self.by.NAME,)
        return tuple(dict.fromkeys(name for step in self.steps for name in step.backends))

    @property
    def is_of_any_edges(self) -> bool:
        """Whether the same runs rounds of this form over all lists of edges on a CPU."""
        if not self.steps:
            return getattr(self.by, "ANY_EDGES", False)
        return all(step.is_of_any_edges for step in self.steps)

    @property
    def name(self) -> str:
        """Returns the names of its backends, such as "csr" or "csr + tiles"."""
        return " + ".join(self.backends)

    def __str__(self) -> str:
        """Returns its rewrites and backends, such as "mean as sum (csr)"."""
        return f"{self.by.NAME} ({', '.join(map(str, self.steps))})" if self.steps else str(self.by.NAME)

    def bind(self, round: Round) -> Callable[[Round], Result]:
        """The function that runs all rounds of this form over graphs of this kind: that of the backend if it has
        one."""
        bind = getattr(self.by, "bind", None)
        # A `run` that somebody put in the place of a module's own runs as well.
        is_own = bind is not None and getattr(self.by.run, "__module__", None) == bind.__module__
        return bind(round) if bind is not None and is_own and not self.steps else self.run

    def run(self, round: Round) -> Result:
        if not self.steps:
            result = self.by.run(round)
            # A registered backend may return (out, weights).
            return result if type(result) is Result else Result(*result)
        steps = _Steps(self.steps)
        last, finish = self.by.apply(round, steps)
        return finish(steps(last))


class _Steps:
    """Runs the rounds of a rewrite, each by its choice."""

    def __init__(self, steps: tuple[Choice, ...]) -> None:
        self._steps = iter(steps)

    def __call__(self, round: Round) -> Result:
        return next(self._steps).run(round)

    def run_if(self, needed: Callable[[], bool], round: Callable[[], Round]) -> Result | None:
        step = next(self._steps)
        return step.run(round()) if needed() else None

    def compute(self, function: Callable[..., Tensor], x: Tensor, *more: object) -> Tensor:
        return function(x, *more)


TRANSFORMED = "torch.func"
"""In place of "auto": the cheapest of the backends that torch's function transforms trace, which read tensors by
operations of torch alone."""

FORWARD = "torch.func in forward mode"
"""In place of "auto": the cheapest of the backends whose kernels have forward-mode derivatives of the round; those of
TRANSFORMED if there is none."""


def choose(round: Round, backend: str = "auto", estimated: bool = False) -> Choice:
    """Returns the choice that runs the round. `estimated`: with an estimate, even if there is no other candidate.

    Raises:
        ValueError: if no backend has this name.
        Refused: if the named backend does not support the round; the message states the reason.
    """
    named = {b.NAME: b for b in registered()}
    if backend in ("auto", TRANSFORMED, FORWARD):
        choice = _cheapest(round, estimated, backend)
        if backend == FORWARD and not isinstance(choice, Choice):
            choice = _cheapest(round, estimated, TRANSFORMED)
        if isinstance(choice, Choice):
            return choice
        raise Refused(f"no backend can run this: {choice}")
    if not isinstance(backend, str):
        raise TypeError(f'backend must be "auto" or the name of one; got {backend!r}')
    if backend not in named:
        raise ValueError(f"there is no backend {backend!r}; there are auto, {', '.join(named)}")
    choice = _by(named[backend], round, estimated)
    if isinstance(choice, Choice):
        return choice
    raise Refused(f"backend {backend!r} cannot run this: {choice}")


def refusal(backend: Backend, round: Round) -> str | None:
    """Why a backend can run neither the round nor the rounds of a rewrite of it. None if it can."""
    choice = _by(backend, round)
    return None if isinstance(choice, Choice) else choice


def own_refusal(backend: Backend, round: Round) -> str | None:
    """Why a backend cannot run the round itself, without a rewrite. None if it can."""
    return missing(round, *_serves(backend, round)) or backend.refusal(round)


def _cheapest(round: Round, estimated: bool = False, mode: str = "auto") -> Choice | str:
    """The cheapest choice, or the reason why there is none. `mode`: "auto", TRANSFORMED for backends of torch's
    operations only, or FORWARD for those whose kernels have tangents."""
    backends, equalities = _candidates(round)
    able = [b for b in backends if b.refusal(round) is None]
    traced = mode == TRANSFORMED
    if mode != "auto":
        able = [b for b in able if (getattr(b, "TRACED", False) if traced else _has_tangents(b, round))]
    # A single candidate is not priced: prices take longer than a small round, and nothing depends on them.
    if len(able) == 1 and not equalities:
        return _leaf(able[0], round, estimated)
    kind = able if traced else _of_kind(round, able, equalities)
    if len(kind) == 1 and not equalities:
        return _leaf(kind[0], round, estimated)
    options = [_leaf(b, round, estimated=True) for b in kind]
    # Rewrites save work of kernels, and operations of torch are no kernels: there they are for rounds that no backend
    # serves.
    for rewrite, reason in () if traced and able else equalities:
        choice = reason or _through(rewrite, round, partial(_cheapest, estimated=True, mode=mode), mode == "auto")
        if isinstance(choice, Choice):
            options.append(choice)
    if not options:  # no rewrite could run
        kind = able if traced else _of_kind(round, able, ())
        options = [_leaf(b, round, estimated=True) for b in kind or able]
    if options:
        # The first of equal prices wins, so the order of BACKENDS decides ties, the same on each machine.
        return min(options, key=_seconds)
    specification = next(b for b in registered() if b.NAME == "edge_list")
    return refusal(specification, round) or "all backends that could were replaced"


def _has_tangents(backend: Backend, round: Round) -> bool:
    """Whether the kernels of a backend have forward-mode derivatives of this round."""
    return hasattr(backend, "has_tangents") and bool(backend.has_tangents(round))


_MANY_NODES = 64  # of an explicit graph that may run as a matrix of pairs


def _of_kind(round: Round, able: list[Backend], equalities: Sequence[tuple[Rewrite, str | None]]) -> list[Backend]:
    """The backends among which prices decide, out of those that are able to run a round.

    Batches of graphs and of documents run on a CPU by one backend, however large they are: so what an item gets does
    not depend on the batch that it is in. Lists of edges run row by row, documents in tiles. A matrix of all pairs and
    the specification run what nothing else does."""
    graph = round.graph
    if not round.value.is_cpu:
        return able
    if graph.is_explicit:
        if is_matrix(graph.num_dst, graph.num_src, graph.num_edges) and not batches.is_on():
            return able
        order: tuple[Backend, ...] = (csr,)
        last: tuple[Backend, ...] = (edge_list, dense)
    elif graph.is_scattered and any(rewrites.IN_ORDER is rewrite for rewrite, reason in equalities if not reason):
        return []  # tiles run its cliques in order
    elif _is_packed(graph):
        order = (tiles, csr)
        last = (edge_list,) if dense.runs_by_parts(round) else (edge_list, dense)
    else:
        return able
    # Backends that users registered always compete: they know what their own promise about bits is.
    own = [b for b in able if b not in BACKENDS]
    best = next((b for b in order if b in able), None)
    if best is not None:
        return [best, *own]
    others = [b for b in able if b not in last]
    return others if others or equalities else able


def is_matrix(num_dst: int, num_src: int, num_edges: int) -> bool:
    """Whether a list of edges has so many of all pairs that a matrix of pairs may run it."""
    return num_dst >= _MANY_NODES and 2 * num_edges > num_dst * num_src


@cached_on_graph
def _is_packed(graph: Graph) -> bool:
    """Whether the nodes are documents, each complete or causal: several, or what `documents` was called for."""
    # A stacked graph is folded first, and the folded graph passes here.
    parts = graph.parts
    return parts is not None and ((parts.count > 1 and int(parts.lengths.max()) > 1) or "documents(" in graph.name)


def _by(backend: Backend, round: Round, estimated: bool = False) -> Choice | str:
    """The choice by this backend alone, or the reason why there is none."""
    own = own_refusal(backend, round)
    if own is None:
        return _leaf(backend, round, estimated)
    reasons: list[str] = []
    for rewrite, reason in _candidates(round)[1]:
        choice = reason or _through(rewrite, round, partial(_by, backend, estimated=estimated))
        if isinstance(choice, Choice):
            return choice
        if rewrite.same_work:
            reasons.append(choice)
    return reasons[0] if reasons else own


def _leaf(backend: Backend, round: Round, estimated: bool) -> Choice:
    return Choice(backend, (), backend.estimate(round) if estimated else None)


def _seconds(choice: Choice) -> float:
    assert choice.estimate is not None
    return choice.estimate.seconds


class _Unable(Exception):
    """Some round of a rewrite cannot run."""


class _Planner:
    """Chooses for each round of a rewrite, and returns results of its shapes without memory."""

    def __init__(self, choose: Callable[[Round], Choice | str], has_numbers: bool) -> None:
        self._choose = choose
        self._has_numbers = has_numbers
        self.steps: list[Choice] = []
        self.estimates: list[Estimate] = []

    def __call__(self, round: Round) -> Result:
        choice = self._choose(round)
        if not isinstance(choice, Choice):
            raise _Unable(choice)
        # Steps are numbered by the order of these calls, in which `_Steps` takes them when the rewrite runs.
        self.steps.append(choice)
        self.estimates += [choice.estimate] if choice.estimate is not None else []
        return _stand_in(round)

    def run_if(self, needed: Callable[[], bool], round: Callable[[], Round]) -> Result | None:
        if not self._has_numbers:
            raise _Unable("numbers decide whether a round runs, and a transform of torch.func has many at once")
        counted = len(self.estimates)
        result = self(round())
        del self.estimates[counted:]  # It is rarely needed.
        return result

    def compute(self, function: Callable[..., Tensor], x: Tensor, *more: object) -> Tensor:
        return x


def _through(
    rewrite: Rewrite, round: Round, choose: Callable[[Round], Choice | str], has_numbers: bool = True
) -> Choice | str:
    """The choice of a rewrite, or the reason why it, or some round of it, cannot run. `has_numbers`: whether it may
    decide by the numbers of results."""
    reason = rewrite.refusal(round)
    if reason is not None:
        return reason
    # The rewrite is applied once to tensors without memory, which shows the rounds that it will run.
    planner = _Planner(choose, has_numbers)
    try:
        last, _ = rewrite.apply(round, planner)
        planner(last)
    except _Unable as unable:
        return str(unable)
    # Steps run one after the other: their times add up, and the largest of them needs the most memory.
    own = rewrite.estimate(round)
    seconds = own.seconds + sum(estimate.seconds for estimate in planner.estimates)
    size = own.bytes + max((estimate.bytes for estimate in planner.estimates), default=0.0)
    return Choice(rewrite, tuple(planner.steps), Estimate(seconds, size))


def _stand_in(round: Round) -> Result:
    """Results of the shapes of a round's, each a view of one number."""
    graph = round.graph
    heads = round.heads
    needs_grad = round.needs_grad

    # A number expanded to a shape has strides of 0 and takes no memory, however large the graph is.
    def of(dtype: torch.dtype, *shape: int) -> Tensor:
        with torch.no_grad():
            number = round.value.new_zeros((), dtype=dtype)
        number = number.expand(*round.batch, *shape)
        return number.requires_grad_(needs_grad) if not is_transformed() else number

    return Result(
        of(round.result_dtype, graph.num_dst, heads, round.value.shape[-1]),
        of(round.result_dtype, graph.num_edges, heads) if round.return_weights else None,
        of(round.accumulate_dtype, graph.num_dst, heads) if round.return_lse else None,
    )


_MAX_CANDIDATES = 1 << 12
_candidates_by_form: dict[Hashable, tuple[tuple[Backend, ...], tuple[tuple[Rewrite, str | None], ...]]] = {}


def _candidates(round: Round) -> tuple[tuple[Backend, ...], tuple[tuple[Rewrite, str | None], ...]]:
    """The backends that serve all needs of a round, and the rewrites of its form, each with the sentence about a need
    that it does not serve, or None. Both follow from the signature and three facts of the graph, so they are derived
    once, also for a layer whose graphs are made again in each step."""
    graph = round.graph
    facts = graph.is_explicit, bool(graph.stack), graph.node_ids is None
    form = registered(), rewrites.REWRITES, facts, round.signature
    candidates = _candidates_by_form.get(form)
    if candidates is None:
        # Forms hold sizes of batches, of which a long run may meet any number.
        if len(_candidates_by_form) >= _MAX_CANDIDATES:
            _candidates_by_form.clear()
        needs = round.needs
        serving = tuple(b for b in registered() if needs <= _serves(b, round)[0])
        about = [r for r in rewrites.REWRITES if r.applies(round)]
        equalities = tuple((r, missing(round, r.SERVES, r.REASONS)) for r in about)
        candidates = _candidates_by_form[form] = serving, equalities
    return candidates


def _serves(backend: Backend, round: Round) -> tuple[frozenset[str], dict[str, str]]:
    """The needs that a backend serves, and its own sentences about some that it does not."""
    if hasattr(backend, "serves"):
        return backend.serves(round)
    return backend.SERVES, getattr(backend, "REASONS", {})
