"""Sinks: the softmax with one more source of value 0, from the softmax without it.

    exp(l_ij) / (exp(s) + sum_j exp(l_ij)) = softmax_j(l_ij) * sigmoid(lse_i - s)        lse_i = log sum_j exp(l_ij)

so that kernels need no sinks, and only return lse (Xiao et al. 2023, arXiv:2309.17453; gpt-oss).
"""

from torch import Tensor


def share_of_edges(lse: Tensor, sinks: Tensor) -> Tensor:
    """`sigmoid(lse - sinks)`: the weight that the sinks [H] leave to the edges of each destination, [..., N_dst, H].

    lse [..., N_dst, H] is +inf for a row without edges, whose output is 0 whatever its share.
    """
    return (lse - sinks.to(lse.dtype)).sigmoid()
