"""Prices, fitted to times: known ones are found again, and every operation that requests count has one."""

import pytest
from capabilities import REQUESTS

from benchmarks import fit, requests
from mpnn import graphs
from mpnn.backends import BACKENDS, cost_model, tuned
from mpnn.engine import calibration
from mpnn.engine.calibration import Sample
from mpnn.engine.plan import refusal as why_not

KNOWN = {"dot call": 50_000.0, "edge": 20.0, "dot number": 3.0, "activated number": 1.5}


def taken(counts: dict[str, float], slower: float = 1.0) -> float:
    return slower * 1e-9 * sum(KNOWN[kind] * n for kind, n in counts.items())


def samples(slower: float = 1.0) -> list[Sample]:
    found = []
    for edges in (10.0, 1e3, 1e5):
        for width in (1, 8, 64):
            for kind in ("dot", "activated"):
                counts = {"dot call": 1.0, "edge": edges, f"{kind} number": edges * width}
                found.append(Sample({"edge_list": counts}, {"edge_list": taken(counts, slower)}))
    return found


def test_fitting_recovers_the_prices_behind_the_times() -> None:
    before = tuned.shipped()["nanoseconds"]
    prices = calibration.fit(before, samples(), freedom=100.0)
    assert {kind: prices["edge_list"][kind] for kind in KNOWN} == pytest.approx(KNOWN, rel=1e-2)
    assert prices["edge_list"]["dropped edge"] == before["edge_list"]["dropped edge"]  # no sample counted it
    assert prices["dense"] == before["dense"]


def test_with_little_freedom_prices_change_by_a_common_factor() -> None:
    """A machine that is three times as slow; only the calls and the work of a backend may change, each as a whole."""
    wrong = KNOWN | {"edge": 25.0}
    prices = calibration.fit({"edge_list": wrong}, samples(slower=3.0), freedom=1e-3)["edge_list"]
    factors = {kind: prices[kind] / wrong[kind] for kind in wrong}
    assert factors["edge"] == pytest.approx(factors["dot number"], rel=0.01)
    assert factors["edge"] > 1.5


def test_a_time_that_was_disturbed_for_all_backends_alike_changes_little() -> None:
    """The machine was three times as slow during one of many requests."""
    before = {"a": {"call": 100.0}, "b": {"call": 200.0}}
    counts = {"a": {"call": 1.0}, "b": {"call": 1.0}}
    quiet, busy = {"a": 100e-9, "b": 200e-9}, {"a": 300e-9, "b": 600e-9}
    prices = calibration.fit(before, [Sample(counts, quiet)] * 4 + [Sample(counts, busy)], freedom=10.0)
    assert prices["b"]["call"] / prices["a"]["call"] == pytest.approx(2.0, rel=0.02)
    assert prices["a"]["call"] < 150


@pytest.mark.slow
def test_every_operation_that_requests_count_has_a_positive_price() -> None:
    plain, graph, counted = [request for _, request in fit.cases()], graphs.causal().bind(6), set()
    drawn = [requests.draw(0, index).request for index in range(60)]
    capabilities = [make(graph) for make in REQUESTS.values()]
    prices = tuned.shipped()["nanoseconds"]
    for request in (*plain, *map(requests.with_gradients, plain), *drawn, *capabilities):
        for backend in (b for b in BACKENDS if why_not(b, request) is None):
            counted.add(backend.NAME)
            assert set(backend.counts(request)) <= set(prices[backend.NAME]), (request, backend.NAME)
    assert counted >= {"dense", "tiles", "scan", "csr", "edge_list"}  # scatter may not be installed
    assert min(price for costs in prices.values() for price in costs.values()) > 0


def test_only_calls_take_the_same_time_on_more_threads() -> None:
    counts = {"dot call": 1.0, "dot call, back": 1.0, "edge": 10.0, "edge, back": 10.0}
    assert cost_model.per_thread(counts, 1) == counts
    assert cost_model.per_thread(counts, 2) == counts | {"edge": 5.0, "edge, back": 5.0}


def test_new_operations_get_prices() -> None:
    request = requests.dot(requests.scattered(20, 3))
    sample = Sample({"csr": {"unheard-of call": 1.0}}, {"csr": 1e-3})
    prices = fit.fitted([sample, fit.sample(request, {"csr": 1e-3, "edge_list": 2e-3})])
    assert prices["csr"]["unheard-of call"] > 20_000
