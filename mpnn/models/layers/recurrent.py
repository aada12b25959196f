"""The layer that recurrent language models share: a short convolution, then a recurrence, both of them rounds."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import Recurrent, ShortConvolution
from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.graphs import causal, window
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.blocks import Norm
from mpnn.update import Activate, Update
from mpnn.update.maps import Linear

CAUSAL = causal()


class RecurrentLayer(nn.Module):
    """A pre-norm layer of one or two rounds between two linear maps:

        z, f, g = W_in norm(x)                          a gate, features, and numbers for the gates of the state
        f = silu( sum_{j = i-3..i} w_(i-j) * f_j )      causal() & window(3): a weight for each offset and channel
        m = update( (f, g), sum_{j <= i} w_ij u_j )     causal(): `attention`
        y = x + W_out gated(m, z)

    Args:
        dim: width of x. attention: a recurrent spec with mapped features. gated: a module of (m, z), of `inner` numbers
            each. norm: creates a norm. update: of the recurrence. kernel: weights of a channel; 1 for no convolution.
        convolved: how many of the attention's parts, from the first on, are convolved. bias: of the convolution.
        map_bias: of the linear maps.
    """

    def __init__(
        self,
        dim: int,
        attention: Recurrent,
        gated: nn.Module,
        inner: int,
        norm: Norm,
        *,
        update: Update | None = None,
        kernel: int = 1,
        convolved: int = 3,
        bias: bool = False,
        map_bias: bool = False,
    ) -> None:
        super().__init__()
        parts = attention.parts
        self.widths = [inner, sum(parts[:convolved]), sum(parts[convolved:])]
        self.norm = norm(dim)
        self.gated = gated
        self.to_parts, self.to_out = Linear(dim, sum(self.widths), map_bias), Linear(inner, dim, map_bias)
        self.convolution = None
        if kernel > 1:
            spec = ShortConvolution(self.widths[1], kernel, bias=bias)
            self.convolution = MessagePassing(CAUSAL & window(kernel - 1), "sum", Activate(F.silu), spec)
        self.recurrence = MessagePassing(CAUSAL, "sum", update, attention)

    @property
    def graph(self) -> Topology | Graph | None:
        return self.recurrence.graph

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        *,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Returns y [..., N, dim], or (y, weights). `graph` replaces that of the recurrence, and bounds the other."""
        z, f, g = self.to_parts(self.norm(x)).split(self.widths, -1)
        if self.convolution is not None:
            f = self.convolution(f, _both(graph, self.convolution.graph), cache=cache)
        out = self.recurrence(torch.cat([f, g], -1), graph, cache=cache, return_weights=return_weights)
        m, weights = out if return_weights else (out, None)
        y = x + self.to_out(self.gated(m, z))
        return (y, weights) if return_weights else y


def _both(graph: Topology | Graph | None, local: Any) -> Any:
    """The edges of `local` within the graph of the call."""
    if graph is None or isinstance(graph, Topology):
        return local if graph is None or graph == CAUSAL else graph & local
    bound: Any = graph
    return bound.cached(("within", local), lambda: bound & local.bind(bound.num_dst, bound.num_src).to(bound.device))


class WithFeedForward(nn.Module):
    """`y = z + ffn(norm(z))` after a layer z of x."""

    def __init__(self, layer: RecurrentLayer, norm: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm = norm
        self.ffn = ffn

    @property
    def graph(self) -> Any:
        return self.layer.graph

    def forward(self, x: Tensor, graph: Any = None, *, return_weights: bool = False, **options: Any) -> Any:
        out = self.layer(x, graph, return_weights=return_weights, **options)
        z, weights = out if return_weights else (out, None)
        y = z + self.ffn(self.norm(z))
        return (y, weights) if return_weights else y


class GatedNorm(nn.Module):
    """`norm_h(m) * silu(z)` for groups of features, each divided by its root mean square; with `inside`, the gate is
    inside: `norm_h(m * silu(z))` (Mamba-2). `shared`: one weight for all groups."""

    def __init__(
        self, width: int, groups: int, *, eps: float = 1e-5, inside: bool = False, shared: bool = False
    ) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.inside = inside
        self.weight = nn.Parameter(torch.ones(width // groups if shared else width))

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        m = m * F.silu(z) if self.inside else m
        y = m.unflatten(-1, (self.groups, -1))
        y = y * (y.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        y = (y * self.weight).flatten(-2) if len(self.weight) < m.shape[-1] else y.flatten(-2) * self.weight
        return y if self.inside else y * F.silu(z)


class Skip(Update):
    """`y = m + D_h x`, where x is the first of the parts that the recurrence got: a number D for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        heads = x[..., : message.shape[-1]].unflatten(-1, (len(self.weight), -1))
        return message + (heads * self.weight[:, None]).flatten(-2)
