"""The pages of `mpnn demo` and `mpnn compare`: one HTML file with embedded pictures, for light and dark mode."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mpnn.cli.measure import machine, versions
from mpnn.graph.files import write_atomically
from mpnn.view import Page
from mpnn.view.page import document

RESULTS = "compare.json"
PAGE = "index.html"
_STYLE = Path(__file__).parent / "static" / "page.css"


def cards(facts: Mapping[str, str]) -> str:
    """Large words or numbers, each with its meaning below."""
    inner = "".join(f'<div class="card"><b>{escape(k)}</b><span>{escape(v)}</span></div>' for k, v in facts.items())
    return f'<div class="cards">{inner}</div>'


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def heading(level: int, text: str, *, as_code: bool = False) -> str:
    inner = f"<code>{escape(text)}</code>" if as_code else escape(text)
    return f"<h{level}>{inner}</h{level}>"


def fold(title: str, parts: Sequence[str]) -> str:
    """Parts that a reader opens."""
    return f"<details><summary>{escape(title)}</summary>\n{''.join(parts)}</details>"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in headings)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_cell(k, cell)}</td>" for k, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _cell(column: int, text: str) -> str:
    return f"<code>{escape(text)}</code>" if column == 1 else escape(text)


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def legend(meanings: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in meanings.items())
    return f'<dl class="legend">{items}</dl>'


def picture(path: Path, alt: str, caption: str) -> str:
    """An image file (PNG), embedded, with its alternative text and caption."""
    image = f'<img alt="{escape(alt)}" src="data:image/png;base64,{b64encode(path.read_bytes()).decode()}">'
    return f'<div class="narrow"><figure>{image}<figcaption>{escape(caption)}</figcaption></figure></div>'


def viewer(shown: Page) -> str:
    """Panes of the viewer. The document needs `mpnn.view.page.script()` at its end."""
    return f'<div class="viewer">{shown.part()}</div>'


def page(title: str, parts: Sequence[str], footer: Sequence[tuple[str, str]], script: str = "") -> str:
    """The HTML document; `parts` and `script` are HTML, `footer` is names and values as text."""
    facts = "<br>\n".join(f"{escape(name)}: <code>{escape(value)}</code>" for name, value in footer)
    body = "\n\n".join(parts)
    body = f"<h1>{escape(title)}</h1>\n{body}\n\n<footer>{facts}</footer>\n{script}"
    return document(title, _STYLE.read_text(), body)


def save(folder: Path, results: Mapping[str, Any], title: str, parts: Sequence[str], *more: tuple[str, str]) -> None:
    """Writes results as JSON, and a page of `parts`, into a folder. Both name the machine and the versions."""
    facts = {"machine": machine(), "versions": versions()}
    text = json.dumps({**results, **facts}, indent=1) + "\n"
    write_atomically(folder / RESULTS, lambda path: path.write_text(text))
    document = page(title, parts, [*facts.items(), *more])
    write_atomically(folder / PAGE, lambda path: path.write_text(document, encoding="utf-8"))
