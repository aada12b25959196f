"""Shared by specs with several heads: splits edge attributes by head and joins heads to one message."""

from torch import Tensor, nn

from mpnn import validation
from mpnn.graph.arguments import as_integer


def check_integers(**sizes: int | None) -> None:
    """Raises TypeError, naming the argument, if a size is neither an integer nor None."""
    for name, size in sizes.items():
        if size is not None:
            as_integer(name, size)


def edges_by_head(to_edge: nn.Linear, edge_attr: Tensor | None, heads: int) -> Tensor:
    """A vector for each edge and head, [E, H, D], from attributes [E, edge_dim], or [E] if edge_dim is 1."""
    if edge_attr is None:
        raise ValueError("this attention has edge_dim, so the graph or the call must provide edge_attr")
    edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
    if edge_attr.shape[-1] != to_edge.in_features:
        raise ValueError(f"this attention has edge_dim={to_edge.in_features}; got edge_attr {list(edge_attr.shape)}")
    return to_edge(edge_attr).unflatten(-1, (heads, -1))


def join_heads(out: Tensor, concat: bool, bias: Tensor | None) -> Tensor:
    """The message [..., N, F] of the heads [..., N, H, D]: concatenated, or else their mean, plus a bias."""
    out = out.flatten(-2) if concat else out.mean(-2)
    if bias is None:
        return out
    validation.widened("attention with a bias", out.shape[-1], len(bias))
    return out + bias
