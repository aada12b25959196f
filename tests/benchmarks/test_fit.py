"""Prices, fitted to times: known ones are found again, and every operation that requests count has one."""

import json
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from capabilities import REQUESTS
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import fit, gpu, gpu_plans, gpu_report, requests
from benchmarks.contest import BOTH, FORWARD
from mpnn import graphs
from mpnn.backends import BACKENDS, cost_model, tuned
from mpnn.engine import calibration
from mpnn.engine.calibration import Sample
from mpnn.engine.choice import own_refusal as why_not
from mpnn.round import Round
from mpnn.scores import Dot

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


def on_cuda(request: Round) -> Round:
    """The same with tensors that are nowhere, but claim to be on a GPU."""
    with FakeTensorMode():
        return request.map(
            lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device="cuda:0", requires_grad=x.requires_grad)
        )


def test_every_operation_on_a_gpu_has_a_price() -> None:
    pytest.importorskip("triton")
    graph, counted = graphs.causal().bind(6), set()
    plain = [make(graph) for make in REQUESTS.values()]
    plain += [given for name, given in fit.cases() if "64" in name or "tiny" in name]
    narrow = [requests.cast(given, torch.bfloat16) for given in plain if type(given.score) is Dot]
    planned = [
        request.build(request.graph(), "cpu", dtype) for request, dtype in gpu_plans.by_name(gpu_plans.SMALL).values()
    ]
    prices = tuned.shipped()["cuda"]["nanoseconds"]
    for request in (*plain, *narrow, *map(requests.with_gradients, plain), *planned):
        given = on_cuda(request)
        for backend in (b for b in BACKENDS if why_not(b, given) is None):
            counted.add(backend.NAME)
            assert set(backend.counts(given)) <= set(prices[backend.NAME]), (request, backend.NAME)
            assert 0 < backend.estimate(given).seconds < 1
    assert counted >= {"dense", "tiles", "scan", "csr", "edge_list"}
    assert min(price for costs in prices.values() for price in costs.values()) > 0


OVER = {
    ("causal & window(64), N 512, B 1, dot 8 x 64, bfloat16", BOTH): 1.16,
    ("causal, N 8192, B 1, dot 8 x 64, bfloat16", BOTH): 1.12,
}
"""Choices that took more than 1.1 times as long as the fastest. In the first row, a mask of 512 nodes took longer than
one of 2,048 nodes in another row. The second is left to torch's attention, which took less per pair at B 2, and at
N 32,768 less than `tiles` takes here. Prices exist by which either row is right as well as all others and the test of
lengths and batches below, but some are more than 3.5 times, or less than 1 / 3.5 of, those that fit the times."""


@pytest.mark.slow
def test_plans_at_the_shipped_prices_are_those_that_the_record_of_a_gpu_found_fast() -> None:
    """Counted today: the choice takes at most 1.1 times as long as the fastest, in all rounds but two, and what torch's
    own attention computes sooner is left to it."""
    results = json.loads(gpu.RECORD.read_text())
    rows = [row for row in results["rows"] if row["group"] == gpu_plans.GROUP]
    shipped = tuned.shipped()["cuda"]["nanoseconds"]
    gpu_plans.count(rows)
    gpu_plans.choose(rows, shipped)
    regrets = {(row["case"], row["direction"]): ratio for row, *_, ratio in gpu_report.regrets(rows)}
    assert len(regrets) == 180
    assert {row: round(ratio, 2) for row, ratio in regrets.items() if ratio > 1.1} == OVER
    assert sum(regrets.values()) / len(regrets) < 1.005
    lost = [sample for sample in gpu_plans.of_torch(results["rows"]) if len(sample.seconds) > 1]
    assert len(lost) == 2
    assert fit.worst(lost, shipped) == 1.0


SLOWER = {
    "Llama, 2 prompts of 4096, one padded to half",
    "Llama, 4 texts of 1024 packed into one",
    "BERT of MiniLM's shape, 128 texts of 8 to 256 tokens, padded",
}
"""Whole models in place that were slower than transformers, for the time of the host and not for a choice of the plan:
masks and positions were read in each layer. The code has changed since; the next run on a GPU shows what is left."""


def test_what_a_plan_chooses_on_a_gpu_is_not_slower_than_the_peer_that_it_stands_in_for() -> None:
    """Rounds that the plan leaves to torch's own operations take what the peer takes; all others took at most 1.1 times
    the peer's time in the record."""
    prices = tuned.shipped()["cuda"]["nanoseconds"]
    rows = json.loads(gpu.RECORD.read_text())["rows"]
    left_to_torch: set[str] = set()
    slower: dict[str, float] = {}
    compared = 0
    for row in rows:
        for one in gpu_report.comparisons([row]):
            compared += 1
            if gpu_plans.chosen_today(row, prices) in gpu_plans.OF_TORCH:
                left_to_torch.add(row["case"])
            elif one.ratio < 1 / 1.1:
                slower[row["case"]] = one.ratio
    assert compared > 60
    assert {"causal, N 519, B 2", "sum 64 over a molecule of 30 atoms"} <= left_to_torch
    assert slower.keys() == SLOWER
    with_peer = {one.case for one in gpu_report.comparisons(rows)}
    alone = {row["group"] for row in rows if "entries" in row and row["case"] not in with_peer}
    # Attention without maps, sparse sequences, recurrences, captured calls, and plans, which compare our own backends.
    assert alone == {"host", "irregular", "structured", "recurrence", "capture", gpu_plans.GROUP}


