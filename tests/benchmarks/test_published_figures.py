"""Figures of a CPU on pages are those of records, and records are of the code that is here."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the installed package

from benchmarks import cli, published, report, roofs, sitting  # noqa: E402
from benchmarks.cases import all_cases  # noqa: E402
from benchmarks.contest import BOTH, FORWARD  # noqa: E402
from benchmarks.sizes import SMALL  # noqa: E402

TIMED = re.compile(
    r"\d\s*(ms|us)(?!\w)|\d\s*times (as (fast|quick)|faster|quicker|less time)|\dx faster"
    r"|\d ?% (longer|faster|slower)|, (ms|us|seconds) \|"
)


def here(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


@pytest.mark.parametrize("page", published.pages(), ids=lambda page: page.name)
def test_figures_on_pages_are_those_of_the_records(page: Path) -> None:
    text = page.read_text()
    assert published.fill(text, published.read()) == text, f"{page.name}: run python -m benchmarks report"


def test_every_block_of_figures_is_on_a_page() -> None:
    names = {name for page in published.pages() for name in re.findall(r"<!-- cpu: ([^>]*?) -->", page.read_text())}
    assert names == set(published.BLOCKS)


def test_the_page_of_performance_is_what_its_records_give() -> None:
    assert cli.performance_page() == cli.PAGE.read_text(), "run python -m benchmarks report"


@pytest.mark.parametrize(
    "name", ["README.md", "docs/index.md", "docs/integrations.md", "docs/operator.md", "docs/pyg.md"]
)
def test_pages_have_no_times_but_those_of_records(name: str) -> None:
    prose = published.without_figures((ROOT / name).read_text())
    assert not TIMED.search(prose), TIMED.search(prose)


@pytest.mark.release
def test_records_are_of_one_commit_and_one_processor() -> None:
    records = published.read()
    assert records.keys() == set(published.NAMES)
    assert sitting.differences(published.RECORDS, sitting.PARTS) == []


@pytest.mark.release
@pytest.mark.parametrize("name", published.NAMES)
def test_no_record_is_older_than_60_commits_to_what_computes(name: str) -> None:
    if not published.has_history():
        pytest.skip("this checkout does not have the history, so the age of records is not known")
    commit = published.read()[name]["commit"]
    count = published.commits_since(commit)
    assert count is not None, f"{name}.json is of {commit}, which is no commit of this history"
    assert count <= published.MOST_COMMITS, (
        f"{name}.json is {count} commits to {', '.join(published.COMPUTES)} old: run python -m benchmarks all on a "
        "quiet machine, then python -m benchmarks report"
    )


def test_the_age_of_a_record_is_counted_in_commits_to_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def git(*arguments: str) -> str | None:
        asked.append(arguments)
        return None if arguments[0] == "merge-base" and arguments[2] == "elsewhere" else "61"

    monkeypatch.setattr(published, "_git", git)
    assert published.commits_since("elsewhere") is None
    assert published.commits_since("here") == 61
    assert asked[-1] == ("rev-list", "--count", "here..HEAD", "--", "mpnn/kernels", "mpnn/backends", "mpnn/engine")


# ------------------------------------------------------------------------------------------------ tables


def row(group: str, case: str, direction: str = BOTH, compared: bool = True, **times: float) -> dict[str, object]:
    entries = {name.replace("_", " "): {"least": seconds} for name, seconds in times.items()}
    errors = dict.fromkeys(entries if compared else ["mpnn"], 0.0)
    return {"group": group, "case": case, "direction": direction, "ours": "mpnn", "entries": entries} | {
        "checked": {"errors": errors}
    }


def test_only_peers_that_compute_the_same_count() -> None:
    rows = [row("sparse", "a", mpnn=1.0, dense=2.0, compared=False), row("sparse", "b", mpnn=1.0, masked=3.0)]
    rows.append(row("layers", "other weights", mpnn=1.0, HF=4.0, compared=False))
    assert report.times_faster(rows) == {"masked": {BOTH: [3.0]}, "HF": {BOTH: [4.0]}}


def test_the_readme_shows_the_greatest_losses() -> None:
    rows = [row("dense", name, mpnn=ours, torch=1.0) for name, ours in (("a", 1.1), ("b", 0.5), ("c", 3.0), ("d", 2.0))]
    rows += [row("dense", "e", FORWARD, mpnn=9.0, torch=1.0), row("overhead", "f", mpnn=9.0, torch=1.0)]
    record = {"rows": rows, "processor": "P", "instructions": "AVX2", "threads": 1, "commit": "abc"}
    record |= {"versions": {"torch": "2"}, "date": "2026-01-02 03:04 UTC"}
    lines = published.short({"cpu": record})
    assert lines[0].endswith(" P (AVX2), one thread; torch 2, float32; commit abc, 2026-01-02.")
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| c", "| d"]
    assert lines[-1].endswith("| 2.00 s | torch: 1.00 s | 0.50 |")


def test_a_roof_is_the_longest_of_products_and_bytes() -> None:
    machine = {"flops": 100.0, "stream": 10.0, "gather": 2.0}
    attention = roofs.of_attention(nodes=4, edges=6, heads=2, width=3, is_gathered=True)
    assert attention == {"flops": 144.0, "gather": 288.0, "stream": 216.0}
    found = {"group": "irregular", "direction": FORWARD, "facts": attention}
    assert roofs.seconds(found, machine) == 288 / 2 + 216 / 10
    assert roofs.seconds(found, machine | {"flops": 0.5}) == 144 / 0.5
    assert roofs.seconds(found | {"direction": BOTH}, machine) == pytest.approx(3 * 144 + 2.5 * 21.6)
    assert roofs.seconds(found | {"facts": {"nodes": 4}}, machine) is None
    added = {"group": "reduce", "direction": BOTH, "facts": roofs.of_sum(nodes=4, edges=6, width=3)}
    assert roofs.seconds(added, machine) == 2 * (72 / 2 + (48 + 24) / 10)


def test_the_table_of_roofs_gives_reasons_for_what_is_above() -> None:
    needs = roofs.of_sum(4, 6, 3)
    rows = [
        row(group, "a", FORWARD, mpnn=seconds) | {"facts": needs}
        for group, seconds in (("reduce", 43.2), ("irregular", 60.0))
    ]
    text = "\n".join(roofs.section({"rows": rows, "rates": {"flops": 100.0, "stream": 10.0, "gather": 2.0}}))
    assert "| 43.20 s | 1.00 |" in text
    assert f"- irregular: {roofs.REASONS['irregular']}." in text
    assert "- reduce" not in text
    assert roofs.section({"rows": rows}) == []


def test_every_group_with_roofs_has_a_reason() -> None:
    rows = [row for row in published.read()["cpu"]["rows"] if "stream" in row.get("facts", {})]
    assert {row["group"] for row in rows} <= roofs.REASONS.keys()
    assert roofs.REASONS.keys() <= report.GROUPS.keys()


def test_every_group_of_rows_has_a_title() -> None:
    groups = {row["group"] for name in ("cpu", "workloads") for row in published.read()[name]["rows"]}
    groups |= {case.group for case in all_cases(SMALL)}
    assert groups <= report.GROUPS.keys()


# ------------------------------------------------------------------------------------------------ a sitting


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the load, and whether files differ from the commit."""

    def set_to(load: float = 0.1, commit: str = "abc") -> None:
        monkeypatch.setattr(sitting.os, "getloadavg", lambda: (load, load, load))
        monkeypatch.setattr(sitting, "commit", lambda: commit)
        monkeypatch.setattr(sitting, "find_spec", lambda name: SimpleNamespace())

    set_to()
    return set_to


