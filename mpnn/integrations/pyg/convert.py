"""`from_pyg`: converts a convolution of PyTorch Geometric to message passing, with the same weights.

Each family of convolutions is one file in this folder, whose functions convert a convolution to a `MessagePassing`, and
one row in `CONVOLUTIONS` for each of its classes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from mpnn.integrations.pyg import attentive, gated, gcn, gin, gps, pna, rgcn, sage, transformer

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
"""Class name in `torch_geometric.nn` -> function that converts a convolution of that class."""


def from_pyg(conv: Any) -> nn.Module:
    """Converts a convolution of PyTorch Geometric to message passing.

    The result has a copy of the weights, with the same device, dtype and mode (training or evaluation). It is called
    like any `MessagePassing`:

    - `op(x, graph=g)`
    - `op(x, graph=g, edge_attr=...)` if the convolution takes edge_weight or edge_attr
    - `op(x_dst, source=x_src, graph=g)` if the convolution takes (x_src, x_dst)

    The graph has the same edges as the convolution's edge_index. If the convolution adds self-loops, so does the
    result. Edge types are those of the graph (`edge_type`).

    Raises:
        ImportError: if torch_geometric is not installed.
        TypeError: if `conv` is not a convolution of torch_geometric.
        ValueError: if the class or an option of `conv` is not supported.
    """
    layers = _torch_geometric()
    name = type(conv).__name__
    if getattr(layers, name, None) is not type(conv):
        raise TypeError(f"from_pyg takes a convolution of torch_geometric.nn, such as GCNConv; got {name}")
    if name not in CONVOLUTIONS:
        raise ValueError(f"from_pyg has no {name}; it has {', '.join(CONVOLUTIONS)}")
    if any(weight.is_meta for weight in conv.parameters()):
        raise ValueError(f"from_pyg needs initialized weights; those of this {name} are on the meta device")
    return CONVOLUTIONS[name](conv).train(conv.training)


def _torch_geometric() -> ModuleType:
    try:
        import torch_geometric.nn
    except ImportError as error:
        raise ImportError(
            "from_pyg needs torch_geometric, which is not installed; run: pip install torch_geometric"
        ) from error
    return torch_geometric.nn
