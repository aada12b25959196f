"""Graphs to other libraries and back: the same edges and the same numbers on them."""

from typing import Any

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch

from mpnn import Graph, graphs
from mpnn.graph.relations import Offset

# Rectangular: three destinations, the second without in-neighbors, five sources, edges in no order.
EDGES = torch.tensor([[4, 0, 1, 4], [0, 2, 0, 2]])
ATTR = torch.tensor([1.5, 2.5, 3.5, 4.5])


@pytest.fixture
def graph() -> Graph:
    return graphs.from_edges(EDGES, num_src=5, num_dst=3, edge_attr=ATTR)


def numbered(graph: Graph) -> dict[tuple[int, int], Any]:
    """The attributes by edge (src, dst), where no edge is there twice."""
    attr = [None] * graph.num_edges if graph.edge_attr is None else graph.edge_attr.tolist()
    return dict(zip(map(tuple, graph.edge_index.T.tolist()), attr, strict=True))


def same(a: Graph, b: Graph) -> bool:
    return (a.num_dst, a.num_src) == (b.num_dst, b.num_src) and numbered(a) == numbered(b)


# ------------------------------------------------------------------------------------------------ scipy


def test_scipy_rows_are_destinations(graph: Graph) -> None:
    matrix = graphs.to_scipy(graph)
    assert matrix.toarray().tolist() == [[0, 3.5, 0, 0, 1.5], [0, 0, 0, 0, 0], [2.5, 0, 0, 0, 4.5]]
    for given in (matrix, matrix.tocsc(), matrix.tocoo(), matrix.tolil(), scipy.sparse.coo_matrix(matrix)):
        assert same(graphs.from_scipy(given), graph)


def test_scipy_keeps_zeros_that_are_stored_and_adds_repeats_up() -> None:
    graph = graphs.from_edges([[0, 1, 1], [1, 0, 0]], edge_attr=torch.tensor([0.0, 1.0, 2.0]))
    matrix = graphs.to_scipy(graph)
    assert matrix.nnz == 2
    assert same(graphs.from_scipy(matrix), graphs.from_edges([[1, 0], [0, 1]], edge_attr=torch.tensor([3.0, 0.0])))


def test_scipy_values_are_ones_where_edges_have_no_single_number() -> None:
    assert graphs.to_scipy(graphs.causal().bind(2)).toarray().tolist() == [[1, 0], [1, 1]]
    vectors = graphs.from_edges([[0], [1]], edge_attr=torch.ones(1, 3))
    assert graphs.to_scipy(vectors).toarray().tolist() == [[0, 0], [1, 0]]
    learned = graphs.from_edges([[0], [1]], edge_attr=torch.tensor([2.0], requires_grad=True))
    assert graphs.to_scipy(learned).toarray().tolist() == [[0, 0], [2, 0]]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, np.bool_])
def test_scipy_values_keep_their_type(dtype: type) -> None:
    given = scipy.sparse.random_array((7, 9), density=0.3, rng=0).astype(dtype)
    graph = graphs.from_scipy(given)
    assert graph.edge_attr.numpy().dtype == dtype
    assert (graphs.to_scipy(graph) != given).nnz == 0


def test_from_scipy_owns_its_numbers() -> None:
    matrix = scipy.sparse.coo_array(np.eye(3))
    graph = graphs.from_scipy(matrix)
    matrix.data[:] = 7
    assert graph.edge_attr.tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------ networkx


def test_networkx_edges_go_from_source_to_destination() -> None:
    graph = graphs.from_edges([[0, 2, 2], [1, 1, 1]], 4, edge_attr=ATTR[:3], edge_type=torch.tensor([0, 1, 1]))
    out = graphs.to_networkx(graph)
    assert list(out.nodes) == [0, 1, 2, 3]
    assert list(out.edges(data=True)) == [
        (0, 1, {"weight": 1.5, "edge_type": 0}),
        (2, 1, {"weight": 2.5, "edge_type": 1}),
        (2, 1, {"weight": 3.5, "edge_type": 1}),
    ]
    again = graphs.from_networkx(out, weight="weight")
    assert torch.equal(again.edge_index, graph.edge_index)
    assert torch.equal(again.edge_attr, ATTR[:3])
    assert again.num_dst == 4


def test_networkx_classes_come_from_rules_too() -> None:
    out = graphs.to_networkx(graphs.causal().with_relation(Offset(1)).bind(2))
    assert list(out.edges(data="edge_type")) == [(0, 0, 1), (0, 1, 0), (1, 1, 1)]


def test_networkx_undirected_edges_go_both_ways() -> None:
    karate = networkx.karate_club_graph()
    graph = graphs.from_networkx(karate, weight="weight")
    assert graph.num_edges == 2 * karate.number_of_edges()
    assert torch.equal(graph.dense(), graph.dense().T)
    assert torch.equal(graph.degree(), torch.tensor([karate.degree(node) for node in karate]))
    loop = graphs.from_networkx(networkx.Graph([(0, 0), (0, 1)]))
    assert loop.edge_index.T.tolist() == [[0, 0], [0, 1], [1, 0]]  # a self-loop is one edge


