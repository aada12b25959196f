"""Requests drawn at random, their times, and the regret of plans."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks import regret
from benchmarks.machine import about
from benchmarks.regret import Regret, Times
from benchmarks.report import plans
from benchmarks.requests import KINDS, dot, draw, scattered
from mpnn.backends import BACKENDS
from mpnn.engine.choice import own_refusal as why_not


def times(seed: int, index: int, **seconds: float) -> Times:
    return Times(seed, index, seconds)


def test_a_seed_and_an_index_are_a_request() -> None:
    for index in range(20):
        one, again = draw(3, index), draw(3, index)
        assert (one.kind, one.text) == (again.kind, again.text)
        assert torch.equal(one.request.value, again.request.value)
        assert torch.equal(one.request.graph.edge_index, again.request.graph.edge_index)
    assert draw(3, 0).text != draw(4, 0).text


@pytest.mark.slow
def test_all_kinds_are_drawn_with_and_without_gradients() -> None:
    drawn = [draw(5, index) for index in range(150)]
    assert {one.kind for one in drawn} == set(KINDS)
    assert {one.request.needs_grad for one in drawn} == {False, True}
    assert {one.request.weighted for one in drawn} == {False, True}


def test_all_backends_that_are_timed_are_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    request = dot(scattered(20, 3))
    wrong = regret.candidates(request)[0]
    run = wrong.run
    monkeypatch.setattr(wrong, "run", lambda request: (run(request)[0] + 1, None))
    with pytest.raises(AssertionError):
        regret.times(request, 0.0)


def test_a_measurement_has_the_time_of_the_chosen_backend() -> None:
    measured = regret.measure(1, 8, 0.0)
    assert all(0 < seconds < math.inf for seconds in measured.seconds.values())
    assert regret.regret(measured).chosen in measured.seconds


def test_regret_is_the_choice_over_the_quickest() -> None:
    request = draw(1, 8).request
    able = [b.NAME for b in BACKENDS if why_not(b, request) is None]
    chosen = regret.choice(request, able)
    seconds = {name: 3.0 if name == chosen else 2.0 for name in able}
    assert regret.regret(times(1, 8, **seconds)).ratio == 1.5
    assert regret.regret(times(1, 8, **seconds | {chosen: 1.0})).ratio == 1.0


def test_what_is_far_slower_runs_twice() -> None:
    calls = {"quick": 0, "slow": 0}

    def work(name: str, size: int):  # type: ignore[no-untyped-def]
        def once() -> None:
            calls[name] += 1
            sum(range(size))

        return once

    found = regret.least({"quick": work("quick", 1000), "slow": work("slow", 1_000_000)}, 0.1)
    assert found["quick"] < found["slow"]
    assert calls["slow"] == 2 < calls["quick"]


def test_times_are_kept_in_a_file(tmp_path: Path) -> None:
    kept = [times(1, 0, csr=1e-3, edge_list=2e-3), times(1, 1, dense=0.25)]
    for one in kept:
        regret.append(tmp_path / "times.jsonl", one)
    assert list(regret.read(tmp_path / "times.jsonl")) == kept


def test_the_report_gives_shares_and_the_worst() -> None:
    found = [Regret("causal", "a", "csr", "tiles", 2.0), Regret("window", "b", "csr", "csr", 1.0)]
    summary = regret.summary(found)
    lines = list(regret.report(summary))
    assert lines[1].split() == ["causal", "1", "2.000", "100.0%", "2.00"]
    assert lines[3].split() == ["all", "2", "1.500", "50.0%", "2.00"]
    assert lines[4:] == ["2.00  csr instead of tiles: causal, a"]
    page = plans({"command": "python -m benchmarks regret --seed 1", **about(), **summary})
    assert "| causal | 1 | 2.000 | 100.0% | 2.00 |" in page
    assert page[-3] == "- 2.00  csr instead of tiles: causal, a"
