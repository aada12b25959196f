"""Which random changes of the code the tests notice.

    python tests/support/mutate.py                        twenty changes of mpnn, drawn with seed 0
    python tests/support/mutate.py --seed 1 --folders engine round kernels/rows
    python tests/support/mutate.py --cpp 4                four more of the C++ kernels, each compiled (minutes)
    python tests/support/mutate.py --skip 3="x is 0 there" in place of the third change, one more is drawn
    python tests/support/mutate.py --list                 shows the changes and their tests, and runs nothing

Each change is one of: another comparison, another operation, another number, `and` for `or`, a condition negated, a
keyword left out. It is made in a copy of the repository, in which the default tests of the changed module run until
one fails: those named after it, those that import it, those of its folder, if few modules use it those that import
its users, and for what each call goes through those of the laws. The test that fails must pass without the change. A
change that no test notices is printed as such: it needs a test, or the code that it changed is not needed. One that no
test can notice, because the results are the same or the line does not run on this machine, is replaced with `--skip`.

Tests run in forks of one process, which has imported what is not of this repository.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FEW_USERS = 3  # A module with more of them is tested by itself; one with fewer is often tested through them.
FOREIGN = ("torch", "numpy", "scipy.sparse", "torch_geometric.nn", "transformers")
_VARIABLES = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_BUILD = (  # the library of this machine only
    "import hatch_build, mpnn.kernels.cpu.library as library\n"
    "hatch_build.build(hatch_build.chosen_target()._replace(processors=(library.processor(),)))\n"
)

_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
_UNDER_LAWS = {"engine", "round", "message_passing.py", "ops.py"}
"""What each call goes through: the laws of changes between calls and of unions are tests of these."""
_WITHOUT_EFFECT = {"strict", "maxsize", "stacklevel"}
"""Keywords on which no result depends: of `zip`, of caches and of warnings."""
_CPP = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ", " && ": " || ",
    " || ": " && ", " + ": " - ", " - ": " + ", " * ": " + ", " / ": " * ", " % ": " / ", " += ": " -= ",
}  # fmt: skip
"""Operators between spaces; those of templates and pointers have none."""


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
        """Makes the change in a copy of the repository below `root`."""
        source = (ROOT / self.path).read_bytes()
        (root / self.path).write_bytes(source[: self.first] + self.text.encode() + source[self.last :])


def changes(path: Path) -> list[Change]:
    """Returns all changes of a file of Python."""
    source = path.read_text()
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    tree = ast.parse(source)
    without = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name.endswith("_on_gpu")]
    without += [x for x in ast.walk(tree) if isinstance(x, ast.keyword) and x.arg in _WITHOUT_EFFECT]
    left_out = {x for part in without for x in ast.walk(part)}
    for node in (x for x in ast.walk(tree) if x not in left_out):
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
        case ast.Call(function, arguments, [*others, ast.keyword(str(name))]) if name not in _WITHOUT_EFFECT:
            yield ast.unparse(ast.Call(function, arguments, others))


def _is_text(*operands: ast.expr) -> bool:
    return any(isinstance(x, (ast.JoinedStr, ast.List, ast.Tuple)) or _is_string(x) for x in operands)


def _is_string(x: ast.expr) -> bool:
    return isinstance(x, ast.Constant) and isinstance(x.value, str)


def changes_of_cpp(path: Path) -> list[Change]:
    """Returns changes of a file of C++: operators and whole numbers, outside of comments and of the preprocessor."""
    found = []
    offset = 0
    for number, line in enumerate(path.read_bytes().decode("ascii").splitlines(keepends=True), 1):
        code = "" if line.startswith(("#", "template")) or "static_assert" in line else line.split("//")[0]
        for match in re.finditer(r" (?:[<>=!]=|&&|\|\||\+=|[-<>+*/%]) |(?<![\w.\"])\d+(?![\w.\"])", code):
            text = _CPP.get(match[0]) or str(int(match[0]) + 1)
            first = offset + match.start()
            before = f"{line[: match.start()].lstrip()}[{match[0]}]{line[match.end() :].rstrip()}"
            found.append(Change(path.relative_to(ROOT), first, first + len(match[0]), text, number, before))
        offset += len(line)
    return found


def draw(files: Iterable[Path], of_file: Callable[[Path], list[Change]], count: int, seed: int) -> list[Change]:
    """Returns `count` changes of these files: a file by its size, and a place in it. More with the same seed begin with
    the same changes, if the files have many."""
    pool = [change for path in files for change in of_file(path)]
    return random.Random(seed).sample(pool, min(count, len(pool)))


def reasons(entries: Iterable[str]) -> dict[int, str]:
    """Returns the reasons to leave changes out by the numbers of the changes, from `number=reason`."""
    parts = (entry.partition("=") for entry in entries)
    return {int(number): reason or "no reason is given" for number, _, reason in parts}


def files_of(folders: list[str]) -> list[Path]:
    """Returns the files of Python of folders and modules of mpnn that run in the default tests."""
    roots = [ROOT / "mpnn" / folder for folder in folders]
    files = {path for root in roots for path in (root.rglob("*.py") if root.is_dir() else [root.with_suffix(".py")])}
    # Kernels for a GPU and the optional backend run in tests of their own, the viewer's source in a browser.
    return sorted(path for path in files if "cuda" not in str(path) and path.name != "scatter.py")


def tests_of(path: Path) -> list[Path]:
    """Returns the files with the tests of a file of mpnn, the closest first."""
    if path.suffix != ".py":
        launchers = [x for x in files_of(["kernels"]) if f'"{path.stem}' in (ROOT / x).read_text()]
        return _in_order(
            *(tests_of(x.relative_to(ROOT)) for x in launchers), _tests_below("kernels"), _tests_below("backends")
        )
    module = _module(path)
    users = {user for user, imported in _imports("mpnn").items() if module in imported}
    users = {user for user in users if user.name != "__init__.py"}
    stem = (path.parent if path.name == "__init__.py" else path).stem
    folder = _tests_below(*path.parent.parts[1:])
    return _in_order(
        [test for test in _tests() if re.search(rf"_{stem}(_|\.)", test.name)],
        _importers({module}),
        folder or (_tests_below(path.parts[1]) if len(path.parts) > 2 else []) or _tests_below("operator"),
        _tests_below(path.parts[1]),
        _importers({_module(user) for user in users}) if len(users) <= FEW_USERS else [],
        _tests_below("laws") if path.parts[1] in _UNDER_LAWS else [],
    )


def _in_order(*groups: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(test for group in groups for test in group))


def _tests_below(*folder: str) -> list[Path]:
    return [test for test in _tests() if test.parts[1 : 1 + len(folder)] == folder and folder]


def _importers(modules: set[str]) -> list[Path]:
    """Tests that import one of these modules, first those that import few others."""
    imports = _imports("tests")
    return sorted((test for test in _tests() if imports[test] & modules), key=lambda test: len(imports[test]))


@cache
def _tests() -> list[Path]:
    names = ("test_*.py", "union.py", "forms.py")  # as in pyproject.toml
    return sorted(path.relative_to(ROOT) for name in names for path in (ROOT / "tests").rglob(name))


@cache
def _imports(folder: str) -> dict[Path, set[str]]:
    """The modules that each file below a folder imports, by their names."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    return {path: _imported(ast.parse((ROOT / path).read_text())) for path in files}


