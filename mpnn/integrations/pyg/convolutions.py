"""Convolutions of PyTorch Geometric that run on mpnn's kernels: one small subclass for each.

A subclass overrides either `propagate` (everything else in `forward` stays PyTorch Geometric's) or, where `forward`
adds self-loops or splits attention into two steps, `forward`. Its only state is the name of a backend, so that
`mpnn.pyg.use` can assign it as the class of an existing convolution. The edges of a call may also be a `Graph`. Calls
that it does not compute go to the base class:

- calls that return attention weights, an explainer's, and those of a convolution with hooks on its propagation, with
  `decomposed_layers`, with methods set on the instance, inside `torch.compile` or `torch.jit.trace`
- features that are not floating point or on the meta device, matrices in COO that are not coalesced, or in CSC

To add a convolution: name it in a row of `_variant` or write its subclass, list it in `CONVOLUTIONS`, and its options
in `OPTIONS`.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, wraps
from inspect import signature
from typing import Any, ClassVar, NoReturn

import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch.jit._trace import is_tracing
from torch.nn import Sequential
from torch.nn.functional import gelu
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import aggr
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_self_loops, remove_self_loops

from mpnn import Graph, engine, ops
from mpnn.aggregate import Aggregator, Composed, Var, aggregator
from mpnn.attention.typed import typed_round
from mpnn.graphs import edges_into
from mpnn.integrations.pyg.graph_cache import graph_of, is_edge_list, is_supported, stacked_graph_of, values_of
from mpnn.integrations.pyg.unchanged import change_of, decided, has_hooks, remember, subclasses
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Score
from mpnn.update.maps import linear
from mpnn.update.rows import is_hooked, is_plain

OPTIONS = {
    *("self", "args", "kwargs", "aggr", "flow", "node_dim", "decomposed_layers", "in_channels", "out_channels", "bias"),
    *("heads", "concat", "negative_slope", "dropout", "add_self_loops", "edge_dim", "fill_value", "residual"),
    *("share_weights", "beta", "root_weight", "normalize", "improved", "cached", "project", "combine_root"),
    *("nn", "eps", "train_eps", "num_layers", "num_relations", "num_bases", "num_blocks", "is_sorted"),
    *("aggregators", "scalers", "deg", "towers", "pre_layers", "post_layers", "divide_input", "act", "act_kwargs"),
    *("train_norm", "K", "alpha", "theta", "layer", "shared_weights", "normalization", "diag_lambda", "channels"),
    *("metadata", "attention_mechanism", "attention_mode", "mod", "dim"),
    *("t", "learn_t", "p", "learn_p", "msg_norm", "learn_msg_scale", "norm", "expansion", "num_filters", "cutoff"),
}
"""The options of all convolutions. A convolution with an option that is not listed runs here only at its default."""


class Replacement:
    """Base class of all replacements; comes before the convolution in the bases.

    `node_dim_needed` is the dimension of the nodes that the replacement needs, `served` the values of options that it
    computes and `why` it computes no others, `mpnn_backend` the backend that runs it.
    """

    node_dim_needed = -2
    several_aggregators = False
    served: ClassVar[dict[str, tuple[Any, ...]]] = {}
    why = ""
    mpnn_backend = "auto"

    @classmethod
    def refusal(cls, conv: Any) -> str | None:
        """Why this convolution cannot be replaced, or None if it can."""
        if conv.node_dim != cls.node_dim_needed:
            return f"node_dim = {conv.node_dim}, not {cls.node_dim_needed}"
        for name, values in cls.served.items():
            if (option := getattr(conv, name)) not in values:
                return f"{name} = {option!r}{cls.why}"
        reducers = _reducers(conv.aggr_module)
        if not (reducers if cls.several_aggregators else reducers in SINGLE):
            return f"aggr = {conv.aggr!r}"
        return next((reason for part in (conv, *conv.aggr_module.modules()) if (reason := change_of(part))), None)

    @classmethod
    def decide(cls, conv: Any) -> bool:
        """Whether calls of this convolution, as it is now, compute what this class does."""
        parts = (conv, *conv.aggr_module.modules())
        is_left = cls.refusal(conv) is not None or conv.explain or conv.decomposed_layers > 1
        return not (is_left or any(map(has_hooks, parts)) or _has_any_global_hook())

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """Does nothing: copies and unpickled convolutions keep the methods of this class, not generated ones."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(
            f"torch.jit.script does not compile the kernels of mpnn, which run this {type(self).__name__}: call "
            "restore() of the report of mpnn.pyg.use, or script the model before"
        )

    def computes(self: Any, edges: Any, *features: Any, size: Any = None) -> bool:
        """Whether this call runs here, rather than in the base class. `features` are those of the nodes that send and
        of those that receive, if there are two sets."""
        if torch.compiler.is_compiling() or is_tracing() or not is_supported(edges) or not decided(self):
            return False
        if self.flow != "source_to_target" and len({*map(len, features), *(size or ())}) > 1:
            return False  # PyTorch Geometric mixes up the sizes of the two sets
        for x in features:  # noqa: SIM110  # a generator would take as long as the witness
            if not isinstance(x, Tensor) or not x.is_floating_point() or x.is_meta:
                return False
        return True

    def bind(self: Any, edges: Any, size: Any, x: Any, edge_type: Tensor | None = None) -> Graph:
        """The graph of the edges between nodes with these features: of all, or of those that send and that receive."""
        if isinstance(edges, Graph):
            return edges
        # PyTorch Geometric asks six questions of each edge_index, which take as long as to find its graph.
        is_usual = type(edges) is Tensor and edges.dtype is torch.int64 and edges.dim() == 2 and len(edges) == 2
        is_usual = is_usual and edges.layout is torch.strided
        sizes = list(size or (None, None)) if is_usual else self._check_input(edges, size)
        for k, features in enumerate(x if isinstance(x, (tuple, list)) else (x,)):
            if features is not None:
                self._set_size(sizes, k, features)
        num_src, num_dst = sizes
        return graph_of(edges, num_src, num_src if num_dst is None else num_dst, self.flow, edge_type)

    def by_torch_geometric(self: Any, edges: Any, **inputs: Any) -> Any:
        """PyTorch Geometric's own `propagate`, for calls that do not run here."""
        return super().propagate(edges_of(edges), **inputs)  # type: ignore[misc]


