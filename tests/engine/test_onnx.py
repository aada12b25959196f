"""Rounds as standard operators: `torch.onnx.export(dynamo=True)` of layers and models over topologies of any length."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from mpnn import Graph, MessagePassing, engine, graphs, ops
from mpnn.aggregate import Sum, aggregator
from mpnn.attention import Additive, AdditiveV2, DotProduct
from mpnn.engine.compile import standard
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Flipped, Offset
from mpnn.models import GAT, GCN, GPT, Bert, BertConfig
from mpnn.ops import NodeBias
from mpnn.position import T5, ALiBi, Rotary, Table
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of its own LeafSpec
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "export.md"
LENGTH = Dim("N", min=3, max=64)

TOPOLOGIES = [
    graphs.complete(),
    graphs.causal(),
    graphs.identity(),
    graphs.window(2),
    graphs.window(2, dilation=3),
    graphs.prefix(4),
    graphs.documents([3, 0, 9, 2]),
    graphs.global_nodes(2),
    graphs.global_nodes([1, 9]),
    graphs.longformer(4, globals=1),
    graphs.strided(4),
    graphs.causal() & graphs.window(3) | graphs.global_nodes([0]),
    ~graphs.window(3) - graphs.documents([7, 7]),
    graphs.window(2).with_relation(Offset(2)) & graphs.causal(),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_masks_are_those_of_the_graphs(topology: Any) -> None:
    i = torch.arange(14)
    assert torch.equal(standard.mask(repr(topology), i[:, None], i[None]), topology.bind(14).dense())


def test_other_topologies_are_named() -> None:
    for topology in (
        graphs.fixed(3),
        graphs.causal() | graphs.random(2),
        graphs.documents([3], inner=graphs.prefix(1)),
    ):
        with pytest.raises(NotImplementedError, match=r"complete, causal, identity, .*; got \w+\("):
            standard.mask(repr(topology), torch.arange(3), torch.arange(3))


ROUNDS: dict[str, Callable[..., dict[str, Any]]] = {
    "dot": lambda x: {},
    "softcap": lambda x: {"softcap": 2.0},
    "sinks": lambda x: {"sinks": x[0, :4, 0, 0]},
    "sinks of float64": lambda x: {"sinks": x[0, :4, 0, 0].double()},
    "a table": lambda x: {"bias": (BiasTable(x[0, :7, :4, 0], Offset(3)),)},
    "a table of float64": lambda x: {"bias": (BiasTable(x[0, :7, :4, 0].double(), Offset(3)),)},
    "biases of nodes": lambda x: {"bias": (NodeBias(dst=x[..., :1, 1], src=x[..., 2]),)},
    "biases of nodes of float64": lambda x: {"bias": (NodeBias(dst=x[..., :1, 1].double(), src=x[..., 2].double()),)},
    "sigmoid": lambda x: {"normalize": "sigmoid"},
    "none": lambda x: {"normalize": "none"},
    "a sum": lambda x: {"score": None, "normalize": "none"},
    "a mean": lambda x: {"score": None, "normalize": "none", "reduce": "mean"},
}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds(name: str, heads: int) -> None:
    """Over a graph with rows without edges."""
    torch.manual_seed(0)
    graph = (graphs.causal() & graphs.window(3) - graphs.global_nodes(3)).bind(12)
    x, value = torch.randn(2, 12, 4, 8), torch.randn(2, 12, heads, 6)
    given = ROUNDS[name](x)
    score = given.pop("score", Dot(x, torch.randn(2, 12, heads, 8), 0.4, softcap=given.pop("softcap", None)))
    round = Round(graph, value, score, **given | {"reduce": aggregator(given.get("reduce", "sum"))})
    offset = torch.arange(12)[None] - torch.arange(12)[:, None]
    torch.testing.assert_close(standard._attend(round, graph.dense(), offset), engine.run(round)[0])
    over_edges(round)


def over_edges(round: Round) -> None:
    """A round over its edges as an export has them."""
    sizes = round.graph.num_dst, round.graph.num_src
    stand_in: Any = standard.Sizes((*sizes, round.graph.num_edges))
    stand_in.csr = standard._Edges(round.graph.edge_index, *sizes)
    with torch.no_grad():
        found = standard._over_edges(round.with_fields(graph=stand_in))
    torch.testing.assert_close(found, engine.run(round)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_rounds_over_edges(reduce: str, batch: tuple[int, ...]) -> None:
    """With vectors of edges and the scores that topologies do not have; edges repeat, and node 0 has none."""
    torch.manual_seed(1)
    src, dst = torch.randint(11, (40,)), torch.randint(1, 7, (40,))
    graph = graphs.from_edges(torch.stack([src, dst]), num_src=11, num_dst=7)
    query, key, value = (torch.randn(*batch, n, 4, 8) for n in (7, 11, 11))
    edge, options = torch.randn(40, 4, 8), {"reduce": aggregator(reduce)}
    scores = {
        "a key of edges": Dot(query, key, 0.4, edge),
        "additive": AdditiveScore(query[..., 0], key[..., 0], LeakyReLU(0.2), edge[..., 0]),
        "additive (v2)": AdditiveV2Score(query, key, torch.randn(4, 8), torch.tanh, edge),
    }
    for score in scores.values():
        over_edges(Round(graph, value, score, edge_value=edge, bias=(edge[..., 1],), **options))
    over_edges(Round(graph, value, None, normalize="none", edge_value=edge, **options))


def layer(graph: Any, **options: Any) -> nn.Module:
    return MessagePassing(graph, "sum", None, DotProduct(32, 4, **options)).eval()


def tokens(n: int) -> tuple[Tensor, ...]:
    return (torch.randint(50, (1, n)),)


def features(n: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, n, 32),)


def with_edges(n: int) -> tuple[Tensor, ...]:
    """Features, and the edges of a graph with repeated edges, loops and, from 2 nodes on, some without in-neighbors."""
    return torch.randn(n, 32), torch.stack([torch.randint(n, (4 * n,)), torch.randint(1, n, (4 * n,))])


def gpt(graph: Any) -> nn.Module:
    return GPT(vocabulary=50, dim=32, heads=4, layers=2, graph=graph, context=64).eval()


class Encoder(nn.Module):
    """The states of Bert alone, as ONNX returns tensors."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        config = BertConfig(vocabulary=50, context=64, dim=32, heads=4, layers=2)
        self.bert = Bert(config, graph, pooler=False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.bert(x).last


class Layers(nn.Module):
    """The features that each of several layers returns, over their own graphs or over edges that are an input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers).eval()

    def forward(self, x: Tensor, edges: Tensor | Graph | None = None) -> tuple[Tensor, ...]:
        graph = graphs.from_edges(edges, x.shape[-2]) if isinstance(edges, Tensor) else edges
        return tuple([layer(x, graph) for layer in self.layers])


TOKENS, FEATURES, NODES = {1: LENGTH}, {1: LENGTH}, ({0: Dim("N", min=2)}, {1: Dim("E", min=2)})
Case = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], Any]
CASES: dict[str, Case] = {
    "GPT, `causal() & window(16)`": (lambda: gpt(graphs.causal() & graphs.window(16)), tokens, (TOKENS,)),
    "GPT, `causal() & longformer(8, globals=1)`": (
        lambda: gpt(graphs.causal() & graphs.longformer(8, 1)),
        tokens,
        (TOKENS,),
    ),
    "BERT, `complete()`": (lambda: Encoder(graphs.complete()), tokens, (TOKENS,)),
    "BERT, `window(8) \\| global_nodes([0])`": (
        lambda: Encoder(graphs.window(8) | graphs.global_nodes([0])),
        tokens,
        (TOKENS,),
    ),
    "layers: rotary, ALiBi's, T5's and relative positions, a mean over a window": (
        lambda: Layers(
            layer(graphs.prefix(4), position=Rotary(8)),
            layer(graphs.causal(), position=ALiBi(4)),
            layer(graphs.causal() & graphs.window(4), position=T5(4)),
            layer(graphs.window(5), position=Table(4, Offset(5))),
            MessagePassing(graphs.window(3, dilation=2), "mean"),
        ),
        features,
        (FEATURES,),
    ),
    "GCN of 2 layers, edges": (lambda: Layers(GCN(32, 7)), with_edges, NODES),
    "GAT of 2 layers, edges": (lambda: Layers(GAT(32, 7)), with_edges, NODES),
    "layers: sum, mean, max, min, dot product, additive (v2), edges": (
        lambda: Layers(
            *[MessagePassing(None, how) for how in ("sum", "mean", "max", "min")],
            layer(None),
            MessagePassing(None, "max", None, AdditiveV2(32, 8, 4)),
        ),
        with_edges,
        NODES,
    ),
}


def converted(model: nn.Module, inputs: tuple[Tensor, ...], shapes: Any) -> Any:
    """The program after the step that torch.onnx.export takes before it writes ONNX."""
    program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    return program, ops.standard_operators(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("layers")])
def test_programs_of_any_length(name: str) -> None:
    make, draw, shapes = CASES[name]
    torch.manual_seed(0)
    model = make()
    program, standardized = converted(model, draw(20), shapes)
    assert not [node for node in standardized.graph.nodes if "mpnn" in str(node.target)]
    with torch.no_grad():
        for n in (20, 3, 64):
            inputs = draw(n)
            torch.testing.assert_close(program.module()(*inputs), model(*inputs))
            torch.testing.assert_close(standardized.module()(*inputs), model(*inputs), rtol=2e-5, atol=2e-5)


def test_edges_that_change_between_calls() -> None:
    """A saved program takes other edges in each call, in the same tensor too, names a wrong one, and is differentiated;
    what does not have an edge in a call, has zeros."""
    torch.manual_seed(0)
    model = Layers(layer(None), MessagePassing(None, "mean"))
    program = torch.export.export(model, with_edges(20), dynamic_shapes=NODES).module()
    (x, edges), expected = with_edges(12), None
    for change in range(3):
        edges[:, change] = 7
        assert expected is None or not torch.equal(expected[0], model(x, edges)[0])
        expected = model(x, edges)
        torch.testing.assert_close(program(x, edges), expected)
        x.requires_grad_()
        grads = [torch.autograd.grad(run(x, edges)[0].square().sum(), x)[0] for run in (program, model)]
        torch.testing.assert_close(*grads)
    with torch.inference_mode():
        torch.testing.assert_close(program(x, edges.int().long()), model(x, edges))
    edges[0, 3] = 99
    with pytest.raises(IndexError, match=r"edge 3 \(99 -> "):
        program(x, edges)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime(tmp_path: Path) -> None:
    """The tables of the page have these rows."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    page, options, rows = PAGE.read_text(), runtime.SessionOptions(), {}
    options.intra_op_num_threads = 1
    for name, (make, draw, shapes) in CASES.items():
        torch.manual_seed(0)
        model, path = make(), tmp_path / "model.onnx"
        torch.onnx.export(model, draw(20), dynamo=True, dynamic_shapes=shapes, verbose=False).save(path)
        session = runtime.InferenceSession(path, options)
        names = [node.name for node in session.get_inputs()]

        def run(*inputs: Tensor, session: Any = session, names: Any = names) -> list[Any]:
            return session.run(None, dict(zip(names, [x.numpy() for x in inputs], strict=True)))

        errors = []
        with torch.no_grad():
            for n in (20, 3, 64, *[2708] * (shapes is NODES)):
                inputs = draw(n)
                right, found = model(*inputs), run(*inputs)
                right = right if isinstance(right, tuple) else (right,)
                errors += [float((torch.from_numpy(f) - r).abs().max()) for f, r in zip(found, right, strict=True)]
        print(f"| {name} | {max(errors):.0e} |")
        rows[name] = max(errors)
    assert max(rows.values()) < 1e-5, rows
    assert [name for name in rows if f"| {name} |" not in page] == []


REFUSED: dict[str, tuple[Callable[[], Layers], Callable[[int], tuple[Tensor, ...]], str]] = {
    "another topology": (lambda: Layers(layer(graphs.fixed(4))), features, r"got fixed\(4\)"),
    "a graph that is held": (lambda: Layers(layer(graphs.window(2).bind(20))), features, "a graph that it holds: take"),
    "another score": (
        lambda: Layers(MessagePassing(graphs.window(2), "sum", None, Additive(32, 8, 4))),
        features,
        "additive and other scores",
    ),
    "another aggregator": (lambda: Layers(MessagePassing(graphs.window(2), "max")), features, "the aggregator Max"),
    "another aggregator of edges": (lambda: Layers(MessagePassing(None, "var")), with_edges, "the aggregator Var"),
}


def of_nodes(*shape: int) -> Tensor:
    return torch.zeros(4, *shape)


def with_own_reduce() -> Sum:
    own = Sum()
    own.reduce = lambda messages, index: messages[:1]  # type: ignore[method-assign]
    return own


BY_OFFSET = BiasTable(torch.zeros(3, 2), Offset(1))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, None),
        ({"score": None}, None),
        ({"normalize": "sigmoid"}, None),
        ({"reduce": aggregator("mean")}, None),
        ({"bias": (BY_OFFSET, BY_OFFSET)}, None),
        ({"dst_bias": of_nodes(2), "sinks": torch.zeros(2)}, None),
        ({"score": Dot(of_nodes(2, 3), of_nodes(2, 3), 1.0, softcap=1.0)}, None),
        ({"score": Dot(of_nodes(2, 3), of_nodes(2, 3), 1.0, torch.zeros(16, 2, 3))}, "additive and other scores"),
        ({"score": AdditiveScore(of_nodes(2), of_nodes(2), LeakyReLU())}, "additive and other scores"),
        ({"bias": (torch.zeros(16, 2),)}, "biases of edges other than a table by offset"),
        ({"bias": (BY_OFFSET, BiasTable(torch.zeros(3, 2)))}, "biases of edges other than a table by offset"),
        ({"bias": (BiasTable(torch.zeros(5, 2), Flipped(Offset(1))),)}, "biases of edges other than a table by offset"),
        ({"bias": (EmbeddingTable(torch.zeros(3, 2), Offset(1)),)}, "biases of edges other than a table by offset"),
        ({"edge_value": torch.zeros(16, 2, 3)}, "vectors of edges"),
        ({"normalize": "softmax_dst"}, "softmax over destinations"),
        ({"mix_logits": torch.eye(2)}, "heads that mix"),
        ({"mix_weights": torch.eye(2)}, "heads that mix"),
        ({"dropout": 0.5}, r"dropout \(call eval\(\) first\)"),
        ({"reduce": aggregator("max")}, "the aggregator Max"),
        ({"reduce": with_own_reduce()}, "the aggregator Sum"),
        ({"return_weights": True}, "returned weights or log-sum-exps"),
        ({"return_lse": True}, "returned weights or log-sum-exps"),
        ({"return_state": True}, "recurrences"),
    ],
    ids=lambda x: ", ".join(x) or "nothing" if isinstance(x, dict) else str(x),
)
def test_what_is_served_over_topologies(changes: dict[str, Any], what: str | None) -> None:
    given = Round(graphs.complete().bind(4), of_nodes(2, 3), Dot(of_nodes(2, 3), of_nodes(2, 3), 1.0))
    given = given.with_fields(**changes)
    if what is None:
        standard._refuse(given)
    else:
        with pytest.raises(NotImplementedError, match=rf"over topologies; this one has {what}$"):
            standard._refuse(given)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, draw, message = REFUSED[name]
    with pytest.raises(Exception, match=message):
        converted(make(), draw(20), None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_program_in_cpp_runs_an_encoder(tmp_path: Path) -> None:
    """Without Python: a package of AOTInductor, over a structured graph, at a length that was not exported."""
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("AOTInductor and the program need g++ or clang++")
    torch.manual_seed(0)
    program, package = tmp_path / "run_encoder", tmp_path / "encoder.pt2"
    source = Path(__file__).parents[1] / "support" / "run_encoder.cpp"
    (libraries,) = library_paths("cpu")
    build = [compiler, "-std=c++20", "-O0", source, *[f"-I{path}" for path in include_paths("cpu")], "-o", program]
    building = subprocess.Popen(
        [*build, f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    )
    model = Encoder(graphs.window(8) | graphs.global_nodes([0])).requires_grad_(False)
    _, standardized = converted(model, tokens(20), (TOKENS,))
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    torch._inductor.aoti_compile_and_package(standardized, package_path=str(package), inductor_configs=options)
    assert building.wait() == 0
    (x,) = tokens(33)
    done = subprocess.run([program, package, *map(str, x[0].tolist())], capture_output=True, text=True, check=True)
    found = torch.tensor([[float(number) for number in row.split()] for row in done.stdout.splitlines()])
    torch.testing.assert_close(found[None], model(x), rtol=1e-5, atol=1e-5)


def test_edges_of_a_program_need_sizes() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return MessagePassing(graphs.from_edges(edges), "sum")(x)

    with pytest.raises(Exception, match="from_edges needs num_nodes, or num_src and num_dst"):
        torch.export.export(Net(), with_edges(20))
