"""Cross-attention between two batches of sentences: target b attends to source b only.

The graph is a rectangular complete graph for each pair of sentences, without edges between pairs. As in
`models.layers.packing`, sentences of different lengths are concatenated, and padding is not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mpnn import Graph, MessagePassing, Topology, engine
from mpnn.decoding.cache import KVCache
from mpnn.graph.arguments import MAX_VALUE
from mpnn.graph.bind_cache import cached_graph
from mpnn.graphs import batch, complete
from mpnn.models.layers.images import ImageOutput
from mpnn.models.layers.packing import Packing, weight_matrices

COMPLETE = complete()


@dataclass(frozen=True, eq=False)
class StackOutput:
    """Output of the encoder or of the decoder for a batch of sentences.

    packed: output of the last layer, in the layout of `packing`. weights, cross_weights: self-attention and
    cross-attention weights of each layer, [B, H, N, N] each. These are zero at padding, and empty unless requested.
    cache: keys and values of this output for cached decoding.
    """

    packed: Tensor
    packing: Packing
    weights: tuple[Tensor, ...] = ()
    cross_weights: tuple[Tensor, ...] = ()
    cache: KVCache = field(default_factory=lambda: KVCache(MAX_VALUE))

    @staticmethod
    def of(memory: "StackOutput | ImageOutput | Tensor") -> "StackOutput":
        """The output of an encoder of images, or vectors [B, N, dim], as that of an encoder of sentences without
        padding. A StackOutput is returned as it is.

        Raises:
            TypeError: if `memory` is neither.
        """
        if isinstance(memory, StackOutput):
            return memory
        vectors = memory.last if isinstance(memory, ImageOutput) else memory
        if not isinstance(vectors, Tensor) or vectors.dim() != 3:
            got = list(vectors.shape) if isinstance(vectors, Tensor) else type(memory).__name__
            raise TypeError(f"memory must be the output of an encoder, or vectors [batch, length, dim]; got {got}")
        return StackOutput(vectors, Packing.of_tokens(vectors))

    @property
    def last(self) -> Tensor:
        """The output of the last layer, [B, N, dim]; zeros at padding."""
        return self.packing.unpack(self.packed)

    def select(self, index: Tensor) -> "StackOutput":
        """Returns the sentences `index`, int64 [B'], which may repeat. The cache is reordered in place."""
        separate = self.packed.dim() == 2
        packing = Packing.of(self.packing.token_mask[index], separate=separate)
        if separate:
            first = torch.tensor([0, *self.packing.lengths]).cumsum(0).tolist()
            tokens = [torch.arange(first[b], first[b + 1]) for b in index.tolist()]
            index = torch.cat(tokens).to(index.device)
        self.cache.select_first(index)  # of packed sentences, tokens
        return StackOutput(self.packed[index], packing, cache=self.cache)


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """Sentence b of `target` attends to all of sentence b of `source`. Both have the same number of sentences."""

    target: Packing
    source: Packing

    def attend(
        self,
        layer: MessagePassing,
        x: Tensor,
        source: Tensor,
        return_weights: bool = False,
        cache: KVCache | None = None,
    ) -> Any:
        """Runs a layer from packed sources to packed targets x.

        If all sources have the same length, and all targets too (packed features [B, n, ...]), all pairs share a graph.

        Returns:
            Packed features in the shape of x. With `return_weights`, also attention weights [B, H, M, N].
        """
        same_length = x.dim() == source.dim() == 3
        if not same_length:
            x, source, shape = x.flatten(0, -2), source.flatten(0, -2), x.shape[:-1]
        graph = self._graph(same_length, x.device)
        output: Any = layer(x, graph, source=source, return_weights=return_weights, cache=cache)
        y = output[0] if return_weights else output
        y = y if same_length else y.unflatten(0, shape)
        return (y, weight_matrices(output[1], graph, self.target, self.source)) if return_weights else y

    def _graph(self, same_length: bool, device: torch.device) -> Topology | Graph:
        targets, sources = self.target.documents, self.source.documents
        if targets is not None or sources is not None:
            if len(targets or ()) != len(sources or ()):
                raise ValueError(
                    "document k of the targets attends to document k of the sources, so there must be as many of both; "
                    f"got {len(targets or ())} and {len(sources or ())}"
                )
            return engine.build_once(_union_on_device, targets, sources, device)
        if not same_length:
            return _union_on_device(self.target.lengths, self.source.lengths, device)
        if torch.compiler.is_compiling():
            return COMPLETE
        return COMPLETE.bind(*(max(packing.lengths, default=0) for packing in (self.target, self.source))).to(device)


def _union_on_device(targets: tuple[int, ...], sources: tuple[int, ...], device: torch.device) -> Graph:
    return _union(targets, sources).to(device)


@cached_graph
def _union(targets: Sequence[int], sources: Sequence[int]) -> Graph:
    """Returns the graph of all pairs. It is cached, because all layers of a model use the same one."""
    return batch([COMPLETE.bind(n, m) for n, m in zip(targets, sources, strict=True)])
