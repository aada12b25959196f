"""Builders: small pure functions that define the edges of a graph.

Most return a `Topology`, a rule that `bind(n)` turns into a `Graph` of n nodes. Builders that take data (edges,
features, other libraries' graphs) return a `Graph`.
"""

from torch.serialization import add_safe_globals

from mpnn.graph import Graph, bind_cache
from mpnn.graph.relations import Flipped, GridOffset, KernelOffset, Offset, Table
from mpnn.graph.runs import Runs
from mpnn.graph.stacked import StackedGraph as StackedGraph
from mpnn.graphs.compressed import (
    CompressedGraph as CompressedGraph,
    TemporalGraph as TemporalGraph,
    compressed as compressed,
)
from mpnn.graphs.content import blocks as blocks, chosen as chosen, chunks as chunks, knn as knn, lsh as lsh
from mpnn.graphs.convert import (
    from_dgl as from_dgl,
    from_networkx as from_networkx,
    from_pyg as from_pyg,
    from_scipy as from_scipy,
    from_sparse_tensor as from_sparse_tensor,
    from_torch_sparse as from_torch_sparse,
    to_networkx as to_networkx,
    to_pyg as to_pyg,
    to_scipy as to_scipy,
    to_sparse_tensor as to_sparse_tensor,
    to_torch_sparse as to_torch_sparse,
)
from mpnn.graphs.disk import open_csr as open_csr, write_csr as write_csr
from mpnn.graphs.explicit import (
    batch as batch,
    edges_into as edges_into,
    from_blocks as from_blocks,
    from_edges as from_edges,
)
from mpnn.graphs.geometry import (
    edge_vectors as edge_vectors,
    farthest as farthest,
    line_graph as line_graph,
    radius as radius,
)
from mpnn.graphs.image import (
    convolution as convolution,
    grid as grid,
    neighborhood as neighborhood,
    pooling as pooling,
    windows as windows,
)
from mpnn.graphs.kinds import HeteroGraph as HeteroGraph
from mpnn.graphs.kinds_sampling import HeteroSample as HeteroSample, sample as sample
from mpnn.graphs.listed import as_topology as as_topology, listed as listed
from mpnn.graphs.mesh import icosphere as icosphere, icosphere_points as icosphere_points
from mpnn.graphs.parse import parse as parse, register as register
from mpnn.graphs.relational import from_tables as from_tables
from mpnn.graphs.sampling import absent_edges as absent_edges, random_walk_neighbors as random_walk_neighbors
from mpnn.graphs.sequence import (
    causal as causal,
    complete as complete,
    documents as documents,
    fixed as fixed,
    global_nodes as global_nodes,
    identity as identity,
    memory as memory,
    permutation as permutation,
    prefix as prefix,
    strided as strided,
    window as window,
)
from mpnn.graphs.sparse import bigbird as bigbird, expander as expander, longformer as longformer, random as random
from mpnn.graphs.trees import rollouts as rollouts, tree as tree

cache = bind_cache.CACHE

# What pickles of topologies and graphs name. Each checks what it reads, so `torch.load(weights_only=True)` may call it.
add_safe_globals([parse, Graph, StackedGraph, Runs, Offset, GridOffset, KernelOffset, Flipped, Table])
