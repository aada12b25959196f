"""Builders: small pure functions that define the edges of a graph.

Most return a `Topology`, a rule that `bind(n)` turns into a `Graph` of n nodes. Builders that take data (edges,
features, other libraries' graphs) return a `Graph`.
"""

from torch.serialization import add_safe_globals

from mpnn.graph import Graph
from mpnn.graph.bind_cache import CACHE as cache
from mpnn.graph.relations import Flipped, GridOffset, Offset, Table, Taps
from mpnn.graph.runs import Runs
from mpnn.graph.stacked import StackedGraph
from mpnn.graphs.choice import blocks, chosen
from mpnn.graphs.compressed import CompressedGraph, compressed
from mpnn.graphs.content import chunks, knn, lsh
from mpnn.graphs.convert import (
    from_dgl,
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
from mpnn.graphs.disk import open_csr, write_csr
from mpnn.graphs.explicit import batch, edges_into, from_blocks, from_edges
from mpnn.graphs.geometry import edge_vectors, farthest, line_graph, radius
from mpnn.graphs.image import convolution, grid, neighborhood, pooling, windows
from mpnn.graphs.kinds import HeteroGraph
from mpnn.graphs.mesh import icosphere, icosphere_points
from mpnn.graphs.parse import parse, register
from mpnn.graphs.sampling import absent_edges, random_walk_neighbors, sampled
from mpnn.graphs.sequence import (
    causal,
    complete,
    documents,
    fixed,
    global_nodes,
    identity,
    memory,
    permutation,
    prefix,
    strided,
    window,
)
from mpnn.graphs.sparse import bigbird, expander, longformer, random
from mpnn.graphs.trees import rollouts, tree

# What pickles of topologies and graphs name. Each checks what it reads, so `torch.load(weights_only=True)` may call it.
add_safe_globals([parse, Graph, StackedGraph, Runs, Offset, GridOffset, Taps, Flipped, Table])

__all__ = [
    "CompressedGraph",
    "HeteroGraph",
    "StackedGraph",
    "absent_edges",
    "batch",
    "bigbird",
    "blocks",
    "cache",
    "causal",
    "chosen",
    "chunks",
    "complete",
    "compressed",
    "convolution",
    "documents",
    "edge_vectors",
    "edges_into",
    "expander",
    "farthest",
    "fixed",
    "from_blocks",
    "from_dgl",
    "from_edges",
    "from_networkx",
    "from_pyg",
    "from_scipy",
    "from_sparse_tensor",
    "from_torch_sparse",
    "global_nodes",
    "grid",
    "icosphere",
    "icosphere_points",
    "identity",
    "knn",
    "line_graph",
    "longformer",
    "lsh",
    "memory",
    "neighborhood",
    "open_csr",
    "parse",
    "permutation",
    "pooling",
    "prefix",
    "radius",
    "random",
    "random_walk_neighbors",
    "register",
    "rollouts",
    "sampled",
    "strided",
    "to_networkx",
    "to_pyg",
    "to_scipy",
    "to_sparse_tensor",
    "to_torch_sparse",
    "tree",
    "window",
    "windows",
    "write_csr",
]
