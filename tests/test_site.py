"""The site builds without a warning, every link between its pages leads somewhere, and pages fit a narrow screen."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from chromium import CHROMIUM, browser

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow

TOO_WIDE = """
document.querySelectorAll("details").forEach((e) => { e.open = true; });
const width = document.documentElement.clientWidth;
const scrolls = "table, pre, .highlight, svg, .math";
const isInBox = (e) => e.closest("p") && getComputedStyle(e.closest("p")).overflowX === "auto";  // a picture
if (document.documentElement.scrollWidth > width) return ["the page scrolls sideways"];
return [...document.querySelectorAll("main *")]
  .filter((e) => e.getBoundingClientRect().right > width + 2 && !e.closest(scrolls) && !isInBox(e))
  .map((e) => e.outerHTML.slice(0, 80)).slice(0, 3);
"""
BROKEN = """
// Lines of code that wrap, and words of titles on two lines, other than dotted names of code.
const found = [];
for (const pre of document.querySelectorAll("main .highlight pre"))
  if (getComputedStyle(pre).whiteSpace !== "pre") found.push("code wraps: " + pre.textContent.slice(0, 40));
for (const title of document.querySelectorAll("main :is(h1, h2, h3)")) {
  const walker = document.createTreeWalker(title, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    for (const word of node.data.matchAll(/[\\p{L}\\p{N}._]+/gu)) {
      if (/[._]\\w/.test(word[0])) continue;
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((rect) => Math.round(rect.top)));
      if (tops.size > 1) found.push("a title breaks inside " + word[0]);
    }
  }
}
return found.slice(0, 3);
"""
WITHOUT_TEXT = "return [...document.images].filter((image) => !image.alt).map((image) => image.src)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """The pages of the site by file."""
    for package in ("sphinx", "myst_nb", "pydata_sphinx_theme", "sphinx_design"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(folder)]
    environment = os.environ | {"MPNN_SITE_NOTEBOOKS": "off"}  # tests/test_notebooks.py runs them
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-3000:]
    return {page: page.read_text("utf-8") for page in folder.rglob("*.html") if "_static" not in page.parts}


def test_every_link_between_pages_leads_somewhere(site: dict[Path, str]) -> None:
    assert len(site) > 40
    checked = 0
    for page, text in site.items():
        for target, anchor in re.findall(r'(?:href|src)="([^"#:]*)(?:#([^"]*))?"', text):
            if target.startswith("//") or (not target and not anchor):
                continue
            path = (page.parent / unquote(target.split("?")[0])).resolve() if target else page
            assert path.exists(), f"{page.name} links to {target}"
            if anchor and path in site:
                assert f'id="{unquote(anchor)}"' in site[path], f"{page.name} links to {target}#{anchor}"
            checked += 1
    assert checked > 1000


def test_every_page_has_an_icon(site: dict[Path, str]) -> None:
    """Without one, a browser asks for /favicon.ico, which is not there. Pages of the viewer are shown in frames."""
    for page, text in site.items():
        assert page.stem.startswith("viewer_") or re.search(
            r'<link rel="(shortcut )?icon" href="[^"]*logo.svg', text
        ), page.name


def test_a_page_has_one_title_and_the_help_of_commands_no_boxes(site: dict[Path, str]) -> None:
    for page, text in site.items():
        assert text.count("<h1") <= 1, page.name
        if page.name == "models.html" and page.parent.name != "reference":
            assert text.count("<details") > 30, "systems fold"
        if page.name == "cli.html":
            assert "Options:" in text
            assert not set("╭│╰") & set(text)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_pages_fit_a_phone_and_a_desktop_and_pictures_have_texts(site: dict[Path, str], tmp_path: Path) -> None:
    """Sources, and every eighth page of the reference, stand for the others of their kinds."""
    written = [page for page in site if not {"api", "_modules"} & set(page.parts)]
    others = sorted(set(site) - set(written))[::8]
    with browser(tmp_path) as chromium:
        for page in [*written, *others]:
            for width, scheme in ((390, "dark"), (1280, "light")):
                chromium.open(page, width=width, scheme=scheme)
                assert chromium.run(TOO_WIDE) == [], f"{page.name} at {width} px"
                assert chromium.run(WITHOUT_TEXT) == [], page.name
                assert chromium.run(BROKEN) == [], f"{page.name} at {width} px"
        assert [problem for problem in chromium.problems if "invalid theme mode" not in problem] == []
