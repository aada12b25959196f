"""The operator: one round of message passing over a graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpnn import engine
from mpnn.aggregate import PNA, SUM, Aggregator, Index, Sum, aggregator
from mpnn.attention import Attention
from mpnn.attention.recurrent import Recurrent
from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph, html
from mpnn.graph.exchange import LOCAL, Exchange, Layer
from mpnn.graph.sharding import active
from mpnn.graph.topology import Topology
from mpnn.graphs import jagged
from mpnn.graphs.explicit import edges_into
from mpnn.round import Round, validation
from mpnn.update import EdgeUpdate, Update, as_update
from mpnn.update.dropout import drop_edges

Source = Tensor | Callable[[Tensor], Tensor] | None
"""Features of the sources, or a function that computes them from the prepared features of the destinations."""


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

    gradient_checkpointing: bool = False
    _gradient_checkpointing_func: Callable[..., Any] = staticmethod(partial(checkpoint, use_reentrant=False))

    def __init__(
        self,
        graph: Topology | Graph | None,
        aggregate: str | Aggregator | Callable[[Tensor, Index], Tensor] = "sum",
        update: Update | Callable[[Tensor, Tensor], Tensor] | None = None,
        attention: Attention | None = None,
        *,
        edges: EdgeUpdate | None = None,
        edge_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.graph, self.backend, self.edge_dropout = graph, backend, edge_dropout
        self.aggregate: Any = aggregate
        self.update: Update = update  # type: ignore[assignment]  # __setattr__ converts it to an Update
        self.attention, self.edges = attention, edges

    def __setattr__(self, name: str, value: Any) -> None:
        """Validates a part of the operator, in the constructor and when it is replaced."""
        super().__setattr__(name, _PARTS[name](value) if name in _PARTS else value)

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
            return self._over_sequences(x, graph, source, edge_attr, return_weights, cache)
        if self.gradient_checkpointing and self.training and cache is None and torch.is_grad_enabled():
            run = partial(self._forward, graph, return_weights, None)
            return self._gradient_checkpointing_func(run, x, source, edge_attr)
        return self._forward(graph, return_weights, cache, x, source, edge_attr)

    @torch.compiler.disable
    def _over_sequences(
        self,
        x: Tensor,
        graph: Topology | Graph | None,
        source: Source,
        edge_attr: Tensor | None,
        return_weights: bool,
        cache: KVCache | None,
    ) -> Any:
        """`forward` of jagged features."""
        if cache is not None:
            raise ValueError("a cache holds sequences of one length; x is jagged")
        graph = jagged.graph_of(self._graph_or_default(graph), x, source if isinstance(source, Tensor) else x)
        source = jagged.values_of("source", source)
        found = self(jagged.values_of("x", x), graph, source, edge_attr, return_weights)
        return (jagged.like(found[0], x), found[1]) if isinstance(found, tuple) else jagged.like(found, x)

    def _forward(
        self,
        graph: Topology | Graph | None,
        return_weights: bool,
        cache: KVCache | None,
        x: Tensor,
        source: Source,
        edge_attr: Tensor | None,
    ) -> Any:
        """`forward` without checkpointing; tensors come last."""
        if self.edges is not None:
            edge_attr, sums = self._new_states(self.edges, graph, return_weights, cache, x, source, edge_attr)
            if sums is not None and self.attention is None and type(self.aggregate) is Sum and self.backend == "auto":
                return self.update(x, sums), edge_attr
        rounds = self.rounds(x, graph, source, edge_attr, return_weights, cache)
        exchange = LOCAL if torch.compiler.is_compiling() else rounds[0].graph.exchange
        out, weights = exchange.run(rounds, self._run)
        attention = self.attention
        if cache is not None and weights is not None and rounds[0].return_state:
            cache.keep_state(self, weights, x.shape[-2])
        message = out.flatten(-2) if attention is None else attention.merge(out)
        try:
            y = self.update(x, message)
        except RuntimeError:  # torch's own message names no argument
            self.update.check(x, message)
            raise
        if self.edges is not None:
            return y, edge_attr
        return (y, weights) if return_weights else y

    def _new_states(
        self,
        edges: EdgeUpdate,
        graph: Topology | Graph | None,
        return_weights: bool,
        cache: KVCache | None,
        x: Tensor,
        source: Source,
        edge_attr: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The new states of all edges, in the caller's order, and their sums where the kernel has them."""
        if cache is not None or return_weights or self.edge_dropout:
            raise ValueError("an operator with edges= takes no cache, return_weights or edge_dropout")
        _check_features("x", x)
        dst = self.update.prepare(x)
        src = source(dst) if callable(source) else dst if source is None else source
        graph = self._graph_or_default(graph)
        if active() is not None or (isinstance(graph, Graph) and graph.exchange is not LOCAL):
            raise ValueError("states of edges are not divided over processes: call it outside of mpnn.distributed")
        bound = self._bound(graph, dst, src, Layer(None, self.aggregate, False, False, False))
        edge_attr = bound.edge_attr if edge_attr is None else _checked_edges(edge_attr, bound)
        return edges(validation.edge_features("an operator with edges=", edge_attr), dst, src, bound)

    def rounds(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Source = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: KVCache | None = None,
    ) -> tuple[Round, ...]:
        """The rounds that a call with these arguments runs: one, unless an exchange between processes needs more.
        `mpnn.explain` shows the plan of the first."""
        _check_features("x", x)
        try:
            prepared = self.update.prepare(x)
        except RuntimeError:
            self.update.check(x, None)
            raise
        if callable(source):
            source = source(prepared)
        if source is not None:
            _check_features("source", source)
        src = prepared if source is None else source
        graph, attention = self._graph_or_default(graph), self.attention
        rounds: tuple[Round, ...]
        try:
            if cache is not None:
                if not isinstance(cache, KVCache):
                    raise TypeError(f"cache must be an mpnn.decoding.cache.KVCache; got {_describe(cache)}")
                rounds = (cache.round(self, graph, prepared, source, edge_attr),)
            else:
                rounds = self._attend(attention, graph, prepared, src, edge_attr, return_weights)
        except RuntimeError:
            if attention is not None:
                _check_widths(attention, prepared, src)
            raise
        for round in rounds:
            self._complete(round, attention, return_weights)
        return rounds

    def _attend(
        self,
        attention: Attention | None,
        graph: Topology | Graph,
        dst: Tensor,
        src: Tensor,
        edge_attr: Tensor | None,
        return_weights: bool,
    ) -> tuple[Round, ...]:
        """The rounds of an attention over the bound graph."""
        drops_edges = self.training and self.edge_dropout > 0
        options = return_weights, self.mixes_values, drops_edges
        layer = Layer(attention, self.aggregate, *options, dst.dtype, dst.shape[:-2], self)
        bound = self._bound(graph, dst, src, layer)
        exchange = LOCAL if torch.compiler.is_compiling() else bound.exchange
        if exchange is not LOCAL:
            _check_divisible(layer, exchange)
        edge_attr = bound.edge_attr if edge_attr is None else _checked_edges(edge_attr, bound)
        if drops_edges:
            if return_weights:
                raise ValueError("edges dropped by edge_dropout have no weights to return; call eval() first")
            bound, edge_attr = drop_edges(bound, edge_attr, self.edge_dropout)
        if self.edges is not None and attention is None and edge_attr is not None:
            into = bound.derive(edges_into, num_dst=bound.num_dst, num_src=bound.num_edges)
            return (Round(into, edge_attr.unsqueeze(-2)),)
        if attention is None:
            return (Round(bound, exchange(src).unsqueeze(-2)),)
        return exchange.rounds(attention, dst, src, bound, edge_attr)

    def _complete(self, round: Round, attention: Attention | None, return_weights: bool) -> None:
        """Sets what the operator decides, in place: nothing else has the round yet."""
        if not isinstance(round, Round):
            raise TypeError(
                f"forward of an attention must return a Round; {_describe(attention)} returned {_describe(round)}"
            )
        if round.normalize != "softmax" or round.dropout or round.reduce is not SUM or round.return_weights:
            raise ValueError(
                f"{_describe(attention)} set normalize, dropout, reduce or return_weights of its round, which the "
                "operator sets: give the attention the attributes `normalize` and `dropout`, and the operator its "
                "aggregate"
            )
        round.normalize = "none" if attention is None else attention.normalize
        round.dropout = attention.dropout if attention is not None and attention.training else 0.0
        round.reduce, round.return_weights = self.aggregate, return_weights

    mixes_values = False
    """Whether the result also depends on the values of the destinations themselves; see `models.layers.propagation`."""

    def _run(self, round: Round) -> tuple[Tensor, Tensor | None]:
        """Runs one round."""
        out, weights = engine.run(round, self.backend)
        if self.training and self.edge_dropout and (scale := self._edge_scale(round)) != 1:
            out = scale * out
        return out, weights

    def _edge_scale(self, round: Round) -> float:
        """The factor that keeps the expectation of a message while edges are dropped: 1 / (1 - p) for a sum whose
        weights are not normalized, which grows with the number of edges."""
        balanced = round.weighted and round.normalize not in ("sigmoid", "none")
        balanced = balanced or (self.attention is not None and self.attention.balanced)
        drops = self.training and self.edge_dropout and not balanced and type(self.aggregate) is Sum
        return 1 / (1 - self.edge_dropout) if drops else 1.0

    def _repr_html_(self) -> str:
        parts = [("aggregate", type(self.aggregate).__name__), ("update", type(self.update).__name__)]
        parts += [("attention", "none" if self.attention is None else repr(self.attention).splitlines()[0].rstrip("("))]
        parts += [("backend", self.backend), ("parameters", f"{sum(p.numel() for p in self.parameters()):,}")]
        return html.of_operator(type(self).__name__, parts, self.graph)

    def extra_repr(self) -> str:
        graph = "passed to forward" if self.graph is None else repr(self.graph)
        return f"graph={graph}, aggregate={type(self.aggregate).__name__}"

    def _graph_or_default(self, graph: Topology | Graph | None) -> Topology | Graph:
        if graph is not None:
            return _check_graph(graph)
        if self.graph is None:
            raise ValueError("this operator has no graph; pass one with the call: op(x, graph=...)")
        return self.graph

    def _bound(self, graph: Topology | Graph, x: Tensor, source: Tensor, layer: Layer) -> Graph:
        """The graph of a call: bound to the sizes of its features, and this process's part while nodes are sharded."""
        num_dst, num_src = x.shape[-2], source.shape[-2]
        compiles, sharding = torch.compiler.is_compiling(), active()
        # a program checks when it runs that its graph is whole
        is_part = not compiles and isinstance(graph, Graph) and graph.exchange is not LOCAL
        if sharding is not None and compiles:
            raise ValueError("torch.compile does not trace layers over a part of a graph; leave them uncompiled")
        if sharding is not None and isinstance(graph, Graph) and graph.stack:
            raise ValueError(f"{graph} differs by item and head, and its nodes are not divided over processes")
        if sharding is not None and not is_part:
            graph = sharding.part(graph, num_dst, num_src, layer).to(x.device)
        if isinstance(graph, Topology):
            if compiles:
                return engine.outline(graph, num_dst, num_src, x.device)
            return graph.bind(num_dst, num_src).to(x.device)
        validation.device(graph, x)
        is_part = not compiles and graph.exchange is not LOCAL
        expected = graph.exchange.rows if is_part else (graph.num_dst, graph.num_src)
        if expected != (num_dst, num_src):
            whose = "this process's part of the graph has" if is_part else "the graph has"
            raise ValueError(
                f"{whose} {expected[0]} destinations and {expected[1]} sources, but the features have "
                f"{num_dst} and {num_src} (shapes {list(x.shape)} and {list(source.shape)})"
            )
        return engine.outline(graph, num_dst, num_src, x.device) if compiles else graph


