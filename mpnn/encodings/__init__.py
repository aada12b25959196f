"""Encodings: node features that describe the position of a node in its graph.

Attention over a complete graph does not see the edges of the original graph; encodings add this information. Each
encoding is a deterministic function of the graph. Each graph of a batch (`graphs.batch`) gets the same encoding as on
its own.

| function | result |
|---|---|
| `laplacian(graph, k)` | eigenvectors of the Laplacian with the smallest eigenvalues, signs fixed |
| `random_walk(graph, steps)` | probability that a walk returns to its start after 1, 2, ... steps |
| `weisfeiler_lehman(graph, rounds)` | roles: nodes with similar neighborhoods have the same number |
| `shortest_paths(graph, max_distance)` | hops between all pairs of nodes, as edge types |
| `path_edges(graph, steps)` | the edges on a shortest path between all pairs of nodes |
| `pagerank(graph, alpha)` | proximity of all pairs of nodes, over all paths |
| `degrees(graph, most)` | in-degree and out-degree |
| `random_features(num_nodes, k, seed)` | random numbers that distinguish nodes |
"""

from mpnn.encodings.degree import degrees
from mpnn.encodings.laplacian import laplacian
from mpnn.encodings.random_features import random_features
from mpnn.encodings.shortest_paths import path_edges, shortest_paths
from mpnn.encodings.walks import pagerank, random_walk
from mpnn.encodings.weisfeiler_lehman import weisfeiler_lehman

__all__ = [
    "degrees",
    "laplacian",
    "pagerank",
    "path_edges",
    "random_features",
    "random_walk",
    "shortest_paths",
    "weisfeiler_lehman",
]
