"""GPT: a transformer over a causal graph that predicts the next token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import DotProduct
from mpnn.dropout import Dropout
from mpnn.graphs import causal
from mpnn.message_passing import MessagePassing
from mpnn.models.blocks import looked_up
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import FeedForward, PreNorm

CAUSAL = causal()


class GPT(Model):
    """A decoder-only language model (Radford et al. 2019, GPT-2) over any graph in which nobody hears the future.

        h = W_token[tokens] + W_position
        h <- layer(h), `layers` times: each one operator, MessagePassing(graph, "sum", PreNorm(FeedForward), DotProduct)
        logits = norm(h) W_token^T

    `GPT(..., graph=causal() & window(64))` is the same model with a sliding window, and with the same weights.

    Args:
        vocabulary: number of tokens. dim: width. heads: they divide `dim`. layers: their number.
        graph: who hears whom, for every length up to `context`.
        context: number of learned positions, the longest sequence.
        dropout: of embeddings, attention weights and what the layers add, in training.

    Raises:
        ValueError: over `context` nodes, a node of the graph hears a later one.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        layers: int,
        graph: Topology = CAUSAL,
        *,
        context: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _refuse_the_future(graph, context)
        self.context = context
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(context, dim)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            MessagePassing(
                graph, "sum", PreNorm(dim, FeedForward(dim), dropout=dropout), DotProduct(dim, heads, dropout=dropout)
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next token: tokens [B, N], integers, N <= context -> [B, N, vocabulary]."""
        h = self.dropout(self._embedded(tokens))
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h), self.token.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; targets [B, N], -100 where there is nothing to predict."""
        return F.cross_entropy(self(tokens).flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        steps: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens` [B, N] and `steps` more that the model draws, [B, N + steps]; beyond `context`, the oldest are
        forgotten.

        Args:
            temperature: logits are divided by it; 0 always takes the likeliest token.
            top_k: draw among so many of the likeliest only.
            generator: source of the draws.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(f"temperature must be at least 0 and top_k at least 1; got {temperature} and {top_k}")
        if tokens.shape[-1] == 0:
            raise ValueError("generation continues a text of at least one token; got none")
        was_training = self.training
        self.eval()
        for _ in range(steps):
            logits = self(tokens[..., -self.context :])[..., -1, :]
            tokens = torch.cat([tokens, _drawn(logits, temperature, top_k, generator)], -1)
        self.train(was_training)
        return tokens

    def _embedded(self, tokens: Tensor) -> Tensor:
        if tokens.is_floating_point():
            raise TypeError(f"tokens must be integers [B, N]; got {tokens.dtype} of shape {list(tokens.shape)}")
        if tokens.shape[-1] > self.context:
            raise ValueError(f"got {tokens.shape[-1]} tokens, but this model was made with context={self.context}")
        return looked_up(self.token, tokens, "token") + self.position.weight[: tokens.shape[-1]]

    def _initialize(self) -> None:
        """GPT-2's: small normal weights, smaller still where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                adds = name.endswith(("attention.to_out.weight", "update.ffn.3.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.layers)) ** 0.5 if adds else 0.02)


def _drawn(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits [B, vocabulary]: [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)


def _refuse_the_future(graph: Topology, length: int) -> None:
    runs = graph.bind(length, length).runs
    late = (runs.stop > runs.row + 1).nonzero()[0]
    if len(late):
        i, j = int(runs.row[late[0]]), int(runs.stop[late[0]]) - 1
        raise ValueError(
            f"a language model must not hear the tokens that it is to predict, but in {graph} node {i} hears "
            f"node {j}; use causal() & ({graph})"
        )
