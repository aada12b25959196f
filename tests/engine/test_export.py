"""`torch.export`: a saved program holds its graph, so another process computes the same; what it cannot hold is
refused when it is exported."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import mpnn
from mpnn import MessagePassing, Topology, aggregate, graphs
from mpnn.attention import AdditiveV2, Degree, DotProduct, Typed
from mpnn.engine.compile.graph_tensor import graph_from_tensor
from mpnn.engine.compile.names import describe, restore
from mpnn.graph.handles import resolve
from mpnn.graph.relations import Flipped, GridOffset, KernelOffset, Offset
from mpnn.models import GPT
from mpnn.position import Rotary, Table

WIDTH, NODES = 16, 9
ANY_LENGTH = {1: Dim("nodes", min=2, max=64)}


def _first_half(i: Any, num_src: int, divisor: int) -> Any:
    return [(0, i // divisor + 1)]


USERS = Topology.of(_first_half, 2)
EDGES = torch.randint(0, NODES, (2, 30), generator=torch.Generator().manual_seed(1))


def layer(graph: Any, **attention: Any) -> MessagePassing:
    return MessagePassing(graph, "sum", None, DotProduct(WIDTH, 2, **attention))


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a topology": (lambda: layer(graphs.causal() & graphs.window(2)), None),
    "a topology, any length": (lambda: layer(graphs.causal() & graphs.window(2), position=Rotary(8)), ANY_LENGTH),
    "a bound topology": (lambda: layer(graphs.prefix(3).bind(NODES)), None),
    "cliques": (lambda: layer(graphs.documents([4, 5]).bind(NODES)), None),
    "a user's topology at one length": (lambda: layer(USERS), None),
    "explicit": (lambda: layer(graphs.from_edges(EDGES, NODES)), None),
    "explicit, with types": (
        lambda: MessagePassing(
            graphs.from_edges(EDGES, NODES, edge_type=EDGES.sum(0) % 3), "mean", None, Typed(WIDTH, 4, relations=3)
        ),
        None,
    ),
    "explicit, with places": (
        lambda: layer(
            graphs.from_edges(EDGES, NODES).with_positions(*[torch.arange(NODES) * 3] * 2), position=Rotary(8)
        ),
        None,
    ),
    "weights by degree": (lambda: MessagePassing(graphs.window(2), "sum", None, Degree(WIDTH, 4)), None),
    "a table by relation": (
        lambda: layer(graphs.neighborhood(3, 3, 1), position=Table(2, GridOffset(width=3, rows=1, columns=1))),
        None,
    ),
    "a learned aggregator": (
        lambda: MessagePassing(graphs.window(2), aggregate.Softmax(2.0, learn=True), None, None),
        ANY_LENGTH,
    ),
    "an activation": (
        lambda: MessagePassing(graphs.window(2), "sum", None, AdditiveV2(WIDTH, 4, 2, activation=nn.PReLU())),
        ANY_LENGTH,
    ),
}

CHILD = """
import sys, torch, mpnn
from pathlib import Path

others = [mpnn.graphs.window(radius) for radius in range(200)]  # graphs that this process numbers first
others += [topology.bind(9) for topology in others]
for path in sorted(Path(sys.argv[1]).glob("*.pt2")):
    program = torch.export.load(path).module()
    inputs = torch.load(path.with_suffix(".inputs"))
    torch.save([program(x).detach() for x in inputs], path.with_suffix(".outputs"))