def _check_divisible(layer: Layer, exchange: Exchange) -> None:
    """Raises ValueError if a layer needs more of a graph than this process's part."""
    attention, aggregate = layer.attention, layer.aggregate
    if isinstance(attention, Recurrent):
        raise ValueError(
            f"{type(attention).__name__} passes a state from node to node, and its nodes are not divided over processes"
        )
    if attention is not None and attention.depends_on == "graph":
        raise ValueError(
            f"{type(attention).__name__} does not state what its features depend on, so its nodes are not divided over "
            'processes; if those of a node depend on that node alone, write depends_on = "node" in the class'
        )
    validation.transport(exchange, layer)
    if isinstance(aggregate, PNA) and aggregate.average_log_degree is None:
        raise ValueError(
            f"{type(aggregate).__name__} takes the mean of log(degree + 1) over all nodes, and this process has a part "
            "of them; pass average_log_degree=(graph.degree() + 1).log().mean() of the whole graph"
        )


def _check_widths(attention: Attention, x: Tensor, source: Tensor) -> None:
    """Raises ValueError or TypeError if the attention's maps do not accept the features; called when torch failed."""
    owner, (of_dst, of_src) = type(attention).__name__, attention.takes()
    validation.fits(owner, "x", x, of_dst)
    validation.fits(owner, "x" if x is source else "source", source, of_src)


