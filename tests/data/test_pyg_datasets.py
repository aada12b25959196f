"""Datasets of PyTorch Geometric as data of this library."""

from __future__ import annotations

import pytest
import torch

from mpnn import graphs
from mpnn.data import GraphClassification, NodeClassification

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import FakeDataset, KarateClub
from torch_geometric.transforms import RandomNodeSplit, ToSparseTensor

CHECKS = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, where ToSparseTensor makes a matrix


def test_a_dataset_of_one_graph() -> None:
    dataset = KarateClub(transform=RandomNodeSplit(num_val=6, num_test=6))
    data = NodeClassification.from_pyg(dataset)
    assert data.num_nodes == 34
    assert data.num_classes == 4
    assert int(data.train_mask.sum() + data.val_mask.sum() + data.test_mask.sum()) == 34
    assert data.x.equal(dataset[0].x)
    assert data.edge_index.equal(dataset[0].edge_index)


def test_masks_of_several_splits() -> None:
    masks = {f"{name}_mask": torch.rand(5, 3) < 0.5 for name in ("train", "val", "test")}
    edges = torch.tensor([[0, 1], [1, 2]])
    data = Data(x=torch.ones(5, 2, dtype=torch.float64), edge_index=edges, y=torch.arange(5)[:, None], **masks)
    nodes = NodeClassification.from_pyg([data], split=2)
    assert nodes.x.dtype == torch.float32
    assert nodes.y.tolist() == [0, 1, 2, 3, 4]
    assert nodes.val_mask.equal(masks["val_mask"][:, 2])


def test_datasets_of_small_graphs() -> None:
    dataset = FakeDataset(num_graphs=4, avg_num_nodes=6, num_channels=0, task="graph", num_classes=3)
    whole = GraphClassification.from_pyg(dataset)
    assert [graph.num_nodes for graph in whole.graphs] == [data.num_nodes for data in dataset]
    assert [graph.label for graph in whole.graphs] == [int(data.y) for data in dataset]
    one_hot = Data(x=torch.eye(3)[[2, 0]], edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.tensor([1]))
    numbers = Data(x=torch.tensor([[4], [1]]), edge_index=torch.tensor([[0, 1], [1, 0]]), y=torch.tensor([0]))
    both = GraphClassification.from_pyg([one_hot, numbers])
    assert [graph.tags.tolist() for graph in both.graphs] == [[2, 0], [4, 1]]
    assert (both.num_tags, both.num_classes) == (5, 2)


def test_integers_of_several_columns_and_numbers_to_learn() -> None:
    """As in OGB. A graph of one atom looks one-hot, and is not."""
    edges = torch.tensor([[0, 1], [1, 0]])
    ends = torch.tensor([[3, 0], [1, 1]])
    first = Data(x=torch.tensor([[5, 0, 3], [7, 1, 0]]), edge_index=edges, edge_attr=ends, y=torch.tensor([[0.5, 2.0]]))
    lone = Data(x=torch.tensor([[0, 1, 0]]), edge_index=edges[:, :0], y=torch.tensor([[float("nan"), -1.0]]))
    whole = GraphClassification.from_pyg([first, lone])
    assert (whole.num_tags, whole.num_classes) == ((8, 2, 4), 0)
    assert [graph.tags.tolist() for graph in whole.graphs] == [[[5, 0, 3], [7, 1, 0]], [[0, 1, 0]]]
    assert whole.targets.nan_to_num(9).tolist() == [[0.5, 2.0], [9, -1]]
    assert whole.graphs[0].edge_attr.equal(ends)
    ones = whole.one_hot(whole.graphs[0].tags)
    assert ones.shape == (2, 14)
    assert ones.nonzero()[:, 1].tolist() == [5, 8, 13, 7, 9, 10]
    classes = GraphClassification.from_pyg([Data(x=data.x, edge_index=data.edge_index, y=torch.tensor([[k]]))
                                            for k, data in enumerate((first, lone))])  # fmt: skip
    assert classes.targets.tolist() == [0, 1]
    with pytest.raises(ValueError, match="y must be of one kind for all graphs"):
        GraphClassification.from_pyg([first, Data(x=lone.x, edge_index=lone.edge_index, y=torch.tensor([1]))])


