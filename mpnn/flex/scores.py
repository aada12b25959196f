"""Score mods: functions of scores as factors, biases and fewer edges of a round of attention.

A score_mod is traced to

    factor * score, or factor * tanh(inner * score); plus biases, and -inf where a condition does not hold

whose numbers are functions of (b, h, q_idx, kv_idx): biases of nodes, by offset or per edge, and multiples of the query
or the key. Any other score_mod is refused with the operation that does not fit.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from mpnn import ops
from mpnn.flex.programs import KV, B, Node, Program, Q, ancestors, call
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable, PerEdge
from mpnn.graph.relations import Offset
from mpnn.ops import NodeBias

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Form:
    """factor * score, or factor * tanh(inner * score); then the biases, and -inf where a condition does not hold. Each
    is a number or a node of the program."""

    program: Any = None
    factor: Any = 1.0
    inner: Any = None
    biases: tuple[Any, ...] = ()
    conditions: tuple[Any, ...] = ()

    def times(self, number: Any) -> "Form | None":
        if isinstance(number, Form) or self.conditions:  # -inf times a number may be another one
            return None
        factor, *biases = (self.program.product(x, number) for x in (self.factor, *self.biases))
        return replace(self, factor=factor, biases=tuple(biases))

    def plus(self, number: Any) -> "Form | None":
        if isinstance(number, Form):
            return None
        if isinstance(number, Node) and number.target is _aten.where.self:
            condition, value, other = number.args
            if self.program.at(other).constant() == -inf:
                return replace(self, biases=(*self.biases, value), conditions=(*self.conditions, condition))
        return replace(self, biases=(*self.biases, number))


def form_of(program: Program) -> Form:
    """Returns the form of a score_mod."""
    forms: dict[Any, Form] = {program.inputs[0]: Form(program)}
    needed = ancestors(program.node)  # not what autograd stores
    for node in program.nodes:
        if node in needed and node.target is not None and any(x in forms for x in node.inputs):
            operands = [forms.get(x, x) if isinstance(x, Node) else x for x in node.args]
            form = _operation(node.target, *operands, **node.kwargs)
            if form is None:
                raise ValueError(
                    f"mpnn.flex does not run this score_mod, because of {node.target}: it may add functions of (b, h, "
                    "q_idx, kv_idx), multiply by functions of (b, h, q_idx) or (b, h, kv_idx), apply c * tanh(score / c"
                    ") before it adds, and return -inf by torch.where; other scores are written as in mpnn.scores"
                )
            forms[node] = form
    if program.node not in forms:
        raise ValueError("score_mod must return a function of the score")
    return forms[program.node]


def _operation(target: Any, x: Any, y: Any = None, z: Any = None, **options: Any) -> Form | None:
    """The form of an operation on forms, nodes and numbers; None if it has none."""
    form, other = (x, y) if isinstance(x, Form) else (y, x)
    match str(target):
        case "aten.add.Tensor" if not options:
            return form.plus(other)
        case "aten.sub.Tensor" if not options and form is x:
            return None if isinstance(y, Form) else form.plus(form.program.product(y, -1.0))
        case "aten.sub.Tensor" | "aten.rsub.Scalar" if not options:
            negative = form.times(-1.0)
            return negative and negative.plus(other)
        case "aten.mul.Tensor":
            return form.times(other)
        case "aten.div.Tensor" if form is x and not isinstance(y, Form):
            is_node = isinstance(y, Node)
            return form.times(call(_aten.reciprocal.default, y) if is_node else 1 / y)
        case "aten.neg.default":
            return form.times(-1.0)
        case "aten.tanh.default" if not (form.biases or form.conditions or form.inner is not None):
            return replace(form, factor=1.0, inner=form.factor)
        case "aten.where.self" if not isinstance(x, Form) and not (isinstance(y, Form) and isinstance(z, Form)):
            form, other = (y, z) if isinstance(y, Form) else (z, y)
            if form.program.at(other).constant() == -inf:
                holds = x if form is y else call(_aten.logical_not.default, x, result=torch.ones((), dtype=torch.bool))
                return replace(form, conditions=(*form.conditions, holds))
        case "aten.clone.default":
            return form
        case "aten._to_copy.default" if options.get("dtype", torch.float64) in (torch.float32, torch.float64):
            return form
    return None


def attend(
    query: Tensor, key: Tensor, value: Tensor, form: Form, scale: float, lse: bool, graph: Graph, b: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns out [B, H, N, D_v] for some entries of the batch and some heads, and lse [B, H, N], or a tensor
    without values in its place."""
    q, k, v = (x if len(b) == len(x) else x[b] for x in (query, key, value))
    if len(h) < query.shape[1]:
        shared = h // (query.shape[1] // key.shape[1])
        q = q[:, h]
        k = k[:, shared]
        v = v[:, shared]
    factor = form.factor
    softcap = None
    program = form.program
    if form.inner is not None:
        number = program.at(form.factor).constant()
        if not number:
            raise ValueError("score_mod may multiply a tanh by one number other than 0, without gradient")
        factor = program.product(form.inner, number)
        softcap = abs(number)
    if isinstance(factor, Node):
        q, k = _scaled(program.at(factor), q, k, b, h)
        factor = 1.0
    dtype = torch.promote_types(q.dtype, torch.float32)
    biases = tuple(_bias(program.at(x), graph, b, h, dtype) for x in form.biases)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = ops.attend(graph, q, k, v, bias=biases or None, scale=scale * factor, softcap=softcap, return_lse=lse)
    out, more = out if lse else (out, out.new_empty(*out.shape[:3]))
    return out.transpose(1, 2), more.transpose(1, 2)


def _scaled(number: Program, q: Tensor, k: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, H, N, D], of which one is multiplied by numbers of its nodes."""
    of = number.depends_on()
    if {Q, KV} <= of:
        raise ValueError("mpnn.flex does not run a score_mod that multiplies by a function of both q_idx and kv_idx")
    if KV not in of:
        at = torch.arange(q.shape[2])
        return q * number.over(b, h, at, at)[..., None].to(q.dtype), k
    at = torch.arange(k.shape[2])
    shared = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(shared, 1) * number.over(b, h, at, at)[..., None].to(k.dtype)


def _bias(number: Program, graph: Graph, b: Tensor, h: Tensor, dtype: torch.dtype) -> PerEdge | NodeBias:
    """Numbers as a bias: of sources, of destinations, by offset, or per edge."""
    of = number.depends_on()

    def over(q: Tensor, kv: Tensor) -> Tensor:
        return number.over(b, h, q, kv).to(dtype).transpose(1, 2)  # [B, E, H]

    if not {Q, KV} <= of:
        size = graph.num_src if KV in of else graph.num_dst
        numbers = over(torch.arange(size), torch.arange(size)).expand(len(b), size, -1)
        return NodeBias(src=numbers) if KV in of else NodeBias(dst=numbers)
    if B not in of and number.is_by_offset() and graph.num_edges:
        runs = graph.runs
        least, most = int((runs.start - runs.row).min()), int((runs.stop - 1 - runs.row).max())
        clip = max(-least, most)
        offset = torch.arange(-clip, clip + 1).clamp(least, most)  # others have no edge
        return BiasTable(over((-offset).clamp(0), offset.clamp(0))[0], Offset(clip))
    src, dst = graph.edge_index
    return over(dst, src)
