"""`from_pyg`: a convolution of PyTorch Geometric as message passing, with the same weights.

A family is one file beside this one, whose functions make a `MessagePassing` out of a convolution, and a row in
`CONVOLUTIONS` for each of its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from mpnn.models.pyg import attentive, gated, gcn, gin, gps, pna, rgcn, sage, transformer

CONVOLUTIONS: dict[str, Callable[[Any], nn.Module]] = {
    "GATConv": attentive.gat,
    "GATv2Conv": attentive.gatv2,
    "GCNConv": gcn.gcn,
    "GINConv": gin.gin,
    "GINEConv": gin.gine,
    "GPSConv": gps.gps,
    "GatedGraphConv": gated.gated,
    "GraphConv": sage.graph,
    "PNAConv": pna.pna,
    "RGCNConv": rgcn.rgcn,
    "SAGEConv": sage.sage,
    "TransformerConv": transformer.transformer,
}
"""By the name of the class in `torch_geometric.nn`: what makes our module out of one."""


def from_pyg(conv: Any) -> nn.Module:
    """A convolution of PyTorch Geometric as message passing.

    The result has a copy of the weights, on the same device, in the same precision and in the same mode (training or
    evaluation), and is called as any `MessagePassing`: `op(x, graph=g)`, `op(x, graph=g, edge_attr=...)` where the
    convolution takes edge_weight or edge_attr, and `op(x_dst, source=x_src, graph=g)` where it takes (x_src, x_dst).
    The graph is the one that the convolution would get as edge_index: where it adds self-loops, so does the result.
    Classes of edges are the graph's (`edge_type`).

    Raises:
        ImportError: torch_geometric is not installed.
        TypeError: not a convolution of torch_geometric.
        ValueError: a class or an option that is not supported; the sentence names it.
    """
    layers = _torch_geometric()
    name = type(conv).__name__
    if getattr(layers, name, None) is not type(conv):
        raise TypeError(f"from_pyg takes a convolution of torch_geometric.nn, such as GCNConv; got {name}")
    if name not in CONVOLUTIONS:
        raise ValueError(f"from_pyg has no {name}; it has {', '.join(CONVOLUTIONS)}")
    if any(weight.is_meta for weight in conv.parameters()):
        raise ValueError(f"from_pyg takes weights that are there; those of this {name} are on the meta device")
    return CONVOLUTIONS[name](conv).train(conv.training)


def _torch_geometric() -> ModuleType:
    try:
        import torch_geometric.nn
    except ImportError as error:
        raise ImportError(
            'from_pyg needs torch_geometric, which is not installed; run: pip install "mpnn[pyg]"'
        ) from error
    return torch_geometric.nn
