"""`python -m benchmarks`: measure, and write the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import (
    disk as from_disk,
    encoders,
    fit,
    forward_mode as of_forward_mode,
    gpu_plans,
    gpu_report,
    gpu_run,
    in_place,
    measure,
    published,
    real_graphs,
    regret,
    report as reports,
    roofs,
    sampling as sampled,
    scaling as weak_scaling,
    scatter as of_scatter,
    series,
    sitting,
    sizes,
    workloads as workload_cases,
)
from benchmarks.cases import all_cases, select
from benchmarks.contest import Case
from benchmarks.machine import about
from benchmarks.run import Row, run, write as write_results
from mpnn.backends import tuned

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cpu.json"
GPU_RESULTS = HERE / "results" / "gpu.json"
PLAN_RESULTS = HERE / "results" / "plans.json"
REASONS = HERE / "results" / "reasons.md"
SCALING_RESULTS = HERE / "results" / "scaling.json"
SAMPLING_RESULTS = HERE / "results" / "sampling.json"
DISK_RESULTS = HERE / "results" / "disk.json"
WORKLOAD_RESULTS = HERE / "results" / "workloads.json"
REAL_RESULTS = HERE / "results" / "real.json"
FORWARD_MODE_RESULTS = HERE / "results" / "forward_mode.json"
SCATTER_RESULTS = HERE / "results" / "scatter.json"
IN_PLACE_RESULTS = HERE / "results" / "in_place.json"
ENCODER_RESULTS = HERE / "results" / "encoders.json"
SECTIONS = {
    "plans": reports.plans,
    "encoders": encoders.section,
    "in_place": in_place.section,
    "real": real_graphs.section,
    "forward_mode": of_forward_mode.section,
}
"""The parts of the page that have a form of their own, by the name of their record."""
PAGE = HERE.parent / "docs" / "record.md"
GPU_PAGES = [HERE.parent / name for name in ("README.md", "docs/gpu.md", "docs/comparison.md")]

Only = Annotated[list[str] | None, typer.Option(help="Cases with this in their title.")]
Small = Annotated[bool, typer.Option("--small", help="Everything tiny, to try it out.")]
SmallUnjudged = Annotated[bool, typer.Option("--small", help="Everything tiny, to try it out; no goal is judged.")]
Seconds = Annotated[float, typer.Option(help="Spent on timing each entry of each row.", min=0.0)]
Note = Annotated[str, typer.Option(help="A sentence for the results: was the machine busy?")]
Out = Annotated[Path, typer.Option(help="The file of results.")]

console = Console(highlight=False)
app = typer.Typer(
    help="This library against its peers: interleaved, in one run, on the same inputs, checked before any timing.",
    epilog="Begin with [bold]python -m benchmarks cpu --small --only sparse[/bold]: seconds, to see how it looks.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def cpu(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Cases with this in their title, as in [bold]--only sparse --only 'model: GAT'[/bold]."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="The large ones too: 50 million edges, all 12 layers.")] = False,
    small: SmallUnjudged = False,
    threads: Annotated[int, typer.Option(help="For torch and our kernels.", min=1)] = os.cpu_count() or 1,
    seconds: Seconds = 0.5,
    backend: Annotated[str, typer.Option(help="Named in all our entries; auto leaves it to the plan.")] = "auto",
    out: Out = RESULTS,
) -> None:
    """Measures on the CPU and writes the results to a file, after every row; some twelve minutes in all on one thread.

    A row is a case in one direction (forward, or forward and backward). Results that are wrong are not timed. A peer
    that is not installed is left out, which the page says; so is one that fails or disagrees. Exit code 1: a result of
    mpnn was wrong or failed. Missed goals are reported, and are not a failure.
    """
    if full and small:
        raise typer.BadParameter("--full and --small cannot both be meant")
    chosen_sizes = sizes.FULL if full else sizes.SMALL if small else sizes.DEFAULT
    command = _command(f"cpu --threads {threads}", only, small, *["--full"] * full)
    with measure.on_threads(threads):
        cases = _chosen(all_cases(chosen_sizes, backend), only)
        lead = {"command": command, "rates": roofs.rates(3 if small else 50), **about()}
        results = _measure(cases, seconds, lead, out, not small)
    for verdict in series.verdicts(results["rows"]) if not small else []:
        console.print(f"{verdict['status']}: {verdict['text']}, {verdict['direction']}: {verdict['measured']:.2f}")


def _command(name: str, only: list[str] | None, small: bool, *more: str) -> str:
    """The command line of a run, as its record says it."""
    options = [*(f"--only {text!r}" for text in only or []), *["--small"] * small, *more]
    return " ".join([f"python -m benchmarks {name}", *options])


def _measure(cases: list[Case], seconds: float, lead: dict[str, Any], out: Path, judged: bool) -> dict[str, Any]:
    """Runs the cases, telling each row as it is done; leaves with exit code 1 where a result of mpnn was wrong."""
    with _bar() as progress:
        task = progress.add_task("", total=sum(len(case.directions) for case in cases))

        def say(row: Row) -> None:
            progress.update(task, advance=1, description=row["group"])
            for line in lines_of(row):
                console.print(line, soft_wrap=True, markup=False)

        results = run(cases, seconds, lead, out, judged, say)
    console.print(f"results in {out}; python -m benchmarks report makes a page of them")
    if any("error" in row for row in results["rows"]):
        raise typer.Exit(1)
    return results


@app.command()
def gpu(
    only: Only = None,
    small: Small = False,
    seconds: Annotated[float, typer.Option(help="In all; no case begins when they are over.", min=1.0)] = 290.0,
    each: Annotated[float, typer.Option(help="Seconds spent on timing each entry of each row.", min=0.0)] = 0.05,
    processes: Annotated[
        int | None, typer.Option(help="That compile kernels beforehand; default: most of the processors.", min=0)
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda; or cpu, with --small, to try the command where there is none.")
    ] = "cuda",
    commit: Annotated[str, typer.Option(help="Of the code, where there is no repository.")] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the cases that the file of results has.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The file of results, written again after each row.")] = GPU_RESULTS,
) -> None:
    """Checks kernels, layers and models on a GPU in bfloat16 and float32, and times them and their peers.

    Cases of most worth run first, peers that compile for long last; kernels are compiled by many processes beforehand.
    A case that fails leaves a row with its error. Where one leaves the GPU unusable, the command starts again after it.
    """
    try:
        results = gpu_run.measure(out, seconds, each, only or (), small, device, processes, commit, resume, _say_at)
    except (ValueError, RuntimeError) as problem:
        raise typer.BadParameter(str(problem)) from None
    failed = sum("error" in row for row in results["rows"])
    console.print(f"{len(results['rows'])} rows in {out}; errors: {failed}; cases not run: {len(results['not run'])}")


def _say_at(seconds: float, row: Row) -> None:
    console.print(f"{seconds:6.1f} s", *lines_of(row), sep="\n", soft_wrap=True, markup=False)


@app.command()
def scaling(
    repeats: Annotated[int, typer.Option(help="Rounds, after one that warms up.", min=1)] = 20,
    small: Annotated[bool, typer.Option("--small", help="A sixteenth of the nodes, to try it out.")] = False,
    out: Out = SCALING_RESULTS,
) -> None:
    """Times a layer over n nodes on one process and over 2 n nodes on two, one thread each, in processor time."""
    results = weak_scaling.measure(out, repeats=repeats, divide=16 if small else 1)
    for row in results["rows"]:
        console.print(
            f"{row['case']}, {row['nodes']:,} nodes a process: one {1000 * row['one']:.1f} ms, two "
            f"{1000 * row['two']:.1f} ms (computed: {1000 * row['computed']:.1f}), efficiency {row['efficiency']:.2f} "
            f"(goal: {row['bar']})"
        )
    console.print(f"results in {out}")


@app.command()
def sampling(
    size: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(sampled.SIZES)}.")] = None,
    repeats: Annotated[int, typer.Option(help="Passes of each entry, after one that warms up.", min=1)] = 3,
    workers: Annotated[list[int] | None, typer.Option(help="Numbers of workers of NeighborLoader: 0, 2.")] = None,
    threads: Annotated[int, typer.Option(help="For torch and our kernels.", min=1)] = os.cpu_count() or 1,
    out: Out = SAMPLING_RESULTS,
    note: Note = "",
) -> None:
    """Times sampled batches, and training on them, against PyTorch Geometric's NeighborLoader.

    10 million edges take two minutes, 100 million four and 14 GB; [bold]--size small[/bold] seconds. Without
    PyTorch Geometric and torch-sparse or pyg-lib, only our batches are timed.
    """
    chosen = size or [name for name in sampled.SIZES if name != "small"]
    if unknown := set(chosen) - set(sampled.SIZES):
        raise typer.BadParameter(f"there is no size {sorted(unknown)[0]!r}; use one of {', '.join(sampled.SIZES)}")
    torch.set_num_threads(threads)
    results = sampled.measure(out, names=chosen, repeats=repeats, workers=workers or [0, 2], note=note)
    for row in results["rows"]:
        console.print(f"{row['case']}, {row['nodes']:,} nodes, {row['edges']:,} edges", markup=False)
        for name, rate in row["batches_per_second"].items():
            console.print(f"    {name:<16} {rate:8.1f} batches a second")
        line = f"not compared: {row['skipped']}" if "skipped" in row else f"ratio {row['ratio']:.2f}"
        console.print(f"    {line} (goal: {sampled.BAR})", soft_wrap=True)
    console.print(f"results in {out}")


@app.command()
def disk(
    scale: Annotated[int, typer.Option(help="2^scale nodes and 16 edges a node.", min=4, max=30)] = 26,
    width: Annotated[int, typer.Option(help="Features of a node.", min=1)] = 32,
    batches: Annotated[int, typer.Option(help="Batches of 1,024 nodes to train on.", min=1)] = 100,
    folder: Annotated[
        Path | None, typer.Option(help="Where to make a temporary folder; default: the system's.")
    ] = None,
    out: Out = DISK_RESULTS,
    note: Note = "",
) -> None:
    """Writes an R-MAT graph to the disk, trains GraphSAGE on samples of it, and measures time and memory.

    2^26 nodes and 2^30 edges take some ten minutes on two cores and 14 GB of disk, which are free again at the end.
    """
    needs, room = from_disk.needed(scale, width), from_disk.free(folder)
    if needs > room:
        raise typer.BadParameter(f"needs {needs / 1e9:.1f} GB of disk and {room / 1e9:.1f} GB are free: use --folder")
    results = from_disk.measure(out, scale=scale, width=width, batches=batches, parent=folder, note=note)
    console.print(f"{results['nodes']:,} nodes, {results['edges']:,} edges, {results['bytes']['graph'] / 1e9:.2f} GB")
    for row in results["phases"]:
        console.print(f"    {row['phase']:<28} {row['seconds']:8.1f} s  {row['anonymous_bytes'] / 1e9:5.2f} GB")
    console.print(f"anonymous memory (goal: {from_disk.BAR / 1e9:.0f} GB); results in {out}")


@app.command()
def workloads(
    only: Only = None,
    small: SmallUnjudged = False,
    threads: Annotated[int, typer.Option(help="For torch and our kernels.", min=1)] = os.cpu_count() or 1,
    seconds: Seconds = 5.0,
    out: Out = WORKLOAD_RESULTS,
) -> None:
    """Times whole workloads, from input to result, here and in the library that people use for them today.

    An epoch of GIN over proteins, GAT over 169,000 nodes, sentence embeddings, GPT-2's prompt and 64 tokens, a step of
    Longformer at 4,096 tokens, 1,000 tours of 50 cities, prompts with answers, layers of BERT, Llama, GPT-2 and ViT;
    some ten minutes. Exit code 1: a result of mpnn was wrong.
    """
    command = _command(f"workloads --threads {threads}", only, small)
    with measure.on_threads(threads):
        cases = _chosen(workload_cases.cases(workload_cases.SMALL if small else workload_cases.Scale()), only)
        _measure(cases, seconds, {"command": command, **about()}, out, not small)


@app.command()
def real(
    only: Only = None,
    small: Small = False,
    seconds: Seconds = 2.0,
    out: Out = REAL_RESULTS,
    note: Note = "",
) -> None:
    """Times graphs of points against scipy and torch, and networks over 32 molecules against PyTorch Geometric.

    On one thread, in the processor's time: the minimum of interleaved rounds; some three minutes. Exit code 1: a result
    of mpnn was wrong.
    """
    with measure.on_threads(1):
        lead = {"command": _command("real", only, small), "note": note, **about(["scipy"])}
        _measure(_chosen(real_graphs.cases(small), only), seconds, lead, out, False)


@app.command()
def scatter(
    only: Only = None,
    small: Small = False,
    seconds: Seconds = 1.0,
    out: Out = SCATTER_RESULTS,
    note: Note = "",
) -> None:
    """Times torch_scatter's and torch_cluster's functions against these libraries and torch's own operations.

    On one thread, in the processor's time: the minimum of interleaved rounds; some three minutes. Libraries that are
    not compiled are left out: the extra scatter. Exit code 1: a result of mpnn was wrong.
    """
    with measure.on_threads(1):
        lead = {"command": _command("scatter", only, small), "note": note, **about(["torch-cluster"])}
        _measure(_chosen(of_scatter.cases(small), only), seconds, lead, out, False)


@app.command("forward-mode")
def forward_mode(
    only: Only = None,
    small: Small = False,
    seconds: Seconds = 0.5,
    out: Out = FORWARD_MODE_RESULTS,
    note: Note = "",
) -> None:
    """Times derivatives in forward mode (jvp) of attention and sums against their forward passes.

    On one thread, in the processor's time: the minimum of interleaved rounds; under a minute. Exit code 1: a tangent
    was wrong.
    """
    with measure.on_threads(1):
        lead = {"command": _command("forward-mode", only, small), "note": note, **about()}
        _measure(_chosen(of_forward_mode.cases(small), only), seconds, lead, out, False)


@app.command("in-place")
def of_models_in_place(
    only: Only = None,
    small: Small = False,
    seconds: Seconds = 1.0,
    out: Out = IN_PLACE_RESULTS,
    note: Note = "",
) -> None:
    """Times models of transformers after mpnn.hf.use against the same with torch's attention, and the first call.

    On one thread, in the processor's time; some four minutes. Exit code 1: a result of mpnn was wrong.
    """
    with measure.on_threads(1):
        lead = {"command": _command("in-place", only, small), "note": note, **about()}
        results = _measure(_chosen(in_place.cases(small), only), seconds, lead, out, not small)
    if not only:
        results["rows"] += in_place.first_calls(small, rounds=1 if small else 3)
        write_results(results, out)


@app.command("encoders")
def of_encoders(
    only: Only = None,
    small: Small = False,
    seconds: Seconds = 5.0,
    out: Out = ENCODER_RESULTS,
    note: Note = "",
) -> None:
    """Times a BERT of MiniLM's shape against transformers, ONNX Runtime and OpenVINO.

    On one thread, in the processor's time; some five minutes. Peers that are not installed are left out: pip install
    onnx onnxruntime onnxscript openvino. Exit code 1: a result of mpnn was wrong.
    """
    with measure.on_threads(1):
        lead = {"command": _command("encoders", only, small, f"--seconds {seconds:g}"), "note": note}
        lead |= {"peak": encoders.peak(), "memory": encoders.memory(small), **about(["onnxruntime", "openvino"])}
        _measure(_chosen(encoders.cases(small), only), seconds, lead, out, False)


def _chosen(cases: Iterable[Case], only: list[str] | None) -> list[Case]:
    try:
        return select(list(cases), only or [])
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="--only") from None


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="A file that a run has written.")] = RESULTS,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the records of other runs are; default: the folder of the file of results."),
    ] = None,
    gpu: Annotated[Path, typer.Option(help="A file that a run on a GPU has written, if there is one.")] = GPU_RESULTS,
    page: Annotated[Path, typer.Option(help="The page; its pictures go into img/ of its folder.")] = PAGE,
) -> None:
    """Writes the page of a run, with its tables, goals and pictures. Into other pages go a GPU's tables and the figures
    of a CPU, unless --page names another page."""
    if not results.is_file():
        raise typer.BadParameter(f"there is no {results}; python -m benchmarks cpu writes it", param_hint="--results")
    page.parent.mkdir(parents=True, exist_ok=True)
    reports.draw(json.loads(results.read_text())["rows"], page.parent)
    page.write_text(performance_page(results, folder))
    console.print(f"wrote {page}")
    if page != PAGE:
        return
    records = published.read()
    subprocess.run([sys.executable, str(HERE.parent / "docs" / "figures.py"), "index/length.png"], check=True)
    for other in published.pages():
        other.write_text(published.fill(other.read_text(), records))
        console.print(f"wrote the figures of {other}")
    for other in GPU_PAGES if gpu.is_file() else ():
        other.write_text(gpu_report.fill(other.read_text(), json.loads(gpu.read_text())))
        console.print(f"wrote the tables of {other}")


def performance_page(results: Path = RESULTS, folder: Path | None = None) -> str:
    """The text of docs/record.md, from a file of results and the records in a folder, by default that of the file."""
    records = published.read(folder or results.parent)
    further: list[str] = []
    for name, section in SECTIONS.items():
        further += ["", *section(records[name])] if name in records else []
    others = {"Whole workloads": records["workloads"]} if "workloads" in records else {}
    why = REASONS.read_text() if REASONS.is_file() else ""
    return reports.page(json.loads(results.read_text()), others, why, further)


@app.command("all")
def all_figures(
    only: Annotated[list[str] | None, typer.Option(help="Only the parts that write these records.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Everything tiny, to try it out: needs --out.")] = False,
    any_load: Annotated[
        bool, typer.Option("--any-load", help="Also while other programs work: not for figures to publish.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder of records.")] = RESULTS.parent,
) -> None:
    """Measures all published figures of a CPU in one sitting, on one thread; some 30 minutes on a quiet machine.

    Then write the pages: [bold]python -m benchmarks report[/bold]. Refused while other programs work, while files
    of mpnn are not committed, and without a peer. Exit code 1: a part failed, or records are of several commits or
    processors.
    """
    if small and out == RESULTS.parent:
        raise typer.BadParameter("--small would replace published records: pass --out FOLDER", param_hint="--small")
    if unknown := set(only or ()) - set(published.NAMES):
        raise typer.BadParameter(f"there is no part {sorted(unknown)[0]!r}; there are {', '.join(published.NAMES)}")
    parts = [part for part in sitting.PARTS if not only or part.record in only]
    try:
        sitting.check_ready(any_load)
    except sitting.NotReady as problem:
        raise typer.BadParameter(str(problem), param_hint="all") from None
    codes = sitting.run(out, parts, small, lambda line: console.print(line, soft_wrap=True, markup=False))
    problems = [f"{name} ended with {code}" for name, code in codes.items() if code]
    problems += sitting.differences(out, sitting.PARTS)
    for problem in problems:
        console.print(problem, soft_wrap=True, markup=False)
    if problems:
        raise typer.Exit(1)


@app.command("regret")
def regret_of_plans(
    seed: Annotated[int, typer.Option(help="Of the requests; take one that prices were not fitted to.")],
    requests: Annotated[int, typer.Option(help="How many to draw.", min=1)] = 1000,
    seconds: Annotated[float, typer.Option(help="Spent on timing each backend in each request.", min=0.0)] = 0.04,
    times: Annotated[
        Path | None, typer.Option(help="A file of times: requests in it are not measured again, others are added.")
    ] = None,
    threads: Annotated[int, typer.Option(help="For torch and our kernels.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="The file of results, for the page.")] = None,
    note: Annotated[str, typer.Option(help="A sentence for the page: was the machine busy?")] = "",
) -> None:
    """Measures how far plans are from the fastest backend, over requests of many kinds drawn at random.

    Regret is the time of the chosen backend over that of the fastest. All backends that can run a request run it,
    interleaved, after their results were compared. 1,000 requests take some 15 minutes on an idle core.
    """
    torch.set_num_threads(threads)
    known = {(one.seed, one.index): one for one in regret.read(times)} if times and times.exists() else {}
    found = []
    with _bar() as progress:
        for index in progress.track(range(requests), description=f"seed {seed}"):
            one = known.get((seed, index))
            if one is None:
                one = regret.measure(seed, index, seconds)
                if times:
                    regret.append(times, one)
            found.append(regret.regret(one))
    summary = regret.summary(found)
    for line in regret.report(summary):
        console.print(line, soft_wrap=True, markup=False)
    if out:
        command = f"python -m benchmarks regret --seed {seed} --requests {requests}"
        out.write_text(json.dumps({"command": command, "note": note, **about(), **summary}, indent=1) + "\n")


@app.command("fit")
def fit_costs(
    times: Annotated[list[Path] | None, typer.Option(help="Files that the command regret has written.")] = None,
    only: Annotated[str, typer.Option(help="Cases with this in their name.")] = "",
    seconds: Annotated[float, typer.Option(help="Spent on timing each backend in each case.", min=0.0)] = 0.05,
    write: Annotated[bool, typer.Option("--write", help="Keep the new prices, for every plan from now on.")] = False,
    gpu: Annotated[Path | None, typer.Option(help="A file that a run on a GPU has written: prices on a GPU.")] = None,
) -> None:
    """Fits the prices of the backends' operations to measured times. --write puts them into the package.

    On one thread. The cases of `benchmarks/fit.py` are measured, some five minutes; times of requests drawn at random
    come from files. With --gpu, nothing is measured: prices on a GPU follow the rows of its file.
    """
    torch.set_num_threads(1)
    if gpu is not None:
        _fit_gpu(gpu, write)
        return
    samples = []
    for name, sample in fit.measure(seconds, only):
        samples.append(sample)
        taken = ", ".join(f"{backend} {s * 1e3:.2f}" for backend, s in sample.seconds.items())
        console.print(f"{name}: {taken} ms", soft_wrap=True, markup=False)
    samples += [fit.of_drawn(one) for path in times or [] for one in regret.read(path)]
    prices = fit.fitted(samples)
    console.print_json(data=prices)
    if write:
        console.print(f"wrote {fit.write(prices, about())}")


def _fit_gpu(path: Path, write: bool) -> None:
    results = json.loads(path.read_text())
    rows = [row for row in results["rows"] if row["group"] == gpu_plans.GROUP]
    start = tuned.shipped()["cuda"]["nanoseconds"]
    gpu_plans.count(rows)
    found, dense = gpu_plans.samples(rows), gpu_plans.of_torch(results["rows"])

    def fitted(half: list[Any]) -> Any:
        return fit.decided(half, fit.fitted(half, start, 0.0))

    halves = []
    for part in (0, 1):
        others = [row for k, row in enumerate(rows) if k // 4 % 2 != part]  # 4 rows of a graph and width
        half = gpu_plans.samples([row for k, row in enumerate(rows) if k // 4 % 2 == part])
        gpu_plans.choose(others, fitted(half + dense))
        halves.append(gpu_report.regret_of(others))
        console.print(f"prices from half of the rounds, the others: {halves[-1]}", soft_wrap=True, markup=False)
    prices = fitted(found + dense)
    gpu_plans.choose(rows, prices)
    console.print(f"prices from all: {gpu_report.regret_of(rows)}", soft_wrap=True, markup=False)
    if write:
        results["halves"] = halves
        machine = {name: results.get(name) for name in ("gpu", "date", "commit", "versions")}
        console.print(f"wrote {fit.write_gpu(prices, machine)}")
        write_results(results, path)


@app.command("list")
def list_cases(
    full: Annotated[bool, typer.Option("--full", help="With the large ones.")] = False,
) -> None:
    """Names all cases, and with each the goals are kept in its rows."""
    for case in all_cases(sizes.FULL if full else sizes.DEFAULT):
        console.print(f"{case.title}  ({', '.join(case.directions)})", markup=False)


def lines_of(row: dict[str, Any]) -> list[str]:
    """A row as it is printed when done."""
    head = f"{row['group']}: {row['case']}, {row['direction']}"
    for problem in ("error", "skipped"):
        if problem in row:
            return [head, f"    {problem}: {row[problem]}"]
    ours = row["entries"][row["ours"]]["least"]
    found = [head]
    for name, entry in row["entries"].items():
        if "least" not in entry:
            found.append(f"    {name:<28} {entry['note']}")
            continue
        ratio = "" if name == row["ours"] else f"{entry['least'] / ours:8.2f} x"
        room = "" if entry.get("peak_bytes") is None else reports.memory(entry["peak_bytes"])
        found.append(f"    {name:<28} {reports.duration(entry['least']):>9} {ratio:>10} {room:>10}")
    for bar in row["bars"]:
        shown = "-" if bar["measured"] is None else reports.amount(bar["measured"], bar["kind"])
        found.append(f"    {bar['status']}: {bar['text']}: {shown}")
    return found


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
