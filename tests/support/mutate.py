"""Which random changes of the code the tests notice.

    python tests/support/mutate.py                        twenty changes, drawn with seed 0
    python tests/support/mutate.py --seed 1 --count 40 --folders engine round
    python tests/support/mutate.py --list                 shows the changes and runs nothing

Each change is one of: another comparison, another operation, another number, `and` for `or`, a condition negated, a
keyword left out. It is made in a copy of the package, in which the tests of the changed file's folder run until one
fails. A change that no test notices is printed as such: it needs a test, or the code that it changed is not needed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = {
    "engine": ["tests/engine", "tests/backends/test_opt_in.py", "tests/laws/forms.py"],
    "backends": ["tests/backends"],
    "kernels": ["tests/kernels", "tests/backends"],
    "round": [
        "tests/test_round.py",
        "tests/test_validation.py",
        "tests/backends/test_opt_in.py",
        "tests/laws/forms.py",
    ],
    "graph": ["tests/graph", "tests/graphs"],
    "attention": ["tests/operator"],
}
"""The tests of a folder of the package."""

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}


class Change(NamedTuple):
    """A change of one expression of a file: where it stands, by offsets into the text, and what replaces it."""

    path: Path
    first: int
    last: int
    text: str
    line: int
    before: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.text}"

    def apply(self, root: Path) -> None:
        """Makes the change in a copy of the package below `root`."""
        source = (ROOT / self.path).read_bytes()
        (root / self.path).write_bytes(source[: self.first] + self.text.encode() + source[self.last :])


def changes(path: Path) -> list[Change]:
    """Returns all changes of a file."""
    source = path.read_text()
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node in ast.walk(ast.parse(source)):
        for text in _variants(node):
            assert isinstance(node, ast.expr)
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = ast.get_source_segment(source, node) or ""
            if "\n" not in before:  # comments inside of others would be lost
                found.append(Change(path.relative_to(ROOT), first, last, text, node.lineno, before))
    return found


def _variants(node: ast.AST) -> Iterator[str]:
    """The texts of the expressions that may stand in place of one."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARISONS:
            yield ast.unparse(ast.Compare(left, [_COMPARISONS[type(operator)]()], [right]))
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATIONS and not _is_text(left, right):
            yield f"({ast.unparse(ast.BinOp(left, _OPERATIONS[type(operator)](), right))})"
        case ast.BoolOp(operator, values):
            other = ast.And() if isinstance(operator, ast.Or) else ast.Or()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.IfExp(test, body, orelse):
            yield f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() as value):
            yield str(value + 1)
        case ast.Call(function, arguments, [*others, ast.keyword(str())]):
            yield ast.unparse(ast.Call(function, arguments, others))


def _is_text(*operands: ast.expr) -> bool:
    return any(isinstance(x, (ast.JoinedStr, ast.List, ast.Tuple)) or _is_string(x) for x in operands)


def _is_string(x: ast.expr) -> bool:
    return isinstance(x, ast.Constant) and isinstance(x.value, str)


def draw(folders: list[str], count: int, seed: int) -> list[Change]:
    """Returns `count` changes of the files of these folders: a file by its size, and a place in it."""
    generator = random.Random(seed)
    files = [path for folder in folders for path in sorted((ROOT / "mpnn" / folder).rglob("*.py"))]
    # Kernels for a GPU and the optional backend do not run in the tests of a folder.
    files = [path for path in files if "cuda" not in str(path) and path.name != "scatter.py"]
    by_file = {path: changes(path) for path in files}
    pool = [change for path in files for change in by_file[path]]
    return generator.sample(pool, min(count, len(pool)))


def notices(change: Change, seconds: float) -> bool:
    """Whether a test of the folder fails after a change, or does not end."""
    folder = change.path.parts[1].removesuffix(".py")
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for part in ("mpnn", "tests", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        for part in ("pyproject.toml", "README.md", "constraints.txt", "hatch_build.py"):
            shutil.copy(ROOT / part, copy)
        change.apply(copy)
        tests = [test for test in TESTS[folder] if (copy / test).exists()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env={**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", choices=TESTS, default=["engine", "backends", "kernels", "round"])
    parser.add_argument("--count", type=int, default=20, help="how many changes (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (default: 0)")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which tests count as failed (default: 600)")
    parser.add_argument("--list", action="store_true", help="show the changes and run nothing")
    options = parser.parse_args()
    drawn = draw(options.folders, options.count, options.seed)
    survivors = []
    for number, change in enumerate(drawn, 1):
        began = time.perf_counter()
        seen = options.list or notices(change, options.seconds)
        result = (
            "" if options.list else f"{'noticed' if seen else 'UNNOTICED'} in {time.perf_counter() - began:.0f} s: "
        )
        print(f"{number}/{len(drawn)} {result}{change}", flush=True)
        survivors += [] if seen else [change]
    if not options.list:
        print(f"{len(drawn) - len(survivors)} of {len(drawn)} noticed")
        sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
