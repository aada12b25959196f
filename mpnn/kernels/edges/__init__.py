"""Lists of edges, on CPU and without gradients: `sort.py` sorts them by row, which `graph/csr.py` asks for, and
`sample.py` draws in-neighbors of nodes for `graphs/` and `distributed/`. Loops: `../cpu/sort_edges.cpp`,
`../cpu/sample_neighbors.cpp`. The twins are in the same files, in numpy and torch: they run where no library was
compiled, with the same results.
"""

from mpnn.kernels.edges.sample import Sample, sample_neighbors
from mpnn.kernels.edges.sort import rows_of, sort_edges

__all__ = ["Sample", "rows_of", "sample_neighbors", "sort_edges"]