class WeightedSum(Replacement):
    """Messages that are the source's features, times the edge's weight if there is one."""

    several_aggregators = True
    weight_name = "edge_weight"

    def propagate(self: Any, edge_index: Any, size: Any = None, **inputs: Any) -> Tensor:
        x = inputs["x"]
        features = [z for z in (x if isinstance(x, (tuple, list)) else (x,)) if z is not None]
        ours = inputs.keys() <= {"x", self.weight_name, "edge_type_ptr"} and inputs.get("edge_type_ptr") is None
        reducers = _reducers(self.aggr_module) or ()
        if not ours or not self.computes(edge_index, *features, size=size):
            return self.by_torch_geometric(edge_index, size=size, **inputs)
        weight = _weight(self, edge_index, inputs)
        if weight is not None and any(isinstance(reduce, aggr.SoftmaxAggregation) for reduce in reducers):
            return self.by_torch_geometric(edge_index, size=size, **inputs)
        graph = self.bind(edge_index, size, x)
        sender = _pair(x)[0]
        if weight is not None:  # integers, or wider than the features
            dtype = torch.promote_types(sender.dtype, weight.dtype)
            sender, weight = sender.to(dtype), weight.to(dtype)
        return _joined([_aggregated(graph, sender, reduce, weight, self.mpnn_backend) for reduce in reducers])


def _variant(base: type, kind: Any, **members: Any) -> Any:
    """The subclass of a convolution `kind` that differs from it by `base` alone."""
    return type(kind.__name__, (base, kind), {"__module__": __name__, **members})


SAGEConv, GINConv, GraphConv, GatedGraphConv = (
    _variant(WeightedSum, kind) for kind in (pyg.SAGEConv, pyg.GINConv, pyg.GraphConv, pyg.GatedGraphConv)
)
SimpleConv = _variant(
    WeightedSum,
    pyg.SimpleConv,
    served={"combine_root": ("sum", "cat", None)},
    why=", which creates edges at each call",
)


def _normalized_sum(kind: Any, **members: Any) -> Any:
    """A convolution whose `forward` computes weights from an `edge_index`; it takes a `Graph` in its place."""

    @wraps(kind.forward)
    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        return kind.forward(self, *map(edges_of, inputs), **{name: edges_of(value) for name, value in named.items()})

    return _variant(WeightedSum, kind, forward=forward, **members)


APPNP, ClusterGCNConv, GCN2Conv, LGConv, SGConv, TAGConv = map(
    _normalized_sum, (pyg.APPNP, pyg.ClusterGCNConv, pyg.GCN2Conv, pyg.LGConv, pyg.SGConv, pyg.TAGConv)
)
CFConv = _variant(WeightedSum, pyg.models.schnet.CFConv, weight_name="W")  # a weight for each edge and feature
ChebConv = _normalized_sum(pyg.ChebConv, weight_name="norm")


