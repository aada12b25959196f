"""Topologies as text: what can be written, where a mistake is, and that nothing in the text is ever run."""

import builtins
import sys
from typing import Any

import numpy as np
import pytest

from mpnn import Topology, graphs
from mpnn.graphs.parse import BUILDERS

causal, window, identity = graphs.causal(), graphs.window(2), graphs.identity()


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("causal", causal),
        ("causal()", causal),
        ("  window( 2 )\n", window),
        ("window(radius=2)", window),
        ("window(2, dilation=3)", graphs.window(2, 3)),
        ("causal & window(2)", causal & window),
        ("causal\n  & window(2)", causal & window),
        ("causal | window(2) & identity", causal | (window & identity)),
        ("(causal | window(2)) & identity", (causal | window) & identity),
        ("causal - identity - window(2)", (causal - identity) - window),
        ("causal & window(2) - identity", causal & (window - identity)),
        ("~causal & window(2)", ~causal & window),
        ("~(causal & window(2))", ~(causal & window)),
        ("global_nodes(3)", graphs.global_nodes(3)),
        ("global_nodes([0, 7])", graphs.global_nodes([0, 7])),
        ("documents((2, 3))", graphs.documents([2, 3])),
        ("longformer(8, globals=[0, 5])", graphs.longformer(8, globals=[0, 5])),
        ("bigbird(block=1, seed=3) # as published", graphs.bigbird(block=1, seed=3)),
        ("memory(0x10)", graphs.memory(16)),
        ("window(1_000)", graphs.window(1000)),
        ("graphs.causal() & mpnn.graphs.window(2)", causal & window),
        ("graphs.causal", causal),
    ],
)
def test_text_gives_the_topology(text: str, topology: Topology) -> None:
    assert graphs.parse(text) == topology


def test_every_topology_of_the_builders_can_be_written() -> None:
    homes = {name: getattr(thing, "__module__", "") for name, thing in vars(graphs).items()}
    public = {name for name, home in homes.items() if home.startswith("mpnn.graphs.")}
    from_data = {"as_topology", "listed", "batch", "chunks", "knn", "lsh", "parse", "register"}
    from_data |= {"HeteroGraph", "HeteroSample", "sample", "absent_edges", "edges_into", "random_walk_neighbors"}
    from_data |= {"radius", "edge_vectors", "line_graph", "farthest", "icosphere", "icosphere_points"}
    from_data |= {"blocks", "chosen", "tree", "rollouts"}
    from_data |= {"CompressedGraph", "TemporalGraph", "compressed", "open_csr", "write_csr"}
    others = {name for name in public if name.startswith(("from_", "to_"))}
    assert set(BUILDERS) == public - from_data - others


@pytest.mark.parametrize(
    ("text", "column", "why"),
    [
        ("foo", 1, "there is no topology 'foo'; there are bigbird, causal, complete"),
        ("causal | foo(2)", 10, "there is no topology 'foo'"),
        ("causal & window(-1)", 10, "radius must be at least 0; got -1"),
        ("window", 1, "missing 1 required positional argument: 'radius'"),
        ("window(1, 2, 3)", 1, "from 1 to 2 positional arguments but 3 were given"),
        ("window(width=2)", 1, "window takes radius, dilation; got width"),
        ("window(radius=1, radius=2)", 1, "an argument is named twice"),
        ("window(1.5)", 8, "arguments are integers or lists of integers"),
        ("window(True)", 8, "arguments are integers or lists of integers"),
        ("window(1 + 1)", 8, "arguments are integers or lists of integers"),
        ("window(**{})", 10, "arguments are integers or lists of integers"),
        ("documents([2, [x]])", 16, "there is no topology 'x'"),
        ("window(99999999999999999999)", 1, r"radius must not exceed 2\*\*61"),
        ("causal | 5", 10, r"expected a topology such as window\(256\), or two joined by \| & -"),
        ("causal + identity", 1, "expected a topology"),
        ("causal and identity", 1, "expected a topology"),
        ("not causal", 1, "expected a topology"),
        ("causal if 1 else identity", 1, "expected a topology"),
        ("lsh(2, 4)", 1, "there is no topology 'lsh'"),
        ("é | foo", 1, "there is no topology 'é'"),
        ("causal | ω(2)", 10, "there is no topology 'ω'"),
        ("random(2, seed=-1) | ωω", 1, "seed must be at least 0; got -1"),
    ],
)
def test_a_mistake_is_found_where_it_is(text: str, column: int, why: str) -> None:
    with pytest.raises(ValueError, match=rf"cannot read .* at column {column}\b.*{why}"):
        graphs.parse(text)


@pytest.mark.parametrize("text", ["", "causal &", "window(", "causal causal", "causal) & (window(2)", "window(2"])
def test_text_that_is_no_expression_is_refused_with_a_column(text: str) -> None:
    # which column is Python's to say, and not every version says the same
    with pytest.raises(ValueError, match=r"cannot read '.*' at column [1-9]\d*: "):
        graphs.parse(text)


