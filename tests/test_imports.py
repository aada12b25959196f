"""Which package may import which: arrows point one way, and the core needs none of the extras."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mpnn

ROOT = Path(mpnn.__file__).parent

# What each room may import, besides itself: only rooms above it, so the order of this table is a proof of no cycles.
ROOMS: dict[str, set[str]] = {
    "kernels": set(),
    "graph": {"kernels"},
    "aggregate": {"graph"},
    "scores": {"graph"},
    "round": {"graph", "aggregate", "scores"},
    "backends": {"graph", "aggregate", "scores", "round", "kernels"},
    "graphs": {"graph", "round", "kernels"},
    "update": {"graph", "aggregate", "round", "backends", "kernels"},
    "position": {"graph", "round"},
    "attention": {"graph", "graphs", "aggregate", "scores", "round", "update", "position", "kernels"},
    "decoding": {"graph", "round", "attention"},
    "engine": {"graph", "graphs", "aggregate", "scores", "round", "update", "backends", "kernels"},
    "ops": {"graph", "graphs", "aggregate", "scores", "round", "engine"},
    "flex": {"graph", "graphs", "ops", "scores", "round"},
    "varlen": {"graph", "ops"},
    "message_passing": {"graph", "graphs", "aggregate", "update", "round", "attention", "decoding", "engine"},
    "testing": {"graph", "graphs", "update", "backends", "engine", "message_passing"},
    "data": {"graph", "graphs"},
    "integrations": {
        *("graph", "graphs", "aggregate", "scores", "round", "update", "attention", "decoding", "backends", "kernels"),
        *("engine", "ops", "varlen"),
    },
    "models": {
        *("graph", "graphs", "aggregate", "scores", "round", "update", "position", "attention", "decoding", "engine"),
        *("ops", "message_passing"),
        "integrations",  # from_hf and from_pyg
    },
    "distributed": {"graph", "graphs", "aggregate", "scores", "round", "attention", "kernels", "engine", "ops"},
    "view": {"graph", "graphs", "scores", "round", "engine"},
    "hf": {"integrations"},
    "pyg": {"graph", "integrations"},
    "shim": {"integrations"},
    "train": {"graph", "graphs", "message_passing", "data"},
    "mpnn": {
        *("graph", "graphs", "aggregate", "update", "position", "attention", "backends", "engine", "ops"),
        *("message_passing", "models", "view"),
    },
    "cli": {
        *("graph", "graphs", "scores", "round", "backends", "engine", "message_passing", "data", "view", "models"),
        *("train", "hf", "kernels", "ops", "mpnn", "distributed", "attention", "decoding"),
    },
    "__main__": {"cli"},
}


def modules() -> dict[str, Path]:
    """Every module by its full name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["mpnn", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
HOMES = {f"mpnn.{name}": f"mpnn.{home}" for name, home in mpnn._HOMES.items()}
"""The module that `from mpnn import name` imports."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """The modules of mpnn that a file imports anywhere: inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            members = [HOMES.get(member, member) for member in members]
            found |= {member if member in MODULES else str(node.module) for member in members}
    return found & MODULES.keys()


@cache
def all_imports() -> dict[str, set[str]]:
    """The imports of every module."""
    return {module: imports(path) for module, path in MODULES.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "mpnn"


def test_rooms_import_only_rooms_above_them() -> None:
    above: set[str] = set()
    for name, allowed in ROOMS.items():
        assert allowed <= above, f"{name}: {allowed - above} stand below it"
        above.add(name)


def test_architecture_lists_rooms_from_top_to_bottom() -> None:
    rows = (ROOT.parent / "docs" / "architecture.md").read_text().split("## Packages")[1].split("\n## ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    at = {name: k for k, cell in enumerate(cells) for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)}
    assert set(ROOMS) - {"mpnn", "__main__"} == set(at)
    for name, allowed in ROOMS.items():
        assert all(at.get(name, 0) <= at[other] for other in allowed - {"mpnn"}), f"{name} imports from a higher row"


def test_every_import_is_an_allowed_arrow() -> None:
    for module, names in all_imports().items():
        here = room(module)
        assert here in ROOMS, f"a new room: say in ROOMS what {here} may import"
        wrong = {name for name in names if room(name) not in {here, *ROOMS[here]}}
        assert not wrong, f"{module} imports {wrong}: {here} must not know of them"


def test_no_module_imports_one_that_imports_it() -> None:
    try:
        TopologicalSorter(all_imports()).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' <- '.join(circle.args[1])}")


def test_backends_do_not_know_each_other() -> None:
    backends = {module: path for module, path in MODULES.items() if module.startswith("mpnn.backends.")}
    assert "mpnn.backends.edge_list" in backends
    for module in backends.keys() - {"mpnn.backends.reference"}:  # made of the specification and the products of edges
        own = ".".join(module.split(".")[:3])
        siblings = {name for name in all_imports()[module] if name.startswith("mpnn.backends")}
        siblings = {name for name in siblings if name != own and not name.startswith(f"{own}.")}
        assert siblings <= {
            f"mpnn.backends.{name}" for name in ("cost_model", "edge_orders", "reference", "tuned", "way")
        }, f"{module} imports {siblings}"


HELPERS = {"mpnn.kernels.derivatives", "mpnn.kernels.dropout_threshold", "mpnn.kernels.memory"}
"""Modules beside the families of kernels, which hold none."""
REPORTS = {"mpnn.cli.doctor"}  # says what kernels this installation has


def outside() -> dict[str, ast.Module]:
    """All modules but those of kernels and backends."""
    inside = ("mpnn.kernels", "mpnn.backends")
    return {name: parsed(path) for name, path in MODULES.items() if not name.startswith(inside)}


def test_kernels_are_called_through_their_families() -> None:
    """Modules outside import what a family of kernels exports: functions that decide by themselves whether a kernel
    computes them, on any device."""
    for name, tree in outside().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("mpnn.kernels"):
                continue
            if name in REPORTS or node.module in HELPERS:
                continue
            names = {alias.name for alias in node.names}
            if node.module == "mpnn.kernels":
                assert {f"mpnn.kernels.{n}" for n in names} <= HELPERS, f"{name} imports {names}"
            else:
                family = importlib.import_module(str(node.module))
                assert names <= set(getattr(family, "__all__", ())), f"{name} imports {names} from {node.module}"


ASK_FOR_DEVICES = {
    # Devices are what these are about.
    "mpnn.cli.doctor": "reports them",
    "mpnn.cli.explain": "an option",
    "mpnn.cli.options": "an option",
    "mpnn.distributed.groups": "NCCL moves tensors of GPUs only",
    "mpnn.round.needs": "a device is a need of a round",
    "mpnn.train.loop": "accelerate asks for it",
    # To read a number of another device waits for it.
    "mpnn.flex.masks": "masks are decided in numpy",
    "mpnn.flex.programs": "tensors are compared in each call",
    "mpnn.graphs.content": "neighbors are found in numpy",
    "mpnn.integrations.hf.masks": "padding is read, or kept as a mask",
    "mpnn.integrations.hf.packing": "lengths are read, but not while a CUDA graph is captured",
    "mpnn.integrations.torch_scatter": "the largest index is read",
    "mpnn.models.layers.blocks": "numbers of tokens are checked",
    "mpnn.update": "eps is read",
    # The rules of plans that hold on one device.
    "mpnn.engine.choice": "on a CPU an item gets what it gets alone",
    "mpnn.engine.rewrites.sets_in_one_row": "sums by torch have no fixed order elsewhere",
    "mpnn.engine.steps": "lists of edges share steps",
    "mpnn.graph.batches": "it pads what torch's loops on a CPU compute",
    "mpnn.integrations.hf.by_torch": "torch's kernel or a plan",
    "mpnn.integrations.hf.ranks": "generators are of a device",
}


def asks_for_a_device(node: ast.AST) -> bool:
    """Whether an expression depends on the kind of a device."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_cpu")
    if isinstance(node, ast.Compare):
        return any(isinstance(x, ast.Constant) and x.value in ("cpu", "cuda") for x in (node.left, *node.comparators))
    return isinstance(node, ast.Constant) and node.value == "cuda"


def test_few_modules_ask_for_a_device() -> None:
    found = {name for name, tree in outside().items() if any(map(asks_for_a_device, ast.walk(tree)))}
    assert found == set(ASK_FOR_DEVICES), "a kernel, a backend or a function of a family decides by device"


# ---------------------------------------------------------------------------------------- in a fresh process

EXTRAS = (
    *("accelerate", "torch_scatter", "torch_sparse", "torch_geometric", "transformers", "tokenizers", "safetensors"),
    *("matplotlib", "networkx", "pydot", "pyarrow", "sklearn", "typer", "click", "rich", "hypothesis", "pytest"),
)


def fresh(script: str) -> Any:
    """What the script prints as JSON, in a process that has imported nothing."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_adds_few_modules_to_those_of_torch_and_no_extra() -> None:
    new, found = fresh(
        "import json, sys; import torch, numpy, scipy; had = set(sys.modules); import mpnn\n"
        "new = sorted(set(sys.modules) - had)\n"
        "there = set(mpnn.__all__) <= set(dir(mpnn)) and all(getattr(mpnn, name) for name in mpnn.__all__)\n"
        "loads = mpnn.scores.Dot is not None and not hasattr(mpnn, 'nonsense')\n"
        "graph = mpnn.graphs.causal()\n"
        "html = '24 nodes' in graph._repr_html_() and '5 nodes' in graph.bind(5)._repr_html_()\n"
        "print(json.dumps([new, [there, loads, html]]))"
    )
    assert not {name.split(".")[0] for name in new} & {*EXTRAS, "numba", "llvmlite"}
    assert not [name for name in new if name.startswith(("mpnn.attention", "mpnn.backends", "mpnn.models"))]
    assert len(new) <= 80, new  # 71: numbers of modules do not differ from machine to machine, as seconds do
    assert found == [True] * 3, "every name is imported when it is first used"


def test_layers_and_functions_run_without_the_compiler_of_torch() -> None:
    loaded = fresh(
        "import json, sys; import torch; from mpnn import MessagePassing, attention, flex, graphs, models, ops\n"
        "x = torch.randn(6, 2, 8)\n"
        "MessagePassing(graphs.causal(), 'sum', None, attention.DotProduct(8, 2))(x[:, 0]).sum().backward()\n"
        "ops.attend(graphs.causal().bind(6), x, x, x)\n"
        "flex.flex_attention(*[x.movedim(1, 0)[None]] * 3)\n"
        "print(json.dumps('torch._dynamo' in sys.modules))"
    )
    assert not loaded, "its import takes as long as that of torch"


def test_the_import_is_the_same_whatever_the_arguments_are() -> None:
    first, *others = fresh(
        "import json, os, sys, torch\n"
        "found = []\n"
        "for argv in ([], ['script.py'], ['mpnn'], ['-m', 'mpnn'], None):\n"
        "    read, write = os.pipe()\n"
        "    if not os.fork():\n"
        "        sys.argv = argv\n"
        "        if argv is None: del sys.argv\n"
        "        import mpnn; ours = sorted(name for name in sys.modules if name.startswith('mpnn'))\n"
        "        os.write(write, json.dumps([ours, sorted(vars(mpnn))]).encode())\n"
        "        os._exit(0)\n"
        "    os.close(write)\n"
        "    found.append(json.load(os.fdopen(read)))\n"
        "print(json.dumps(found))"
    )
    assert "mpnn.graphs" in first[0]
    assert others == [first] * 4


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "py.typed").is_file()  # the wheel takes every file of the package


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


@pytest.mark.slow
def test_the_library_runs_without_those_who_stand_on_it(tmp_path: Path) -> None:
    """The command line, the viewer, data, training and ready models are users of the library: nothing needs them."""
    users = ("cli", "view", "data", "train", "models")
    shutil.copytree(ROOT, tmp_path / "mpnn", ignore=lambda folder, _: users if Path(folder) == ROOT else ())
    script = (
        "import json, torch, transformers, mpnn, mpnn.hf, mpnn.pyg\n"
        "from mpnn import MessagePassing, graphs, ops, flex, varlen\n"
        "from mpnn.attention import DotProduct\n"
        "from mpnn.update import FeedForward, PreNorm\n"
        "from torch_geometric.nn import GATConv\n"
        "x = torch.randn(6, 8)\n"
        "layer = MessagePassing(graphs.causal(), 'sum', PreNorm(8, FeedForward(8)), DotProduct(8, 2))\n"
        "shapes = [layer(x).shape, layer.eval()(x).shape, ops.aggregate(graphs.window(1).bind(6), x).shape]\n"
        "q = torch.randn(1, 2, 6, 8)\n"
        "mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6)\n"
        "shapes += [flex.flex_attention(q, q, q, block_mask=mask).shape]\n"
        "ends = torch.tensor([0, 2, 6], dtype=torch.int32)\n"
        "p = torch.randn(6, 2, 8)\n"
        "shapes += [varlen.flash_attn_varlen_func(p, p, p, ends, ends, 4, 4).shape]\n"
        "config = transformers.BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2,\n"
        "    intermediate_size=64, vocab_size=9)\n"
        "model = transformers.BertModel(config).eval(); mpnn.hf.use(model)\n"
        "shapes += [model(torch.arange(1, 6)[None]).last_hidden_state.shape]\n"
        "convolution = GATConv(8, 4); mpnn.pyg.use(convolution)\n"
        "shapes += [convolution(x, torch.tensor([[0, 1, 2], [1, 2, 3]])).shape]\n"
        f"assert mpnn.__file__.startswith({str(tmp_path)!r})\n"
        "print(json.dumps(list(map(list, shapes))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [[6, 8], [6, 8], [6, 8], [1, 2, 6, 8], [6, 2, 8], [1, 5, 64], [6, 4]]


def test_extras_that_texts_name_exist() -> None:
    """An error that says `install("hf")` names an extra of pyproject.toml, and extras name one another."""
    folder = ROOT.parent
    extras = set(
        re.findall(r"^(\w+) = \[", (folder / "pyproject.toml").read_text().split("optional-dependencies")[1], re.M)
    )
    pages = [*ROOT.rglob("*.py"), *(folder / "docs").rglob("*.md"), folder / "README.md", folder / "pyproject.toml"]
    texts = [text for page in pages for text in re.findall(r"(?:mpnn|\.)\[([\w,]+)\]", page.read_text())]
    named = {name for text in texts for name in text.split(",")}
    named |= {name for page in pages for name in re.findall(r"\binstall\([\"'](\w+)[\"']\)", page.read_text())}
    assert {"cli", "scatter", "tables", "train"} <= named <= extras


def test_extras_have_tested_versions_and_messages_ask_for_them() -> None:
    """Each package of an extra is in constraints.txt in a version that the extra allows, each package that an error
    tells to install is in an extra, and conda's recipe needs what pyproject.toml needs."""
    tomllib, yaml = pytest.importorskip("tomllib"), pytest.importorskip("yaml")
    folder = ROOT.parent
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    pins: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (folder / "constraints.txt").read_text(), re.M):
        pins.setdefault(canonicalize_name(name), []).append(version)
    extras, known = project["optional-dependencies"], {"torch", "numpy", "scipy"}
    for extra, texts in {"": project["dependencies"], **extras}.items():
        for wanted in map(Requirement, texts):
            if wanted.name == "mpnn":
                assert wanted.extras <= set(extras), extra
                continue
            known.add(canonicalize_name(wanted.name))
            versions = pins.get(canonicalize_name(wanted.name), [])
            assert any(version in wanted.specifier for version in versions), (extra, str(wanted), versions)

    asked = set()
    for path in ROOT.rglob("*.py"):
        for names in re.findall(r"pip install (?:--[\w-]+ )*((?:[a-z][\w-]*(?![\w\[{=]) ?)+)", path.read_text()):
            asked |= {(canonicalize_name(name), path.name) for name in names.split()}
    assert len(asked) > 8
    assert {(name, where) for name, where in asked if name not in known} == set()

    recipe = yaml.safe_load((folder / "recipe" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == project["version"]
    run = [text.replace("pytorch", "torch").replace(" ", "") for text in recipe["requirements"]["run"]]
    assert run == [f"python{project['requires-python']}", *project["dependencies"]]
