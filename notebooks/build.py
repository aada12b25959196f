"""Writes the notebooks from pages of Markdown: `python notebooks/build.py`.

A page is easy to review and to edit; a notebook is easy to open and to run. Each block of Python in a page becomes a
cell of code, and the text between two blocks a cell of text. The notebooks have no outputs; tests/test_notebooks.py
checks that they are up to date, and runs them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGES = (HERE.parent / "docs" / "transformers_are_graphs.md", *sorted(HERE.glob("*.md")))


def notebook(page: Path) -> dict[str, Any]:
    """The notebook of a page, in nbformat 4.5."""
    text = re.sub(r"\]\((?!https?:)([^)]+)\)", lambda link: f"]({_from_here(page, link[1])})", page.read_text("utf-8"))
    pieces = re.split(r"^```python\n(.*?)^```\n", text, flags=re.M | re.S)
    kinds = [("code" if k % 2 else "markdown", piece.strip("\n")) for k, piece in enumerate(pieces)]
    cells = [_cell(number, kind, piece) for number, (kind, piece) in enumerate(k for k in kinds if k[1].strip())]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _from_here(page: Path, target: str) -> str:
    """A link of the page, relative to the folder of the notebooks."""
    return target if page.parent == HERE else f"../{page.parent.name}/{target}"


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.splitlines(keepends=True)}


def written(page: Path) -> str:
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for page in PAGES:
        (HERE / f"{page.stem}.ipynb").write_text(written(page), encoding="utf-8")


if __name__ == "__main__":
    main()
