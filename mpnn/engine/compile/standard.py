"""Rounds as standard operators, for `torch.onnx.export(model, ..., dynamo=True)`.

ONNX has no operator for a round. While torch converts an exported program, `torch.ops.mpnn.run` is replaced by matrix
products, a softmax and a mask that the program computes from the sizes, so that one file serves all lengths. The mask
takes N x M numbers: what runs elsewhere is a dense attention with the graph's numbers, and not a sparse kernel.

Served are rounds over topologies in `MASKS`, and the set operators on them, with dot-product scores, biases by offset
and of nodes, sinks and sums or means. Anything else is refused with its name.

Edges that are an input of the program (`graphs.from_edges` inside the model) stay edges: the reference, `edge_list`,
runs over them in the order in which they come, with gathers and scatters in place of its row pointers. It then serves
all scores and biases, and E x H x D numbers are written.
"""

import ast
from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from mpnn.aggregate import Index, Max, Mean, Min, Sum
from mpnn.backends import edge_list
from mpnn.engine.compile.form import Call, Sizes, read, unflatten
from mpnn.graph import Graph
from mpnn.graph.csr import CSR
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.round.needs import class_of, first, name_of
from mpnn.scores import Dot

_NEEDS = "torch.onnx.export converts rounds over edges that are inputs, and dot-product attention over topologies"


# torch refuses constants, torch.tensor(...), in what replaces an operator, so lists become sums of comparisons.


def _documents(i: Tensor, j: Tensor, lengths: list[int]) -> Tensor:
    # A node's document is the number of documents that end before it. Without documents the sum is 0, not a tensor, to
    # which `0 * x` gives a shape.
    rows, columns = (sum((x >= end).int() for end in accumulate(lengths)) + 0 * x for x in (i, j))
    return rows == columns


def _global_nodes(i: Tensor, j: Tensor, nodes: int | list[int]) -> Tensor:
    if isinstance(nodes, int):
        return (i < nodes) | (j < nodes)
    return reduce(or_, ((x == node) for node in nodes for x in (i, j)), (i < 0) & (j < 0))


def _window(i: Tensor, j: Tensor, radius: int, dilation: int = 1) -> Tensor:
    near = (i - j).abs() <= radius * dilation
    return near if dilation == 1 else near & ((i - j) % dilation == 0)


def _strided(i: Tensor, j: Tensor, stride: int) -> Tensor:
    return (j <= i) & ((i - j < stride) | ((i - j) % stride == 0))