class GCNConv(WeightedSum, pyg.GCNConv):
    """Without weights of edges, those of the convolution are products of a number for each end (Kipf and Welling 2017,
    eq. 8), which multiply the nodes before and after a plain sum. Else keeps the edges with loops."""

    def forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        ours = self.normalize and not self.cached and is_edge_list(edge_index) and isinstance(x, Tensor)
        if not ours or not self.computes(edge_index, x):
            return super().forward(x, edges_of(edge_index) if self.normalize else edge_index, edge_weight)
        square = not isinstance(edge_index, Graph) or edge_index.num_dst == edge_index.num_src
        if edge_weight is None and square and not self.improved and _reducers(self.aggr_module) == ["sum"]:
            out = self.by_degrees(edge_index, self.lin(x), x.dtype)
            return out if self.bias is None else out + self.bias
        graph = self.bind(edge_index, None, x)
        form = x.size(self.node_dim), self.improved, self.add_self_loops, self.flow, x.dtype
        looped = graph.derive(_normalized, *form, num_dst=graph.num_dst)
        weight = looped.edge_attr
        if edge_weight is not None:
            weight = gcn_norm(_ends(graph, self.flow), edge_weight, *form)[1]
        out = self.propagate(looped, x=self.lin(x), edge_weight=weight)
        return out if self.bias is None else out + self.bias

    def by_degrees(self, edges: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`s_i sum_j s_j x_j` over the in-neighbors and, with loops, the node itself, with `s_i = degree_i^-1/2`."""
        graph = self.bind(edges, None, x)
        looped = graph.derive(_with_loops, True, num_dst=graph.num_dst) if self.add_self_loops else graph
        scale = looped.cached(("inverse root", dtype), lambda: _inverse_root(looped.degree(), dtype))
        return ops.aggregate(looped, x * scale, "sum", backend=self.mpnn_backend) * scale


class ByRelation(WeightedSum):
    """Sums or means of each relation, then its map. Keeps the edges of each, and skips relations without edges."""

    node_dim_needed = 0  # of features [N, F], which integers are not

    def forward(self: Any, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        src, dst = _pair(x)
        typed = isinstance(edge_index, Graph) or edge_type is not None
        if not typed or not is_edge_list(edge_index) or not self.computes(edge_index, src, dst):
            return super().forward(x, edges_of(edge_index), edge_type)  # type: ignore[misc]
        graph = self.bind(edge_index, None, (src, dst), edge_type)
        weight = self.weight
        if self.num_bases is not None:
            weight = (self.comp @ weight.flatten(1)).view(-1, self.in_channels_l, self.out_channels)
        out = dst.new_zeros(len(dst), self.out_channels)
        for kind, own in enumerate(weight):
            relation = graph.derive(_of_type, kind, num_dst=graph.num_dst)
            if relation.num_edges:
                h = self.propagate(relation, x=(src, dst), edge_type_ptr=None)
                if self.num_blocks is None:
                    out = out + h @ own
                else:
                    out = out + torch.einsum("abc,bcd->abd", h.view(len(h), *own.shape[:2]), own).flatten(1)
        if self.root is not None:
            out = out + dst @ self.root
        return out if self.bias is None else out + self.bias


RGCNConv = _variant(ByRelation, pyg.RGCNConv)
# PyTorch Geometric asserts one of these.
FastRGCNConv = _variant(ByRelation, pyg.FastRGCNConv, served={"aggr": ("add", "sum", "mean")})


class RGATConv(Replacement, pyg.RGATConv):
    """Maps the pairs of a relation and a source that occur, not both ends of each edge."""

    node_dim_needed = 0

    served: ClassVar[dict[str, tuple[Any, ...]]] = {
        "attention_mode": ("additive-self-attention",),
        "mod": (None,),
        "num_blocks": (None,),
        "aggr": ("add", "sum", "SumAggregation()"),
    }

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_type: Any = None,
        edge_attr: Any = None,
        size: Any = None,
        return_attention_weights: Any = None,
    ) -> Any:
        ours = return_attention_weights is None and (edge_attr is None) == (self.lin_edge is None)
        ours = ours and (isinstance(edge_index, Graph) or edge_type is not None) and is_edge_list(edge_index)
        if not ours or not self.computes(edge_index, x, size=size):
            return super().forward(x, edges_of(edge_index), edge_type, edge_attr, size, return_attention_weights)
        graph = self.bind(edge_index, size, x, edge_type)
        within = self.attention_mechanism[0] == "w"
        maps = self.weight if self.num_bases is None else self.att @ self.basis.flatten(1)
        maps = maps.view(self.num_relations, self.in_channels, -1)
        of_edges = None if edge_attr is None else self.lin_edge(_column(edge_attr)) @ self.e
        by_head = maps.unflatten(-1, (self.heads, -1))
        round = typed_round(graph, x, x, by_head, maps @ self.q, maps @ self.k, self.negative_slope, within, of_edges)
        round.dropout = float(self.dropout) if self.training else 0.0
        out = engine.run(round, self.mpnn_backend)[0]
        return self.update(out.unflatten(0, (len(x), -1)).sum(1) if within else out.contiguous())


class HGTConv(Replacement, pyg.HGTConv):
    """One softmax over `HeteroGraph.stacked`, which the cache keeps; PyTorch Geometric makes its edges at each call."""

    node_dim_needed = 0

    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any:
        edges = edge_index_dict
        known = set(edge_index_dict) <= set(self.edge_types)
        lists = all(is_edge_list(ends) and not isinstance(ends, Graph) for ends in edges.values())
        plain = not (is_hooked(self.k_rel) or is_hooked(self.v_rel))
        ours = known and edges and lists and plain and self.flow == "source_to_target"
        if not ours or not all(self.computes(ends, *x_dict.values()) for ends in edges.values()):
            return super().forward(x_dict, edge_index_dict)
        parts = {
            kind: kqv.unflatten(1, (3, self.heads, -1)).transpose(0, 2)  # [heads, 3, N, D]
            for kind, kqv in self.kqv_lin(x_dict).items()
        }
        sizes = {kind: len(x_dict[kind]) for kind in parts}
        graph = stacked_graph_of(edges, sizes)
        number = [self.edge_types_map[name] for name in edges]
        maps = [f.weight.unflatten(0, (self.heads, -1))[:, number].unbind(1) for f in (self.k_rel, self.v_rel)]
        prior = [self.p_rel["__".join(name)].view(-1, 1, 1) for name in edges]
        sources = [parts[name[0]] for name in edges]
        key = torch.cat([z[:, 0] @ (own * p) for z, own, p in zip(sources, maps[0], prior, strict=True)], 1)
        value = torch.cat([z[:, 2] @ own for z, own in zip(sources, maps[1], strict=True)], 1)
        query = torch.cat([z[:, 1] for z in parts.values()], 1)
        query, key, value = (z.transpose(0, 1) for z in (query, key, value))
        round = Round(graph, value, Dot(query, key, 1 / math.sqrt(query.shape[-1])))
        out = engine.run(round, self.mpnn_backend)[0].flatten(1).split([*sizes.values()])
        received = {kind: part for kind, part in zip(parts, out, strict=True) if kind in self.dst_node_types}
        mapped = self.out_lin({kind: gelu(part) for kind, part in received.items()})
        for kind in received:
            if mapped[kind].size(-1) == x_dict[kind].size(-1):
                alpha = self.skip[kind].sigmoid()
                mapped[kind] = alpha * mapped[kind] + (1 - alpha) * x_dict[kind]
        return {kind: mapped[kind] for kind in received}


class Attention(Replacement):
    """Attention over the edges, which `_attention` gives its terms. The end of GAT's (Velickovic et al. 2018)."""

    node_dim_needed = 0

    def with_loops(self: Any, graph: Graph, attr: Tensor | None) -> tuple[Graph, Tensor | None]:
        """The graph and its attributes with one self-loop per node."""
        looped = graph.derive(_with_loops, attr is not None, num_dst=graph.num_dst)
        if attr is None:
            return looped, None
        loops = remove_self_loops(_ends(graph, self.flow), attr)
        nodes = min(graph.num_dst, graph.num_src)
        return looped, add_self_loops(*loops, fill_value=self.fill_value, num_nodes=nodes)[1]

    def finish(self: Any, out: Tensor, dst: Tensor) -> Tensor:
        """The output, of the heads and the features of the nodes that receive."""
        if self.res is not None:
            out = out + self.res(dst)
        return out if self.bias is None else out + self.bias


_Terms = tuple[Tensor, Score, Tensor | None]
"""The values of the sources, the score, and what edges add to the values."""


def _attention(kind: Any, terms: Callable[..., _Terms], **members: Any) -> Any:
    """The replacement of a convolution `kind`: a softmax of the scores in `terms`, dropout, and sums by head."""
    names = signature(kind.forward).parameters.keys()

    @wraps(kind.forward)
    def forward(self: Any, x: Any, edge_index: Any, edge_attr: Any = None, *others: Any, **options: Any) -> Any:
        src, dst = _pair(x)
        size = options.get("size")
        plain = not others and options.keys() <= names and options.get("return_attention_weights") is None
        ours = plain and (edge_attr is None) == (self.lin_edge is None) and is_edge_list(edge_index)
        if not ours or not self.computes(edge_index, src, dst, size=size):
            return kind.forward(self, x, edges_of(edge_index), edge_attr, *others, **options)
        graph = self.bind(edge_index, size, (src, dst))
        if getattr(self, "add_self_loops", False):
            graph, edge_attr = self.with_loops(graph, edge_attr)
        shape = -1, self.heads, self.out_channels
        of_edges = None if edge_attr is None else self.lin_edge(_column(edge_attr)).view(shape)
        value, score, edge_value = terms(self, src, dst, of_edges, shape)
        reduce = _aggregator((_reducers(self.aggr_module) or ["sum"])[0])
        dropout = float(self.dropout) if self.training else 0.0
        round = Round(graph, value, score, edge_value=edge_value, dropout=dropout, reduce=reduce)
        out = engine.run(round, self.mpnn_backend)[0]
        return self.finish(out.flatten(1) if self.concat else out.mean(1), dst)

    return _variant(Attention, kind, forward=forward, **members)


def _gat(conv: Any, src: Tensor, dst: Tensor, of_edges: Tensor | None, shape: tuple[int, ...]) -> _Terms:
    value = (conv.lin or conv.lin_src)(src).view(shape)
    is_shared = conv.lin is not None and src is dst
    of_dst = value if is_shared else (conv.lin or conv.lin_dst)(dst).view(shape)
    by_edge = None if of_edges is None else (of_edges * conv.att_edge).sum(-1)
    by_dst, by_src = (of_dst * conv.att_dst).sum(-1), (value * conv.att_src).sum(-1)
    return value, AdditiveScore(by_dst, by_src, LeakyReLU(conv.negative_slope), by_edge), None


def _gatv2(conv: Any, src: Tensor, dst: Tensor, of_edges: Tensor | None, shape: tuple[int, ...]) -> _Terms:
    value = conv.lin_l(src).view(shape)
    of_dst = value if conv.share_weights and src is dst else conv.lin_r(dst).view(shape)
    return value, AdditiveV2Score(of_dst, value, conv.att[0], LeakyReLU(conv.negative_slope), of_edges), None


def _transformer(conv: Any, src: Tensor, dst: Tensor, of_edges: Tensor | None, shape: tuple[int, ...]) -> _Terms:
    query, key, value = conv.lin_query(dst).view(shape), conv.lin_key(src).view(shape), conv.lin_value(src).view(shape)
    return value, Dot(query, key, 1 / math.sqrt(conv.out_channels), of_edges), of_edges


def _gated_root(conv: Any, out: Tensor, dst: Tensor) -> Tensor:
    """The features of the node itself, in addition to the attention, with its gate if any (Shi et al. 2021, eq. 5)."""
    if not conv.root_weight:
        return out
    root = conv.lin_skip(dst)
    if conv.lin_beta is None:
        return out + root
    beta = conv.lin_beta(torch.cat([out, root, out - root], -1)).sigmoid()
    return beta * root + (1 - beta) * out


GATConv = _attention(pyg.GATConv, _gat)
GATv2Conv = _attention(pyg.GATv2Conv, _gatv2)
TransformerConv = _attention(pyg.TransformerConv, _transformer, finish=_gated_root)


class EdgeMessages(Replacement):
    """Messages that the convolution's own `message` computes for each edge; only their aggregation is replaced. Sums
    and means of a message for each edge are left to PyTorch Geometric, which is faster without a graph."""

    several_aggregators = True

    def propagate(self: Any, edge_index: Any, size: Any = None, **inputs: Any) -> Tensor:
        x = (inputs["q"], inputs["k"]) if "k" in inputs else inputs["x"]  # ResGatedGraphConv has no x
        features = [z for z in (x if isinstance(x, (tuple, list)) else (x,)) if z is not None]
        reducers = _reducers(self.aggr_module) or []
        names = [*self.inspector.get_param_dict("message")]
        of_sources = all(name.endswith("_j") or inputs.get(name, 0) is None for name in names)
        ours = (of_sources or reducers not in LINEAR or self.mpnn_backend != "auto") and is_edge_list(edge_index)
        if not ours or not self.computes(edge_index, *features, size=size):
            return self.by_torch_geometric(edge_index, size=size, **inputs)
        graph = self.bind(edge_index, size, x)
        ends = {"_j": (0, None)} if of_sources else dict(zip(("_j", "_i"), enumerate(graph.edge_index), strict=True))

        def collected(name: str) -> Any:
            if name[-2:] not in ends:
                return inputs[name]
            side, nodes = ends[name[-2:]]
            features = _pair(inputs[name[:-2]])[side]
            return features if nodes is None else features.index_select(self.node_dim, nodes)

        messages = self.message(**{name: collected(name) for name in names})
        if not of_sources:
            graph = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        parts = [_aggregated(graph, messages.flatten(1), reduce, None, self.mpnn_backend) for reduce in reducers]
        out = _joined([part.view(-1, *messages.shape[1:]) for part in parts])
        return _scaled(self.aggr_module, out, graph)


class EdgeConv(EdgeMessages, pyg.EdgeConv):
    """`[A B] [x_i || x_j - x_i] = (A - B) x_i + B x_j`: sums and means compute the first map for each node. If the last
    layer is a map, too, it follows the sum."""

    def propagate(self, edge_index: Any, size: Any = None, **inputs: Any) -> Tensor:
        layers = [*self.nn] if type(self.nn) is Sequential and not is_hooked(self.nn) else [self.nn]
        x = inputs["x"]
        ours = (
            _reducers(self.aggr_module) in LINEAR and any(map(is_plain, layers[:1])) and self.flow == "source_to_target"
        )
        ours = ours and self.mpnn_backend == "auto" and is_edge_list(edge_index) and not isinstance(edge_index, Graph)
        if not ours or not self.computes(edge_index, *x, size=size):
            return super().propagate(edge_index, size=size, **inputs)
        (src, dst), count, first = edge_index, x[1].shape[-2], layers.pop(0)
        last = layers.pop() if layers and is_plain(layers[-1]) else None
        own, other = first.weight.chunk(2, 1)
        own, other = linear(x[1], own - other, first.bias), linear(x[0], other)
        message = own.index_select(-2, dst) + other.index_select(-2, src)
        for layer in layers:
            message = layer(message)
        out = message.new_zeros(*message.shape[:-2], count, message.shape[-1]).index_add(-2, dst, message)
        degree = torch.bincount(dst, minlength=count)[:, None].to(out.dtype)
        if _reducers(self.aggr_module) == ["mean"]:
            out = out / degree.clamp(min=1)
            degree = degree.clamp(max=1)
        if last is None:
            return out
        return linear(out, last.weight) if last.bias is None else linear(out, last.weight) + degree * last.bias


GENConv, GINEConv, ResGatedGraphConv = (
    _variant(EdgeMessages, kind) for kind in (pyg.GENConv, pyg.GINEConv, pyg.ResGatedGraphConv)
)


class PNAConv(EdgeMessages, pyg.PNAConv):
    """`[A B] [x_i || x_j] = A x_i + B x_j`: the maps of messages are computed for each node. A x_i is the same in all
    messages to i: it is added to their mean, minimum and maximum, and does not change their deviation. The map of what
    degrees scale is computed before it is scaled, so that the copies for each scale are as narrow as the result."""

    node_dim_needed = 0

    def forward(self, x: Any, edge_index: Any, edge_attr: Any = None) -> Tensor:
        maps = [*map(_only_map, (*self.pre_nns, *self.post_nns))]
        reducers = _reducers(self.aggr_module) or []
        ours = edge_attr is None and None not in maps and is_edge_list(edge_index)
        ours = ours and isinstance(x, Tensor) and x.dim() == 2 and bool(reducers)
        ours = ours and all(reduce in SHIFTED or isinstance(reduce, ClampedStd) for reduce in reducers)
        if not ours or not self.computes(edge_index, x):
            return super().forward(x, edge_index, edge_attr)
        graph = self.bind(edge_index, None, x)
        factors = _factors(self.aggr_module, graph, x.dtype)
        reached = graph.cached("in-degree", graph.degree) > 0
        shape = len(x), self.towers if self.divide_input else 1, self.F_in
        towers = x.reshape(shape).expand(-1, self.towers, -1).unbind(1)
        found = []
        for h, before, after in zip(towers, maps[: self.towers], maps[self.towers :], strict=True):
            own, other = before.weight.chunk(2, 1)
            own = linear(h, own, before.bias) * reached[:, None]
            other = linear(h, other)
            parts = [_aggregated(graph, other, reduce, None, self.mpnn_backend) for reduce in reducers]
            shifted = [part + own if reduce in SHIFTED else part for part, reduce in zip(parts, reducers, strict=True)]
            message, (first, *others) = _joined(shifted), after.weight.split(self.F_in, 1)
            out = linear(h, first, after.bias)
            width = len(reducers)
            for k, factor in enumerate(factors):
                scaled = linear(message, torch.cat(others[k * width : (k + 1) * width], 1))
                out = out + (scaled if factor is None else scaled * factor)
            found.append(out)
        return self.lin(_joined(found))


def _only_map(layers: Any) -> Any:
    """The map that these layers are, or None if there are several, or they do more."""
    layer = layers[0]
    plain = type(layer) is pyg.Linear and not is_hooked(layer) and not is_hooked(layers)
    return layer if plain and len(layers) == 1 else None


CONVOLUTIONS: tuple[type[Any], ...] = (
    *(GATConv, GATv2Conv, GCNConv, GINConv, GINEConv, GatedGraphConv),
    *(GraphConv, PNAConv, RGCNConv, SAGEConv, SimpleConv, TransformerConv),
    *(APPNP, ChebConv, ClusterGCNConv, GCN2Conv, LGConv, SGConv, TAGConv),
    *(CFConv, EdgeConv, GENConv, ResGatedGraphConv),
    *(FastRGCNConv, HGTConv, RGATConv),
)
REPLACEMENTS = {kind.__bases__[-1]: kind for kind in CONVOLUTIONS}
"""Class in `torch_geometric.nn` -> its replacement."""
remember((*REPLACEMENTS, *subclasses(aggr.Aggregation)))


def unknown_option(conv: Any) -> str | None:
    """An option of this convolution that `OPTIONS` lacks and that is not at its default, as of a newer version."""
    parameters = signature(type(conv).__init__).parameters.items()
    unknown = (name for name, p in parameters if name not in OPTIONS and getattr(conv, name, p) != p.default)
    return next(unknown, None)


def edges_of(edges: Any) -> Any:
    """The edges as PyTorch Geometric takes them: those of a `Graph` as an `edge_index`."""
    return engine.build_once(_edge_index, edges) if isinstance(edges, Graph) else edges


class ClampedStd(Composed):
    """Standard deviation as in PyTorch Geometric: `sqrt(var)`, or zero without a gradient if var <= 1e-5."""

    parts = (Var(),)

    def compose(self, results: Sequence[Tensor], degree: Tensor) -> Tensor:
        out = results[0].clamp(min=1e-5).sqrt()
        return torch.where(out <= 1e-5**0.5, torch.zeros_like(out), out)


LINEAR = ["sum"], ["mean"]
SHIFTED = "mean", "min", "max"
"""Aggregates that grow by what is added to each message. A variance stays as it is."""
REDUCERS: dict[type, str | Aggregator] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "max",
    aggr.MinAggregation: "min",
    aggr.VarAggregation: "var",
    aggr.MedianAggregation: "median",
    aggr.StdAggregation: ClampedStd(),
}
"""Exact class of an aggregation module -> the aggregator."""
SINGLE = [[reduce] for reduce in REDUCERS.values()]
_aggregator = cache(aggregator)
"""The aggregator of a name in `REDUCERS`: none of them has a state, so all calls share it."""


