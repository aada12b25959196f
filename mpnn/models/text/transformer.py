"""The encoder-decoder Transformer (Vaswani et al. 2017).

topology   encoder: complete()                  decoder: causal(), then complete() from the source to the target
attention  DotProduct(dim, heads)               w_ij = softmax_j( <W_Q x_i, W_K x_j> / sqrt(D) )                (eq. 1)
aggregate  "sum"                                m_i  = W_O || _h sum_j w_ij W_V x_j                    (section 3.2.2)
update     PostNorm(dim, FeedForward(dim))      z    = norm(x + m),  y = norm'(z + ffn(z))        (section 3.1, eq. 2)
           PostNorm(dim) within the target      y    = norm(x + m)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from mpnn import MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.decoding.generation import check_causal
from mpnn.graphs import causal, complete
from mpnn.models.layers.blocks import ACTIVATIONS
from mpnn.models.layers.encoder_decoder import DecoderLayer, EncoderDecoder
from mpnn.models.layers.word_embeddings import WordEmbeddings, token_table
from mpnn.update import FeedForward, PostNorm, PreNorm

CAUSAL, COMPLETE = causal(), complete()


@dataclass(frozen=True)
class TransformerConfig:
    """Configuration of a Transformer. The defaults are those of the base model (table 3 of the paper).

    vocabulary: number of tokens. target_vocabulary: number of tokens of the target language, with an embedding table of
    its own; None: both languages share one table. pad: the token whose embedding is not trained, or None. start, eos:
    first and last token of a target. dim, hidden: widths of the model and of its feed-forward networks. context:
    maximum sentence length. learned_positions: use a table of positions instead of sinusoids. scale: multiply token
    embeddings by sqrt(dim) (section 3.4). embedding_norm: apply LayerNorm to embeddings (BART). pre_norm: use PreNorm
    instead of PostNorm. final_norm: apply LayerNorm after the last layer of the encoder and of the decoder. activation:
    a name in `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm. smoothing: label smoothing (section 5.4).
    """

    vocabulary: int = 37000
    target_vocabulary: int | None = None
    pad: int | None = 0
    start: int = 1
    eos: int = 2
    dim: int = 512
    heads: int = 8
    hidden: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    context: int = 1024
    learned_positions: bool = False
    scale: bool = True
    embedding_norm: bool = False
    pre_norm: bool = False
    final_norm: bool = False
    activation: str = "relu"
    eps: float = 1e-5
    dropout: float = 0.1
    attention_dropout: float = 0.0
    smoothing: float = 0.1


class Transformer(EncoderDecoder):
    """An encoder over `graph` and a decoder over `target_graph`. Each target word also attends to the whole source.

    Args:
        config: sizes and options.
        graph: topology of the encoder's self-attention.
        target_graph: topology of the decoder's self-attention.

    Raises:
        ValueError: if a word attends to a later one when `target_graph` is bound to `config.context` words.
    """

    def __init__(
        self, config: TransformerConfig, graph: Topology | None = None, target_graph: Topology | None = None
    ) -> None:
        super().__init__()
        graph = COMPLETE if graph is None else graph
        target_graph = CAUSAL if target_graph is None else target_graph
        check_causal(target_graph, config.context)
        norm = partial(nn.LayerNorm, eps=config.eps)

        def attend(topology: Topology, *, ffn: bool) -> MessagePassing:
            network = None
            if ffn:
                activation = ACTIVATIONS[config.activation]
                network = FeedForward(config.dim, config.hidden, activation)
            layer = PreNorm if config.pre_norm else PostNorm
            update = layer(config.dim, network, dropout=config.dropout, norm=norm)
            attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
            return MessagePassing(topology, "sum", update, attention)

        def words(token: nn.Embedding) -> WordEmbeddings:
            return WordEmbeddings(
                token,
                config.context,
                learned=config.learned_positions,
                scale=config.scale,
                norm=norm if config.embedding_norm else None,
                dropout=config.dropout,
            )

        self.config = config
        token = target_token = token_table(config.vocabulary, config.dim, config.pad)
        if config.target_vocabulary is not None:
            target_token = token_table(config.target_vocabulary, config.dim, config.pad)
        self.source, self.target = words(token), words(target_token)
        self.encoder = nn.ModuleList(attend(graph, ffn=True) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(
            DecoderLayer(attend(target_graph, ffn=False), attend(COMPLETE, ffn=True))
            for _ in range(config.decoder_layers)
        )
        self.encoder_norm, self.decoder_norm = (
            norm(config.dim) if config.final_norm else nn.Identity() for _ in range(2)
        )
