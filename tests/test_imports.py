"""Who may import whom: arrows between rooms point one way, and the core needs none of the extras."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mpnn

ROOT = Path(mpnn.__file__).parent

# What each room may import, besides itself: only rooms above it, so the order of this table is a proof of no cycles.
ROOMS: dict[str, set[str]] = {
    "capacity": set(),
    "runs": {"capacity"},
    "relation": set(),
    "edges": set(),
    "handles": set(),
    "reach": {"runs"},
    "reorder": set(),
    "graph": {"runs", "relation", "edges", "reach", "reorder", "handles", "capacity"},
    "bind_cache": {"edges", "graph"},
    "topology": {"runs", "relation", "graph", "handles", "bind_cache"},
    "random": set(),
    "aggregate": set(),
    "scores": {"edges", "relation", "graph", "aggregate"},
    "check": {"graph", "topology", "scores"},
    "graphs": {"runs", "relation", "edges", "graph", "topology", "bind_cache", "check"},
    "kernels": set(),
    "dropout": {"random", "kernels"},
    "update": {"dropout", "check"},
    "position": {"relation", "graph", "scores"},
    "attention": {"relation", "graph", "graphs", "scores", "check", "position"},
    "decoding": {"runs", "graph", "topology", "attention"},
    "tiling": {"runs"},
    "backends": {"runs", "relation", "edges", "graph", "random", "aggregate", "scores", "tiling", "kernels"},
    "plan": {"scores", "backends"},
    "eager": {"random", "scores", "check", "plan"},
    "compiled": {
        *("runs", "relation", "graph", "topology", "graphs", "handles", "aggregate", "scores", "check", "eager"),
    },
    "ops": {"graph", "topology", "aggregate", "scores", "check", "eager", "compiled"},
    "message_passing": {
        *("graph", "topology", "aggregate", "update", "scores", "attention", "decoding", "check"),
        *("eager", "compiled", "ops"),
    },
    "data": set(),
    "plot": {"runs", "graph", "topology"},
    "encodings": {"graph", "runs", "relation", "reach"},
    "files": set(),
    "models": {
        *("relation", "graph", "topology", "graphs", "encodings"),
        *("aggregate", "dropout", "update", "scores", "position", "attention"),
        *("ops", "message_passing", "decoding", "check", "bind_cache", "files"),
    },
    "checkpoint": {"files"},
    "train": {"graph", "topology", "message_passing", "data", "checkpoint"},
    "mpnn": {
        *("runs", "relation", "graph", "topology", "graphs", "aggregate", "update", "position", "attention"),
        *("compiled", "plan", "ops", "message_passing", "encodings", "models"),
    },
    "cli": {
        *("runs", "graph", "topology", "graphs", "scores", "plan", "message_passing"),
        *("data", "plot", "models", "files", "checkpoint", "train", "mpnn"),
    },
    "__main__": {"cli"},
}
# Graph.plot() draws itself, and imports what draws when it is called; a topology is pickled as the text that is parsed.
ON_REQUEST = {("graph", "plot"), ("topology", "graphs")}


def modules() -> dict[str, Path]:
    """Every module by its full name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["mpnn", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[tuple[str, bool]]:
    """The modules of mpnn that a file imports anywhere, and whether only inside a function."""
    found = set()
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [m if m in MODULES else node.module for m in members]
        found |= {(name, id(node) in inside) for name in names if name.split(".")[0] == "mpnn"}
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "mpnn"


def test_rooms_import_only_rooms_above_them() -> None:
    above: set[str] = set()
    for name, allowed in ROOMS.items():
        assert allowed <= above, f"{name}: {allowed - above} stand below it"
        above.add(name)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_import_is_an_allowed_arrow(module: str) -> None:
    here = room(module)
    assert here in ROOMS, f"a new room: say in ROOMS what {here} may import"
    for name, on_request in imports(MODULES[module]):
        there = room(name)
        if there == here or (on_request and (here, there) in ON_REQUEST):
            continue
        assert there in ROOMS[here], f"{module} imports {name}: {here} must not know of {there}"


def test_backends_do_not_know_each_other() -> None:
    for module, path in MODULES.items():
        if module.startswith("mpnn.backends."):
            own = ".".join(module.split(".")[:3])
            siblings = {name for name, _ in imports(path) if name.startswith("mpnn.backends")}
            siblings = {name for name in siblings if name != own and not name.startswith(f"{own}.")}
            assert siblings <= {"mpnn.backends.estimate"}, f"{module} imports {siblings}"


# ---------------------------------------------------------------------------------------- in a fresh process

EXTRAS = (
    *("torch_scatter", "torch_sparse", "torch_geometric", "transformers", "tokenizers", "safetensors"),
    *("matplotlib", "networkx", "sklearn", "typer", "click", "rich", "hypothesis", "pytest"),
)


def fresh(script: str) -> dict[str, object]:
    """What the script prints as JSON, in a process that has imported nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, cwd=ROOT.parent, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_takes_little_beyond_torch_and_pulls_no_extra() -> None:
    found = fresh(
        "import json, sys, time; began = time.process_time(); import torch, numpy, scipy\n"
        "torch_took, had = time.process_time() - began, set(sys.modules); import mpnn\n"
        "took = time.process_time() - began - torch_took\n"
        "print(json.dumps({'torch': torch_took, 'mpnn': took, 'new': sorted(set(sys.modules) - had)}))"
    )
    new = {name.split(".")[0] for name in found["new"]}
    assert not new & {*EXTRAS, "numba", "llvmlite"}
    assert found["mpnn"] <= 0.25 * found["torch"] + 0.1, found


def test_the_core_runs_with_no_extra_installed() -> None:
    found = fresh(
        f"extras = {EXTRAS!r}\n"
        "import json, sys\n"
        "sys.modules.update(dict.fromkeys(extras))  # importing any of them fails as if it were not there\n"
        "import torch, mpnn\n"
        "from mpnn.attention import DotProduct\n"
        "from mpnn.update import FeedForward, PreNorm\n"
        "layer = mpnn.MessagePassing(mpnn.graphs.causal(), 'sum', PreNorm(8, FeedForward(8)), DotProduct(8, 2))\n"
        "out = layer(torch.randn(2, 5, 8)); out.sum().backward()\n"
        "pooled = mpnn.ops.aggregate(mpnn.graphs.window(1).bind(5), torch.ones(5, 2))\n"
        "print(json.dumps({'shape': list(out.shape), 'pooled': pooled[:, 0].tolist()}))"
    )
    assert found == {"shape": [2, 5, 8], "pooled": [2.0, 3.0, 3.0, 3.0, 2.0]}
