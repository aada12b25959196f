"""`mpnn.pyg.use`: a replaced convolution returns what PyTorch Geometric returns, for the same call."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pyg = pytest.importorskip("torch_geometric.nn")

from torch_geometric import EdgeIndex  # noqa: E402
from torch_geometric.data import Batch, Data  # noqa: E402
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor, trim_to_layer  # noqa: E402

import mpnn.pyg  # noqa: E402
from mpnn.integrations.pyg import convolutions, graph_cache  # noqa: E402

N, IN, OUT, EDGE, CLASSES = 13, 6, 4, 3, 3


def random_edges(num_src: int = N - 2, num_dst: int = N - 2, count: int = 40, seed: int = 1) -> Tensor:
    """Random edges with self-loops (two at node 0) and repeated edges; the last nodes have no in-neighbors."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_src, (count,), generator=generator)
    edges = torch.stack([src, torch.randint(0, num_dst, (count,), generator=generator)])
    if count >= 7:
        edges[:, :3] = torch.tensor([[0, 0, 1], [0, 0, 1]])
        edges[:, 5:7] = edges[:, 3:5]
    return edges


EDGES = random_edges()
GRAPHS = {
    "random": EDGES,
    "no edges": torch.empty(2, 0, dtype=torch.long),
    "one loop": torch.tensor([[2], [2]]),
    "a star": torch.stack([torch.arange(1, N), torch.zeros(N - 1, dtype=torch.long)]),
}
DEGREES = torch.bincount(torch.bincount(EDGES[1], minlength=N))
ALL = ["mean", "max", "min", "std", "var", "sum"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, 8), nn.ReLU(), nn.Linear(8, OUT))


Case = tuple[Callable[..., Any], str | None]
CASES: dict[str, Case] = {
    "GCN": (lambda **o: pyg.GCNConv(IN, OUT, **o), None),
    "GCN, weights": (lambda **o: pyg.GCNConv(IN, OUT, **o), "weight"),
    "GCN, improved, cached": (lambda **o: pyg.GCNConv(IN, OUT, improved=True, cached=True, **o), None),
    "GCN, no loops": (lambda **o: pyg.GCNConv(IN, OUT, add_self_loops=False, bias=False, **o), "weight"),
    "GCN, not normalized": (lambda **o: pyg.GCNConv(IN, OUT, normalize=False, **o), "weight"),
    "SAGE": (lambda **o: pyg.SAGEConv(IN, OUT, **o), None),
    "SAGE, max": (lambda **o: pyg.SAGEConv(IN, OUT, aggr="max", normalize=True, **o), None),
    "SAGE, several": (lambda **o: pyg.SAGEConv(IN, OUT, aggr=["mean", "max", "std"], project=True, **o), None),
    "GIN": (lambda **o: pyg.GINConv(mlp(), train_eps=True, **o), None),
    "GINE": (lambda **o: pyg.GINEConv(mlp(), edge_dim=EDGE, **o), "vector"),
    "Graph": (lambda **o: pyg.GraphConv(IN, OUT, **o), "weight"),
    "Graph, mean": (lambda **o: pyg.GraphConv(IN, OUT, aggr="mean", **o), "weight"),
    "Graph, min": (lambda **o: pyg.GraphConv(IN, OUT, aggr="min", **o), None),
    "Simple": (lambda **o: pyg.SimpleConv(aggr="mean", combine_root="cat", **o), "weight"),
    "GatedGraph": (lambda **o: pyg.GatedGraphConv(8, num_layers=2, **o), "weight"),
    "GAT": (lambda **o: pyg.GATConv(IN, OUT, heads=3, **o), None),
    "GAT, mean of heads": (lambda **o: pyg.GATConv(IN, OUT, heads=2, concat=False, residual=True, **o), None),
    "GAT, edges": (lambda **o: pyg.GATConv(IN, OUT, heads=2, edge_dim=EDGE, **o), "vector"),
    "GAT, edge weights": (lambda **o: pyg.GATConv(IN, OUT, edge_dim=1, fill_value=0.5, **o), "weight"),
    "GAT, fill add": (lambda **o: pyg.GATConv(IN, OUT, edge_dim=EDGE, fill_value="add", **o), "vector"),
    "GAT, no loops": (lambda **o: pyg.GATConv(IN, OUT, heads=2, add_self_loops=False, bias=False, **o), None),
    "GATv2": (lambda **o: pyg.GATv2Conv(IN, OUT, heads=3, residual=True, **o), None),
    "GATv2, shared, edges": (
        lambda **o: pyg.GATv2Conv(IN, OUT, heads=2, edge_dim=EDGE, share_weights=True, concat=False, **o),
        "vector",
    ),
    "GATv2, no loops": (lambda **o: pyg.GATv2Conv(IN, OUT, add_self_loops=False, **o), None),
    "Transformer": (lambda **o: pyg.TransformerConv(IN, OUT, heads=3, **o), None),
    "Transformer, edges": (lambda **o: pyg.TransformerConv(IN, OUT, heads=2, edge_dim=EDGE, beta=True, **o), "vector"),
    "Transformer, no root": (lambda **o: pyg.TransformerConv(IN, OUT, 2, concat=False, root_weight=False, **o), None),
    "RGCN": (lambda **o: pyg.RGCNConv(IN, OUT, CLASSES + 1, **o), "class"),
    "RGCN, bases": (lambda **o: pyg.RGCNConv(IN, OUT, CLASSES, num_bases=2, **o), "class"),
    "RGCN, blocks": (lambda **o: pyg.RGCNConv(IN, OUT, CLASSES, num_blocks=2, aggr="add", **o), "class"),
    "PNA": (lambda **o: pyg.PNAConv(IN, OUT, ALL, SCALERS, DEGREES, **o), None),
    "PNA, towers": (
        lambda **o: pyg.PNAConv(IN, OUT, ALL[:3], SCALERS[:3], DEGREES, EDGE, towers=2, pre_layers=2, **o),
        "vector",
    ),
}


