"""Prices tuned to a machine: what is measured, where it is kept, and that plans become right on another machine."""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest
import torch

from benchmarks import requests
from mpnn.aggregate import Max, Mean, Sum
from mpnn.backends import BACKENDS, cost_model, tuned
from mpnn.backends.tuned import Prices
from mpnn.engine import tune
from mpnn.engine.choice import own_refusal as why_not
from mpnn.engine.plan import plan
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MPNN_CACHE", str(tmp_path / "cache"))
    cost_model.prices.cache_clear()
    yield tmp_path / "cache"
    cost_model.prices.cache_clear()


def another_machine(seed: int) -> Prices:
    """Calls and work of each backend are quicker or slower by factors of up to some three."""
    random_ = random.Random(seed)
    factors: dict[tuple[str, bool], float] = {}
    return {
        name: {
            kind: price * factors.setdefault((name, cost_model.is_once(kind)), math.exp(random_.gauss(0, 0.6)))
            for kind, price in costs.items()
        }
        for name, costs in tuned.shipped()["nanoseconds"].items()
    }


Works = dict[str, dict[str, float]]


def works(request: requests.Round) -> Works:
    """What each backend that can run the request counts for it."""
    return {b.NAME: b.counts(request) for b in BACKENDS if why_not(b, request) is None}


def seconds(counted: Works, prices: Prices) -> dict[str, float]:
    return {name: 1e-9 * sum(prices[name][kind] * n for kind, n in each.items()) for name, each in counted.items()}


def mean_regret(drawn: list[Works], prices: Prices, truth: Prices) -> float:
    ratios = []
    for counted in drawn:
        estimated, taken = seconds(counted, prices), seconds(counted, truth)
        ratios.append(taken[min(estimated, key=estimated.__getitem__)] / min(taken.values()))
    return fmean(ratios)


@pytest.mark.slow
def test_plans_become_right_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped, before, after = tuned.shipped()["nanoseconds"], [], []
    drawn, probes = [works(requests.draw(0, index).request) for index in range(150)], list(map(works, tune.probes()))
    for seed in range(4):
        truth = another_machine(seed)
        times = [seconds(counted, truth) for counted in probes]
        monkeypatch.setattr(tune, "_works", lambda request: {})
        monkeypatch.setattr(tune, "least", lambda works, seconds, times=times: times)
        prices = tune.tune()
        before.append(mean_regret(drawn, shipped, truth))
        after.append(mean_regret(drawn, prices, truth))
    assert fmean(before) > 1.05
    assert max(after) < 1.03


def test_tuning_measures_every_backend_that_may_be_chosen() -> None:
    prices = tune.tune(0.0)
    shipped = tuned.shipped()["nanoseconds"]
    assert {name: set(costs) for name, costs in prices.items()} == {name: set(costs) for name, costs in shipped.items()}
    for name in ("dense", "tiles", "csr", "edge_list"):
        assert prices[name] != shipped[name]
    assert all(price > 0 for costs in prices.values() for price in costs.values())


def test_probes_cover_the_calls_of_common_requests() -> None:
    able = ((b, r) for r in tune.probes() for b in BACKENDS if why_not(b, r) is None)
    counted = {(b.NAME, kind) for b, r in able for kind in b.counts(r)}
    for name, kind in (
        ("csr", "additive call"),
        ("csr", "sum call, back"),
        ("tiles", "tile"),
        ("dense", "direct call"),
    ):
        assert (name, kind) in counted


def test_probes_tell_the_price_of_an_edge_from_that_of_a_node() -> None:
    listed = [r.graph for r in tune.probes() if r.graph.is_explicit]
    degrees = [graph.num_edges / graph.num_dst for graph in listed]
    assert max(degrees) >= 10 * min(degrees)


