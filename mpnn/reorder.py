"""Orders of the nodes in which neighbours stand close together: what one row reads, the next one finds in cache.

Rows are walked in this order and nothing is moved. On a road-like grid of 202,500 randomly numbered nodes with 2.8
edges each, a plain sum then takes 0.78 of its time at width 128 (0.77 at 64, 0.90 at 16; one core of a Zen 3 EPYC).
Moving the features into the order and back would make the sum itself three times faster, and cost more than twice what
it takes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

METHODS = ("rcm", "degree")


def order(src: Ints, dst: Ints, num_nodes: int, method: str) -> Ints:
    """The nodes in order, [num_nodes].

    Raises:
        ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"there is no order {method!r}; there are {', '.join(METHODS)}")
    if num_nodes == 0:
        return np.empty(0, np.int64)
    if method == "degree":
        return np.argsort(-np.bincount(dst, minlength=num_nodes), kind="stable")
    from scipy import sparse
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([src, dst]), np.concatenate([dst, src])
    both_ways = sparse.csr_matrix((np.ones(len(ends[0]), bool), ends), shape=(num_nodes, num_nodes))
    return reverse_cuthill_mckee(both_ways, symmetric_mode=True).astype(np.int64)