def attributes(kind: str | None, count: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "class":
        return torch.arange(count) % CLASSES
    shape = (count,) if kind == "weight" else (count, EDGE)
    return torch.rand(shape, dtype=torch.float64).requires_grad_()


def pair_of(make: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """The convolution in float64, and a copy that runs here."""
    torch.manual_seed(0)
    with torch.random.fork_rng():
        conv = make(**options).double()
    for parameter in conv.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = copy.deepcopy(conv)
    report = mpnn.pyg.use(ours)
    assert list(report.replaced.values()) == [type(conv).__name__]
    assert not report.left
    assert isinstance(ours, type(conv))
    assert repr(ours) == repr(conv)
    return conv, ours


def agree(conv: Any, ours: Any, x: Any, edges: Any, *rest: Any) -> None:
    """Outputs, and gradients of the parameters and of all inputs that require one."""
    leaves = [t for t in (*(x if isinstance(x, tuple) else (x,)), *rest) if isinstance(t, Tensor) and t.requires_grad]
    grads, outs = [], []
    for module in (conv, ours):
        out = module(x, edges, *rest)
        outs.append(out)
        weights = list(module.parameters())
        slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        if out.requires_grad:
            grads.append(torch.autograd.grad((out * slope).sum(), [*leaves, *weights], allow_unused=True))
    torch.testing.assert_close(outs[1], outs[0])
    for expected, found in zip(*grads, strict=True) if grads else ():
        zero = torch.zeros(()) if expected is None and found is None else None
        expected = torch.zeros_like(found) if expected is None and zero is None else expected
        found = torch.zeros_like(expected) if found is None and zero is None else found
        if zero is None:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_pygs(name: str, graph: str) -> None:
    make, kind = CASES[name]
    conv, ours = pair_of(make)
    edges = GRAPHS[graph]
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    attr = attributes(kind, edges.shape[1])
    for _ in range(2):  # the second call takes what the first one cached
        agree(conv, ours, x, edges, *(() if attr is None else (attr,)))


@pytest.mark.parametrize("name", CASES)
def test_target_to_source_is_pygs(name: str) -> None:
    make, kind = CASES[name]
    conv, ours = pair_of(make, flow="target_to_source")
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    attr = attributes(kind, EDGES.shape[1])
    agree(conv, ours, x, EDGES, *(() if attr is None else (attr,)))


BIPARTITE: dict[str, Case] = {
    "SAGE": (lambda **o: pyg.SAGEConv((IN, 5), OUT, **o), None),
    "Graph": (lambda **o: pyg.GraphConv((IN, 5), OUT, **o), "weight"),
    "GIN": (lambda **o: pyg.GINConv(mlp(), **o), None),
    "GAT": (lambda **o: pyg.GATConv((IN, 5), OUT, heads=2, add_self_loops=False, **o), None),
    "GAT, loops": (lambda **o: pyg.GATConv((IN, 5), OUT, heads=2, edge_dim=EDGE, **o), "vector"),
    "GATv2": (lambda **o: pyg.GATv2Conv((IN, 5), OUT, heads=2, add_self_loops=False, **o), None),
    "Transformer": (lambda **o: pyg.TransformerConv((IN, 5), OUT, heads=2, **o), None),
    "RGCN": (lambda **o: pyg.RGCNConv((IN, 5), OUT, CLASSES, **o), "class"),
    "Simple": (lambda **o: pyg.SimpleConv(**o), None),
}


@pytest.mark.parametrize("name", BIPARTITE)
def test_two_sets_of_nodes(name: str) -> None:
    make, kind = BIPARTITE[name]
    conv, ours = pair_of(make)
    edges = random_edges(9, 5)
    x = tuple(
        torch.randn(n, d, dtype=torch.float64, requires_grad=True)
        for n, d in ((9, IN), (5, IN if name == "GIN" else 5))
    )
    attr = attributes(kind, 40)
    agree(conv, ours, x, edges, *(() if attr is None else (attr,)))


def test_sources_alone_and_a_size() -> None:
    for make in (lambda: pyg.SAGEConv((IN, 5), OUT), lambda: pyg.GATConv((IN, 5), OUT, add_self_loops=False)):
        conv, ours = pair_of(make)
        x = torch.randn(9, IN, dtype=torch.float64)
        edges = random_edges(9, 5)
        torch.testing.assert_close(ours((x, None), edges, size=(9, 5)), conv((x, None), edges, size=(9, 5)))
        with pytest.raises(ValueError, match="but expected size 8"):
            ours((x, torch.randn(5, 5).double()), edges, size=(8, 5))


@pytest.mark.filterwarnings("ignore:Converting sparse tensor", "ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["GCN", "SAGE", "SAGE, max", "GIN", "Graph, mean", "GAT", "RGCN", "Transformer"])
@pytest.mark.parametrize("form", ["csr", "coo", "EdgeIndex", "int32"])
def test_forms_of_edges(name: str, form: str) -> None:
    make, kind = CASES[name]
    if kind == "class" and form in ("csr", "coo"):
        pytest.skip("RGCNConv needs edge_type, which these matrices do not hold")
    if kind == "class" and form == "int32":
        pytest.skip(
            "the gradient of PyTorch Geometric's RGCNConv is wrong for 32-bit edges; ours equals that for 64 bits"
        )
    conv, ours = pair_of(make)
    distinct = torch.unique(EDGES[:, EDGES[0] != EDGES[1]], dim=1)
    weight = torch.rand(distinct.shape[1], dtype=torch.float64)
    edges: Any = {
        "csr": lambda: to_torch_csr_tensor(distinct.flip(0), weight, size=(N, N)),
        "coo": lambda: to_torch_coo_tensor(distinct.flip(0), weight, size=(N, N)),
        "EdgeIndex": lambda: EdgeIndex(distinct.contiguous(), sparse_size=(N, N)),
        "int32": lambda: distinct.int(),
    }[form]()
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    rest = () if kind is None or form in ("csr", "coo") else (attributes(kind, distinct.shape[1]),)
    for _ in range(2):
        agree(conv, ours, x, edges, *rest)


@pytest.mark.scatter
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's, of matrices that PyG makes
def test_a_matrix_of_torch_sparse() -> None:
    import torch_sparse

    for make in (lambda: pyg.SAGEConv(IN, OUT), lambda: pyg.GCNConv(IN, OUT), lambda: pyg.GraphConv(IN, OUT)):
        conv, ours = pair_of(make)
        adj = torch_sparse.SparseTensor(row=EDGES[1], col=EDGES[0], sparse_sizes=(N, N))
        agree(conv, ours, torch.randn(N, IN, dtype=torch.float64, requires_grad=True), adj)


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
def test_attention_weights_are_pygs(name: str) -> None:
    conv, ours = pair_of(CASES[name][0])
    x = torch.randn(N, IN, dtype=torch.float64)
    expected, found = (c(x, EDGES, return_attention_weights=True) for c in (conv, ours))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["GAT", "GATv2", "Transformer"])
def test_dropout_acts_on_weights_in_training_only(name: str) -> None:
    conv, ours = pair_of(CASES[name][0], dropout=0.5)
    edges, x = torch.unique(EDGES, dim=1), torch.randn(N, IN, dtype=torch.float64)
    agree(conv.eval(), ours.eval(), x, edges)
    expected = ours(x, edges)
    ours.train()
    draws = torch.stack([ours(x, edges) for _ in range(3000)])
    assert draws.std(0).max() > 0
    error = (draws.mean(0) - expected).abs() / (draws.std(0) / 3000**0.5 + 1e-12)
    assert error.max() < 5  # standard errors of the mean
    torch.manual_seed(3)
    first = ours(x, edges)
    torch.manual_seed(3)
    torch.testing.assert_close(ours(x, edges), first)


def test_changes_of_edges_in_place_are_seen() -> None:
    for name in ("GCN", "GAT", "SAGE", "PNA"):
        conv, ours = pair_of(CASES[name][0])
        edges, x = EDGES.clone(), torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
        agree(conv, ours, x, edges)
        edges[:, 10:] = random_edges(seed=5)[:, 10:]
        agree(conv, ours, x, edges)


def test_changes_of_weights_and_types_are_seen() -> None:
    conv, ours = pair_of(CASES["GCN"][0])
    x, weight = torch.randn(N, IN, dtype=torch.float64), torch.rand(40, dtype=torch.float64)
    agree(conv, ours, x, EDGES, weight)
    weight *= torch.arange(40)
    agree(conv, ours, x, EDGES, weight)
    conv, ours = pair_of(CASES["RGCN"][0])
    for kind in (torch.arange(40) % 3, torch.arange(40) % 2):
        agree(conv, ours, x, EDGES, kind)


def test_the_cache_dies_with_the_edges() -> None:
    _, ours = pair_of(CASES["GAT"][0])
    gc.collect()
    before = len(graph_cache._ENTRIES)
    edges = EDGES.clone()
    ours(torch.randn(N, IN, dtype=torch.float64), edges).sum().backward()
    assert len(graph_cache._ENTRIES) > before
    del edges
    gc.collect()
    assert len(graph_cache._ENTRIES) == before


def test_inference_mode_then_training() -> None:
    conv, ours = pair_of(CASES["GCN"][0])
    edges, x = EDGES.clone(), torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, edges), conv(x, edges))
        torch.testing.assert_close(ours(x, edges.clone()), conv(x, edges))
    agree(conv, ours, x, edges)


