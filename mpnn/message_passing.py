"""The one operator: a round of message passing over a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpnn import check, eager, ops
from mpnn.aggregate import SUM, Aggregator, Diffusion, Index, Sum, aggregator
from mpnn.attention import Attention, Terms
from mpnn.decoding import Cache
from mpnn.graph import Graph
from mpnn.scores import Request
from mpnn.topology import Topology
from mpnn.update import Update, as_update


class MessagePassing(nn.Module):
    """One layer of any network that passes messages: a graph, and what to do along it.

        h    = update.prepare(x)
        w_ij = normalise_j( attention.score(h_i, h_j, e_ij) )                     over the j that i hears
        m_i  = attention.merge( aggregate_j( w_ij * attention.value(h_j, e_ij) ) )
        y_i  = update(x_i, m_i)

    Args:
        graph: a `Topology`, bound to the length of each input; a `Graph`; or None, then given with each call.
        aggregate: "sum", "mean", "max", ..., an object with `reduce(messages, index)`, or such a function; messages are
            [E, batch..., H, D], see `mpnn.aggregate`, whose `per_node` is for aggregators that rank messages.
        update: None (the message itself), an `Update` such as `PreNorm(dim, FeedForward(dim))`, or a function of
            (x, message).
        attention: an `Attention` such as `DotProduct(dim, heads)`, or None: every source counts alike.
        edge_dropout: in training, the probability that an edge is left out of a round (DropEdge, Rong et al. 2020).
            Means, and weights normalised over the neighbours, are taken over those left; sums are scaled up by
            1 / (1 - p), so that they stay what they are on average.
        backend: "auto", or the name of one, which then runs or raises with its reason.

    Where `gradient_checkpointing` is True, a round in training keeps its inputs alone and is computed a second time in
    the backward pass (Chen et al. 2016). transformers' `gradient_checkpointing_enable` sets it, as on its own layers.
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
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.graph, self.backend, self.edge_dropout = graph, backend, edge_dropout
        self.aggregate: Any = aggregate
        self.update: Update = update  # type: ignore[assignment]  # an Update once it is kept
        self.attention = attention

    def __setattr__(self, name: str, value: Any) -> None:
        """Parts that are replaced are checked as those that the operator is made with."""
        super().__setattr__(name, _PARTS[name](value) if name in _PARTS else value)

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Tensor | None = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: Cache | None = None,
    ) -> Any:
        """One round.

        Args:
            x: the destinations' features, [N, d] or [batch..., N, d]; one graph serves the whole batch.
            graph: takes the place of the operator's own.
            source: the sources' features where these are other nodes, [..., N_src, d_src].
            edge_attr: [E, ...] in the caller's edge order; default: the graph's.
            return_weights: also return the attention weights before dropout, [..., E, H] in the caller's edge order.
            cache: x are the next nodes of those that this cache has seen, and hear these too.

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
        cache: Cache | None,
        x: Tensor,
        source: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Any:
        """`forward`, tensors last."""
        request = self.request(x, graph, source, edge_attr, return_weights, cache)
        if isinstance(self.aggregate, Diffusion):
            out, weights = _diffuse(request, self.aggregate, self.backend)
        else:
            out, weights = ops.run(request, self.backend)
        if self.training and self.edge_dropout and self._sums_up(request):
            out = out / (1 - self.edge_dropout)
        attention = self.attention
        message = out.flatten(-2) if attention is None else attention.merge(out)
        try:
            y = self.update(x, message)
        except RuntimeError:  # torch's own sentence names no argument
            self.update.check(x, message)
            raise
        return (y, weights) if return_weights else y

    def request(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        source: Tensor | None = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        cache: Cache | None = None,
    ) -> Request:
        """What a backend would be asked for this call; `mpnn.explain` shows its plan."""
        _check_features("x", x)
        if source is not None:
            _check_features("source", source)
        try:
            prepared = self.update.prepare(x)
        except RuntimeError:
            self.update.check(x, None)
            raise
        if cache is not None:
            return self._next(prepared, graph, source, edge_attr, return_weights, cache)
        if source is None:
            source = prepared
        bound = self._bound(graph, x, source)
        edge_attr = bound.edge_attr if edge_attr is None else _checked_edges(edge_attr, bound)
        if self.training and self.edge_dropout:
            if return_weights:
                raise ValueError("edges that edge_dropout leaves out have no weights to return; call eval() before")
            bound = bound.drop_edges(self.edge_dropout)
            if edge_attr is not None:
                edge_attr = edge_attr[bound.kept]
        attention = self.attention
        if attention is None:
            reduce = SUM if isinstance(self.aggregate, Diffusion) else self.aggregate
            return Request(bound, source.unsqueeze(-2), normalize="none", reduce=reduce, return_weights=return_weights)
        try:
            terms = attention(prepared, source, bound, edge_attr)
        except RuntimeError:
            _check_widths(attention, prepared, source)
            raise
        return self._asked(bound, attention, terms, return_weights)

    def _next(
        self,
        prepared: Tensor,
        graph: Topology | Graph | None,
        source: Tensor | None,
        edge_attr: Tensor | None,
        return_weights: bool,
        cache: Cache,
    ) -> Request:
        """The request of nodes that come after those in the cache."""
        if not isinstance(cache, Cache):
            raise TypeError(f"cache must be an mpnn.decoding.Cache; got {_named(cache)}")
        if edge_attr is not None or isinstance(self.aggregate, Diffusion) or (self.training and self.edge_dropout):
            raise ValueError("with a cache there is no edge_attr of the call, no Diffusion and no edge_dropout")
        attention = self.attention
        try:
            bound, terms = cache.hear(self, attention, self._given(graph), prepared, source)
        except RuntimeError:
            if attention is not None:
                _check_widths(attention, prepared, prepared if source is None else source)
            raise
        assert attention is not None
        return self._asked(bound, attention, terms, return_weights)

    def _asked(self, bound: Graph, attention: Attention, terms: Terms, return_weights: bool) -> Request:
        if not isinstance(terms, Terms):
            raise TypeError(f"forward of an attention gives Terms; {_named(attention)} gave {_named(terms)}")
        reduce = SUM if isinstance(self.aggregate, Diffusion) else self.aggregate
        return Request(
            bound if terms.graph is None else terms.graph,
            terms.value,
            terms.score,
            terms.bias,
            terms.edge_value,
            normalize=attention.normalize,
            dropout=attention.dropout if self.training else 0.0,
            reduce=reduce,
            return_weights=return_weights,
        ).told()

    def _sums_up(self, request: Request) -> bool:
        """Whether a message grows with the number of edges, nothing being normalised over them."""
        softmax = request.weighted and request.normalize == "softmax"
        balanced = softmax or (self.attention is not None and self.attention.balanced)
        return isinstance(self.aggregate, Sum) and not balanced

    def extra_repr(self) -> str:
        graph = "given at call" if self.graph is None else repr(self.graph)
        return f"graph={graph}, aggregate={type(self.aggregate).__name__}"

    def _given(self, graph: Topology | Graph | None) -> Topology | Graph:
        if graph is not None:
            return _check_graph(graph)
        if self.graph is None:
            raise ValueError("this operator was made without a graph; give one with the call: op(x, graph=...)")
        return self.graph

    def _bound(self, graph: Topology | Graph | None, x: Tensor, source: Tensor) -> Graph:
        given = self._given(graph)
        num_dst, num_src = x.shape[-2], source.shape[-2]
        if isinstance(given, Topology):
            if torch.compiler.is_compiling():
                return ops.outline(given, num_dst, num_src, x.device)
            return given.bind(num_dst, num_src).to(x.device)
        check.device(given, x)
        if (given.num_dst, given.num_src) != (num_dst, num_src):
            raise ValueError(
                f"the graph has {given.num_dst} destinations and {given.num_src} sources, but the features have "
                f"{num_dst} and {num_src} (shapes {list(x.shape)} and {list(source.shape)})"
            )
        return ops.outline(given, num_dst, num_src, x.device) if torch.compiler.is_compiling() else given


def _diffuse(request: Request, diffusion: Diffusion, backend: str) -> tuple[Tensor, Tensor | None]:
    """Weights once, then several rounds with the same ones."""
    request = eager.checked(request)
    graph, alpha = request.graph, diffusion.alpha
    if not request.weighted:
        raise ValueError("Diffusion spreads attention weights; give the operator an attention that has them")
    if graph.num_dst != graph.num_src:
        raise ValueError(f"Diffusion needs one set of nodes; the graph is {graph.num_dst} x {graph.num_src}")
    first, weights = ops.run(replace(request, return_weights=True), backend)
    assert weights is not None
    value = request.value.repeat_interleave(request.heads // request.value.shape[-2], -2)
    z = (1 - alpha) * first + alpha * value
    hop = replace(request, score=None, bias=(weights,), normalize="none", return_weights=False)
    for _ in range(diffusion.hops - 1):
        z = (1 - alpha) * ops.run(replace(hop, value=z), backend)[0] + alpha * value
    return z, weights


def _check_widths(attention: Attention, x: Tensor, source: Tensor) -> None:
    """Raises unless features are what the attention's maps take: asked when torch could not compute with them."""
    owner, (of_dst, of_src) = type(attention).__name__, attention.takes()
    check.fits(owner, "x", x, of_dst)
    check.fits(owner, "x" if x is source else "source", source, of_src)


