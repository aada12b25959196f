"""Convolutions of PyTorch Geometric that run on mpnn's kernels: one small subclass for each.

A subclass overrides either `propagate` (everything else in `forward` stays PyTorch Geometric's) or, where `forward`
adds self-loops or splits attention into two steps, `forward`. It has no state of its own, so that `mpnn.pyg.use` can
assign it as the class of an existing convolution. Calls that it does not compute go to the base class:

- calls that return attention weights, an explainer's, and those of a convolution with hooks on its propagation, with
  `decomposed_layers`, inside `torch.compile` or `torch.jit`
- features that are not floating point, adjacency matrices in COO that are not coalesced, or in CSC

To add a convolution: write its subclass, and list it in `CONVOLUTIONS`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.jit._trace import is_tracing
from torch_geometric.nn.aggr import DegreeScalerAggregation, MultiAggregation
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

from mpnn import engine, ops
from mpnn.aggregate import Aggregator, aggregator
from mpnn.graph import Graph
from mpnn.graphs import edges_into
from mpnn.integrations.pyg.graph_cache import (
    cached,
    cached_pair,
    graph_of,
    is_edge_index,
    is_supported,
    values_of,
)
from mpnn.integrations.pyg.pna import ClampedStd
from mpnn.request.request import Request
from mpnn.request.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Score

HOOKS = [
    f"_{what}_forward_{when}hooks"
    for what in ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")
    for when in ("pre_", "")
]


class Replacement:
    """Base class of all replacements; comes before the convolution in the bases.

    `node_dim` is the dimension of the nodes that the replacement needs.
    """

    node_dim_needed = -2
    several_aggregators = False

    @classmethod
    def refusal(cls, conv: Any) -> str | None:
        """Why this convolution cannot be replaced, or None if it can."""
        if conv.node_dim != cls.node_dim_needed:
            return f"node_dim = {conv.node_dim}, not {cls.node_dim_needed}"
        reducers = _reducers(conv.aggr_module)
        if reducers is None or (len(reducers) > 1 and not cls.several_aggregators):
            return f"aggr = {conv.aggr!r}"
        return None

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Does nothing: copies and unpickled convolutions keep the methods of this class, not generated ones."""

    def computes(self, edges: Any, *features: Any, size: Any = None) -> bool:
        """Whether this call runs here, rather than in the base class. `features` are those of the nodes that send and
        of those that receive, if there are two sets."""
        conv: Any = self
        if conv.explain or conv.decomposed_layers > 1 or any(getattr(conv, name) for name in HOOKS):
            return False
        if torch.compiler.is_compiling() or is_tracing() or not is_supported(edges):
            return False
        if conv.flow != "source_to_target" and len({*map(len, features), *(size or ())}) > 1:
            return False  # PyTorch Geometric mixes up the sizes of the two sets
        return all(isinstance(x, Tensor) and x.is_floating_point() for x in features)

    def bind(self, edges: Any, size: Any, x: Any) -> tuple[Graph, Tensor]:
        """The graph, and the features of the nodes that send: the first of a pair, whatever the flow."""
        conv: Any = self
        sizes = conv._check_input(edges, size)
        sender, receiver = x if isinstance(x, (tuple, list)) else (x, None)
        for k, features in enumerate((sender, receiver)):
            if features is not None:
                conv._set_size(sizes, k, features)
        return graph_of(edges, sizes[0], sizes[0] if sizes[1] is None else sizes[1], conv.flow), sender

    def attend(
        self, edges: Any, size: Any, value: tuple[Tensor, Tensor], score: Score, edge_value: Tensor | None = None
    ) -> Tensor:
        """Attention with this score, a softmax and dropout: [N, heads, channels] -> the concatenation or mean of the
        heads."""
        conv: Any = self
        graph, sender = self.bind(edges, size, value)
        reduce = (_reducers(conv.aggr_module) or ["sum"])[0]
        dropout = float(conv.dropout) if conv.training else 0.0
        request = Request(graph, sender, score, edge_value=edge_value, dropout=dropout, reduce=aggregator(reduce))
        out = engine.run(request)[0]
        return out.flatten(1) if conv.concat else out.mean(1)


