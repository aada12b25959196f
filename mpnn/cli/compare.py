"""`mpnn compare`: which graph suits the data? One model over several graphs, and a verdict."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from shlex import quote
from statistics import mean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch.optim import Optimizer

from mpnn.cli import page, pictures
from mpnn.cli.console import console, exit_on_failure, exit_on_invalid_input, folder, memory, refuse, table, warn
from mpnn.cli.expressions import imported
from mpnn.cli.measure import backends, estimates
from mpnn.cli.options import FILES, Defaults, Options, takes
from mpnn.cli.search import UnusableGraph, best_numbers, bounds, expanded, require_optuna, seconds_of, separated
from mpnn.cli.stop import Stopped, stop_between_steps
from mpnn.cli.tasks import MEASURES, NodeRun, NodeSettings, Run, TextRun, TextSettings, manual, say_how_read
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.comparison import Comparison, Curve, Train, compare as compare_graphs, spread
from mpnn.train.loop import History, Settings, TrainingDiverged, fit, require_accelerate

_SIZES = {**asdict(TextSettings()), "context": 256, "batch": 16, "lr": 2e-3}
_SIZE_NAMES = ("context", "dim", "heads", "layers", "batch", "lr")
_NODES = asdict(NodeSettings())
DEFAULTS: Defaults = {
    "text": {**{name: _SIZES[name] for name in _SIZE_NAMES}, "text": "pydoc", "file": None},
    "cora": _NODES,
    "digits": _NODES,
    "edges": {**_NODES, **FILES, "problem": "classes"},
    "hf": {"file": None, "context": 256},
}
_BUDGET = "5m"
_SEEDS = 3
_RATES = (0.5, 1.0, 2.0)  # times the learning rate
_VALIDATIONS = 5  # in the first round
_WARM_STEPS = 20
_MIN_STEPS = 20
CURVES = "curves.png"
COSTS = "costs.png"
HEADINGS = ("", "graph", "edges", "reach", "backend", "estimated", "a step", "rate", "equal time", "equal steps", "end")
_SHOWN = tuple(heading for heading in HEADINGS if heading not in ("reach", "estimated", "edges", "backend"))
"""The columns of the table that is printed; the page has all."""
LEGEND = {
    "reach": "share of all pairs of nodes that the model's layers connect; about one half at most for causal graphs",
    "estimated": "message passing in a step, as the plan expects it before anything runs",
    "a step": "forward, backward and update, measured",
    "equal time": "error when each graph had trained as long as the one with the shortest training",
    "equal steps": "error when each graph had made as many steps as the one with the fewest",
    "end": "error at the end of its training; graphs with * dropped out and trained for less time",
}


@takes(DEFAULTS, "task", "file", "text", *_SIZE_NAMES, *(n for n in DEFAULTS["edges"] if n not in _SIZE_NAMES))
def compare(
    options: Options,
    graphs: Annotated[
        str | None,
        typer.Option(
            metavar="EXPR; EXPR",
            help="Graphs to compare, with semicolons between them; window(8..64) stands for window(8), window(16), "
            "window(32) and window(64). A colon adds a value of --attention (text) or --model (nodes) of mpnn train: "
            "causal:retention, cora:gcn. Default: four for text, three for nodes.",
        ),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(
            "--hf",
            metavar="PATH_OR_ID",
            help="A language model of transformers. Compares its perplexity on the text over each graph, without "
            "training. Only --graphs, --file and --context apply.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of all training steps together: 90s, 10m or 1h. Validations take more time.",
            show_default=_BUDGET,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds of weights and batches.", min=1, show_default=str(_SEEDS))
    ] = None,
    search: Annotated[
        int,
        typer.Option(
            metavar="TRIALS",
            help="Let Optuna choose the numbers in ranges such as window(8..64), in this many short trainings and a "
            "quarter of --budget, instead of trying them doubled.",
            min=0,
        ),
    ] = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.", file_okay=False)] = Path("runs/compare"),
    force: Annotated[bool, typer.Option("--force", help="Replace the results in --out.")] = False,
) -> None:
    """Find out which graph suits your data: train one model over several graphs, and compare them at equal time and at
    equal steps.

    All trainings begin with the same weights and read the same batches. Only
    the graph differs, and the attention or model if --graphs names one.
    Each graph tries three learning rates and keeps the best one. Then it
    trains with each seed, and after each round the worse half of the graphs
    drops out. The learning rate does not decay here. In mpnn train it decays
    for text, so mpnn train may reach a lower loss.

    The command prints the cost of each graph, the results, the best graph and
    how certain that is, and the mpnn train command for this graph. It writes
    compare.json, index.html and two pictures.
    \b
    Examples:
      mpnn compare --file novel.txt --budget 10m
      mpnn compare --graphs "causal; causal & window(16..256); strided(16)" --seeds 3
      mpnn compare --graphs "causal; causal & window(4..128)" --search 12
      mpnn compare --graphs "causal; causal:retention; causal:delta"
      mpnn compare --task cora --graphs "cora; knn(8); identity" --budget 2m
      mpnn compare --nodes people.csv --target job --edges friends.csv --budget 2m
      mpnn compare --hf ./my-llama --file my.txt --graphs "causal; causal & window(64..512)"
    """
    if hf is not None:
        for name, value in (("search", search), ("budget", budget), ("seeds", seeds)):
            if value:
                refuse(f"--{name} is for training, and --hf trains nothing; leave it out")
        context = options.context  # None: that of the model
        with exit_on_invalid_input():
            file = options.resolved(DEFAULTS, "hf").file
        _compare_hf(hf, None if file is None else Path(file), context, graphs, out, force)
        return
    budget = budget or _BUDGET
    seeds = seeds or _SEEDS
    with exit_on_invalid_input():
        require_accelerate()
        if search:
            require_optuna()
        seconds = seconds_of(budget)
    _refuse_to_replace(out, force)
    with folder(out):
        with exit_on_invalid_input():
            options = options.resolved(DEFAULTS)
            contest = _Contest.of(options)
            written = contest.default_graphs if graphs is None else graphs
            expressions = separated(written) if search else expanded(written)
            if search and not any(map(bounds, expressions)):
                raise ValueError(
                    '--search needs a range in --graphs; write for example "causal; causal & window(4..128)"'
                )
            if len(expressions) < 2 and not search:
                raise ValueError(
                    f"{written} is one graph, and one is not a comparison; name two or more with semicolons between "
                    f'them: --graphs "{written}; ..." (mpnn train trains over one)'
                )
        if search:
            expressions = _searched(contest, expressions, search, seconds / 4)
            seconds = seconds * 3 / 4
        with exit_on_invalid_input():
            share = seconds / 3 / (len(expressions) * len(_RATES))
            candidates = _candidates(contest, expressions, share)
        trainings = len(candidates) * len(_RATES)
        console.print(
            f"{budget} buys {trainings} first trainings of {share:.2g} s ({len(candidates)} graphs, {len(_RATES)} "
            f"learning rates), and longer ones of the better graphs with {seeds} seeds",
            soft_wrap=True,
        )
        began = perf_counter()

        def train_aloud(graph: str, rate: float, seed: int, until: float) -> Curve:
            """Trains, and prints a line, also into a file: a comparison takes minutes."""
            curve = train(graph, rate, seed, until)
            reached = f"error {min(curve.errors):.3g}{contest.unit} after step {curve.steps[-1]:,}"
            if not math.isfinite(curve.errors[-1]):
                reached = "diverged"
            spent = f"{perf_counter() - began:.0f} s"
            console.print(f"  {spent:>7}  {graph}, rate {rate:.1e}, seed {seed}: {reached}", soft_wrap=True)
            return curve

        with _training(contest) as train:
            comparison = compare_graphs(
                [one.graph for one in candidates],
                [contest.rate * factor for factor in _RATES],
                list(range(seeds)),
                seconds,
                train_aloud,
                lambda line: console.print(line, soft_wrap=True),
                contest.unit,
            )
        rows = _rows(comparison, candidates)
        console.print(_table(rows))
        legend = {"error": contest.error, **{name: LEGEND[name] for name in _SHOWN if name in LEGEND}}
        console.print("\n".join(f"{name}: {meaning}" for name, meaning in legend.items()), soft_wrap=True)
        said = [comparison.verdict(), *_cautions(comparison, contest, options)]
        console.print("", *said, sep="\n", soft_wrap=True)
        with exit_on_failure():
            _write(out, comparison, said, contest, rows, options, budget, perf_counter() - began)
        winner = comparison.last[0]
        console.print(f"\nTo train {winner.graph} with its learning rate:", soft_wrap=True)
        console.print(f"  {contest.command(winner.graph, winner.rate)}", soft_wrap=True)
        console.print(f"The page with pictures: {out / page.PAGE}", soft_wrap=True)


@contextmanager
def _training(contest: "_Contest") -> Iterator[Train]:
    """Trains in a temporary folder. Ctrl-C ends the command with a message."""
    try:
        with exit_on_failure(), TemporaryDirectory() as work, stop_between_steps() as check:
            yield partial(_train, contest, Path(work), check)
    except Stopped as stop:
        warn("stopped; no results were written")
        raise typer.Exit(stop.exit_code) from None


def _searched(contest: "_Contest", expressions: Sequence[str], trials: int, seconds: float) -> list[str]:
    """The expressions, with each range replaced by the number that Optuna found best."""
    ranged = [expression for expression in expressions if bounds(expression)]
    share = seconds / (trials * len(ranged))
    best = {}

    def error_of(graph: str) -> float:
        try:
            contest.make(graph, 0)
        except ValueError as why:
            raise UnusableGraph(str(why)) from None
        return train(graph, contest.rate, 0, share).after_seconds(share)

    with _training(contest) as train:
        for expression in ranged:
            try:
                best[expression], error = best_numbers(expression, trials, error_of)
            except UnusableGraph as why:
                refuse(str(why))
            console.print(
                f"{expression}: {trials} trials of {share:.2g} s, best {best[expression]} ({error:.3g}{contest.unit})",
                soft_wrap=True,
            )
    return list(dict.fromkeys(best.get(expression, expression) for expression in expressions))


def _compare_hf(name: str, file: Path | None, context: int | None, graphs: str | None, out: Path, force: bool) -> None:
    from mpnn.cli import compare_hf

    _refuse_to_replace(out, force)
    with folder(out), exit_on_invalid_input():
        text = manual() if file is None else file.read_text(encoding="utf-8")
        model, pieces = compare_hf.load(name, text, context)
        count, tokens = pieces.shape
        read = "the manual of Python" if file is None else file.name
        what = f"{type(model).__name__} read {count} pieces of {tokens:,} tokens of {read}"
        console.print(what, soft_wrap=True)
        default = f"causal; causal & window({max(tokens // 16, 1)}..{max(tokens // 4, 1)})"
        expressions = expanded(default if graphs is None else graphs)
        if named := [one for one in expressions if ":" in one]:
            raise ValueError(f"a published model keeps its attention: write {named[0]!r} without a colon")
        readings = []
        for reading in compare_hf.read(model, pieces, expressions):
            readings.append(reading)
            console.print(f"  {reading.graph}: perplexity {reading.perplexity:.4g}", soft_wrap=True)
        console.print(table(compare_hf.HEADINGS, compare_hf.rows(readings)))
        console.print(compare_hf.verdict(readings), soft_wrap=True)
        compare_hf.write(out, name, what, readings)
        console.print(f"the page: {out / page.PAGE}", soft_wrap=True)


def _refuse_to_replace(out: Path, force: bool) -> None:
    if (out / page.RESULTS).exists() and not force:
        refuse(f"{out} holds a comparison: name another folder with --out, or replace it with --force")


# ------------------------------------------------------------------------------------------------ candidates


def _parts(expression: str, option: str) -> tuple[str, dict[str, Any]]:
    """The graph of an expression, and what its colon adds, if there is one: a value of the option."""
    graph, colon, value = expression.partition(":")
    return graph.strip(), {option: value.strip()} if colon else {}


@dataclass(frozen=True)
class _Contest:
    """The data and the model that all graphs share.

    make: the run over a graph with a seed. rate: the middle of the learning rates. error, unit: what an error is.
    command: trains over a graph with a learning rate.
    """

    name: str
    make: Callable[[str, int], Run]
    rate: float
    error: str
    unit: str
    default_graphs: str
    command: Callable[[str, float], str]

    @staticmethod
    def of(options: Options) -> "_Contest":
        if options.task == "text":
            corpus = options.corpus()
            sizes = options.settings(TextSettings)
            stride = max(math.isqrt(sizes.context), 1)
            near = f"causal & window({max(sizes.context // 16, 1)}..{max(sizes.context // 4, 1)})"

            def text_run(expression: str, seed: int) -> Run:
                graph, attention = _parts(expression, "attention")
                return TextRun(graph, corpus, replace(sizes, **attention), seed)

            return _Contest(
                corpus.name,
                text_run,
                sizes.lr,
                "loss of the next character on the last tenth of the text",
                " nats",
                f"causal; {near}; strided({stride})",
                partial(_command, options, "attention"),
            )
        nodes = options.load_nodes()
        of_nodes = options.settings(NodeSettings)
        say_how_read(getattr(nodes.data, "understood", ()))
        own = nodes.own_graph
        problem = nodes.outputs.problem

        def node_run(expression: str, seed: int) -> Run:
            graph, model = _parts(expression, "model")
            return NodeRun(graph, nodes, 1, seed, replace(of_nodes, **model))

        return _Contest(
            nodes.name,
            node_run,
            nodes.lr if options.lr is None else options.lr,
            "share of the validation nodes that the model gets wrong"
            if problem == "classes"
            else f"1 - {MEASURES[problem]} on the validation nodes",
            "",
            f"{own}; knn(16); identity" if own == "knn(8)" else f"{own}; knn(8); identity",
            partial(_command, options, "model"),
        )


def _command(options: Options, named: str, expression: str, rate: float) -> str:
    """The command that trains over a graph. Its colon adds a value of the option `named`."""
    graph, more = _parts(expression, named)
    files = "".join(f" --import {quote(str(file))}" for file in imported)
    return f"mpnn train {replace(options, graph=graph, lr=rate, **more).arguments()}{files}"


@dataclass(frozen=True)
class _Candidate:
    """A graph and what it costs before anything is trained."""

    graph: str
    edges: int
    reach: float
    seconds: float
    bytes: float
    backend: str


def _candidates(contest: _Contest, expressions: Sequence[str], share: float) -> list[_Candidate]:
    """The graphs that the model can use within the budget. Prints their costs, and why others are left out."""
    candidates = []
    rows = []
    for expression in expressions:
        try:
            one = _candidate(contest.make(expression, 0), expression)
        except (ValueError, MemoryError) as error:
            warn(f"{expression} is left out: {error}")
            continue
        if one.seconds * _MIN_STEPS > share:
            warn(
                f"{expression} is left out: {_MIN_STEPS} steps would take about {one.seconds * _MIN_STEPS:.2g} s, "
                f"and --budget leaves {share:.2g} s for each learning rate"
            )
            continue
        candidates.append(one)
        cost = f"{one.seconds * 1e3:.1f} ms", memory(one.bytes)
        rows.append((one.graph, f"{one.edges:,}", f"{one.reach:.1%}", one.backend, *cost))
    if not candidates:
        raise ValueError("no graph is left to compare")
    headings = "graph", "edges", "reach", "backend", "estimated time", "estimated memory"
    console.print(table(headings, rows, ("graph", "backend")))
    return candidates


def _candidate(run: Run, expression: str) -> _Candidate:
    inputs = run.inputs()
    seconds, size = estimates(run.model, *inputs)
    reach = run.graph.reach(run.layers)
    return _Candidate(expression, run.graph.num_edges, reach, seconds, size, backends(run.model, *inputs))


# ------------------------------------------------------------------------------------------------ training


class _EnoughTime(Exception):
    """The steps of a training have taken the time that they were given."""


def _train(
    contest: _Contest, work: Path, check: Callable[[], None], graph: str, rate: float, seed: int, seconds: float
) -> Curve:
    """Trains until the steps have taken this many seconds in all; continues from the checkpoint of an earlier call."""
    run = contest.make(graph, seed)
    torch.manual_seed(seed)
    optimizer = run.optimizer(rate)
    file = work / (re.sub(r"\W+", "_", f"{graph}_{rate}_{seed}") + ".pt")
    settings = Settings(
        steps=1 << 40,
        rate=lambda step: min((step + 1) / _WARM_STEPS, 1.0),
        clip=1.0,
        validate_every=_validate_every(file, run, optimizer, seconds),
    )
    newest: list[History] = []

    def progress(step: int, history: History) -> None:
        newest[:] = [history]
        check()
        if history.val_step[-1:] == [step] and sum(history.seconds) >= seconds:
            raise _EnoughTime

    try:
        fit(
            run.model, optimizer, lambda k: run.loss(), settings, validate=lambda: {"loss": run.error()},
            progress=progress, checkpoint=Checkpoint(file, seconds=math.inf),
        )  # fmt: skip
    except _EnoughTime:
        return _curve(newest[0])
    except TrainingDiverged:
        curve = _curve(newest[0]) if newest else Curve([], [], [])
        return Curve([*curve.steps, 1 << 40], [*curve.seconds, seconds], [*curve.errors, math.inf])
    raise AssertionError("training ends by time")


def _validate_every(file: Path, run: Run, optimizer: Optimizer, seconds: float) -> int:
    """The steps between validations, the same in each call for a run: measured in its first call."""
    kept = file.with_suffix(".every")
    if not kept.exists():
        state = torch.get_rng_state()
        began = perf_counter()
        for k in range(2):  # the first binds the graph and plans
            began = perf_counter() if k else began
            run.loss().backward()
        optimizer.zero_grad()
        torch.set_rng_state(state)
        kept.write_text(str(max(int(seconds / _VALIDATIONS / (perf_counter() - began)), 1)))
    return int(kept.read_text())


def _curve(history: History) -> Curve:
    spent = list(itertools.accumulate(history.seconds))
    return Curve(history.val_step, [spent[step - 1] for step in history.val_step], history.val_loss)


# ------------------------------------------------------------------------------------------------ results


def _rows(comparison: Comparison, candidates: Sequence[_Candidate]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`, the best graph first."""
    known = {one.graph: one for one in candidates}
    last = [result.graph for result in comparison.last]
    dropped = [result for result in comparison.results if result.graph not in last]
    dropped.sort(key=lambda result: (-(result.dropped_after or 0), mean(result.errors(seconds=comparison.seconds))))
    rows: list[tuple[str, ...]] = []
    for rank, result in enumerate([*comparison.last, *dropped], 1):
        one = known[result.graph]
        rows.append((
            str(rank), one.graph, f"{one.edges:,}", f"{one.reach:.1%}", one.backend, f"{one.seconds * 1e3:.1f} ms",
            f"{result.seconds_per_step * 1e3:.1f} ms", f"{result.rate:.1e}",
            spread(result.errors(seconds=comparison.seconds)), spread(result.errors(steps=comparison.steps)),
            spread(result.errors()) + ("" if result.dropped_after is None else "*"),
        ))  # fmt: skip
    return rows


