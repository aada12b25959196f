"""Linear attention: weights are inner products of feature maps (Performer and others)."""

from collections.abc import Callable
from functools import partial
from math import log
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.attention.spec import KeyValue, check_integers
from mpnn.graph import Graph
from mpnn.kernels.dense import positive_features
from mpnn.round import Round, validation
from mpnn.scores import Dot
from mpnn.update.maps import Linear


class Kernel(KeyValue):
    """Linear attention: weights are inner products of positive features. Sums over sources do not depend on the
    destination, so over complete and causal graphs the cost is linear in the number of nodes.

        w_ij = <phi(W_Q h_i), phi(W_K h_j)>,   m_i = W_O || _h ( sum_j w_ij W_V h_j / sum_j w_ij )

    If `features` is an integer, phi is Performer's (Choromanski et al. 2021); the expectation of the weights is that of
    softmax (lemma 1):

        phi(x) = exp(omega x - |x|^2 / 2) / sqrt(features) of x / D^(1/4),   omega random and orthogonal in blocks

    If it is "elu", phi is that of Katharopoulos et al. 2020 (eq. 7): phi(x) = elu(x) + 1, with D features.
    The sum of the weights is computed as one more component of the values. Returned weights are not divided by it: each
    row is correct up to a factor.

    Args:
        dim: width of the features, a multiple of `heads`. features: number of random directions (more are closer to
            softmax), or "elu". bias: whether the four maps have biases. seed: of the directions, which are saved with
            the module.
    """

    normalize = "none"
    depends_on = "row"  # keys are scaled by their maximum
    reads = "to_query", "to_key"
    directions: Tensor | None

    def __init__(
        self, dim: int, heads: int, *, features: int | Literal["elu"] = 256, bias: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        check_integers(dim=dim, heads=heads)
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if features != "elu" and (not isinstance(features, int) or features < 1):
            raise ValueError(f'features must be at least 1, or "elu"; got {features!r}')
        self.heads = heads
        self.head_dim = dim // heads
        self.to_query, self.to_key, self.to_value, self.to_out = (Linear(dim, dim, bias) for _ in range(4))
        self.register_buffer("directions", None if features == "elu" else _orthogonal(features, self.head_dim, seed))

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            to(x).unflatten(-1, (self.heads, -1))
            for to, x in ((self.to_query, dst), (self.to_key, src), (self.to_value, src))
        )
        return query, key, value

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        # A factor per query cancels, and so does a factor shared by all keys of a head in a component. The factors
        # keep exponentials from overflowing, and the keys of one document from underflowing next to those of another.
        queries, keys = self._features(query, _node_max), self._features(key, partial(_component_max, graph))
        return Round(graph, value, Dot(queries, keys, 1.0))

    def merge(self, out: Tensor) -> Tensor:
        validation.widened("Kernel", out.shape[-1], self.head_dim + 1)
        total = out[..., -1:]
        return self.to_out((out[..., :-1] / torch.where(total == 0, torch.ones_like(total), total)).flatten(-2))

    def _features(self, x: Tensor, largest: Callable[[Tensor], Tensor]) -> Tensor:
        """phi(x) [..., N, H, features] of x [..., N, H, D], divided by exp(largest(y)), where y [..., N, H]
        is the logarithm of each node's largest feature."""
        if self.directions is None:
            return F.elu(x) + 1
        x, directions = x * self.head_dim**-0.25, self.directions.to(x.dtype)
        return positive_features(x, directions, largest, log(len(directions)) / 2)


def _node_max(x: Tensor) -> Tensor:
    return x


def _component_max(graph: Graph, x: Tensor) -> Tensor:
    """The maximum of x [..., N_src, H] over the component of each source, [..., N_src, H], or [..., 1, H] if there is
    one component. A compiled program serves all graphs, so it treats all sources as one component."""
    component = None if torch.compiler.is_compiling() else graph.cached("components", lambda: _components(graph))
    if component is None:
        return x.amax(-2, keepdim=True)
    index = component[:, None].expand_as(x)
    return torch.full_like(x, -torch.inf).scatter_reduce(-2, index, x, "amax").gather(-2, index)


def _components(graph: Graph) -> Tensor | None:
    """The component of each source, int64 [N_src]; None if there is only one."""
    component = graph.components()
    return component if bool(component.any()) else None


def _orthogonal(count: int, dim: int, seed: int) -> Tensor:
    """[count, dim]: normal vectors, orthogonal within blocks of `dim` rows (section 2.4 of the paper)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(-(-count // dim)):
        q, r = torch.linalg.qr(torch.randn(dim, dim, generator=generator))
        blocks.append((q * r.diagonal().sign()).T)  # without the signs, the directions are biased
    lengths = torch.randn(count, dim, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:count] * lengths