def test_a_sitting_is_refused_on_a_busy_machine_and_with_changes(
    quiet: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sitting.check_ready(any_load=False)
    quiet(load=0.31)
    with pytest.raises(sitting.NotReady, match=r"its load in the last minute was 0\.31, .* or pass --any-load"):
        sitting.check_ready(any_load=False)
    sitting.check_ready(any_load=True)
    quiet(commit="abc and changes")
    with pytest.raises(sitting.NotReady, match="commit them first"):
        sitting.check_ready(any_load=False)
    monkeypatch.setattr(sitting, "find_spec", lambda name: None if name == "openvino" else SimpleNamespace())
    with pytest.raises(sitting.NotReady, match=r"pip install openvino$"):
        sitting.check_ready(any_load=True)


def test_parts_write_the_records_of_pages(
    quiet: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert tuple(part.record for part in sitting.PARTS) == published.NAMES
    commits = iter("aab")

    def run(command: list[str], **options: object) -> SimpleNamespace:
        assert command[1:3] == ["-m", "benchmarks"]
        about = {"commit": next(commits), "processor": "P", "family": "F", "instructions": "AVX2", "rows": []}
        Path(command[-1]).write_text(json.dumps(about))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sitting.subprocess, "run", run)
    done = here("all", "--only", "cpu", "--only", "real", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cpu.json", "real.json"]
    done = here("all", "--only", "plans", "--out", tmp_path)
    assert done.exit_code == 1
    assert "the commit of these records differs: a, b" in done.output
    assert "--small would replace published records" in " ".join(here("all", "--small").output.split())
