"""R-GAT: attention with maps for each edge type."""

from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import TypedAdditive
from mpnn.models.layers.stack import Stack
from mpnn.update import Activate, Replace


class RGAT(Stack):
    """Relational graph attention network (Busbridge et al. 2019, arXiv:1904.05811).

        h_i <- relu( || _h sum_j w_ij W_r h_j + b ),   r the type of the edge; last layer: one head, without relu

    Args:
        in_dim, classes: widths of the input features and of the logits.
        relations: number of edge types.
        hidden: width of each head. heads: number of heads. layers: number of layers.
        within: one softmax for each edge type (WIRGAT), instead of one over all in-neighbors (ARGAT).
        dropout: of the input of each layer, in training.
        graph: topology or graph of every layer; None if each call passes one.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        relations: int,
        hidden: int = 8,
        heads: int = 4,
        layers: int = 2,
        *,
        within: bool = False,
        dropout: float = 0.0,
        graph: Topology | Graph | None = None,
    ) -> None:
        rounds = []
        for k in range(layers):
            last, width = k == layers - 1, in_dim if k == 0 else heads * hidden
            out, count = (classes, 1) if last else (hidden, heads)
            attention = TypedAdditive(width, out, relations, count, within=within)
            rounds.append(MessagePassing(graph, "sum", Replace() if last else Activate(F.relu), attention))
        super().__init__(rounds, dropout)
