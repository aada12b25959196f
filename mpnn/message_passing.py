"""The operator: one round of message passing over a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpnn import html, ops
from mpnn.aggregate import PNA, Aggregator, Index, Sum, aggregator
from mpnn.attention import Attention, Terms
from mpnn.decoding.cache import KVCache
from mpnn.engine import dispatch
from mpnn.graph import Graph, transforms
from mpnn.graph.sharding import Exchange, Layer, active
from mpnn.graph.topology import Topology
from mpnn.request import rng, validation
from mpnn.request.request import Request
from mpnn.update import Update, as_update

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
        edge_dropout: the probability that an edge is dropped from a round in training (DropEdge, Rong et al. 2020).
            Means and normalized weights are taken over the remaining edges. Sums are scaled by 1 / (1 - p), which
            keeps their expectation.
        hops, teleport: the number of times that messages are aggregated with the same weights A, and the share of the
            initial values V in each (MAGNA, Wang et al. 2021, eq. 5 to 7; APPNP, Gasteiger et al. 2019):
            `Z_0 = V, Z_{k+1} = (1 - teleport) A Z_k + teleport V`, and Z_hops is merged. Powers of A are not computed.
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
        edge_dropout: float = 0.0,
        hops: int = 1,
        teleport: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.graph, self.backend, self.edge_dropout = graph, backend, edge_dropout
        self.hops, self.teleport = hops, teleport
        self.aggregate: Any = aggregate
        self.update: Update = update  # type: ignore[assignment]  # __setattr__ converts it to an Update
        self.attention = attention

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
            x: features of the destinations, [N, d] or [batch..., N, d]. The whole batch shares one graph.
            graph: replaces the operator's graph.
            source: features of the sources, [..., N_src, d_src], or a function that computes them from `prepare(x)`.
                Default: `prepare(x)`.
            edge_attr: [E, ...] in the caller's edge order. Default: the graph's.
            return_weights: also return the attention weights before dropout, [..., E, H] in the caller's edge order.
            cache: keys and values of the preceding nodes. `x` holds the nodes that follow them and attend to them.

        Returns:
            y [..., N, d_out], or (y, weights).
        """
        if self.gradient_checkpointing and self.training and cache is None and torch.is_grad_enabled():
            run = partial(self._round, graph, return_weights, None)
            return self._gradient_checkpointing_func(run, x, source, edge_attr)
        return self._round(graph, return_weights, cache, x, source, edge_attr)

    def _round(
        self,
        graph: Topology | Graph | None,
        return_weights: bool,
        cache: KVCache | None,
        x: Tensor,
        source: Source,
        edge_attr: Tensor | None,
    ) -> Any:
        """`forward` without checkpointing; tensors come last."""
        request = self.request(x, graph, source, edge_attr, return_weights, cache)
        exchange = request.graph.exchange
        out, weights = self._propagate(request) if exchange is None else exchange.run(request, self._propagate)
        attention = self.attention
        message = out.flatten(-2) if attention is None else attention.merge(out)
        try:
            y = self.update(x, message)
        except RuntimeError:  # torch's own message names no argument
            self.update.check(x, message)
            raise
        return (y, weights) if return_weights else y

    def request(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Source = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: KVCache | None = None,
    ) -> Request:
        """The request that this call would send to a backend. `mpnn.explain` shows its plan."""
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
        if cache is not None:
            return self._next(prepared, graph, source, edge_attr, return_weights, cache)
        if source is None:
            source = prepared
        drops_edges = self.training and self.edge_dropout > 0
        layer = Layer(self.attention, self.aggregate, return_weights, self._mixes_values, drops_edges)
        bound = self._bound(graph, x, source, layer)
        exchange = bound.exchange
        if exchange is not None:
            _check_part(layer, exchange)
        edge_attr = bound.edge_attr if edge_attr is None else _checked_edges(edge_attr, bound)
        if drops_edges:
            if return_weights:
                raise ValueError("edges dropped by edge_dropout have no weights to return; call eval() first")
            bound = _without_edges(bound, self.edge_dropout)
            if edge_attr is not None:
                edge_attr = edge_attr[bound.edge_ids]
        attention = self.attention
        if attention is None:
            value = (source if exchange is None else exchange(source)).unsqueeze(-2)
            return Request(bound, value, normalize="none", reduce=self.aggregate, return_weights=return_weights)
        compute = attention if exchange is None else partial(exchange.terms, attention)
        try:
            terms = compute(prepared, source, bound, edge_attr)
        except RuntimeError:
            _check_widths(attention, prepared, source)
            raise
        request = self._request_of(bound, attention, terms, return_weights)
        return request if exchange is None else exchange.request(request, terms)

    def _next(
        self,
        prepared: Tensor,
        graph: Topology | Graph | None,
        source: Tensor | None,
        edge_attr: Tensor | None,
        return_weights: bool,
        cache: KVCache,
    ) -> Request:
        """The request for nodes that follow the cached nodes."""
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be an mpnn.decoding.cache.KVCache; got {_describe(cache)}")
        if active() is not None:
            raise ValueError("a cache cannot be used while nodes are sharded over processes: decode on one process")
        if edge_attr is not None or self._mixes_values or (self.training and self.edge_dropout):
            raise ValueError("a cache cannot be combined with edge_attr, hops, teleport or edge_dropout")
        attention = self.attention
        try:
            bound, terms = cache.update(self, attention, self._graph_or_default(graph), prepared, source)
        except RuntimeError:
            if attention is not None:
                _check_widths(attention, prepared, prepared if source is None else source)
            raise
        assert attention is not None
        return self._request_of(bound, attention, terms, return_weights)

    def _request_of(self, bound: Graph, attention: Attention, terms: Terms, return_weights: bool) -> Request:
        if not isinstance(terms, Terms):
            raise TypeError(
                f"forward of an attention must return Terms; {_describe(attention)} returned {_describe(terms)}"
            )
        return Request(
            bound if terms.graph is None else terms.graph,
            terms.value,
            terms.score,
            terms.bias,
            terms.edge_value,
            normalize=attention.normalize,
            dropout=attention.dropout if self.training else 0.0,
            reduce=self.aggregate,
            return_weights=return_weights,
        )

    @property
    def _mixes_values(self) -> bool:
        """Whether the result depends on the values of the destinations themselves, which need one set of nodes."""
        return self.hops > 1 or self.teleport > 0

    def _propagate(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """Aggregates the values over all hops. The weights are computed in the first hop only."""
        scale = 1 - self.teleport
        if self.training and self.edge_dropout and self._scales_with_degree(request):
            scale = scale / (1 - self.edge_dropout)
        exchange = request.graph.exchange
        if self._mixes_values and exchange is None and request.graph.num_dst != request.graph.num_src:
            raise ValueError(
                f"hops and teleport need one set of nodes; the graph is {request.graph.num_dst} x "
                f"{request.graph.num_src} (destinations x sources)"
            )
        if self.hops > 1:
            request = dispatch.normalize(request)  # one seed, so that all hops drop the same edges
        reuses_weights = self.hops > 1 and request.weighted
        out, weights = ops.run(replace(request, return_weights=True) if reuses_weights else request, self.backend)
        if scale != 1:
            out = scale * out
        if not self._mixes_values:
            return out, weights
        value = request.value.repeat_interleave(request.heads // request.value.shape[-2], -2)
        value = value if exchange is None else value.index_select(-3, exchange.own)
        out = out + self.teleport * value
        hop = replace(request, return_weights=False)
        if weights is not None:
            hop = replace(hop, score=None, bias=(weights,), normalize="none")
        for _ in range(self.hops - 1):
            out = out if exchange is None else exchange(out, -3)
            out = scale * ops.run(replace(hop, value=out), self.backend)[0] + self.teleport * value
        return out, weights

    def _scales_with_degree(self, request: Request) -> bool:
        """Whether a message grows with the number of edges: a sum whose weights are not normalized."""
        softmax = request.weighted and request.normalize == "softmax"
        balanced = softmax or (self.attention is not None and self.attention.balanced)
        return isinstance(self.aggregate, Sum) and not balanced

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

    def _bound(self, graph: Topology | Graph | None, x: Tensor, source: Tensor, layer: Layer) -> Graph:
        graph = self._graph_or_default(graph)
        num_dst, num_src = x.shape[-2], source.shape[-2]
        sharding, is_part = active(), isinstance(graph, Graph) and graph.exchange is not None
        if (sharding is not None or is_part) and torch.compiler.is_compiling():
            raise ValueError("torch.compile does not trace layers over a part of a graph; leave them uncompiled")
        if sharding is not None and not is_part:
            graph = sharding.part(graph, num_dst, num_src, layer).to(x.device)
        if isinstance(graph, Topology):
            if torch.compiler.is_compiling():
                return ops.outline(graph, num_dst, num_src, x.device)
            return graph.bind(num_dst, num_src).to(x.device)
        validation.device(graph, x)
        expected = (graph.num_dst, graph.num_src) if graph.exchange is None else graph.exchange.rows
        if expected != (num_dst, num_src):
            whose = "the graph has" if graph.exchange is None else "this process's part of the graph has"
            raise ValueError(
                f"{whose} {expected[0]} destinations and {expected[1]} sources, but the features have "
                f"{num_dst} and {num_src} (shapes {list(x.shape)} and {list(source.shape)})"
            )
        return ops.outline(graph, num_dst, num_src, x.device) if torch.compiler.is_compiling() else graph


def _without_edges(graph: Graph, p: float) -> Graph:
    """The graph without each edge with probability p. Parts of a graph drop what the whole does: by a hash of the ends'
    numbers, so that repeated edges are dropped together."""
    if graph.node_ids is None:
        return graph.drop_edges(p)
    src, dst = graph.edge_index
    seed = rng.new_seed(graph.device)
    return transforms.keep_edges(graph, rng.keep(seed, torch.zeros_like(seed), *rng.numbers(graph, dst, src), p))


def _check_part(layer: Layer, exchange: Exchange) -> None:
    """Raises ValueError if a layer needs more of a graph than this process's part."""
    aggregate = layer.aggregate
    if (reason := exchange.refusal(layer)) is not None:
        raise ValueError(reason)
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


def _attention_or_none(attention: Any) -> Attention | None:
    if attention is not None and not isinstance(attention, Attention):
        raise TypeError(f"attention must be an Attention or None; got {_describe(attention)}")
    return attention


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


def _edge_dropout(p: Any) -> float:
    validation.rate("edge_dropout", p)
    return float(p)


def _hops(hops: Any) -> int:
    if not isinstance(hops, int) or hops < 1:
        raise ValueError(f"hops must be an integer of at least 1; got {hops!r}")
    return hops


def _teleport(share: Any) -> float:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"teleport must lie in [0, 1]; got {share}")
    return float(share)


_PARTS: dict[str, Callable[[Any], Any]] = {
    "graph": _graph_or_none,
    "aggregate": _aggregator,
    "update": _update,
    "attention": _attention_or_none,
    "edge_dropout": _edge_dropout,
    "hops": _hops,
    "teleport": _teleport,
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
    if isinstance(x, Tensor) and x.is_nested:
        validation.tensor(name, x)
    if not isinstance(x, Tensor) or x.dim() < 2:
        shown = list(x.shape) if isinstance(x, Tensor) else None if x is None else _describe(x)
        order = "; the order is op(x, graph)" if isinstance(x, (Graph, Topology)) else ""
        raise ValueError(f"{name} must be a tensor [..., N, d]; got {shown}{order}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}")
