"""Dot-product attention over dense blocks of pairs, by torch's scaled dot product attention.

A block is the whole graph (complete, causal, or small enough for a mask), or one of its parts, complete or
causal. Those of one size run as a batch; parts of all sizes run in one kernel where torch has it. Features that
torch's kernels lack (soft capping, sinks, other normalizers, dropout with the same mask in every backend, returned
weights) are computed by torch operations on the logits of the block.

NaN and infinities of a node can reach rows of its block that do not attend to it: a mask's zero times NaN is NaN, in
torch's kernels too. If a query is NaN but the values are not, torch's CPU kernel returns numbers instead of NaN over
fewer than 8 sources. A check of the result would add 6 to 35 % to a call over up to 64 nodes, and synchronize a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.backends.cost_model import Estimate, both_ways, kind_of, of_biases, priced
from mpnn.graph import Graph, rng
from mpnn.graph.bound import cached_on_graph
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, numbers, per_edge, total
from mpnn.graph.modes import is_differentiated_by_transform, is_transformed
from mpnn.graph.relations import Offset, Relation
from mpnn.graph.row_groups import row_groups
from mpnn.graph.runs import Ints
from mpnn.kernels.dense import pair_tables, varlen
from mpnn.kernels.derivatives import attention, differentiable_again
from mpnn.kernels.parts import Parts
from mpnn.round import Result, Round, reads
from mpnn.round.needs import DEVICES, FLOATS, NORMALIZED, by_rule, on_edges
from mpnn.scores import Dot

NAME = "dense"
TRACED = True

_MAX_PAIRS = 1 << 26  # of a mask; 64 MB
_FRESH = 1 << 25  # bytes of logits from which on the system allocates them in each call, at a cost for each page
_FEW_PAIRS = 1 << 16  # up to which `vmap` computes attention by its formula
_TILE = 128  # rows that the flash kernel computes together
_MAX_SCORES = 1 << 29  # of logits in memory, over all heads and batches; 2 GB in float32


SERVES = (
    FLOATS | DEVICES | NORMALIZED | on_edges("bias") | by_rule("edge_key") | by_rule("edge_value")
    | {"Dot", "softmax_dst", "bias by nodes"}
    | {"sum", "softcap", "sinks", "dropout", "head_ids", "node_ids", "return_weights"}
    | {"explicit graph", "gradient"}
)  # fmt: skip
_FOR_PAIRS = "edge_key and edge_value would be materialized for all pairs, unless they are tables by relation"
REASONS = {"return_lse": "torch's kernels do not return lse"} | dict.fromkeys(
    on_edges("edge_key") | on_edges("edge_value"), _FOR_PAIRS
)


class _Facts:
    """The facts about a round of dot products that decide how it runs and what this costs.

    Attributes:
        tables: `edge_key` and `edge_value`, if present.
        shape: that of the graph if torch's kernels support it without a mask, else None.
        biased: whether a bias is added to the logit of each pair.
        materialized: whether the logits are written here, because torch's kernels lack a feature of the round.
        groups: the graph as groups of rows, where torch's flash kernel computes attention within them; else None.
        parts: the parts to run one by one, or None.
        pairs: the number of pairs of nodes to compute.
    """

    def __init__(self, round: Round) -> None:
        score = cast(Dot, round.score)
        graph = round.graph
        self.round = round
        self.score = score
        vectors = (score.edge_key, round.edge_value)
        self.tables = [cast(EmbeddingTable, table) for table in vectors if table is not None]
        self.shape = _plain_shape(graph)
        self.biased = round.biased or score.edge_key is not None
        plain = round.normalize == "softmax" and score.softcap is None and round.sinks is None and not round.dropout
        plain = plain and not round.return_weights and round.edge_value is None
        self.materialized = not plain or (self.biased and not _takes_bias(round))
        self.groups = self._groups()
        self.parts = _parts_of(round)

    @property
    def direct(self) -> Callable[[Tensor, Tensor, Tensor, float], Tensor] | None:
        """A function of query, key, value and scale that runs all rounds of this form, if torch's kernel suffices."""
        return None if self.biased or self.materialized else _DIRECT.get(self.shape)

    @property
    def pairs(self) -> int:
        graph = self.round.graph
        return graph.num_dst * graph.num_src if self.parts is None else int((self.parts.lengths**2).sum())

    @property
    def masked(self) -> bool:
        """Whether torch gets a mask of the graph."""
        return self.parts is None and self.shape is None

    @property
    def heads(self) -> int:
        """The heads of all entries of the batch."""
        return self.round.batch.numel() * self.round.heads

    @property
    def classes(self) -> int:
        """The total number of rows of `edge_key` and `edge_value`."""
        return sum(len(vectors.table) for vectors in self.tables)

    @property
    def written(self) -> bool:
        """Whether the logits are materialized, here or by torch: its kernels do not differentiate biases."""
        if self.materialized or not self.biased or not torch.is_grad_enabled():
            return self.materialized
        keys = self.score.edge_key
        learned = [*self.round.biases, *([] if keys is None else [keys, self.score.query])]
        return any(numbers(x).requires_grad for x in learned)

    def _groups(self) -> "list[_Packed] | None":
        round = self.round
        score = self.score
        plain = not self.biased and not self.materialized and score.scale > 0
        same_heads = score.key.shape[-2] == round.value.shape[-2]
        batch = round.batch.numel()
        if not (plain and same_heads and batch > 0 and varlen.runs_here(score.query, round.value)):
            return None
        return round.graph.cached(("packed rows", batch), lambda: _pack(round.graph, batch))