def _aggregated(graph: Graph, x: Tensor, reduce: Any, weight: Tensor | None, backend: str) -> Tensor:
    """`ops.aggregate`; a softmax (Li et al. 2020) is attention with a head of width 1 for each feature, whose logits
    are numbers of the sources."""
    if not isinstance(reduce, aggr.SoftmaxAggregation):
        return ops.aggregate(graph, x, reduce, weight=weight, backend=backend)
    logits = (x * reduce.t).detach() if reduce.semi_grad else x * reduce.t
    return engine.run(Round(graph, x.unsqueeze(-1), src_bias=logits), backend)[0].squeeze(-1)


def _inverse_root(degree: Tensor, dtype: torch.dtype) -> Tensor:
    """`degree^-1/2` as a column, 0 where the degree is."""
    return degree.to(dtype).rsqrt().masked_fill_(degree == 0, 0.0)[:, None]


def _reducers(module: Any) -> list[Any] | None:
    """The aggregators that an aggregation module of PyTorch Geometric concatenates, or None if one is not supported."""
    if type(module) is aggr.DegreeScalerAggregation:
        return _reducers(module.aggr)
    if type(module) is aggr.MultiAggregation:
        parts = [_reducers(part) for part in module.aggrs]
        flat = [reduce for part in parts for reduce in part or ()]
        return flat if module.mode == "cat" and all(parts) else None
    kind = type(module)
    if kind is aggr.SoftmaxAggregation:
        return [module]
    variance = module if kind is aggr.VarAggregation else module.var_aggr if kind is aggr.StdAggregation else None
    filled = getattr(module, "fill_value", 0)  # of MedianAggregation
    is_other = variance is not None and (type(variance) is not aggr.VarAggregation or variance.semi_grad)
    return None if kind not in REDUCERS or filled or is_other else [REDUCERS[kind]]


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts side by side. `torch.cat` would copy a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _scaled(module: Any, out: Tensor, graph: Graph) -> Tensor:
    """Multiplies the aggregate by functions of the in-degree (Corso et al. 2020, eq. 5) if the module is a
    `DegreeScalerAggregation`."""
    if type(module) is not aggr.DegreeScalerAggregation:
        return out
    factors = (f if f is None else f.view(-1, *[1] * (out.dim() - 1)) for f in _factors(module, graph, out.dtype))
    return torch.cat([out if factor is None else out * factor for factor in factors], -1)


