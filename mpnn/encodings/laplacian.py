"""Laplacian eigenvectors: the sines and cosines of a graph, with nothing left to chance.

An eigenvector's sign is arbitrary, and so is the basis where several share an eigenvalue; solvers choose by rounding
errors or at random. Here both follow from the eigenspace alone.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.encodings.adjacency import adjacency, inverse_or_zero
from mpnn.encodings.check import not_negative
from mpnn.graph import Graph

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Floats = NDArray[np.float64]

_DENSE = 512  # nodes up to which all eigenvectors are found at once
_MORE = 8  # eigenvectors beyond those wanted that the sparse solver finds, to see where an eigenspace ends
_SAME_VALUE = 1e-10  # eigenvalues no further apart share an eigenspace; solvers are exact to some 1e-13
_SAME_LENGTH = 1e-6  # squared lengths of projections that differ by no more, relatively, are taken for equal


def laplacian(graph: Graph, k: int) -> Tensor:
    """The k eigenvectors after the first of `I - D^(-1/2) A D^(-1/2)`, smallest eigenvalues first (Belkin & Niyogi
    2003; as encodings, Dwivedi et al. 2023, "Benchmarking graph neural networks").

    Each connected component is encoded by itself, without its first eigenvector, which only tells degrees; so a batch
    of graphs gets what each graph would get alone. Columns that a small component does not have are zeros, and so is
    the row of a node without neighbours. Self-loops are left out.

    Basis and sign: of an eigenspace, the first vector is the projection of the node that lies closest to it, scaled to
    length 1, then the same in what is left of the eigenspace. So the largest entry of each vector is positive. Of nodes
    that lie equally close, as in symmetric graphs, the first counts: only there does the result depend on how nodes are
    numbered. In components of more than 512 nodes, an eigenspace of which more than 8 vectors remain beyond the k-th
    is known in part only; its basis is then the solver's, and the same at each call from scipy 1.17 on.

    Returns:
        [N, k] in torch's default dtype, on the graph's device.

    Raises:
        ValueError: k is negative, the graph has two sets of nodes, or some edge does not go both ways (named).
    """
    from scipy.sparse.csgraph import connected_components

    not_negative("k", k)
    matrix = adjacency(graph, "the Laplacian")
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    _refuse_one_way(matrix)
    out = np.zeros((graph.num_dst, k))
    if k and matrix.nnz:
        scale = np.sqrt(inverse_or_zero(matrix.sum(1)))
        similarity = (matrix * scale[:, None] * scale[None, :]).tocsr()
        _, component = connected_components(matrix, directed=False)
        order = np.argsort(component, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(component[order])) + 1):
            if len(members) > 1:
                found = _encoded(similarity[members][:, members], k)
                out[members, : found.shape[1]] = found
    return torch.from_numpy(out).to(graph.device, torch.get_default_dtype())


def _encoded(similarity: csr_array, k: int) -> Floats:
    """[n, min(k, n - 1)] of a connected component, given D^(-1/2) A D^(-1/2), whose largest eigenvalues are L's
    smallest."""
    n = similarity.shape[0]
    k = min(k, n - 1)
    values, vectors = _sparse(similarity, k + 1 + _MORE) if n > max(_DENSE, k + 1 + _MORE) else _dense(similarity)
    values, vectors = values[1:], vectors[:, 1:]
    ends = np.append(np.flatnonzero(np.diff(values) < -_SAME_VALUE) + 1, len(values))
    found: list[Floats] = []
    begin = 0
    for end in ends:
        if len(found) < k:
            found += _basis(vectors[:, begin:end], k - len(found))
        begin = end
    return np.stack(found, 1)


def _dense(similarity: csr_array) -> tuple[Floats, Floats]:
    values, vectors = np.linalg.eigh(similarity.toarray())
    return values[::-1], vectors[:, ::-1]


def _sparse(similarity: csr_array, count: int) -> tuple[Floats, Floats]:
    """Largest eigenvalues first. Where Lanczos does not get there, eigenvalues lie close together as in long paths and
    meshes, and a factorisation is cheap."""
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    chance: dict[str, Any] = {"v0": np.random.default_rng(0).standard_normal(similarity.shape[0])}
    if "rng" in signature(eigsh).parameters:  # since 1.17: for vectors that begin again when an eigenspace is exhausted
        chance["rng"] = 0
    try:
        values, vectors = eigsh(similarity, count, which="LA", maxiter=300, **chance)
    except ArpackNoConvergence:
        values, vectors = eigsh(similarity.tocsc(), count, sigma=1 + 1e-4, **chance)
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:, order]


def _basis(space: Floats, count: int) -> list[Floats]:
    """Up to `count` orthonormal vectors of the space that orthonormal columns [n, m] span: a function of the space."""
    found = []
    for _ in range(min(count, space.shape[1])):
        closeness = np.square(space).sum(1)
        node = int(np.argmax(closeness >= closeness.max() * (1 - _SAME_LENGTH)))
        direction = space[node] / np.sqrt(closeness[node])  # the projection of that node, in the basis `space`
        found.append(space @ direction)
        space = space @ _complement(direction)
    return found


def _complement(direction: Floats) -> Floats:
    """[m, m - 1] orthonormal columns orthogonal to a unit vector: all but the first of the reflection that takes the
    first axis to it."""
    away = direction.copy()
    away[0] += np.copysign(1.0, direction[0])
    return (np.eye(len(direction)) - 2 * np.outer(away, away) / (away @ away))[:, 1:]


def _refuse_one_way(matrix: csr_array) -> None:
    dst, src = (matrix > matrix.T).nonzero()
    if len(dst):
        raise ValueError(
            f"Laplacian eigenvectors need edges that go both ways, equally often, and {src[0]} -> {dst[0]} does not; "
            "call graph.undirected()"
        )
