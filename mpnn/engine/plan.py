"""The plan as users read it: what runs a round, by which rewrites, and the estimate or the reason of each backend."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from inspect import isroutine, signature
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.backends import Backend, registered
from mpnn.engine import listeners, slowness
from mpnn.engine.choice import Choice, Refused as Refused, choose as choose, refusal as refusal
from mpnn.engine.rewrites.prepare import as_planned, lower_score
from mpnn.graph import Graph, html
from mpnn.round import Round, validation
from mpnn.update import maps

_OF_FEW_ROUNDS = ("scan", "scatter")
_WHOLE = "one call computes attention, maps, norms and network; the backends of the plan would compute attention alone"
_SLOWER = "would run, but is estimated slower"
_OF_A_BATCH = "would be faster, but the last digits of an item's result would change with the other items of its batch"


@dataclass(frozen=True)
class Candidate:
    """One backend, or several that run a rewrite together: the estimate in seconds and bytes, or the reason why it does
    not support the round. `rewrites`: the rewrites that it runs, such as "mean as sum (csr)"."""

    name: str
    seconds: float
    bytes: float
    reason: str | None
    rewrites: str = ""


@dataclass(frozen=True, repr=False)
class Plan:
    """The choice of a backend for a round, as `explain` prints it.

    Attributes:
        backend: the name of the chosen backend.
        candidates: all backends, the fastest first.
        graph, work: the graph and the work in words.
        maps: which products compute the linear maps of the operator, if there is one.
        rewrites: the rewrites that the chosen backend runs.
        slow: why the round is slow, and what would make it fast.
        is_whole_layer: whether one compiled call computes the layer, so that no backend runs.
        layer: for layers of dot-product attention, the compiled call, or why there is none.
        is_named: whether the call named the backend.
    """

    backend: str
    candidates: tuple[Candidate, ...]
    graph: str
    work: str
    maps: str = ""
    rewrites: str = ""
    slow: str = ""
    is_whole_layer: bool = False
    layer: str = ""
    is_named: bool = False

    @property
    def _shown(self) -> list[Candidate]:
        """The candidates, without refusals of backends that serve few rounds."""
        return [c for c in self.candidates if c.reason is None or c.name not in _OF_FEW_ROUNDS]

    def __str__(self) -> str:
        lines = [f"graph   {self.graph}", f"work    {self.work}"]
        lines += [f"layer   {self.layer}"] if self.layer else []
        lines += [f"plan    {self.backend}"]
        lines += [f"by      {self.rewrites}"] if self.rewrites else []
        width = max([10, *(len(c.name) for c in self._shown)])
        chosen = next((c.seconds for c in self._shown if c.name == self.backend), 0.0)
        for c in self._shown:
            if c.reason is None:
                faster = "would run, and is estimated faster" if self.is_named else _OF_A_BATCH
                note = _SLOWER if c.seconds >= chosen else faster
                note = "chosen" if c.name == self.backend else note
                lines.append(f"  {c.name:<{width}} {_seconds(c.seconds):>8}  {_bytes(c.bytes):>8}  {note}")
            else:
                lines.append(f"  {c.name:<{width}} {'-':>8}  {'-':>8}  no: {c.reason}")
        if self.slow:
            lines.append(f"slow    the round {self.slow}")
        if self.maps:
            lines.append(f"maps    {self.maps}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            (c.name, _seconds(c.seconds), _bytes(c.bytes), "chosen" if c.name == self.backend else "")
            if c.reason is None
            else (c.name, "", "", f"no: {c.reason}")
            for c in self._shown
        ]
        above = [self.graph, self.work]
        above += [f"layer: {self.layer}"] if self.layer else []
        above += [f"linear maps: {self.maps}"] if self.maps else []
        return html.table(f"plan: {self.backend}", above, ("backend", "time", "memory", ""), rows)

    def __repr__(self) -> str:
        return f"Plan(backend={self.backend!r})"


def plan(round: Round, backend: str = "auto") -> Plan:
    """The chosen backend, and the estimate or the reason of each candidate."""
    round = as_planned(round, backend)
    chosen = choose(round, backend, estimated=True)
    first = _candidate(chosen)
    candidates = [first, *(_alone(b, round) for b in registered() if chosen.name != b.NAME)]
    candidates.sort(key=lambda c: c.seconds)
    graph = _describe_graph(round)
    work = _describe_work(round)
    slow = slowness.sentence(round, chosen) if backend == "auto" else ""
    is_named = backend != "auto"
    return Plan(chosen.name, tuple(candidates), graph, work, rewrites=first.rewrites, slow=slow, is_named=is_named)


def _alone(backend: Backend, round: Round) -> Candidate:
    """The candidate that runs the round, or all rounds of a rewrite, on this backend."""
    reason = refusal(backend, round)
    if reason is None:
        return _candidate(choose(round, backend.NAME, estimated=True))
    return Candidate(backend.NAME, float("inf"), float("inf"), reason)


def _candidate(choice: Choice) -> Candidate:
    assert choice.estimate is not None
    return Candidate(choice.name, *choice.estimate, None, str(choice) if choice.steps else "")


def explain(op: Any, *features: Any, **call: Any) -> Any:
    """Prints and returns the plan for `op(x, ...)`: the chosen backend with its estimated time and memory, and for
    each other backend its estimate or the reason why it cannot run.

    Args:
        op: a `MessagePassing`, called as `explain(op, x, graph)`, or a `Round` without further arguments. Or a function
            or a model, such as `explain(ops.attend, graph, query, key, value)` and `explain(model, x, graph)`, which
            runs once; it changes neither buffers nor torch's generator.

    Returns:
        A `Plan`. Of a model, or of a function that runs several rounds, a tuple of plans in the order of the calls;
        plans that are equal are printed once.

    Raises:
        TypeError: if `op` has another type, or the arguments do not match the signature of `op`.
        ValueError: a function or a model runs no round.
    """
    if isinstance(op, Round):
        if features or call:
            raise TypeError("explain(round) takes no further arguments")
        described = _plan_of_round(op, "auto")
    elif hasattr(op, "rounds"):
        described = _plan_of_operator(op, features, call)
    elif isinstance(op, nn.Module) or isroutine(op) or isinstance(op, partial):
        return _explain_call(op, features, call)
    else:
        raise TypeError(
            f"op must be a MessagePassing, a function, a model or a Round; got {type(op).__name__}: write "
            "explain(op, x, graph)"
        )
    print(described)
    return described


def _plan_of_round(round: Round, backend: str) -> Plan:
    validation.round(lower_score(round, backend))
    return plan(round, backend)


def _plan_of_operator(op: Any, features: tuple[Any, ...], call: dict[str, Any]) -> Plan:
    """The plan of a `MessagePassing` with these arguments."""
    try:
        bound = signature(op.rounds).bind(*features, **call)
    except TypeError as error:
        raise TypeError(f"explain(op, x, graph, ...) takes what op(...) takes: {error}") from None
    bound.apply_defaults()
    arguments = {**bound.arguments, "cache": deepcopy(bound.arguments["cache"])}  # a call appends to it
    round = op.rounds(**arguments)[0]
    refusal = op.refusal_of_whole_layer(*arguments.values())
    is_whole_layer = refusal is None
    described = "" if is_whole_layer else maps.described(op.modules(), arguments["x"].shape[:-1].numel())
    layer = _WHOLE if refusal is None else _step_by_step(refusal)
    planned = _plan_of_round(round, getattr(op, "backend", "auto"))
    return replace(planned, maps=described, layer=layer, is_whole_layer=is_whole_layer)


def _step_by_step(why: str) -> str:
    """Says why no compiled call computes a layer; empty for operators of other kinds."""
    return f"step by step: {why}" if why else ""


def _plan_of_layer(layer: nn.Module, x: Tensor) -> Plan:
    """The plan of a layer of another library that one compiled call computes in place."""
    graph = "the texts of the call, each complete, or causal in a decoder"
    size = " x ".join(map(str, x.shape))
    work = f"{type(layer).__name__}, {size}, {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
    return Plan("compiled layer", (), graph, work, is_whole_layer=True, layer=_WHOLE)


def _explain_call(function: Any, features: tuple[Any, ...], call: dict[str, Any]) -> Any:
    """Prints and returns the plans of the rounds that run in `function(*features, **call)`."""
    plans_of: list[tuple[str, Plan]] = []
    running: list[str] = []  # the operators whose forward pass runs, which explain their rounds themselves
    left_to_class: list[tuple[str, str]] = []  # the layer of another library that runs, and why no compiled call does
    thread = get_ident()

    def begin(name: str, op: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        running.append(name)
        if len(running) == 1:
            options = {key: value for key, value in keywords.items() if key in signature(op.rounds).parameters}
            plans_of.append((name, _plan_of_operator(op, args, options)))

    def end(*_: Any) -> None:
        running.pop()

    def heard(round: Round, backend: str) -> None:
        if not running and get_ident() == thread:
            running.append("")
            name, why = left_to_class.pop() if left_to_class else ("", "")
            plans_of.append((name, replace(_plan_of_round(round, backend), layer=_step_by_step(why))))
            running.pop()

    def heard_layer(layer: nn.Module, x: Tensor | None, why: str) -> None:
        if running or get_ident() != thread:
            return
        name = names.get(layer, type(layer).__name__)
        if x is not None:
            plans_of.append((name, _plan_of_layer(layer, x)))
        # The next round is that of this layer.
        left_to_class[:] = [(name, why)] if why else []

    module = function if isinstance(function, nn.Module) else nn.Module()
    names = {part: name for name, part in module.named_modules()}
    operators = [(name, one) for name, one in module.named_modules() if hasattr(one, "rounds")]
    handles: list[Any] = []
    for name, one in operators:
        handles.append(one.register_forward_pre_hook(partial(begin, name), with_kwargs=True))
        handles.append(one.register_forward_hook(end, always_call=True))
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with listeners.listening(heard, heard_layer), torch.random.fork_rng(devices=[]):
            function(*features, **call)
    finally:
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    if not plans_of:
        raise ValueError(f"{getattr(function, '__name__', type(function).__name__)} ran no round of message passing")
    _print_plans(plans_of)
    plans = tuple(one for _, one in plans_of)
    return plans[0] if len(plans) == 1 and not isinstance(function, nn.Module) else plans


def _print_plans(plans: list[tuple[str, Plan]]) -> None:
    """Prints plans under the names of the layers that have them."""
    names: dict[Plan, list[str]] = {}
    for name, one in plans:
        names.setdefault(one, []).append(name)
    for one, of in names.items():
        if len(plans) > 1 or plans[0][0]:
            outside = of.count("")
            rounds = f"{outside} round{'s' * (outside > 1)} of functions or of other libraries' layers"
            print(f"{', '.join([*filter(None, of), *[rounds] * bool(outside)])}:")
        print(one)


def _describe_graph(round: Round) -> str:
    graph = round.graph
    if graph.stack:
        return repr(graph)
    dst, src = _count(graph.num_dst), _count(graph.num_src)
    share = graph.num_edges / max(graph.num_dst * graph.num_src, 1)
    size = f"{dst} nodes" if graph.num_dst == graph.num_src else f"{dst} x {src}"
    percent = f"{share:.2%}" if share >= 1e-4 or not share else f"{100 * share:.1g}%"
    named = f"{graph.name}: " if graph.name else ""
    text = f"Graph({named}{size}, {_count(graph.num_edges)} edges), {percent} of all pairs{_from_later(graph)}"
    if graph.is_explicit:
        return text
    if graph.parts is not None and graph.parts.is_complete and graph.parts.count > 1:
        return f"{text}, {_count(graph.parts.count)} cliques"
    return f"{text}, {_count(graph.runs.num_runs)} runs"


def _from_later(graph: Graph) -> str:
    """Says of a graph whose expression has causal() that a node receives from a later one."""
    is_meant_causal = "causal()" in (graph.name or "") and graph.num_dst == graph.num_src
    late = graph.cached("an edge from the future", graph.runs.edge_from_later) if is_meant_causal else None
    if late is None:
        return ""
    return f", not causal: node {late[0]} receives from node {late[1]} (causal() & (...) takes only earlier ones)"


def _describe_work(round: Round) -> str:
    value = round.value
    what = (
        "aggregation"
        if round.score is None
        else f"{getattr(round.score, 'label', type(round.score).__name__)} attention, {round.normalize}"
    )
    batch = "" if not round.batch else f", batch {' x '.join(map(str, round.batch))}"
    grad = "with gradients" if round.needs_grad else "without gradients"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{what}, {round.heads} x {value.shape[-1]}{batch}, {dtype} on {value.device.type}, {grad}"


def _count(n: float) -> str:
    """All digits of a number below a million, three of others: 5,050, 12.5 M, 500 G."""
    return f"{n:,}" if n < 1e6 else _scaled(n / 1e6, "MGTPE", "3g")


def _seconds(s: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if s >= 2 * size:
            return f"{s / size:,.1f} {unit}"
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.0f} us"


def _bytes(b: float) -> str:
    return _scaled(b, ("B", "kB", "MB"), "0f") if b < 999.5e6 else _scaled(b / 1e9, ("GB", "TB", "PB"), "1f")


def _scaled(x: float, units: Sequence[str], digits: str) -> str:
    """The number in the first unit in which it is below 1,000; each unit is 1,000 times the one before."""
    for unit in units[:-1]:
        if float(f"{x:.{digits}}") < 1000:
            return f"{x:.{digits}} {unit}"
        x /= 1000
    return f"{x:,.{digits}} {units[-1]}"
