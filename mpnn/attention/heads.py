"""What specs with several heads share: edge attributes apart by head, and heads joined in one message."""

from __future__ import annotations

from torch import Tensor, nn

from mpnn import check


def check_integers(**sizes: int | None) -> None:
    """Raises TypeError, naming the argument, unless these are integers, or None."""
    for name, size in sizes.items():
        if size is not None:
            check.width(name, size)


def edges_by_head(to_edge: nn.Linear, edge_attr: Tensor | None, heads: int) -> Tensor:
    """A vector for each edge and head, [E, H, D], from attributes [E, edge_dim], or [E] when there is one an edge."""
    if edge_attr is None:
        raise ValueError("this attention was made with edge_dim, so the graph or the call must give edge_attr")
    edge_attr = edge_attr[:, None] if edge_attr.dim() == 1 else edge_attr
    if edge_attr.shape[-1] != to_edge.in_features:
        raise ValueError(f"this attention was made with edge_dim={to_edge.in_features}; got {list(edge_attr.shape)}")
    return to_edge(edge_attr).unflatten(-1, (heads, -1))


def joined(out: Tensor, concat: bool, bias: Tensor | None) -> Tensor:
    """The message [..., N, F] of what each head heard, [..., N, H, D]: side by side or their mean, and a bias."""
    out = out.flatten(-2) if concat else out.mean(-2)
    if bias is None:
        return out
    check.widened("attention with a bias", out.shape[-1], len(bias))
    return out + bias
