"""Backends: how a request is computed. Each is a module with `NAME`, `supports(request) -> None | reason`,
`estimate(request) -> Estimate` and `run(request) -> (out, weights)`; to add one, add it to the tuple."""

from mpnn.backends import dense, edge_list, scatter

BACKENDS = (dense, scatter, edge_list)
