"""Plain English: docstrings begin with a verb or a noun, and words that readers stumble over stay out of docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "mpnn", "examples", "benchmarks", "docs"
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MEASURED = {"record.md", "gpu.md"}
"""Pages that `python -m benchmarks report` writes."""

WRONG = {
    r"quick(er|est)": "faster, fastest",
    r"as quick(ly)?": "as fast",
    r"mended": "fixed",
    r"anew": "again",
    r"whom": "a noun",
    r"theirs": "a noun",
    r"hears|heard": "receives, received",
    r"nobody|everybody|those who": "a noun: no node, each node",
    r"goes on": "continues",
    r"stands? on": "is built on",
    r"in turns": "interleaved",
    r"(take|takes|taking) turns": "interleaved",
    r"(least|lesser) of": "the minimum of",
    r"in (any |its )?company|on its company": "in a batch",
    r"of ours": "of mpnn",
    r"is no (model|graph|Graph|tensor|node|cut|feature|candidate|target|score|server)": "is not a",
    r"(with|in|into|one|gives its) (a |one )?sentence on stderr|with a sentence": "with an error message",
    r"beside": "compared with, next to, in addition to",
    r"behind": "after, under",
    r"whoever": "a noun",
    r"tops": "exceeds",
    r"doors?": "entry point",
    r"(?<!, )so many(?![^.\n]{0,60}\bthat\b)(?! to\b)": "this many",
    r"told|tells?": "distinguishes, says",
    r"the least(?! (recently|common))": "the smallest, the minimum",
    r"(stands?|stood) (at|between|together|apart|where|there|before)": "is, are",
    r"(says?|said) so once|and say so": "warns, with this reason",
    r"at hand": "available",
    r"lets go": "releases",
}
"""What is always wrong, and what to write. Words with a right use, such as `alone`, are left to readers."""


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """The name and the docstring of a module and of each class and function in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "name", "module"), text


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of a file, docstrings and errors among them, and its comments, with their lines."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for line, text in enumerate(source.splitlines(), 1):
        _, mark, comment = text.partition("# ")
        if mark:
            yield line, comment


def prose(page: str) -> str:
    """The text of a page without code."""
    text = re.sub(r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$", "", page, flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "`x`", text)


def wrong(text: str) -> list[str]:
    """What stands in a text and is always wrong, with what to write instead."""
    found = []
    for pattern, instead in WRONG.items():
        for match in re.finditer(rf"\b(?:{pattern})(?!\w)", text):
            if not text[: match.start()].lower().endswith("there "):
                found.append(f"{match[0]!r}: write {instead}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_errors_and_comments_are_plain(path: Path) -> None:
    for name, text in docstrings(path):
        assert text.split()[0] not in ("What", "Those", "Such", "That"), f"{path.name}:{name} begins with a riddle"
    for line, text in strings(path):
        assert not wrong(text), f"{path.name}:{line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_plain(page: Path) -> None:
    if page.name not in MEASURED and "_generated" not in page.parts:
        assert not wrong(prose(page.read_text()))


def test_wrong_words_are_found() -> None:
    assert wrong("This is quicker.") == ["'quicker': write faster, fastest"]
    assert wrong("Returns whether `x` is no Graph of tokens.")
    assert not wrong("There is no graph here, and there is no node.")
    assert prose("a\n```sh\nquicker\n```\n`quicker` b") == "a\n\n`x` b"
