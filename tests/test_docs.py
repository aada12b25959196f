"""Every Python block in the README and the docs runs, top to bottom, as a reader would run it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.units import RATIO
from mpnn import backends
from mpnn.backends import BACKENDS
from mpnn.data.errors import DatasetNotFound

ROOT = Path(__file__).resolve().parents[1]
# Pages whose code takes more than a few seconds.
LONG = ("citation_graph.md", "compile.md", "decoders.md", "extending.md", "hugging_face_window.md", "lectures.md")
LONG += ("lectures_trained.md", "models.md", "operator.md", "which_graph_suits_my_text.md")
PAGES = [
    pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in LONG else [])
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```python" in page.read_text()
]

EVERY_PAGE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


CODE = re.compile(r"```python\n(?P<code>.*?)```(?:\n\n```text\n(?P<output>.*?)```)?", re.S)


@pytest.mark.parametrize("page", PAGES)
def test_code_in_docs_runs(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block of text directly under a block of Python is what the code prints (`...`: other lines)."""
    monkeypatch.chdir(tmp_path)  # for what a page writes
    monkeypatch.setattr(backends, "_registered", BACKENDS)  # forgets the page's own afterwards
    registered = sys.modules["mpnn.graphs.parse"]._REGISTERED
    own = {name: builder for name, builder in registered.items() if builder.__module__.startswith("mpnn.")}
    monkeypatch.setattr(sys.modules["mpnn.graphs.parse"], "_REGISTERED", own)  # another page registers the same names
    text = page.read_text()
    names: dict[str, object] = {"__name__": page.stem}
    for block in CODE.finditer(text):
        line = text[: block.start("code")].count("\n")
        capsys.readouterr()
        try:
            exec(compile("\n" * line + block["code"], str(page), "exec", dont_inherit=True), names)
        except DatasetNotFound as error:
            pytest.skip(str(error))
        if block["output"] is not None:
            printed = capsys.readouterr().out
            assert re.fullmatch(pattern(block["output"]), printed), f"{page.name}, line {line}: {printed}"


def pattern(output: str) -> str:
    """What an output on a page matches: lines of `...` stand for any others."""
    return re.sub(r"^\\\.\\\.\\\.\\\n", r"(?:.*\n)*", re.escape(output), flags=re.M)


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```python$.*?^```$", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_folders_that_commands_enter_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for folder in re.findall(r"^cd (\S+)$", page.read_text(), re.M):
            assert (ROOT / folder).is_dir(), f"{page.name}: there is no folder {folder}"


def words(text: str) -> int:
    """The words that a reader has before them: code, tables and folded parts are looked up."""
    text = re.sub(r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$", "", text, flags=re.M | re.S)
    text = re.sub(r"<details>.*?</details>", "", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)  # what a picture shows, for a reader who does not see it
    return len(re.sub(r"^ *\|.*$", "", text, flags=re.M).split())


def test_pages_have_1500_words_at_most_and_versions_of_the_changes_300() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "_generated" not in page.parts]
    counts = {str(page.relative_to(ROOT)): words(page.read_text()) for page in pages}
    assert {name: count for name, count in counts.items() if count > 1500} == {}
    readme = (ROOT / "README.md").read_text()
    assert words(readme) <= 800
    assert len(readme.splitlines()) <= 90
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert versions
    assert {version.split("\n")[0]: count for version in versions if (count := words(version)) > 300} == {}
    assert words("one two\n```sh\nthree\n```\n| four |\n<details>\n\nfive\n\n</details>\nsix") == 3


