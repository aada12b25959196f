"""Performer: transformers whose attention is a product of features, at a cost that is linear in the nodes.

topology   complete() or causal()
attention  Kernel(dim, heads, features=r)              w_ij ~ <phi(W_Q x_i), phi(W_K x_j)>, softmax's on average
aggregate, update and the model around them are BERT's or GPT-2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpnn.attention import Kernel
from mpnn.message_passing import MessagePassing
from mpnn.models import bert, gpt
from mpnn.topology import Topology


@dataclass(frozen=True)
class PerformerConfig(gpt.GPTConfig):
    """Sizes of a Performer that predicts the next token: GPT-2's, and `features`, how many random ones a head has."""

    features: int = 256


class Performer(gpt.GPT2):
    """A language model over the causal graph (Choromanski et al. 2021): GPT-2 with `Kernel` attention, which costs
    O(N features) in place of O(N^2). `attention_dropout` does not take part: there are no weights to drop."""

    def __init__(self, config: PerformerConfig, graph: Topology | Sequence[Topology] = gpt.CAUSAL) -> None:
        super().__init__(config, graph)

    @staticmethod
    def layer(config: gpt.GPTConfig, graph: Topology) -> MessagePassing:
        assert isinstance(config, PerformerConfig)
        attention = Kernel(config.dim, config.heads, features=config.features)
        return MessagePassing(graph, "sum", gpt.update(config), attention)


@dataclass(frozen=True)
class PerformerEncoderConfig(bert.BertConfig):
    """Sizes of a Performer that reads both ways: BERT's, and `features`, how many random ones a head has."""

    features: int = 256


class PerformerEncoder(bert.Bert):
    """BERT with `Kernel` attention, over a complete or any other graph."""

    def __init__(
        self,
        config: PerformerEncoderConfig,
        graph: Topology | Sequence[Topology] | None = None,
        *,
        pooler: bool = True,
    ) -> None:
        super().__init__(config, graph, pooler=pooler)

    @staticmethod
    def layer(config: bert.BertConfig, graph: Topology) -> MessagePassing:
        assert isinstance(config, PerformerEncoderConfig)
        attention = Kernel(config.dim, config.heads, features=config.features)
        return MessagePassing(graph, "sum", bert.update(config), attention)
