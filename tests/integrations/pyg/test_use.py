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

from pyg_cases import CASES, CLASSES, EDGE, EDGES, IN, OUT, Case, N, attributes, mlp, random_edges  # noqa: E402
from torch_geometric import EdgeIndex  # noqa: E402
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor, trim_to_layer  # noqa: E402

import mpnn.pyg  # noqa: E402
from mpnn import graphs  # noqa: E402
from mpnn.integrations.pyg import convolutions  # noqa: E402
from mpnn.models import GraphTransformer  # noqa: E402

GRAPHS = {
    "random": EDGES,
    "no edges": torch.empty(2, 0, dtype=torch.long),
    "one loop": torch.tensor([[2], [2]]),
    "a star": torch.stack([torch.arange(1, N), torch.zeros(N - 1, dtype=torch.long)]),
}


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
    """Outputs, and gradients of the parameters and of all inputs that require one: of PyTorch Geometric, and here."""
    leaves = [t for t in (*(x if isinstance(x, tuple) else (x,)), *rest) if isinstance(t, Tensor) and t.requires_grad]
    grads, outs = [], []
    for module in (conv, ours):
        out = module(x, edges, *rest)
        outs.append(out)
        weights = list(module.parameters())
        slope = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        if out.requires_grad:
            grads.append(torch.autograd.grad((out * slope).sum(), [*leaves, *weights], materialize_grads=True))
    torch.testing.assert_close(outs[1], outs[0])
    if grads:
        torch.testing.assert_close(grads[1], grads[0])