MASKS: dict[str, Callable[..., Tensor]] = {
    "complete": lambda i, j: (i >= 0) & (j >= 0),
    "causal": lambda i, j: j <= i,
    "identity": lambda i, j: i == j,
    "window": _window,
    "prefix": lambda i, j, k: (j < k) | (j <= i),
    "documents": _documents,
    "global_nodes": _global_nodes,
    "longformer": lambda i, j, window, globals=0: _window(i, j, window // 2) | _global_nodes(i, j, globals),
    "strided": _strided,
}
"""Whether i attends to j, from positions that broadcast, by the name and arguments of a topology."""


def run_in_trace(mode: ProxyTorchDispatchMode, op: Any, types: Any, arguments: Any, options: Any) -> Any:
    """Returns the result that torch records for `torch.ops.mpnn.run` in a program: the operator, or in an export to
    ONNX, standard ones.

    A table of decompositions would do it too, but with one Inductor refuses the operator where the environment variable
    `CI` is set.
    """
    if mode.pre_dispatch or not torch.onnx.is_in_onnx_export():
        return mode.__torch_dispatch__(op, types, arguments, options)
    with mode:
        return run(*arguments)


def run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `torch.ops.mpnn.run` by standard operators."""
    call = Call(*arguments)
    form = read(call.form)
    stand_in: Any = Sizes(call.sizes)
    if call.token.dim() == 2 and not form.derived:
        stand_in.csr = _Edges(call.token, *call.sizes[:2])
        out = _over_edges(unflatten(call, cast(Graph, stand_in)))
    elif form.topology:
        i, j = (torch.arange(n, device=call.tensors[0].device) for n in call.sizes[:2])
        allowed = mask(form.topology, i[:, None], j[None])
        out = _attend(unflatten(call, cast(Graph, stand_in)), allowed, j[None] - i[:, None])
    else:
        raise NotImplementedError(
            f"{_NEEDS}; this layer runs over a graph that it holds: take the edges as an input, and build the graph in "
            "the model's forward, graphs.from_edges(edge_index, x.shape[-2])"
        )
    return out, out.new_empty(0), torch.zeros((), dtype=torch.int64)


class _Edges:
    """Edges [2, E] in the caller's order, as `edge_list` reads those of a `CSR` and of an `Index`."""

    def __init__(self, edges: Tensor, num_dst: Any, num_src: Any) -> None:
        self.col, self.row = edges
        self.num_dst = num_dst
        self.plain = self.row

    @property
    def degree(self) -> Tensor:
        return self.row.new_zeros(self.num_dst).index_add(0, self.row, torch.ones_like(self.row))

    def from_caller(self, per_edge: Tensor) -> Tensor:
        return per_edge


def mask(text: str, i: Tensor, j: Tensor) -> Tensor:
    """Whether i attends to j in the topology of this text; the positions broadcast.

    Raises:
        NotImplementedError: the text holds a topology without a mask here.
    """

    def of(node: ast.expr) -> Tensor:
        match node:
            case ast.BinOp(left, ast.BitOr(), right):
                return of(left) | of(right)
            case ast.BinOp(left, ast.BitAnd(), right):
                return of(left) & of(right)
            case ast.BinOp(left, ast.Sub(), right):
                return of(left) & ~of(right)
            case ast.UnaryOp(ast.Invert(), inner):
                return ~of(inner)
            case ast.Call(ast.Attribute(inner, "with_relation"), _, []):
                return of(inner)
            case ast.Call(ast.Name(name), args, keywords) if name in MASKS and all(k.arg != "inner" for k in keywords):
                named = {str(k.arg): ast.literal_eval(k.value) for k in keywords}
                return MASKS[name](i, j, *map(ast.literal_eval, args), **named)
        raise NotImplementedError(f"{_NEEDS} of {', '.join(MASKS)}; got {ast.unparse(node)}")

    return of(ast.parse(text, mode="eval").body)


def _over_edges(round: Round) -> Tensor:
    """[..., N_dst, H, D] of a round whose graph has `_Edges`."""
    _refuse_any(round, round.normalize in ("sparsemax", "entmax15"), tuple(_SCATTERS))
    edges: Any = round.graph.csr
    weights = edge_list.sum_of_logits(round, cast(CSR, edges), None)
    if weights is not None:
        weights = _normalized(
            round,
            weights,
            None if round.sinks is None else round.sinks.to(weights.dtype),
            lambda x, how: _scattered(x, edges, how),
            lambda x: x.index_select(0, edges.row),
        )
    round = round.with_fields(reduce=_Reduce(*_SCATTERS[type(round.reduce)]))
    out = edge_list.reduced(weights, round, cast(CSR, edges), edges)
    return (out.movedim(0, -3) if round.batch else out).to(round.result_dtype).contiguous()


_SCATTERS = {Sum: ("add", False), Mean: ("add", True), Max: ("max", False), Min: ("min", False)}
"""How messages are reduced, and whether the result is divided by their number."""


class _Reduce:
    """An aggregator of messages in any order."""

    def __init__(self, how: str, divides: bool) -> None:
        self.how = how
        self.divides = divides

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        out = _scattered(messages, cast(Any, index), self.how)
        degree = index.degree.view(-1, *[1] * (out.dim() - 1))
        return out / degree.clamp(min=1) if self.divides else out.masked_fill(degree == 0, 0.0)


def _scattered(messages: Tensor, edges: _Edges, how: str) -> Tensor:
    """The sum, the largest or the smallest of each destination's messages [E, ...]; without any, 0 or an infinity."""
    empty = {"add": 0.0, "max": -torch.inf, "min": torch.inf}[how]
    start = messages.new_full((edges.num_dst, *messages.shape[1:]), empty)
    if how == "add":
        return start.index_add(0, edges.row, messages)
    if torch.onnx.is_in_onnx_export():
        # torch converts scatter_reduce to an operator that takes an index of each number, and many times as long.
        inputs = start, edges.row[:, None], messages
        options: Any = {"dtype": start.dtype, "shape": start.shape, "version": 18}
        return torch.onnx.ops.symbolic("ScatterND", inputs, {"reduction": how}, **options)
    rows = edges.row.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
    return start.scatter_reduce(0, rows, messages, f"a{how}")


def _attend(round: Round, allowed: Tensor, offset: Tensor) -> Tensor:
    """[..., N_dst, H, D] of a round over the pairs that are allowed, [N_dst, N_src]."""
    _refuse(round)
    value = round.value.transpose(-3, -2)
    accumulate = round.accumulate_dtype
    weights = allowed.to(accumulate)
    if round.weighted:
        logits = _logits(round, offset)
        logits = logits.masked_fill(~allowed, -torch.inf) if round.normalize == "softmax" else logits
        sinks = None if round.sinks is None else round.sinks.to(accumulate)[:, None, None]
        # The softmax of a row without edges may be any numbers, which the mask makes 0.
        weights = _normalized(round, logits, sinks, _along_rows, lambda x: x) * weights
    if type(round.reduce) is Mean:
        weights = weights / allowed.sum(-1, keepdim=True).clamp(min=1)
    # Weights without a score may still have heads, those of a bias. A bare mask has none.
    heads = weights.shape[-3] if weights.dim() > 2 else value.shape[-3]
    out = weights @ _repeated(value, heads).to(accumulate)
    return out.transpose(-3, -2).to(round.result_dtype).contiguous()


def _along_rows(x: Tensor, how: str) -> Tensor:
    return x.amax(-1, keepdim=True) if how == "max" else x.sum(-1, keepdim=True)


def _normalized(
    round: Round,
    logits: Tensor,
    sinks: Tensor | None,
    of_rows: Callable[[Tensor, str], Tensor],
    at_edges: Callable[[Tensor], Tensor],
) -> Tensor:
    """The weights of logits; those of a row without edges are 0 or any number.

    Args:
        sinks: they broadcast with numbers of rows. of_rows: the largest ("max") or the sum ("add") of the numbers of
            each row. at_edges: the number of each edge's row.
    """
    if round.normalize != "softmax":
        return logits.sigmoid() if round.normalize == "sigmoid" else logits
    largest = of_rows(logits, "max")
    largest = largest if sinks is None else torch.maximum(largest, sinks)
    # The maximum of a row without edges is -inf, and -inf - -inf would be NaN.
    largest = largest.clamp(min=torch.finfo(largest.dtype).min)
    exponentials = (logits - at_edges(largest)).exp()
    total = of_rows(exponentials, "add")
    total = total if sinks is None else total + (sinks - largest).exp()
    # The total of such a row is 0, which must not divide 0.
    return exponentials / at_edges(total.clamp(min=torch.finfo(total.dtype).tiny))


def _logits(round: Round, offset: Tensor) -> Tensor:
    """The logits of all pairs, [..., H, N_dst, N_src]."""
    terms = []
    dtype = round.accumulate_dtype
    if isinstance(score := round.score, Dot):
        query = score.query.transpose(-3, -2).to(dtype)
        key = _repeated(score.key.transpose(-3, -2), query.shape[-3]).to(dtype)
        products = score.scale * (query @ key.transpose(-1, -2))
        terms.append(products if score.softcap is None else score.softcap * (products / score.softcap).tanh())
    # A bias may have a dtype of its own, as ALiBi's float64 slopes do. Backends cast it in the same way.
    for table in cast(Any, round.bias):
        clip = table.relation.clip
        terms.append(table.table.to(dtype)[offset.clamp(-clip, clip) + clip].permute(2, 0, 1))
    if round.dst_bias is not None:
        terms.append(round.dst_bias.to(dtype).transpose(-1, -2)[..., None])
    if round.src_bias is not None:
        terms.append(round.src_bias.to(dtype).transpose(-1, -2)[..., None, :])
    # `sum` alone would begin with the number 0: one operator more in the file.
    return sum(terms[1:], terms[0])


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Heads of keys or values [..., H_kv, N, D] for as many heads as queries have."""
    shared = heads // x.shape[-3]
    return x if shared == 1 else x.repeat_interleave(shared, -3)


def _refuse(round: Round) -> None:
    """Raises NotImplementedError if a round has what is not served over topologies."""
    score = round.score
    tables = all(type(b) is BiasTable and type(b.relation) is Offset for b in round.bias)
    reasons = {
        "additive and other scores": score is not None and (type(score) is not Dot or score.edge_key is not None),
        "biases of edges other than a table by offset": not tables,
        "vectors of edges": round.edge_value is not None,
    }
    _refuse_any(round, any(reasons.values()), (Sum, Mean), first(reasons) or "")


def _refuse_any(round: Round, applies: bool, aggregators: tuple[type, ...], what: str = "") -> None:
    """Raises NotImplementedError with `what` if it applies, or if the round has what is served nowhere."""
    reasons = {
        what or f"normalize={round.normalize!r}": applies,
        "softmax over destinations": round.normalize == "softmax_dst",
        "heads that mix": round.mix_logits is not None or round.mix_weights is not None,
        "dropout (call eval() first)": bool(round.dropout),
        f"the aggregator {name_of(round.reduce)}": class_of(round.reduce) not in aggregators,
        "returned weights or log-sum-exps": round.return_weights or round.return_lse,
        "recurrences": round.recurrent,
    }
    if (reason := first(reasons)) is not None:
        raise NotImplementedError(f"{_NEEDS}; this one has {reason}")
