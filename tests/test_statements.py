"""Pages agree with one another about what works: each statement here is read where it is derived, and looked for where
a page could deny it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_generated" not in page.parts
}


def denials(pattern: str) -> list[str]:
    """The pages and lines that match a pattern."""
    return [
        f"{name}: {line.strip()}"
        for name, text in PAGES.items()
        for line in text.splitlines()
        if re.search(pattern, line, re.I)
    ]


def test_second_derivatives() -> None:
    """`tests/support/capabilities.py` measures which backends have them; streams over processes have none."""
    (row,) = re.findall(r"^\| second derivatives .*$", PAGES["docs/backends.md"], re.M)
    assert {cell.strip() for cell in row.split("|")[2:-1]} == {"yes"}
    denied = denials(r"first derivatives only|no second deriv|without second deriv|differentiated? (only )?once")
    assert [line for line in denied if 'transport="stream"' not in line] == []


def test_gpus() -> None:
    """Kernels ran on a card, of which there is a record."""
    assert (ROOT / "benchmarks" / "results" / "gpu.json").is_file()
    assert denials(r"triton, not run|GPU kernels? (have|has) (not|never) run") == []


def test_links_have_a_loop() -> None:
    from mpnn.train import link_predictor, link_ranker

    assert callable(link_predictor.fit_link_predictor)
    assert callable(link_ranker.fit_link_ranker)
    assert denials(r"no (training )?loop for links") == []


def test_files_of_builds_are_where_pages_say() -> None:
    for name, text in PAGES.items():
        for path in re.findall(r"`(mpnn/[\w/]+/)`", text):
            assert (ROOT / path).is_dir(), f"{name} names {path}"


def test_families_that_do_not_dispatch_are_on_the_pages() -> None:
    """By the first word of the class of their models, as in "BigBird"."""
    transformers = pytest.importorskip("transformers")
    from mpnn.integrations.hf.use import NATIVE

    said = re.sub(r"[^a-z]", "", PAGES["docs/families.md"].lower() + PAGES["docs/integrations.md"].lower())
    for family in NATIVE:
        name = transformers.CONFIG_MAPPING[family].__name__.removesuffix("Config").removesuffix("V2")
        assert name.lower() in said, f"no page says that {name} runs in place"
    listed = re.findall(r"<!-- refused -->\n(.*?)\n<!-- end -->", PAGES["docs/families.md"], re.S)
    assert not set(re.findall(r"`([\w-]+)`", listed[0])) & set(NATIVE)