def _takes_bias(round: Round) -> bool:
    """Whether torch's kernels take a bias of these features."""
    # With 16-bit features they accept a float32 bias on CPU only.
    is_wide = round.value.dtype == round.accumulate_dtype or round.value.is_cpu
    # Without any pair, the result of torch's kernels is not connected to the bias in autograd.
    return is_wide and round.graph.num_dst * round.graph.num_src * round.batch.numel() > 0


def runs_by_parts(round: Round) -> bool:
    """Whether each part of the graph is computed by itself."""
    return _parts_of(round) is not None


def _parts_of(round: Round) -> Parts | None:
    """Returns the parts to run one by one: there are several, and no data per edge or returned weights."""
    if round.return_weights or not all(isinstance(b, EmbeddingTable) and b.relation is not None for b in round.bias):
        return None
    parts = None if round.graph.is_explicit else round.graph.parts
    return parts if parts is not None and parts.count > 1 else None


def refusal(round: Round) -> str | None:
    graph = round.graph
    facts = _Facts(round)
    if facts.score.edge_key is not None and facts.score.softcap is not None:
        return "it does not support softcap with edge_key"
    if facts.groups is not None:
        return None
    if facts.masked and facts.pairs > _MAX_PAIRS:
        return f"a mask of {graph.num_dst:,} x {graph.num_src:,} pairs is too large"
    if graph.is_explicit and graph.num_edges != graph.runs.num_edges:
        return "the graph has repeated edges, which a matrix of pairs cannot distinguish"
    written = max(facts.pairs, graph.num_dst * facts.classes) * facts.heads
    if (facts.materialized or facts.biased) and written > _MAX_SCORES:
        return f"it would materialize {written:,} logits"
    return None


def counts(round: Round) -> dict[str, float]:
    """Pairs times heads, by operation, and the copies of nodes for parts."""
    facts = _Facts(round)
    of_groups = facts.groups is not None
    return both_ways(_counts_of_groups(facts) if of_groups else _counts_of_pairs(facts), round.needs_grad)


def _counts_of_groups(facts: _Facts) -> dict[str, float]:
    groups = facts.groups or []
    kind = kind_of(facts.round.value.dtype)
    form = _FORMS[facts.shape] if kind == kind_of(torch.bfloat16) else ""  # numbers that torch's flash kernel takes
    width = facts.round.value.shape[-1]
    pairs = facts.heads * sum(group.pairs for group in groups)
    return {
        "call": 1.0,
        "size call": len(groups) - 1.0,
        f"{kind}{form}pair": pairs,
        f"{kind}number": pairs * width,
        "clique number": float(facts.heads * width * sum(group.copied for group in groups)),
    }


