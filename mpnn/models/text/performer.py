"""Performer (Choromanski et al. 2021): transformers with kernel attention, whose cost is linear in the number of nodes.

topology   complete() or causal()
attention  Kernel(dim, heads, features=r)              w_ij ~ <phi(W_Q x_i), phi(W_K x_j)>, an estimate of softmax
Aggregate, update and the rest of the model are those of BERT or GPT-2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mpnn import MessagePassing, Topology
from mpnn.attention import Kernel
from mpnn.models.text import bert, gpt


@dataclass(frozen=True)
class PerformerConfig(gpt.GPTConfig):
    """Configuration of a causal Performer: that of GPT-2, and `features`, the number of random features per head."""

    features: int = 256


class Performer(gpt.CausalTransformer):
    """Decoder-only language model (Choromanski et al. 2021): GPT-2 with `Kernel` attention, which costs O(N features)
    instead of O(N^2). `attention_dropout` is ignored, because attention weights are never computed."""

    def __init__(self, config: PerformerConfig, graph: Topology | Sequence[Topology] = gpt.CAUSAL) -> None:
        super().__init__(config, graph)

    @staticmethod
    def layer(config: gpt.GPTConfig, graph: Topology) -> MessagePassing:
        assert isinstance(config, PerformerConfig)
        attention = Kernel(config.dim, config.heads, features=config.features)
        return MessagePassing(graph, "sum", gpt.update(config), attention)


@dataclass(frozen=True)
class PerformerEncoderConfig(bert.BertConfig):
    """Configuration of a Performer encoder: that of BERT, and `features`, the number of random features per head."""

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
