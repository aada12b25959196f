"""How large the inputs are: as published figures have them, larger still, or small enough to try everything out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Args:
    heads, width: of attention over sequences. nodes: of its sparse cases. dense: lengths of complete and causal graphs.
    lengths: of the series over N. unit: up to this length of that series torch's masked attention is run too.
    graph: nodes and edges of the irregular graph. edges: of the series over edges. shapes: heads and widths.
    images: the heads, side and shift of images that are cut into windows.
    layers: of the transformer. million: nodes of the graph that is only bound. linear: lengths for linear attention.
    """

    heads: int
    width: int
    nodes: int
    dense: tuple[int, ...]
    lengths: tuple[int, ...]
    unit: int
    radii: tuple[int, ...]
    graph: tuple[int, int]
    edges: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    context: int
    layers: int
    million: int
    images: tuple[tuple[int, int, int], ...]
    linear: tuple[int, ...]


SHAPES = ((1, 128), (2, 64), (4, 32), (8, 16), (16, 8))
IMAGES = ((3, 56, 0), (3, 56, 3), (12, 14, 0))  # of Swin-T's first and third stage

DEFAULT = Sizes(
    heads=12,
    width=64,
    nodes=4096,
    dense=(64, 128, 256, 512, 1024, 2048, 4096),
    lengths=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    unit=4096,
    radii=(16, 64, 256, 1024),
    graph=(169_343, 2_332_486),  # those of ogbn-arxiv made undirected
    edges=(10_000, 100_000, 1_000_000),
    shapes=SHAPES,
    context=1024,
    layers=2,
    million=1_000_000,
    images=IMAGES,
    linear=(4096, 16384, 65536),
)
FULL = Sizes(
    heads=12,
    width=64,
    nodes=4096,
    dense=(*DEFAULT.dense, 8192),
    lengths=DEFAULT.lengths,
    unit=8192,
    radii=(4, *DEFAULT.radii, 2048),
    graph=DEFAULT.graph,
    edges=(*DEFAULT.edges, 10_000_000, 50_000_000),
    shapes=SHAPES,
    context=1024,
    layers=12,
    million=1_000_000,
    images=IMAGES,
    linear=DEFAULT.linear,
)
SMALL = Sizes(
    heads=2,
    width=16,
    nodes=1024,  # Hugging Face's BigBird needs more than 11 blocks of 64
    dense=(64, 256),
    lengths=(512, 1024),
    unit=512,
    radii=(16, 64),
    graph=(2_000, 20_000),
    edges=(1_000, 10_000),
    shapes=((1, 32), (4, 8)),
    context=64,
    layers=1,
    million=10_000,
    images=((2, 14, 3),),
    linear=(256, 1024),
)