def _counts_of_pairs(facts: _Facts) -> dict[str, float]:
    round = facts.round
    graph = round.graph
    heads = facts.heads
    parts = facts.parts
    width = round.value.shape[-1]
    pairs = float(heads * facts.pairs)
    on_cuda = round.value.device.type == "cuda"
    operations = {"call" if facts.direct is None else "direct call": 1.0}
    if facts.biased:
        operations |= {"biased pair": pairs, **of_biases(round.biases, "pair", pairs / max(heads, 1))}
    if facts.masked:
        narrow = "narrow " * (on_cuda and round.value.dtype.itemsize == 2)  # another kernel of torch
        operations |= {f"{narrow}mask call": 1.0, "masked pair": pairs}
    if facts.written:
        operations |= {"written call": 1.0, "written pair": pairs, "written number": pairs * width}
        if not on_cuda and pairs * round.accumulate_dtype.itemsize >= _FRESH:
            operations["fresh pair"] = pairs
        if round.dropout:
            operations |= {"dropout call": 1.0, "dropped pair": pairs}
        if facts.score.softcap:
            operations["capped pair"] = pairs
    else:
        kind = kind_of(round.value.dtype)
        if facts.shape == "causal" and not facts.biased:
            # blocks of sources on the diagonal are computed in full
            pairs *= 0.5 + min(0.5, (32 if on_cuda else 256) / max(graph.num_src, 1))
        operations |= {f"{kind}pair": pairs, f"{kind}number": pairs * width}
        operations["block"] = float(heads * _blocks(graph, parts))
        operations["node number"] = float(heads * (graph.num_dst + graph.num_src) * width)
    if facts.tables:
        products = heads * graph.num_dst * facts.classes * width
        operations["written number"] = operations.get("written number", 0.0) + products
    if parts is not None:
        operations["size call"] = float(len(parts.sizes[0]))
        operations["clique"] = float(heads * parts.count)
        operations["clique number"] = float(graph.num_dst * heads * width)
    return operations


def _blocks(graph: Graph, parts: Parts | None) -> int:
    """The number of blocks of (destinations, sources) that torch's kernel visits for each head."""

    def of(num_dst: int, num_src: int) -> int:
        rows = 256 if num_dst >= 768 else 64 if num_dst >= 192 else 32
        return -(-num_dst // rows) * -(-num_src // 512)

    if parts is None:
        return of(graph.num_dst, graph.num_src)
    return sum(count * of(size, size) for size, count in zip(*parts.sizes, strict=True))


def estimate(round: Round) -> Estimate:
    return priced(round.value.device, NAME, counts(round), float(_bytes(_Facts(round))))


def _bytes(facts: _Facts) -> float:
    """The working memory of a round."""
    round = facts.round
    width = round.value.shape[-1]
    if facts.groups is not None:
        return sum(group.copied for group in facts.groups) * facts.heads * width * round.value.element_size()
    copies = (3 + 2 * bool(round.dropout) + 1.5 * round.needs_grad) * facts.written + 1.7 * facts.biased
    gathered = round.graph.num_dst * facts.heads * (4 * width * (facts.parts is not None) + facts.classes)
    numbers = facts.pairs * facts.heads * copies + gathered
    return numbers * round.accumulate_dtype.itemsize + 5 * facts.pairs * facts.masked


def bind(round: Round) -> Callable[[Round], Result]:
    """The function that runs all rounds of this form over this graph."""
    kernel = _Facts(round).direct
    is_plain = reads(round, ("value",), ("query", "key", "scale"))
    return run if kernel is None or not is_plain else partial(_run_direct, kernel)


def _run_direct(kernel: Callable[[Tensor, Tensor, Tensor, float], Tensor], round: Round) -> Result:
    score: Any = round.score
    return Result(kernel(score.query, score.key, round.value, score.scale))


def run(round: Round) -> Result:
    facts = _Facts(round)
    score = facts.score
    graph = round.graph
    parts = facts.parts
    features = score.query, score.key, round.value
    if facts.direct is not None:
        return Result(facts.direct(*features, score.scale))
    if facts.groups is not None:
        return Result(_run_packed(facts.groups, *features, score.scale))
    if parts is None:
        block = graph.cached("dense block", lambda: _whole(graph))
        out, weights = _run_block(facts, block, *(x.unsqueeze(-4) for x in features))
        if round.return_weights and weights is not None:
            src, dst = graph.ends
            return Result(out.squeeze(-4), weights.squeeze(-4)[..., dst, src].transpose(-2, -1))
        return Result(out.squeeze(-4))
    members = graph.cached("members of parts", lambda: [_on(graph.device, nodes) for nodes in parts.members])
    order, inverse = graph.cached("part by part", lambda: _order(members))
    query, key, value = (x.index_select(-3, order) for x in features)
    outs = []
    first = 0
    for nodes in members:
        members_of = (x.narrow(-3, first, nodes.numel()).unflatten(-3, nodes.shape) for x in (query, key, value))
        block = _Block(nodes, nodes, causal=parts.is_causal)
        outs.append(_run_block(facts, block, *members_of)[0].flatten(-4, -3))
        first += nodes.numel()
    return Result(torch.cat(outs, -3).index_select(-3, inverse))


def _complete(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False) -> Tensor:
    """Out [..., N_dst, H, D] over all pairs, or over a causal graph. Uses as few views as possible: on few nodes they
    take as long as the kernel."""
    q, k, v = query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2)
    if query.dim() == 3:
        out = sdpa(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), scale, None, causal).squeeze(0)
    else:
        out = sdpa(q, k, v, scale, None, causal)
    return out.transpose(-3, -2)


