"""Encodings: node features that describe the position of a node in its graph.

Attention over a complete graph does not see the edges of the original graph; encodings add this information. Each
encoding is a deterministic function of the graph. Each graph of a batch (`graphs.batch`) gets the same encoding as on
its own. `TimeEncoding`, a module, describes times.
"""

from mpnn.graphs.encodings.features import (
    TimeEncoding as TimeEncoding,
    degrees as degrees,
    random_features as random_features,
    weisfeiler_lehman as weisfeiler_lehman,
)
from mpnn.graphs.encodings.laplacian import laplacian as laplacian
from mpnn.graphs.encodings.walks import (
    pagerank as pagerank,
    path_edges as path_edges,
    random_walk as random_walk,
    shortest_paths as shortest_paths,
)
