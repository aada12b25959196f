"""A layer for each relation between kinds of nodes."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpnn.graphs import HeteroGraph
from mpnn.graphs.kinds import EdgeKind

REDUCE = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}
"""What torch calls them."""


class Hetero(nn.Module):
    """A layer for each relation, and at each kind of nodes the sum of what its relations return (Schlichtkrull et al.
    2018, eq. 2, with any layer in place of a linear map).

        y_k = reduce over relations r = (s, name, k) of layer_r(x_k, graph_r, source=x_s)

    Args:
        layers: {(kind of the sources, name, kind of the destinations): layer}, each a `MessagePassing` or a module that
            is called like one.
        reduce: "sum", "mean", "max" or "min".

    Raises:
        ValueError: if there is no layer, or `reduce` is not one of these names.
    """

    def __init__(self, layers: Mapping[EdgeKind, nn.Module], reduce: str = "sum") -> None:
        super().__init__()
        if not layers:
            raise ValueError("Hetero needs at least one layer")
        if reduce not in REDUCE:
            raise ValueError(f"reduce must be one of {', '.join(REDUCE)}; got {reduce!r}")
        self.relations = (*layers,)
        self.layers = nn.ModuleList(layers.values())
        self.reduce = reduce

    def forward(self, x: Mapping[str, Tensor], graph: HeteroGraph) -> dict[str, Tensor]:
        """Maps x {kind: [..., N_kind, d_kind]} to {kind: [..., N_kind, F]} for the kinds that receive. Relations of the
        graph without a layer are not used."""
        messages: dict[str, list[Tensor]] = {}
        for (src, name, dst), layer in zip(self.relations, self.layers, strict=True):
            if (src, name, dst) not in graph:
                raise ValueError(f"Hetero has a layer for {(src, name, dst)}, which {graph} lacks")
            check_kinds(x, src, dst)
            try:
                message = layer(x[dst], graph[src, name, dst], source=x[src])
            except (ValueError, TypeError) as error:
                raise type(error)(
                    f"the layer of {(src, name, dst)}, x of {dst!r} and source of {src!r}: {error}"
                ) from None
            messages.setdefault(dst, []).append(message)
        return {kind: getattr(torch.stack(parts), REDUCE[self.reduce])(0) for kind, parts in messages.items()}


def check_kinds(x: Mapping[str, Tensor], *kinds: str) -> None:
    """Raises ValueError unless x has features of these kinds."""
    for kind in kinds:
        if kind not in x:
            raise ValueError(f"x must have features of {kind!r} nodes; it has those of {', '.join(map(repr, x))}")
