"""The harness from end to end on one tiny case: what it writes, what it refuses, and how it judges."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks are no part of the installed package

from benchmarks import cli, disk, forward_mode, gpu, gpu_report, measure, run, series, truth  # noqa: E402
from benchmarks.cases import all_cases, select  # noqa: E402
from benchmarks.contest import BOTH, FORWARD, OURS, STEP, Bar, Case, Contest, Entry, Missing  # noqa: E402
from benchmarks.sizes import DEFAULT, FULL, SMALL  # noqa: E402
from mpnn import MessagePassing, graphs, ops  # noqa: E402
from mpnn.attention import Additive  # noqa: E402


def here(*arguments: object) -> Result:
    """The command in this process, which has imported everything."""
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def said(text: str) -> str:
    """Without the frame and the line breaks of messages."""
    return " ".join(text.replace("│", " ").split())


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def test_one_case_from_measuring_to_the_page(tmp_path: Path) -> None:
    file, page = tmp_path / "results" / "cpu.json", tmp_path / "docs" / "performance.md"
    options = ("--small", "--threads", 1, "--seconds", 0, "--backend", "dense", "--only", "dense: causal(), N 64")
    done = here("cpu", *options, "--out", file)
    assert done.exit_code == 0, done.output
    assert "torch SDPA, dense" in done.stdout
    results = json.loads(file.read_text())
    assert {"commit", "processor", "threads", "versions", "command"} <= set(results)
    forward, both = results["rows"]
    assert (forward["direction"], both["direction"]) == (FORWARD, BOTH)
    for row in (forward, both):
        assert set(row["entries"]) == {OURS, "torch SDPA, dense", "its products in cache"}
        assert all(entry["median"] > 0 for entry in row["entries"].values())
        assert max(row["checked"]["errors"].values()) < truth.TOLERANCE

    done = here("report", "--results", file, "--page", page)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "| causal(), N 64 | forward | mpnn |" in text
    assert results["commit"] in text
    assert "img/performance_dense.png" in text
    assert (page.parent / "img" / "performance_dense.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_gpu_command_runs_its_cases_where_there_is_none(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    done = command("gpu", "--small", "--device", "cpu", "--each", 0, "--seconds", 3000, "--out", file)
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(file.read_text())
    assert results["not run"] == []
    assert not [row for row in results["rows"] if "error" in row]
    groups = {
        "exact",
        "irregular",
        "reduce",
        "structured",
        "in place",
        "recurrence",
        "host",
        "capture",
        "plan",
        "peers",
    }
    assert {row["group"] for row in results["rows"]} == groups
    for row in results["rows"]:
        assert row["checked"]["errors"]
        assert row["group"] == "exact" or all("median" in e or "note" in e for e in row["entries"].values())
    filled = gpu_report.fill("<!-- gpu: peers --><!-- gpu end --><!-- gpu: captured --><!-- gpu end -->", results)
    assert "| PyG GATConv |" in filled
    assert "a training step in two lines" in filled


def test_what_never_ran_on_a_gpu_runs_first() -> None:
    record = json.loads(gpu.RECORD.read_text())
    ordered = [case.title in gpu.titles(record["rows"]) for case in gpu.cases(gpu.DEFAULT)]
    assert ordered == sorted(ordered)
    named = [case.title for case, known in zip(gpu.cases(gpu.DEFAULT), ordered, strict=True) if not known]
    for what in ("dropout by words", "Mamba-1", "steps of 64 keys", "Llama, a training step", "against flash-linear"):
        assert any(what in title for title in named) or not record["not run"]


@pytest.mark.slow
def test_what_never_ran_on_a_gpu_runs_here(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    only = [x for text in ("in steps", "Mamba", "step", "peers: ", "dropout by words") for x in ("--only", text)]
    done = command("gpu", "--small", "--device", "cpu", "--each", 0, *only, "--processes", 0, "--out", file)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row for row in rows if "error" in row] == []
    flex = [row["entries"]["FlexAttention"] for row in rows if "against FlexAttention" in row["case"]]
    assert sum("median" in entry for entry in flex) == len(flex) // 2 == 5  # no backward pass on CPUs


def test_rows_are_checked_also_where_one_has_too_many_edges() -> None:
    assert truth.drawn(graphs.complete().bind(64), width=1_000_000, seed=0).tolist() == [0]


@pytest.mark.slow
def test_processes_check_beforehand_and_a_run_goes_on_where_another_stopped(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    only = ("--only", "exact: csr, sum 64, a graph with hubs, float32", "--only", "reduce: max 64, 200")
    options = ("gpu", "--small", "--device", "cpu", "--each", 0, *only, "--out", file)
    done = command(*options, "--processes", 2)
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    named = [(row["group"], row["direction"]) for row in results["rows"]]
    assert named == [("exact", FORWARD), ("exact", BOTH), ("reduce", FORWARD), ("reduce", FORWARD)]
    kept = results["rows"][:3]
    file.write_text(json.dumps(results | {"rows": kept}))
    done = command(*options, "--resume")
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert rows[:3] == kept
    assert len(rows) == 4


@pytest.mark.slow
def test_scaling_compares_one_process_with_two(tmp_path: Path) -> None:
    pytest.importorskip("pymetis")
    done = command("scaling", "--small", "--repeats", 2, "--out", tmp_path / "scaling.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "scaling.json").read_text())["rows"]
    assert [row["nodes"] for row in rows] == [256, 5625]
    assert all(row["efficiency"] > 0 and sum(row["fetches"]) > 0 for row in rows)


@pytest.mark.slow
def test_sampling_compares_batches_and_says_what_is_missing(tmp_path: Path) -> None:
    done = command("sampling", "--size", "small", "--repeats", 1, "--workers", 0, "--out", tmp_path / "sampling.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "sampling.json").read_text())["rows"]
    assert [row["case"] for row in rows] == ["small, batches", "small, training"]
    for row in rows:
        assert row["batches_per_second"]["mpnn"] > 0
        assert ("ratio" in row and row["error"] < 1e-4) or f"not compared: {row['skipped']}" in done.stdout
    refused = command("sampling", "--size", "huge")
    assert refused.returncode == 2
    assert "there is no size 'huge'" in said(refused.stderr)


def test_a_graph_on_the_disk_is_written_and_trained_on_in_little_memory(tmp_path: Path) -> None:
    out = tmp_path / "disk.json"
    results = disk.measure(out, scale=10, width=8, batches=2, parent=tmp_path, note="")
    assert json.loads(out.read_text())["edges"] == results["edges"] == 16 * 2**10
    assert [path.name for path in tmp_path.iterdir()] == ["disk.json"]  # the graph is gone
    assert len(results["phases"]) == 4
    if Path("/proc/self/status").exists():
        assert all(row["anonymous_bytes"] > 0 for row in results["phases"])
    assert results["bytes"]["graph"] == 4 * 16 * 2**10 + 8 * (2**10 + 1)
    assert disk.needed(10, 8) >= results["bytes"]["graph"] + results["bytes"]["features"]


def test_rmat_edges_fall_into_quarters_as_often_as_said() -> None:
    edges = np.concatenate(list(disk.rmat(12, chunk=1000)), 1)
    assert edges.shape == (2, 16 * 2**12)
    back = edges * pow(0x9E3779B1, -1, 2**12) % 2**12  # the numbers before nodes were renumbered
    for bit in range(12):
        src, dst = back >> bit & 1
        shares = [(dst == row) & (src == column) for row in (0, 1) for column in (0, 1)]
        # the standard deviation of a share is at most 0.002
        assert [share.mean() for share in shares] == pytest.approx([0.57, 0.19, 0.19, 0.05], abs=0.01)


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    done = here("disk", "--scale", 30, "--width", 100_000, "--folder", tmp_path)
    assert done.exit_code == 2
    assert "GB are free" in said(done.output)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_workloads_run_beside_their_peers(tmp_path: Path) -> None:
    file, page = tmp_path / "workloads.json", tmp_path / "page.md"
    done = command("workloads", "--small", "--seconds", 0, "--out", file)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = [row for row in json.loads(file.read_text())["rows"] if "skipped" not in row]
    assert len(rows) >= 5  # two need files that are not in the package
    for row in rows:
        notes = {name: entry["note"] for name, entry in row["entries"].items() if "note" in entry}
        assert all(note.startswith("pip install") for note in notes.values()), notes
        assert set(row["checked"]["errors"]) == row["entries"].keys() - notes.keys()
        assert len(row["checked"]["errors"]) >= 2
    done = command("report", "--results", file, "--page", page)
    assert done.returncode == 0, done.stderr
    assert "# Whole workloads" in page.read_text()


@pytest.mark.slow
def test_points_and_molecules_run_beside_their_peers(tmp_path: Path) -> None:
    file, page = tmp_path / "real.json", tmp_path / "page.md"
    done = here("real", "--small", "--seconds", 0, "--out", file)
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    assert not [row for row in rows if "error" in row or "skipped" in row]
    compared = [row for row in rows if "checked" in row]
    assert {row["case"] for row in rows} - {row["case"] for row in compared} <= {"SchNet", "DimeNet"}
    for row in compared:
        timed = [name for name, entry in row["entries"].items() if "least" in entry]
        assert set(row["checked"]["errors"]) == set(timed)
        assert max(row["checked"]["errors"].values()) < truth.TOLERANCE
    done = here("report", "--results", file, "--page", page)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "## Points and molecules" in text
    assert all(f"| {row['case']} | {row['direction']} | " in text for row in rows)


@pytest.mark.slow
def test_layers_of_physics_and_windows_of_images_agree_with_torch(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    done = here("cpu", "--small", "--seconds", 0, "--only", "physics", "--only", "windows of", "--out", file)
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    assert {row["group"] for row in rows} == {"physics", "sparse"}
    assert all(len(row["checked"]["errors"]) == 2 for row in rows)


@pytest.mark.slow
def test_tangents_are_measured_next_to_forward_passes(tmp_path: Path) -> None:
    file = tmp_path / "forward_mode.json"
    done = here("forward-mode", "--small", "--seconds", 0, "--out", file)
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())
    table = forward_mode.table(results)
    assert len(table) == 2 + len(results["rows"])
    assert any(line.startswith("| attention, Swin's windows of 7 x 7, 14 x 14 | 9,604 | ") for line in table)


@pytest.mark.slow
def test_models_in_place_run_beside_themselves(tmp_path: Path) -> None:
    file, page = tmp_path / "in_place.json", tmp_path / "page.md"
    done = here("in-place", "--small", "--seconds", 0, "--out", file)
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows[-2:]] == [
        "Llama of 594 MiB, 1 x 16, first call",
        "Llama of 594 MiB, 1 x 16, a later call",
    ]
    assert all(len(row["entries"]) == 2 and all("least" in e for e in row["entries"].values()) for row in rows)
    assert all(max(row["checked"]["errors"].values()) < truth.TOLERANCE for row in rows[:-2])
    done = here("report", "--results", file, "--page", page)
    assert done.exit_code == 0, done.output
    assert "## Models in place" in page.read_text()


@pytest.mark.slow
def test_encoders_run_beside_their_peers(tmp_path: Path) -> None:
    file, page = tmp_path / "encoders.json", tmp_path / "page.md"
    done = here("encoders", "--small", "--seconds", 0, "--out", file)
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())
    assert results["peak"] > 1e8
    assert all(max(row["checked"]["errors"].values()) < truth.TOLERANCE for row in results["rows"])
    done = here("report", "--results", file, "--page", page)
    assert done.exit_code == 0, done.output
    assert "## Encoders on a CPU" in page.read_text()
    assert "| 2 x 8, padded | " in page.read_text()
    assert "| 2 x 8 | mpnn | " in page.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    assert "torch finds no GPU here" in said(here("gpu").output)


def test_help_teaches_and_wrong_words_are_refused() -> None:
    assert "Results that are wrong are not timed" in said(here("cpu", "--help").output)
    done = here("cpu", "--threads", 1, "--only", "no such case")
    assert done.exit_code == 2
    assert "the groups are dense, sparse, length" in said(done.output)


# ---------------------------------------------------------------------------------------- a GPU's tables


def test_every_figure_of_a_gpu_has_its_row() -> None:
    """Pages hold exactly the tables that the file gives, and `docs/gpu.md` no time or ratio besides."""
    results = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())
    for page in cli.GPU_PAGES:
        text = page.read_text()
        assert gpu_report.fill(text, results) == text, f"{page.name}: run python -m benchmarks report"
        assert gpu_report.without_tables(text) != text
    figure = re.compile(r"\d\s*(ms|us|ns|x|times|TFLOP/s|GB/s|GB|MB|%)(?!\w)|\d\s*(micro|milli|nano)seconds")
    prose = gpu_report.without_tables((ROOT / "docs" / "gpu.md").read_text())
    assert not figure.search(prose), figure.search(prose)


def test_the_page_of_a_gpu_is_short_and_shows_losses() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert len(re.sub(r"^ *\|.*$", "", text, flags=re.M).split()) <= 600
    rows = json.loads(gpu.RECORD.read_text())["rows"]
    for page in (text, (ROOT / "docs" / "comparison.md").read_text()):
        assert re.search(r"\| 0\.\d+ \|", page)
    _, *table = [
        line for line in gpu_report.short(json.loads(gpu.RECORD.read_text())) if re.fullmatch(r"\| .+\|", line)
    ]
    assert all(line.count("mpnn") == 0 for line in table)  # no row compares the library with itself
    assert sum(any(word in line for word in ("backward", "step")) for line in table) > len(table) // 2
    assert min(c.ratio for c in gpu_report.comparisons(rows)) == pytest.approx(float(table[-1].split()[-2]), abs=0.01)


def test_tables_of_a_gpu_say_what_failed_and_what_a_plan_cost() -> None:
    row = {"group": "plan", "case": "a", "direction": FORWARD, "ours": "csr"}
    rows = [
        row | {"entries": {"csr": {"median": 3e-3}, "tiles": {"median": 2e-3}, "dense": {"note": "no"}}},
        row | {"case": "b", "entries": {"csr": {"median": 1e-3}}},
        row | {"group": "exact", "case": "tiles, c, float32", "error": "OutOfMemoryError: 2 GiB"},
    ]
    ((_, chosen, quickest, ratio),) = gpu_report.regrets(rows)
    assert (chosen, quickest, ratio) == ("csr", "tiles", pytest.approx(1.5))
    lines = gpu_report.fill("<!-- gpu: exact --><!-- gpu end -->", {"rows": rows})
    assert "| `tiles`, graphs of runs | float32 | 0 | 1 |  |  |" in lines
    assert "processes that shared the memory of the card" in lines
    with pytest.raises(ValueError, match="there is no table 'speed'"):
        gpu_report.fill("<!-- gpu: speed --><!-- gpu end -->", {"rows": rows})


def test_the_time_of_a_gpu_alone_begins_when_all_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, end: object) -> float:
            return 4.0

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(f"sleep {cycles}"))
    monkeypatch.setattr(measure, "_cache", lambda device: torch.ones(1))
    assert measure.on_device_alone(lambda: done.append("call"), host=1e-3) == 4e-3
    assert done[:4] == ["sleep 4000000", "event", "call", "event"]


# ---------------------------------------------------------------------------------------- checking


def tiny(ours: Entry, *others: Entry | Missing, bars: tuple[Bar, ...] = ()) -> Case:
    graph, given = graphs.causal().bind(10), inputs()
    exact = truth.Sampled(graph, given, lambda part, rows, q, k, v: ops.attend(part, q[rows], k, v), width=4)
    return Case("tiny", "causal", lambda: Contest([ours, *others], exact, exact.description, bars))


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(10, 2, 2, generator=generator).requires_grad_() for _ in range(3))


def attending(name: str, wrong: float = 0.0, in_backward: bool = False) -> Entry:
    given = inputs()

    def call() -> Tensor:
        out = ops.attend(graphs.causal().bind(10), *given, backend="dense")
        if in_backward:
            return out + wrong * (given[0] - given[0].detach())
        return out * (1 + wrong)

    return Entry(name, call, given)


def test_a_wrong_result_is_refused_and_not_timed() -> None:
    for wrong in (attending(OURS, 1e-3), attending(OURS, float("nan"))):
        for row in run.rows_of(tiny(wrong), 0.0):
            assert "mpnn: its output is off by" in row["error"]
            assert "entries" not in row
    forward, both = run.rows_of(tiny(attending(OURS, 1e-2, in_backward=True)), 0.0)
    assert "error" not in forward
    assert "its gradient 0 is off by" in both["error"]


def test_a_peer_that_disagrees_fails_or_is_missing_is_left_out_with_a_sentence() -> None:
    def fail() -> Tensor:
        raise RuntimeError("no kernel")

    others = (attending("off", 0.1), Entry("broken", fail), Missing("absent", "absent is not installed"))
    for row in run.rows_of(tiny(attending(OURS), *others), 0.0):
        assert row["entries"]["off"]["note"].startswith("left out: Wrong: off: its output is off by")
        assert row["entries"]["broken"] == {"note": "failed: RuntimeError: no kernel"}
        assert row["entries"]["absent"] == {"note": "absent is not installed"}
        assert row["entries"][OURS]["rounds"] >= measure.MIN_ROUNDS


@pytest.mark.parametrize("graph", [graphs.window(3).bind(50), graphs.longformer(4, 2).bind(50)], ids=str)
def test_drawn_rows_are_those_of_the_whole(graph: object) -> None:
    rows = truth.drawn(graph, width=1, seed=0)
    assert {0, 49} <= set(rows.tolist())
    assert torch.equal(truth.part_of(graph, rows).dense(), graph.dense()[rows])
    shuffled = graphs.from_edges(graph.edge_index[:, torch.randperm(graph.num_edges)], 50)
    assert torch.equal(truth.part_of(shuffled, rows).dense(), graph.dense()[rows])


def test_the_truth_of_a_layer_holds_the_gradients_of_its_parameters() -> None:
    graph, x = graphs.window(2).bind(12), torch.randn(12, 4).requires_grad_()
    op = MessagePassing(graph, "sum", None, Additive(4, 3, 2), backend="edge_list")
    op(x)  # what a graph remembers of a call must not keep the layer from being copied
    entry = Entry(OURS, lambda: op(x), (x, *op.parameters()))
    assert truth.of_layer(op, graph, x, 6)(entry, BOTH) < 1e-5


# ---------------------------------------------------------------------------------------- judging


def test_no_case_begins_when_the_time_is_over(tmp_path: Path) -> None:
    results = run.run([tiny(attending(OURS))] * 2, 0.0, {}, tmp_path / "rows.json", until=0.0)
    assert results["rows"] == []
    assert json.loads((tmp_path / "rows.json").read_text())["not run"] == ["tiny: causal"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_in_whole_must_be_right_and_have_the_same_bits_twice(dtype: torch.dtype) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    whole = truth.Whole([x], lambda x: x.sin())
    assert whole(Entry(OURS, lambda: x.sin(), [x]), BOTH) < 1e-2
    calls: list[int] = []

    def other_bits() -> Tensor:
        calls.append(1)
        return x.sin() * (1 + len(calls) * torch.finfo(dtype).eps)

    with pytest.raises(truth.Wrong, match="other bits the second time"):
        whole(Entry(OURS, other_bits, [x]), FORWARD)
    with pytest.raises(truth.Wrong, match="result 1 is off by"):
        whole(Entry(OURS, lambda: x.sin() + 0.2 * (x - x.detach()), [x]), BOTH)


def test_bars() -> None:
    entries = {"mpnn": {"least": 0.2, "peak_bytes": 100}, "peer": {"least": 1.0}, "gone": {"note": "not installed"}}
    judged = [
        (Bar("", 8, "at least", against="peer"), 5.0, "miss"),
        (Bar("", 4, "at least", against="peer"), 5.0, "pass"),
        (Bar("", 0.8, "at most", against="peer", factor=0.5), 0.4, "pass"),
        (Bar("", 0.3, "at most", against="peer", factor=0.5), 0.4, "miss"),
        (Bar("", 0.1, "seconds"), 0.2, "miss"),
        (Bar("", 100, "bytes"), 100, "pass"),
        (Bar("", 0.1, "over", against="peer"), -0.8, "pass"),
    ]
    for bar, measured, status in judged:
        verdict = bar.judge(entries, "mpnn")
        assert verdict["measured"] == pytest.approx(measured)
        assert verdict["status"] == status
    missing = Bar("", 2, "at least", against="gone").judge(entries, "mpnn")
    assert (missing["status"], missing["why"]) == ("not measured", "not installed")


@pytest.mark.parametrize(("longest", "status"), [(16.0, "pass"), (32.0, "miss")])
def test_time_against_length_must_be_linear(longest: float, status: str) -> None:
    rows = [
        {
            "group": "length",
            "series": "window(4)",
            "direction": FORWARD,
            "ours": "mpnn",
            "facts": {"nodes": n},
            "entries": {"mpnn": {"least": time}},
        }
        for n, time in ((512, 9.0), (4096, 1.0), (65536, longest))
    ]
    (verdict,) = series.verdicts(rows)
    assert verdict["measured"] == longest / 16
    assert verdict["status"] == status


def test_times_are_taken_in_turns() -> None:
    calls: list[str] = []
    times = measure.interleaved([lambda: calls.append("a"), lambda: calls.append("b")], seconds=0.0)
    assert [len(t) for t in times] == [measure.MIN_ROUNDS] * 2
    assert "".join(calls) == "ab" * (measure.MIN_ROUNDS + 1)


@pytest.mark.parametrize("direction", [FORWARD, BOTH, STEP])
@pytest.mark.sample(3)
def test_memory_of_a_call(direction: str) -> None:
    x = torch.ones(1 << 22, requires_grad=True)  # 16 MB
    work = measure.work(Entry("", lambda: x.exp(), (x,)), direction)
    work()  # what only the first call takes (the cotangent, code read from disk) is not its memory
    peaks = [measure.peak(work) for _ in range(6)]
    if peaks[0] is None:
        pytest.skip("this system does not report the peak memory of a process")
    found = min(peaks)  # the rest of the process may take memory at the same time, and never lowers the peak
    # The saved output, and the gradient of the backward pass; three megabytes for the threads of tests before.
    assert found == pytest.approx({BOTH: 2}.get(direction, 1) * 16 * 2**20, abs=3 * 2**20)


def test_cases_cover_the_sizes() -> None:
    for sizes in (SMALL, DEFAULT, FULL):
        titles = [case.title for case in all_cases(sizes)]
        assert len(set(titles)) == len(titles)
    edges = [case.name for case in select(all_cases(FULL), ["edges:"])]
    assert "50,000,000" in edges[-1]
    assert [c.name for c in select(all_cases(DEFAULT), ["LENGTH"])][-1] == "window(256), N 65536"
