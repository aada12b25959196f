"""`from_pyg`: a copy of a convolution of PyTorch Geometric, run by `use` and called like a `MessagePassing`."""

import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from mpnn import Graph, Topology, engine
from mpnn.graph.sharding import active
from mpnn.round import validation

TWO_SETS = (
    *("GATConv", "GATv2Conv", "GINConv", "GINEConv", "GraphConv"),
    *("RGCNConv", "SAGEConv", "SimpleConv", "TransformerConv"),
)
"""Convolutions that take features of sources and of destinations."""


def from_pyg(conv: Any) -> nn.Module:
    """Converts a convolution of PyTorch Geometric to an operator over a graph.

    The result is a `ConvOperator`. It has a copy of the convolution in its attribute `conv`, changed by `mpnn.pyg.use`:
    with the same weights, device, dtype and mode (training or evaluation). It is called like a `MessagePassing`:

    - `op(x, graph=g)`
    - `op(x, graph=g, edge_attr=...)` if the convolution takes edge_weight or edge_attr
    - `op(x_dst, source=x_src, graph=g)` if the convolution takes (x_src, x_dst)
    - `op(x, graph=g, among=documents(sizes))` for GPSConv over a batch of graphs of these sizes

    The graph has the same edges as the convolution's edge_index, or is a topology. If the convolution adds self-loops,
    so does the result. Edge types are those of the graph (`edge_type`). `cached` is ignored, as graphs always cache.

    Raises:
        ImportError: if torch_geometric is not installed.
        TypeError: if `conv` is not a convolution of torch_geometric.
        ValueError: if the class or an option of `conv` is not supported.
    """
    try:
        from torch_geometric.nn import GPSConv, MessagePassing
    except ImportError as error:
        raise ImportError(
            "from_pyg needs torch_geometric, which is not installed; run: pip install torch_geometric"
        ) from error
    from mpnn.integrations.pyg.use import use

    if not isinstance(conv, MessagePassing) and type(conv) is not GPSConv:
        raise TypeError(
            f"from_pyg takes a convolution of torch_geometric.nn, such as GCNConv; got {type(conv).__name__}"
        )
    conv = copy.deepcopy(conv)
    local = conv.conv if type(conv) is GPSConv else conv
    if type(local).__name__ == "HGTConv":
        raise ValueError("from_pyg does not support HGTConv, which takes dicts by kind; mpnn.pyg.use runs it in place")
    if local is not None:
        for reason in use(local).left.values():
            raise ValueError(f"from_pyg does not support this {type(local).__name__}: {reason}")
        if local.flow != "source_to_target":
            raise ValueError(
                f"from_pyg does not support {type(local).__name__} with flow = {local.flow!r}: a graph says which node "
                "receives; convert a convolution with 'source_to_target' and pass graph.reverse()"
            )
        local.cached = False
    return ConvOperator(conv, local).train(conv.training)


