"""Encodings: node features that describe the position of a node in its graph.

Attention over a complete graph does not see the edges of the original graph; encodings add this information. Each
encoding is a deterministic function of the graph. Each graph of a batch (`graphs.batch`) gets the same encoding as on
its own.
"""

from mpnn.encodings.features import degrees, random_features
from mpnn.encodings.laplacian import laplacian
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
