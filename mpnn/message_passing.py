"""The operator: one round of message passing over a graph."""

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpnn import engine
from mpnn.aggregate import Aggregator, Index, Name, Sum
from mpnn.attention import Attention, DotProduct, parts, whole_layer
from mpnn.decoding.cache import KVCache
from mpnn.engine.binding import bind
from mpnn.graph import Graph, html
from mpnn.graph.bound import BoundGraph
from mpnn.graph.exchange import LOCAL, Layer
from mpnn.graph.sharding import active
from mpnn.graph.topology import Topology
from mpnn.graphs import jagged
from mpnn.graphs.explicit import edges_into
from mpnn.round import Round, validation
from mpnn.round.needs import class_of
from mpnn.update import EdgeUpdate, Update
from mpnn.update.dropout import drop_edges, edge_scale

Source = Tensor | Callable[[Tensor], Tensor] | None
"""Features of the sources, or a function that computes them from the prepared features of the destinations."""

_NO_MORE = (None, None, False, None)
"""The defaults of a call's source, edge_attr, return_weights and cache."""


class MessagePassing(nn.Module):
    """One layer of message passing over a graph.

        h    = update.prepare(x)
        w_ij = normalize_j( attention.score(h_i, h_j, e_ij) )                     over the in-neighbors j of i
        m_i  = attention.merge( aggregate_j( w_ij * attention.value(h_j, e_ij) ) )
        y_i  = update(x_i, m_i)

    Args:
        graph: a `Topology`, which is bound to the length of each input; a `Graph`; or None to pass it with each call.
        aggregate: "sum", "mean", "max", ..., an object with `reduce(messages, index)`, or a function of
            (messages, index). Messages are [E, batch..., H, D]. See `mpnn.aggregate`; its `per_node` is for
            aggregators that rank messages.
        update: an `Update` such as `PreNorm(dim, FeedForward(dim))`, a function of (x, message), or None to return the
            message itself.
        attention: an `Attention` such as `DotProduct(dim, heads)`, or None to weight all sources equally.
        edges: an `EdgeUpdate(dim, edge_dim)`. Edges then have states: each call computes the new ones from edge_attr
            and the features h at both ends, passes them to the attention, and returns (y, states). Without attention
            the message is the aggregate of the new states of incoming edges.
        edge_dropout: the probability that an edge is dropped from a round in training (DropEdge, Rong et al. 2020).
            Means and normalized weights are taken over the remaining edges. Sums are scaled by 1 / (1 - p), which
            keeps their expectation.
        backend: "auto", or the name of a backend. A named backend runs, or raises an error that states the reason.

    If `gradient_checkpointing` is True, a round in training stores only its inputs and is recomputed in the backward
    pass (Chen et al. 2016). transformers' `gradient_checkpointing_enable` sets this attribute.
    """

    mixes_values = False
    """Whether the result also depends on the values of the destinations themselves; see `models.layers.propagation`."""
    gradient_checkpointing: bool = False
    _gradient_checkpointing_func: Callable[..., Any] = staticmethod(partial(checkpoint, use_reentrant=False))

    def __init__(
        self,
        graph: Topology | Graph | None,
        aggregate: Name | Aggregator | Callable[[Tensor, Index], Tensor] = "sum",
        update: Update | Callable[[Tensor, Tensor], Tensor] | None = None,
        attention: Attention | None = None,
        *,
        edges: EdgeUpdate | None = None,
        edge_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.graph = graph
        self.backend = backend
        self.edge_dropout = edge_dropout
        self.aggregate: Any = aggregate
        self.update: Update = update  # type: ignore[assignment]  # __setattr__ converts it to an Update
        self.attention = attention
        self.edges = edges

    def __setattr__(self, name: str, value: Any) -> None:
        """Validates a part of the operator, in the constructor and when it is replaced."""
        if name in parts.PARTS:
            value = parts.PARTS[name](value)
            if not isinstance(value, (nn.Module, NoneType)):
                # torch keeps modules in a dictionary of their own, and refuses another object in the place of one.
                self._modules.pop(name, None)
        super().__setattr__(name, value)

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            x: Tensor,
            graph: Topology | Graph | None = None,
            source: Source = None,
            edge_attr: Tensor | None = None,
            return_weights: Literal[False] = False,
            cache: KVCache | None = None,
        ) -> Tensor: ...

        @overload
        def __call__(
            self,
            x: Tensor,
            graph: Topology | Graph | None = None,
            source: Source = None,
            edge_attr: Tensor | None = None,
            *,
            return_weights: Literal[True],
            cache: KVCache | None = None,
        ) -> tuple[Tensor, Tensor]: ...

        @overload
        def __call__(
            self,
            x: Tensor,
            graph: Topology | Graph | None = None,
            source: Source = None,
            edge_attr: Tensor | None = None,
            return_weights: bool = False,
            cache: KVCache | None = None,
        ) -> Any: ...

        def __call__(self, *args: Any, **options: Any) -> Any: ...

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Source = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: KVCache | None = None,
    ) -> Any:
        """Runs one round of message passing.

        Args:
            x: features of the destinations, [N, d] or [batch..., N, d]. The whole batch shares one graph. For jagged
                x, [B, j, d] (`torch.nested`), a topology is that of each sequence, and y is jagged.
            graph: replaces the operator's graph.
            source: features of the sources, [..., N_src, d_src], or a function that computes them from `prepare(x)`.
                Default: `prepare(x)`.
            edge_attr: [E, ...] in the caller's edge order. Default: the graph's.
            return_weights: also return the attention weights before dropout, [..., E, H] in the caller's edge order.
            cache: keys and values of the preceding nodes. `x` holds the nodes that follow them and attend to them.

        Returns:
            y [..., N, d_out], or (y, weights), or (y, states [..., E, F] in the caller's edge order).
        """
        if isinstance(x, Tensor) and x.layout == torch.jagged:
            return jagged.call(self, x, self._graph_or_default(graph), source, edge_attr, return_weights, cache)
        if self.gradient_checkpointing and self.training and cache is None and torch.is_grad_enabled():
            run = partial(self._forward, graph, return_weights, None)
            return self._gradient_checkpointing_func(run, x, source, edge_attr)
        return self._forward(graph, return_weights, cache, x, source, edge_attr)

    def _forward(self, graph: Any, return_weights: bool, cache: Any, x: Tensor, source: Any, edge_attr: Any) -> Any:
        """`forward` without checkpointing; tensors come last."""
        if self.edges is not None:
            if cache is not None or return_weights or self.edge_dropout:
                raise ValueError("an operator with edges= takes no cache, return_weights or edge_dropout")
            return self._with_states(self.edges, graph, x, source, edge_attr)
        others = source, edge_attr, return_weights, cache
        if type(self.attention) is DotProduct and type(self) is MessagePassing and others == _NO_MORE:
            graph = self.graph if graph is None else graph
            if whole_layer.why_not_now(x, self.training) is None:
                graph = graph.bind(x.shape[-2], x.shape[-2]) if isinstance(graph, Topology) else graph
                layer = whole_layer.find(self, graph, x)
                if callable(layer):
                    return layer(x)
        rounds = self.rounds(x, graph, source, edge_attr, return_weights, cache)
        y, weights = self._exchanged(x, rounds)
        if cache is not None and weights is not None and rounds[0].return_state:
            cache.keep_state(self, weights, x.shape[-2])
        return (y, weights) if return_weights else y

    def _exchanged(self, x: Tensor, rounds: tuple[Round, ...]) -> tuple[Tensor, Tensor | None]:
        """The updated features, and what else the rounds return."""
        exchange = rounds[0].graph.exchange
        out, weights = self._run(rounds[0]) if exchange is LOCAL else exchange.run(rounds, self._run)
        attention = self.attention
        modules: Any = self._modules  # a look-up of `self.update` is a call of torch's
        message = out.flatten(-2) if attention is None else attention.merge(out)
        update = modules["update"]
        try:
            return update(x, message), weights
        except RuntimeError:  # as in `_prepared`
            update.check(x, message)
            raise

    def _with_states(self, edges: EdgeUpdate, graph: Any, x: Tensor, source: Any, edge_attr: Any) -> Any:
        """The updated features and the new states of all edges, in the caller's order."""
        dst = _prepared(self.update, x)
        src = dst if source is None else self._source(dst, source)
        given = self._graph_or_default(graph)
        if active() is not None or (isinstance(given, Graph) and given.exchange is not LOCAL):
            raise ValueError("states of edges are not divided over processes: call it outside of mpnn.distributed")
        bound = bind(given, dst, src, lambda: Layer(None, self.aggregate, False, False, False))
        edge_attr = bound.edge_attr if edge_attr is None else parts.checked_edges(edge_attr, bound)
        states, sums = edges(validation.edge_features("an operator with edges=", edge_attr), dst, src, bound)
        is_sum = class_of(self.aggregate) is Sum
        if sums is not None and self.attention is None and is_sum and self.backend == "auto":
            return self.update(x, sums), states  # the kernel has summed them already
        return self._exchanged(x, self.rounds(x, graph, source, states))[0], states

    def refusal_of_whole_layer(self, x: Tensor, graph: Any, *others: Any) -> str | None:
        """Returns a clause that says why no single compiled call computes a call with these arguments; "" for
        operators of other kinds, None if one does. `mpnn.explain` shows it."""
        if type(self) is not MessagePassing or type(self.attention) is not DotProduct:
            return ""
        if others != _NO_MORE:
            return "the compiled call takes x and a graph alone"
        if (why := whole_layer.why_not_now(x, self.training)) is not None:
            return why
        graph = self._graph_or_default(graph)
        graph = graph.bind(x.shape[-2], x.shape[-2]) if isinstance(graph, Topology) else graph
        layer = whole_layer.find(self, graph, x)
        return layer if isinstance(layer, str) else None

    def rounds(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Source = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: KVCache | None = None,
    ) -> tuple[Round, ...]:
        """Returns the rounds that a call with these arguments runs: one, unless an exchange between processes needs
        more. `mpnn.explain` shows the plan of the first."""
        modules: Any = self._modules
        dst = _prepared(modules["update"], x)
        src = dst if source is None else self._source(dst, source)
        graph = self.graph if graph is None else graph
        if not isinstance(graph, (BoundGraph, Topology)):  # Topology is an abstract class, which is asked slowly
            graph = self._graph_or_default(graph)
        try:
            if cache is None:
                rounds = self._attend(graph, dst, src, edge_attr, return_weights)
            else:
                parts.check_kind("cache", cache, KVCache)
                rounds = (cache.round(self, graph, dst, None if source is None else src, edge_attr),)
        except RuntimeError:
            parts.check_widths(self.attention, dst, src)
            raise
        return _completed(rounds, self.attention, self.aggregate, return_weights)

    def _source(self, dst: Tensor, source: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        """The features of the sources that the attention reads."""
        src = source(dst) if callable(source) else source
        parts.check_features("source", src)
        return src

    def _attend(
        self, graph: Topology | Graph, dst: Tensor, src: Tensor, edge_attr: Tensor | None, return_weights: bool
    ) -> tuple[Round, ...]:
        """The rounds of the attention over the bound graph."""
        attention = self.attention
        drops_edges = self.training and self.edge_dropout > 0
        layer = partial(self._layer, dst, return_weights, drops_edges)
        bound = bind(graph, dst, src, layer)
        exchange = bound.exchange
        if exchange is not LOCAL:
            parts.check_divisible(layer(), exchange)
        edge_attr = bound.edge_attr if edge_attr is None else parts.checked_edges(edge_attr, bound)
        if drops_edges:
            if return_weights:
                raise ValueError("edges dropped by edge_dropout have no weights to return; call eval() first")
            bound, edge_attr = drop_edges(bound, edge_attr, self.edge_dropout)
        if self.edges is not None and attention is None and edge_attr is not None:
            into = bound.derive(edges_into, num_dst=bound.num_dst, num_src=bound.num_edges)
            return (Round.of_messages(into, edge_attr.unsqueeze(-2)),)
        if attention is None:
            messages = src if exchange is LOCAL else exchange(src)
            return (Round.of_messages(bound, messages.unsqueeze(-2)),)
        if exchange is LOCAL:
            return (attention(dst, src, bound, edge_attr),)
        return exchange.rounds(attention, dst, src, bound, edge_attr)

    def _layer(self, dst: Tensor, return_weights: bool, drops_edges: bool) -> Layer:
        """Returns the facts that decide how nodes divided over processes reach each other."""
        of_self = self.attention, self.aggregate, return_weights, self.mixes_values, drops_edges
        return Layer(*of_self, dst.dtype, dst.shape[:-2], self)

    def _run(self, round: Round) -> tuple[Tensor, Tensor | None]:
        """Runs one round."""
        out, weights = engine.run(round, self.backend)
        scale = edge_scale(self, round) if self.edge_dropout else 1.0
        return (out if scale == 1 else scale * out), weights

    def _repr_html_(self) -> str:
        return html.of_operator(self)

    def extra_repr(self) -> str:
        graph = "passed to forward" if self.graph is None else repr(self.graph)
        return f"graph={graph}, aggregate={type(self.aggregate).__name__}"

    def _graph_or_default(self, graph: Topology | Graph | None) -> Topology | Graph:
        if graph is not None:
            return parts.check_graph(graph)
        if self.graph is None:
            raise ValueError("this operator has no graph; pass one with the call: op(x, graph=...)")
        return self.graph


def _completed(
    rounds: tuple[Any, ...], attention: Attention | None, aggregate: Any, return_weights: bool
) -> tuple[Round, ...]:
    """The rounds of an attention with what the operator decides. The attention's own stay as they are: it may keep
    them.

    Raises:
        TypeError, ValueError: they are no rounds, or they have what the operator sets.
    """
    if attention is None:  # the operator has made the rounds itself
        for round in rounds:
            round.reduce = aggregate
            round.return_weights = return_weights
        return rounds
    normalize = attention.normalize
    dropout = attention.dropout if attention.training else 0.0
    options = {"normalize": normalize, "dropout": dropout, "reduce": aggregate, "return_weights": return_weights}
    others = []
    for round in rounds:
        if not isinstance(round, Round):
            owner, kind = map(parts.describe, (attention, round))
            raise TypeError(f"forward of an attention must return a Round; {owner} returned {kind}")
        if round.normalize != "softmax" or round.dropout or type(round.reduce) is not Sum or round.return_weights:
            raise ValueError(
                f"{parts.describe(attention)} set normalize, dropout, reduce or return_weights of its round, which the "
                "operator sets: give the attention the attributes `normalize` and `dropout`, and the operator its "
                "aggregate"
            )
        # As `round.with_fields`, without its call.
        other = object.__new__(type(round))
        other.__dict__ = round.__dict__ | options
        others.append(other)
    return tuple(others)


def _prepared(update: Update, x: Tensor) -> Tensor:
    """`update.prepare(x)` of valid features. If torch fails, whose message names no argument, the update says what does
    not fit."""
    if type(x) is not Tensor or x.is_nested or x.dim() < 2 or not x.is_floating_point():
        parts.check_features("x", x)
    try:
        return update.prepare(x)
    except RuntimeError:
        update.check(x, None)
        raise


whole_layer.remember(MessagePassing)