def _factors(module: Any, graph: Graph, dtype: torch.dtype) -> list[Tensor | None]:
    """Returns the factors of a `DegreeScalerAggregation`, [N, 1]; None: ones."""
    degree = graph.cached("in-degree", graph.degree).to(dtype)[:, None]
    linear = module.avg_deg_lin
    log = module.avg_deg_log
    factors: dict[str, Callable[[], Tensor | None]] = {
        "identity": lambda: None,
        "amplification": lambda: (degree + 1).log() / log,
        "attenuation": lambda: log / (degree.clamp(min=1) + 1).log(),
        "linear": lambda: degree / linear,
        "inverse_linear": lambda: linear / degree.clamp(min=1),
    }
    return [factors[name]() for name in module.scaler]


def _weight(conv: Any, edges: Any, inputs: dict[str, Any]) -> Tensor | None:
    """The weights of the edges. As PyTorch Geometric: the values of a matrix where it multiplies by the matrix, else
    those passed."""
    weight: Tensor | None = inputs.get(conv.weight_name)
    if is_edge_list(edges):
        return weight.view(-1) if weight is not None and weight.numel() == weight.shape[0] else weight
    values = values_of(edges)
    if conv.fuse:
        drops = not isinstance(edges, Tensor) and isinstance(conv, (SAGEConv, GINConv, RGCNConv))
        return None if drops else values
    return (values if weight is None else weight) if conv.weight_name in inputs else None


