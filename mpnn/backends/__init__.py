"""Backends: how a request is computed. Each is a module with `NAME`, `supports(request) -> None | reason`,
`estimate(request) -> Estimate` and `run(request) -> (out, weights)`; to add one, add it to the tuple."""

from mpnn.backends import csr, dense, edge_list, low_rank, scatter, tiles

BACKENDS = (dense, tiles, low_rank, csr, scatter, edge_list)
