"""Updates: functions that compute a node's new features from its features and its aggregated message.

An update is None (the message itself), a module or function of `(x, message)`, or an `Update`, which may also transform
the features before attention reads them (pre-norm). With `PreNorm(dim, FeedForward(dim))` one operator is one complete
transformer layer. An `EdgeUpdate` computes new states of edges.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.graph.arguments import as_integer
from mpnn.graph.guard import is_plain
from mpnn.kernels.rows import edge_sum
from mpnn.round import validation as check
from mpnn.update import rows
from mpnn.update.dropout import Dropout, DropPath
from mpnn.update.maps import Linear, linear


class Update(nn.Module):
    """`y_i = update(x_i, m_i)`; `prepare` is applied to x before attention sees it."""

    def prepare(self, x: Tensor) -> Tensor:
        return x

    def check(self, x: Tensor, message: Tensor | None) -> None:
        """Raises a ValueError or TypeError that names the argument whose width or dtype does not fit this update.

        It is called after torch failed to compute `prepare(x)` (then message is None) or `forward(x, message)`."""

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement forward(x, message)")


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
        _require_equal_widths(self, x, message)
        # With eps 0 the sum has the same bits, in one operation of three.
        y = x + message if self._is_zero(message) else torch.addcmul(message, x, (1 + self.eps).to(x.dtype))
        return y if self.f is None else self.f(y)

    def _is_zero(self, message: Tensor) -> bool:
        """Whether eps is known to be 0, without a wait for another device, or a number that a program would record."""
        eps = self.eps
        if torch.compiler.is_compiling() or eps.requires_grad or type(eps) is not nn.Parameter or not eps.is_cpu:
            return False
        return is_plain(message) and eps.item() == 0


class SelfConnection(Update):
    """`y = f(W x + m)`: a linear map of x plus the message (R-GCN, Schlichtkrull et al. 2018, eq. 2).

    `f` None is the identity.
    """

    def __init__(self, dim: int, out_dim: int, f: Callable[[Tensor], Tensor] | None = None, bias: bool = True) -> None:
        super().__init__()
        check.function("f", f)
        self.linear = Linear(dim, out_dim, bias)
        self.f = f

    def check(self, x: Tensor, message: Tensor | None) -> None:
        check.fits("SelfConnection", "x", x, check.takes(self.linear))
        if message is not None:
            check.fits("SelfConnection", "message", message, (self.linear.out_features, None))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        y = self.linear(x) + message
        return y if self.f is None else self.f(y)


class Concat(Update):
    """`y = W [x || m]` (GraphSAGE, Hamilton et al. 2017): `Concat(dim, out_dim)`. Pass `message_dim` if m and x differ
    in width."""

    def __init__(self, dim: int, out_dim: int, message_dim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        as_integer("dim", dim)
        as_integer("out_dim", out_dim)
        self.linear = Linear(dim + (dim if message_dim is None else message_dim), out_dim, bias)

    def check(self, x: Tensor, message: Tensor | None) -> None:
        check.fits("Concat", "x", x, (None, check.takes(self.linear)[1]))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        if x.shape[-1] + message.shape[-1] != self.linear.in_features:
            raise ValueError(
                f"Concat expects features and messages with a total width of {self.linear.in_features}; got "
                f"{x.shape[-1]} and {message.shape[-1]}: pass message_dim={message.shape[-1]}"
            )
        if not rows.is_plain(self.linear):
            return self.linear(torch.cat([x, message], -1))
        # W [x || m] = W_x x + W_m m, which does not write [x || m] or read its gradient in two strided halves
        of_x, of_message = self.linear.weight.split([x.shape[-1], message.shape[-1]], 1)
        return linear(x, of_x, self.linear.bias).add_(linear(message, of_message))


class GRU(Update):
    """`y = GRUCell(input=m, hidden=x)` (gated graph networks, Li et al. 2016)."""

    def __init__(self, dim: int, message_dim: int | None = None) -> None:
        super().__init__()
        as_integer("dim", dim)
        self.cell = nn.GRUCell(dim if message_dim is None else message_dim, dim)

    def check(self, x: Tensor, message: Tensor | None) -> None:
        check.fits("GRU", "x", x, (self.cell.hidden_size, self.cell.weight_hh.dtype))
        if message is not None:
            check.fits("GRU", "message", message, check.takes(self.cell))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.cell(message.flatten(0, -2), x.flatten(0, -2)).view_as(x)


class _Layer(Update):
    """The modules of a transformer layer around any attention. `norm` returns the norm of a width."""

    def __init__(
        self,
        dim: int,
        ffn: nn.Module | None = None,
        *,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        as_integer("dim", dim)
        check.function("ffn", ffn)
        self.norm = norm(dim)
        self.ffn = ffn
        self.ffn_norm = None if ffn is None else norm(dim)
        self.dropout = Dropout(dropout)

    def check(self, x: Tensor, message: Tensor | None, name: str = "x") -> None:
        owner = type(self).__name__
        check.fits(owner, name, x, check.takes(self.norm))
        check.fits(f"ffn of {owner}", name, x, check.takes(self.ffn))


class PreNorm(_Layer):
    """A pre-norm transformer layer around any attention (Xiong et al. 2020): attention reads `norm(x)`, then

        z = x + dropout(m),   y = z + dropout(ffn(norm'(z)))

    Without `ffn` the layer returns z. `drop_path` is the probability that a residual branch is dropped, see `DropPath`.
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
        super().__init__(dim, ffn, dropout=dropout, norm=norm)
        self.drop_path = DropPath(drop_path)

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        _require_equal_widths(self, x, message)
        z = x + self.drop_path(self.dropout(message))
        if self.ffn is None or self.ffn_norm is None:
            return z
        return z + self.drop_path(self.dropout(self.ffn(self.ffn_norm(z))))


class PostNorm(_Layer):
    """A post-norm transformer layer around any attention (Vaswani et al. 2017; BERT):

        z = norm(x + dropout(m)),   y = norm'(z + dropout(ffn(z)))

    Without `ffn` the layer returns z.
    """

    alpha = 1.0

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        _require_equal_widths(self, x, message)
        z = self.norm(torch.add(self.dropout(message), x, alpha=self.alpha))
        if self.ffn is None or self.ffn_norm is None:
            return z
        return self.ffn_norm(torch.add(self.dropout(self.ffn(z)), z, alpha=self.alpha))


class DeepNorm(PostNorm):
    """A post-norm layer with a scaled residual, so that hundreds of layers train stably (Wang et al. 2022, figure 2):

        z = norm(alpha x + dropout(m)),   y = norm'(alpha z + dropout(ffn(z)))

    The depth determines alpha and the scale beta of the initial weights; see `mpnn.models.text.deepnet`.
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


class Reversible(_Layer):
    """A reversible layer: the inputs can be computed from the outputs (Gomez et al. 2017; Kitaev et al. 2020, eq. 9).

    Features are two streams x1 || x2, attention reads `norm(x2)`, and

        y1 = x1 + dropout(m),   y2 = x2 + dropout(ffn(norm'(y1)))
    """

    ffn: nn.Module
    ffn_norm: nn.Module

    def __init__(
        self, dim: int, ffn: nn.Module, *, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__(dim, ffn, dropout=dropout, norm=norm)

    def prepare(self, x: Tensor) -> Tensor:
        return self.norm(x.chunk(2, -1)[1])

    def check(self, x: Tensor, message: Tensor | None, name: str = "half of x") -> None:
        half = x.chunk(2, -1)[0]
        super().check(half, message, name)
        if message is not None:
            check.fits("Reversible", "message", message, (half.shape[-1], None))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        y1 = x1 + self.dropout(message)
        return torch.cat([y1, x2 + self.dropout(self.ffn(self.ffn_norm(y1)))], -1)


class EdgeUpdate(nn.Module):
    """The new state of an edge from its own and its ends (Battaglia et al. 2018, arXiv:1806.01261, algorithm 1), for
    `MessagePassing(..., edges=EdgeUpdate(dim, edge_dim))`.

        e_ij <- f( W_e e_ij + W_d x_i + W_s x_j + b )          and with residual: e_ij + f( ... )

    `W [e_ij || x_i || x_j]` is the same map with one matrix. Taken apart, the maps of nodes run once for each node, and
    no tensor holds the ends of edges.

    Args:
        dim: width of the destinations' features, and of the sources' unless src_dim is passed.
        edge_dim: width of the states.
        out_dim: width of the sum; default edge_dim.
        f: a module or function applied to the sum, such as `nn.Sequential(nn.ReLU(), Linear(out_dim, edge_dim))`; None
            for the identity.
    """

    def __init__(
        self,
        dim: int,
        edge_dim: int,
        out_dim: int | None = None,
        f: Callable[[Tensor], Tensor] | None = torch.relu,
        *,
        src_dim: int | None = None,
        residual: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check.function("f", f)
        as_integer("dim", dim)
        as_integer("edge_dim", edge_dim)
        out_dim = edge_dim if out_dim is None else out_dim
        self.of_edge = Linear(edge_dim, out_dim, bias=False)
        self.of_dst = Linear(dim, out_dim, bias)
        self.of_src = Linear(dim if src_dim is None else src_dim, out_dim, bias=False)
        self.f = f
        self.residual = residual

    def forward(self, edge: Tensor, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor | None]:
        """Maps edge [..., E, edge_dim] in the caller's order, or [E, edge_dim] for the whole batch; dst [..., N_dst,
        dim], src [..., N_src, src_dim] to new states [..., E, F], and their sums at each destination, [..., N_dst, F],
        where the kernel computes them on the way, else None."""
        for name, x, map in (("edge_attr", edge, self.of_edge), ("x", dst, self.of_dst), ("source", src, self.of_src)):
            check.fits("EdgeUpdate", name, x, check.takes(map))
        if edge.shape[:-2] not in ((), dst.shape[:-2]) or edge.shape[-2] != graph.num_edges:
            expected = [*dst.shape[:-2], graph.num_edges, self.of_edge.in_features]
            raise ValueError(f"edge_attr must hold a state for each edge, {expected}; got {list(edge.shape)}")
        edge = edge.expand(*dst.shape[:-2], *edge.shape[-2:])
        of_dst = self.of_dst(dst)
        of_src = self.of_src(src)
        known = rows.row_function(self.f) if rows.is_plain(self.of_edge) else None
        if known is None or not edge_sum.serves(edge, self.of_edge.weight, of_dst, of_src, *known[1]):
            return self._by_torch(edge, of_dst, of_src, graph), None
        from_src, to_dst = graph.ends
        count = edge.shape[:-2].numel()
        edges, dst, src = (x.reshape(count, *x.shape[-2:]) for x in (edge, of_dst, of_src))
        operands = edges, self.of_edge.weight, dst, src, *known[1]
        new, sums = edge_sum.edge_map(known[0], self.residual, to_dst, from_src, *operands)
        return new.view(*edge.shape[:-1], new.shape[-1]), sums.view(*of_dst.shape[:-1], new.shape[-1])

    def _by_torch(self, edge: Tensor, of_dst: Tensor, of_src: Tensor, graph: Graph) -> Tensor:
        from_src, to_dst = graph.ends
        total = self.of_edge(edge) + of_dst.index_select(-2, to_dst) + of_src.index_select(-2, from_src)
        new = total if self.f is None else self.f(total)
        return edge + new if self.residual else new


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
        super().__init__(Linear(in_dim, hidden), activation(), Dropout(dropout), Linear(hidden, out_dim))


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
    """A transformer's gated position-wise network (Shazeer 2020, eq. 6; SwiGLU with SiLU, the default).

    y = W_out ( act(W_gate x) * W_in x )
    """

    def __init__(
        self, dim: int, hidden: int, activation: Callable[[], nn.Module] = nn.SiLU, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.to_gate, self.to_hidden = Linear(dim, hidden, bias), Linear(dim, hidden, bias)
        self.to_out = Linear(hidden, dim, bias)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(self.activation(self.to_gate(x)) * self.to_hidden(x))


class _Function(Update):
    """Wraps a plain module or function of (x, message) as an update."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.function(x, message)


def _require_equal_widths(update: Update, x: Tensor, message: Tensor) -> None:
    """Raises ValueError if the widths differ. Torch would broadcast a width of 1."""
    if x.shape[-1] != message.shape[-1]:
        raise ValueError(
            f"{type(update).__name__} adds the message to the features, so both need the same width; got "
            f"{message.shape[-1]} and {x.shape[-1]}"
        )


def as_update(spec: Update | Callable[[Tensor, Tensor], Tensor] | None) -> Update:
    """Converts None (`Replace`), a function of (x, message) or an `Update` to an `Update`.

    Raises:
        TypeError: if `spec` is none of these.
    """
    if spec is None:
        return Replace()
    if isinstance(spec, Update):
        return spec
    if callable(spec) and not isinstance(spec, type):
        return _Function(spec)
    raise TypeError(f"an update is None, a function of (x, message) or an Update; got {spec!r}")
