"""The law of change for each read of a fast way: it changes after a call, and the next call computes what an unused
copy with the same change does.

The cases are the records of the fast ways themselves (`reads.py`). By default a part of them is checked, evenly spread.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reads import Place, Unchangeable, check, check_field, reads_of, used
from test_change import THINGS
from things import Thing

from mpnn.engine import steps
from mpnn.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="there are no compiled kernels")

_NAMES = {
    "PreNorm(FeedForward), DotProduct": 1,
    "PostNorm(GatedFeedForward), Rotary": 3,
    "whole layers: BertLMHeadModel": 1,
    "whole layers: GPT2LMHeadModel": 3,
    "whole layers: LlamaForCausalLM": 3,
    "in place: GCN": 1,
    "in place: GATv2": 1,
    "in place: PNA": 1,
    "flex_attention over a block mask": 1,
    "flex_attention over a block mask of torch": 1,
}
"""Things whose fast ways keep what they have read, and every which read the slow tests change."""
_PRESENT = [name for name in _NAMES if name in THINGS]
_AT_MOST = 6  # reads of a thing by default
_OF_ROUNDS = [
    *("Additive", "DotProduct, edge_dim", "aggregate mean", "aggregate std", "position Shaw over causal"),
    *("attention over window", "attend over edges by csr", "attend over edges by dense", "in place: Transformer"),
]


def _mode(name: str) -> Any:
    """Whole layers run where no gradients are recorded."""
    return torch.no_grad if "layers" in name or "Norm" in name else torch.enable_grad


def _check(name: str, places: list[Place]) -> int:
    """How many changes of these reads have an effect."""
    broken = []
    effects = 0
    for place in places:
        try:
            effects += check(THINGS[name], _mode(name), place)
        except Unchangeable:
            continue
        except AssertionError as error:
            broken.append(str(error))
    assert not broken
    return effects


@pytest.mark.parametrize("name", _PRESENT)
def test_some_reads_change(name: str) -> None:
    places = reads_of(THINGS[name], _mode(name))
    _check(name, places[:: max(len(places) // _AT_MOST, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("name", _PRESENT)
def test_reads_change(name: str) -> None:
    effects = _check(name, reads_of(THINGS[name], _mode(name))[:: _NAMES[name]])
    assert effects, "no change has an effect: the test proves nothing"


@pytest.mark.parametrize("name", [name for name in _OF_ROUNDS if name in THINGS])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_each_field_of_a_round_changes(name: str, mode: Any) -> None:
    thing: Thing = THINGS[name]
    _, found = used(thing, mode)
    assert found.rounds
    effects = 0
    for round, backend in found.rounds:
        for field in steps._fields(round):
            with mode():
                effects += check_field(thing, round, backend, field.path)
    assert effects, "no change has an effect: the test proves nothing"