def test_the_least_time_of_each_function_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    durations = {"first": [8.0, 1.0], "second": [5.0, 7.0]}

    def work(name: str) -> None:
        nonlocal now
        now += durations[name].pop(0)

    monkeypatch.setattr(tune.time, "perf_counter", lambda: now)
    works = [{name: partial(work, name)} for name in durations]
    assert tune.least(works, 0.0) == [{"first": 1.0}, {"second": 5.0}]
    durations = {"first": [1.0] * 9, "second": [2.0] * 9}
    tune.least(works, 10.0)
    assert list(map(len, durations.values())) == [5, 5], "turns end after the first that ends too late"


def test_plans_use_the_prices_in_the_file(cache: Path) -> None:
    request = requests.dot(requests.graphs.complete().bind(64))
    assert plan(request).backend != "edge_list"
    prices = {name: {k: x * 1e6 for k, x in costs.items()} for name, costs in tuned.shipped()["nanoseconds"].items()}
    prices["edge_list"] = tuned.shipped()["nanoseconds"]["edge_list"]
    threads = torch.get_num_threads()
    cache.mkdir()
    tuned.path(threads).write_text(tuned.text(prices, threads))
    cost_model.prices.cache_clear()
    assert plan(request).backend == "edge_list"
    assert json.loads(tuned.path(threads).read_text())["measured"]["threads"] == threads


def test_planning_writes_nothing(cache: Path) -> None:
    plan(requests.dot(requests.graphs.complete().bind(64)))
    assert not cache.exists()


def test_each_number_of_threads_and_processor_has_its_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tuned.path(1)
    assert one.parent == cache
    assert tuned.path(2) != one
    monkeypatch.setattr(tuned, "processor", lambda: "another")
    assert tuned.path(1) != one


@pytest.mark.parametrize("price", ["NaN", "Infinity", "-1.0"])
def test_a_price_that_is_no_time_is_left_out_with_a_warning(cache: Path, price: str) -> None:
    cache.mkdir()
    tuned.path(1).write_text(f'{{"nanoseconds": {{"csr": {{"sum call": {price}}}}}}}')
    with pytest.warns(UserWarning, match="a price must be a finite number of nanoseconds; got"):
        assert cost_model.prices(1) == tuned.shipped()["nanoseconds"]


@pytest.mark.parametrize("text", ["", "[]", '{"nanoseconds": {"csr": {"sum call": "fast"}}}', '{"nanoseconds": 3}'])
def test_a_broken_file_is_left_out_with_a_warning(cache: Path, text: str) -> None:
    cache.mkdir()
    tuned.path(1).write_text(text)
    with pytest.warns(UserWarning, match="run mpnn tune, or delete the file"):
        assert cost_model.prices(1) == tuned.shipped()["nanoseconds"]


def test_without_a_home_folder_plans_use_the_shipped_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MPNN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert tuned.read(1) == {}


def test_what_probes_ask_for() -> None:
    """Each without and with gradients, of all tensors."""
    counted: Counter[tuple[object, ...]] = Counter()
    for given in tune.probes():
        grads = {x.requires_grad for x in given.tensors if x.is_floating_point()} - {given.needs_grad}
        assert not grads or type(given.score) is AdditiveV2Score  # the vector of which is fixed
        kind = type(given.reduce) if given.score is None else type(given.score)
        key_heads = given.value.shape[-2]
        if isinstance(given.score, Dot):
            assert given.score.scale == given.value.shape[-1] ** -0.5
            assert given.score.key.shape == given.value.shape
        counted[kind, given.heads, key_heads, given.value.shape[-1], bool(given.bias), given.needs_grad] += 1
    expected = {
        **{(kind, heads, heads, 16, False): 3 for kind in (AdditiveScore, AdditiveV2Score) for heads in (2, 8)},
        **{(kind, 1, 1, width, False): 3 for kind, width in ((Sum, 16), (Sum, 128), (Mean, 32), (Max, 32))},
        (Dot, 4, 4, 16, False): 3 + 6,  # of edges and of runs
        (Dot, 2, 2, 64, False): 6,
        (Dot, 4, 1, 32, False): 1,
        (Dot, 8, 1, 32, False): 1,
        (Dot, 4, 4, 16, True): 4,
    }
    assert counted == {(*form, grad): count for form, count in expected.items() for grad in (False, True)}