def test_networkx_nodes_of_any_name_are_numbered_in_order() -> None:
    graph = graphs.from_networkx(networkx.DiGraph([("b", "a"), ("b", ("c", 1))]))
    assert (graph.num_dst, graph.edge_index.tolist()) == (3, [[0, 0], [1, 2]])
    assert graph.edge_attr is None
    assert graphs.from_networkx(networkx.Graph()).num_dst == 0


def test_networkx_bipartite_graphs_have_two_kinds_of_nodes(graph: Graph) -> None:
    out = graphs.to_networkx(graph)
    assert out.number_of_nodes() == 8
    assert set(out.edges()) == {(("src", j), ("dst", i)) for j, i in EDGES.T.tolist()}


# ------------------------------------------------------------------------------------------------ PyTorch Geometric


def test_pyg_data_there_and_back() -> None:
    Data = pytest.importorskip("torch_geometric.data").Data
    attr, kind, x = torch.randn(3, 2), torch.tensor([1, 0, 1]), torch.randn(5, 4)
    data = Data(x=x, edge_index=torch.tensor([[0, 3, 3], [1, 2, 2]]), edge_attr=attr, edge_type=kind)
    graph = graphs.from_pyg(data)
    assert graph.num_dst == graph.num_src == 5
    assert torch.equal(graph.edge_index, data.edge_index)
    assert graph.dense()[1, 0]  # the same direction: 1 attends to 0
    assert not graph.dense()[0, 1]
    again = graphs.to_pyg(graph, x=x)
    assert again.num_nodes == 5
    for name in ("x", "edge_index", "edge_attr", "edge_type"):
        assert torch.equal(getattr(again, name), getattr(data, name))
    expected = data.clone()
    for name in ("edge_index", "edge_attr", "edge_type"):  # the data are a copy, which may be written to
        getattr(again, name).add_(10_000_000)
        assert torch.equal(getattr(graph, name), getattr(expected, name))
    bare = graphs.to_pyg(graphs.causal().bind(3))
    assert sorted(bare.keys()) == ["edge_index", "num_nodes"]
    assert graphs.from_pyg(bare).edge_attr is None


def test_edge_weights_of_pyg_data_are_attributes() -> None:
    Data = pytest.importorskip("torch_geometric.data").Data
    weight = torch.rand(3)
    data = Data(edge_index=torch.tensor([[0, 3, 3], [1, 2, 2]]), edge_weight=weight, num_nodes=5)
    assert torch.equal(graphs.from_pyg(data).edge_attr, weight)
    data.edge_attr = torch.rand(3, 2)
    with pytest.raises(ValueError, match="one of edge_attr and edge_weight, and this Data has both"):
        graphs.from_pyg(data)


def test_pyg_data_has_one_set_of_nodes(graph: Graph) -> None:
    Data = pytest.importorskip("torch_geometric.data").Data
    with pytest.raises(ValueError, match="one set of nodes; the graph is 3 x 5"):
        graphs.to_pyg(graph)
    with pytest.raises(ValueError, match=r"needs data with an edge_index or an adj_t; got Data\(x=\[2, 2\]\)"):
        graphs.from_pyg(Data(x=torch.zeros(2, 2)))


# ------------------------------------------------------------------------------------------------ torch


def test_torch_sparse_tensors_there_and_back(graph: Graph) -> None:
    matrix = graphs.to_torch_sparse(graph)
    assert matrix.to_dense().tolist() == [[0, 3.5, 0, 0, 1.5], [0, 0, 0, 0, 0], [2.5, 0, 0, 0, 4.5]]
    for given in (matrix, matrix.to_sparse_csr(), matrix.to_sparse_csc(), matrix.to_dense()):
        assert same(graphs.from_torch_sparse(given), graph)


def test_torch_sparse_values_may_be_vectors() -> None:
    graph = graphs.from_edges([[0, 2], [1, 1]], edge_attr=torch.randn(2, 3))
    matrix = graphs.to_torch_sparse(graph)
    assert matrix.shape == (3, 3, 3)
    assert same(graphs.from_torch_sparse(matrix), graph)


def test_torch_sparse_adds_repeats_up_and_takes_them_unsorted() -> None:
    repeated = torch.sparse_coo_tensor([[1, 0, 1], [0, 1, 0]], [1.0, 2.0, 3.0], (2, 2), check_invariants=True)
    graph = graphs.from_torch_sparse(repeated)
    assert numbered(graph) == {(1, 0): 2.0, (0, 1): 4.0}
    twice = graphs.from_edges([[0, 0], [1, 1]])
    assert graphs.to_torch_sparse(twice).to_dense().tolist() == [[0, 0], [2, 0]]
    assert graphs.to_torch_sparse(graphs.causal().bind(0)).shape == (0, 0)


