"""PyTorch Geometric's loaders without a compiler, and models in place over their batches: the numbers of PyTorch
Geometric's own, batch by batch. The marker `scatter` runs the same over torch_sparse, which HGTLoader needs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pyg = pytest.importorskip("torch_geometric.nn")

import torch_geometric.typing  # noqa: E402
from torch_geometric.data import Data, HeteroData  # noqa: E402
from torch_geometric.loader import HGTLoader, LinkNeighborLoader, NeighborLoader  # noqa: E402
from torch_geometric.utils import k_hop_subgraph  # noqa: E402

import mpnn.pyg  # noqa: E402
from mpnn.integrations.pyg_lib import hetero_neighbor_sample, neighbor_sample  # noqa: E402

WAYS = [pytest.param("pyg_lib"), pytest.param("torch_sparse", marks=pytest.mark.scatter)]
pytestmark = pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib' installation is deprecated")


@pytest.fixture
def samples_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch Geometric samples by `mpnn.integrations.pyg_lib`, as `mpnn.shim` provides it, or by torch_sparse."""
    is_ours = request.param == "pyg_lib"
    for name in ("WITH_PYG_LIB", "WITH_EDGE_TIME_NEIGHBOR_SAMPLE", "WITH_WEIGHTED_NEIGHBOR_SAMPLE"):
        monkeypatch.setattr(torch_geometric.typing, name, is_ours)
    if not is_ours:
        pytest.importorskip("torch_sparse")


both = pytest.mark.parametrize("samples_by", WAYS, indirect=True)
ours_alone = pytest.mark.parametrize("samples_by", WAYS[:1], indirect=True)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "SAGE": lambda: pyg.GraphSAGE(6, 8, 2, 3),
    "GCN": lambda: pyg.GCN(6, 8, 2, 3),
    "GAT": lambda: pyg.GAT(6, 8, 2, 3, heads=2),
    "GIN": lambda: pyg.GIN(6, 8, 2, 3),
    "PNA": lambda: pyg.PNA(
        6, 8, 2, 3, aggregators=["mean", "std", "max"], scalers=["identity"], deg=torch.tensor([0, 4, 4])
    ),
}


def a_graph() -> Data:
    torch.manual_seed(0)
    return Data(x=torch.randn(60, 6), edge_index=torch.randint(0, 60, (2, 300)), y=torch.randint(0, 3, (60,)))


def kinds_of_nodes() -> HeteroData:
    torch.manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(40, 6), torch.randn(25, 6)
    written = torch.stack([torch.randint(0, 25, (120,)), torch.randint(0, 40, (120,))])
    data["author", "writes", "paper"].edge_index = written
    data["paper", "written", "author"].edge_index = written.flip(0)
    data["paper", "cites", "paper"].edge_index = torch.randint(0, 40, (2, 150))
    return data


def in_place(model: Any) -> tuple[Any, Any]:
    """The model in float64, and a copy that runs here."""
    ours = copy.deepcopy(model.double())
    report = mpnn.pyg.use(ours)
    assert report.replaced
    assert not report.left
    return model, ours