def test_architecture_names_files_and_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+(?:/|\.(?:py|cpp|h|json)))(?::([\w.]+))?`", text)
    assert len(named) > 50
    for file, name in named:
        paths = [path for path in (ROOT / file, *ROOT.glob(f"mpnn/**/{file}")) if path.exists()]
        assert paths, f"there is no {file}"
        for part in filter(None, name.split(".")):
            defines = re.compile(rf"^(?: *def| *class|template.*|static.*) {part}\b", re.M)
            assert any(map(defines.search, (path.read_text() for path in paths))), f"{file} does not define {part}"


def test_every_promise_names_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith("| promise")]
    file, seen = "", 0
    for row in promises:
        names = re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", row)
        assert names or "the same" in row, f"a promise without a test: {row}"
        for name in names:
            if name.startswith("tests/"):
                file = (ROOT / name).read_text()
            else:
                assert f"def {name}(" in file, f"there is no {name}"
                seen += 1
    assert seen >= len(promises)


def page_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_of_models_says_what_was_measured() -> None:
    page, text = page_script("models"), (ROOT / "docs" / "models.md").read_text()
    checks = json.loads((ROOT / "docs" / "checks.json").read_text())
    assert set(page.sections(text)) == set(checks), "a system without a check, or a check without a section"
    assert page.updated(text, checks) == text, "run python docs/models.py"
    for picture in page.PICTURE.finditer(text):
        assert (page.PICTURES / f"{picture['name']}.png").is_file()
    seen = re.findall(r"!\[([^\]]*)\]\(img/models/([\w-]+)\.png\)", text)
    assert len({words for words, _ in seen}) == len(seen) == len(list(page.PICTURES.glob("*.png")))
    assert all(len(words) > 40 for words, _ in seen), "a picture needs a sentence that says what it shows"


@pytest.mark.slow
def test_the_table_of_scale_says_what_is_computed() -> None:
    page, text = page_script("scale"), (ROOT / "docs" / "distributed.md").read_text()
    assert page.updated(text, list(page.forecasts())) == text, "run python -m docs.scale"


def test_the_index_of_lectures_names_what_exists() -> None:
    page, text = page_script("lectures"), (ROOT / "docs" / "lectures_index.md").read_text()
    statements = page.statements()
    assert page.updated(text) == text, "run python docs/lectures.py"
    assert {one.lecture for one in statements} == set(page.LECTURES)
    assert {one.state for one in statements} == set(page.STATES)
    for one in statements:
        assert one.served_by if one.state == "here" else one.note, f"{one.text}: where, or why not"
        assert one.slide, one.text
        for name in one.served_by:
            page.resolve(name)
    for absent in ("models.Absent", "claims.absent", "absent.md", "graphs.md#absent", "examples/absent.py"):
        with pytest.raises(LookupError):
            page.resolve(absent)


def test_the_table_of_results_says_what_was_recorded() -> None:
    page, text = page_script("results"), (ROOT / "docs" / "results.md").read_text()
    assert page.TABLE.search(text)
    assert page.updated(text) == text, "run python docs/results.py"
    for path in page.RECORDS.glob("*.json"):
        record = json.loads(path.read_text())
        script, *options = record["command"].removeprefix("python ").split()
        assert (ROOT / script).is_file()
        assert not {"--steps", "--limit"} & set(options), f"{path.name} records a test run"


CELL = r"(?:(?P<seconds>[\d.]+) (?P<unit>us|ms|s))\b"
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells; the first row is the head."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()] for table in found]


def seconds(cell: str) -> list[float]:
    """The times that a cell holds."""
    return [float(match["seconds"]) * UNITS[match["unit"]] for match in re.finditer(CELL, cell)]


def wrong_ratios(text: str) -> list[str]:
    """Rows of tables whose ratio is not the peer's time / mpnn's, and heads that name a ratio otherwise."""
    found = []
    for head, _, *rows in tables(text):
        if any(re.search(r"^(x|ratio|speed-?up)$|\btimes as fast|\btimes faster|\bover ours|mpnn / ", c) for c in head):
            found.append(" | ".join(head))
        places = [i for i, cell in enumerate(head) if cell == RATIO]
        ours = next((i for i, cell in enumerate(head) if re.match("mpnn(,|$)", cell)), None)
        if ours is None or not places:
            found += [" | ".join(row) for row in rows if re.fullmatch(r"[\d.]+ x", row[-1])]
            continue
        for row in rows:
            for place in places:
                peers = [i for i in range(place) if i != ours and seconds(row[i]) and head[i] != RATIO]
                if peers and seconds(row[ours]) and row[place]:
                    expected = min(seconds(row[peers[-1]])) / seconds(row[ours])[0]
                    if abs(float(row[place].strip("*")) / expected - 1) > 0.06:
                        found.append(" | ".join(row))
    return found


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_every_ratio_of_times_is_that_of_the_peer_to_mpnn(page: Path) -> None:
    assert not wrong_ratios(page.read_text())


def test_ratios_in_the_other_direction_are_found() -> None:
    page = "| case | mpnn | peer | {} |\n|---|---|---|---|\n| a | 2 ms | X: 4.1 ms | {} |\n"
    assert not wrong_ratios(page.format(RATIO, "2.05"))
    assert wrong_ratios(page.format(RATIO, "0.49")) == ["a | 2 ms | X: 4.1 ms | 0.49"]
    assert wrong_ratios(page.format("ratio", "2.05")) == ["case | mpnn | peer | ratio"]
    assert wrong_ratios(page.format("", "2.05 x")) == ["a | 2 ms | X: 4.1 ms | 2.05 x"]


def test_code_on_pages_has_88_columns() -> None:
    """More do not fit beside both side bars of the site at 1280 px."""
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    for page in pages:
        if "_generated" in page.parts:
            continue
        for block in re.findall(r"^```(?:python|sh|text)\n(.*?)^```", page.read_text(), re.M | re.S):
            wide = [line for line in block.splitlines() if len(line) > 88]
            assert not wide, f"{page.name}: more than 88 columns: {wide[0]}"


@pytest.mark.parametrize("module", ["attention", "graphs", "models", "update", "position", "ops", "hf", "pyg"])
def test_every_public_name_has_its_page(module: str) -> None:
    inner = {"CompressedGraph", "DistMult", "Function", "Inner", "Model", "Near", "PairMLP", "PerNode"}
    inner |= {"Subgraphs", "GPSLayer", "Linear"}
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    package = importlib.import_module(f"mpnn.{module}")
    exported = getattr(package, "__all__", None) or [name for name in dir(package) if not name.startswith("_")]
    for name in exported:
        thing = getattr(package, name)
        if isinstance(thing, type) and thing.__module__.startswith(f"mpnn.{module}") and name not in inner:
            assert f"   ~mpnn.{module}.{name}\n" in pages, f"docs/reference has no mpnn.{module}.{name}"


# What a caller never makes: base classes, errors, and what other functions return.
WITHOUT_EXAMPLE = """
    Aggregator Attention AttentionBias Backend BlockDiagonalMask BlockMask CheckpointError Chunks Composed
    CompressedGraph DamagedFile DatasetNotFound DividedGraph EdgeFile EmbeddingTable GraphClassification GraphTables
    HeteroBatch HeteroSample KeyValue LinkBatch LinkSplit LinkTables Mask NeighborBatch NodeInputs NodeTables
    Outputs Owners Part Partition Position Recurrent Reformer ReformerConfig ReformerLM Report Role Rollouts Score
    StackedGraph TrainingDiverged TreeMask Update deterministic_batches"""


@pytest.mark.slow
def test_every_public_class_has_an_example_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    pages, seen = page_script("site_pages"), set()
    names = [
        name
        for page in (ROOT / "docs" / "reference").glob("*.md")
        for name in re.findall(r"^   ~(mpnn\.[\w.]+)$", page.read_text(), re.M)
    ]
    for name, code in pages.examples().items():
        assert name in names, f"no page shows the example of {name}"
        assert not [line for line in code.splitlines() if len(line) > 88], name
        exec(compile(code, name, "exec"), {"__name__": "example"})
        seen.add(name)
    lacking = []
    for name in names:
        module, _, short = name.rpartition(".")
        thing = getattr(importlib.import_module(module), short, None)
        code = re.search(r"^ +(assert |\w+ = |from |import |>>> )", inspect.getdoc(thing) or "", re.M)
        if isinstance(thing, type) and not code and name not in seen and short not in WITHOUT_EXAMPLE.split():
            lacking.append(name)
    assert not lacking, "docs/reference/examples.txt lacks these"
