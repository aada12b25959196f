"""The committed viewer.js is what its sources build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mpnn.view.page import SCRIPT

VIEWER = Path(__file__).parents[2] / "mpnn" / "view" / "viewer"


@pytest.mark.skipif(
    shutil.which("node") is None or not (VIEWER / "node_modules" / "esbuild").is_dir(),
    reason="needs node, and `npm ci` in mpnn/view/viewer/",
)
def test_a_rebuild_gives_the_same_bytes(tmp_path: Path) -> None:
    built = tmp_path / "viewer.js"
    subprocess.run(["node", "build.mjs", str(built)], cwd=VIEWER, check=True)
    assert built.read_bytes() == SCRIPT.read_bytes(), "run `npm run build` in mpnn/view/viewer/"