@CHECKS
@pytest.mark.parametrize("attr", [None, "edge_weight"])
def test_a_transposed_matrix_holds_the_edges(attr: str | None) -> None:
    """As ToSparseTensor makes one. A value of 1 for each edge is no attribute."""
    masks = {f"{name}_mask": torch.rand(5) < 0.5 for name in ("train", "val", "test")}
    edge_index = torch.tensor([[0, 1, 4, 2], [1, 2, 0, 2]])
    weights = {} if attr is None else {attr: torch.tensor([0.5, 2.0, -1.0, 3.0])}
    data = Data(x=torch.ones(5, 2), edge_index=edge_index, y=torch.arange(5), **masks, **weights)
    expected = graphs.from_pyg(data)
    sparse = ToSparseTensor(attr=attr, layout=torch.sparse_csr)(data.clone())
    assert "edge_index" not in sparse
    found = graphs.from_pyg(sparse)
    assert (found.edge_attr is None) == (attr is None)
    assert found.dense().equal(expected.dense())
    if attr is not None:
        of_edge = {
            tuple(end): w for end, w in zip(expected.edge_index.T.tolist(), expected.edge_attr.tolist(), strict=True)
        }
        assert [of_edge[tuple(end)] for end in found.edge_index.T.tolist()] == found.edge_attr.tolist()
    nodes = NodeClassification.from_pyg(sparse)
    assert {*map(tuple, nodes.edge_index.T.tolist())} == {*map(tuple, edge_index.T.tolist())}
    with pytest.raises(ValueError, match="needs data with an edge_index or an adj_t"):
        graphs.from_pyg(Data(x=torch.ones(2, 2)))


@CHECKS
def test_a_matrix_of_a_relation_holds_its_edges() -> None:
    data = HeteroData()
    data["u"].num_nodes, data["i"].num_nodes = 4, 3
    data["u", "buys", "i"].edge_index = torch.tensor([[0, 3, 3], [2, 0, 1]])
    expected = graphs.from_pyg(data)["u", "buys", "i"]
    found = graphs.from_pyg(ToSparseTensor(layout=torch.sparse_csr)(data))["u", "buys", "i"]
    assert (found.num_src, found.num_dst) == (4, 3)
    assert found.dense().equal(expected.dense())


def test_data_that_do_not_fit() -> None:
    edges = torch.tensor([[0], [1]])
    with pytest.raises(TypeError, match=r"train_mask of Data must be a tensor; got NoneType; .*RandomNodeSplit"):
        NodeClassification.from_pyg(Data(x=torch.ones(2, 2), edge_index=edges, y=torch.ones(2).long()))
    with pytest.raises(TypeError, match="x of Data must be a tensor"):
        NodeClassification.from_pyg(Data(edge_index=edges))
    with pytest.raises(ValueError, match="got 2 graphs: pass one of them"):
        NodeClassification.from_pyg([Data(edge_index=edges)] * 2)
    with pytest.raises(ValueError, match="got HeteroData"):
        NodeClassification.from_pyg(HeteroData())
    with pytest.raises(
        ValueError, match=r"y must be one class for each graph, int64 \[1\], or numbers, .*; got torch.int"
    ):
        GraphClassification.from_pyg([Data(edge_index=edges, y=torch.ones(1, 2).long(), num_nodes=2)])
    with pytest.raises(ValueError, match="x must be one-hot, or integers"):
        GraphClassification.from_pyg([Data(x=torch.rand(2, 3), edge_index=edges, y=torch.tensor([0]))])
    with pytest.raises(ValueError, match="the dataset has no graphs"):
        GraphClassification.from_pyg([])
