"""The site builds without a warning, and every link between its pages leads somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_design"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path / "site")]
    environment = os.environ | {"MPNN_SITE_NOTEBOOKS": "off"}  # tests/test_notebooks.py runs them
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr[-3000:]
    pages = {
        page.resolve(): page.read_text("utf-8")
        for page in (tmp_path / "site").rglob("*.html")
        if "_static" not in page.parts
    }
    assert len(pages) > 40
    checked = 0
    for page, text in pages.items():
        for target, anchor in re.findall(r'(?:href|src)="([^"#:]*)(?:#([^"]*))?"', text):
            if target.startswith("//") or (not target and not anchor):
                continue
            path = (page.parent / unquote(target.split("?")[0])).resolve() if target else page
            assert path.exists(), f"{page.name} links to {target}"
            if anchor and path in pages:
                assert f'id="{unquote(anchor)}"' in pages[path], f"{page.name} links to {target}#{anchor}"
            checked += 1
    assert checked > 1000
