"""`mpnn train`: trains a model on a task over a graph that the user chooses."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError

from mpnn.cli import pictures, tasks
from mpnn.cli.console import (
    console,
    exit_on_invalid_input,
    fail,
    folder,
    is_out_of_memory,
    refuse,
    sentence,
    too_large,
    warn,
)
from mpnn.cli.expressions import imported
from mpnn.cli.options import DEFAULTS, Options, takes
from mpnn.cli.stop import Stopped
from mpnn.cli.tasks import CHARACTERS, NODES, Run
from mpnn.graph.files import write_atomically
from mpnn.models.saving import CONFIG, WEIGHTS, Model
from mpnn.train.checkpoint import Checkpoint, CheckpointError, differences
from mpnn.train.loop import TrainingDiverged, require_accelerate

_CONTINUE = "Stopping and continuing"

CHECKPOINT = "checkpoint.pt"
STOPPED = "stopped"
FINISHED = "run.json"
GRAPH = "graph.png"
CURVES = "curves.png"


@takes(DEFAULTS)
def train(
    options: Options,
    out: Annotated[
        Path, typer.Option("--out", help="Folder for the model, the pictures and the checkpoint.", file_okay=False)
    ] = Path("runs/train"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in --out from its checkpoint, or start if it has none. Repeat the same options.",
            rich_help_panel=_CONTINUE,
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete the run in --out and start over.", rich_help_panel=_CONTINUE)
    ] = False,
    checkpoint_every: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Time between checkpoints; 0: one after every step.", rich_help_panel=_CONTINUE
        ),
    ] = 30.0,
) -> None:
    """Train a model over a graph of your choice, print a table of results, and save the model and pictures.

    The command writes the model (config.json and model.safetensors, as
    save_pretrained does), graph.png, curves.png and run.json (the settings and
    the result). For text it also writes characters.txt (the characters in the
    order of their numbers), for tables nodes.json (the ids, the features, and
    what outputs mean). Only --force overwrites a finished run.

    Ctrl-C stops a run after the current step, and saves a checkpoint and, in
    the folder "stopped", the model of the best validation so far. After a
    crash, a full disk or kill -9, the last checkpoint remains. The same command
    with --resume continues and, on the same machine with the same versions,
    ends with the same weights, bit for bit, as an uninterrupted run. A loss
    that is NaN or infinite ends a run without a model.

    Exit status: 0 finished, 1 failed, 2 invalid input, 130 stopped by Ctrl-C.
    \b
    Examples:
      mpnn train --graph "causal & window(16)"
      mpnn train --file novel.txt --context 128 --layers 4 --lr 3e-3 --out runs/novel
      mpnn train --file novel.txt --context 128 --layers 4 --lr 3e-3 --out runs/novel --resume
      mpnn train --data tinyshakespeare --graph "strided(16)" --context 256
      mpnn train --task cora --out runs/cora
      mpnn train --task digits --graph identity --force
      mpnn train --nodes people.csv --target job --edges friends.csv --model gcn
      mpnn train --edges links.csv --features x.npy --labels y.csv --model gnn --aggregate max
      mpnn train --graph-table molecules.csv --target solubility --problem regression \\
          --nodes atoms.csv --edges bonds.csv
      mpnn train --task links --edges ratings.csv --columns user,item --time when
      mpnn train --task links --edges facts.csv --relation relation --out runs/facts
    """
    with exit_on_invalid_input():
        require_accelerate()
    if not 0 <= checkpoint_every < float("inf"):
        refuse(f"--checkpoint-every must be 0 seconds or more; got {checkpoint_every}")
    _check_folder(out, resume, force)
    with folder(out):
        with exit_on_invalid_input():
            options = options.resolved()
            run = options.run()
            run.check_saving()
        tasks.say_how_read(run.understood)
        checkpoint = Checkpoint(out / CHECKPOINT, seconds=checkpoint_every, run=run.settings)
        if force:
            _delete(out, checkpoint)
        elif resume and not checkpoint.path.exists():
            _check_finished(out, run)
            console.print(f"there is no checkpoint in {out} yet: training starts at step 1", soft_wrap=True)
        try:
            _train(run, checkpoint, out)
            _finish(run, checkpoint, out, options)
        except KeyboardInterrupt:
            warn(f"stopped immediately; {_checkpoint_note(checkpoint)}")
            raise


def _check_folder(out: Path, resume: bool, force: bool) -> None:
    """Refuses to overwrite a run without --resume or --force."""
    if resume and force:
        refuse("--resume continues a run and --force starts it over; use only one of them")
    if resume or force:
        return
    if (out / CHECKPOINT).exists():
        refuse(
            f"{out} holds an unfinished run: continue it with --resume, start over with --force, or name another --out"
        )
    if (out / FINISHED).exists() or (out / WEIGHTS).exists():
        refuse(f"{out} holds a finished run: name another folder with --out, or replace the run with --force")


def _check_finished(out: Path, run: Run) -> None:
    """Ends the command if the run is finished. Refuses if the folder contains another run."""
    if (out / FINISHED).exists():
        with exit_on_invalid_input():
            _, before = saved_options(out)
        if not (changes := differences(before, run.settings)):
            console.print(f"the run in {out} is finished; there is nothing to continue", soft_wrap=True)
            raise typer.Exit
        refuse(
            f"{out} holds a finished run with other settings: {changes}; name another folder with --out, or use --force"
        )
    if (out / WEIGHTS).exists():
        refuse(f"{out} holds a model without a checkpoint: name another folder with --out, or replace it with --force")


def _delete(out: Path, checkpoint: Checkpoint) -> None:
    """Deletes the files of a run and nothing else. The checkpoint is last, because it marks the run as unfinished."""
    with exit_on_invalid_input():
        for name in (FINISHED, WEIGHTS, CONFIG, CHARACTERS, NODES, GRAPH, CURVES):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / STOPPED, ignore_errors=True)
        checkpoint.delete()


def _train(run: Run, checkpoint: Checkpoint, out: Path) -> None:
    try:
        tasks.train_all([run], [checkpoint])
    except CheckpointError as error:
        refuse(f"{error}; use the same options to continue it, or start over with --force")
    except TrainingDiverged as error:
        fail(
            f"{error}; no model was saved"
            + (f", the checkpoint of step {checkpoint.step} remains" if checkpoint.step else "")
        )
    except OSError as error:
        fail(f"{sentence(error)}; {_checkpoint_note(checkpoint)}")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(f"{too_large(error)}; {_checkpoint_note(checkpoint)}")
    except Stopped as stop:
        which = "current model"
        try:
            if (best := checkpoint.best()) is not None:
                which = "best model so far"
                run.model.load_state_dict(best)
            run.save(out / STOPPED)
            where = f"the {which} is in {out / STOPPED}"
        except (OSError, SafetensorError) as error:
            where = f"the {which} could not be saved ({sentence(error)})"
        warn(f"stopped after step {checkpoint.step} of {run.steps}; {where}; {_checkpoint_note(checkpoint)}")
        raise typer.Exit(stop.exit_code) from None


def _finish(run: Run, checkpoint: Checkpoint, out: Path, options: Options) -> None:
    """Saves the model first, then pictures and results, and finally deletes the checkpoint."""
    try:
        run.save(out)
    except (OSError, SafetensorError) as error:
        fail(f"the model could not be saved: {sentence(error)}; {_checkpoint_note(checkpoint)}")
    console.print("", tasks.table([run]), "", tasks.legend([run]), "", sep="\n")
    console.print(run.evaluate(run.model), "", sep="\n", soft_wrap=True, markup=False)
    console.print(f"saved the model in {out}; load it in Python with:", soft_wrap=True)
    for file in imported:
        console.print(f"  import {file.stem}", soft_wrap=True)
    console.print(f"  mpnn.models.{type(run.model).__name__}.from_pretrained({str(out)!r})", soft_wrap=True)
    content = {"settings": run.settings, "result": run.result, "measured": run.measured, "options": asdict(options)}
    result = json.dumps(content, indent=2) + "\n"
    try:
        pictures.topology(run, out / GRAPH)
        pictures.losses([run], out / CURVES)
        write_atomically(out / FINISHED, lambda path: path.write_text(result, encoding="utf-8"))
    except OSError as error:
        fail(
            f"the model is saved, but not all of the rest: {sentence(error)}; the same command with --resume writes it"
        )
    shutil.rmtree(out / STOPPED, ignore_errors=True)
    checkpoint.delete()
    console.print(f"saved {GRAPH}, {CURVES} and {FINISHED} in the same folder", soft_wrap=True)


def _checkpoint_note(checkpoint: Checkpoint) -> str:
    if not checkpoint.path.exists():
        return "nothing was saved"
    step = "" if checkpoint.step is None else f" of step {checkpoint.step}"
    return f"the checkpoint{step} is in {checkpoint.path}; the same command with --resume continues it"


def saved_options(folder: Path) -> tuple[Options, dict[str, Any]]:
    """The options and the settings of the run in a folder."""
    path = folder / FINISHED
    if not path.is_file():
        if (folder / CHECKPOINT).is_file():
            raise ValueError(f"{folder} holds a run that has not finished: mpnn train continues it with --resume")
        raise ValueError(f"{folder} has no {FINISHED}: name a folder that mpnn train saved a finished run in")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Options.read(content["options"]), dict(content["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another version of mpnn ({error}); train the model again") from None


def saved_run(folder: Path) -> tuple[Run, Model]:
    """The run, with its data, and its trained model."""
    options, settings = saved_options(folder)
    run = options.run()
    if changes := differences(settings, run.settings):
        raise ValueError(f"the data of {folder} changed since its training: {changes}")
    return run, type(run.model).from_pretrained(folder).to(options.device)
