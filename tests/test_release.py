"""What a release needs agrees with itself: versions, files that name each other, workflows."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
VERSION = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[0]
COMMUNITY = sorted((ROOT / ".github").rglob("*.*"))


def test_one_version() -> None:
    import mpnn

    assert mpnn.__version__ == VERSION
    assert set(re.findall(r"^ *version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)) == {VERSION}
    assert re.search(rf"^## {re.escape(VERSION)} \(", (ROOT / "CHANGELOG.md").read_text(), re.M)
    releasing = (ROOT / "docs" / "releasing.md").read_text()
    assert f"Tag `v{VERSION}`" in releasing
    assert f"## The list of {VERSION}" in releasing


@pytest.mark.parametrize("file", COMMUNITY, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_of_the_project_name_what_exists(file: Path) -> None:
    """And no address: the project has none yet."""
    text = file.read_text()
    assert "://" not in text
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"
    for path in re.findall(r"`((?:tests|docs)/[\w./]+)`", text):
        assert (ROOT / path).exists(), f"{file.name} names {path}"
    if file.suffix == ".yml":
        yaml = pytest.importorskip("yaml")
        assert yaml.safe_load(text)


def test_security_and_conduct_promise_no_address() -> None:
    for name in ("SECURITY.md", ".github/CODE_OF_CONDUCT.md"):
        assert not re.search(r"\S+@\S+|://", (ROOT / name).read_text()), name


def test_the_logo_is_a_picture_of_one_graph() -> None:
    logo = ElementTree.parse(ROOT / "docs" / "_static" / "logo.svg").getroot()
    circles = logo.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 5
    assert "nodes" in logo.attrib["aria-label"]


def test_workflows_run_what_there_is() -> None:
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "python hatch_build.py --all" in release
    assert '"--all"' in (ROOT / "hatch_build.py").read_text()
    tested = re.findall(r'"(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(re.findall(r'"(3\.\d+)"', release)) == set(tested)
