"""GATv2: GAT in which each node can rank its in-neighbors differently."""

from mpnn.attention import AdditiveV2
from mpnn.models.graph.gat import GAT


class GATv2(GAT):
    """GAT with dynamic attention (Brody et al. 2022, eq. 7): the nonlinearity comes before the product with a.

        w_ij = softmax_j( a . LeakyReLU( W_dst h_i + W_src h_j ) )   over the in-neighbors j of i

    In GAT the ranking of the sources is the same for all destinations. Here it depends on the destination. The
    arguments are those of `GAT`.
    """

    spec = AdditiveV2
