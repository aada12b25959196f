"""Recurrences: an edge j -> i of `causal()` weighs a dot product times the gates of the nodes after j up to i, so one
matrix, the state, holds all that a node needs of the nodes before it. The specs differ in gates and in what is stored.
"""

from abc import abstractmethod
from collections.abc import Sequence
from math import log

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention.spec import Attention, KeyValue, check_integers
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.position import Position
from mpnn.round import Round, validation
from mpnn.scores import Dot
from mpnn.update.maps import Linear


class Recurrent(Attention):
    """Base class of attention that is a recurrence, over `causal()` or `causal() & documents(lengths)`:

        w_ij = <q_i, k_j> prod_{t = j+1..i} gate_t          m_i = W_O || _h sum_{j <= i} w_ij u_j

    `mpnn.decoding.cache` keeps the state of the nodes so far, so the cost of a new node does not depend on the length.

    Args:
        dim: width of the features.
        parts: widths of the tensors that a linear map computes for each node, the arguments of `terms`.
        message: width of all heads together.
        bias: whether the maps have biases.
        mapped: whether the features already are these tensors, as after a short convolution. Then neither features nor
        message are mapped.
    """

    normalize = "none"

    def __init__(self, dim: int, parts: Sequence[int], message: int, *, bias: bool, mapped: bool) -> None:
        super().__init__()
        check_integers(dim=dim)
        self.parts = tuple(parts)
        self.to_parts = None if mapped else Linear(dim, sum(parts), bias)
        self.to_out = None if mapped else Linear(message, dim, bias)

    def takes(self) -> tuple[validation.Takes, validation.Takes]:
        expected = (sum(self.parts), None) if self.to_parts is None else validation.takes(self.to_parts)
        return expected, expected

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        mapped = src if self.to_parts is None else self.to_parts(src)
        return self.terms(graph, *mapped.split(self.parts, -1))

    @abstractmethod
    def terms(self, graph: Graph, *parts: Tensor) -> Round:
        """Returns the round for the tensors `parts`, each [..., N, width]."""

    def merge(self, out: Tensor) -> Tensor:
        message = out.flatten(-2)
        return message if self.to_out is None else self.to_out(message)


def _head_dim(dim: int, heads: int, head_dim: int | None) -> int:
    check_integers(dim=dim, heads=heads, head_dim=head_dim)
    if heads < 1 or (head_dim is None and dim % heads):
        raise ValueError(f"{heads} heads do not divide a width of {dim}")
    return dim // heads if head_dim is None else head_dim


def _step_bias(heads: int) -> nn.Parameter:
    """b such that softplus(b) is a step between 0.001 and 0.1, as Mamba and Gated DeltaNet begin."""
    step = torch.exp(torch.empty(heads).uniform_(log(1e-3), log(0.1)))
    return nn.Parameter(step + torch.log(-torch.expm1(-step)))


