"""Builders: small pure functions that say who hears whom.

Most return a `Topology`, a rule without a size that `bind(n)` makes a graph; those that are given data (edges,
features, other libraries' graphs) return a `Graph`.
"""

from mpnn.graphs.content import knn, lsh
from mpnn.graphs.convert import (
    from_networkx,
    from_pyg,
    from_scipy,
    from_sparse_tensor,
    from_torch_sparse,
    to_networkx,
    to_pyg,
    to_scipy,
    to_sparse_tensor,
    to_torch_sparse,
)
from mpnn.graphs.explicit import batch, from_edges
from mpnn.graphs.image import grid, neighborhood, windows
from mpnn.graphs.parse import parse
from mpnn.graphs.sequence import (
    causal,
    complete,
    documents,
    global_nodes,
    identity,
    memory,
    permutation,
    prefix,
    strided,
    window,
)
from mpnn.graphs.sparse import bigbird, longformer, random

__all__ = [
    "batch",
    "bigbird",
    "causal",
    "complete",
    "documents",
    "from_edges",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "from_sparse_tensor",
    "from_torch_sparse",
    "global_nodes",
    "grid",
    "identity",
    "knn",
    "longformer",
    "lsh",
    "memory",
    "neighborhood",
    "parse",
    "permutation",
    "prefix",
    "random",
    "strided",
    "to_networkx",
    "to_pyg",
    "to_scipy",
    "to_sparse_tensor",
    "to_torch_sparse",
    "window",
    "windows",
]