class WeightedSum(Replacement):
    """Messages that are the source's features, times `edge_weight` if there is one."""

    several_aggregators = True

    def propagate(self, edge_index: Any, size: Any = None, **inputs: Any) -> Tensor:
        conv: Any = self
        x = inputs["x"]
        features = [z for z in (x if isinstance(x, (tuple, list)) else (x,)) if z is not None]
        if not self.computes(edge_index, *features, size=size) or inputs.get("edge_type_ptr") is not None:
            result: Tensor = super().propagate(edge_index, size=size, **inputs)  # type: ignore[misc]
            return result
        graph, sender = self.bind(edge_index, size, x)
        weight = _weight(conv, edge_index, inputs)
        return _joined([ops.aggregate(graph, sender, r, weight=weight) for r in _reducers(conv.aggr_module) or ()])


class SAGEConv(WeightedSum, pyg.SAGEConv):
    pass


class GINConv(WeightedSum, pyg.GINConv):
    pass


class GraphConv(WeightedSum, pyg.GraphConv):
    pass


class GatedGraphConv(WeightedSum, pyg.GatedGraphConv):
    pass


class SimpleConv(WeightedSum, pyg.SimpleConv):
    @classmethod
    def refusal(cls, conv: Any) -> str | None:
        if conv.combine_root == "self_loop":
            return "combine_root = 'self_loop', which creates edges at each call"
        return super().refusal(conv)


class GCNConv(WeightedSum, pyg.GCNConv):
    """Caches the edges with loops and their weights, unless a gradient flows to the edge weights."""

    def forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        fixed = edge_weight is None or not (edge_weight.requires_grad and torch.is_grad_enabled())
        ours = self.normalize and not self.cached and fixed and is_edge_index(edge_index)
        if not ours or not self.computes(edge_index, x):
            return super().forward(x, edge_index, edge_weight)
        form = x.size(self.node_dim), self.improved, self.add_self_loops, self.flow, x.dtype
        plain = _plain(edge_index)
        edges, weight = cached_pair(
            edge_index, edge_weight, ("gcn", *form), lambda: gcn_norm(plain, edge_weight, *form)
        )
        out = self.propagate(edges, x=self.lin(x), edge_weight=weight)
        return out if self.bias is None else out + self.bias


class RGCNConv(WeightedSum, pyg.RGCNConv):
    """Caches the edges of each relation, and skips relations without edges."""

    node_dim_needed = 0  # of features [N, F], which integers are not

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        src, dst = x if isinstance(x, tuple) else (x, x)
        if edge_type is None or not is_edge_index(edge_index) or not self.computes(edge_index, src, dst):
            return super().forward(x, edge_index, edge_type)
        plain, kinds = _plain(edge_index), range(self.num_relations)
        relations = cached_pair(
            edge_index, edge_type, ("relations", len(kinds)), lambda: [plain[:, edge_type == kind] for kind in kinds]
        )
        weight, size = self.weight, (src.size(0), dst.size(0))
        if self.num_bases is not None:
            weight = (self.comp @ weight.flatten(1)).view(len(kinds), self.in_channels_l, self.out_channels)
        out = dst.new_zeros(len(dst), self.out_channels)
        for edges, own in zip(relations, weight, strict=True):
            if edges.shape[1]:
                h = self.propagate(edges, x=src, edge_type_ptr=None, size=size)
                if self.num_blocks is None:
                    out = out + h @ own
                else:
                    out = out + torch.einsum("abc,bcd->abd", h.view(len(h), *own.shape[:2]), own).flatten(1)
        if self.root is not None:
            out = out + dst @ self.root
        return out if self.bias is None else out + self.bias


