"""Prices of work, fitted to times: known ones come back, and the plan's regret is told."""

import pytest

from benchmarks import fit
from benchmarks.fit import Measured
from mpnn.backends import BACKENDS
from mpnn.backends.cost_model import table

KNOWN = {"call": 50_000.0, "edge": 20.0, "dot number": 3.0, "weighted number": 1.5}


def made_up(counts: dict[str, float]) -> Measured:
    taken = 1e-9 * sum(KNOWN[kind] * n for kind, n in counts.items())
    return Measured("made up", "forward", {"edge_list": counts}, {"edge_list": taken})


def test_fitting_finds_the_prices_that_times_were_made_with() -> None:
    found = [
        made_up({"call": 1.0, "edge": edges, f"{kind} number": edges * width})
        for edges in (10.0, 1e3, 1e5)
        for width in (1, 8, 64)
        for kind in ("dot", "weighted")
    ]
    before = table()["nanoseconds"]
    prices = fit.fitted(found)
    assert {kind: prices["edge_list"][kind] for kind in KNOWN} == pytest.approx(KNOWN, rel=1e-2)
    assert prices["edge_list"]["dropped edge"] == before["edge_list"]["dropped edge"]  # no case counted it
    assert prices["dense"] == before["dense"]


def test_regret_is_the_choice_over_the_best() -> None:
    counts = {"dense": {"call": 1.0}, "edge_list": {"call": 1.0, "edge": 1e9}}
    measured = Measured("made up", "forward", counts, {"dense": 3.0, "edge_list": 2.0})
    assert min(measured.estimated(), key=measured.estimated().__getitem__) == "dense"
    assert measured.regret() == 1.5


def test_every_kind_of_work_that_cases_count_has_a_price() -> None:
    prices, counted = table()["nanoseconds"], set()
    for name, plain in fit.cases():
        for given in (plain, fit.with_gradients(plain)):
            for backend in (b for b in BACKENDS if b.supports(given) is None):
                counted.add(backend.NAME)
                assert set(backend.counts(given)) <= set(prices[backend.NAME]), (name, backend.NAME)
    assert counted >= {"dense", "tiles", "low_rank", "csr", "edge_list"}  # scatter may not be installed
