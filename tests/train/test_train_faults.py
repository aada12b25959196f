"""Trainings that are killed, stopped, out of disk or diverging: no file is half written, and no work is lost.

Commands run in processes of their own, forked from one that has imported the command line, and are killed by signals.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from full_disk import full_after, no_space
from real_data import real
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from mpnn.cli import pictures, tasks
from mpnn.cli.app import app
from mpnn.cli.stop import Stopped, stop_between_steps
from mpnn.data import locate
from mpnn.models import GAT, GPT, Model
from mpnn.train import checkpoint as checkpoint_module

SHAPE = ["--context", "16", "--dim", "8", "--heads", "2", "--layers", "1", "--batch", "4"]
VERSES = "so much depends upon a red wheel barrow\n" * 30


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell ignores Ctrl-C in what it runs in the background, and so would these tests and their processes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are quickly drawn."""
    monkeypatch.setattr(pictures, "_DPI", 30)


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """The command that trains a tiny model on text, without its --steps and --out."""
    path = tmp_path / "verses.txt"
    path.write_text(VERSES, encoding="utf-8")
    return ["train", "--file", str(path), "--graph", "causal & window(3)", *SHAPE]


# --------------------------------------------------------------------------------------------------------- processes


def _command(arguments: list[str], log: str, largest_file: int | None) -> None:
    forked.redirected(log, log)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of forks may have begun without
    torch.set_num_threads(1)
    pictures._DPI = 30  # type: ignore[misc]
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    app(arguments)


@contextmanager
def started(arguments: list[str], log: Path, largest_file: int | None = None) -> Iterator[BaseProcess]:
    """The command in a process of its own, which does not outlive the block."""
    process = forked.process(_command, arguments, str(log), largest_file)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def complete(arguments: list[str], log: Path, **options: Any) -> str:
    """Runs the command to its end, which must be a success."""
    status, output = outcome(arguments, log, **options)
    assert status == 0, output
    return output


def outcome(arguments: list[str], log: Path, **options: Any) -> tuple[int | None, str]:
    with started(arguments, log, **options) as process:
        process.join()
        return process.exitcode, log.read_text()


def wait_for(happened: Callable[[], object], process: BaseProcess, log: Path) -> None:
    """Until something has happened or the process has ended."""
    while not happened() and process.is_alive():
        time.sleep(0.001)