class GATConv(Replacement, pyg.GATConv):
    node_dim_needed = 0

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Any = None, size: Any = None, return_attention_weights: Any = None
    ) -> Any:
        src, dst = x if isinstance(x, (tuple, list)) else (x, x)
        ours = not return_attention_weights and is_edge_index(edge_index)
        if not ours or not self.computes(edge_index, src, dst, size=size):
            return super().forward(x, edge_index, edge_attr, size, return_attention_weights)
        shape = -1, self.heads, self.out_channels
        h_src = (self.lin_src if self.lin is None else self.lin)(src).view(shape)
        shared = self.lin is not None and src is dst
        h_dst = h_src if shared else (self.lin_dst if self.lin is None else self.lin)(dst).view(shape)
        by_src, by_dst = (h_src * self.att_src).sum(-1), (h_dst * self.att_dst).sum(-1)
        edges, edge_attr = _with_loops(self, edge_index, edge_attr, min(size or (len(src), len(dst))))
        by_edge = None
        if edge_attr is not None and self.lin_edge is not None:
            by_edge = (self.lin_edge(_column(edge_attr)).view(shape) * self.att_edge).sum(-1)
        score = AdditiveScore(by_dst, by_src, LeakyReLU(self.negative_slope), by_edge)
        out = self.attend(edges, size, (h_src, h_dst), score)
        if self.res is not None:
            out = out + self.res(dst)
        return out if self.bias is None else out + self.bias


class GATv2Conv(Replacement, pyg.GATv2Conv):
    node_dim_needed = 0

    def forward(self, x: Any, edge_index: Any, edge_attr: Any = None, return_attention_weights: Any = None) -> Any:
        src, dst = x if isinstance(x, (tuple, list)) else (x, x)
        if return_attention_weights or not is_edge_index(edge_index) or not self.computes(edge_index, src, dst):
            return super().forward(x, edge_index, edge_attr, return_attention_weights)
        shape = -1, self.heads, self.out_channels
        h_src = self.lin_l(src).view(shape)
        h_dst = h_src if self.share_weights and src is dst else self.lin_r(dst).view(shape)
        edges, edge_attr = _with_loops(self, edge_index, edge_attr, min(len(src), len(dst)))
        by_edge = None if edge_attr is None else self.lin_edge(_column(edge_attr)).view(shape)
        score = AdditiveV2Score(h_dst, h_src, self.att[0], LeakyReLU(self.negative_slope), by_edge)
        out = self.attend(edges, None, (h_src, h_dst), score)
        if self.res is not None:
            out = out + self.res(dst)
        return out if self.bias is None else out + self.bias


class TransformerConv(Replacement, pyg.TransformerConv):
    node_dim_needed = 0

    def forward(self, x: Any, edge_index: Any, edge_attr: Any = None, return_attention_weights: Any = None) -> Any:
        src, dst = x if isinstance(x, (tuple, list)) else (x, x)
        ours = not isinstance(return_attention_weights, bool) and (edge_attr is None) == (self.lin_edge is None)
        if not ours or not is_edge_index(edge_index) or not self.computes(edge_index, src, dst):
            return super().forward(x, edge_index, edge_attr, return_attention_weights)
        shape = -1, self.heads, self.out_channels
        query, key, value = (
            f(z).view(shape)
            for f, z in zip((self.lin_query, self.lin_key, self.lin_value), (dst, src, src), strict=True)
        )
        by_edge = None if edge_attr is None else self.lin_edge(edge_attr).view(shape)
        score = Dot(query, key, 1 / math.sqrt(self.out_channels), by_edge)
        out = self.attend(edge_index, None, (value, query), score, by_edge)
        if not self.root_weight:
            return out
        root = self.lin_skip(dst)
        if self.lin_beta is None:
            return out + root
        beta = self.lin_beta(torch.cat([out, root, out - root], -1)).sigmoid()
        return beta * root + (1 - beta) * out


class EdgeMessages(Replacement):
    """Messages that the convolution's own `message` computes for each edge; only their aggregation is replaced."""

    several_aggregators = True
    both_ends = False

    def propagate(self, edge_index: Any, size: Any = None, **inputs: Any) -> Tensor:
        conv: Any = self
        x, edge_attr = inputs["x"], inputs["edge_attr"]
        features = [z for z in (x if isinstance(x, (tuple, list)) else (x,)) if z is not None]
        if not is_edge_index(edge_index) or not self.computes(edge_index, *features, size=size):
            result: Tensor = super().propagate(edge_index, size=size, **inputs)  # type: ignore[misc]
            return result
        graph, sender = self.bind(edge_index, size, x)
        src, dst = graph.edge_index
        ends = {"x_j": sender.index_select(conv.node_dim, src)}
        if self.both_ends:
            ends["x_i"] = x.index_select(conv.node_dim, dst)
        messages = conv.message(**ends, edge_attr=edge_attr)
        into = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        parts = [ops.aggregate(into, messages.flatten(1), r) for r in _reducers(conv.aggr_module) or ()]
        out = _joined([part.view(-1, *messages.shape[1:]) for part in parts])
        return _scaled(conv.aggr_module, out, graph)


