"""The training loops: what they measure, when they stop, and which weights they leave behind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mpnn import graphs
from mpnn.data import PointClassification
from mpnn.models import GCN, GPT
from mpnn.train import History, fit_language_model, fit_node_classifier, language_model_loss, node_scores

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


def test_a_seed_repeats_a_run() -> None:
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(fit_language_model(gpt(), TEXT, TEXT, 5).train_loss)
    assert runs[0] == runs[1] != runs[2]


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
    with pytest.raises(ValueError, match="steps, batch and validate_every must be at least 1; got"):
        fit_language_model(gpt(), TEXT, TEXT, **wrong)


def test_text_too_short_to_validate_on_is_refused_before_training() -> None:
    model = Recorder()
    with pytest.raises(ValueError, match="validation needs more than 12 tokens"):
        fit_language_model(model, TEXT, TEXT[:12], 50)
    assert not model.seen


def test_no_patience_at_all_is_refused(nodes) -> None:
    model = GCN(3, 3)
    with pytest.raises(ValueError, match="patience must be at least 1 epoch, or None for all of them; got 0"):
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