def _imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return names


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


class Copy:
    """A copy of the repository in which changes are made, one at a time."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.root = root
        self.seconds = seconds
        self.left_out: list[str] = []  # tests that fail in the copy without a change
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        self.libraries = [path.relative_to(ROOT) for path in (ROOT / "mpnn/kernels/cpu").glob("kernels-*")]
        self._copy(*map(Path, filter(None, listed.split("\0"))), *self.libraries)

    def _copy(self, *paths: Path) -> None:
        for path in paths:
            if (ROOT / path).exists():
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, self.root / path)

    def _take_back(self, change: Change) -> None:
        # A build of changed sources has removed the library of the others.
        self._copy(change.path, *(self.libraries if change.path.suffix != ".py" else ()))

    def notice(self, change: Change) -> str | None:
        """Returns the test that fails after a change, or does not end; None if all pass."""
        tests = tests_of(change.path)
        change.apply(self.root)
        if change.path.suffix != ".py":
            variables = {**os.environ, "PYTHONPATH": str(self.root)}
            if subprocess.run(
                [sys.executable, "-c", _BUILD], cwd=self.root, env=variables, capture_output=True
            ).returncode:
                self._take_back(change)
                return "the compiler"
        # Most changes are noticed by the closest tests, and to collect all takes seconds.
        for part in (tests[:2], tests[2:6], tests[6:]):
            while part and (failed := self._first_failure(*map(str, part))):
                self._take_back(change)
                test = failed.split(" - ")[0]
                if "::" not in test or not self._first_failure(test):
                    return failed
                self.left_out.append(test)
                print(f"{test} fails without a change", flush=True)
                change.apply(self.root)
        self._take_back(change)
        return None

    def _first_failure(self, *tests: str) -> str | None:
        quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that FOREIGN has imported
        options = (*quiet, "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", f"timeout={self.seconds}")
        left_out = [f"--deselect={test}" for test in self.left_out]
        code, output = self._pytest(*options, "--timeout-method=thread", *left_out, *tests)
        if code in (0, 5):  # 5: all tests are left out by their markers
            return None
        if code > 2:
            raise RuntimeError(f"pytest did not run the tests:\n{output}")
        failures = re.findall(r"^(?:FAILED|ERROR) (.*)", output, re.MULTILINE)
        return failures[0] if failures else f"exit code {code}"

    def _pytest(self, *arguments: str) -> tuple[int, str]:
        """The exit code and the output of pytest, in a fork of this process."""
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if not child:
                for descriptor in (1, 2):
                    os.dup2(output.fileno(), descriptor)
                os.chdir(self.root)
                os.environ["PYTHONPATH"] = str(self.root)
                sys.dont_write_bytecode = False  # or each change compiles all files
                others = (x for x in sys.path if x.startswith(sys.prefix) or not x.startswith(str(ROOT)))
                sys.path[:] = [str(self.root), *others]
                code = 3
                try:
                    import pytest

                    code = int(pytest.main(list(arguments)))
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            return code, output.read().decode(errors="replace")


def main() -> None:
    every = sorted(path.name.removesuffix(".py") for path in (ROOT / "mpnn").iterdir() if path.suffix in ("", ".py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", default=every, help="or modules of mpnn (default: all)")
    parser.add_argument("--count", type=int, default=20, help="how many changes of Python (default: 20)")
    parser.add_argument("--cpp", type=int, default=0, help="how many changes of the C++ kernels (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (default: 0)")
    parser.add_argument("--seconds", type=int, default=300, help="after which a test has failed (default: 300)")
    parser.add_argument(
        "--skip", nargs="+", default=[], metavar="N=REASON", help="changes of Python to replace by the next ones drawn"
    )
    parser.add_argument("--list", action="store_true", help="show the changes and their tests, and run nothing")
    options = parser.parse_args()
    kernels = sorted(path for path in (ROOT / "mpnn/kernels/cpu").iterdir() if path.suffix in (".cpp", ".h"))
    skipped = reasons(options.skip)
    drawn = draw(files_of(options.folders), changes, options.count + len(skipped), options.seed)
    for number, reason in skipped.items():
        print(f"Left out: {number} {drawn[number - 1]}\n    {reason}")
    drawn = [change for number, change in enumerate(drawn, 1) if number not in skipped]
    drawn += draw(kernels, changes_of_cpp, options.cpp, options.seed)
    if options.list:
        for change in drawn:
            print(change, *tests_of(change.path), sep="\n    ")
        return
    os.environ.update(_VARIABLES)
    for module in filter(find_spec, FOREIGN):
        import_module(module)
    unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Copy(Path(name), options.seconds)
        for number, change in enumerate(drawn, 1):
            began = time.perf_counter()
            test = copy.notice(change)
            unnoticed += test is None
            result = f"noticed by {test[:160]}" if test else "UNNOTICED"
            print(f"{number}/{len(drawn)} {change}\n    {result} ({time.perf_counter() - began:.0f} s)", flush=True)
    print(f"{len(drawn) - unnoticed} of {len(drawn)} noticed")
    sys.exit(bool(unnoticed))


if __name__ == "__main__":
    main()