def in_process(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def sentence(result: Result, status: int) -> str:
    """The one sentence on stderr of a command that must end with this status."""
    assert result.exit_code == status, result.output
    assert result.stderr.startswith("mpnn: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def assert_same_model(folder: Path, other: Path) -> None:
    assert (folder / "config.json").read_bytes() == (other / "config.json").read_bytes()
    ours, theirs = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_finished(folder: Path) -> None:
    """All files of a run, and nothing that a stopped or killed one leaves."""
    names = {path.name for path in folder.iterdir()} - {"characters.txt", "nodes.json"}
    assert names == {"config.json", "model.safetensors", "graph.png", "curves.png", "run.json"}


def assert_whole(folder: Path, kind: type[Model]) -> None:
    """Whatever file is there after a kill is whole, and no model looks finished while its run is not."""
    if (folder / "checkpoint.pt").exists():
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] > 0
    if (folder / "run.json").exists():
        json.loads((folder / "run.json").read_text())
    elif (folder / "model.safetensors").exists():
        assert (folder / "checkpoint.pt").exists()
        load_file(folder / "model.safetensors")
    for picture in folder.glob("*.png"):
        assert picture.read_bytes().endswith(b"IEND\xaeB`\x82")
    if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
        kind.from_pretrained(folder)


# ------------------------------------------------------------------------------------------------------------- kills


def test_a_killed_training_resumes_to_the_same_bits(tmp_path: Path, text: list[str]) -> None:
    command, out, log = [*text, "--steps", "40"], tmp_path / "out", tmp_path / "log"
    with started([*command, "--out", str(out), "--checkpoint-every", "0"], log) as process:
        wait_for((out / "checkpoint.pt").exists, process, log)
        time.sleep(random.SystemRandom().uniform(0.0, 0.1))
    assert_whole(out, GPT)
    assert not (out / "run.json").exists()
    complete([*command, "--out", str(out), "--resume"], log)
    complete([*command, "--out", str(tmp_path / "whole")], log)
    assert_finished(out)
    assert_same_model(out, tmp_path / "whole")


COMMANDS = {
    "text": (GPT, ["--steps", "200"]),
    "digits": (GAT, ["--task", "digits", "--graph", "knn(3)", "--steps", "30"]),
    "cora": (GAT, ["--task", "cora", "--steps", "20"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", COMMANDS)
def test_trainings_killed_again_and_again_end_with_the_same_bits(tmp_path: Path, text: list[str], task: str) -> None:
    """Each process is killed at a random time after it has written its first checkpoint."""
    if task == "cora":
        real(locate, "cora")
    kind, arguments = COMMANDS[task]
    command = [*text, *arguments] if task == "text" else ["train", *arguments]
    out, log, draw = tmp_path / "out", tmp_path / "log", random.SystemRandom()
    complete([*command, "--out", str(tmp_path / "whole")], log)
    resumable = [*command, "--out", str(out), "--resume", "--checkpoint-every", "0"]
    kills = 0
    for _ in range(5):
        before = _changed(out / "checkpoint.pt")
        with started(resumable, log) as process:
            wait_for(lambda: _changed(out / "checkpoint.pt") != before, process, log)  # noqa: B023
            process.join(draw.uniform(0.0, 0.1))
            kills += process.is_alive()
        assert_whole(out, kind)
    assert kills >= 2
    complete(resumable, log)
    assert_finished(out)
    assert_same_model(out, tmp_path / "whole")


def _changed(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


@pytest.mark.slow
def test_kills_at_any_time_of_a_short_training_leave_whole_files(tmp_path: Path, text: list[str]) -> None:
    """From reading the text to drawing the last picture."""
    command, log, draw = [*text, "--steps", "3"], tmp_path / "log", random.SystemRandom()
    began = time.monotonic()
    complete([*command, "--out", str(tmp_path / "whole")], log)
    took = time.monotonic() - began
    for k in range(10):
        out = tmp_path / f"out{k}"
        resumable = [*command, "--out", str(out), "--resume", "--checkpoint-every", "0"]
        for _ in range(2):
            with started(resumable, log) as process:
                process.join(draw.uniform(0.0, took))
            if out.exists():
                assert_whole(out, GPT)
        complete(resumable, log)
        assert_finished(out)
        assert_same_model(out, tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_demo_continues(tmp_path: Path) -> None:
    """And begins again with other settings."""
    out, log = tmp_path / "demo", tmp_path / "log"
    for steps, checkpoint in (("5", "checkpoint-1.pt"), ("4", "checkpoint-1.pt"), ("4", "checkpoint-3.pt")):
        with started(["demo", "--steps", steps, "--out", str(out)], log) as process:
            wait_for(lambda: steps in _steps(out / checkpoint), process, log)  # noqa: B023
        assert not (out / "index.html").exists()
    done = complete(["demo", "--steps", "4", "--out", str(out)], log)
    assert not list(out.glob("checkpoint*"))
    assert (out / "index.html").read_text(encoding="utf-8").endswith("</html>\n")
    whole = complete(["demo", "--steps", "4", "--out", str(tmp_path / "whole")], log)
    assert len(_losses(whole)) == 3 + 2  # recall, digits
    assert _losses(done) == _losses(whole)


def _steps(checkpoint: Path) -> set[str]:
    """The number of steps of a checkpoint's training; empty if there is no such file."""
    return {str(torch.load(checkpoint, weights_only=True)["run"]["steps"])} if checkpoint.exists() else set()


def _losses(table: str) -> list[str]:
    """The last column of the table that a command prints."""
    return [
        line.split()[-1]
        for line in table.splitlines()
        if line.startswith(("recall", "text", "digits")) and "MB" in line
    ]


# ----------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_stopped_training_saves_what_there_is_and_says_where(
    tmp_path: Path, text: list[str], number: signal.Signals, status: int
) -> None:
    command, out, log = [*text, "--steps", "150"], tmp_path / "out", tmp_path / "log"
    with started([*command, "--out", str(out), "--checkpoint-every", "0"], log) as process:
        wait_for((out / "checkpoint.pt").exists, process, log)
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == status, log.read_text()
    said = log.read_text()
    step = torch.load(out / "checkpoint.pt", weights_only=True)["step"]
    which = "current model" if step < 15 else "best model so far"
    assert f"stopped after step {step} of 150; the {which} is in {out / 'stopped'}; " in said
    assert f"the checkpoint of step {step} is in {out / 'checkpoint.pt'}; the same command with --resume" in said
    assert {path.name for path in out.iterdir()} == {"checkpoint.pt", "stopped"}
    assert GPT.from_pretrained(out / "stopped")(torch.zeros(1, 4, dtype=torch.int64)).shape[:2] == (1, 4)
    if number == signal.SIGTERM:
        complete([*command, "--out", str(out), "--resume"], log)
        complete([*command, "--out", str(tmp_path / "whole")], log)
        assert_finished(out)
        assert_same_model(out, tmp_path / "whole")


def test_a_second_signal_stops_at_once_and_handlers_are_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    def steps(signals: int) -> None:
        with stop_between_steps() as check:
            check()
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
            check()

    with pytest.raises(Stopped) as stop:
        steps(signals=1)
    assert stop.value.exit_code == 130
    with pytest.raises(KeyboardInterrupt) as at_once:
        steps(signals=2)
    assert not isinstance(at_once.value, Stopped)
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopping after this step; press Ctrl-C again to stop immediately" in capsys.readouterr().err


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_between_steps() as check:
            signal.raise_signal(signal.SIGINT)
            check()
    finally:
        signal.signal(signal.SIGINT, before)


def test_stopped_at_once_before_the_first_step_leaves_no_folder(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "train_all", interrupted)
    result = in_process(*text, "--out", tmp_path / "runs" / "out")
    assert "stopped immediately; nothing was saved" in sentence(result, 130)
    assert not (tmp_path / "runs").exists()


# --------------------------------------------------------------------------------------------------------- full disks


def test_a_file_that_cannot_be_written_ends_in_one_sentence(tmp_path: Path, text: list[str]) -> None:
    """No file may be longer than 4 kB, which a checkpoint is."""
    log, out = tmp_path / "log", tmp_path / "out"
    status, said = outcome(
        [*text, "--steps", "5", "--out", str(out), "--checkpoint-every", "0"], log, largest_file=4096
    )
    assert status == 1
    assert "mpnn: File too large; nothing was saved" in said
    assert "Traceback" not in said
    assert not out.exists()


def test_a_full_disk_keeps_the_checkpoint_before(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, out = [*text, "--steps", "5"], tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "open", full_after(3), raising=False)
        said = sentence(in_process(*command, "--out", out, "--checkpoint-every", "0"), 1)
    assert f"No space left on device; the checkpoint of step 3 is in {out / 'checkpoint.pt'}; " in said
    assert [path.name for path in out.iterdir()] == ["checkpoint.pt"]
    assert in_process(*command, "--out", out, "--resume").exit_code == 0
    assert in_process(*command, "--out", tmp_path / "whole").exit_code == 0
    assert_same_model(out, tmp_path / "whole")


def test_a_model_that_could_not_be_saved_is_saved_by_resuming(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, out = [*text, "--steps", "2", "--out", tmp_path / "out"], tmp_path / "out"
    save = GPT.save_pretrained

    def full(model: GPT, folder: Path) -> None:
        if Path(folder) == out:
            raise no_space()
        save(model, folder)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "save_pretrained", full)
        said = sentence(in_process(*command), 1)
    assert "the model could not be saved: No space left on device; the checkpoint of step 2 is in" in said
    assert in_process(*command, "--resume").exit_code == 0
    assert_finished(out)


def test_a_picture_that_cannot_be_written_does_not_lose_the_model(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, out = [*text, "--steps", "2", "--out", tmp_path / "out"], tmp_path / "out"

    def full(*_: Any) -> None:
        raise no_space()

    with monkeypatch.context() as patch:
        patch.setattr(pictures, "losses", full)
        said = sentence(in_process(*command), 1)
    assert "the model is saved, but not all of the rest: No space left on device; " in said
    shutil.copytree(out, tmp_path / "saved")
    assert GPT.from_pretrained(out)
    assert in_process(*command, "--resume").exit_code == 0
    assert_finished(out)
    assert_same_model(out, tmp_path / "saved")


# -------------------------------------------------------------------------------------------------------- divergence


def test_a_diverging_training_ends_without_a_model(tmp_path: Path, text: list[str]) -> None:
    result = in_process(*text, "--steps", "20", "--lr", "1e30", "--out", tmp_path / "out")
    said = sentence(result, 1)
    assert "the loss of step 2 is nan, with learning rate 1e+30; try a lower learning rate" in said
    assert "no model was saved" in said
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------- folders that hold a run


@pytest.fixture
def unfinished(tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str | Path]:
    """A command that was stopped after its second step."""
    command: list[str | Path] = [*text, "--steps", "4", "--out", tmp_path / "out"]

    def tick(bars: Any, bar: Any, check: Any, step: int, history: Any) -> None:
        if step == 2:
            raise Stopped(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "_tick", tick)
        assert in_process(*command).exit_code == 130
    return command


def test_an_unfinished_run_is_not_overwritten_without_a_word(tmp_path: Path, unfinished: list[str | Path]) -> None:
    before = (tmp_path / "out" / "checkpoint.pt").read_bytes()
    assert "out holds an unfinished run: continue it with --resume, start over with --force" in sentence(
        in_process(*unfinished), 2
    )
    assert "use only one of them" in sentence(in_process(*unfinished, "--resume", "--force"), 2)
    said = sentence(in_process(*unfinished, "--resume", "--lr", "0.5", "--seed", "1"), 2)
    assert "of another training run: seed was 0 and is 1 now; lr was 0.006 and is 0.5 now; use the" in said
    assert (tmp_path / "out" / "checkpoint.pt").read_bytes() == before


@pytest.mark.slow
def test_force_starts_over(tmp_path: Path, unfinished: list[str | Path]) -> None:
    assert in_process(*unfinished, "--force", "--seed", "1").exit_code == 0
    assert_finished(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert in_process(*unfinished, "--force").exit_code == 0
    (tmp_path / "out" / "notes.txt").unlink()  # still there
    assert_finished(tmp_path / "out")


def test_a_finished_run_is_not_overwritten_without_a_word(tmp_path: Path, text: list[str]) -> None:
    command = [*text, "--steps", "2", "--out", tmp_path / "out", "--resume"]
    first = in_process(*command)
    assert first.exit_code == 0
    assert "there is no checkpoint in" in first.output
    before = (tmp_path / "out" / "model.safetensors").stat()
    again = in_process(*command)
    assert again.exit_code == 0
    assert "is finished; there is nothing to continue" in again.output
    assert "holds a finished run: name another folder" in sentence(in_process(*command[:-1]), 2)
    said = sentence(in_process(*command, "--steps", "3"), 2)
    assert "holds a finished run with other settings: steps was 2 and is 3 now; name another folder" in said
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    (tmp_path / "out" / "run.json").write_text("{")
    assert "run.json is damaged" in sentence(in_process(*command), 2)
    (tmp_path / "out" / "run.json").unlink()
    assert "holds a model without a checkpoint" in sentence(in_process(*command), 2)


# ----------------------------------------------------------------------------------------- models that cannot be saved


def test_a_model_that_cannot_be_saved_is_refused_before_training(
    tmp_path: Path, text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: Any) -> None:
        raise ValueError("graph=... cannot be written as text")

    monkeypatch.setattr(GPT, "save_pretrained", cannot)
    monkeypatch.setattr(tasks, "train_all", lambda *_: pytest.fail("training has begun"))
    said = sentence(in_process(*text, "--out", tmp_path / "out"), 2)
    assert said == "mpnn: graph=... cannot be written as text\n"
    assert not (tmp_path / "out").exists()
