"""Sampled batches of links: the neighbors of their ends, without the links that are asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn import Graph
from mpnn.data.neighbors import NeighborBatch, Whole, checked_fanouts, in_advance, sampled_batch, visit_order
from mpnn.graph.arguments import as_integer, at_least, one_set
from mpnn.graph.data import renumbered
from mpnn.graphs import HeteroGraph, HeteroSample, TemporalGraph, batch as union, sample
from mpnn.graphs.compressed import CompressedGraph, check_times, gather, search_rows
from mpnn.graphs.kinds import EdgeKind

Features = Mapping[str, Tensor | NDArray[Any]]
_ATTEMPTS = 100


@dataclass(frozen=True)
class LinkBatch:
    """Links, pairs without a link, and the sampled neighbors of their ends.

    Args:
        pairs: int64 [2, P], the links, then the absent pairs, as indices among the nodes of the sample: for a graph of
            one set `sample.nodes`, for a relation `sample.nodes[kind]` of each end.
        is_link: bool [P].
        links: int64 [n], which links of the epoch these are.
        types: int64 [P], of links with types; an absent pair has that of the link it stands for. Else None.
        sample: what an encoder needs of the graph: a `NeighborBatch` of one set of nodes, a `HeteroSample` of several.
        x: {kind: [n, ...]} the features of a sample of several kinds; of one set they are `sample.x`.
    """

    pairs: Tensor
    is_link: Tensor
    links: Tensor
    types: Tensor | None
    sample: NeighborBatch | HeteroSample
    x: dict[str, Tensor]


def link_batches(
    graph: Graph | TemporalGraph | HeteroGraph,
    links: Tensor,
    fanouts: Sequence[int],
    features: Tensor | NDArray[Any] | Features | None = None,
    *,
    batch_size: int,
    relation: EdgeKind | None = None,
    types: Tensor | None = None,
    times: Tensor | None = None,
    negatives: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    prefetch: int = 2,
) -> Iterator[LinkBatch]:
    """Yields one epoch over links in batches, each with `negatives` absent pairs for a link, and the sampled
    in-neighbors of all ends. Pass another `seed` in each epoch.

    ::

        for batch in link_batches(graph, links.train, [10, 10], x, batch_size=512, seed=epoch):
            z = encode(batch.sample)
            scores = decoder(z[batch.pairs[0]], z[batch.pairs[1]])
            loss = binary_cross_entropy_with_logits(scores, batch.is_link.float())

    No message passes along a link of the batch, in either direction or in any relation between the same two kinds, and
    degrees do not count it: else a model would learn to look its answer up. With times, messages are those before the
    time of each link. An absent pair has the source of its link, and a destination drawn from those that `graph` does
    not link it to.

    Args:
        graph: of one set of nodes; a `TemporalGraph` with `times`; or of several kinds with `relation`.
        links: int64 [2, L], sources in the first row.
        fanouts: the number of in-neighbors that the first, second, ... layer receives from, -1 for all; of several
            kinds, along each relation.
        features: as of `neighbor_batches`; of several kinds as of `hetero_batches`.
        batch_size: the number of links of a batch; the last may have fewer.
        relation: the relation of the links, of a graph of several kinds.
        types: int64 [L], the types of the links.
        times: [L], the time of each link, for a `TemporalGraph`, or for the times of nodes of a `HeteroGraph`.
        negatives: absent pairs for each link.
        seed: of the order of the links, the absent pairs and the samples.
        shuffle: whether to visit the links in an order drawn from the seed.
        prefetch: the number of batches that a thread prepares in advance.

    Raises:
        ValueError: an argument does not fit, or a node is linked to all others; before the first batch.
    """
    seed = as_integer("seed", seed)
    batch_size, prefetch = at_least("batch_size", batch_size, 1), at_least("prefetch", prefetch, 0)
    negatives = at_least("negatives", negatives, 0)
    fanouts = checked_fanouts(fanouts)
    sampler = _sampler(graph, relation, fanouts, features)
    links = links.cpu()
    _check_links(links, sampler.links)
    if types is not None and types.shape != links[0].shape:
        raise ValueError(f"types must be [{links.shape[1]}], one for each link; got {list(types.shape)}")
    if isinstance(graph, TemporalGraph) != (times is not None) and not isinstance(graph, HeteroGraph):
        raise ValueError(f"times= and a graphs.TemporalGraph need each other; got {graph} and times={times}")
    if times is not None:
        check_times("times", times, links.shape[1])
    order = visit_order(links.shape[1], shuffle, seed)

    def batch(number: int, part: Tensor) -> LinkBatch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        chosen = links[:, part]
        absent = _absent(sampler.links, chosen.repeat(1, negatives), generator, sampler.is_one_set)
        pairs = torch.cat([chosen, absent], 1)
        moments = None if times is None else times.cpu()[part].repeat(1 + negatives)
        sampled, index, x = sampler.around(pairs, chosen, moments, seed)
        is_link = torch.arange(pairs.shape[1]) < len(part)
        of_type = None if types is None else types.cpu()[part].repeat(1 + negatives)
        return LinkBatch(index, is_link, part, of_type, sampled, x)

    parts = order.split(batch_size) if len(order) else ()
    batches = (batch(number, part) for number, part in enumerate(parts))
    return in_advance(batches, prefetch)


Around = tuple[NeighborBatch | HeteroSample, Tensor, dict[str, Tensor]]
"""A sample, the indices [2, P] of the ends of pairs in it, and features of several kinds."""


class LinkNeighbors:
    """Samples around the ends of links in a graph of one set of nodes, without the links that are asked for.

    Args:
        graph: of one set of nodes.
        fanouts, features: as of `link_batches`.

    Raises:
        ValueError: an argument does not fit.
    """

    is_one_set = True

    def __init__(
        self, graph: Graph | TemporalGraph, fanouts: Sequence[int], features: Tensor | NDArray[Any] | None
    ) -> None:
        one_set("link_batches of links of one set", graph)
        self.links = graph.whole if isinstance(graph, TemporalGraph) else graph.to("cpu")
        if features is not None and len(features) != graph.num_dst:
            raise ValueError(f"features must have a row for each of the {graph.num_dst} nodes; got {len(features)}")
        self.whole = Whole.of(graph)
        self.fanouts = fanouts
        self.features = features

    def around(self, pairs: Tensor, asked: Tensor, times: Tensor | None, seed: int) -> Around:
        if times is not None:
            nodes = pairs.flatten()
            sampled = sampled_batch(self.whole, nodes, self.fanouts, self.features, seed, times.repeat(2))
            return sampled, torch.arange(len(nodes)).view(2, -1), {}
        nodes, index = pairs.flatten().unique(return_inverse=True)
        return self.sample(nodes, asked, seed), index.view(2, -1), {}

    def sample(self, nodes: Tensor, asked: Tensor, seed: int) -> NeighborBatch:
        """Returns the sampled in-neighbors of distinct nodes [n]. No edge and no degree counts the links `asked`, int64
        [2, L], in either direction."""
        sampled = sampled_batch(self.whole, nodes, self.fanouts, self.features, seed)
        graphs = [self._without(one, sampled.sources[: one.num_src], asked) for one in sampled.graphs]
        return replace(sampled, graphs=tuple(graphs))

    def _without(self, block: Graph, nodes: Tensor, asked: Tensor) -> Graph:
        """A sampled graph without these links, in either direction, in its edges and its degrees."""
        size = self.links.num_dst
        both = torch.cat([asked, asked.flip(0)], 1)
        keys = (both[1] * size + both[0]).unique()
        src, dst = block.stored_edges.long()
        keep = ~torch.isin(nodes[dst] * size + nodes[src], keys)
        data = {name: None if values is None else values[keep] for name, values in block.edge_data.items()}
        kept = renumbered(block, block.stored_edges[:, keep], name=block.name, **data)
        if block.degrees is not None:
            lost = self._lost(keys // size, keys % size).to(block.degrees[1].dtype)
            kept.degrees = (block.degrees[0] - lost[nodes[: block.num_dst]], block.degrees[1] - lost[nodes])
        return kept

    def _lost(self, dst: Tensor, src: Tensor) -> Tensor:
        """Returns how much the edges from `src` to `dst` add to the degree of each node [N]."""
        rows = self.whole.rows
        assert isinstance(rows, CompressedGraph)
        offsets, columns, sums = rows.offsets, rows.columns, rows.sums
        lost = torch.zeros(self.links.num_dst, dtype=torch.float64)
        first, stop = offsets[dst.numpy()], offsets[dst.numpy() + 1]
        low = search_rows(columns.__getitem__, first, stop, src.numpy())
        high = search_rows(columns.__getitem__, first, stop, src.numpy(), "right")
        weight = torch.from_numpy(high - low).double() if sums is None else sums[high] - sums[low]
        return lost.index_add_(0, dst, weight.double())


class _Relation:
    """Samples around the ends of pairs of a relation: one around the sources, one around the destinations, as one
    graph."""

    def __init__(
        self, graph: HeteroGraph, relation: EdgeKind, fanouts: Sequence[int], features: Features | None
    ) -> None:
        if relation not in graph:
            raise ValueError(f"there is no relation {relation!r}; the graph has {', '.join(map(str, graph))}")
        self.graph = graph
        self.relation = relation
        self.links = graph[relation].to("cpu")
        self.is_one_set = relation[0] == relation[2]
        self.fanouts = fanouts
        self.features = features

    def around(self, pairs: Tensor, asked: Tensor, times: Tensor | None, seed: int) -> Around:
        kinds = self.relation[0], self.relation[2]
        parts: list[HeteroSample] = []
        index = []
        for end, kind in enumerate(kinds):
            nodes, moments, place = _distinct(pairs[end], times)
            parts.append(sample(self.graph, (kind, nodes), self.fanouts, time=moments, seed=seed))
            index.append(place)
        index[1] += len(parts[0].nodes[kinds[1]])
        kept = [self._without(part, asked) for part in parts]
        both = union([part.graph for part in kept])
        edge_ids = {relation: torch.cat([part.edge_ids[relation] for part in kept]) for relation in both}
        nodes_of = {kind: torch.cat([part.nodes[kind] for part in parts]) for kind in both.num_nodes}
        times_of = {kind: torch.cat([part.times[kind] for part in parts]) for kind in parts[0].times}
        x = {kind: gather(rows, nodes_of[kind]) for kind, rows in (self.features or {}).items()}
        return HeteroSample(both, nodes_of, times_of, edge_ids), torch.stack(index), x

    def _without(self, part: HeteroSample, asked: Tensor) -> HeteroSample:
        """A sample without these links in any relation between their kinds, in either direction."""
        relations = {}
        edge_ids = {}
        for (src_kind, name, dst_kind), edges in part.graph.items():
            src, dst = edges.edge_index
            src, dst = part.nodes[src_kind][src], part.nodes[dst_kind][dst]
            keep = torch.ones(len(src), dtype=torch.bool)
            for ends, kinds in ((asked, self.relation[::2]), (asked.flip(0), self.relation[::-2])):
                if (src_kind, dst_kind) == kinds:
                    size = int(self.graph.num_nodes[src_kind])
                    keep &= ~torch.isin(dst * size + src, ends[1] * size + ends[0])
            data = {name: None if values is None else values[keep] for name, values in edges.edge_data.items()}
            relations[src_kind, name, dst_kind] = renumbered(edges, edges.stored_edges[:, keep], **data)
            edge_ids[src_kind, name, dst_kind] = part.edge_ids[src_kind, name, dst_kind][keep]
        return replace(part, graph=HeteroGraph(relations, part.graph.num_nodes, part.graph.times), edge_ids=edge_ids)


def _sampler(graph: Any, relation: EdgeKind | None, fanouts: Sequence[int], features: Any) -> LinkNeighbors | _Relation:
    if isinstance(graph, HeteroGraph):
        if relation is None:
            raise ValueError(f"name the relation of the links, one of {', '.join(map(str, graph))}")
        return _Relation(graph, relation, fanouts, features)
    if relation is not None:
        raise ValueError(f"relation= is for a HeteroGraph; got {graph}")
    if graph.num_dst != graph.num_src:
        raise ValueError(
            f"{graph} has two sets of nodes: pass a HeteroGraph with the links and their reverse, such as "
            '{("user", "buys", "item"): g, ("item", "bought by", "user"): g.reverse()}, and relation='
        )
    return LinkNeighbors(graph, fanouts, features)


def _check_links(links: Tensor, graph: Graph) -> None:
    if links.dim() != 2 or len(links) != 2 or links.is_floating_point():
        raise ValueError(
            f"links must be int64 [2, L], sources then destinations; got {links.dtype} {list(links.shape)}"
        )
    for end, size, what in ((links[0], graph.num_src, "source"), (links[1], graph.num_dst, "destination")):
        wrong = (end < 0) | (end >= size)
        if wrong.any():
            link = int(wrong.nonzero()[0])
            raise IndexError(f"link {link} has {what} {int(end[link])}, but there are {size} {what}s")


def _absent(graph: Graph, links: Tensor, generator: torch.Generator, is_one_set: bool) -> Tensor:
    """For each link a pair of its source and another destination that the graph does not link it to."""
    pairs = links.clone()
    missing = torch.arange(pairs.shape[1])
    for _ in range(_ATTEMPTS):
        if not len(missing):
            return pairs
        pairs[1, missing] = torch.randint(graph.num_dst, (len(missing),), generator=generator)
        src, dst = pairs[:, missing].numpy()
        is_linked = graph.runs.contains(dst, src)
        missing = missing[torch.from_numpy(is_linked | (is_one_set & (src == dst)))]
    node = int(pairs[0, missing[0]])
    raise ValueError(
        f"node {node} is linked to nearly all {graph.num_dst} destinations, so that no absent pair was found"
    )


def _distinct(nodes: Tensor, times: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The distinct nodes, or pairs of node and time, and the index of each of `nodes` among them."""
    if times is None:
        distinct, place = nodes.unique(return_inverse=True)
        return distinct, None, place
    moments, moment = times.unique(return_inverse=True)
    key, place = (nodes * len(moments) + moment).unique(return_inverse=True)
    return key // len(moments), moments[key % len(moments)], place