class GINEConv(EdgeMessages, pyg.GINEConv):
    pass


class PNAConv(EdgeMessages, pyg.PNAConv):
    node_dim_needed, both_ends = 0, True


CONVOLUTIONS: tuple[type[Any], ...] = (
    *(GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, GatedGraphConv),
    *(GraphConv, PNAConv, RGCNConv, SAGEConv, SimpleConv, TransformerConv),
)
REPLACEMENTS = {kind.__bases__[-1]: kind for kind in CONVOLUTIONS}
"""Class in `torch_geometric.nn` -> its replacement."""


def _reducers(module: Any) -> list[str | Aggregator] | None:
    """The aggregators that an aggregation module of PyTorch Geometric concatenates, or None if one is not supported."""
    if type(module) is DegreeScalerAggregation:
        return _reducers(module.aggr)
    if type(module) is MultiAggregation:
        parts = [_reducers(part) for part in module.aggrs]
        flat = [reduce for part in parts for reduce in part or ()]
        return flat if module.mode == "cat" and all(parts) else None
    name = type(module).__name__.removesuffix("Aggregation").lower()
    if name in ("sum", "mean", "max", "min"):
        return [name]
    if name == "std" and not module.var_aggr.semi_grad:
        return [ClampedStd()]
    return ["var"] if name == "var" and not module.semi_grad else None


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts side by side. `torch.cat` would copy a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _scaled(module: Any, out: Tensor, graph: Graph) -> Tensor:
    """Multiplies the aggregate by functions of the in-degree (Corso et al. 2020, eq. 5) if the module is a
    `DegreeScalerAggregation`."""
    if type(module) is not DegreeScalerAggregation:
        return out
    degree = graph.cached("in-degree", graph.degree).to(out.dtype).view(-1, *[1] * (out.dim() - 1))
    linear, log = module.avg_deg_lin, module.avg_deg_log
    factors = {
        "identity": lambda: 1,
        "amplification": lambda: (degree + 1).log() / log,
        "attenuation": lambda: log / (degree.clamp(min=1) + 1).log(),
        "linear": lambda: degree / linear,
        "inverse_linear": lambda: linear / degree.clamp(min=1),
    }
    return torch.cat([out * factors[name]() for name in module.scaler], -1)


def _weight(conv: Any, edges: Any, inputs: dict[str, Any]) -> Tensor | None:
    """The weights of the edges. As PyTorch Geometric: the values of a matrix where it multiplies by the matrix, else
    those passed."""
    weight: Tensor | None = inputs.get("edge_weight")
    if is_edge_index(edges):
        return None if weight is None else weight.view(-1)
    values = values_of(edges)
    if conv.fuse:
        drops = not isinstance(edges, Tensor) and isinstance(conv, (SAGEConv, GINConv, RGCNConv))
        return None if drops else values
    return (values if weight is None else weight) if "edge_weight" in inputs else None


def _with_loops(conv: Any, edges: Tensor, attr: Tensor | None, num_nodes: int) -> tuple[Tensor, Tensor | None]:
    """The edges and their attributes with one self-loop per node, if the convolution adds self-loops."""
    if not conv.add_self_loops:
        return edges, attr

    def build(attr: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return add_self_loops(*remove_self_loops(_plain(edges), attr), fill_value=conv.fill_value, num_nodes=num_nodes)

    looped = cached(edges, ("loops", num_nodes), lambda: build()[0])
    return looped, None if attr is None or conv.lin_edge is None else build(attr)[1]


def _plain(edges: Tensor) -> Tensor:
    """The edges as another plain tensor object, which does not keep `edges` alive."""
    plain: Tensor = edges.as_tensor() if hasattr(edges, "as_tensor") else edges
    return plain.detach()


def _column(attr: Tensor) -> Tensor:
    return attr.view(-1, 1) if attr.dim() == 1 else attr
