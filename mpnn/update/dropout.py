"""Dropout of features, at the cost of one memory pass.

On CPU, torch draws random numbers sequentially on one thread, which often takes longer than the surrounding layers.
Here a counter-based hash decides which elements are dropped (`mpnn.graph.rng`, as for attention weights), a vector of
elements at a time on all threads.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.aggregate import Sum
from mpnn.graph import Graph, rng
from mpnn.graph.graph import keep_edges
from mpnn.graph.sharding import active
from mpnn.kernels.dense import drop_features, drops_features
from mpnn.round import Round
from mpnn.round.needs import class_of

_MIN_ELEMENTS = 1 << 14  # smaller tensors use torch's dropout


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`: in training, sets each element to 0 with probability p and scales the others by 1 / (1 - p).

    `torch.manual_seed` determines which elements are dropped. For sparse features [N, d] (COO), random numbers are
    drawn only for the stored elements: bags of words are mostly zeros. While nodes are sharded over processes
    (`mpnn.distributed`), x is [..., N, d], and all processes together drop what one alone would.
    """

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and (not self.training or self.p == 0):
            return x
        if not self.training or not 0.0 < self.p < 1.0 or not isinstance(x, Tensor):
            return super().forward(x)
        if x.is_sparse:
            x = x.coalesce()
            if (sharding := active()) is None:
                values = F.dropout(x.values(), self.p)
            else:
                node, component = x.indices()
                values = _by_hash(
                    x.values(), self.p, component * 0, sharding.numbers(x.shape[0]).to(x.device)[node], component
                )
            return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)
        if (sharding := active()) is not None and x.dim() > 1:
            entries = torch.arange(x.shape[:-2].numel(), device=x.device).view(*x.shape[:-2], 1, 1)
            numbers = sharding.numbers(x.shape[-2]).to(x.device)[:, None]
            return _by_hash(x, self.p, entries, numbers, torch.arange(x.shape[-1], device=x.device))
        if torch.compiler.is_compiling() or self.inplace or x.numel() < _MIN_ELEMENTS or not drops_features(x):
            return super().forward(x)
        seed = rng.new_seed(x.device)
        return drop_features(x, rng.keys(seed, torch.zeros(1, dtype=torch.int64)), self.p)


def _by_hash(x: Tensor, p: float, entry: Tensor, node: Tensor, component: Tensor) -> Tensor:
    """Dropout by a hash of the entry of the batch, the node's number in the whole graph, and the component of each
    number, so that any number of processes drops the same. The three broadcast to the shape of x."""
    keep = rng.keep(rng.new_seed(x.device), entry, node, component, p)
    return torch.where(keep, x / (1 - p), torch.zeros_like(x))


def drop_edges(graph: Graph, edge_attr: Tensor | None, p: float) -> tuple[Graph, Tensor | None]:
    """The graph and the attributes of its edges without each edge with probability p (DropEdge, Rong et al. 2020).

    Parts of a graph drop what the whole does: by a hash of the ends' numbers, so repeated edges are dropped together.
    """
    if graph.node_ids is None:
        graph = graph.drop_edges(p)
    else:
        src, dst = graph.ends
        seed = rng.new_seed(graph.device)
        keep = rng.keep(seed, torch.zeros_like(seed), *rng.numbers(graph, dst, src), p)
        graph = keep_edges(graph, keep)
    return graph, None if edge_attr is None else edge_attr[graph.edge_ids]


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, the residual branch x [..., N, d] of each batch entry is set
    to 0 with probability p, for all its nodes together, and scaled by 1 / (1 - p) otherwise."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"the probability p of dropping a layer must lie in [0, 1); got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        mask = torch.rand(*x.shape[:-2], 1, 1, device=x.device) >= self.p
        return x * (mask.to(x.dtype) / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def edge_scale(operator: Any, round: Round) -> float:
    """The factor that keeps the expectation of an operator's message while edges are dropped: 1 / (1 - p) for a sum
    whose weights are not normalized, which grows with the number of edges."""
    balanced = round.weighted and round.normalize not in ("sigmoid", "none")
    balanced = balanced or (operator.attention is not None and operator.attention.balanced)
    drops = operator.training and operator.edge_dropout and not balanced and class_of(operator.aggregate) is Sum
    return 1 / (1 - operator.edge_dropout) if drops else 1.0