def _check_graph(graph: Any) -> Topology | Graph:
    if isinstance(graph, (Topology, Graph)):
        return graph
    advice = {
        Tensor: "; an edge_index becomes one by graphs.from_edges(edge_index, num_nodes)",
        str: "; text becomes one by graphs.parse(text)",
    }
    raise TypeError(f"graph must be a Topology, a Graph or None; got {_describe(graph)}{advice.get(type(graph), '')}")


def _graph_or_none(graph: Any) -> Topology | Graph | None:
    return None if graph is None else _check_graph(graph)


def _an_or_none(kind: type, name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be an {kind.__name__} or None; got {_describe(value)}")
    return value


def _aggregator(aggregate: Any) -> Any:
    _check_order("aggregate", aggregate, Attention, Update)
    return aggregator(aggregate)


def _update(update: Any) -> Update:
    _check_order("update", update, Attention)
    return as_update(update)


def _check_order(name: str, argument: Any, *wrong: type) -> None:
    """Raises TypeError if `argument` has a type that belongs to another argument of MessagePassing."""
    if isinstance(argument, wrong):
        raise TypeError(
            f"{name} is {_describe(argument)}; the order is MessagePassing(graph, aggregate, update, attention)"
        )


_PARTS: dict[str, Callable[[Any], Any]] = {
    "graph": _graph_or_none,
    "aggregate": _aggregator,
    "update": _update,
    "attention": partial(_an_or_none, Attention, "attention"),
    "edges": partial(_an_or_none, EdgeUpdate, "edges"),
    "edge_dropout": partial(validation.rate, "edge_dropout"),
}
"""For each attribute of an operator, the function that validates and converts it."""


def _checked_edges(edge_attr: Tensor, graph: Graph) -> Tensor:
    """Validates attributes passed with the call. While a program is traced, the number of edges is not known."""
    validation.tensor("edge_attr", edge_attr)
    if not torch.compiler.is_compiling() and graph.num_edges not in edge_attr.shape:
        raise ValueError(
            f"edge_attr must have a row for each of the {graph.num_edges} edges; got {list(edge_attr.shape)}"
        )
    return edge_attr


def _describe(argument: Any) -> str:
    """The type of a wrong argument, for an error message."""
    if isinstance(argument, type):
        return f"the class {argument.__name__}, not an instance"
    return type(argument).__name__


def _check_features(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.is_nested or x.dim() < 2:
        if isinstance(x, Tensor):
            validation.tensor(name, x)
        shown = list(x.shape) if isinstance(x, Tensor) else None if x is None else _describe(x)
        order = "; the order is op(x, graph)" if isinstance(x, (Graph, Topology)) else ""
        raise ValueError(f"{name} must be a tensor [..., N, d]; got {shown}{order}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}")
