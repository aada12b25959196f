"""What models share besides the operator: embeddings, updates by a configuration, activations by their usual names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from mpnn.dropout import Dropout
from mpnn.topology import Topology
from mpnn.update import FeedForward, Update

U = TypeVar("U", bound=Update)

Norm = Callable[[int], nn.Module]


class Activations(dict[str, Callable[[], nn.Module]]):
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
"""Activations by the names that published configurations give them."""


class Sizes(Protocol):
    """What configurations of transformers have in common."""

    @property
    def dim(self) -> int: ...
    @property
    def hidden(self) -> int | None: ...
    @property
    def activation(self) -> str: ...
    @property
    def eps(self) -> float: ...
    @property
    def dropout(self) -> float: ...


def updated_by(kind: Callable[..., U], config: Sizes, *, ffn_dropout: float = 0.0, **options: Any) -> U:
    """What a token makes of its message, the second half of a transformer layer: `kind`, such as `PostNorm`, around a
    feed-forward network of these sizes, with dropout of what is added and, where it has one, within the network."""
    ffn = FeedForward(config.dim, config.hidden, ACTIVATIONS[config.activation], ffn_dropout)
    return kind(config.dim, ffn, dropout=config.dropout, norm=partial(nn.LayerNorm, eps=config.eps), **options)


class BatchNorm(nn.BatchNorm1d):
    """Over all nodes [..., dim] of all graphs; torch's own takes the nodes of a batch [B, N, dim] for its channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view_as(x)


class Embeddings(nn.Module):
    """What a node knows before it hears anybody (Devlin et al. 2019, figure 2):

        x_i = dropout(norm(token_i + position_i + type_i))

    `pad`: the token whose vector stays as it is in training, or None. `first`: the row of the first position; the row
    before it is that of pads and stays as it is in training too.
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
        self.norm, self.dropout = norm(dim), Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """[..., dim] from integers [...]; `tokens` may also be vectors [..., dim] that stand in their place.

        Raises:
            IndexError: an integer that its table does not have.
        """
        vectors = embedded(self.token, tokens)
        vectors = (
            vectors + looked_up(self.token_type, types, "token type") + looked_up(self.position, positions, "position")
        )
        return self.dropout(self.norm(vectors))


class AxialPositions(nn.Module):
    """Positions as rows and columns of a rectangle, filled row by row, with a learned vector for each row and one for
    each column, side by side (as published with Kitaev et al. 2020): `shape` their numbers, `dims` their widths."""

    def __init__(self, shape: Sequence[int], dims: Sequence[int]) -> None:
        super().__init__()
        if len(shape) != 2 or len(dims) != 2:
            raise ValueError(f"axial positions have two axes; got shape {list(shape)} and dims {list(dims)}")
        self.row, self.column = (nn.Embedding(n, dim) for n, dim in zip(shape, dims, strict=True))

    def forward(self, positions: Tensor) -> Tensor:
        """[..., dims[0] + dims[1]] from integers [...]."""
        rows, columns = self.row.num_embeddings, self.column.num_embeddings
        within(positions, rows * columns, "position")
        return torch.cat([self.row(positions // columns), self.column(positions % columns)], -1)


def looked_up(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """`table(ids)`, refusing with a sentence where torch's own speaks of an index in itself."""
    within(ids, table.num_embeddings, what)
    return table(ids)


def within(ids: Tensor, count: int, what: str) -> None:
    """Raises IndexError where an integer is not among 0 to count - 1; on the CPU, as elsewhere a look at the numbers
    would wait for the device."""
    if ids.numel() and ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= count:
            bad = low if low < 0 else high
            raise IndexError(f"{what} {bad} is not among those that the model has, 0 to {count - 1}")


def embedded(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Vectors [..., dim] of tokens [...]; tokens may also be vectors [..., dim] that stand in their place."""
    return tokens if tokens.is_floating_point() else looked_up(table, tokens, "token")


@torch.no_grad()
def begin_small(part: nn.Linear | nn.Embedding) -> None:
    """Initial weights as BERT's: normal and small, so that logits by the table of tokens start out undecided; zeros for
    biases and for the vector of pads."""
    nn.init.normal_(part.weight, std=0.02)
    if isinstance(part, nn.Linear) and part.bias is not None:
        part.bias.zero_()
    if isinstance(part, nn.Embedding) and part.padding_idx is not None:
        part.weight[part.padding_idx].zero_()


def refuse_alone(tokens: Tensor) -> None:
    """Raises ValueError for the tokens of a sentence without a batch around it."""
    if tokens.dim() < 2:
        raise ValueError(f"tokens must be a batch of sentences, [batch, length]; got shape {list(tokens.shape)}")


def one_each(graph: Topology | Sequence[Topology], layers: int) -> Sequence[Topology]:
    """A topology for each layer, from one for all or from one for each."""
    if isinstance(graph, Topology):
        return [graph] * layers
    if not isinstance(graph, Sequence) or not all(isinstance(one, Topology) for one in graph):
        raise TypeError(f"sequences of any length need a Topology, such as window(16), or one a layer; got {graph!r}")
    if len(graph) != layers:
        raise ValueError(f"give one topology, or one for each of {layers} layers; got {len(graph)}")
    return graph