def _edge_index(graph: Graph) -> Tensor:
    return graph.edge_index


def _ends(graph: Graph, flow: str) -> Tensor:
    """The `edge_index` of a graph in which messages flow this way."""
    return graph.edge_index if flow == "source_to_target" else graph.edge_index.flip(0)


# Graphs that are derived once from a graph.


def _with_loops(graph: Graph, ordered: bool) -> Graph:
    """The graph with one self-loop per node. With `ordered`, loops come after all other edges."""
    if not (ordered or graph.is_explicit) and graph.num_dst == graph.num_src:
        return graph.with_self_loops()
    ends = graph.ends
    others = ends[0] != ends[1]
    if not bool(others.all()):
        ends = ends[:, others]
    nodes = torch.arange(min(graph.num_dst, graph.num_src), device=ends.device)
    ends = torch.cat([ends, nodes.expand(2, -1)], 1)
    return Graph.from_edges(ends, graph.num_dst, graph.num_src)


def _normalized(graph: Graph, *form: Any) -> Graph:
    """The edges that `gcn_norm` weighs, with the weights of a graph without weights as attributes."""
    *_, flow, _ = form
    ends, weight = gcn_norm(_ends(graph, flow), None, *form)
    ends = ends if flow == "source_to_target" else ends.flip(0)
    return Graph.from_edges(ends, graph.num_dst, graph.num_src, edge_attr=weight)


def _of_type(graph: Graph, kind: int) -> Graph:
    return Graph.from_edges(graph.edge_index[:, graph.edge_type == kind], graph.num_dst, graph.num_src)


def _pair(x: Any) -> Any:
    """The features of the nodes that send, and of those that receive."""
    return x if isinstance(x, (tuple, list)) else (x, x)


def _column(attr: Tensor) -> Tensor:
    return attr.view(-1, 1) if attr.dim() == 1 else attr
