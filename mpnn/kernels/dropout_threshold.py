"""The threshold of counter-based dropout, which all kernels compare hashes with; see `mpnn.graph.rng`."""

BITS = 24


def threshold(p: float) -> int:
    """The least hash of `BITS` bits that keeps an edge, so that it is dropped with probability `p`."""
    return round(p * (1 << BITS))