@pytest.mark.scatter
def test_sparse_tensors_of_torch_sparse_there_and_back(graph: Graph) -> None:
    matrix = graphs.to_sparse_tensor(graph)
    assert matrix.sparse_sizes() == (3, 5)
    assert matrix.to_dense().tolist() == [[0, 3.5, 0, 0, 1.5], [0, 0, 0, 0, 0], [2.5, 0, 0, 0, 4.5]]
    assert same(graphs.from_sparse_tensor(matrix), graph)
    bare = graphs.from_sparse_tensor(graphs.to_sparse_tensor(graphs.causal().bind(4)))
    assert torch.equal(bare.dense(), graphs.causal().bind(4).dense())
    assert bare.edge_attr is None
    vectors = graphs.from_edges(EDGES, num_src=5, num_dst=3, edge_attr=torch.randn(4, 2))
    assert same(graphs.from_sparse_tensor(graphs.to_sparse_tensor(vectors)), vectors)


# ------------------------------------------------------------------------------------------------ bad input


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(TypeError, match="needs a scipy sparse matrix or array; got ndarray"):
        graphs.from_scipy(np.eye(3))
    with pytest.raises(ValueError, match=r"from_scipy needs a matrix \[num_dst, num_src\]; got shape \[3\]"):
        graphs.from_scipy(scipy.sparse.coo_array(np.arange(3)))
    with pytest.raises(ValueError, match=r"from_torch_sparse needs a matrix .*; got shape \[2, 2, 2\]"):
        graphs.from_torch_sparse(torch.zeros(2, 2, 2).to_sparse())
    with pytest.raises(TypeError, match="from_torch_sparse needs a torch tensor; got ndarray"):
        graphs.from_torch_sparse(np.eye(3))
    with pytest.raises(TypeError, match="from_networkx needs a networkx graph; got Tensor"):
        graphs.from_networkx(torch.eye(3))
    with pytest.raises(ValueError, match="edge 0 -> 1 has no attribute 'weight'"):
        graphs.from_networkx(networkx.path_graph(2), weight="weight")


class DGLStandIn:
    """What `from_dgl` uses of `dgl.DGLGraph`, as DGL 2's documentation describes it. DGL itself is not installed here.

    `edges()` returns edges in any order; `edges(order="eid")` in the order of `edata`.
    """

    def __init__(self, src: list[int], dst: list[int], sizes: tuple[int, int], relations: int = 1) -> None:
        self.ends = torch.tensor(src, dtype=torch.int32), torch.tensor(dst, dtype=torch.int32)
        self.sizes = sizes
        self.edata: dict[str, torch.Tensor] = {}
        self.canonical_etypes = [("_N", f"_E{k}", "_N") for k in range(relations)]

    def edges(self, form: str = "uv", order: str = "eid") -> tuple[torch.Tensor, torch.Tensor]:
        assert (form, order) == ("uv", "eid")
        return self.ends

    def num_src_nodes(self) -> int:
        return self.sizes[0]

    def num_dst_nodes(self) -> int:
        return self.sizes[1]


def test_dgl() -> None:
    g = DGLStandIn([2, 0, 1], [0, 1, 1], (3, 3))
    g.edata = {"w": torch.tensor([5.0, 6.0, 7.0]), "kind": torch.tensor([1, 0, 1])}
    graph = graphs.from_dgl(g, edge_attr="w", edge_type="kind")
    assert graph.edge_index.tolist() == [[2, 0, 1], [0, 1, 1]]
    assert graph.edge_attr.tolist() == [5.0, 6.0, 7.0]
    assert graph.edge_type.tolist() == [1, 0, 1]
    assert (graph.num_src, graph.num_dst) == (3, 3)
    g.edata["_TYPE"] = torch.tensor([2, 2, 0])  # dgl.ETYPE, of dgl.to_homogeneous
    assert graphs.from_dgl(g).edge_type.tolist() == [2, 2, 0]
    assert graphs.from_dgl(g).edge_attr is None

    bipartite = graphs.from_dgl(DGLStandIn([4, 0], [0, 1], (5, 2)))
    assert (bipartite.num_src, bipartite.num_dst) == (5, 2)
    assert bipartite.edge_index.tolist() == [[4, 0], [0, 1]]

    with pytest.raises(TypeError, match="from_dgl needs a DGLGraph; got Tensor"):
        graphs.from_dgl(torch.eye(3))
    with pytest.raises(ValueError, match="one edge type"):
        graphs.from_dgl(DGLStandIn([0], [1], (2, 2), relations=2))
    with pytest.raises(KeyError, match=r"no 'weight'; it has \['_TYPE', 'kind', 'w'\]"):
        graphs.from_dgl(g, edge_attr="weight")
