"""BigBird (Zaheer et al. 2020): BERT, whose tokens hear their neighbours, a few at random, and a few that all hear.

topology   bigbird(block, window, random, globals, seed)     or any other; each layer draws blocks of its own
attention, aggregate and update are BERT's.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpnn.graphs import bigbird
from mpnn.models.bert import Bert, BertConfig
from mpnn.topology import Topology


class BigBird(Bert):
    """A BERT over `bigbird` graphs.

    Args:
        config, pooler: as BERT's. graph: takes the place of the graphs that the other arguments describe.
        block: nodes of a block. window, random, globals: how many blocks a token hears of each kind. seed: of the
            first layer's draw; each layer's is one more.
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