class Net(nn.Module):
    def __init__(self, kind: Any = None) -> None:
        super().__init__()
        kind = pyg.GATConv if kind is None else kind
        self.first, self.other, self.second = kind(IN, 8), pyg.ChebConv(8, 8, 2), kind(8, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.other(self.first(x, edge_index).relu(), edge_index).relu(), edge_index)


@pytest.mark.parametrize("of_weights", [False, True], ids=["features", "edge weights"])
def test_a_first_call_in_torch_func_then_a_plain_one(of_weights: bool) -> None:
    """What is cached for the edges is not of the transform; weights of a transform are not cached at all."""
    conv = pyg.GCNConv(IN, OUT)
    x, edges, weight = torch.rand(N, IN), random_edges(), torch.rand(40)
    expected = conv(x, edges), conv(x, edges, weight)
    mpnn.pyg.use(conv)
    if of_weights:
        first = torch.func.jvp(lambda w: conv(x, edges, w), (weight,), (weight,))[0]
    else:
        first = torch.func.jvp(lambda z: conv(z, edges), (x,), (x,))[0]
    torch.testing.assert_close(first, expected[of_weights])
    for out, ours in zip(expected, (conv(x, edges), conv(x, edges, weight)), strict=True):
        torch.testing.assert_close(ours, out)


