"""The base class of graph networks: a sequence of rounds of message passing."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update.dropout import Dropout

Graphs = Topology | Graph | Sequence[Graph]
"""One graph of all layers, or the sampled graph of each."""


class Stack(Model):
    """Applies `x <- layer(dropout(x))` for each layer, all over the same graph or each over its own.

    Args:
        layers: the layers.
        dropout: of the input of each layer, in training.
    """

    def __init__(self, layers: Iterable[MessagePassing], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, graph: Graphs | None = None) -> Tensor:
        """Maps x [..., N, in_dim] to [..., N, out_dim].

        Args:
            x: features. If the model begins with a linear map (GCN, GAT), may be a sparse COO tensor [N, in_dim].
            graph: replaces the graphs of the layers; default: the graph of each layer. The `graphs` of a
                `mpnn.data.NeighborBatch` are the graph of each layer: x then has the features of its sources, and the
                result is that of its nodes.
        """
        validation.input_features("x", x)
        for layer, own in over_each(self.layers, graph):
            x = hop(layer, self.dropout(x), own)
        return x

    def loss(
        self, x: Tensor, target: Tensor, mask: Tensor | None = None, graph: Topology | Graph | None = None, *more: Any
    ) -> Tensor:
        """Mean cross-entropy in nats: x [N, in_dim], target int64 [N]. mask bool [N] selects nodes; default: all. More
        arguments are those of `forward`."""
        logits = self(x, graph, *more)
        return F.cross_entropy(logits, target) if mask is None else F.cross_entropy(logits[mask], target[mask])


def over_each(layers: Iterable[Any], graph: Graphs | None) -> Iterator[tuple[Any, Topology | Graph | None]]:
    """Yields each layer and its graph. Raises ValueError if there are more or fewer sampled graphs than layers."""
    layers = [*layers]
    each = graph if isinstance(graph, Sequence) else [graph] * len(layers)
    if len(each) != len(layers):
        raise ValueError(f"a model of {len(layers)} layers takes a sampled graph for each; got {len(each)}")
    return zip(layers, each, strict=True)


def hop(layer: MessagePassing, x: Tensor, graph: Topology | Graph | None) -> Tensor:
    """Returns the output of a layer. The destinations of a sampled graph are its first sources."""
    if isinstance(graph, Graph) and graph.num_dst < graph.num_src:
        return layer(x[..., : graph.num_dst, :], graph, source=x)
    return layer(x, graph)
