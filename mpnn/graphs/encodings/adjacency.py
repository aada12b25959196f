"""The adjacency of a graph as a sparse matrix, which most encodings use."""

from typing import TYPE_CHECKING

import numpy as np

from mpnn.graph import Graph
from mpnn.graph.arguments import one_set

if TYPE_CHECKING:
    from scipy.sparse import csr_array


def adjacency(graph: Graph, what: str) -> "csr_array":
    """[N, N] in float64: entry (i, j) is the number of edges from j to i.

    Raises:
        ValueError: if the numbers of sources and destinations differ; the message begins with `what`.
    """
    from scipy.sparse import csr_array

    one_set(what, graph)
    src, dst = graph.edge_index.cpu().numpy()
    return csr_array((np.ones(len(src)), (dst, src)), shape=(graph.num_dst, graph.num_src))


def inverse_or_zero(x: np.ndarray) -> np.ndarray:
    """`1 / x`, and 0 where x is 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x != 0)
