"""BigBird (Zaheer et al. 2020): BERT with window, random and global attention, in blocks of tokens.

topology   bigbird(block, window, random, globals, seed)     or any other; each layer draws its own random blocks
Attention, aggregate and update are those of BERT.
"""

from collections.abc import Sequence

from mpnn import Topology
from mpnn.graphs import bigbird
from mpnn.models.text.bert import Bert, BertConfig


class BigBird(Bert):
    """A BERT over `bigbird` graphs.

    Args:
        config, pooler: as for `Bert`.
        graph: topology of the attention: one for all layers, or one per layer. Replaces the graphs that the arguments
            below describe.
        block: number of nodes in a block.
        window, random, globals: number of blocks of each kind that a token attends to.
        seed: seed of the random blocks of the first layer. Layer k uses `seed + k`.
    """

    def __init__(
        self,
        config: BertConfig,
        graph: Topology | Sequence[Topology] | None = None,
        *,
        block: int = 64,
        window: int = 3,
        random: int = 3,
        globals: int = 2,
        seed: int = 0,
        pooler: bool = True,
    ) -> None:
        if graph is None:
            graph = [bigbird(block, window, random, globals, seed + layer) for layer in range(config.layers)]
        super().__init__(config, graph, pooler=pooler)
