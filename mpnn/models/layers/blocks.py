"""Parts shared by transformer models: embeddings, updates from a configuration, activations by name, runs of layers."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpnn import Graph, Topology
from mpnn.graphs import as_topology
from mpnn.update import FeedForward, Update
from mpnn.update.dropout import Dropout

U = TypeVar("U", bound=Update)

Norm = Callable[[int], nn.Module]


class Activations(dict[str, Callable[[], nn.Module]]):
    """A dictionary that raises ValueError for unknown names and lists the known ones."""

    def __missing__(self, name: str) -> Callable[[], nn.Module]:
        raise ValueError(f"there is no activation {name!r}; there are {', '.join(self)}")


ACTIVATIONS = Activations(
    gelu=nn.GELU,
    gelu_new=partial(nn.GELU, approximate="tanh"),
    gelu_pytorch_tanh=partial(nn.GELU, approximate="tanh"),
    relu=nn.ReLU,
    silu=nn.SiLU,
    tanh=nn.Tanh,
)
"""Activations by their names in published configurations."""


def transformer_update(kind: Callable[..., U], config: Any, *, ffn_dropout: float = 0.0, **options: Any) -> U:
    """Returns the update of a transformer layer: `kind`, such as `PostNorm`, around a feed-forward network, with dim,
    hidden, activation, eps and dropout of the configuration.

    `config.dropout` applies to the outputs of attention and feed-forward network, `ffn_dropout` inside the network.
    """
    ffn = FeedForward(config.dim, config.hidden, ACTIVATIONS[config.activation], ffn_dropout)
    return kind(config.dim, ffn, dropout=config.dropout, norm=partial(nn.LayerNorm, eps=config.eps), **options)


class BatchNorm(nn.BatchNorm1d):
    """Batch norm over all nodes [..., dim] of all graphs. `nn.BatchNorm1d` would treat the nodes of [B, N, dim] as
    channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view_as(x)


class Embeddings(nn.Module):
    """Input embeddings (Devlin et al. 2019, figure 2):

        x_i = dropout(norm(token_i + position_i + type_i))

    Args:
        tokens, positions, types: sizes of the three tables.
        dim: width of the embeddings.
        pad: the token whose embedding is not trained, or None.
        norm: creates the norm of a given width.
        dropout: of the result, in training.
        first: row of the first position. The row before it is for pads and is not trained.
    """

    def __init__(
        self,
        tokens: int,
        positions: int,
        types: int,
        dim: int,
        *,
        pad: int | None,
        norm: Norm,
        dropout: float,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, dim, padding_idx=pad)
        self.position = nn.Embedding(first + positions, dim, padding_idx=first - 1 if first else None)
        self.token_type = nn.Embedding(types, dim)
        self.norm = norm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """Returns embeddings [..., dim] of integers [...].

        `tokens` may also be vectors [..., dim] that replace the token embeddings."""
        vectors = embed(self.token, tokens)
        vectors = vectors + lookup(self.token_type, types, "token type") + lookup(self.position, positions, "position")
        return self.dropout(self.norm(vectors))


class AxialPositions(nn.Module):
    """Axial positions (published with Kitaev et al. 2020).

    Position p is in row p // columns and column p % columns of a grid. Its vector is the concatenation of a learned row
    vector and a learned column vector.

    Args:
        shape: number of rows and of columns.
        dims: widths of the row vectors and of the column vectors.
    """

    def __init__(self, shape: Sequence[int], dims: Sequence[int]) -> None:
        super().__init__()
        if len(shape) != 2 or len(dims) != 2:
            raise ValueError(f"axial positions have two axes; got shape {list(shape)} and dims {list(dims)}")
        self.row, self.column = (nn.Embedding(n, dim) for n, dim in zip(shape, dims, strict=True))

    def forward(self, positions: Tensor) -> Tensor:
        """Returns vectors [..., dims[0] + dims[1]] of integers [...]."""
        rows, columns = self.row.num_embeddings, self.column.num_embeddings
        check_ids(positions, rows * columns, "position")
        return torch.cat([self.row(positions // columns), self.column(positions % columns)], -1)


def lookup(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """Returns `table(ids)`, with an error that names `what` and the id if it is out of range."""
    check_ids(ids, table.num_embeddings, what)
    return table(ids)


def check_ids(ids: Tensor, count: int, what: str) -> None:
    """Raises IndexError if an integer is not in 0 to count - 1. Checked on the CPU only, because on other devices the
    check would synchronize."""
    if ids.numel() and ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= count:
            bad = low if low < 0 else high
            raise IndexError(f"{what} {bad} is out of range: the model has 0 to {count - 1}")


def embed(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Returns the embeddings [..., dim] of tokens [...]. Vectors [..., dim] are returned unchanged."""
    return tokens if tokens.is_floating_point() else lookup(table, tokens, "token")


@torch.no_grad()
def init_bert_weights(part: nn.Linear | nn.Embedding) -> None:
    """Initializes as BERT. Weights are normal with std 0.02, so that initial predictions are close to uniform. Biases
    and the embedding of the pad token are zero."""
    nn.init.normal_(part.weight, std=0.02)
    if isinstance(part, nn.Linear) and part.bias is not None:
        part.bias.zero_()
    if isinstance(part, nn.Embedding) and part.padding_idx is not None:
        part.weight[part.padding_idx].zero_()


def require_batch(tokens: Tensor) -> None:
    """Raises ValueError if tokens have no batch dimension."""
    if tokens.dim() < 2:
        raise ValueError(f"tokens must be a batch of sentences, [batch, length]; got shape {list(tokens.shape)}")


AnyGraph = Topology | Graph
"""A rule, or the edges of a graph; see `mpnn.graphs.as_topology`."""


def topology_per_layer(graph: AnyGraph | Sequence[AnyGraph], layers: int, prefixes: bool = False) -> Sequence[Topology]:
    """Returns one topology per layer, from one for all layers or one per layer. `prefixes`: whether a `Graph` also
    serves texts of fewer nodes, as it does if no node attends to a later one."""
    graph = as_topology(graph, prefixes)
    if isinstance(graph, Topology):
        return [graph] * layers
    given = [as_topology(topology, prefixes) for topology in graph] if isinstance(graph, Sequence) else []
    if not given or not all(isinstance(topology, Topology) for topology in given):
        raise TypeError(f"graph must be a Topology, such as window(16), a Graph, or one per layer; got {graph!r}")
    if len(given) != layers:
        raise ValueError(f"graph must be one topology, or one for each of {layers} layers; got {len(given)}")
    return given


def run_layers(
    layers: Iterable[nn.Module], graphs: Iterable[Any], x: Tensor, *, return_weights: bool = False, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Applies all layers to x. Each layer is called with its graph and the options.

    Returns:
        The output of the last layer, and the attention weights of each layer, [..., E, H], if `return_weights`, else an
        empty list.
    """
    weights = []
    for layer, graph in zip(layers, graphs, strict=True):
        if return_weights:
            x, layer_weights = layer(x, graph, return_weights=True, **options)
            weights.append(layer_weights)
        else:
            x = layer(x, graph, **options)
    return x, weights
