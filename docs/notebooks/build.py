"""Writes the notebooks from pages of Markdown, and runs them: `python docs/notebooks/build.py [NAME ...]`.

A page is easy to review and to edit; a notebook is easy to open and to run. Each block of Python in a page becomes a
cell of code, and the text between two blocks a cell of text. A first cell installs what is missing. The notebooks
carry their outputs, so that they can be read where nothing runs; tests/test_notebooks.py checks that their cells are
those of the pages, and runs them.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSTALL = """# Where mpnn is missing, as on Colab. Until it is on PyPI, give the path of a wheel.
import importlib.util

if importlib.util.find_spec("mpnn") is None:
    %pip install -q "mpnn[examples]"
"""
PAGES = (HERE.parent / "transformers_are_graphs.md", *sorted(HERE.glob("*.md")))


def notebook(page: Path) -> dict[str, Any]:
    """The notebook of a page, in nbformat 4.5."""
    text = re.sub(r"\]\((?!https?:)([^)]+)\)", lambda link: f"]({_from_here(page, link[1])})", page.read_text("utf-8"))
    pieces = re.split(r"^```python\n(.*?)^```\n", text, flags=re.M | re.S)
    kinds = [("code" if k % 2 else "markdown", piece.strip("\n")) for k, piece in enumerate(pieces)]
    cells = [_cell(number, kind, piece) for number, (kind, piece) in enumerate(k for k in kinds if k[1].strip())]
    cells.insert(0, _cell("install", "code", INSTALL.strip()))
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _from_here(page: Path, target: str) -> str:
    """A link of the page, relative to the folder of the notebooks."""
    return target if page.parent == HERE else f"../{target}"


def _cell(number: int | str, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.splitlines(keepends=True)}


def without_outputs(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cell | ({"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}) for cell in cells]


def run(page: Path) -> dict[str, Any]:
    """The notebook of a page with its outputs, but no progress bars. Files of its cells go into a temporary folder."""
    import nbclient
    import nbformat

    node = nbformat.reads(json.dumps(notebook(page)), 4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(node, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in node["cells"]:
        cell["metadata"] = {}  # the times of the run
        if cell["cell_type"] == "code":
            cell["outputs"] = [out for out in cell["outputs"] if out.get("name") != "stderr"]
    return {**notebook(page), "cells": json.loads(nbformat.writes(node))["cells"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="pages, such as citation_graph; all if there are none")
    names = parser.parse_args().names
    if unknown := set(names) - {page.stem for page in PAGES}:
        parser.error(f"there is no page {sorted(unknown)[0]}; there are {', '.join(page.stem for page in PAGES)}")
    for page in PAGES:
        if not names or page.stem in names:
            print(f"running {page.stem}", flush=True)
            text = json.dumps(run(page), indent=1, ensure_ascii=False) + "\n"
            (HERE / f"{page.stem}.ipynb").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