def times_per_pair(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[int, float]]:
    """Seconds per pair of nodes by graph, direction and backend, and by number of nodes: bfloat16, 8 heads of 64, of
    batches of 8,192 nodes in all."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for row in rows:
        match = re.match(r"(complete|causal), N (\d+), B (\d+), dot 8 x 64, bfloat16$", row["case"])
        if match and int(match[2]) * int(match[3]) == 8192:
            nodes = int(match[2])
            for backend in ("dense", "tiles"):
                seconds = row["entries"][backend]["median"] / (8192 * nodes)
                found.setdefault((match[1], row["direction"], backend), {})[nodes] = seconds
    return found


@pytest.mark.parametrize("graph", ["complete", "causal"])
def test_what_torch_attends_over_sooner_is_left_to_it_for_every_length_and_batch(graph: str) -> None:
    """Times are those of the record per pair, between recorded numbers of nodes interpolated on a logarithmic scale."""
    prices = tuned.shipped()["cuda"]["nanoseconds"]
    recorded = times_per_pair(json.loads(gpu.RECORD.read_text())["rows"])
    lost: dict[str, float] = {}
    sooner = 0
    for direction, nodes, batch in product((FORWARD, BOTH), (512, 1024, 2048, 4096, 8192), (1, 2, 4, 16)):
        seconds = {}
        for backend in ("dense", "tiles"):
            times = recorded[graph, direction, backend]
            assert list(times) == [512, 2048, 8192]
            seconds[backend] = np.exp(np.interp(np.log(nodes), np.log(list(times)), np.log(list(times.values()))))
        sooner += seconds["tiles"] > 1.1 * seconds["dense"]
        case = f"{graph}, N {nodes}, B {batch}, 8 x 64, bfloat16"
        chosen = gpu_plans.chosen_today({"case": case, "direction": direction}, prices)
        assert chosen in seconds
        if seconds[chosen] > 1.1 * seconds["dense"]:
            lost[f"{case}, {direction}"] = seconds[chosen] / seconds["dense"]
    assert not lost
    assert sooner >= 32


def test_a_wrong_choice_moves_prices_until_it_is_right() -> None:
    before = {"a": {"call": 120.0, "edge": 1.0}, "b": {"call": 115.0}}
    samples = [
        Sample({"a": {"call": 1.0, "edge": n}, "b": {"call": 1.0}}, {"a": 1e-9 * (90 + n), "b": 125e-9})
        for n in (1.0, 60.0)
    ]
    assert fit.worst(samples, before) > 1.3
    prices = fit.decided(samples, before)
    assert fit.worst(samples, prices) == 1.0
    assert prices["a"]["call"] == pytest.approx(120, rel=0.3)


def test_prices_on_a_gpu_follow_the_rows_of_a_run() -> None:
    """Rows whose times follow prices that are not the shipped ones: the fit finds the choices that they make."""
    shipped = tuned.shipped()["cuda"]["nanoseconds"]
    wrong = {
        name: {what: price * (30 if name == "csr" else 1) for what, price in costs.items()}
        for name, costs in shipped.items()
    }
    rows: list[dict[str, Any]] = [
        {"group": "plan", "case": case, "direction": direction, "ours": "csr", "facts": {},
         "entries": {"csr": {"median": 0.0}, "edge_list": {"median": 0.0}}}
        for case in gpu_plans.by_name(gpu_plans.SMALL) if "degree" in case for direction in (FORWARD, BOTH)
    ]  # fmt: skip
    gpu_plans.count(rows, gpu_plans.SMALL)
    for row in rows:
        for name, entry in row["entries"].items():
            entry["median"] = 1e-9 * sum(wrong[name][what] * n for what, n in row["facts"]["counts"][name].items())
    gpu_plans.choose(rows, shipped)
    before = [ratio for *_, ratio in gpu_report.regrets(rows)]
    gpu_plans.choose(rows, fit.fitted(gpu_plans.samples(rows), shipped))
    after = [ratio for *_, ratio in gpu_report.regrets(rows)]
    assert len(before) == len(after) == len(rows) > 50
    assert max(before) > 1.5
    assert max(after) < 1.1


def test_only_calls_take_the_same_time_on_more_threads() -> None:
    counts = {"dot call": 1.0, "dot call, back": 1.0, "edge": 10.0, "edge, back": 10.0}
    assert cost_model.per_thread(counts, 1) == counts
    assert cost_model.per_thread(counts, 2) == counts | {"edge": 5.0, "edge, back": 5.0}


def test_new_operations_get_prices() -> None:
    request = requests.dot(requests.scattered(20, 3))
    sample = Sample({"csr": {"unheard-of call": 1.0}}, {"csr": 1e-3})
    prices = fit.fitted([sample, fit.sample(request, {"csr": 1e-3, "edge_list": 2e-3})])
    assert prices["csr"]["unheard-of call"] > 20_000