def test_the_report_and_the_way_back() -> None:
    model = Net()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    x = torch.randn(N, IN)
    expected = model(x, EDGES)
    report = mpnn.pyg.use(model)
    assert report.replaced == {"first": "GATConv", "second": "GATConv"}
    assert report.left == {"other": "ChebConv is not supported"}
    assert "other: left, ChebConv" in str(report)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    torch.testing.assert_close(model(x, EDGES), expected)
    assert not mpnn.pyg.use(model).replaced  # they are replaced already
    report.restore()
    assert type(model.first) is pyg.GATConv
    torch.testing.assert_close(model(x, EDGES), expected)


def test_options_that_are_not_supported_are_left() -> None:
    class Mine(pyg.GATConv):  # type: ignore[misc, name-defined]
        pass

    model = nn.ModuleDict(
        {"lstm": pyg.SAGEConv(2, 2, aggr="lstm"), "dim": pyg.GINConv(mlp(), node_dim=0), "mine": Mine(2, 2)}
    )
    report = mpnn.pyg.use(model)
    assert report.left == {"lstm": "aggr = 'lstm'", "dim": "node_dim = 0, not -2", "mine": "Mine is not supported"}
    with pytest.raises(TypeError, match=r"an nn\.Module; got str"):
        mpnn.pyg.use("model")


