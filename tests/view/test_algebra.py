"""The viewer's algebra in JavaScript makes the graphs that Python's makes: the shipped file, run by node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpnn import graphs
from mpnn.graph import reachability
from mpnn.graphs.parse import BUILDERS
from mpnn.view.page import EXAMPLES, RANDOM, SCRIPT, needs_runs

ANSWERS = Path(__file__).parents[2] / "mpnn" / "view" / "viewer" / "test" / "cases.mjs"
NODE = shutil.which("node")

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node")

EVERY_BUILDER = [
    ("complete", 7, 7),
    ("complete()", 3, 9),
    ("causal", 9, 9),
    ("causal", 9, 4),
    ("identity", 9, 4),
    ("window(2)", 9, 9),
    ("window(2, dilation=3)", 17, 17),
    ("window(radius=99, dilation=2)", 12, 9),
    ("strided(1)", 8, 8),
    ("strided(5)", 41, 41),
    ("strided(16)", 70, 40),
    ("fixed(4)", 22, 22),
    ("fixed(4, summary=2)", 22, 13),
    ("fixed(4, 4)", 13, 13),
    ("fixed(4, 0)", 13, 13),
    ("global_nodes(2)", 9, 9),
    ("global_nodes([5, 0, 1])", 9, 9),
    ("global_nodes([])", 3, 3),
    ("prefix(3)", 9, 9),
    ("documents([2, 0, 3, 1,])", 6, 6),
    ("permutation([2, 0, 3, 1])", 4, 4),
    ("memory(2)", 4, 6),
    ("longformer(6)", 20, 20),
    ("longformer(6, globals=2)", 20, 20),
    ("longformer(5, globals=[3, 7])", 20, 20),
    ("grid(3, 5)", 15, 15),
    ("grid(3, 5, connectivity=8)", 15, 15),
    ("neighborhood(4, 5, 1)", 20, 20),
    ("neighborhood(2, 3, 9)", 6, 6),
    ("windows(8, 8, 4)", 64, 64),
    ("windows(7, 9, 4, shift=2)", 63, 63),
    ("pooling(5, 7, 2)", 12, 35),
    ("pooling(5, 7, [2, 3])", 9, 35),
    ("convolution(6, 6, 3)", 16, 36),
    ("convolution(6, 7, [3, 2], stride=2, padding=[1, 0], dilation=[1, 2])", 9, 42),
]
COMBINED = [
    ("causal & window(3)", 20, 20),
    ("graphs.causal() & mpnn.graphs.window(3)", 20, 20),
    ("causal | window(3)", 31, 20),
    ("causal - window(3) - identity", 20, 20),
    ("~causal", 9, 9),
    ("~~window(2)", 9, 9),
    ("complete - ~window(1) & causal | identity", 9, 9),
    ("(causal | window(2)) & ~(identity | global_nodes(1))", 15, 15),
    ("causal & window(8) | global_nodes([0, 3]) - strided(7)", 40, 40),
    ("~complete", 5, 5),
    ("window(1) | window(0, dilation=1) | strided(4) & prefix(6)", 30, 30),
    ("strided(3) & causal | documents([10, 20])", 30, 30),
    ("memory(3) & window(4)", 9, 12),
    ("memory(3) - causal | identity", 9, 12),
    ("(complete - window(3) | causal) & memory(2)", 9, 11),
    ("~memory(2) & window(9, dilation=2)", 9, 11),
    ("windows(6, 6, 3) | windows(6, 6, 3, shift=1)", 36, 36),
]
REFUSED = [
    ("", 4),
    ("causal window(3)", 4),
    ("window", 4),
    ("window()", 4),
    ("window(-1)", 4),
    ("window(1, 0)", 4),
    ("window(1, 2, 3)", 4),
    ("window(radius=1, radius=2)", 4),
    ("window(width=1)", 4),
    ("window([1])", 4),
    ("window(1.5)", 4),
    ("cousal", 4),
    ("mpnn.causal", 4),
    ("sequence.causal", 4),
    ("constructor", 4),
    ("causal &", 4),
    ("(causal", 4),
    ("causal + identity", 4),
    ("documents([2, 3])", 4),
    ("permutation([0, 0])", 2),
    ("permutation([0, 1])", 3),
    ("global_nodes([9])", 4),
    ("grid(2, 3)", 4),
    ("grid(2, 2, connectivity=5)", 4),
    ("fixed(2, 3)", 4),
    ("windows(2, 2, 0)", 4),
    ("causal & window(2)", (4, 6)),
    ("memory(2)", (4, 5)),
]


def ask(questions: list[dict[str, Any]]) -> list[Any]:
    assert NODE is not None
    done = subprocess.run(
        [NODE, str(ANSWERS), str(SCRIPT)], input=json.dumps(questions), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-800:]
    return json.loads(done.stdout)


def test_every_builder_and_operator_has_the_edges_that_python_has() -> None:
    cases = EVERY_BUILDER + COMBINED
    assert {text.split("(")[0] for text, *_ in EVERY_BUILDER} == BUILDERS.keys() - RANDOM
    asked = [{"kind": "runs", "expression": text, "n": n, "num_src": m} for text, n, m in cases]
    for (text, n, m), found in zip(cases, ask(asked), strict=True):
        runs = graphs.parse(text).bind(n, m).runs
        expected = {"ptr": runs.ptr.tolist(), "start": runs.start.tolist(), "stop": runs.stop.tolist()}
        assert found == {"answer": expected}, f"{text} over {n} x {m}"


def test_what_python_refuses_is_refused() -> None:
    sizes = [size if isinstance(size, tuple) else (size, None) for _, size in REFUSED]
    texts = [text for text, _ in REFUSED]
    asked = [
        {"kind": "runs", "expression": t, "n": n} | ({"num_src": m} if m else {})
        for t, (n, m) in zip(texts, sizes, strict=True)
    ]
    for text, (n, m), found in zip(texts, sizes, ask(asked), strict=True):
        with pytest.raises((ValueError, TypeError)):
            graphs.parse(text).bind(n, m).runs  # noqa: B018
        assert set(found) == {"refused"}, f"{text!r}: {found}"


def test_random_edges_come_from_python() -> None:
    texts = ["random(3)", "causal & expander(2) | random(3)", "causal | bigbird(4)"]
    texts += [text for _, text, _ in EXAMPLES if needs_runs(text)]
    for text, found in zip(texts, ask([{"kind": "runs", "expression": text, "n": 8} for text in texts]), strict=True):
        assert f'mpnn view "{text}" --n N' in found["refused"]


@pytest.mark.parametrize(
    "text",
    ["window(2)", "causal", "grid(5, 8)", "fixed(4)", "window(1) | global_nodes(1)", "causal & window(3)"],
)
def test_reach_and_diameter(text: str) -> None:
    n = 40
    runs = graphs.parse(text).bind(n).runs
    asked: list[dict[str, Any]] = [{"kind": "levels", "expression": text, "n": n, "node": i} for i in range(n)]
    *found, diameter = ask([*asked, {"kind": "diameter", "expression": text, "n": n}])
    assert diameter == {"answer": reachability.diameter(runs)}
    level = np.array([one["answer"] for one in found])
    for layers in (0, 1, 2, 3, 40):
        assert np.isclose(((level >= 0) & (level <= layers)).mean(), reachability.fraction(runs, layers))


def test_what_takes_too_long_in_a_browser_is_refused() -> None:
    for text, n in (("strided(8)", 100_000),):
        (found,) = ask([{"kind": "levels", "expression": text, "n": n, "node": 0}])
        assert "use fewer nodes" in found["refused"]


def test_the_drawn_shares_are_those_of_the_edges() -> None:
    n, side = 240, 40
    text = "causal & window(30) | global_nodes(7) | window(99, dilation=50)"
    region = {"row": 0, "column": 0, "rows": n, "columns": n}
    zoomed = {"row": 10, "column": 4, "rows": 20, "columns": 20}
    whole, part = ask(
        [
            {"kind": "coverage", "expression": text, "n": n, "region": region, "width": side, "height": side},
            {"kind": "coverage", "expression": text, "n": n, "region": zoomed, "width": side, "height": side},
        ]
    )
    dense = graphs.parse(text).bind(n).dense().double()
    cells = dense.unflatten(0, (side, -1)).unflatten(2, (side, -1)).mean((1, 3)).numpy()
    assert np.allclose(np.reshape(whole["answer"], (side, side)), cells, atol=1e-6)
    enlarged = dense[10:30, 4:24].repeat_interleave(2, 0).repeat_interleave(2, 1).numpy()
    assert np.allclose(np.reshape(part["answer"], (side, side)), enlarged, atol=1e-6)


def test_a_hundred_thousand_nodes_are_drawn_from_their_runs() -> None:
    text, n, side = "causal & window(2048) | global_nodes(64)", 100_000, 50
    region = {"row": 0, "column": 0, "rows": n, "columns": n}
    question = {"kind": "coverage", "expression": text, "n": n, "region": region, "width": side, "height": side}
    (drawn,) = ask([question])
    assert np.mean(drawn["answer"]) == pytest.approx(graphs.parse(text).bind(n).num_edges / n**2, rel=1e-3)
