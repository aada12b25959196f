"""Links held out for link prediction."""

from __future__ import annotations

import pytest
import torch

from mpnn import graphs
from mpnn.data import split_links


def pairs(edges: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(edge) for edge in edges.T.tolist()}


def ring(size: int) -> torch.Tensor:
    i = torch.arange(size)
    return torch.stack([i, (i + 1) % size])


def test_no_held_out_link_is_in_the_training_graph_in_either_direction() -> None:
    edges = torch.cat([ring(40), ring(40).flip(0), torch.tensor([[3], [3]])], 1)  # and a self-loop
    split = split_links(graphs.from_edges(edges, edge_attr=torch.arange(81.0)), 0.1, 0.2)
    assert [part.shape[1] for part in (split.train, split.val, split.test)] == [28, 4, 8]
    every = pairs(split.train) | pairs(split.val) | pairs(split.test)
    assert every == {tuple(sorted(edge)) for edge in ring(40).T.tolist()}
    known = pairs(split.graph.edge_index)
    both = pairs(split.train) | pairs(split.train.flip(0)) | {(3, 3)}
    assert known == both
    for edge, attribute in zip(split.graph.edge_index.T.tolist(), split.graph.edge_attr.tolist(), strict=True):
        assert edges[:, int(attribute)].tolist() == edge
    absent = pairs(split.val_absent) | pairs(split.test_absent)
    assert not absent & pairs(edges)


def test_a_directed_graph_keeps_the_reverse_of_a_link() -> None:
    edges = torch.cat([ring(20), ring(20).flip(0)], 1)
    split = split_links(graphs.from_edges(edges), 0.1, 0.2, directed=True)
    assert split.train.shape[1] + split.val.shape[1] + split.test.shape[1] == 40
    assert pairs(split.graph.edge_index) == pairs(split.train) == pairs(edges) - pairs(split.val) - pairs(split.test)


def test_a_split_without_links_in_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"val=0.05 and test=0.1 leave a part of the 5 links empty"):
        split_links(graphs.from_edges(ring(5)))
    with pytest.raises(ValueError, match="split_links needs one set of nodes"):
        split_links(graphs.from_edges(ring(5), num_src=5, num_dst=6))