def _cautions(comparison: Comparison, contest: _Contest, options: Options) -> list[str]:
    """Yields what the verdict leaves open, and the option that helps."""
    cautions = []
    best = comparison.last[0]
    if caution := comparison.too_short():
        cautions.append(f"{caution} Choose a longer --budget.")
    if caution := comparison.alike():
        longer = f" A --context longer than {options.context} may matter, too." if options.task == "text" else ""
        return [*cautions, caution + longer]
    for factor, which in ((min(_RATES), "smallest"), (max(_RATES), "largest")):
        if best.rate == contest.rate * factor:
            cautions.append(
                f"The best learning rate for {best.graph}, {best.rate:g}, is the {which} of the three that were tried. "
                f"Try --lr {best.rate * factor:g}: mpnn compare also tries half and twice this rate."
            )
    return cautions


def _table(rows: Sequence[tuple[str, ...]]) -> Table:
    shown = [HEADINGS.index(heading) for heading in _SHOWN]
    return table(_SHOWN, ([row[k] for k in shown] for row in rows))


def _write(
    out: Path,
    comparison: Comparison,
    said: Sequence[str],
    contest: _Contest,
    rows: Sequence[tuple[str, ...]],
    options: Options,
    budget: str,
    seconds: float,
) -> None:
    pictures.comparison_curves(comparison, out / CURVES)
    pictures.comparison_costs(comparison, out / COSTS)
    content = {
        "verdict": said[0],
        "seconds": comparison.seconds,
        "steps": comparison.steps,
        "options": asdict(replace(options, lr=contest.rate)),
        "budget": budget,
        "took": seconds,
        "graphs": [{**asdict(result), "seconds_per_step": result.seconds_per_step} for result in comparison.results],
    }
    winner = comparison.last[0]
    ends = "; ".join(f"{result.graph}: {spread(result.errors())}" for result in comparison.results)
    parts = [
        *map(page.paragraph, said),
        page.table(HEADINGS, rows),
        page.legend({"error": contest.error, **LEGEND}),
        page.picture(out / CURVES, f"Learning curves. Errors at the end: {ends}.",
                     "Validation error against training time. Lines are means over seeds, bands the range. The "
                     "learning rate does not decay."),
        page.picture(out / COSTS, "Error against the cost of a step, one point for each graph.",
                     "Validation error after equal steps against the cost of a step, mean and standard "
                     "deviation. Grey: another graph is as cheap and better."),
        "<h2>Use the winner</h2>",
        f"<pre>{escape(contest.command(winner.graph, winner.rate))}</pre>",
    ]  # fmt: skip
    took = ("took", f"{seconds / 60:.1f} min, budget {budget}")
    page.save(out, content, f"Which graph suits {contest.name}?", parts, took)
