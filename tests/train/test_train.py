"""The training loops: what they measure, when they stop, and which weights they leave behind."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mpnn import graphs
from mpnn.data import PointClassification
from mpnn.models import GCN, GPT
from mpnn.train import checkpoint as checkpoint_module
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.language_model import fit_language_model, language_model_loss
from mpnn.train.loop import History, Progress, Settings, TrainingDiverged, fit, shuffled
from mpnn.train.node_classifier import fit_node_classifier, node_scores

TEXT = torch.arange(400) % 7


def gpt() -> GPT:
    return GPT(7, 16, 2, 1, context=12)


@pytest.fixture
def nodes() -> PointClassification:
    """Three noisy clusters of twenty."""
    y = torch.arange(60) % 3
    x = torch.eye(3)[y] + 0.8 * torch.randn(60, 3)
    part = torch.arange(60) // 20
    return PointClassification(x, y, part == 0, part == 1, part == 2)


RING = graphs.grid(1, 60).bind(60).with_self_loops()


def test_language_model_learns_and_tells_its_history() -> None:
    told: list[tuple[int, History]] = []
    model = gpt()
    history = fit_language_model(
        model, TEXT, TEXT, 90, lr=1e-2, validate_every=40, progress=lambda step, h: told.append((step, h))
    )
    assert len(history.train_loss) == len(history.seconds) == 90
    assert history.val_step == [40, 80, 90]
    assert history.val_loss[-1] < 0.1 < math.log(7) - 0.1 < history.train_loss[0]
    assert history.val_loss[-1] == language_model_loss(model, TEXT)
    assert [step for step, _ in told] == list(range(1, 91))
    assert all(h is history for _, h in told)
    assert min(history.seconds) <= history.seconds_per_step <= max(history.seconds)


class Recorder(nn.Module):
    """Remembers the crops and the learning rate: its one weight falls by the rate at each step, as AdamW's do."""

    context = 12

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.at: list[float] = []

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.seen.append((tokens, targets))
            self.at.append(self.weight.item())
        return self.weight * 1.0


def test_learning_rate_climbs_and_falls_to_a_tenth() -> None:
    model = Recorder()
    fit_language_model(model, TEXT, TEXT, 100, lr=1e-2)
    rate = -torch.tensor([*model.at, model.weight.item()]).diff() / 1e-2
    torch.testing.assert_close(rate[:5], torch.arange(1, 6) / 5)  # a twentieth of the steps
    assert (rate[5:].diff() <= 1e-4).all()
    assert abs(rate[-1].item() - 0.1) < 0.01


def test_targets_are_the_next_tokens_of_crops_as_long_as_the_context() -> None:
    model = Recorder()
    fit_language_model(model, TEXT, TEXT, 3, batch=5)
    for tokens, targets in model.seen:
        assert tokens.shape == targets.shape == (5, 12)
        assert torch.equal(targets, (tokens + 1) % 7)


def test_validation_is_the_mean_over_crops_and_always_the_same() -> None:
    model = gpt()
    text = torch.randint(7, (200,))
    first = language_model_loss(model, text, batch=5)
    assert first == language_model_loss(model, text, batch=5)
    assert abs(first - language_model_loss(model, text, batch=16)) < 1e-6  # however it is split
    starts = torch.linspace(0, 200 - 13, 16).long()
    crops = torch.stack([text[s : s + 13] for s in starts])
    assert abs(first - model.eval().loss(crops[:, :-1], crops[:, 1:]).item()) < 1e-6


def test_text_shorter_than_the_context_says_so() -> None:
    with pytest.raises(ValueError, match="more than 12 tokens, the model's context; got 12"):
        language_model_loss(gpt(), TEXT[:12])


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": 1, "batch": 0}, {"steps": 1, "validate_every": 0}])
def test_numbers_of_steps_and_crops_are_at_least_one(wrong) -> None:
    with pytest.raises(ValueError, match="must be at least 1; got 0"):
        fit_language_model(gpt(), TEXT, TEXT, **wrong)


