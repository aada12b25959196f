"""Rounds as standard operators, for `torch.onnx.export(model, ..., dynamo=True)`.

ONNX has no operator for a round. While torch converts an exported program, `torch.ops.mpnn.run` is replaced by matrix
products, a softmax and a mask that the program computes from the sizes, so that one file serves all lengths. The mask
takes N x M numbers: what runs elsewhere is a dense attention with the graph's numbers, and not a sparse kernel.

Served are rounds over topologies in `MASKS`, and the set operators on them, with dot-product scores, biases by offset
and of nodes, sinks and sums or means. Anything else is refused with its name.
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

from mpnn.aggregate import Mean, Sum
from mpnn.engine.compile.form import Call, read, unflatten
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import Dot

_NEEDS = "torch.onnx.export converts rounds over topologies with dot-product attention"


# torch refuses constants, torch.tensor(...), in what replaces an operator, so lists become sums of comparisons.


def _documents(i: Tensor, j: Tensor, lengths: list[int]) -> Tensor:
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
    """What torch records of `torch.ops.mpnn.run` in a program: the operator, or in an export to ONNX, standard ones.

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
    text = read(call.form).topology
    if not text:
        raise NotImplementedError(f"{_NEEDS}; this layer runs over explicit edges, or over a graph of one size")
    i, j = (torch.arange(n, device=call.tensors[0].device) for n in call.sizes[:2])
    stand_in: Any = _Positions(*call.sizes[:2])
    out = _attend(unflatten(call, cast(Graph, stand_in)), mask(text, i[:, None], j[None]), j[None] - i[:, None])
    return out, out.new_empty(0), torch.zeros((), dtype=torch.int64)


class _Positions:
    """The sizes of a graph, which are symbols."""

    def __init__(self, num_dst: Any, num_src: Any) -> None:
        self.num_dst, self.num_src = num_dst, num_src


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


def _attend(round: Round, allowed: Tensor, offset: Tensor) -> Tensor:
    """[..., N_dst, H, D] of a round over the pairs that are allowed, [N_dst, N_src]."""
    _refuse(round)
    value = round.value.transpose(-3, -2)
    accumulate = round.accumulate_dtype
    weights = allowed.to(accumulate)
    if round.weighted:
        logits = _logits(round, offset)
        if round.normalize == "none":
            weights = logits * weights
        elif round.normalize == "sigmoid":
            weights = logits.sigmoid() * weights
        else:
            weights = _softmax(logits.masked_fill(~allowed, -torch.inf), round.sinks) * weights
    if type(round.reduce) is Mean:
        weights = weights / allowed.sum(-1, keepdim=True).clamp(min=1)
    heads = weights.shape[-3] if weights.dim() > 2 else value.shape[-3]
    out = weights @ _repeated(value, heads).to(accumulate)
    return out.transpose(-3, -2).to(round.result_dtype).contiguous()


def _softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of each row; those of a row without edges are 0 or any number."""
    largest = logits.amax(-1, keepdim=True)
    if sinks is not None:
        largest = torch.maximum(largest, sinks[:, None, None])
    largest = largest.clamp(min=torch.finfo(logits.dtype).min)
    exponentials = (logits - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    total = total if sinks is None else total + (sinks[:, None, None] - largest).exp()
    return exponentials / total.clamp(min=torch.finfo(logits.dtype).tiny)


def _logits(round: Round, offset: Tensor) -> Tensor:
    """The logits of all pairs, [..., H, N_dst, N_src]."""
    terms = []
    if isinstance(score := round.score, Dot):
        query = score.query.transpose(-3, -2).to(round.accumulate_dtype)
        key = _repeated(score.key.transpose(-3, -2), query.shape[-3]).to(round.accumulate_dtype)
        products = score.scale * (query @ key.transpose(-1, -2))
        terms.append(products if score.softcap is None else score.softcap * (products / score.softcap).tanh())
    for table in cast(Any, round.bias):
        clip = table.relation.clip
        terms.append(table.table[offset.clamp(-clip, clip) + clip].permute(2, 0, 1))
    if round.dst_bias is not None:
        terms.append(round.dst_bias.transpose(-1, -2)[..., None])
    if round.src_bias is not None:
        terms.append(round.src_bias.transpose(-1, -2)[..., None, :])
    return sum(terms[1:], terms[0])


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Heads of keys or values [..., H_kv, N, D] for as many heads as queries have."""
    shared = heads // x.shape[-3]
    return x if shared == 1 else x.repeat_interleave(shared, -3)


def _refuse(round: Round) -> None:
    """Raises NotImplementedError if a round has what is not served here."""
    tables = all(type(b) is BiasTable and type(b.relation) is Offset for b in round.bias)
    score = round.score
    reasons = {
        "additive and other scores": score is not None and (type(score) is not Dot or score.edge_key is not None),
        "biases of edges other than a table by offset": not tables,
        "vectors of edges": round.edge_value is not None,
        "softmax over destinations": round.normalize == "softmax_dst",
        "dropout (call eval() first)": bool(round.dropout),
        f"the aggregator {type(round.reduce).__name__}": type(round.reduce) not in (Sum, Mean),
        "returned weights or log-sum-exps": round.return_weights or round.return_lse,
        "recurrences": round.recurrent,
    }
    for what, applies in reasons.items():
        if applies:
            raise NotImplementedError(f"{_NEEDS}; this one has {what}")