class Retention(Recurrent):
    """Retention (Sun et al. 2023, arXiv:2307.08621, eq. 6 and 8): a constant gate for each head.

        w_ij = gamma_h^(i - j) <W_Q h_i, W_K h_j> / sqrt(D),   gamma_h = 1 - 2^(-5 - h)

    Args:
        dim, heads, bias, mapped: as in `Recurrent`. head_dim: width D of queries and keys. Default: dim / heads.
        value_dim: width of a head's values. Default: D. position: a relative position such as `Rotary(D)`, or None.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        position: Position | None = None,
        bias: bool = False,
        mapped: bool = False,
    ) -> None:
        self_dim = _head_dim(dim, heads, head_dim)
        value_dim = self_dim if value_dim is None else value_dim
        widths = [heads * self_dim, heads * self_dim, heads * value_dim]
        super().__init__(dim, widths, widths[-1], bias=bias, mapped=mapped)
        self.heads = heads
        self.scale = self_dim**-0.5
        self.position = position

    def terms(self, graph: Graph, *parts: Tensor) -> Round:
        query, key, value = (x.unflatten(-1, (self.heads, -1)) for x in parts)
        if self.position is not None:
            query, key = self.position.rotate(query, key, graph)
        gate = torch.log1p(-torch.exp2(-5.0 - torch.arange(self.heads, dtype=torch.float64, device=value.device)))
        log_gate = gate.to(torch.promote_types(value.dtype, torch.float32))[:, None].expand(*value.shape[:-1], 1)
        return Round(graph, value, Dot(query, key, self.scale), log_gate=log_gate)


class GatedLinear(Recurrent):
    """Gated linear attention (Yang et al. 2023, arXiv:2312.06635, eq. 3 and 4): a gate for each feature of the keys.

        gate_i = sigmoid(W_2 W_1 h_i + b)^(1 / 16)

    Args:
        dim, heads, bias, mapped: as in `Recurrent`; a mapped node is its query, key, value and the logits of its gates.
        head_dim: width of queries and keys. Default: dim / heads / 2, as published. value_dim: default: dim / heads.
        rank: of the map to the logits. temperature: the 16 of the formula.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        rank: int = 16,
        temperature: float = 16.0,
        bias: bool = False,
        mapped: bool = False,
    ) -> None:
        value_dim = _head_dim(dim, heads, value_dim)
        head_dim = max(value_dim // 2, 1) if head_dim is None else head_dim
        keys = heads * head_dim
        logits = heads * head_dim if mapped else rank
        super().__init__(dim, [keys, keys, heads * value_dim, logits], heads * value_dim, bias=bias, mapped=mapped)
        self.heads = heads
        self.scale = head_dim**-0.5
        self.temperature = temperature
        self.to_gate = None if mapped else Linear(rank, keys)

    def terms(self, graph: Graph, *parts: Tensor) -> Round:
        query, key, value, logits = parts
        logits = logits if self.to_gate is None else self.to_gate(logits)
        query, key, value, logits = (x.unflatten(-1, (self.heads, -1)) for x in (query, key, value, logits))
        return Round(graph, value, Dot(query, key, self.scale), log_gate=F.logsigmoid(logits) / self.temperature)


class StateSpace(Recurrent):
    """The state space model of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, eq. 16 and section 7): the step dt_i decides
    how much of the state a node keeps and how much it adds.

        w_ij = <C_i, B_j> exp(-a_h sum_{t = j+1..i} dt_t),   u_j = dt_j x_j,   dt = softplus(W_dt h + b)

    Args:
        dim, heads, bias, mapped: as in `Recurrent`; a mapped node is its x, B, C and the logits of dt.
        head_dim: width of a head. Default: dim / heads. state: width of B and C, which heads of a group share.
        groups: of heads. limits: the smallest and the largest dt.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        state: int = 128,
        groups: int = 1,
        limits: tuple[float, float] = (0.0, float("inf")),
        bias: bool = False,
        mapped: bool = False,
    ) -> None:
        head_dim = _head_dim(dim, heads, head_dim)
        check_integers(state=state, groups=groups)
        if groups < 1 or heads % groups:
            raise ValueError(f"{groups} groups do not divide {heads} heads")
        width = heads * head_dim
        super().__init__(dim, [width, groups * state, groups * state, heads], width, bias=bias, mapped=mapped)
        self.heads = heads
        self.groups = groups
        self.limits = limits
        self.log_decay = nn.Parameter(torch.arange(1.0, heads + 1).log())  # a_h = 1 .. H, as published
        self.step_bias = _step_bias(heads)

    def terms(self, graph: Graph, *parts: Tensor) -> Round:
        x, key, query, logits = parts
        step = F.softplus(logits + self.step_bias).clamp(*self.limits)
        value = x.unflatten(-1, (self.heads, -1)) * step[..., None]
        query, key = (y.unflatten(-1, (self.groups, -1)) for y in (query, key))
        return Round(graph, value, Dot(query, key, 1.0), log_gate=(-self.log_decay.exp() * step)[..., None])


class DeltaRule(Recurrent):
    """The delta rule (DeltaNet, Yang et al. 2024, arXiv:2406.06484), with a gate a head (Gated DeltaNet, Yang et al.
    2024, arXiv:2412.06464, eq. 10): a node stores what its key does not read from the state yet.

        S_i = gate_i S_{i-1} + beta_i k_i^T (v_i - k_i gate_i S_{i-1}),   gate = exp(-a_h softplus(W_a h + b))

    Queries and keys have length 1, beta = sigmoid(W_beta h).

    Args:
        dim, heads, bias, mapped: as in `Recurrent`; a mapped node is its query, key, value, the logits of beta, and of
            the gate if `gated`.
        head_dim: width of queries and keys. Default: dim / heads. value_dim: of a head's values. Default: head_dim.
        key_heads: heads of queries and keys, which divide `heads`. gated: whether there is a gate.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        key_heads: int | None = None,
        gated: bool = True,
        bias: bool = False,
        mapped: bool = False,
    ) -> None:
        head_dim = _head_dim(dim, heads, head_dim)
        key_heads = heads if key_heads is None else key_heads
        value_dim = head_dim if value_dim is None else value_dim
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"{key_heads} heads of keys do not divide {heads} heads")
        keys = key_heads * head_dim
        values = heads * value_dim
        super().__init__(dim, [keys, keys, values] + [heads] * (1 + gated), values, bias=bias, mapped=mapped)
        self.heads = heads
        self.key_heads = key_heads
        self.scale = head_dim**-0.5
        self.log_decay = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log()) if gated else None
        self.step_bias = _step_bias(heads) if gated else None

    def terms(self, graph: Graph, *parts: Tensor) -> Round:
        query, key, value, beta, *steps = parts
        query, key = (_unit(x.unflatten(-1, (self.key_heads, -1))) for x in (query, key))
        log_gate = None
        if self.log_decay is not None and self.step_bias is not None:
            log_gate = (-self.log_decay.exp() * F.softplus(steps[0] + self.step_bias))[..., None]
        value = value.unflatten(-1, (self.heads, -1))
        score = Dot(query, key, self.scale)
        return Round(graph, value, score, log_gate=log_gate, beta=beta.sigmoid())


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class ShortConvolution(KeyValue):
    """A convolution of each channel over a few nodes: a weight for each offset and channel.

        m_i = b + sum_{j in N(i)} w_(i - j) * h_j          over `causal() & window(kernel - 1)`

    A cache keeps the last `kernel - 1` nodes.

    Args:
        channels: width of the features. kernel: number of weights of a channel. bias: whether there is a b.
    """

    normalize = "none"
    depends_on = "node"

    def __init__(self, channels: int, kernel: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        check_integers(channels=channels, kernel=kernel)
        self.weight = nn.Parameter(torch.empty(kernel, channels))  # in the order of torch's convolutions: oldest first
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(kernel**-0.5), kernel**-0.5)

    @property
    def num_past(self) -> int:  # type: ignore[override]
        return len(self.weight) - 1

    def takes(self) -> tuple[validation.Takes, validation.Takes]:
        return (self.weight.shape[1], None), (self.weight.shape[1], None)

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        return dst.new_empty(*dst.shape[:-1], 1, 0), src.new_empty(*src.shape[:-1], 1, 0), src.unsqueeze(-1)

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        future = self.weight.new_zeros(len(self.weight) - 1, self.weight.shape[1])
        table = torch.cat([self.weight, future]).to(value.dtype)
        return Round(graph, value, bias=(BiasTable(table, Offset(len(self.weight) - 1)),))

    def merge(self, out: Tensor) -> Tensor:
        message = out.flatten(-2)
        return message if self.bias is None else message + self.bias