def test_text_too_short_to_validate_on_is_refused_before_training() -> None:
    model = Recorder()
    with pytest.raises(ValueError, match="validation needs more than 12 tokens"):
        fit_language_model(model, TEXT, TEXT[:12], 50)
    assert not model.seen


def test_no_patience_at_all_is_refused(nodes) -> None:
    model = GCN(3, 3)
    with pytest.raises(ValueError, match="patience must be at least 1; got 0"):
        fit_node_classifier(model, RING, nodes, model.optimizer(), patience=0)


def test_node_classifier_without_patience_runs_every_epoch_and_keeps_the_last_weights(nodes) -> None:
    told: list[int] = []
    model = GCN(3, 3)
    history = fit_node_classifier(
        model, RING, nodes, model.optimizer(), epochs=30, progress=lambda epoch, _: told.append(epoch)
    )
    assert told == history.val_step == list(range(1, 31))
    assert len(history.train_loss) == len(history.val_loss) == len(history.val_accuracy) == len(history.seconds) == 30
    assert node_scores(model, RING, nodes, nodes.val_mask) == (history.val_loss[-1], history.val_accuracy[-1])
    assert node_scores(model, RING, nodes, nodes.test_mask)[1] == history.test_accuracy


def test_patience_stops_and_gives_back_the_best_weights(nodes) -> None:
    """A learning rate this high soon makes the validation loss worse and worse."""
    model = GCN(3, 3, dropout=0.0)
    history = fit_node_classifier(model, RING, nodes, model.optimizer(lr=0.5), epochs=1000, patience=7)
    loss, accuracy = history.val_loss, history.val_accuracy
    epochs = range(len(loss))
    better = [e for e in epochs if loss[e] <= min(loss[: e + 1]) or accuracy[e] >= max(accuracy[: e + 1])]
    best = [e for e in epochs if loss[e] <= min(loss[: e + 1]) and accuracy[e] >= max(accuracy[: e + 1])]
    assert len(loss) < 1000
    assert better[-1] == len(loss) - 1 - 7
    assert best[-1] < len(loss) - 1 - 7 or best[-1] == better[-1]
    assert node_scores(model, RING, nodes, nodes.val_mask) == (loss[best[-1]], accuracy[best[-1]])


def test_only_training_nodes_teach(nodes) -> None:
    """Labels of other nodes change what is measured, never what is learned."""
    losses = []
    for y in (nodes.y, torch.where(nodes.train_mask, nodes.y, (nodes.y + 1) % 3)):
        torch.manual_seed(0)
        model = GCN(3, 3)
        data = PointClassification(nodes.x, y, nodes.train_mask, nodes.val_mask, nodes.test_mask)
        losses.append(fit_node_classifier(model, RING, data, model.optimizer(), epochs=5).train_loss)
    assert losses[0] == losses[1]


# ------------------------------------------------------------------------------------------------------- checkpoints


class Stopped(Exception):
    """Ends a training in its midst, as a signal would."""


def stop_at(last: int) -> Progress:
    def stop(step: int, history: History) -> None:
        if step == last:
            raise Stopped

    return stop


def train_text(**options) -> GPT:
    torch.manual_seed(3)
    model = GPT(7, 16, 2, 1, context=12, dropout=0.2)
    fit_language_model(model, TEXT, TEXT, 12, batch=3, validate_every=5, **options)
    return model


