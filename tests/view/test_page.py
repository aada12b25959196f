"""`mpnn view` writes one file that needs nothing else, and refuses before the work."""

from __future__ import annotations

import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from viewer_page import data_of, run

from mpnn import graphs
from mpnn.view import Page, of_topology


def test_a_page_of_an_expression(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run("causal & window(3)", "--n", "20", "-o", page)
    assert done.exit_code == 0, done.output
    html = page.read_text()
    assert data_of(html)["graph"] == {"expression": "causal & window(3)", "n": 20, "num_src": None}
    assert "<title>causal &amp; window(3)</title>" in html


def test_random_edges_are_in_the_page() -> None:
    """Those of the page's own expression, and of the examples that have some."""
    data = data_of(of_topology("causal & random(4)", 48).html())
    given = [one for one in (data["graph"], *data["examples"]) if "runs" in one]
    assert [one["expression"].split("(")[0] for one in given] == ["causal & random", "bigbird"]
    for one in given:
        runs = graphs.parse(one["expression"]).bind(one["n"]).runs
        written = {name: np.frombuffer(b64decode(text), "<i4").tolist() for name, text in one["runs"].items()}
        assert written == {name: getattr(runs, name).tolist() for name in ("ptr", "start", "stop")}


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    html = Page("x", "y", {"expression": "causal", "n": 4, "num_src": None}).html()
    without = html.replace("http://www.w3.org/2000/svg", "")  # the name of a language
    assert not re.search(r"""(?:src|href)=(?!["']?data:)|url\(|@import|https?://|fetch\(|XMLHttp""", without)


def test_no_text_ends_the_data_or_the_script() -> None:
    text = "</script><script>alert(1)</script><!--"
    html = Page(text, text, {"expression": text, "n": 4, "num_src": None}).html()
    assert data_of(html)["title"] == text
    assert html.count("</script>") == 2
    assert "<script>alert" not in html


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("causal", "-o", "{}/page.png"), "the page is an HTML file; name it {}/page.html"),
        (("causal", "-o", "{}/nowhere/page.html"), "there is no folder {}/nowhere"),
        (("causal", "-o", "{}/there.html"), "{}/there.html exists: name another file, or replace it with --force"),
        (("cousal", "-o", "{}/page.html"), "did you mean causal"),
        (("documents([2, 3])", "-o", "{}/page.html"), "add up to 5"),
        (("window(2).with_relation(Offset(clip=3))", "-o", "{}/page.html"), "leave it out"),
        (("causal", "--n", "2000000", "-o", "{}/page.html"), "at most 1,000,000 nodes"),
        (("strided(64)", "--n", "100000", "-o", "{}/page.html"), "and 78,"),
        (
            ("causal", "--text", "a", "-o", "{}/page.html"),
            "--text, --image, --node and --graph are for models; causal is an expression",
        ),
    ],
    ids=str,
)
def test_refusals(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    there = tmp_path / "there.html"
    there.write_text("mine")
    done = run(*(a.format(tmp_path) for a in arguments))
    assert done.exit_code == 2, done.output
    assert sentence.format(tmp_path) in " ".join(done.stderr.split())
    assert there.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [there]


def test_force_replaces(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    assert run("causal", "-o", page, "--force").exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_notebooks_show_the_page_in_a_frame_with_every_number() -> None:
    page = of_topology(graphs.causal() & graphs.window(4) | graphs.global_nodes([0, 3]), 20)
    found: dict[str, str | None] = {}

    class Frame(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.update(attributes)

    Frame().feed(page._repr_html_())
    long = graphs.global_nodes([0, 2, 4, 6, 8, 10, 12])
    assert graphs.parse(of_topology(long, 20).graph["expression"]) == long  # str() abbreviates it
    assert found["srcdoc"] == page.html()
    assert found["title"] == page.title
