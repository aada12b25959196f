"""Encodings: what a node can know of its place in a graph before it hears anybody.

Attention over a complete graph sees no edges; these numbers tell it where the edges were. All are functions of a graph
alone, the same at each call, and of a batch of graphs (`graphs.batch`) they are what each graph would get by itself.

| function | what |
|---|---|
| `laplacian(graph, k)` | eigenvectors of the Laplacian with the smallest eigenvalues, signs fixed |
| `random_walk(graph, steps)` | how likely a walk is back where it began after 1, 2, ... steps |
| `weisfeiler_lehman(graph, rounds)` | roles: nodes whose neighbourhoods look alike have the same number |
| `shortest_paths(graph, max_distance)` | hops between every two nodes, as classes |
| `path_edges(graph, steps)` | the edges on a shortest path between every two nodes |
| `pagerank(graph, alpha)` | how close every two nodes are, all paths taken together |
| `degrees(graph, most)` | how many edges arrive and leave |
| `random_features(num_nodes, k, seed)` | numbers that only tell nodes apart |
"""

from mpnn.encodings.degree import degrees
from mpnn.encodings.laplacian import laplacian
from mpnn.encodings.pagerank import pagerank
from mpnn.encodings.random_features import random_features
from mpnn.encodings.random_walk import random_walk
from mpnn.encodings.shortest_paths import path_edges, shortest_paths
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