def train_nodes(nodes: PointClassification, **options) -> GCN:
    torch.manual_seed(3)
    model = GCN(3, 3, dropout=0.4)
    fit_node_classifier(model, RING, nodes, model.optimizer(lr=0.2), epochs=40, patience=6, **options)
    return model


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("stop", [1, 5, 11, 12])
def test_a_stopped_language_model_continues_to_the_same_bits(tmp_path, stop) -> None:
    with pytest.raises(Stopped):
        train_text(progress=stop_at(stop), checkpoint=Checkpoint(tmp_path / "c.pt"))
    done: list[int] = []
    again = train_text(progress=lambda step, _: done.append(step), checkpoint=Checkpoint(tmp_path / "c.pt"))
    assert done == list(range(stop + 1, 13))
    assert_same_weights(again, train_text())


@pytest.mark.parametrize("stop", [1, 4, 9])
def test_a_stopped_node_classifier_continues_to_the_same_bits_and_the_same_best_weights(tmp_path, nodes, stop) -> None:
    with pytest.raises(Stopped):
        train_nodes(nodes, progress=stop_at(stop), checkpoint=Checkpoint(tmp_path / "c.pt"))
    assert_same_weights(train_nodes(nodes, checkpoint=Checkpoint(tmp_path / "c.pt")), train_nodes(nodes))


def test_a_finished_training_is_not_trained_further(tmp_path, nodes) -> None:
    """Patience has run out: the best weights come back, and no further epoch is run."""
    first = train_nodes(nodes, checkpoint=Checkpoint(tmp_path / "c.pt"))
    again = train_nodes(nodes, progress=stop_at(1), checkpoint=Checkpoint(tmp_path / "c.pt"))
    assert_same_weights(again, first)


def test_checkpoints_are_written_when_they_are_due(tmp_path, monkeypatch) -> None:
    """A clock of one second a look: one look for the checkpoint itself, one for each step, one for each write."""
    clock = iter(range(1000))
    monkeypatch.setattr(checkpoint_module, "monotonic", lambda: float(next(clock)))
    checkpoint = Checkpoint(tmp_path / "c.pt", seconds=3)
    written: list[int | None] = []
    train_text(progress=lambda step, _: written.append(checkpoint.step), checkpoint=checkpoint)
    assert written == [None, None, None, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert checkpoint.step == 12


def test_a_checkpoint_of_another_training_is_refused(tmp_path) -> None:
    train_text(checkpoint=Checkpoint(tmp_path / "c.pt", run={"seed": 3}))
    with pytest.raises(ValueError, match=r"another training run: seed was 3 and is 4 now; lr was 0.001 and is 0.1 now"):
        train_text(lr=0.1, checkpoint=Checkpoint(tmp_path / "c.pt", run={"seed": 4}))


def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    train_text(checkpoint=Checkpoint(tmp_path / "c.pt"))
    wide = GPT(7, 32, 2, 1, context=12)
    with pytest.raises(ValueError, match="is not a checkpoint of this model and optimizer"):
        fit_language_model(wide, TEXT, TEXT, 12, batch=3, validate_every=5, checkpoint=Checkpoint(tmp_path / "c.pt"))


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path, nodes) -> None:
    """Its own learning rate would take the place of the one that was asked for."""
    train_nodes(nodes, checkpoint=Checkpoint(tmp_path / "c.pt"))
    model = GCN(3, 3, dropout=0.4)
    with pytest.raises(ValueError, match=r"training run: optimizer was Adam \(.* lr: 0.2 .* is Adam \(.* lr: 0.1 "):
        fit_node_classifier(
            model, RING, nodes, model.optimizer(lr=0.1), epochs=40, patience=6, checkpoint=Checkpoint(tmp_path / "c.pt")
        )


class Hostile:
    def __reduce__(self):
        return print, ("code of the file ran",)


def test_a_changed_byte_of_a_checkpoint_is_noticed(tmp_path) -> None:
    """In the weights, whose sums zip files have and torch does not check."""
    path = tmp_path / "c.pt"
    model = train_text(checkpoint=Checkpoint(path))
    saved = path.read_bytes()
    at = saved.index(next(model.parameters()).detach().numpy().tobytes())
    path.write_bytes(saved[:at] + bytes([saved[at] ^ 1]) + saved[at + 1 :])
    with pytest.raises(ValueError, match=r"c\.pt is damaged \(a byte has changed"):
        train_text(checkpoint=Checkpoint(path))