def test_columns_count_characters_after_white_space_is_put_in_order() -> None:
    with pytest.raises(ValueError, match=r"cannot read 'causal\(\) & foo' at column 12 \('foo'\)"):
        graphs.parse("  causal()  &\n foo")
    with pytest.raises(ValueError, match=r"at column 13 "):
        graphs.parse("causal & (~(é))")


HOSTILE = [
    "__import__('os').system('true')",
    "causal.__class__.__bases__",
    "causal().bind(4)",
    "(lambda: causal)()",
    "causal()()",
    "[causal][0]",
    "(x := causal)",
    "window(__import__('os').getpid())",
    "window((lambda: 1)())",
    "window([1 for _ in range(9)])",
    "f'{causal}'",
    "exec('1')",
    "print",
    "__builtins__",
    "parse('causal')",
    "Topology.of(print)",
    "window(9**9**9**9)",
    "causal; causal",
    "import os",
    "window(1)\x00",
    "await causal",
    "`causal`",
    "window(" + "9" * 5000 + ")",
    "~" * 100_000 + "causal",
    "(" * 100_000,
    " | ".join(["causal"] * 50_000),
    "window(" + "[" * 50 + "]" * 50 + ")",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20])
def test_hostile_text_is_refused_and_nothing_is_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("text was run")

    with monkeypatch.context() as patch:
        for name in ("eval", "exec", "__import__"):
            patch.setattr(builtins, name, forbidden)
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the sentences differ with Python's version
            graphs.parse(text)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("given", [None, 5, b"causal", causal])
def test_only_text_is_read(given: Any) -> None:
    with pytest.raises(TypeError, match="a topology is written as text; got"):
        graphs.parse(given)


def _checkerboard(i: Any, num_src: int, size: int = 1, kind: str = "black") -> list[tuple[Any, Any]]:
    return [(j, np.where((i + j) // size % 2 == (kind == "white"), j + 1, j)) for j in range(num_src)]


def board(size: int) -> Topology:
    return Topology.of(_squares, size)


def _squares(i: Any, num_src: int, size: int) -> list[tuple[Any, Any]]:
    return _checkerboard(i, num_src, size)


@pytest.fixture
def checkerboard(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys.modules["mpnn.graphs.parse"], "_REGISTERED", {})

    def checkerboard(size: int = 1, kind: str = "black") -> Topology:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be at least 1; got {size!r}")
        return Topology.of(_checkerboard, size, kind)

    assert graphs.register(checkerboard) is checkerboard
    return checkerboard


@pytest.mark.parametrize("text", ["checkerboard", "checkerboard(2)", "~checkerboard(2, 'white') & causal()"])
def test_a_registered_builder_is_part_of_the_language(text: str, checkerboard: Any) -> None:
    topology = graphs.parse(text)
    assert graphs.parse(repr(topology)) == topology
    assert (graphs.parse("checkerboard(2, kind='white')").bind(5).dense() == ~checkerboard(2).bind(5).dense()).all()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("checkerboard(0)", "size must be at least 1; got 0"),
        ("checkerboard(1, 2, 3)", "takes from 0 to 2 positional arguments but 3 were given"),
        ("checkerboard(print)", "there is no topology 'print'"),
        ("checkerboard(b'1')", "arguments are numbers, text, True, False, None, topologies or lists of these"),
        ("window('1')", "arguments are integers or lists of integers"),
        (
            "checker",
            r"there is no topology 'checker' \(did you mean checkerboard\?\); there are .*; to use your own",
        ),
    ],
)
def test_what_a_registered_builder_refuses_is_refused_with_a_column(text: str, why: str, checkerboard: Any) -> None:
    with pytest.raises(ValueError, match=rf"cannot read .* at column \d+ .*{why}"):
        graphs.parse(text)


def test_a_builder_that_returns_something_else_is_refused(checkerboard: Any) -> None:
    def odd() -> int:
        return 1

    graphs.register(odd)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"test_parse\..*odd returned int, not a Topology"):
        graphs.parse("odd")


def test_a_name_has_one_builder(checkerboard: Any) -> None:
    def window(radius: int) -> Topology:
        return graphs.causal()

    with pytest.raises(ValueError, match=r"'window' is the name of mpnn\.graphs\.sequence\.window; rename"):
        graphs.register(window)
    with pytest.raises(ValueError, match="must be an identifier; got '<lambda>'"):
        graphs.register(lambda: graphs.causal())
    with pytest.raises(ValueError, match="its rule is not named _board: rename the rule"):
        graphs.register(board)
    graphs.register(checkerboard)  # as a module that is loaded again does
    graphs.register(graphs.causal)
