"""The round: plain data that describes one round of message passing, from an attention to a kernel.

    w_ij = normalize_j( score(i, j) + sum of biases )        out_i = reduce_j( w_ij * (value_j + edge_value_ij) )

With sinks s [H], the softmax is `w_ij = exp(l_ij) / (exp(s) + sum_j exp(l_ij))` for logits l: each row has one more
source with the logit s and the value 0 (gpt-oss; Xiao et al. 2023, arXiv:2309.17453).

A recurrence has gates, beta or states. It is a sum over `causal()` or `causal() & documents(...)` without a normalizer,
where the edge j -> i also weighs the gates of the nodes after j up to i, and the value that a node sends may be what
the nodes before it do not predict yet (the delta rule). With L the running sum of log_gate from the first node on:

    out_i = scale q_i S_i     S_i = exp(L_i) state + sum_{j <= i} exp(L_i - L_j) k_j^T u_j
    u_i = value_i, or with beta: beta_i (value_i - k_i exp(log_gate_i) S_(i-1))

Attentions build rounds and backends run them; neither imports the other. Only the operator that builds a round
modifies it, before it is passed on. It is not a frozen dataclass, because a frozen one takes longer to create
than a sum over a molecule takes to run.

Code that visits rounds reads the class: a field that holds tensors has a role in `Round.roles`, and each field that
differs from its default is a need (`round.needs`) that a backend must serve. So a field added here is refused by every
backend until one says that it serves it.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from mpnn.aggregate import SUM, Aggregator, Composed, plain_sum
from mpnn.graph import Graph, rng
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, numbers, per_edge, total
from mpnn.round.needs import defaults_of, has_own, needs_of
from mpnn.scores import PARAMETER, Role, Score, slope_of

Visit = Callable[[Tensor, str, Role], Tensor]
Normalize = Literal["softmax", "softmax_dst", "sigmoid", "none", "sparsemax", "entmax15"]
NORMALIZERS: tuple[str, ...] = get_args(Normalize)


@dataclass(frozen=True, eq=False)
class NodeBias:
    """A bias from numbers of nodes: `dst_i + src_j` is added to the logit of the edge j -> i.

    The two numbers are added first, so that differences of large numbers, such as the running sums of the
    forgetting transformer (Lin et al. 2025, arXiv:2503.02130), are as accurate as the numbers.

    Args:
        dst: [..., N_dst, H]. src: [..., N_src, H]. H may be 1, for a number that all heads share. None stands for
        zeros.
    """

    dst: Tensor | None = None
    src: Tensor | None = None


class Result(NamedTuple):
    """The results of a round, by name; None for each that it does not return.

    Fields:
        out: [..., N_dst, H, D]. weights: before dropout, [..., E, H] in the caller's edge order. lse: the logarithm of
            the sum of exp(logits) of each destination, [..., N_dst, H], -inf for one without edges. state: [..., H, D,
            D_v], after the last node.

    out and weights have the dtype of the values, or with `Round.keep_accumulate_dtype` that of the arithmetic, as lse
    and state always do.
    """

    out: Tensor
    weights: Tensor | None = None
    lse: Tensor | None = None
    state: Tensor | None = None


@dataclass(eq=False)
class Round:
    """One round of message passing over a graph.

    Args:
        value: [..., N_src, H_kv, D]; the result is [..., N_dst, H, D].
        score: gives the logit of each edge, see `mpnn.scores`. Without score and bias every weight is 1; without score
            and with `normalize="none"` the weights are the sum of the biases.
        bias: tensors [..., E, H] or [..., E, 1] in the caller's edge order, or tables, `BiasTable` [edge types, H]. The
            constructor moves the numbers of a `NodeBias` to dst_bias and src_bias.
        dst_bias, src_bias: [..., N_dst, H or 1] and [..., N_src, H or 1], added to the logits of the edges of a node.
        edge_value: vectors added to the values of an edge, [..., E, H, D] or a table.
        normalize: "softmax" over the in-neighbors, "softmax_dst" over the destinations of each source, "sigmoid",
            "none", or "sparsemax" and "entmax15" over the in-neighbors, of which some get the weight 0.
        mix_logits, mix_weights: [H, H], maps of the heads of each edge's logits, biases included, and of its weights
            (talking heads).
        dropout: the probability that a weight is dropped. seed: int64 scalar; drawn when the round runs, unless set.
        reduce: an `Aggregator`; None for a sum.
        return_weights: return the weights before dropout, [..., E, H]. return_lse: return the log-sum-exp of each
            destination's logits, [..., N_dst, H], by which results over disjoint sets of sources are merged.
        sinks: [H], the logits of one more source of each row, for a softmax.
        log_gate: logarithms of the gates of a recurrence, [..., N, H, 1] for a gate a head, [..., N, H, D] for a gate a
            feature of the keys. beta: [..., N, H], of the delta rule. state: [..., H, D, D_v], before the first node.
            return_state: return the state after the last node. Documents after the first begin without a state.
        head_ids: set by a process that computes some heads of a round: the first of them and the number of all, which
            dropout hashes.
        keep_accumulate_dtype: return out and weights in the dtype of the arithmetic, float32 for 16-bit features.
            Rewrites set it, because they compute on results before they are rounded.
    """

    graph: Graph
    value: Tensor
    score: Score | None = None
    bias: tuple[PerEdge, ...] = ()
    edge_value: PerEdge | None = None
    normalize: str = "softmax"
    dropout: float = 0.0
    seed: Tensor | None = None
    reduce: Aggregator = None  # type: ignore[assignment]  # a sum: an object as default would break torch.compile
    return_weights: bool = False
    return_lse: bool = False
    sinks: Tensor | None = None
    log_gate: Tensor | None = None
    beta: Tensor | None = None
    state: Tensor | None = None
    return_state: bool = False
    dst_bias: Tensor | None = None
    src_bias: Tensor | None = None
    head_ids: tuple[int, int] | None = None
    keep_accumulate_dtype: bool = False
    mix_logits: Tensor | None = None
    mix_weights: Tensor | None = None

    roles: ClassVar = {
        "value": Role("src", grouped=True),
        "bias": Role("edge", vectors=False),
        "dst_bias": Role("dst", vectors=False),
        "src_bias": Role("src", vectors=False),
        "edge_value": Role("edge"),
        "sinks": PARAMETER,
        "log_gate": Role("dst"),
        "beta": Role("dst", vectors=False),
        "state": PARAMETER,
        "seed": Role("none"),
        "mix_logits": PARAMETER,
        "mix_weights": PARAMETER,
    }

    def __post_init__(self) -> None:
        reduce: Any = self.reduce
        if reduce is None:
            self.reduce = plain_sum() if torch.compiler.is_compiling() else SUM  # a call less of each layer
        if type(self.bias) is not tuple:
            raise TypeError(f"bias is a tuple, bias=(numbers,); got {type(self.bias).__name__}")
        bias: Any
        for bias in self.bias:
            if type(bias) is NodeBias:
                self.dst_bias = _plus("dst_bias", self.dst_bias, bias.dst)
                self.src_bias = _plus("src_bias", self.src_bias, bias.src)
                self.bias = tuple(other for other in self.bias if other is not bias)

    @classmethod
    def of_messages(cls, graph: Graph, value: Tensor) -> "Round":
        """Returns `Round(graph, value, normalize="none")` in a third of the time: a sum of values."""
        if torch.compiler.is_compiling():
            return cls(graph, value, normalize="none")
        round = object.__new__(cls)
        kind: Any = cls
        round.__dict__ = _fields_of_messages(kind) | {"graph": graph, "value": value}
        return round

    @property
    def weighted(self) -> bool:
        """Whether edges have weights: by a score or by biases."""
        return self.score is not None or self.biased

    @property
    def biased(self) -> bool:
        """Whether there are biases, of edges or of nodes."""
        return bool(self.bias) or self.dst_bias is not None or self.src_bias is not None

    @property
    def biases(self) -> tuple[PerEdge, ...]:
        """The biases of edges, then those of nodes."""
        return (*self.bias, *(x for x in (self.dst_bias, self.src_bias) if x is not None))

    @property
    def features(self) -> list[tuple[str, Any, Role]]:
        """The name, the data and the role of each field of the score that has a role; the data may be None."""
        score = self.score
        return [] if score is None else [(name, getattr(score, name), role) for name, role in score.roles.items()]

    @property
    def recurrent(self) -> bool:
        """Whether the round has gates, beta or a state."""
        return self.return_state or not (self.log_gate is None and self.beta is None and self.state is None)

    @property
    def heads(self) -> int:
        """The number of heads of the result.

        A score's features of destinations have them all. Without any, and in a recurrence, it is the largest number
        that an operand has: heads may share values, keys and numbers of edges, and in a recurrence queries."""
        value = self.value
        if not (self.weighted or self.recurrent):
            return value.shape[-2]
        of_score = self.features
        if not self.recurrent:
            for _, x, role in of_score:
                if role.of == "dst":
                    return int(x.shape[-role.trailing])
        counts = [value.shape[-2]]
        counts += [numbers(x).shape[-role.trailing] for _, x, role in of_score if x is not None]
        counts += [numbers(x).shape[-1] for x in self.biases]
        gates = ((self.log_gate, 2), (self.beta, 1), (self.state, 3))
        counts += [x.shape[-dimension] for x, dimension in gates if x is not None]
        return max(counts)

    @property
    def batch(self) -> torch.Size:
        """The leading dimensions shared by all features."""
        return self.value.shape[:-3]

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """The dtype of the arithmetic: that of the features, or float32 for 16-bit features."""
        return torch.float32 if self.value.dtype in (torch.float16, torch.bfloat16) else self.value.dtype

    @property
    def result_dtype(self) -> torch.dtype:
        """The dtype of out and weights."""
        return self.accumulate_dtype if self.keep_accumulate_dtype else self.value.dtype

    def with_fields(self, **changes: Any) -> "Round":
        """Returns the round with other values of fields, without the checks of `dataclasses.replace`, in a sixth
        of its time."""
        other = object.__new__(type(self))
        other.__dict__ = self.__dict__ | changes
        return other

    def map(self, visit: Visit) -> "Round":
        """Returns the round with `visit(x, name, role)` applied to each of its tensors, and to the table of each of its
        tables, in a fixed order. Raises TypeError for a tensor without a role, because visitors could not slice it."""
        changes = {name: _mapped(visit, name, x, self.roles.get(name)) for name, x in vars(self).items() if _holds(x)}
        if (score := self.score) is not None:
            on_score = {
                name: _mapped(visit, name, x, score.roles.get(name, PARAMETER))
                for name, x in _fields(score).items()
                if isinstance(x, (Tensor, EmbeddingTable))
            }
            changes["score"] = replace(cast(Any, score), **on_score)
        return replace(self, **changes)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the round, for checks of device and gradient."""
        operands = _operands(cast(Any, type(self)))
        held = [x for x in operands(self) if x is not None and x is not self.seed and x is not self.bias]
        held += self.bias
        if self.score is not None:
            held += [x for x in _fields(self.score).values() if isinstance(x, (Tensor, EmbeddingTable))]
        return [numbers(x) for x in held]

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """All that validation and plans depend on besides the graph: the form of every field. It holds no numbers and
        no object of the caller's, because the graph caches it."""
        score = self.score
        of_score = () if score is None else (has_own(score, "logits"), *_forms(score, "score."))
        return torch.is_grad_enabled(), *_forms(self, "", {"graph", "score"}), *of_score

    def map_edges(self, change: Callable[[PerEdge], PerEdge]) -> "Round":
        """Returns the round with `change` applied to its data of edges, tables included."""
        score: Any = self.score
        for name, data, role in self.features:
            if role.of == "edge" and data is not None:
                score = replace(score, **{name: change(data)})
        edge_value = None if self.edge_value is None else change(self.edge_value)
        return replace(self, score=score, bias=tuple(map(change, self.bias)), edge_value=edge_value)

    @property
    def needs(self) -> frozenset[str]:
        """The features that a backend must serve to run the round, see `mpnn.round.needs`."""
        return needs_of(self)

    def edge_bias(self, biases: Iterable[PerEdge]) -> Tensor | None:
        """Returns the sum of these biases, [..., E, H or 1] in the caller's edge order, in the dtype of the
        arithmetic."""
        return total([per_edge(bias, self.graph, self.accumulate_dtype) for bias in biases])

    def node_biases(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Returns dst_bias and src_bias for all entries of the batch and all heads, [..., N, H], in the dtype of the
        arithmetic. One that is absent is zeros if the other is present."""
        if self.dst_bias is None and self.src_bias is None:
            return None, None
        zeros = self.value.new_zeros((), dtype=self.accumulate_dtype)
        heads = self.heads
        dst, src = (zeros if x is None else x.to(self.accumulate_dtype) for x in (self.dst_bias, self.src_bias))
        return (
            dst.expand(*self.batch, self.graph.num_dst, heads),
            src.expand(*self.batch, self.graph.num_src, heads),
        )

    def dropout_keys(self) -> Tensor | None:
        """Returns `mpnn.graph.rng.keys` of all batch entries and heads, int32 [2 + B * H]. None if no weight is
        dropped."""
        if not self.dropout or not self.weighted:
            return None
        streams = rng.streams(self.batch, self.heads, self.value.device, self.head_ids)
        return rng.keys(cast(Tensor, self.seed), streams.flatten())

    @property
    def needs_grad(self) -> bool:
        """Whether some tensor of the round requires a gradient."""
        if not torch.is_grad_enabled():
            return False
        return self.value.requires_grad or any(x.requires_grad for x in self.tensors)


def reads(round: Round, of_round: Collection[str], of_score: Collection[str] = ()) -> bool:
    """Returns whether a function that reads only these fields of a round and of its score reads all that the round has:
    all other fields, and the methods of its score, are those of a plain round. Fields are taken from the classes, so
    that a field that is added later is compared, too."""
    score: Any = round.score
    if has_own(score, "logits") or not _are_plain(round, {"graph", "score", *of_round}):
        return False
    return score is None or _are_plain(score, of_score)


def _are_plain(owner: Any, but: Collection[str]) -> bool:
    of_class = defaults_of(cast(Any, type(owner)))
    others = [(getattr(owner, name), default) for name, default in of_class.items() if name not in but]
    return all(x is default or (x is SUM and default is None) or _is_equal(x, default) for x, default in others)


def _is_equal(x: Any, default: Any) -> bool:
    return type(x) in (int, float, bool, str) and bool(x == default)


@cache
def _fields_of_messages(kind: Any) -> dict[str, Any]:
    """The fields of a sum of values, but for its graph and its value."""
    return defaults_of(kind) | {"reduce": SUM, "normalize": "none"}


@cache
def _operands(kind: Any) -> "attrgetter[Any]":
    """Returns a reader of the fields that hold tensors."""
    return attrgetter(*kind.roles)


def _plus(name: str, x: Any, more: Any) -> Any:
    """The sum of two biases of nodes. Raises ValueError if they are of other nodes."""
    if x is None or more is None:
        return more if x is None else x
    shapes = [list(y.shape) if isinstance(y, Tensor) else y for y in (x, more)]
    fits = isinstance(x, Tensor) and isinstance(more, Tensor) and x.dim() > 0 and x.shape[:-1] == more.shape[:-1]
    if not fits or len({1, x.shape[-1], more.shape[-1]}) > 2:
        raise ValueError(f"{name} of all biases must have shape [..., N, H or 1]; got {shapes[0]} and {shapes[1]}")
    return x + more


_ATOMS = frozenset({int, bool, str, type(None), torch.dtype})


def _holds(x: object) -> bool:
    return isinstance(x, (Tensor, EmbeddingTable)) or (type(x) is tuple and any(map(_holds, x)))


def _mapped(visit: Visit, name: str, x: Any, role: Role | None) -> Any:
    if role is None:
        raise TypeError(f"{name} of a round has no role in Round.roles, which says what its tensor is of")
    if isinstance(x, tuple):
        return tuple(_mapped(visit, name, y, role) for y in x)
    if isinstance(x, EmbeddingTable):
        return replace(x, table=visit(x.table, name, role._replace(of="table")))
    return visit(x, name, role)


def _fields(score: Any) -> dict[str, Any]:
    """The fields of a score by name; scores may have slots."""
    return {name: getattr(score, name) for name in defaults_of(cast(Any, type(score)))}


def _forms(owner: Any, prefix: str, but: Collection[str] = ()) -> list[Hashable]:
    """The class of a round or a score, and the forms of all its fields but these."""
    kind: Any = type(owner)
    own = [(name, default) for name, default in defaults_of(kind).items() if name not in but]
    return [kind, *(plain_form(prefix + name, getattr(owner, name), default) for name, default in own)]


def plain_form(name: str, x: Any, default: Any) -> Hashable:
    """Returns the part of a field that plans depend on: the form of a tensor, a value, or of a number that is read in
    each call, its sign and whether it is the default, which need not be 0."""
    if name in _FORMS:
        return _FORMS[name](x)
    if x is default and not isinstance(x, Tensor):
        return cast(Hashable, x)
    return (_form(x), x == default) if type(x) is float else _form(x)


def _form(x: Any) -> Any:
    if type(x) in _ATOMS:
        return x
    if isinstance(x, Tensor):
        return x.shape, x.dtype, x.device, x.layout, x.requires_grad
    if isinstance(x, float):
        return x > 0, isfinite(x)
    if isinstance(x, tuple):
        return tuple(map(_form, x)) if x else ()
    if isinstance(x, EmbeddingTable):
        return *table_form(x), _form(x.table)
    if callable(x):  # an activation, which may be a new object at each call
        return type(x), getattr(x, "__module__", None), getattr(x, "__qualname__", None), slope_of(x)
    return type(x)


def _rate_form(rate: float) -> Hashable:
    """An invalid rate has a form of its own."""
    return "some" if type(rate) is float and 0.0 < rate < 1.0 else rate


def table_form(x: EmbeddingTable) -> tuple[Any, ...]:
    """Returns the part of a table of edges that plans depend on, without its tensor. A rule that is equal only to
    itself is not kept."""
    rule = x.relation
    of_rule: Hashable = rule if rule is None or rule.is_value else (type(rule), rule.count)
    return type(x), of_rule


def _aggregator_form(x: object) -> Hashable:
    """Returns the facts that decide which backends support an aggregator: its type, its declared attributes, and its
    parts."""
    declared = tuple(getattr(x, name, None) is not None for name in ("combine", "identity", "gradient"))
    parts = x.parts if isinstance(x, Composed) else ()
    return type(x), declared, has_own(x, "reduce"), tuple(map(_aggregator_form, parts))


_FORMS: dict[str, Callable[[Any], Hashable]] = {"reduce": _aggregator_form, "dropout": _rate_form}
"""The fields whose forms are not those of their values."""
