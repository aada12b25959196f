"""Writes docs/lectures_index.md from docs/lectures.tsv: what lectures say about graphs.

A row of the table: lecture, title of its slide, statement, state, where. State is `here`, `partly` or `not here`;
`where` names what serves the statement, separated by spaces: names of Python without `mpnn.`, a claim (`claims.NAME` is
a function of examples/claims.py), a file of the project, or a page with its heading (`page.md#anchor`). Behind a bar
stands a note: for rows that are not here, the reason.
"""

import csv
import importlib
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "lectures.tsv", HERE / "lectures_index.md"
INDEX = re.compile(r"(?<=<!-- index -->\n).*?(?=<!-- index end -->)", re.S)
LECTURES = {
    "000": "Deep Learning: Transformers and GNNs",
    "001": "CPSC483, Deep Learning on Graph-Structured Data: Transformers and GNNs (R. Ying)",
    "002": "Attention, transformers, and the symmetries of layers",
    "003": "Transformers are Graph Neural Networks (C. K. Joshi)",
    "004": "Lecture 15: Attention Model and Transformer (X. He)",
}
STATES = ("here", "partly", "not here")


@dataclass(frozen=True)
class Statement:
    lecture: str
    slide: str
    text: str
    state: str
    served_by: tuple[str, ...]
    note: str


def statements() -> list[Statement]:
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    found = []
    for lecture, slide, text, state, where in rows[1:]:
        names, _, note = where.partition("|")
        found.append(Statement(lecture, slide, text, state, tuple(names.split()), note.strip()))
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def resolve(name: str) -> None:
    """Raises LookupError if there is nothing of this name."""
    if ".md" in name:
        page, _, anchor = name.partition("#")
        if not (HERE / page).is_file() or (anchor and anchor not in anchors(HERE / page)):
            raise LookupError(f"there is no {name}")
    elif name.startswith("claims"):
        file, _, function = name.partition(".")
        if not re.search(rf"^def {function}\(", (HERE.parent / "examples" / f"{file}.py").read_text(), re.M):
            raise LookupError(f"examples/{file}.py has no {function}")
    elif "/" in name:
        if not (HERE.parent / name).is_file():
            raise LookupError(f"there is no {name}")
    else:
        thing = importlib.import_module("mpnn")
        for part in name.split("."):
            thing = getattr(thing, part, None) or _module(f"{thing.__name__}.{part}")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise LookupError(f"there is no {name}") from None


def link(name: str) -> str:
    if ".md" in name:
        page, _, anchor = name.partition("#")
        return f"[{anchor.replace('-', ' ') or page.removesuffix('.md')}]({name})"
    if name.startswith("claims"):
        return f"`examples/{name.partition('.')[0]}.py`: `{name.partition('.')[2]}`"
    return f"`{name}`"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def where(one: Statement) -> str:
    """Returns what serves the statement, and the note."""
    return "; ".join(filter(None, [", ".join(map(link, one.served_by)), one.note]))


def counts(of: list[Statement]) -> str:
    return ", ".join(f"{sum(one.state == state for one in of)} {state}" for state in STATES)


def index() -> str:
    everything = statements()
    lacking = [one for one in everything if one.state != "here"]
    parts = [f"{len(everything)} statements: {counts(everything)}. Those that are not, and why:", ""]
    parts += ["| statement | | why |", "|---|---|---|"]
    for one in lacking:
        parts.append(f"| {cell(one.text)} | {one.state} | {where(one)} |")
    parts.append("")
    for lecture, group in groupby(everything, lambda one: one.lecture):
        members = list(group)
        parts += [f"## {LECTURES[lecture]}", "", "<details>"]
        parts += [f"<summary>{len(members)} statements: {counts(members)}</summary>", ""]
        parts += ["| slide | statement | | where |", "|---|---|---|---|"]
        shown = ""
        for one in members:
            slide, shown = "" if one.slide == shown else one.slide, one.slide
            parts.append(f"| {slide} | {cell(one.text)} | {one.state} | {where(one)} |")
        parts += ["", "</details>", ""]
    return "\n".join(parts)


def updated(page: str) -> str:
    """The page with the index of the table."""
    return INDEX.sub(lambda _: index(), page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