@pytest.mark.parametrize("kind", ["half", "text", "foreign", "hostile"])
def test_a_damaged_checkpoint_is_refused_and_no_code_in_it_runs(tmp_path, kind, capsys) -> None:
    path = tmp_path / "c.pt"
    train_text(checkpoint=Checkpoint(path))
    if kind == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif kind == "text":
        path.write_text("hello")
    else:
        torch.save({"weights": torch.zeros(3)} if kind == "foreign" else Hostile(), path)
    with pytest.raises(ValueError, match=r"c\.pt is (damaged|not a checkpoint).*delete it to start over"):
        train_text(checkpoint=Checkpoint(path))
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------ losses that are NaN


def test_a_loss_that_is_nan_stops_training_and_says_what_to_try(tmp_path) -> None:
    class Doomed(Recorder):
        def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
            loss = super().loss(tokens, targets)
            return loss * math.nan if len(self.seen) == 4 else loss

    model, checkpoint = Doomed(), Checkpoint(tmp_path / "c.pt", seconds=0)
    with pytest.raises(
        TrainingDiverged, match=r"loss of step 4 is nan, with learning rate 0\.008; try a lower learning"
    ):
        fit_language_model(model, TEXT, TEXT, 100, lr=1e-2, checkpoint=checkpoint)
    assert math.isfinite(model.weight.item())
    assert checkpoint.step == 3


def test_a_validation_loss_that_is_infinite_stops_training() -> None:
    class Doomed(Recorder):
        def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return super().loss(tokens, targets) + (0.0 if self.training else math.inf)

    with pytest.raises(TrainingDiverged, match="validation loss of step 2 is inf"):
        fit_language_model(Doomed(), TEXT, TEXT, 2)


def test_nodes_with_nan_stop_training_at_the_first_epoch(nodes) -> None:
    nodes.x[7] = math.nan
    model = GCN(3, 3)
    with pytest.raises(TrainingDiverged, match=r"loss of step 1 is nan, .* look for NaN and infinity in the input"):
        fit_node_classifier(model, RING, nodes, model.optimizer())


def test_no_nodes_to_train_on_are_refused_and_none_to_validate_on_are_not(nodes) -> None:
    model, none = GCN(3, 3), torch.zeros(60, dtype=torch.bool)
    history = fit_node_classifier(model, RING, dataclasses.replace(nodes, val_mask=none), model.optimizer(), epochs=2)
    assert len(history.train_loss) == 2
    with pytest.raises(ValueError, match="train_mask selects no node"):
        fit_node_classifier(model, RING, dataclasses.replace(nodes, train_mask=none), model.optimizer())


# --------------------------------------------------------------------------- what the loop adds to the tasks above it


