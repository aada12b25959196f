"""Training runs in several processes: the same weights, and checkpoints where they are stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("accelerate")

from mpnn.cli import recall, side_by_side, tasks
from mpnn.cli.recall import RecallRun
from mpnn.cli.tasks import NodeRun, Nodes
from mpnn.train.checkpoint import Checkpoint


def runs(steps: int) -> list[Any]:
    return [RecallRun(name, steps, 0) for name in recall.TOPOLOGIES]


def checkpoints(folder: Path, of: list[Any]) -> list[Checkpoint]:
    return [Checkpoint(folder / f"{k}.pt", run=run.settings) for k, run in enumerate(of)]


def loss(run: Any) -> float:
    return float(run.history.train_loss[-1])


def weights(run: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_processes_are_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 1), (2, 2), (4, 2), (8, 4), (64, 6)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
        assert side_by_side.processes(12) == expected
        assert side_by_side.processes(1) == 1


@pytest.mark.slow
def test_weights_and_progress_are_those_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def every() -> list[Any]:
        return [*runs(3)[2:], NodeRun("knn(8)", Nodes.digits(), 3, 0)]

    alone, together = every(), every()
    tasks.train_all(alone, checkpoints(tmp_path, alone))
    said = capsys.readouterr().out
    (tmp_path / "together").mkdir()
    tasks.train_all(together, checkpoints(tmp_path / "together", together), processes=2)
    assert len(list((tmp_path / "together").glob("*.pt"))) == len(together)
    for a, b in zip(alone, together, strict=True):
        assert weights(a).equal(weights(b))
        assert a.history.train_loss == b.history.train_loss
        assert (a.backend, a.saved_bytes, a.result) == (b.backend, b.saved_bytes, b.result)
    lines = capsys.readouterr().out.splitlines()
    for said_lines in (said.splitlines(), lines):
        ends = [line.split(" s  ")[1].split("; ") for line in said_lines if "step 3 of 3" in line]
        assert [count for count, _ in ends] == [f"{k + 1} of {len(together)} done" for k in range(len(together))]
        assert {what for _, what in ends} == {f"{run.name} {run.expression}, step 3 of 3, loss {loss(run):.2f}"
                                              for run in together}  # fmt: skip


@pytest.mark.slow
def test_processes_stop_with_their_checkpoints(tmp_path: Path) -> None:
    seen: set[int] = set()

    def report(run: int, step: int, history: Any) -> None:
        seen.add(run)

    def check() -> None:
        if len(seen) == 2:
            raise KeyboardInterrupt

    stopped = runs(10**6)
    with pytest.raises(KeyboardInterrupt):
        side_by_side.train(stopped, checkpoints(tmp_path, stopped), 2, check, report)
    assert seen == {0, 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt"]
    assert all(torch.load(path, weights_only=True)["step"] > 0 for path in tmp_path.iterdir())