def _check_graph(graph: Any) -> Topology | Graph:
    if isinstance(graph, (Topology, Graph)):
        return graph
    advice = {
        Tensor: "; an edge_index becomes one by graphs.from_edges(edge_index, num_nodes)",
        str: "; text becomes one by graphs.parse(text)",
    }
    raise TypeError(f"graph must be a Topology, a Graph or None; got {_named(graph)}{advice.get(type(graph), '')}")


def _graph_or_none(graph: Any) -> Topology | Graph | None:
    return None if graph is None else _check_graph(graph)


def _attention_or_none(attention: Any) -> Attention | None:
    if attention is not None and not isinstance(attention, Attention):
        raise TypeError(f"attention must be an Attention or None; got {_named(attention)}")
    return attention


def _aggregator(given: Any) -> Any:
    _refuse("aggregate", given, Attention, Update)
    return aggregator(given)


def _update(given: Any) -> Update:
    _refuse("update", given, Attention)
    return as_update(given)


def _refuse(name: str, given: Any, *kinds: type) -> None:
    if isinstance(given, kinds):
        raise TypeError(f"{name} is {_named(given)}; the order is MessagePassing(graph, aggregate, update, attention)")


def _edge_dropout(p: Any) -> float:
    check.rate("edge_dropout", p)
    return float(p)


_PARTS: dict[str, Callable[[Any], Any]] = {
    "graph": _graph_or_none,
    "aggregate": _aggregator,
    "update": _update,
    "attention": _attention_or_none,
    "edge_dropout": _edge_dropout,
}
"""What may stand in each part of an operator, and as what it is kept."""


def _checked_edges(edge_attr: Tensor, graph: Graph) -> Tensor:
    """Attributes that came with the call; while a program is traced, nobody knows the number of edges yet."""
    check.tensor("edge_attr", edge_attr)
    if not torch.compiler.is_compiling() and graph.num_edges not in edge_attr.shape:
        raise ValueError(
            f"edge_attr must have a row for each of the {graph.num_edges} edges; got {list(edge_attr.shape)}"
        )
    return edge_attr


def _named(given: Any) -> str:
    """What was given instead of what was expected, in an error."""
    return f"the class {given.__name__}, not one of it" if isinstance(given, type) else type(given).__name__


def _check_features(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.dim() < 2:
        shown = list(x.shape) if isinstance(x, Tensor) else None if x is None else _named(x)
        order = "; the order is op(x, graph)" if isinstance(x, (Graph, Topology)) else ""
        raise ValueError(f"{name} must be a tensor [..., N, d]; got {shown}{order}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}")
