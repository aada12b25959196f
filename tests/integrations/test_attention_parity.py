"""The same weights in mpnn and in PyTorch Geometric or transformers give the same numbers."""

import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.attention import Additive, AdditiveV2, Attention, Degree
from mpnn.graph import Graph
from mpnn.position import T5

N, DIM, OUT, HEADS, EDGE = 9, 5, 6, 2, 3
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def pyg() -> object:
    return pytest.importorskip("torch_geometric.nn")


def citations(attr: bool = False, classes: bool = False) -> Graph:
    """Random edges, some repeated, some nodes without in-neighbors."""
    edges = torch.randint(0, N - 2, (2, 20))
    return graphs.from_edges(
        edges,
        N,
        edge_attr=torch.randn(20, EDGE) if attr else None,
        edge_type=torch.randint(0, 4, (20,)) if classes else None,
    )


def rough(module: nn.Module) -> nn.Module:
    """The module with no parameter left at zero."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def copied(attention: Attention, **weights: Tensor | None) -> Attention:
    """The spec with these weights in it, named `module__parameter`; None: it has no such weight."""
    own = dict(attention.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if weight is not None:
                own.pop(name.replace("__", ".")).copy_(weight)
    assert not own, f"not copied: {list(own)}"
    return attention


def run(attention: Attention, graph: Graph, x: Tensor, aggregate: str = "sum") -> Tensor:
    return MessagePassing(graph, aggregate, None, attention)(x)


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("edge_dim", [None, EDGE])
def test_additive_is_gatconv(pyg: object, edge_dim: int | None, concat: bool) -> None:
    theirs = rough(pyg.GATConv(DIM, OUT, HEADS, concat=concat, edge_dim=edge_dim, add_self_loops=False))
    ours = copied(
        Additive(DIM, OUT, HEADS, concat=concat, edge_dim=edge_dim),
        bias=theirs.bias,
        to_value__weight=theirs.lin.weight,
        by_src=theirs.att_src[0],
        by_dst=theirs.att_dst[0],
        to_edge__weight=None if edge_dim is None else theirs.lin_edge.weight,
        by_edge=None if edge_dim is None else theirs.att_edge[0],
    )
    graph, x = citations(attr=edge_dim is not None), torch.randn(N, DIM)
    torch.testing.assert_close(run(ours, graph, x), theirs(x, graph.edge_index, graph.edge_attr), **CLOSE)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("edge_dim", [None, EDGE])
def test_additive_v2_is_gatv2conv(pyg: object, edge_dim: int | None, share: bool) -> None:
    theirs = rough(pyg.GATv2Conv(DIM, OUT, HEADS, edge_dim=edge_dim, share_weights=share, add_self_loops=False))
    ours = copied(
        AdditiveV2(DIM, OUT, HEADS, edge_dim=edge_dim, share=share),
        bias=theirs.bias,
        to_value__weight=theirs.lin_l.weight,
        to_value__bias=theirs.lin_l.bias,
        to_query__weight=None if share else theirs.lin_r.weight,
        to_query__bias=None if share else theirs.lin_r.bias,
        to_edge__weight=None if edge_dim is None else theirs.lin_edge.weight,
        vector=theirs.att[0],
    )
    graph, x = citations(attr=edge_dim is not None), torch.randn(N, DIM)
    torch.testing.assert_close(run(ours, graph, x), theirs(x, graph.edge_index, graph.edge_attr), **CLOSE)


@pytest.mark.parametrize("weighted", [True, False])
def test_degree_is_gcnconv(pyg: object, weighted: bool) -> None:
    theirs = rough(pyg.GCNConv(DIM, OUT))
    ours = copied(Degree(DIM, OUT), to_value__weight=theirs.lin.weight, bias=theirs.bias)
    edges = torch.tensor([[0, 1, 2, 2, 5, 3], [1, 0, 3, 2, 1, 0]])  # 2 has a self-loop already
    weight = torch.rand(6) if weighted else None
    graph = graphs.from_edges(edges, N, edge_attr=weight).with_self_loops(fill=1.0)
    x = torch.randn(N, DIM)
    torch.testing.assert_close(run(ours, graph, x), theirs(x, edges, weight), **CLOSE)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 20), (64, 1000)])
def test_t5_buckets_are_those_of_t5(buckets: int, furthest: int, bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offset = torch.arange(-2000, 2001)
    theirs = t5.T5Attention._relative_position_bucket(offset, bidirectional, buckets, furthest)
    assert T5(1, buckets, furthest, bidirectional).bucket(offset).equal(theirs)
