"""`mpnn demo`: what the choice of graph does to a model, trained and measured here, on one page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer

from mpnn import Topology, ops
from mpnn.cli import demo_page, recall, side_by_side, tasks
from mpnn.cli.console import as_seed, console, exit_on_failure, exit_on_invalid_input, fail, folder, refuse, warn
from mpnn.cli.demo_page import Results, Times
from mpnn.cli.measure import machine, one_thread, versions
from mpnn.cli.page import PAGE
from mpnn.cli.recall import RecallRun
from mpnn.cli.stop import Stopped
from mpnn.cli.tasks import NodeRun, Nodes, Run
from mpnn.engine.tune import least
from mpnn.graph.files import write_atomically
from mpnn.graphs import parse
from mpnn.models import GPT
from mpnn.train.checkpoint import Checkpoint, CheckpointError
from mpnn.train.loop import TrainingDiverged, require_accelerate

TIMED_GRAPHS = ("causal", "causal & window(64)")
LENGTHS = [256, 512, 1024, 2048, 4096, 8192]
ATTENTION_LENGTH = 2048
SELF_LOOPS_ONLY = "identity"
EPOCHS = 100
_WORTH_PROCESSES = 50  # steps; a process takes seconds to start


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the pictures and the page.", file_okay=False)] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="Training steps of each model, at most.")] = 300,
    seed: Annotated[int, typer.Option(help="Random seed of weights and batches.", callback=as_seed)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the page and the pictures in --out.")] = False,
) -> None:
    """Show what the choice of graph does: train small models over several graphs, and time the graphs.

    A model that must remember a letter, the time of a training step by length,
    and a GAT on handwritten digits. The demo downloads nothing: the digits are
    part of scikit-learn. It takes a minute or two, prints a table, and writes a
    page, index.html. After Ctrl-C or a crash, the same command continues from
    its last checkpoint.
    \b
    Examples:
      mpnn demo
      mpnn demo --steps 100 --out /tmp/quick
    """
    start = perf_counter()
    with exit_on_invalid_input():
        require_accelerate()
    if steps < 1:
        refuse(f"--steps must be at least 1; got {steps}")
    if (out / PAGE).exists() and not force:
        refuse(f"{out} holds a finished demo: see {out / PAGE}, name another folder with --out, or use --force")
    with folder(out):
        with exit_on_invalid_input():
            nodes = Nodes.digits()
        with one_thread():
            runs = _runs(nodes, steps, seed)
            checkpoints = [Checkpoint(out / f"checkpoint-{k}.pt") for k in range(len(runs))]
            trained = _train(runs, checkpoints, steps)
            with console.status("timing steps"):
                times = _times()
            recalls = len(recall.TOPOLOGIES)
            results = Results(trained[:recalls], times, trained[recalls:])
            footer = [
                ("command", f"mpnn demo --steps {steps} --seed {seed}"),
                ("machine", machine()),
                ("versions", versions()),
                ("time", f"{perf_counter() - start:.0f} s of training and timing, {steps} steps, seed {seed}"),
            ]
            with console.status("drawing"), exit_on_failure():
                html = demo_page.write(results, nodes, out, footer)
        index = out / PAGE
        with exit_on_failure():
            write_atomically(index, lambda path: path.write_text(html, encoding="utf-8"))
            for checkpoint in checkpoints:
                checkpoint.delete()
    console.print("", tasks.table(trained), "", tasks.legend(trained), "", sep="\n")
    console.print(
        f"a training step on {times.lengths[-1]:,} characters is {times.gain(-1)} over "
        f"{TIMED_GRAPHS[1]} than over {TIMED_GRAPHS[0]}",
        soft_wrap=True,
    )
    console.print(f"see {index}, written after {perf_counter() - start:.0f} s", soft_wrap=True)


def _runs(nodes: Nodes, steps: int, seed: int) -> list[Run]:
    """Recall, then digits."""
    runs: list[Run] = [RecallRun(name, steps, seed) for name in recall.TOPOLOGIES]
    runs += [NodeRun(name, nodes, min(EPOCHS, steps), seed) for name in (nodes.own_graph, SELF_LOOPS_ONLY)]
    return runs


def _train(runs: Sequence[Run], checkpoints: Sequence[Checkpoint], steps: int) -> list[Run]:
    """Trains all runs, or resumes them from their checkpoints. Checkpoints with other settings are deleted."""
    for run, checkpoint in zip(runs, checkpoints, strict=True):
        checkpoint.run = run.settings
    try:
        with exit_on_failure():
            count = side_by_side.processes(len(runs)) if steps >= _WORTH_PROCESSES else 1
            return tasks.train_all(runs, checkpoints, count)
    except CheckpointError:
        for checkpoint in checkpoints:
            checkpoint.delete()
        return _train(runs, checkpoints, steps)
    except TrainingDiverged as error:
        fail(str(error))
    except Stopped as stop:
        warn("stopped; the same command continues the demo")
        raise typer.Exit(stop.exit_code) from None


def _times() -> Times:
    topologies = {name: parse(name) for name in TIMED_GRAPHS}
    steps = step_seconds(topologies, LENGTHS)
    return Times(LENGTHS, steps, ATTENTION_LENGTH, attention_seconds(topologies, ATTENTION_LENGTH))


# of the character model whose steps are timed
_VOCABULARY = 96
_DIM = 64
_HEADS = 4
_LAYERS = 2


def step_seconds(topologies: Mapping[str, Topology], lengths: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of a training step (forward, backward, update) of a GPT on one text of each length, for each topology."""
    by_length = [least([{name: _step(t, n) for name, t in topologies.items()}], 0)[0] for n in lengths]
    return {name: [of[name] for of in by_length] for name in topologies}


def attention_seconds(topologies: Mapping[str, Topology], length: int) -> dict[str, float]:
    """Seconds of attention alone, forward and backward, in the sizes of that GPT."""
    return least([{name: _attention(topology, length) for name, topology in topologies.items()}], 0)[0]


def _step(topology: Topology, length: int) -> Callable[[], object]:
    model = GPT(_VOCABULARY, _DIM, _HEADS, _LAYERS, topology, context=length)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(_VOCABULARY, (1, length + 1))

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return step


def _attention(topology: Topology, length: int) -> Callable[[], object]:
    graph = topology.bind(length)
    query, key, value = (torch.randn(1, length, _HEADS, _DIM // _HEADS, requires_grad=True) for _ in range(3))
    return lambda: ops.attend(graph, query, key, value).sum().backward()