def test_copies_pickles_and_hooks() -> None:
    conv, ours = pair_of(CASES["GCN"][0])
    x = torch.randn(N, IN, dtype=torch.float64)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is convolutions.GCNConv
        torch.testing.assert_close(again(x, EDGES), conv(x, EDGES))
    ours.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    torch.testing.assert_close(ours(x, EDGES), conv(x, EDGES))


def test_edges_out_of_range_are_named() -> None:
    _, ours = pair_of(CASES["SAGE"][0])
    with pytest.raises(IndexError, match="edge 1"):
        ours(torch.randn(3, IN).double(), torch.tensor([[0, 7], [1, 1]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["GAT", "GCN", "GraphSAGE", "GIN"])
def test_half_precision_frozen_and_lazy_models(kind: str, dtype: torch.dtype) -> None:
    make = getattr(pyg, kind)
    x = torch.randn(N, IN)
    model = make(-1, 8, 2, OUT).eval()
    exact = model(x, EDGES).detach()
    mpnn.pyg.use(model.requires_grad_(False).to(dtype))
    found = model(x.to(dtype), EDGES)
    assert found.dtype == dtype
    # each of some ten operations rounds by 2^-9 (bfloat16), which go either way
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=2.0**-5 * float(exact.abs().max()))
    lazy = make(-1, 8, 2, OUT).eval()
    mpnn.pyg.use(lazy)
    lazy(x, EDGES)
    lazy.load_state_dict(model.state_dict())
    torch.testing.assert_close(lazy(x, EDGES), model.float()(x, EDGES))


def test_wrong_arguments() -> None:
    model = pyg.GraphSAGE(IN, 8, 2, OUT)
    mpnn.pyg.use(model)
    x = torch.randn(N, IN)
    with pytest.raises(ValueError, match="size '2' in the first dimension"):
        model(x, EDGES.T)
    with pytest.raises(ValueError, match="'edge_index' to be of integer type"):
        model(x, EDGES.float())
    with pytest.raises(TypeError, match="got the class GAT; pass a model"):
        mpnn.pyg.use(pyg.GAT)
    with pytest.raises(ValueError, match="Linear contains no convolution of PyTorch Geometric"):
        mpnn.pyg.use(nn.Linear(2, 2))
    assert model(x, EDGES[:, :0]).shape == (N, OUT)


@pytest.mark.parametrize("kind", ["GATConv", "SAGEConv", "GraphConv"])
def test_to_hetero(kind: str) -> None:
    options = {"add_self_loops": False} if kind == "GATConv" else {}

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = getattr(pyg, kind)((-1, -1), 8, **options)
            self.b = getattr(pyg, kind)((-1, -1), OUT, **options)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.b(self.a(x, edge_index).relu(), edge_index)

    types = (["u", "v"], [("u", "to", "v"), ("v", "from", "u")])
    x = {"u": torch.randn(9, IN), "v": torch.randn(5, 7)}
    edges = {types[1][0]: random_edges(9, 5), types[1][1]: random_edges(5, 9)}
    model = pyg.to_hetero(Two(), types)
    expected = model(x, edges)
    assert len(mpnn.pyg.use(model).replaced) == 4
    for key, out in model(x, edges).items():
        torch.testing.assert_close(out, expected[key])
    before = Two()
    mpnn.pyg.use(before)  # before the model is made heterogeneous
    after = pyg.to_hetero(before, types)
    after(x, edges)
    after.load_state_dict(model.state_dict())
    for key, out in after(x, edges).items():
        torch.testing.assert_close(out, expected[key])
    assert all(isinstance(m, convolutions.Replacement) for m in after.modules() if isinstance(m, pyg.MessagePassing))


def test_training_over_batches_is_pygs() -> None:
    graphs = [
        Data(torch.randn(n, IN), random_edges(n, n, 3 * n, seed=n), y=torch.tensor([n % OUT])) for n in (5, 9, 13)
    ]
    losses: list[list[float]] = []
    for replaced in (False, True):
        torch.manual_seed(0)
        model = Net()
        if replaced:
            mpnn.pyg.use(model)
        optimizer, history = torch.optim.Adam(model.parameters(), 0.01), []
        for step in range(6):
            batch = Batch.from_data_list(graphs[step % 2 :])
            out = pyg.global_mean_pool(model(batch.x, batch.edge_index), batch.batch)
            loss = nn.functional.cross_entropy(out, batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        losses.append(history)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)


def test_trim_to_layer() -> None:
    conv, ours = pair_of(CASES["SAGE"][0])
    x, outs = torch.randn(N, IN, dtype=torch.float64), []
    for layer in (conv, ours):
        trimmed, edges, _ = trim_to_layer(1, [6, 4, 3], [20, 12, 8], x, EDGES.clamp(max=9))
        outs.append(layer(trimmed, edges))
    torch.testing.assert_close(outs[1], outs[0])


@pytest.mark.scatter
@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without:UserWarning")  # torch-sparse samples, too
def test_neighbor_loader() -> None:
    from torch_geometric.loader import NeighborLoader

    conv, ours = pair_of(CASES["SAGE"][0])
    for batch in NeighborLoader(Data(torch.randn(N, IN).double(), EDGES), [3, 3], batch_size=4):
        torch.testing.assert_close(ours(batch.x, batch.edge_index), conv(batch.x, batch.edge_index))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GAT", "GCN", "GraphSAGE", "GIN"])
def test_programs_contain_pygs_own_operations(kind: str) -> None:
    model = getattr(pyg, kind)(in_channels=IN, hidden_channels=8, num_layers=2, out_channels=OUT).eval()
    x, other = torch.randn(N, IN), torch.randn(N + 2, IN)
    expected = model(x, EDGES)
    mpnn.pyg.use(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, EDGES), expected)
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    program = torch.export.export(model, (x, EDGES), dynamic_shapes=({0: nodes}, {1: edges})).module()
    torch.testing.assert_close(program(x, EDGES), expected)
    torch.testing.assert_close(program(other, EDGES[:, :30]), model(other, EDGES[:, :30]))
