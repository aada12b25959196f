"""The ways from a public call to arithmetic, derived from the code: `docs/architecture.md` lists them all.

A way that is added or removed fails here until the page says so. Before one is added, ask which one goes.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import TypeVar

from mpnn.backends import BACKENDS
from mpnn.engine.rewrites import REWRITES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "mpnn"
PAGE = ROOT / "docs" / "architecture.md"
PLAN = {"engine/choice.py", "engine/slowness.py", "engine/compile/standard.py"}
"""What plans rounds, and what writes them as the operators of `edge_list`, names backends."""
Table = dict[str, set[str]]


Node = TypeVar("Node", bound=ast.AST)


@cache
def modules() -> dict[str, ast.Module]:
    """What each module says, by its path."""
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def by_kind(tree: ast.Module) -> dict[type[ast.AST], list[ast.AST]]:
    """The nodes of a module, of the kinds that are asked for."""
    kinds = ast.ClassDef, ast.Import, ast.ImportFrom, ast.Call
    found: dict[type[ast.AST], list[ast.AST]] = {kind: [] for kind in kinds}
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            found[type(node)].append(node)
    return found


def nodes(tree: ast.Module, kind: type[Node]) -> list[Node]:
    return [node for node in by_kind(tree)[kind] if isinstance(node, kind)]


def is_below(path: str, *folders: str) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in folders))


def classes_of(tree: ast.Module, *bases: str) -> set[str]:
    """The names of classes that name one of these bases."""
    return {
        node.name
        for node in nodes(tree, ast.ClassDef)
        if any(ast.unparse(known).split(".")[-1] in bases for known in node.bases)
    }


def functions() -> Table:
    """The differentiable functions of each module: classes derived from torch's, and classes derived from these."""
    trees = modules()
    bases = {"Function"}
    while True:
        found = {path: classes_of(tree, *bases) for path, tree in trees.items()}
        derived = {name for path, names in found.items() if is_below(path, "kernels") for name in names}
        if derived <= bases:
            return found
        bases |= derived


def families_called(tree: ast.Module) -> set[str]:
    """The families of kernels and the backends that a module imports, but for lists of edges, which are no features."""
    families = {folder.parent.name for folder in (PACKAGE / "kernels").glob("*/__init__.py")} - {"cpu", "cuda", "edges"}
    names = [node.module or "" for node in nodes(tree, ast.ImportFrom)]
    names += [alias.name for node in nodes(tree, ast.Import) for alias in node.names]
    found = {name.split(".")[2] for name in names if name.startswith("mpnn.kernels.")} & families
    imports = [node for node in nodes(tree, ast.ImportFrom) if node.module == "mpnn.backends"]
    return found | {alias.name for node in imports for alias in node.names if alias.name in {b.NAME for b in BACKENDS}}


def names_of(tree: ast.Module) -> set[str]:
    """The names of the functions and variables of a module."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    names = [name for node in tree.body if isinstance(node, ast.Assign) for name in ast.walk(node)]
    return functions | {name.id for name in names if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def operators_of(tree: ast.Module) -> set[str]:
    """The names of operators that a module binds to torch.library."""
    calls = [node for node in nodes(tree, ast.Call) if node.args]
    defined = [call for call in calls if ast.unparse(call.func) in ("torch.library.define", "torch.library.custom_op")]
    return {re.split(r"\W", ast.unparse(call.args[0]).split("::")[1])[0] for call in defined}


@cache
def listed() -> dict[str, Table]:
    """What the code has, by the heading of the table that lists it."""
    around: Table = {}
    in_place: Table = {}
    bound: Table = {}
    operators: Table = {}
    for path, tree in modules().items():
        if not is_below(path, "kernels", "backends") and path not in PLAN:
            around[path] = families_called(tree)
        if is_below(path, "integrations"):
            in_place[path] = classes_of(tree, "Constant")
        if is_below(path, "backends"):
            bound[path] = {"bind"} & names_of(tree)
        operators[path] = operators_of(tree)
    rounds = {"backends": {one.NAME for one in BACKENDS}, "rewrites": {one.NAME for one in REWRITES}}
    tables = {
        "through a round": rounds,
        "without a round": around,
        "in the place of a forward": in_place,
        "bound by a step": bound,
        "with a derivative of its own": functions(),
        "operator of torch.library": operators,
    }
    return {name: {path: found for path, found in table.items() if found} for name, table in tables.items()}


def on_the_page() -> dict[str, Table]:
    """The tables of the page whose headings are those of `listed`."""
    section = PAGE.read_text().split("## The ways")[1].split("\n## ")[0]
    tables: dict[str, Table] = {}
    for block in re.findall(r"(?:^\|.*\n)+", section, flags=re.M):
        head, _, *rows = block.splitlines()
        heading = head.split("|")[1].strip()
        cells = [row.split("|")[1:3] for row in rows]
        tables[heading] = {first.strip().strip("`"): set(re.findall(r"`([^`]+)`", second)) for first, second in cells}
    return tables


def test_the_page_lists_every_way() -> None:
    page = on_the_page()
    code = listed()
    assert page.keys() == code.keys()
    for heading, table in code.items():
        assert page[heading] == table, f"the table {heading!r} of docs/architecture.md and the code differ"


def test_the_page_counts_the_ways() -> None:
    code = listed()
    through = sum(map(len, code["through a round"].values()))
    around = len(code["without a round"])
    section = PAGE.read_text().split("## The ways")[1].split("\n## ")[0]
    counts = re.search(r"There are (\d+) ways: (\d+) through a round, and (\d+) that", section)
    assert counts is not None
    assert tuple(map(int, counts.groups())) == (through + around, through, around)


def test_what_is_derived_is_there() -> None:
    """A pattern that no longer fits the code would list nothing."""
    assert min(map(len, listed().values())) > 0
    assert "dense" in families_called(ast.parse("from mpnn.kernels.dense import varlen"))
    assert operators_of(ast.parse('torch.library.define("mpnn::run", "(Tensor x) -> Tensor")')) == {"run"}
    assert classes_of(ast.parse("class A(torch.autograd.Function): pass"), "Function") == {"A"}
    assert "LinearReduce" in functions()["kernels/rows/reduce.py"]
