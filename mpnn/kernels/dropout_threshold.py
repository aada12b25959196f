"""The threshold of counter-based dropout, which all kernels compare words with; see `mpnn.graph.rng`."""


def threshold(p: float) -> int:
    """The least signed word of 32 bits that keeps an edge, so that it is dropped with probability `p`."""
    return min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)
