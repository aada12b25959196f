"""Datasets of PyTorch Geometric as data of this library."""

from __future__ import annotations

import pytest
import torch

from mpnn.data import GraphClassification, NodeClassification

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import FakeDataset, KarateClub
from torch_geometric.transforms import RandomNodeSplit


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
    with pytest.raises(ValueError, match=r"y must be one class for each graph, int64 \[1\]; got torch.float32"):
        GraphClassification.from_pyg([Data(edge_index=edges, y=torch.ones(1), num_nodes=2)])
    with pytest.raises(ValueError, match="x must be one-hot, or integers"):
        GraphClassification.from_pyg([Data(x=torch.rand(2, 3), edge_index=edges, y=torch.tensor([0]))])
    with pytest.raises(ValueError, match="the dataset has no graphs"):
        GraphClassification.from_pyg([])