"""


def inputs(dynamic: Any) -> list[Tensor]:
    lengths = (NODES,) if dynamic is None else (NODES, 23)
    return [torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in lengths]


@pytest.mark.slow
def test_another_process_computes_the_same(tmp_path: Path) -> None:
    here = []
    for number, (make, dynamic) in enumerate(PROGRAMS.values()):
        torch.manual_seed(number)
        model, given, path = make(), inputs(dynamic), tmp_path / f"{number:02}.pt2"
        program = torch.export.export(model, (given[0],), dynamic_shapes=dynamic and (dynamic,))
        torch.export.save(program, path)
        torch.save(given, path.with_suffix(".inputs"))
        here.append([model(x).detach() for x in given])
    root = Path(mpnn.__file__).parents[1]
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=True, cwd=root, capture_output=True)
    for number, (name, expected) in enumerate(zip(PROGRAMS, here, strict=True)):
        found = torch.load(tmp_path / f"{number:02}.outputs")
        torch.testing.assert_close(found, expected, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.sample(2)
def test_a_loaded_model_serves_every_length_and_can_be_trained(strict: bool) -> None:
    model = GPT(23, WIDTH, 2, 1, graphs.causal() & graphs.window(3), context=32)
    tokens = torch.randint(0, 23, (2, NODES))
    shapes = {"tokens": {1: Dim("nodes", min=2, max=32)}}
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (tokens,), dynamic_shapes=shapes, strict=strict), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (NODES, 20):
        tokens = torch.randint(0, 23, (2, n))
        expected, found = model(tokens), loaded(tokens)
        torch.testing.assert_close(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
    gradients = [{name: p.grad for name, p in one.named_parameters()} for one in (model, loaded)]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_layers_over_one_graph_share_it_when_loaded() -> None:
    graph = graphs.from_edges(EDGES, NODES)
    program = torch.export.export(nn.Sequential(layer(graph), layer(graph)), (torch.randn(NODES, WIDTH),))
    (token,) = (x for x in program.constants.values() if x.dtype == torch.uint8)
    twin = token.clone()
    assert graph_from_tensor(token) is graph_from_tensor(twin) is graph_from_tensor(token)
    torch.testing.assert_close(graph_from_tensor(token).edge_index, EDGES)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.sample(2)
def test_exporting_leaves_eager_calls_alone(strict: bool) -> None:
    model, x = MessagePassing(graphs.window(3), "sum", None, Degree(WIDTH, 4)), torch.randn(NODES, WIDTH)
    torch.export.export(model, (x,), strict=strict)
    assert type(graphs.window(3).bind(NODES).edge_index) is Tensor
    assert type(model(x)) is Tensor


class ByParity(Offset):
    """A user's relation."""


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a user's aggregator": (
        lambda: MessagePassing(graphs.window(2), lambda m, index: aggregate.segment_sum(m, index), None, None),
        "torch.export cannot save .*<lambda>: .*no code of your own",
    ),
    "a user's activation": (
        lambda: MessagePassing(graphs.window(2), "sum", None, AdditiveV2(WIDTH, 4, 2, activation=lambda x: 2 * x)),
        "torch.export cannot save .*<lambda>: ",
    ),
    "a user's relation": (
        lambda: layer(graphs.window(2), position=Table(2, ByParity(3))),
        "torch.export cannot save ByParity: ",
    ),
    "a graph by a user's relation": (
        lambda: layer(graphs.window(2).with_relation(ByParity(3)), position=Table(2, None, 7)),
        r"cannot save a graph with edge types from ByParity\(clip=3\); pass them as data",
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.covering
def test_what_no_file_can_hold_is_refused_at_export(name: str, strict: bool) -> None:
    make, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        torch.export.export(make(), (torch.randn(NODES, WIDTH),), strict=strict)


@pytest.mark.parametrize("strict", [False, True])
def test_a_users_topology_is_refused_at_every_length(strict: bool) -> None:
    x, shapes = torch.randn(2, NODES, WIDTH), (ANY_LENGTH,)
    with pytest.raises(ValueError, match=r"cannot save first_half\(2\) for every length: its rule is not a builder"):
        torch.export.export(layer(USERS), (x,), dynamic_shapes=shapes, strict=strict)


def test_numbers_of_other_processes_mean_nothing_here() -> None:
    """Programs saved by other means than torch.export hold numbers."""
    kept = [graphs.window(radius) for radius in range(50)]
    for number in range(50):
        with pytest.raises(RuntimeError, match="a graph that no longer exists"):
            resolve(torch.tensor(number))
    assert resolve(kept[7].token) is kept[7]


OBJECTS = [
    Offset(3),
    GridOffset(width=4, rows=1, columns=2),
    Flipped(KernelOffset(4, 2, (3, 3), (2, 2), (0, 1))),
]


@pytest.mark.parametrize("relation", OBJECTS, ids=repr)
def test_relations_are_read_back(relation: Any) -> None:
    text = describe(relation)
    assert text is not None
    assert restore(text) == relation


def test_aggregators_are_read_back() -> None:
    given = aggregate.PNA(("mean", aggregate.Std(), aggregate.PowerMean(2.0, eps=0.001, limit=9.0)), ("identity",), 1.5)
    text = describe(given)
    assert text is not None
    assert describe(restore(text)) == text
    for argument in ("limit=9.0", "eps=0.001", "average_log_degree=1.5"):
        assert argument in text


@pytest.mark.parametrize(
    "text", ["open('x')", "torch.nn.Module()", "nn.Linear(2, 2)", "__import__('os')", "F.a.b", "F.a", "os.relu"]
)
def test_text_that_names_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="export it again"):
        restore(text)