def train_line(settings: Settings, **options) -> tuple[nn.Linear, History]:
    """A linear model of noisy crops, three numbers at a time, with momentum."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.arange(30.0).view(10, 3) / 30
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(k: int) -> Tensor:
        part = x[shuffled(10, 4, k)]
        return (model(part + 0.01 * torch.randn_like(part)) - part.sum(1, keepdim=True)).square().mean()

    return model, fit(model, optimizer, loss, settings, **options)


def test_accumulated_gradients_are_the_mean_over_batches() -> None:
    torch.manual_seed(0)
    whole, parts = nn.Linear(3, 1), nn.Linear(3, 1)
    parts.load_state_dict(whole.state_dict())
    x = torch.randn(8, 3)
    fit(whole, torch.optim.SGD(whole.parameters(), 0.1), lambda k: whole(x).square().mean(), Settings(3))
    halves = Settings(3, accumulate=2)
    optimizer = torch.optim.SGD(parts.parameters(), 0.1)
    history = fit(parts, optimizer, lambda k: parts(x[k % 2 :: 2]).square().mean(), halves)
    assert len(history.train_loss) == 3
    torch.testing.assert_close(parts.weight, whole.weight)


def test_mixed_precision_computes_in_sixteen_bits_and_keeps_the_weights_in_thirty_two() -> None:
    model = nn.Linear(3, 1)
    dtypes = []

    def loss(k: int) -> Tensor:
        y = model(torch.ones(2, 3))
        dtypes.append(y.dtype)
        return y.square().mean()

    mine = Accelerator(cpu=True)  # of the user, in the same process
    fit(model, torch.optim.SGD(model.parameters(), 0.1), loss, Settings(2, precision="bf16"))
    fit(model, torch.optim.SGD(model.parameters(), 0.1), loss, Settings(1))
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert mine.device.type == "cpu"
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"precision": "bf16"}, {"clip": 0.01}], ids=str)
def test_every_kind_of_training_continues_to_the_same_bits(tmp_path, options) -> None:
    settings = Settings(7, **options)
    with pytest.raises(Stopped):
        train_line(settings, progress=stop_at(4), checkpoint=Checkpoint(tmp_path / "c.pt"))
    again, history = train_line(settings, checkpoint=Checkpoint(tmp_path / "c.pt"))
    whole, uninterrupted = train_line(settings)
    assert history.train_loss == uninterrupted.train_loss
    assert_same_weights(again, whole)


def test_the_best_weights_are_those_of_the_best_validation(tmp_path) -> None:
    weights: list[Tensor] = []
    measures = iter([3.0, 1.0, 2.0, 4.0])
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def validate() -> dict[str, float]:
        weights.append(model.weight.detach().clone())
        return {"loss": next(measures)}

    optimizer, checkpoint = torch.optim.SGD(model.parameters(), 0.1), Checkpoint(tmp_path / "c.pt")
    assert checkpoint.best() is None
    history = fit(
        model,
        optimizer,
        lambda k: model(torch.ones(1, 3)).square().mean(),
        Settings(40, validate_every=2, patience=2, keep="best"),
        validate=validate,
        checkpoint=checkpoint,
    )
    assert history.val_step == [2, 4, 6, 8]
    assert torch.equal(model.weight, weights[1])
    best = checkpoint.best()
    assert best is not None
    assert torch.equal(best["weight"], weights[1])


def test_an_epoch_visits_every_sample_once() -> None:
    epochs = [torch.cat([shuffled(10, 4, k) for k in range(first, first + 3)]) for first in (0, 3)]
    assert all(sorted(epoch.tolist()) == list(range(10)) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert torch.equal(shuffled(10, 4, 4), shuffled(10, 4, 4))


_TWO_PROCESSES = """
import sys
import torch
from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import Settings, fit
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
noise = lambda k: torch.randn(2, 3)  # each process draws its own
checkpoint = Checkpoint(sys.argv[1], seconds=0)
steps = int(sys.argv[2])
def stop(step, history):
    if step == steps:
        raise SystemExit
history = fit(model, torch.optim.SGD(model.parameters(), 0.1), lambda k: model(noise(k)).square().mean(),
              Settings(6, accumulate=2), progress=stop, checkpoint=checkpoint)
print(history.train_loss, model.weight.tolist(), flush=True)
"""


@pytest.mark.slow
def test_two_processes_have_the_same_weights_and_resume_to_them(tmp_path) -> None:
    script = tmp_path / "two.py"
    script.write_text(_TWO_PROCESSES)

    def launch(checkpoint: str, steps: int) -> list[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        run = [*command, str(tmp_path / checkpoint), str(steps)]
        done = subprocess.run(run, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, second = launch("whole.pt", 9)
    assert first == second
    assert launch("stopped.pt", 3) == []
    assert launch("stopped.pt", 9) == [first, first]
