"""The base class of decoder-only language models: embeddings, layers over causal graphs, and next-token logits."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpnn import Graph, Topology, engine
from mpnn.decoding.cache import KVCache
from mpnn.decoding.generation import check_causal, check_continuation, eval_mode, generate
from mpnn.graph.sharding import active, node_numbers
from mpnn.graphs.listed import most_nodes
from mpnn.models.layers.blocks import AnyGraph, Norm, embed, lookup, run_layers, topology_per_layer
from mpnn.models.layers.losses import ignore_document_ends, token_loss
from mpnn.models.layers.packing import Packing, document_lengths
from mpnn.models.saving import Model
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear, linear

Bind = Callable[[Topology], Topology | Graph]
"""Maps the topology of a layer to the topology or graph of one call, as `Packing.bind` does."""


@dataclass(frozen=True, eq=False)
class DecoderOutput:
    """Output of a decoder for tokens [..., N].

    last: output of the last layer after the final norm, [..., N, dim]. weights: attention weights of each layer,
    [..., E, H].
    """

    last: Tensor
    weights: tuple[Tensor, ...] | None


class Decoder(Model):
    """Base class of decoder-only language models. Subclasses create the modules below.

        h = W_token[tokens] (+ W_position[positions])
        h <- layer(h), for each layer one operator
        logits = norm(h) W_head^T, with W_head = W_token where `head` is None

    context: maximum sequence length.
    """

    context: int
    token: nn.Embedding
    position: nn.Embedding | None
    dropout: Dropout
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear | None

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        *,
        graph: Topology | Graph | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the logits of each next token.

        Args:
            tokens: integers [B, N], N <= context.
            cache: keys and values of the preceding tokens. `tokens` then holds the tokens that follow them.
            graph: replaces the graph of every layer in this call. A topology, or a graph of N nodes.
            lengths: lengths of the documents packed in every row, each at most `context`; they sum to N. Positions
                restart in each document, and no token attends to another document. If `graph` is also given, it applies
                to each document.

        Returns:
            float [B, N, vocabulary].

        Raises:
            TypeError: if `tokens` is floating point, `cache` is a graph, or `graph` is neither a topology nor a graph.
            ValueError: if `graph` has another number of nodes, if one of its nodes attends to a later one, if
                `lengths` do not sum to N, or if `cache` is combined with `graph` or `lengths`.
        """
        if tokens.is_floating_point():
            raise TypeError(f"tokens must be integers [B, N]; got {tokens.dtype} of shape {list(tokens.shape)}")
        if isinstance(cache, (Topology, Graph)):
            raise TypeError(f"the second argument is the cache; got {cache}: write model(tokens, graph=...)")
        if graph is not None:
            self._check_graph(graph, tokens.shape[-1], lengths)
        if cache is not None:
            check_continuation(graph, lengths)
        packing = None if lengths is None else self._documents(tokens, lengths)
        positions = None if packing is None else packing.position_ids()
        bind = None if graph is None and packing is None else self._bind(tokens, graph, packing)
        last = self.decode(tokens, positions, bind=bind, cache=cache).last
        return linear(last, self.token.weight) if self.head is None else self.head(last)

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        bind: Bind | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> DecoderOutput:
        """Runs the model without the head.

        Args:
            tokens: integers [..., N], or vectors [..., N, dim] that replace the token embeddings.
            positions: integers [..., N] or [N], for learned positions; default: 0 to N - 1, after those in the cache.
            bind: maps the topology of each layer to a graph.
            cache: keys and values of the preceding nodes.
            return_weights: also return the attention weights of every layer.
        """
        x = self._embed(tokens, positions, 0 if cache is None else cache.count)
        topologies: list[Any] = [layer.graph for layer in self.layers]
        graphs = topologies if bind is None else [bind(topology) for topology in topologies]
        x, weights = run_layers(self.layers, graphs, x, return_weights=return_weights, cache=cache)
        return DecoderOutput(self.norm(x), tuple(weights) if return_weights else None)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        graph: Topology | Graph | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats. targets: [B, N], -100 at positions to ignore.

        Other arguments are those of `forward`. With `lengths`, the last token of each document is ignored.
        """
        if lengths is not None:
            targets = ignore_document_ends(targets, document_lengths(lengths, tokens.shape[-1]))
        return token_loss(self(tokens, graph=graph, lengths=lengths), targets)

    @torch.no_grad()
    def generate(self, tokens: Tensor, steps: int, temperature: float = 1.0, **options: Any) -> Tensor:
        """Samples up to `steps` tokens after `tokens` [B, N]. Returns [B, at most N + steps].

        Options are those of `generation.generate`. Beyond `context` tokens, the oldest tokens are dropped.

        Raises:
            ValueError: if an option is out of range, or if `graph` or `lengths` is given: only `forward` takes them.
        """
        check_continuation(options.pop("graph", None), options.pop("lengths", None))
        with eval_mode(self):
            return generate(self, tokens, steps, temperature=temperature, context=self.context, **options)

    def _documents(self, tokens: Tensor, lengths: Sequence[int]) -> Packing:
        packing = Packing.of_tokens(tokens, lengths=lengths)
        longest = max(packing.documents or (0,))
        if longest > self.context:
            raise ValueError(f"got a document of {longest} tokens, but this model was made with context={self.context}")
        return packing

    def _check_graph(self, graph: Topology | Graph, count: int, lengths: Sequence[int] | None) -> None:
        """Raises TypeError or ValueError unless the graph of a call fits its `count` tokens."""
        if isinstance(graph, Topology):
            return
        if not isinstance(graph, Graph):
            raise TypeError(f"graph must be a Topology, such as causal() & window(16), or a Graph; got {graph!r}")
        # A process of several has a part of the tokens. Packed documents have a message of their own.
        if lengths is None and active() is None and not graph.num_dst == graph.num_src == count:
            own = ", ".join(dict.fromkeys(str(layer.graph) for layer in self.layers))
            raise ValueError(
                f"got {graph} for texts of {count} tokens, each of which is a node: pass a Graph of {count} nodes, or "
                f"a Topology, which fits each length. Without graph=, the model uses its own topology, {own}"
            )

    def _bind(self, tokens: Tensor, graph: Topology | Graph | None, packing: Packing | None) -> Bind:
        """Returns the map from the topology of a layer to its graph in one call."""
        if graph is not None:
            sizes = (tokens.shape[-1],) if packing is None else packing.documents or ()
            for size in sorted(set(sizes)):
                engine.build_once(check_causal, graph, operator.index(size))

        def bind(topology: Topology) -> Topology | Graph:
            selected = topology if graph is None else graph
            return selected if packing is None else packing.bind(selected)

        return bind

    def _embed(self, tokens: Tensor, positions: Tensor | None, start: int) -> Tensor:
        vectors = embed(self.token, tokens)
        if positions is None and active() is not None:
            positions = node_numbers(vectors.shape[-2], vectors.device)
        stop = start + vectors.shape[-2]
        if positions is None and stop > self.context:
            raise ValueError(f"got {stop} tokens, but this model was made with context={self.context}")
        if self.position is not None:
            if positions is None:
                vectors = vectors + self.position.weight[start:stop]
            else:
                vectors = vectors + lookup(self.position, positions, "position")
        return self.dropout(vectors)


class PlainDecoder(Decoder):
    """Base class of decoders that are made of their layers, without learned positions or dropout of embeddings.

    Args:
        config: sizes and options, of which it reads vocabulary, dim, context and tied.
        layers: the layers.
        norm: creates a norm.
    """

    def __init__(self, config: Any, layers: Iterable[nn.Module], norm: Norm) -> None:
        super().__init__()
        self.context = config.context
        self.token = nn.Embedding(config.vocabulary, config.dim)
        self.position = None
        self.dropout = Dropout(0.0)
        self.layers = nn.ModuleList(layers)
        self.norm = norm(config.dim)
        self.head = None if config.tied else Linear(config.dim, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)  # as GPT-2


def causal_topologies(graph: AnyGraph | Sequence[AnyGraph], layers: int, context: int) -> Sequence[Topology]:
    """Returns one topology per layer. Raises ValueError if a node attends to a later one, over `context` nodes or all
    nodes of a graph."""
    graphs = topology_per_layer(graph, layers, prefixes=True)
    for topology in set(graphs):
        most = most_nodes(topology)
        check_causal(topology, context if most is None else min(context, most))
    return graphs
