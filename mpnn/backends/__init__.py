"""Backends, which compute requests. Each is a module with `NAME`, `supports(request) -> None | reason`,
`estimate(request) -> Estimate` and `run(request) -> (out, weights)`. To add a backend, add it to the tuple."""

from mpnn.backends import csr, dense, edge_list, low_rank, scatter, tiles

BACKENDS = (dense, tiles, low_rank, csr, scatter, edge_list)
