"""Updates: what a node makes of its features and of the message it got.

An update is None (the message itself), a module or function of `(x, message)`, or an `Update`, which may also prepare
the features that everybody hears (pre-norm). With `PreNorm(dim, FeedForward(dim))` one operator is one whole
transformer layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpnn import check
from mpnn.dropout import Dropout, DropPath


class Update(nn.Module):
    """`y_i = update(x_i, m_i)`; `prepare` is applied to x before attention sees it."""

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def check(self, x: Tensor, message: Tensor | None) -> None:
        """Called when torch could not compute `prepare(x)` (message None) or `forward(x, message)`: raises a ValueError
        or TypeError that names the argument, if one is of another width or type than the update was made for."""

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not say what it makes of them: forward(x, message)")


class Replace(Update):
    """`y = m`."""

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return message


class Activate(Update):
    """`y = act(m)`."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        check.function("activation", activation)
        self.activation = activation

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.activation(message)


class Add(Update):
    """`y = f((1 + eps) x + m)`: a residual connection, or GIN (Xu et al. 2019, eq. 4.1) when f is an MLP.

    `eps` is learned when `learn_eps`; `f` None is the identity.
    """

    def __init__(self, f: nn.Module | None = None, eps: float = 0.0, learn_eps: bool = False) -> None:
        super().__init__()
        check.function("f", f)
        self.f = f
        self.eps = nn.Parameter(torch.tensor(float(eps)), requires_grad=learn_eps)

    def check(self, x: Tensor, message: Tensor | None) -> None:
        check.fits("f of Add", "x", x, check.takes(self.f))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        _refuse_unequal(self, x, message)
        y = (1 + self.eps).to(x.dtype) * x + message
        return y if self.f is None else self.f(y)


class SelfConnection(Update):
    """`y = f(W x + m)`: a map of a node's own beside the message (R-GCN, Schlichtkrull et al. 2018, eq. 2).

    `f` None is the identity.
    """

    def __init__(self, dim: int, out_dim: int, f: Callable[[Tensor], Tensor] | None = None, bias: bool = True) -> None:
        super().__init__()
        check.function("f", f)
        self.linear, self.f = nn.Linear(dim, out_dim, bias), f

    def check(self, x: Tensor, message: Tensor | None) -> None:
        check.fits("SelfConnection", "x", x, check.takes(self.linear))
        if message is not None:
            check.fits("SelfConnection", "message", message, (self.linear.out_features, None))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        y = self.linear(x) + message
        return y if self.f is None else self.f(y)


