"""Rounds by operations that are differentiable any number of times: the references of kernels, which derivatives of
higher order are those of (`mpnn.kernels.derivatives.Fused`). A kernel keeps the round without its tensors, `form`, and
its reference runs the round with the tensors that autograd saved, by the names of fields.

    l_ij = scale <q_i, k_j>        out_i = sum_j w_ij v_j        dl_ij = <dout_i, v_j> and so on

Products of edges and weighted sums are each other's derivatives, so that two kernels suffice to any order, without a
tensor of E x D numbers. All else is numbers of edges, E x H, by torch's operations.
"""

from typing import Any, TypeVar

from torch import Tensor

from mpnn.backends import edge_list, edge_orders
from mpnn.backends.edge_list import Kernels
from mpnn.graph.csr import CSR
from mpnn.kernels.cpu import library
from mpnn.kernels.rows.reduce import Adjoint, LinearReduce
from mpnn.kernels.rows.rows import Rows
from mpnn.round import Result, Round
from mpnn.scores import Dot, Score

T = TypeVar("T", Round, Score)


def form(round: Round) -> Round:
    """The round without its tensors but the seed."""
    score: Any = round.score
    bare = _with(round, dict.fromkeys(_TENSORS))
    bare.score = None if score is None else _with(score, dict.fromkeys(score.roles))
    return bare


_TENSORS = Round.roles.keys() - {"seed"}


def filled(form: Round, score: dict[str, Any], **fields: Any) -> Round:
    """The round of this form with these fields, and with those of its score."""
    of_score: Any = form.score
    bias = tuple(x for x in fields.pop("bias", ()) if x is not None)
    return _with(form, fields, bias=bias, score=None if of_score is None else _with(of_score, score))


def _with(x: T, fields: dict[str, Any], **more: Any) -> T:
    other = object.__new__(type(x))
    other.__dict__ = vars(x) | fields | more
    return other


def run(round: Round) -> Result:
    """The result of a round."""
    by_kernels = round.value.is_cpu and library.why_missing() is None and round.graph.num_edges > 0
    return edge_list.run(round, _KERNELS if by_kernels and not round.recurrent else None)


def _products(round: Round, csr: CSR) -> Tensor | None:
    """The logits of a score, [E, ..., H] in CSR order; None for scores that are no plain products."""
    score = round.score
    if not isinstance(score, Dot) or score.edge_key is not None:
        return None
    query, key = (_flat(x, round) for x in (score.query, score.key))
    ones = query.new_ones(len(query), round.graph.num_edges, round.heads)
    _, products = Adjoint.apply(query, key, ones, *_rows(round))
    products = products.unflatten(0, round.batch) if round.batch else products.squeeze(0)
    logits = score.scale * csr.from_caller(products.movedim(-2, 0))
    return logits if score.softcap is None else score.softcap * (logits / score.softcap).tanh()


def _sums(weights: Tensor, round: Round, csr: CSR) -> Tensor:
    """The sums of weighted values, [N, ..., H, D], of weights [E, ..., H] in CSR order."""
    weights = weights.expand(len(weights), *round.batch, round.heads)
    weights = csr.to_caller(weights).movedim(0, -2).flatten(0, -3) if round.batch else csr.to_caller(weights)[None]
    out = LinearReduce.apply(_flat(round.value, round), weights.contiguous(), *_rows(round), "sum")
    out = out.view(*round.batch, round.graph.num_dst, round.heads, -1)
    return out.movedim(-3, 0)


_KERNELS = Kernels(_products, _sums)


def _rows(round: Round) -> tuple[Rows, Rows]:
    return edge_orders.in_order(round.graph, transposed=False), edge_orders.in_order(round.graph, transposed=True)


def _flat(x: Tensor, round: Round) -> Tensor:
    """Features [..., N, H_kv, D] as [B, N, H * D]."""
    x = x.to(round.accumulate_dtype)
    x = x.repeat_interleave(round.heads // x.shape[-2], -2) if x.shape[-2] < round.heads else x
    return x.reshape(round.batch.numel(), x.shape[-3], x.shape[-2:].numel()).contiguous()