def test_pna_without_nodes() -> None:
    for name in ("PNA", "PNA, towers"):
        conv, ours = pair_of(CASES[name][0])
        x, edges = torch.zeros(0, IN, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.long)
        rest = (torch.zeros(0, EDGE, dtype=torch.float64),) if CASES[name][1] else ()
        assert conv(x, edges, *rest).shape == ours(x, edges, *rest).shape


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering
def test_outputs_and_gradients_are_pygs(name: str, graph: str) -> None:
    make, kind = CASES[name]
    conv, ours = pair_of(make)
    edges = GRAPHS[graph]
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    attr = attributes(kind, edges.shape[1])
    for _ in range(2):  # the second call takes what the first one cached
        agree(conv, ours, x, edges, *(() if attr is None else (attr,)))


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
@pytest.mark.parametrize(
    "options", [{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}, {"bias": False}], ids=str
)
def test_gcn_with_and_without_weights(options: dict[str, bool], flow: str) -> None:
    conv, ours = pair_of(lambda **o: pyg.GCNConv(IN, OUT, **o), flow=flow, **options)
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    for weight in (None, torch.rand(EDGES.shape[1], dtype=torch.float64).requires_grad_()):
        for _ in range(2):
            agree(conv, ours, x, EDGES, weight)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
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
@pytest.mark.covering(times=2)
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
        col = torch.arange(N)  # of two matrices: rows are sorted, so that both keep the tensor
        for row in (torch.arange(N), torch.arange(N) // 2):
            adj = torch_sparse.SparseTensor(row=row, col=col, sparse_sizes=(N, N))
            assert adj.storage.col() is col
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
    expected, draws = ours(x, edges), []
    ours.train()
    for _ in range(2):
        torch.manual_seed(3)
        draws.append(torch.stack([ours(x, edges) for _ in range(200)]))
    assert draws[0].equal(draws[1])
    error = (draws[0].mean(0) - expected).abs() / (draws[0].std(0) / 200**0.5 + 1e-12)
    assert error.max() < 5  # standard errors of the mean


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
    kind = torch.arange(40) % 3
    agree(conv, ours, x, EDGES, kind)
    kind[:20] = 0
    agree(conv, ours, x, EDGES, kind)
    agree(conv, ours, x, EDGES, torch.arange(40) % 2)


@pytest.mark.parametrize("detached", [False, True])
def test_edge_weights_after_a_step_of_a_fused_optimizer(detached: bool) -> None:
    """Fused optimizers change parameters without counting a version."""
    conv, ours = pair_of(CASES["GCN"][0])
    x, weight = torch.randn(N, IN, dtype=torch.float64), nn.Parameter(torch.rand(40, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    passed = weight.detach() if detached else weight
    with torch.no_grad():
        ours(x, EDGES, passed)
    ours(x, EDGES, weight).sum().backward()
    optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(ours(x, EDGES, passed), conv(x, EDGES, passed))


@pytest.mark.parametrize("kind", ["GraphConv", "SimpleConv", "GCNConv"])
def test_edge_weights_of_another_dtype_promote(kind: str) -> None:
    make = {"GraphConv": lambda: pyg.GraphConv(IN, OUT), "SimpleConv": pyg.SimpleConv}.get(
        kind, lambda: pyg.GCNConv(IN, OUT)
    )
    conv = make()
    ours, x = copy.deepcopy(conv), torch.randn(N, IN)
    mpnn.pyg.use(ours)
    weight = torch.rand(40, dtype=torch.float64) if kind == "GCNConv" else torch.randint(0, 4, (40,))
    found, expected = ours(x, EDGES, weight), conv(x, EDGES, weight)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["SAGE", "Transformer", "GIN"])
def test_the_meta_device_gives_shapes(name: str) -> None:
    conv, ours = (module.to("meta") for module in pair_of(CASES[name][0]))
    x, edges = torch.empty(N, IN, dtype=torch.float64, device="meta"), EDGES.to("meta")
    assert ours(x, edges).shape == conv(x, edges).shape


def test_a_message_that_is_set_on_an_instance_runs() -> None:
    for name in ("GCN", "GAT", "SAGE", "GINE"):
        make, kind = CASES[name]
        _, ours = pair_of(make)
        attr = attributes(kind, 40)
        ours.message = lambda *args, **kwargs: 1 / 0  # after it was replaced
        with pytest.raises(ZeroDivisionError):
            ours(torch.randn(N, IN, dtype=torch.float64), EDGES, *(() if attr is None else (attr,)))
        conv = make()
        conv.message = ours.message  # before
        assert mpnn.pyg.use(conv).left == {"": "message set on the instance"}


def test_an_option_of_a_newer_version_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(self: Any, *args: Any, clip: float | None = None, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.clip = clip

    init = pyg.GATConv.__init__
    monkeypatch.setattr(pyg.GATConv, "__init__", newer)
    assert mpnn.pyg.use(pyg.GATConv(2, 2)).replaced
    assert mpnn.pyg.use(pyg.GATConv(2, 2, clip=1.0)).left == {"": "the option clip is not known"}


def test_an_aggregation_that_is_changed_later_runs() -> None:
    conv, ours = pair_of(CASES["SAGE"][0])
    x = torch.randn(N, IN, dtype=torch.float64)
    conv.aggr_module = ours.aggr_module = pyg.MedianAggregation()
    torch.testing.assert_close(ours(x, EDGES), conv(x, EDGES))


def test_a_backend_by_name() -> None:
    """Second derivatives need "edge_list"."""
    conv, ours = pair_of(CASES["GAT"][0])
    assert ours.mpnn_backend == "auto"
    mpnn.pyg.use(ours, backend="edge_list")
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    second = []
    for module in (conv, ours):
        (slope,) = torch.autograd.grad(module(x, EDGES).tanh().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(slope.square().sum(), x)[0])
    torch.testing.assert_close(second[1], second[0])
    mpnn.pyg.use(ours, backend="scan")
    with pytest.raises(ValueError, match="backend 'scan' cannot run this"):
        ours(x, EDGES)
    with pytest.raises(ValueError, match="there is no backend 'edges'; there are auto, "):
        mpnn.pyg.use(ours, backend="edges")


def test_scripts_are_refused() -> None:
    model = Net(pyg.GCNConv)
    report = mpnn.pyg.use(model)
    with pytest.raises(TypeError, match=r"torch\.jit\.script does not compile .* GCNConv: call restore\(\)"):
        torch.jit.script(model)
    report.restore()
    torch.jit.script(model.first)


def test_the_cache_dies_with_the_edges() -> None:
    for name in ("GAT", "RGCN"):
        make, kind = CASES[name]
        _, ours = pair_of(make)
        gc.collect()
        before = len(graphs.cache)
        edges, kinds = EDGES.clone(), attributes(kind, 40)
        x = torch.randn(N, IN, dtype=torch.float64)
        ours(x, edges, *(() if kinds is None else (kinds,))).sum().backward()
        assert len(graphs.cache) > before
        del edges, kinds
        gc.collect()
        assert len(graphs.cache) == before


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda edges: edges.data[0].copy_(edges[0].roll(1)),
    "numpy": lambda edges: edges.numpy()[0].sort(),
    "torch": lambda edges: edges[:, 3].zero_(),
    "a storage": lambda edges: edges.set_(edges.flip(0)),
}


@pytest.mark.parametrize("count", [40, 70_000], ids=["few", "many"])  # many are kept in 32 bits
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_edges_that_are_written_to_are_read_again(write: str, count: int, inference: bool) -> None:
    conv, ours = pair_of(CASES["GAT"][0])
    x = torch.randn(N, IN, dtype=torch.float64)
    with torch.inference_mode(inference):
        edges = random_edges(count=count)
        ours(x, edges)
        WRITES[write](edges)
        torch.testing.assert_close(ours(x, edges), conv(x, edges))
        types = torch.arange(count) % 3
    relational, own = pair_of(CASES["RGCN"][0])
    own(x, edges, types)
    types.numpy()[:] = types.numpy()[::-1].copy()
    torch.testing.assert_close(own(x, edges, types), relational(x, edges, types))


def test_the_cache_counts_the_edges_and_keeps_one_version() -> None:
    _, ours = pair_of(CASES["GCN"][0])
    edges, x = random_edges(count=40_000), torch.randn(N, IN, dtype=torch.float64)
    before = len(graphs.cache), graphs.cache.nbytes
    for _ in range(3):
        ours(x, edges)
        edges[:, 1:] = edges[:, 1:].flip(1)
    assert len(graphs.cache) == before[0] + 1
    assert graphs.cache.nbytes > before[1] + 40_000 * 8  # 32-bit copies and weights
    limit, graphs.cache.limit = graphs.cache.limit, 0
    try:
        ours(x, EDGES)
        assert len(graphs.cache) == 1
    finally:
        graphs.cache.limit = limit


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
        self.first, self.other, self.second = kind(IN, 8), pyg.FeaStConv(8, 8), kind(8, OUT)

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
    assert report.left == {"other": "FeaStConv is not supported"}
    assert "other: left, FeaStConv" in str(report)
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


def test_convolutions_with_further_inputs_agree() -> None:
    """GCN2Conv takes the first features again, SchNet's CFConv distances and their expansion."""
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    weight, distance = attributes("weight", EDGES.shape[1]), torch.rand(EDGES.shape[1], dtype=torch.float64)
    first = pair_of(lambda: pyg.GCN2Conv(IN, 0.1, 0.5, layer=2))
    filters = nn.Sequential(nn.Linear(1, IN), nn.Softplus())
    second = pair_of(lambda: pyg.models.schnet.CFConv(IN, OUT, IN, filters, 5.0))
    for (conv, ours), inputs in ((first, (x.detach(), EDGES, weight)), (second, (EDGES, distance, distance[:, None]))):
        expected, found = conv(x, *inputs), ours(x, *inputs)
        torch.testing.assert_close(found, expected)
        leaves = [x, *conv.parameters()], [x, *ours.parameters()]
        grads = [torch.autograd.grad(y.square().sum(), own) for y, own in zip((expected, found), leaves, strict=True)]
        torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("name", ["LG", "APPNP", "SG", "TAG", "ClusterGCN", "Cheb", "Edge", "GEN, max"])
def test_the_aggregation_runs_here(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, kind = CASES[name]
    _, ours = pair_of(make)
    calls, aggregate = [], convolutions.ops.aggregate

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return aggregate(*args, **options)

    monkeypatch.setattr(convolutions.ops, "aggregate", counted)
    attr = attributes(kind, EDGES.shape[1])
    ours(torch.randn(N, IN, dtype=torch.float64), EDGES, *(() if attr is None else (attr,)))
    assert len(calls) == {"APPNP": 3, "SG": 2, "TAG": 2, "Cheb": 2}.get(name, 1)


@pytest.mark.parametrize("aggr", ["sum", "mean"])
def test_sums_of_edge_convolutions_map_each_node_once(aggr: str) -> None:
    net = nn.Sequential(nn.Linear(2 * IN, 5), nn.ReLU(), nn.Linear(5, OUT))
    conv, ours = pair_of(lambda: pyg.EdgeConv(net, aggr=aggr))
    x, rows = torch.randn(N, IN, dtype=torch.float64, requires_grad=True), []
    hook = ours.nn[1].register_forward_hook(lambda *call: rows.append(call[-1].shape))
    maps = [ours.nn[k].register_full_backward_hook(lambda *_: None) for k in (0, 2)]
    agree(conv, ours, x, EDGES)  # with hooks on its maps, as PyTorch Geometric
    for each in maps:
        each.remove()
    first, last = convolutions.linear, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "linear", lambda z, *more: last.append(len(z)) or first(z, *more))
        agree(conv, ours, x, EDGES)
        agree(conv, ours, torch.randn(2, N, IN, dtype=torch.float64), EDGES)
        agree(conv, ours, x, EdgeIndex(EDGES.contiguous(), sparse_size=(N, N)))
        agree(conv, ours, (x, x[: N - 1]), EDGES[:, EDGES[1] < N - 1])
    assert last[:3] == [N, N, N]
    agree(*pair_of(lambda: pyg.EdgeConv(nn.Sequential(), aggr=aggr)), x, EDGES)
    for module in (conv, ours):
        module.nn[2].forward = lambda z: z[..., :OUT].square()  # as other libraries wrap it
    torch.testing.assert_close(ours(x, EDGES), conv(x, EDGES))
    hook.remove()
    assert {shape[-2] for shape in rows} == {EDGES.shape[1]}


def test_softmax_and_median_as_aggregations() -> None:
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    edges = torch.cat([EDGES, torch.arange(N).expand(2, -1)], 1)  # PyTorch Geometric's median takes no empty last rows
    agree(*pair_of(lambda: pyg.SAGEConv(IN, OUT, aggr=["median", "softmax"])), x, edges)
    learned = pair_of(lambda: pyg.SAGEConv(IN, OUT, aggr="softmax", aggr_kwargs={"learn": True, "channels": IN}))
    agree(*learned, x, edges)
    frozen = {"aggr": "softmax", "aggr_kwargs": {"t": 0.5, "semi_grad": True}}
    agree(*pair_of(lambda: pyg.SAGEConv(IN, OUT, **frozen)), x, edges)
    weighted = pair_of(lambda: pyg.GraphConv(IN, OUT, aggr="softmax"))
    agree(*weighted, x, edges, attributes("weight", edges.shape[1]))
    attention = pyg.GATConv(IN, OUT, aggr="softmax")
    assert list(mpnn.pyg.use(attention).left.values()) == ["aggr = 'softmax'"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mod": "scaled"}, "mod = 'scaled'"),
        ({"num_blocks": 2}, "num_blocks = 2"),
        ({"attention_mode": "multiplicative-self-attention"}, "attention_mode = 'multiplicative-self-attention'"),
        ({"aggr": "mean"}, "aggr = 'mean'"),
    ],
)
def test_other_forms_of_rgat_are_left(options: dict[str, Any], reason: str) -> None:
    conv = pyg.RGATConv(IN, OUT, 3, **options)
    assert list(mpnn.pyg.use(conv).left.values()) == [reason]


def test_rgat_with_features_of_edges() -> None:
    x, attr = torch.randn(N, IN, dtype=torch.float64, requires_grad=True), attributes("vector", EDGES.shape[1])
    for mechanism in ("across-relation", "within-relation"):
        conv, ours = pair_of(
            lambda mechanism=mechanism: pyg.RGATConv(
                IN, OUT, CLASSES, heads=2, edge_dim=EDGE, attention_mechanism=mechanism
            )
        )
        agree(conv, ours, x, EDGES, attributes("class", EDGES.shape[1]), attr)


class OfColumns(nn.Module):
    """The sum of a learned vector for each column of integers, as OGB's AtomEncoder and BondEncoder."""

    def __init__(self, sizes: tuple[int, ...], dim: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(size, dim) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return sum(column(x[:, k]) for k, column in enumerate(self.columns))


class OfMolecules(nn.Module):
    """Integers x [N, 9] and edge_attr [E, 3] through their encoders and two convolutions, pooled by molecule."""

    atoms, bonds = (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2)

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.of_atoms, self.of_bonds = OfColumns(self.atoms, 8), OfColumns(self.bonds, 8)
        make = {
            "GINEConv": lambda: pyg.GINEConv(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))),
            "TransformerConv": lambda: pyg.TransformerConv(8, 8, edge_dim=8),
            "PNAConv": lambda: pyg.PNAConv(8, 8, ["mean", "max"], ["identity"], torch.tensor([0, 3, 5]), edge_dim=8),
        }[kind]
        self.convs = nn.ModuleList(make() for _ in range(2))

    def forward(self, data: Data) -> Tensor:
        h, edges = self.of_atoms(data.x), self.of_bonds(data.edge_attr)
        for conv in self.convs:
            h = h + conv(h, data.edge_index, edges).relu()
        return pyg.global_add_pool(h, data.batch)


@pytest.mark.parametrize("kind", ["GINEConv", "TransformerConv", "PNAConv"])
def test_integers_of_molecules_through_their_encoders(kind: str) -> None:
    model = OfMolecules(kind).double()
    ours = copy.deepcopy(model)
    assert len(mpnn.pyg.use(ours).replaced) == 2
    columns = [torch.randint(size, (N,)) for size in model.atoms]
    bonds = [torch.randint(size, (EDGES.shape[1],)) for size in model.bonds]
    data = Data(torch.stack(columns, 1), EDGES, torch.stack(bonds, 1), batch=torch.arange(N) * 3 // N)
    results = []
    for module in (model, ours):
        out = module(data)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [*module.parameters()])])
    assert results[0][0].shape == (3, 8)
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected)
    graph = graphs.from_edges(EDGES, N, edge_attr=ours.of_bonds(data.edge_attr))
    own = GraphTransformer(8, 4, hidden=8, heads=2, layers=1, edge_dim=8, dropout=0.0).double()
    own(ours.of_atoms(data.x), graph).sum().backward()
    for column in [*ours.of_atoms.columns, *ours.of_bonds.columns]:
        assert column.weight.grad is not None
        assert column.weight.grad.abs().sum() > 0
