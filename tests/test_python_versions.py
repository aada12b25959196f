"""The oldest and the newest Python that the package names read its files, whatever Python runs the tests."""

import ast
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "hatch_build.py", *(ROOT / "mpnn").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
VERSIONS = sorted(
    int(minor)
    for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
)


def interpreter(minor: int) -> str | None:
    """A CPython of this version on the path, or one of pyenv."""
    candidates = [which(f"python3.{minor}"), *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")]
    for path in filter(None, candidates):
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.startswith(f"Python 3.{minor}."):
            return str(path)
    return None


def test_the_oldest_version_parses_every_file() -> None:
    assert VERSIONS[0] == 10
    for file in FILES:
        ast.parse(file.read_text(), str(file), feature_version=(3, VERSIONS[0]))
    with pytest.raises(SyntaxError):
        ast.parse("try: pass\nexcept* ValueError: pass", feature_version=(3, VERSIONS[0]))


@pytest.mark.slow
@pytest.mark.parametrize("minor", VERSIONS)
def test_every_version_compiles_every_file(minor: int) -> None:
    """Warnings are errors: a later version warns of what the next one refuses."""
    python = interpreter(minor)
    if python is None:
        pytest.skip(f"there is no Python 3.{minor}")
    script = "import sys; [compile(open(file, encoding='utf-8').read(), file, 'exec') for file in sys.argv[1:]]"
    subprocess.run([python, "-W", "error", "-c", script, *map(str, FILES)], check=True)


def test_the_package_names_only_what_was_run() -> None:
    """The page on installation says what was run; classifiers name no more."""
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    ran = {int(minor) for minor in re.findall(r"Python 3\.(\d+)[^|\n]*\| the default tests", page)}
    ran |= {int(minor) for minor in re.findall(r"The whole test suite runs on Python 3\.(\d+)", page)}
    assert set(VERSIONS) == ran
    systems = re.findall(r'"Operating System :: ([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert systems == ["POSIX :: Linux"]
    assert "| Linux x86-64 | AVX2, AVX-512 | the whole test suite |" in page
