"""What every model can do: be copied, kept in a folder, made on the meta device, trained, and run under autocast."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import EVERY, Call, Make

from mpnn import models
from mpnn.graph.bound import BoundGraph

every = pytest.mark.parametrize(("make", "call"), EVERY.values(), ids=list(EVERY))


@every
@pytest.mark.sample(4)
def test_copies_answer_as_the_original(make: Make, call: Call, tmp_path: Path) -> None:
    model = make().eval()
    answer = call(model)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = make()
    assert all(parameter.is_meta for parameter in empty.parameters())
    loaded = empty.to_empty(device="cpu").eval()
    loaded.load_state_dict(model.state_dict())
    torch.save(model, tmp_path / "whole.pt")
    with torch.serialization.safe_globals(models.safe_globals()):
        whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), type(model).from_pretrained(tmp_path), loaded
    for other in (*copies, whole):
        assert torch.equal(call(other), answer)


@pytest.fixture
def derived_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the sizes of each graph that is derived in a call with those that a traced program is told."""
    derive = BoundGraph.derive

    def checked(graph: Any, build: Any, *arguments: Any, num_dst: int, num_src: int | None = None) -> Any:
        derived = derive(graph, build, *arguments, num_dst=num_dst, num_src=num_src)
        assert derived.num_dst == num_dst
        assert derived.num_src == (graph.num_src if num_src is None else num_src)
        return derived

    monkeypatch.setattr(BoundGraph, "derive", checked)


@every
@pytest.mark.usefixtures("derived_sizes")
def test_every_parameter_learns(make: Make, call: Call) -> None:
    """With dropout, if the model has it: gradients reach everything, and are finite."""
    model = make().train()
    call(model).square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@every
@pytest.mark.sample(3)
def test_autocast_changes_little(make: Make, call: Call) -> None:
    """Some ten roundings of 2^-9 one after another, on numbers that norms keep near 1."""
    model = make().eval()
    with torch.no_grad():
        exact = call(model)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = call(model).float()
    assert (rounded - exact).abs().max() <= 0.1 * exact.abs().max().clamp(min=1)
