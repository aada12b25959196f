"""Shared by models of atoms: functions of distances, the readout of a molecule, and forces."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpnn import Graph
from mpnn.graphs import edge_vectors
from mpnn.models.layers.readout import every_node, pooled
from mpnn.update import rows


def vectors_of(graph: Graph, positions: Tensor, cell: Tensor | None = None, pool: Graph | None = None) -> Tensor:
    """`edge_vectors`; with `pool`, cells [G, 3, 3] are those of its destinations.

    Raises:
        ValueError: the graph has edge_attr, which are the shifts of a periodic graph, and there is no cell.
    """
    if cell is None and graph.edge_attr is not None:
        raise ValueError(
            f"edge_attr of a graph of atoms are the shifts of a periodic cell: pass the cell of {graph}, or a graph "
            "without edge_attr if there is none"
        )
    if cell is None or cell.dim() == 2 or pool is None:
        return edge_vectors(graph, positions, cell)
    atoms, molecules = every_node(pool).ends
    return edge_vectors(graph, positions, cell, torch.empty_like(atoms).index_copy(0, atoms, molecules))


def of_types(embedding: nn.Embedding, types: Tensor) -> Tensor:
    """The vectors of atoms, [N, dim], of their types, integers [N].

    Raises:
        TypeError, ValueError: types are no integers, or not below the number of types of the model.
    """
    if types.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"types must be int64 [N], such as atomic numbers; got {types.dtype}")
    try:
        return embedding(types)
    except IndexError:
        low, high = types.aminmax()
        raise ValueError(
            f"types must be from 0 to {embedding.num_embeddings - 1}; got {int(low)} to {int(high)}: a model with "
            f"types={int(high) + 1} has a vector for each"
        ) from None


class RadialBasis(nn.Module):
    """Distances [E] -> Gaussians of them and a smooth cutoff, [E, count + 1] (Schütt et al. 2017, section 4.1; Behler
    2011):

        exp( -(d - mu_k)^2 / (2 delta^2) )          ( cos(pi d / cutoff) + 1 ) / 2, 0 beyond the cutoff

    The centers mu_k are `count` numbers from 0 to the cutoff, delta apart.
    """

    centers: Tensor

    def __init__(self, cutoff: float, count: int) -> None:
        super().__init__()
        self.cutoff = cutoff
        self.delta = cutoff / (count - 1)
        self.register_buffer("centers", torch.linspace(0.0, cutoff, count))

    def forward(self, distance: Tensor) -> Tensor:
        gaussians = torch.exp(-0.5 * ((distance[:, None] - self.centers) / self.delta).square())
        smooth = 0.5 * (torch.cos(distance * (math.pi / self.cutoff)) + 1.0) * (distance <= self.cutoff)
        return torch.cat([gaussians, smooth[:, None]], 1)


class RadialFilter(nn.Module):
    """The result of `RadialBasis` -> a weight for each edge and feature: an MLP of the Gaussians, times the cutoff."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, basis: Tensor) -> Tensor:
        return self.network(basis[..., :-1]) * basis[..., -1:]

    def row_function(self) -> Any:
        if (network := rows.row_function(self.network)) is None:
            return None
        f, parameters = network
        return (lambda basis, *of: f(basis[..., :-1], *of) * basis[..., -1:]), parameters


class ShiftedSoftplus(nn.Module):
    """`log(e^x + 1) - log 2`: smooth, and 0 at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x) - math.log(2.0)

    def row_function(self) -> Any:
        return self.forward, ()


def sum_of(values: Tensor, pool: Graph | None) -> Tensor:
    """Values of atoms [N, d], or their sums over molecules [G, d]: in `pool`, each of G destinations receives from the
    atoms of one molecule."""
    return values if pool is None else pooled(pool, values)


def forces(energy: Tensor, positions: Tensor, *, create_graph: bool = False) -> Tensor:
    """`-dE / dp`, the force on each atom [N, 3]. positions require gradients; `create_graph` to train on forces."""
    (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=create_graph)
    return -gradient
