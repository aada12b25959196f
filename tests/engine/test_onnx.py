"""Rounds as standard operators: `torch.onnx.export(dynamo=True)` of layers and models over topologies of any length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, engine, graphs
from mpnn.attention import Additive, DotProduct
from mpnn.engine.compile import standard
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.models import GPT, Bert, BertConfig
from mpnn.ops import NodeBias
from mpnn.position import Rotary, Table
from mpnn.round import Round
from mpnn.scores import Dot

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, of its own LeafSpec
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "export.md"
LENGTH = torch.export.Dim("N", min=3, max=64)

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
    "a table": lambda x: {"bias": (BiasTable(x[0, :7, :4, 0], Offset(3)),)},
    "biases of nodes": lambda x: {"bias": (NodeBias(dst=x[..., :1, 1], src=x[..., 2]),)},
    "sigmoid": lambda x: {"normalize": "sigmoid"},
    "none": lambda x: {"normalize": "none"},
    "a sum": lambda x: {"score": None, "normalize": "none"},
    "a mean": lambda x: {"score": None, "normalize": "none", "reduce": "mean"},
}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("name", ROUNDS)
def test_rounds(name: str, heads: int) -> None:
    """Over a graph with rows without edges."""
    from mpnn.aggregate import aggregator

    torch.manual_seed(0)
    graph = (graphs.causal() & graphs.window(3) - graphs.global_nodes(3)).bind(12)
    x, value = torch.randn(2, 12, 4, 8), torch.randn(2, 12, heads, 6)
    given = ROUNDS[name](x)
    score = given.pop("score", Dot(x, torch.randn(2, 12, heads, 8), 0.4, softcap=given.pop("softcap", None)))
    round = Round(graph, value, score, **given | {"reduce": aggregator(given.get("reduce", "sum"))})
    offset = torch.arange(12)[None] - torch.arange(12)[:, None]
    torch.testing.assert_close(standard._attend(round, graph.dense(), offset), engine.run(round)[0])


def layer(graph: Any, **options: Any) -> nn.Module:
    return MessagePassing(graph, "sum", None, DotProduct(32, 4, **options)).eval()


def tokens(n: int) -> Tensor:
    return torch.randint(50, (1, n))


def features(n: int) -> Tensor:
    return torch.randn(2, n, 32)


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


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "GPT, `causal() & window(16)`": (lambda: gpt(graphs.causal() & graphs.window(16)), tokens),
    "GPT, `causal() & longformer(8, globals=1)`": (lambda: gpt(graphs.causal() & graphs.longformer(8, 1)), tokens),
    "BERT, `complete()`": (lambda: Encoder(graphs.complete()), tokens),
    "BERT, `window(8) \\| global_nodes([0])`": (
        lambda: Encoder(graphs.window(8) | graphs.global_nodes([0])),
        tokens,
    ),
    "a layer with rotary positions": (lambda: layer(graphs.prefix(4), position=Rotary(8)), features),
    "a layer with relative positions": (lambda: layer(graphs.window(5), position=Table(4, Offset(5))), features),
    "a mean over a window": (lambda: MessagePassing(graphs.window(3, dilation=2), "mean").eval(), features),
}


def converted(model: nn.Module, x: Tensor) -> Any:
    """The program after the step that torch.onnx.export takes before it writes ONNX."""
    program = torch.export.export(model, (x,), dynamic_shapes=({1: LENGTH},))
    return program.run_decompositions({torch.ops.mpnn.run.default: standard.run})


@pytest.mark.parametrize("name", [n if n.startswith("a ") else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_programs_of_any_length(name: str) -> None:
    make, draw = CASES[name]
    torch.manual_seed(0)
    model = make()
    program = converted(model, draw(20))
    assert not [node for node in program.graph.nodes if "mpnn" in str(node.target)]
    with torch.no_grad():
        for n in (20, 3, 64):
            x = draw(n)
            torch.testing.assert_close(program.module()(x), model(x), rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_runtime(tmp_path: Path) -> None:
    """The table of the page has these rows."""
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    page = PAGE.read_text()
    for name, (make, draw) in CASES.items():
        torch.manual_seed(0)
        model, path = make(), tmp_path / "model.onnx"
        torch.onnx.export(model, (draw(20),), dynamo=True, dynamic_shapes=({1: LENGTH},), verbose=False).save(path)
        session = runtime.InferenceSession(path)
        errors = []
        for n in (20, 3, 64):
            x = draw(n)
            with torch.no_grad():
                right = model(x)
            (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            errors.append(float((torch.from_numpy(found) - right).abs().max()))
        print(f"| {name} | {max(errors):.0e} |")
        assert max(errors) < 2e-6, name
        assert f"| {name} |" in page


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another topology": (lambda: layer(graphs.fixed(4)), r"got fixed\(4\)"),
    "explicit edges": (lambda: layer(graphs.window(2).bind(20)), "explicit edges, or over a graph of one size"),
    "another score": (
        lambda: MessagePassing(graphs.window(2), "sum", None, Additive(32, 8, 4)),
        "additive and other scores",
    ),
    "another aggregator": (lambda: MessagePassing(graphs.window(2), "max"), "the aggregator Max"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    model, x = make().eval(), features(20)
    program = torch.export.export(model, (x,))
    with pytest.raises(Exception, match=message):
        program.run_decompositions({torch.ops.mpnn.run.default: standard.run})
