"""Laplacian eigenvectors: the sines and cosines of a graph, computed deterministically.

The sign of an eigenvector is arbitrary, and so is the basis of an eigenspace. In solvers, both depend on rounding
errors or random numbers. Here both are functions of the eigenspace.
"""

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least
from mpnn.graphs.encodings.walks import adjacency, inverse_or_zero

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Floats = NDArray[np.float64]

_DENSE = 512  # up to this number of nodes, all eigenvectors are computed
_MORE = 8  # extra eigenvectors of the sparse solver, to see where the last eigenspace ends
_SAME_VALUE = 1e-10  # eigenvalues closer than this share an eigenspace; solvers have errors of about 1e-13
_SAME_LENGTH = 1e-6  # squared lengths of projections within this relative difference count as equal


def laplacian(graph: Graph, k: int) -> Tensor:
    """The k eigenvectors after the first of `I - D^(-1/2) A D^(-1/2)`, smallest eigenvalues first (Belkin & Niyogi
    2003; as encodings, Dwivedi et al. 2023, "Benchmarking graph neural networks").

    Each connected component is encoded separately, without its first eigenvector, which depends on degrees only. Each
    graph of a batch therefore gets the same encoding as on its own. Missing columns of a small component are zeros, as
    is the row of a node without neighbors. Self-loops are ignored.

    Basis and sign: the first vector of an eigenspace is the projection of the unit vector of the node closest to it,
    scaled to length 1. The next vectors follow in the same way from the orthogonal rest of the eigenspace. The largest
    entry of each vector is therefore positive. Of nodes that are equally close, as in symmetric graphs, the first one
    is used: only then does the result depend on the numbering of nodes. In components of more than 512 nodes, an
    eigenspace with more than 8 vectors beyond the k-th is known only in part. Its basis is then the solver's, which is
    the same for each call since scipy 1.17.

    Returns:
        [N, k] in torch's default dtype, on the graph's device.

    Raises:
        ValueError: if k is negative, the graph has two sets of nodes, or an edge (named) has no reverse edge.
    """
    from scipy.sparse.csgraph import connected_components

    k = at_least("k", k, 0)
    capacity.require(8 * graph.num_dst * k, f"k={k} eigenvectors", "take fewer")
    matrix = adjacency(graph, "the Laplacian")
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    _require_undirected(matrix)
    out = np.zeros((graph.num_dst, k))
    if k and matrix.nnz:
        scale = np.sqrt(inverse_or_zero(matrix.sum(1)))
        similarity = (matrix * scale[:, None] * scale[None, :]).tocsr()
        _, component = connected_components(matrix, directed=False)
        order = np.argsort(component, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(component[order])) + 1):
            if len(members) > 1:
                vectors = _encode_component(similarity[members][:, members], k)
                out[members, : vectors.shape[1]] = vectors
    return torch.from_numpy(out).to(graph.device, torch.get_default_dtype())


def _encode_component(similarity: "csr_array", k: int) -> Floats:
    """Eigenvectors [n, min(k, n - 1)] of a connected component from its D^(-1/2) A D^(-1/2). The largest eigenvalues of
    this matrix are the smallest of the Laplacian."""
    n = similarity.shape[0]
    k = min(k, n - 1)
    values, vectors = _sparse(similarity, k + 1 + _MORE) if n > max(_DENSE, k + 1 + _MORE) else _dense(similarity)
    values = values[1:]
    vectors = vectors[:, 1:]
    ends = np.append(np.flatnonzero(np.diff(values) < -_SAME_VALUE) + 1, len(values))
    columns: list[Floats] = []
    begin = 0
    for end in ends:
        if len(columns) < k:
            columns += _basis(vectors[:, begin:end], k - len(columns))
        begin = end
    return np.stack(columns, 1)


def _dense(similarity: "csr_array") -> tuple[Floats, Floats]:
    values, vectors = np.linalg.eigh(similarity.toarray())
    return values[::-1], vectors[:, ::-1]


def _sparse(similarity: "csr_array", count: int) -> tuple[Floats, Floats]:
    """Largest eigenvalues first. Lanczos does not converge if eigenvalues are close together, as in long paths and
    meshes. A factorization of such graphs is cheap."""
    from scipy.sparse.linalg import ArpackNoConvergence, eigsh

    options: dict[str, Any] = {"v0": np.random.default_rng(0).standard_normal(similarity.shape[0])}
    if "rng" in signature(eigsh).parameters:  # since 1.17: for restart vectors when an eigenspace is exhausted
        options["rng"] = 0
    try:
        values, vectors = eigsh(similarity, count, which="LA", maxiter=300, **options)
    except ArpackNoConvergence:
        values, vectors = eigsh(similarity.tocsc(), count, sigma=1 + 1e-4, **options)
    order = np.argsort(-values, kind="stable")
    return values[order], vectors[:, order]


def _basis(space: Floats, count: int) -> list[Floats]:
    """Up to `count` orthonormal vectors of the span of orthonormal columns [n, m]. They depend on the span only."""
    columns = []
    for _ in range(min(count, space.shape[1])):
        closeness = np.square(space).sum(1)
        node = int(np.argmax(closeness >= closeness.max() * (1 - _SAME_LENGTH)))
        direction = space[node] / np.sqrt(closeness[node])  # the projection of that node, in the basis `space`
        columns.append(space @ direction)
        space = space @ _complement(direction)
    return columns


def _complement(direction: Floats) -> Floats:
    """[m, m - 1] orthonormal columns orthogonal to a unit vector: the Householder reflection that maps the first axis
    to it, without its first column."""
    normal = direction.copy()
    normal[0] += np.copysign(1.0, direction[0])
    return (np.eye(len(direction)) - 2 * np.outer(normal, normal) / (normal @ normal))[:, 1:]


def _require_undirected(matrix: "csr_array") -> None:
    dst, src = (matrix > matrix.T).nonzero()
    if len(dst):
        raise ValueError(
            f"Laplacian eigenvectors need edges that go equally often both ways; {src[0]} -> {dst[0]} does not; "
            "call graph.undirected()"
        )