_Shape = Literal["complete", "causal"]
_DIRECT: dict[_Shape | None, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "complete": _complete, "causal": partial(_complete, causal=True)
}  # fmt: skip

_FORMS: dict[_Shape | None, str] = {"complete": "", "causal": "causal ", None: "packed "}
"""How the pairs of groups are named in prices: torch's kernel takes longer for a pair of a causal graph, whose rows
differ in length, than for one of a complete graph, and its kernel for packed groups longer still."""


def _order(members: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The nodes sorted by part, and the inverse permutation."""
    order = torch.cat([nodes.flatten() for nodes in members])
    return order, order.argsort()


class _Packed(NamedTuple):
    """Groups of rows on their device, for the features of a batch; see `row_groups` and `varlen.packed`.

    pairs: those that the kernel computes, by whole tiles. copied: how many nodes are copied in order.
    """

    dst: Tensor | None
    src: Tensor | None
    dst_starts: Tensor
    src_starts: Tensor
    most_dst: int
    most_src: int
    is_causal: bool
    pairs: float

    @property
    def copied(self) -> int:
        return sum(len(nodes) for nodes in (self.dst, self.src) if nodes is not None)


def _pack(graph: Graph, batch: int) -> list[_Packed] | None:
    groups = row_groups(graph)
    if groups is None:
        return None
    to_device = partial(_on, graph.device)
    return [
        _Packed(
            None if group.dst is None else to_device(group.dst),
            None if group.src is None else to_device(group.src),
            varlen.starts(to_device(group.num_dst), batch),
            varlen.starts(to_device(group.num_src), batch),
            int(group.num_dst.max()),
            int(group.num_src.max()),
            group.is_causal,
            float((-(-group.num_dst // _TILE) * _TILE * group.num_src).sum()) * (0.5 if group.is_causal else 1.0),
        )
        for group in groups
    ]


def _on(device: torch.device, numbers: Ints) -> Tensor:
    return torch.from_numpy(numbers).to(device)


def _run_packed(groups: list[_Packed], query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Out [..., N_dst, H, D]; rows without sources get zeros."""
    if groups[0].dst is None:  # its rows are all
        return _run_group(groups[0], query, key, value, scale)
    out = torch.zeros_like(query)
    for group in groups:
        dst = cast(Tensor, group.dst)
        out = out.index_copy(-3, dst, _run_group(group, query.index_select(-3, dst), key, value, scale))
    return out


def _run_group(group: _Packed, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    if group.src is not None:
        key, value = key.index_select(-3, group.src), value.index_select(-3, group.src)
    q, k, v = (x.flatten(0, -3) for x in (query, key, value))
    ends = group.dst_starts, group.src_starts, group.most_dst, group.most_src
    return varlen.packed(q, k, v, *ends, scale, group.is_causal).view(query.shape)


@dataclass(frozen=True)
class _Block:
    """Pairs to attend over: node numbers dst [C, S] and src [C, T], C blocks of one shape.

    `allowed` [S, T] is the mask, or None if every pair is an edge (every pair j <= i if `causal`). `empty` [S] marks
    rows without in-neighbors. `whole`: the block holds all nodes, in order.
    """

    dst: Tensor
    src: Tensor
    allowed: Tensor | None = None
    empty: Tensor | None = None
    causal: bool = False
    whole: bool = False

    @property
    def pairs(self) -> Tensor | None:
        """The mask, also if `causal`."""
        return self.src[0] <= self.dst[0][:, None] if self.causal else self.allowed


def _whole(graph: Graph) -> _Block:
    dst, src = (torch.arange(n, device=graph.device)[None] for n in (graph.num_dst, graph.num_src))
    if shape := _plain_shape(graph):
        return _Block(dst, src, causal=shape == "causal", whole=True)
    allowed = graph.dense()
    empty = ~allowed.any(1)
    if bool(empty.any()):
        return _Block(dst, src, allowed | empty[:, None], empty, whole=True)
    return _Block(dst, src, allowed, whole=True)


def _run_block(facts: _Facts, block: _Block, *features: Tensor) -> tuple[Tensor, Tensor | None]:
    """Maps queries, keys and values [..., C, S or T, H, D] to out [..., C, S, H, D] and, if they are materialized, the
    weights [..., C, H, S, T]."""
    q, k, v = (x.transpose(-3, -2) for x in features)  # [..., C, H, S or T, D]
    bias = _bias(facts, block, q)
    weights = None
    if facts.materialized:
        out, weights = _materialized(facts, block, q, k, v, bias)
    else:
        out = sdpa(q, k, v, facts.score.scale, _mask(bias, block), block.causal and bias is None)
    if block.empty is not None:
        out = out.masked_fill(block.empty[:, None], 0.0)
    return out.transpose(-3, -2), weights


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Out [..., H, S, D] of q, k and v [..., H, S or T, D], with one dimension or more before H."""
    if q.dim() > 4:
        batch = q.shape[:-3]
        if mask is not None and (mask.dim() > 4 or mask.shape[0] > 1):
            mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
        out = sdpa(q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4), scale, mask, causal)
        return out.view(*batch, *out.shape[1:])
    # Torch's kernels have first derivatives in reverse mode only, and vmap would call them entry by entry.
    if is_transformed() and (q.shape[-2] * k.shape[-2] <= _FEW_PAIRS or is_differentiated_by_transform()):
        return attention(q, k, v, mask, causal, scale)
    if scale <= 0:  # torch's kernels mask before scaling, which would turn -inf to inf or NaN
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    heads = k.shape[1]
    is_grouped = q.shape[1] != heads
    if heads != v.shape[1] or (is_grouped and mask is not None and q.is_cuda):
        # On CUDA, the kernels that take a mask do not let heads share keys.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        is_grouped = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=is_grouped)
    return out if torch.compiler.is_compiling() else differentiable_again(out)


def _materialized(
    facts: _Facts, block: _Block, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention that materializes the logits."""
    round = facts.round
    score = facts.score
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = score.scale * q.to(round.accumulate_dtype) @ k.to(round.accumulate_dtype).mT
    logits = logits if score.softcap is None else score.softcap * (logits / score.softcap).tanh()
    logits = logits if bias is None else logits + bias
    allowed = block.pairs
    if round.normalize in ("softmax", "softmax_dst"):
        logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        if round.normalize == "softmax_dst":
            logits = logits if block.empty is None else logits.masked_fill(block.empty[:, None], -torch.inf)
            weights = _softmax(logits.mT, True).mT
        elif round.sinks is None:
            weights = _softmax(logits, round.biased)
        else:
            sinks = round.sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
            weights = _softmax(torch.cat([logits, sinks], -1), True)[..., :-1]
    else:
        weights = logits.sigmoid() if round.normalize == "sigmoid" else logits
        weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
    dropped = weights
    if round.dropout:
        streams = rng.streams(round.batch, q.shape[-3], q.device, round.head_ids)[..., None, :, None, None]
        dst, src = rng.numbers(round.graph, block.dst, block.src)
        keep = rng.keep(cast(Tensor, round.seed), streams, dst[:, None, :, None], src[:, None, None, :], round.dropout)
        dropped = torch.where(keep, weights / (1 - round.dropout), torch.zeros_like(weights))
    out = dropped @ v.to(dropped.dtype)
    if round.edge_value is not None:
        vectors = facts.tables[-1]
        rule = cast(Relation, vectors.relation)
        sums = pair_tables.sum_by_type(dropped, _ids(rule, round.graph, block), rule.count)
        out = out + sums @ vectors.table.to(round.accumulate_dtype).transpose(0, 1)
    return out.to(v.dtype), weights.to(v.dtype)


def _softmax(logits: Tensor, may_be_empty: bool) -> Tensor:
    """Softmax over the last dimension. A row of -inf only, which biases can produce, gets zeros."""
    if not may_be_empty:
        return logits.softmax(-1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def _bias(facts: _Facts, block: _Block, q: Tensor) -> Tensor | None:
    """The sum of all biases of a block, [..., C, H, S, T], including the inner products with `edge_key`."""
    round = facts.round
    keys = cast(EmbeddingTable | None, facts.score.edge_key)
    parts = []
    same_rule = []
    dst_bias, src_bias = round.node_biases()
    if dst_bias is not None and src_bias is not None:  # their sum first: of two large numbers it may be a small one
        parts.append(_of_block(dst_bias, block.dst)[..., None] + _of_block(src_bias, block.src)[..., None, :])
    for bias in round.bias:
        if keys is not None and isinstance(bias, EmbeddingTable) and bias.relation == keys.relation:
            same_rule.append(bias.table.to(round.accumulate_dtype))
        else:
            parts.append(_pairs(bias, round, block))
    if keys is not None:
        scaled = facts.score.scale * q.to(round.accumulate_dtype)
        products = pair_tables.products(scaled, keys.table.to(round.accumulate_dtype), total(same_rule))
        parts.append(_select(products, cast(Relation, keys.relation), round.graph, block))
    return total(parts)


def _of_block(x: Tensor, nodes: Tensor) -> Tensor:
    """The numbers x [..., N, H] of the nodes [C, S] of a block, [..., C, H, S]."""
    return x.index_select(-2, nodes.flatten()).unflatten(-2, nodes.shape).mT


def _select(products: Tensor, relation: Relation, graph: Graph, block: _Block) -> Tensor:
    """Selects the product of each pair [..., C, H, S, T] by edge type from the products [..., C, H, S, R]."""
    if block.whole and type(relation) is Offset and graph.num_dst and graph.num_src:
        return pair_tables.select_by_offset(products, relation.clip, graph.shift, graph.num_src)
    return pair_tables.select_by_type(products, _ids(relation, graph, block))


def _ids(relation: Relation, graph: Graph, block: _Block) -> Tensor:
    """The edge type of each pair, int64 [C, S, T]."""
    return relation.ids(block.dst[:, :, None] + graph.shift, block.src[:, None, :])


def _pairs(bias: PerEdge, round: Round, block: _Block) -> Tensor:
    graph = round.graph
    if isinstance(bias, EmbeddingTable) and bias.relation is not None:
        ids = _ids(bias.relation, graph, block)
        # Gradients of a row are summed in a fixed order, which indexing with brackets does not guarantee.
        rows = bias.table.to(round.accumulate_dtype).index_select(0, ids.flatten())
        return rows.unflatten(0, ids.shape).movedim(-1, -3)
    src, dst = graph.ends
    of_edges = per_edge(bias, graph, round.accumulate_dtype)  # [..., E, H]
    pairs = of_edges.new_zeros(*of_edges.shape[:-2], of_edges.shape[-1], graph.num_dst * graph.num_src)
    pairs = pairs.index_copy(-1, dst * graph.num_src + src, of_edges.mT)
    return pairs.unflatten(-1, (graph.num_dst, graph.num_src)).unsqueeze(-4)


def _mask(bias: Tensor | None, block: _Block) -> Tensor | None:
    """The mask for torch, [..., C, H, S, T]: boolean, or a float mask that is added to the logits."""
    if bias is None:
        return None if block.allowed is None else block.allowed[None, None]
    allowed = block.pairs
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


@cached_on_graph
def _plain_shape(graph: Graph) -> "_Shape | None":
    """The shape of the graph if torch's kernels support it without a mask, else None."""
    if graph.is_explicit and graph.num_edges not in _plain_counts(graph.num_dst, graph.num_src):
        return None  # without reading the edges
    parts = graph.parts
    if parts is None:
        return "complete" if graph.runs.is_complete else "causal" if graph.runs.is_causal else None
    if parts.count > 1:
        return None
    return "complete" if parts.is_complete else "causal"


def _plain_counts(num_dst: int, num_src: int) -> tuple[int, int]:
    """The number of edges of complete and of causal graphs."""
    short = min(num_dst, num_src)
    return num_dst * num_src, short * (short + 1) // 2 + (num_dst - short) * num_src