def agree(model: Any, ours: Any, run: Callable[[Any], Tensor]) -> None:
    """The outputs and the gradients of all parameters."""
    found = []
    for one in (model, ours):
        one.zero_grad()
        out = run(one)
        out.square().sum().backward()
        found.append([out, *(p.grad for p in one.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 1
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


@both
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("samples_by")
def test_sampled_neighbors(name: str) -> None:
    model, ours = in_place(MODELS[name]())
    loader = NeighborLoader(a_graph(), num_neighbors=[5, 3], batch_size=16, shuffle=False)
    seen = 0
    for batch in loader:
        agree(model, ours, lambda one, b=batch: one(b.x.double(), b.edge_index)[: b.batch_size])
        seen += batch.batch_size
    assert seen == 60


@both
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("samples_by")
def test_sampled_links(name: str) -> None:
    """Links and as many that are none, each with the neighborhoods of its ends."""
    model, ours = in_place(MODELS[name]())
    data = a_graph()
    loader = LinkNeighborLoader(
        data, num_neighbors=[5, 3], batch_size=32, edge_label_index=data.edge_index[:, :96], neg_sampling_ratio=1.0
    )
    batches = list(loader)
    assert len(batches) == 3

    def scores(one: Any, batch: Any) -> Tensor:
        states = one(batch.x.double(), batch.edge_index)
        src, dst = batch.edge_label_index
        product: Tensor = (states[src] * states[dst]).sum(-1)
        return product

    for batch in batches:
        assert batch.edge_label.long().bincount().tolist() == [32, 32]
        agree(model, ours, lambda one, b=batch: scores(one, b))


class OfKinds(nn.Module):
    def __init__(self, data: HeteroData, convolution: Callable[[], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(convolution() for _ in range(2))

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x["paper"]


@pytest.mark.parametrize(
    ("samples_by", "loader"),
    [
        pytest.param("pyg_lib", NeighborLoader),
        pytest.param("torch_sparse", NeighborLoader, marks=pytest.mark.scatter),
        pytest.param("torch_sparse", HGTLoader, marks=pytest.mark.scatter),
    ],
    indirect=["samples_by"],
)
@pytest.mark.parametrize("name", ["HGTConv", "HeteroConv"])
@pytest.mark.usefixtures("samples_by")
def test_sampled_kinds_of_nodes(name: str, loader: Any) -> None:
    data = kinds_of_nodes()

    def convolution() -> Any:
        if name == "HGTConv":
            return pyg.HGTConv(6, 6, data.metadata(), heads=2)
        return pyg.HeteroConv({kind: pyg.SAGEConv((6, 6), 6) for kind in data.edge_types})

    model, ours = in_place(OfKinds(data, convolution))
    options = {"num_samples": [8, 8]} if loader is HGTLoader else {"num_neighbors": [4, 4]}
    batches = list(loader(data, batch_size=16, input_nodes="paper", shuffle=False, **options))
    assert sum(batch["paper"].batch_size for batch in batches) == 40
    for batch in batches:
        features = {kind: x.double() for kind, x in batch.x_dict.items()}
        agree(model, ours, lambda one, b=batch, x=features: one(x, b.edge_index_dict)[: b["paper"].batch_size])


def edges_of(batch: Any) -> Tensor:
    """The edges of a batch by the numbers of the whole graph."""
    found: Tensor = batch.n_id[batch.edge_index]
    return found


@both
@pytest.mark.usefixtures("samples_by")
def test_samples_are_edges_of_the_graph_and_keep_to_the_fanouts() -> None:
    data = a_graph()
    for batch in NeighborLoader(data, num_neighbors=[5, 3], batch_size=16, shuffle=False):
        assert edges_of(batch).equal(data.edge_index[:, batch.e_id])
        assert batch.e_id.unique().numel() == batch.e_id.numel()
        assert batch.n_id.unique().numel() == batch.n_id.numel()
        assert batch.x.equal(data.x[batch.n_id])
        degree = data.edge_index[1].bincount(minlength=60)[batch.n_id]
        sampled = batch.edge_index[1].bincount(minlength=len(batch.n_id))
        assert sampled[: batch.batch_size].equal(degree[: batch.batch_size].clamp(max=5))
        assert (sampled[batch.batch_size :] <= 3).all()


@both
@pytest.mark.usefixtures("samples_by")
def test_all_neighbors_are_the_whole_neighborhood() -> None:
    data = a_graph()
    for batch in NeighborLoader(data, num_neighbors=[-1, -1], batch_size=4, shuffle=False):
        of_seeds = data.edge_index[:, torch.isin(data.edge_index[1], batch.n_id[:4])]
        assert (batch.edge_index[1] < 4).sum() == of_seeds.shape[1]
        assert batch.n_id.sort().values.equal(k_hop_subgraph(batch.n_id[:4], 2, data.edge_index)[0])


@ours_alone
@pytest.mark.usefixtures("samples_by")
def test_each_step_says_how_much_it_added() -> None:
    batch = next(iter(NeighborLoader(a_graph(), num_neighbors=[5, 3], batch_size=16)))
    assert sum(batch.num_sampled_nodes) == len(batch.n_id)
    assert batch.num_sampled_nodes[0] == 16
    assert sum(batch.num_sampled_edges) == len(batch.e_id)


@ours_alone
@pytest.mark.parametrize("strategy", ["uniform", "last"])
@pytest.mark.usefixtures("samples_by")
def test_no_sampled_node_is_later_than_its_seed(strategy: str) -> None:
    data = a_graph()
    data.time = torch.randperm(60)
    loader = NeighborLoader(
        data,
        num_neighbors=[3, 2],
        batch_size=20,
        time_attr="time",
        temporal_strategy=strategy,
        input_time=torch.full((60,), 30),
    )
    counted = 0
    for batch in loader:
        later = batch.time > 30
        assert not later[batch.batch_size :].any()
        for node in range(batch.batch_size):
            sources = data.edge_index[0][data.edge_index[1] == batch.n_id[node]]
            times = data.time[sources]
            times = times[times <= 30].sort().values
            found = batch.time[batch.edge_index[0][batch.edge_index[1] == node]].sort().values
            assert len(found) == min(len(times), 3)
            assert strategy == "uniform" or found.equal(times[len(times) - len(found) :])
            counted += len(found)
    assert counted > 50


@ours_alone
@pytest.mark.usefixtures("samples_by")
def test_times_of_edges_and_samples_of_their_own() -> None:
    """Each link has a sample of its own, along edges that are not later than the link."""
    data = a_graph()
    data.edge_time = torch.arange(300)
    loader = LinkNeighborLoader(
        data,
        num_neighbors=[4, 4],
        batch_size=30,
        edge_label_index=data.edge_index[:, ::3],
        edge_label_time=data.edge_time[::3],
        time_attr="edge_time",
        shuffle=False,
    )
    for number, batch in enumerate(loader):
        time = data.edge_time[::3][30 * number :][:30]
        of_edge = batch.batch[batch.edge_index[1]]
        assert (data.edge_time[batch.e_id] <= time[of_edge]).all()
        assert batch.batch[batch.edge_index[0]].equal(of_edge)


@both
@pytest.mark.usefixtures("samples_by")
def test_neighbors_are_drawn_with_equal_probability() -> None:
    """Of the 12 neighbors of a star, 4 are drawn: each in a third of 600 draws, whose standard deviation is 12."""
    edge_index = torch.stack([torch.arange(1, 13), torch.zeros(12, dtype=torch.int64)])
    data = Data(x=torch.zeros(13, 1), edge_index=edge_index)
    for replace in (False, True):
        torch.manual_seed(0)
        loader = NeighborLoader(data, num_neighbors=[4], input_nodes=torch.tensor([0]), replace=replace)
        count = torch.zeros(13)
        repeats = 0
        for _ in range(600):
            batch = next(iter(loader))
            count += torch.bincount(batch.n_id[batch.edge_index[0]], minlength=13)
            repeats += 4 - len(batch.e_id.unique())
        assert (count[1:] - 200).abs().max() < 4.5 * 12
        assert (repeats > 0) == replace


def test_a_repeated_seed_has_its_own_place() -> None:
    ptr, col = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 0])
    row, column, nodes, edges, added, steps = neighbor_sample(ptr, col, torch.tensor([0, 0]), [-1], csc=True)
    assert nodes.tolist() == [0, 0, 1]
    assert column.tolist() == [0, 0, 1, 1]
    assert row.tolist() == [2, 0, 2, 0]
    assert edges.tolist() == [0, 1, 0, 1]
    assert (added, steps) == ([2, 1], [4])


def test_what_is_not_served_is_refused() -> None:
    ptr, col, seed = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 0]), torch.tensor([0])
    with pytest.raises(NotImplementedError, match="equal probabilities; leave weights of edges out"):
        neighbor_sample(ptr, col, seed, [1], edge_weight=torch.ones(3))
    with pytest.raises(NotImplementedError, match="no induced subgraphs"):
        neighbor_sample(ptr, col, seed, [1], directed=False)
    with pytest.raises(ValueError, match="pass disjoint=True"):
        neighbor_sample(ptr, col, seed, [1], node_time=torch.zeros(2))
    kind = ("a", "to", "b")
    with pytest.raises(ValueError, match="seeds of kind 'b' have no times"):
        hetero_neighbor_sample(
            {kind: ptr}, {kind: col}, {"b": seed}, {kind: [1]}, {"a": torch.zeros(2)}, csc=True, disjoint=True
        )
