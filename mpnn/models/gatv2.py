"""GATv2: GAT in which whom a node listens to most may differ from node to node."""

from __future__ import annotations

from mpnn.attention import AdditiveV2
from mpnn.models.gat import GAT


class GATv2(GAT):
    """GAT with dynamic attention (Brody et al. 2022, eq. 7): the nonlinearity comes before the product with a.

        w_ij = softmax_j( a . LeakyReLU( W_dst h_i + W_src h_j ) )   over the j that i hears

    In GAT, a ranks the sources alike for all who hear them; here the ranking depends on the listener. All else is
    GAT's.
    """

    spec = AdditiveV2