class Concat(Update):
    """`y = W [x || m]` (GraphSAGE, Hamilton et al. 2017): `Concat(dim, out_dim)`; `message_dim` where m is not as wide
    as x."""

    def __init__(self, dim: int, out_dim: int, message_dim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        check.width("dim", dim)
        check.width("out_dim", out_dim)
        self.linear = nn.Linear(dim + (dim if message_dim is None else message_dim), out_dim, bias)

    def check(self, x: Tensor, message: Tensor | None) -> None:
        check.fits("Concat", "x", x, (None, check.takes(self.linear)[1]))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        if x.shape[-1] + message.shape[-1] != self.linear.in_features:
            raise ValueError(
                f"Concat was made for features and messages that are {self.linear.in_features} wide together; got "
                f"{x.shape[-1]} and {message.shape[-1]}: give message_dim={message.shape[-1]}"
            )
        return self.linear(torch.cat([x, message], -1))


class GRU(Update):
    """`y = GRUCell(input=m, hidden=x)` (gated graph networks, Li et al. 2016)."""

    def __init__(self, dim: int, message_dim: int | None = None) -> None:
        super().__init__()
        check.width("dim", dim)
        self.cell = nn.GRUCell(dim if message_dim is None else message_dim, dim)

    def check(self, x: Tensor, message: Tensor | None) -> None:
        check.fits("GRU", "x", x, (self.cell.hidden_size, self.cell.weight_hh.dtype))
        if message is not None:
            check.fits("GRU", "message", message, check.takes(self.cell))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.cell(message.flatten(0, -2), x.flatten(0, -2)).view_as(x)


class PreNorm(Update):
    """A pre-norm transformer layer around any attention (Xiong et al. 2020): attention hears `norm(x)`, then

        z = x + dropout(m),   y = z + dropout(ffn(norm'(z)))

    Without `ffn` the layer ends at z. `drop_path`: the probability that what is added is left out, see `DropPath`.
    """

    def __init__(
        self,
        dim: int,
        ffn: nn.Module | None = None,
        *,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        check.width("dim", dim)
        check.function("ffn", ffn)
        self.norm, self.ffn = norm(dim), ffn
        self.ffn_norm = None if ffn is None else norm(dim)
        self.dropout, self.drop_path = Dropout(dropout), DropPath(drop_path)

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def check(self, x: Tensor, message: Tensor | None) -> None:
        _check_layer(self, "x", x)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        _refuse_unequal(self, x, message)
        z = x + self.drop_path(self.dropout(message))
        if self.ffn is None or self.ffn_norm is None:
            return z
        return z + self.drop_path(self.dropout(self.ffn(self.ffn_norm(z))))


class PostNorm(Update):
    """A post-norm transformer layer around any attention (Vaswani et al. 2017; BERT):

        z = norm(x + dropout(m)),   y = norm'(z + dropout(ffn(z)))

    Without `ffn` the layer ends at z.
    """

    alpha = 1.0

    def __init__(
        self,
        dim: int,
        ffn: nn.Module | None = None,
        *,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        check.width("dim", dim)
        check.function("ffn", ffn)
        self.norm, self.ffn = norm(dim), ffn
        self.ffn_norm = None if ffn is None else norm(dim)
        self.dropout = Dropout(dropout)

    def check(self, x: Tensor, message: Tensor | None) -> None:
        _check_layer(self, "x", x)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        _refuse_unequal(self, x, message)
        z = self.norm(torch.add(self.dropout(message), x, alpha=self.alpha))
        if self.ffn is None or self.ffn_norm is None:
            return z
        return self.ffn_norm(torch.add(self.dropout(self.ffn(z)), z, alpha=self.alpha))


class DeepNorm(PostNorm):
    """A post-norm layer that keeps more of what was there, so that hundreds of them train (Wang et al. 2022, figure 2):

        z = norm(alpha x + dropout(m)),   y = norm'(alpha z + dropout(ffn(z)))

    alpha follows from the depth, as does the size beta of the initial weights; see `mpnn.models.deepnet`.
    """

    def __init__(
        self,
        dim: int,
        ffn: nn.Module | None = None,
        *,
        alpha: float,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__(dim, ffn, dropout=dropout, norm=norm)
        self.alpha = alpha


class Reversible(Update):
    """A layer of two streams, each of which can be told from the other's result (Gomez et al. 2017; Kitaev et al. 2020,
    eq. 9): features are x1 || x2, attention hears `norm(x2)`, and

        y1 = x1 + dropout(m),   y2 = x2 + dropout(ffn(norm'(y1)))
    """

    def __init__(
        self, dim: int, ffn: nn.Module, *, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        check.width("dim", dim)
        check.function("ffn", ffn)
        self.norm, self.ffn, self.ffn_norm = norm(dim), ffn, norm(dim)
        self.dropout = Dropout(dropout)

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(x.chunk(2, -1)[1])

    def check(self, x: Tensor, message: Tensor | None) -> None:
        half = x.chunk(2, -1)[0]
        _check_layer(self, "half of x", half)
        if message is not None:
            check.fits("Reversible", "message", message, (half.shape[-1], None))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        y1 = x1 + self.dropout(message)
        return torch.cat([y1, x2 + self.dropout(self.ffn(self.ffn_norm(y1)))], -1)


class MLP(nn.Sequential):
    """Linear, activation, linear: `in_dim -> hidden -> out_dim` (hidden defaults to out_dim)."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        hidden: int | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        dropout: float = 0.0,
    ) -> None:
        hidden = out_dim if hidden is None else hidden
        super().__init__(nn.Linear(in_dim, hidden), activation(), Dropout(dropout), nn.Linear(hidden, out_dim))


class FeedForward(MLP):
    """A transformer's position-wise network: `dim -> hidden (4 * dim) -> dim` with GELU."""

    def __init__(
        self,
        dim: int,
        hidden: int | None = None,
        activation: Callable[[], nn.Module] = nn.GELU,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, dim, 4 * dim if hidden is None else hidden, activation, dropout)


class GatedFeedForward(nn.Module):
    """A transformer's position-wise network with a gate (Shazeer 2020, eq. 6; SwiGLU with SiLU, the default).

    y = W_out ( act(W_gate x) * W_in x )
    """

    def __init__(
        self, dim: int, hidden: int, activation: Callable[[], nn.Module] = nn.SiLU, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.to_gate, self.to_hidden = nn.Linear(dim, hidden, bias), nn.Linear(dim, hidden, bias)
        self.to_out = nn.Linear(hidden, dim, bias)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(self.activation(self.to_gate(x)) * self.to_hidden(x))


class _Function(Update):
    """A plain module or function of (x, message) as an update."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.function(x, message)


def _check_layer(update: PreNorm | PostNorm | Reversible, name: str, x: Tensor) -> None:
    owner = type(update).__name__
    check.fits(owner, name, x, check.takes(update.norm))
    check.fits(f"ffn of {owner}", name, x, check.takes(update.ffn))


def _refuse_unequal(update: Update, x: Tensor, message: Tensor) -> None:
    """Numbers of one feature would otherwise be added to all."""
    if x.shape[-1] != message.shape[-1]:
        raise ValueError(
            f"{type(update).__name__} adds the message to the features, which must be equally wide; got "
            f"{message.shape[-1]} and {x.shape[-1]}"
        )


def as_update(given: Update | Callable[[Tensor, Tensor], Tensor] | None) -> Update:
    """The update that was given: None replaces, functions of (x, message) are taken as they are."""
    if given is None:
        return Replace()
    if isinstance(given, Update):
        return given
    if callable(given) and not isinstance(given, type):
        return _Function(given)
    raise TypeError(f"an update is None, a function of (x, message) or an Update; got {given!r}")