class ConvOperator(nn.Module):
    """A convolution of PyTorch Geometric as an operator over a graph. Made by `from_pyg`."""

    def __init__(self, conv: Any, local: Any) -> None:
        super().__init__()
        self.conv = conv
        self.takes_two_sets = type(conv).__name__ in TWO_SETS
        self.takes_weights = "return_attention_weights" in signature(conv.forward).parameters
        self.edge_input = None if local is None else _edge_input(local)

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph,
        source: Tensor | None = None,
        edge_attr: Tensor | None = None,
        return_weights: bool = False,
        among: Topology | None = None,
    ) -> Any:
        """x [..., N, d] -> [..., N, d_out], or (y, weights). All graphs of a batch have the same edges.

        Args:
            graph: a topology, or a graph with the nodes of x and source.
            source: features of the sources, [..., N_src, d_src], if these are other nodes.
            edge_attr: [E, ...] in the caller's edge order: edge_weight or edge_attr of the convolution. Default: the
                graph's, if the convolution takes any.
            return_weights: also return the attention weights as PyTorch Geometric does, [..., E, H]; those of
                self-loops that were added come last.
            among: disjoint graphs of consecutive nodes for the attention of GPSConv. Default: one graph.

        Raises:
            ValueError: if sizes do not fit together, or the convolution does not take one of the arguments.
        """
        validation.tensor("x", x)
        if source is not None:
            validation.tensor("source", source)
        if x.dim() > 2:
            sources = [None] * x[..., 0, 0].numel() if source is None else source.flatten(0, -3)
            rest = edge_attr, return_weights, among
            outs = [self(each, graph, other, *rest) for each, other in zip(x.flatten(0, -3), sources, strict=True)]
            results = zip(*outs, strict=True) if return_weights else (outs,)
            stacked = [torch.stack(list(each)).unflatten(0, x.shape[:-2]) for each in results]
            return tuple(stacked) if return_weights else stacked[0]
        for argument, given, taken in (
            ("source", source is not None, self.takes_two_sets),
            ("return_weights", return_weights, self.takes_weights),
            ("among", among is not None, hasattr(self.conv, "attn")),
        ):
            if given and not taken:
                raise ValueError(f"{type(self.conv).__name__} does not take {argument}")
        size = (len(x), len(x) if source is None else len(source))
        owner = type(self.conv).__name__
        typed = owner if self.edge_input == "edge_type" else None
        bound, *of_edges = engine.build_once(_bound, graph, *size, x.device, typed)
        call = self._edge_arguments(edge_attr, *of_edges)
        if among is not None:
            call["batch"] = engine.build_once(_batch, among, len(x), x.device)
        if return_weights:
            call["return_attention_weights"] = True
        out = self.conv(x if source is None else (source, x), bound, **call)
        return (out[0], out[1][1]) if return_weights else out

    def _edge_arguments(
        self, edge_attr: Tensor | None, num_edges: int, own: Tensor | None, edge_type: Tensor | None
    ) -> dict[str, Any]:
        """Returns the arguments of the convolution for each edge, by name; `own` are the attributes of the graph."""
        name = self.edge_input
        owner = type(self.conv).__name__
        if name is None or name == "edge_type":
            if edge_attr is not None:
                raise ValueError(f"this {owner} does not take edge_attr: it has no edge weights and no edge_dim")
            return {} if name is None else {name: edge_type}
        attr = own if edge_attr is None else edge_attr
        if attr is None:
            if name == "edge_attr" and owner != "GENConv":  # GENConv takes them or not
                raise ValueError(f"this {owner} needs edge features: pass edge_attr, or a graph that has edge_attr")
            return {}
        if len(attr) != num_edges or (name == "edge_weight" and attr.numel() != num_edges):
            what = "one weight" if name == "edge_weight" else "one row"
            raise ValueError(f"edge_attr must have {what} for each of {num_edges} edges; got {list(attr.shape)}")
        return {name: attr}


def _edge_input(local: Any) -> str | None:
    """The name of what a convolution takes for each edge."""
    names = {"edge_weight", "edge_attr", "edge_type"} & signature(local.forward).parameters.keys()
    if getattr(local, "edge_dim", True) is None:
        names -= {"edge_attr"}
    if len(names) > 1:
        raise ValueError(f"from_pyg does not support {type(local).__name__} with edge_dim: its edges have types, too")
    return names.pop() if names else None


def _bound(
    graph: Topology | Graph, num_dst: int, num_src: int, device: torch.device, typed: str | None
) -> tuple[Any, ...]:
    """The graph of these nodes, the number of its edges, their attributes and, if a convolution is `typed`, types."""
    if active() is not None:
        raise ValueError("a convolution of PyTorch Geometric does not run inside mpnn.distributed.sharded")
    if isinstance(graph, Topology):
        graph = graph.bind(num_dst, num_src).to(device)
    validation.graph(graph)
    if (graph.num_dst, graph.num_src) != (num_dst, num_src):
        raise ValueError(
            f"the graph has {graph.num_dst} destinations and {graph.num_src} sources, but the features have {num_dst} "
            f"and {num_src}"
        )
    if typed and not graph.has_edge_types:
        raise ValueError(f"{typed} needs a graph with edge types: graphs.from_edges(..., edge_type=...)")
    return graph, graph.num_edges, graph.edge_attr, graph.edge_type if typed else None


def _batch(among: Topology, num_nodes: int, device: torch.device) -> Tensor:
    """The number of each node's graph, int64 [N]."""
    graph = among.bind(num_nodes)
    parts = graph.parts
    if parts is None or not parts.is_complete or parts.order is not None:
        raise ValueError(f"among must be graphs of consecutive nodes, documents(sizes) or complete(); got {among}")
    return torch.from_numpy(parts.labels).to(device)
