"""Lists of edges, on CPU and without gradients: `sort_edges.py` sorts them by row, which `graph/csr.py` asks for, and
`sample_neighbors.py` draws in-neighbors of nodes for `graphs/` and `distributed/`. Loops: `../cpu/sort_edges.cpp`,
`../cpu/sample_neighbors.cpp`. The twins are in the same files, in numpy and torch: they run where no library was
compiled, with the same results.
"""
