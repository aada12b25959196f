"""Successive halving over graphs, on curves that are known: error = floor + 1 / steps, at a cost for each step."""

import math
from collections import Counter

import pytest

from mpnn.train.comparison import Comparison, Curve, Result, compare, half_interval, num_rounds, paired_gaps, spread

FLOOR = {"good": 1.0, "near": 1.001, "bad": 2.0, "worse": 3.0}
COST = {"good": 0.1, "near": 0.02, "bad": 0.05, "worse": 0.01}


class Machine:
    """Trains instantly: rate 1 is best, seeds move the floor, and every call is counted."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, float, int]] = Counter()
        self.longest: dict[str, float] = {}

    def __call__(self, graph: str, rate: float, seed: int, seconds: float) -> Curve:
        self.calls[graph, rate, seed] += 1
        self.longest[graph] = max(seconds, self.longest.get(graph, 0.0))
        steps = range(1, max(math.ceil(seconds / COST[graph]), 1) + 1)
        floor = FLOOR[graph] + abs(math.log(rate)) + 0.01 * seed * (1 if graph == "good" else 2)
        return Curve(list(steps), [k * COST[graph] for k in steps], [floor + 1 / k for k in steps])


def test_every_graph_keeps_its_best_rate_and_the_worse_half_drops_out() -> None:
    machine = Machine()
    found = compare(list(FLOOR), [0.5, 1.0, 2.0], [0, 1, 2], 600.0, machine)
    assert [result.rate for result in found.results] == [1.0] * 4
    assert [result.graph for result in found.last] == ["good", "near"]
    assert [r.graph for r in found.results if r.dropped_after is not None] == ["bad", "worse"]
    assert all(set(result.curves) == {0, 1, 2} for result in found.results)
    assert machine.calls["bad", 0.5, 0] == 1
    assert machine.calls["bad", 1.0, 1] == 1, "it took part in one round after the first"
    assert machine.longest["good"] > machine.longest["bad"]


def test_the_time_is_the_budget() -> None:
    machine = Machine()
    found = compare(list(FLOOR), [0.5, 1.0], [0, 1, 2], 600.0, machine)
    kept = sum(curve.seconds[-1] for result in found.results for curve in result.curves.values())
    other_rates = sum(600 / 3 / 8 for _ in FLOOR)  # the rates that were not kept
    assert kept + other_rates == pytest.approx(600, rel=0.02)


def test_errors_after_equal_time_and_after_equal_steps() -> None:
    curve = Curve([10, 20, 30], [1.0, 2.0, 3.0], [3.0, 1.0, 2.0])
    assert curve.after_steps(15) == pytest.approx(2.0)
    assert curve.after_seconds(3.0) == 1.0, "the lowest so far, as with early stopping"
    found = compare(["good", "near"], [1.0], [0, 1], 60.0, Machine())
    good, near = found.results
    assert found.steps == good.steps < near.steps
    assert found.seconds == pytest.approx(min(good.seconds, near.seconds))


def test_the_verdict_names_its_uncertainty() -> None:
    def result(graph: str, errors: list[float], cost: float) -> Result:
        return Result(graph, 1.0, {k: Curve([1, 10], [cost, 10 * cost], [e, e]) for k, e in enumerate(errors)})

    sure = Comparison([result("a", [1.0, 1.1, 1.2], 1.0), result("b", [2.0, 2.1, 2.21], 1.0)], " nats")
    assert sure.verdict() == (
        "a has the lowest validation error after 10 s of training: 1.100 ± 0.100 nats (mean ± standard deviation of "
        "3 seeds). The error of the next best, b, is higher by 1 nats (95% interval: 0.989 to 1.02 nats), which is "
        "more than chance between seeds. After 10 steps each, a has the lowest error, too."
    )
    unsure = Comparison([result("a", [1.0, 1.4, 1.2], 2.0), result("b", [1.1, 1.1, 1.5], 1.0)])
    assert "This difference may be chance: its 95% interval over 3 seeds, -0.726 to 0.792, includes 0." in (
        unsure.verdict()
    )
    assert "A step over b takes less time." in unsure.verdict()
    alone = Comparison([result("a", [1.0], 1.0)])
    assert alone.verdict().endswith("of training: 1.000 (one seed). No other graph trained as long.")
    single = Comparison([result("a", [1.0], 1.0), result("b", [2.0], 1.0)])
    assert "b, is higher by 1. One seed cannot show whether this difference is chance." in single.verdict()
    same = Comparison([result("a", [0.0], 2.0), result("b", [0.0], 1.0)])
    assert "The error of b is the same with one seed. A step over b takes less time." in same.verdict()
    diverged = Comparison([result("a", [1.0, 1.0], 1.0), result("b", [2.0, math.inf], 1.0)])
    assert "Training over b diverged." in diverged.verdict()
    nowhere = Comparison([result("a", [math.inf], 1.0), result("b", [math.inf], 1.0)])
    assert nowhere.verdict() == "Training over each graph diverged."
    slower = [Result("a", 1.0, {0: Curve([1, 5], [1.0, 5.0], [1.5, 1.0])}), result("b", [1.2], 1.0)]
    assert Comparison(slower).verdict().endswith("After 5 steps each, a has the lowest error, too.")
    fast = Result("a", 1.0, {0: Curve([1, 90], [0.1, 9.0], [9.0, 1.0])})
    assert Comparison([fast, result("b", [1.2], 1.0)]).verdict().endswith("each, however, b has the lowest error.")


def test_cautions_name_a_training_that_is_too_short_and_graphs_that_are_alike() -> None:
    def falling(graph: str, *errors: float) -> Result:
        return Result(graph, 1.0, {0: Curve([10, 20], [1.0, 2.0], errors)})

    short = Comparison([falling("a", 3.0, 2.0), falling("b", 3.0, 2.5)], " nats")
    assert short.too_short() == (
        "A longer training may change the order: in the second half of this one, the error of a fell by 1 nats, which "
        "is more than its lead of 0.5 nats."
    )
    assert short.alike() == ""
    enough = Comparison([falling("a", 2.001, 2.0), falling("b", 2.02, 2.01)])
    assert enough.too_short() == ""
    assert enough.alike() == (
        "After 20 steps each, the highest error is only 0.5% above the lowest. One seed cannot show whether this "
        "difference is chance."
    )

    def flat(graph: str, *errors: float) -> Result:
        return Result(graph, 1.0, {seed: Curve([10], [1.0], [error]) for seed, error in enumerate(errors)})

    surely = Comparison([flat("a", 2.0, 2.1, 2.2), flat("b", 2.001, 2.102, 2.201)], " nats")
    assert surely.alike().endswith("nats. The graph hardly matters here: choose the fastest.")
    early = [Result(one, 1.0, {k: Curve([5, 10], [0.5, 1.0], [2.1, 2.0 + k / 1e4]) for k in range(3)}) for one in "ab"]
    early[1] = Result("b", 1.0, {k: Curve([5, 10], [0.5, 1.0], [2.1, 2.001 + k / 9e3]) for k in range(3)})
    assert (
        Comparison(early)
        .alike()
        .endswith(" But the errors still fall: a longer training would show whether the graph matters.")
    )
    too_small = Comparison([flat("a", 0.5, 0.5), flat("b", 0.5, 0.5)])
    assert too_small.alike().startswith(
        "Such errors of all graphs that are equal with every seed decide nothing: the test is too"
    )
    assert too_small.verdict().endswith("After 10 steps each, the errors of a and b are equal.")
    one_seed = Comparison([flat("a", 0.5), flat("b", 0.5), flat("c", 0.5)])
    assert one_seed.alike() == (
        "Such equal errors of all graphs decide nothing: the test is too small, or the training too short."
    )
    assert one_seed.verdict().endswith("After 10 steps each, the errors of a, b and c are equal.")
    noisy = Comparison([flat("a", 2.0, 2.1, 2.2), flat("b", 2.2, 2.0, 2.11)])
    assert noisy.alike().endswith(" More seeds would show whether the graphs differ.")
    assert "The 95% interval of this difference is -" in noisy.alike()
    alone = Comparison([falling("a", 3.0, 2.0)])
    assert alone.too_short() == alone.alike() == ""


def test_a_graph_is_dominated_by_one_that_is_cheaper_and_better() -> None:
    found = compare(["good", "near", "bad"], [1.0], [0, 1], 90.0, Machine())
    assert found.dominated == ["bad"]


def test_intervals() -> None:
    assert half_interval([1.0]) == math.inf
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.302652729911275 / math.sqrt(3))
    assert paired_gaps([1.0, 2.0], [1.5, 2.25]) == [0.5, 0.25]
    assert spread([1.0, 3.0], " nats") == "2.000 ± 1.414 nats"


@pytest.mark.parametrize(("graphs", "rounds"), [(1, 1), (2, 1), (3, 2), (4, 2), (8, 3), (9, 4)])
def test_halving_leaves_two_graphs_for_the_last_round(graphs: int, rounds: int) -> None:
    assert num_rounds(graphs) == rounds


def test_a_step_costs_what_it_did_before_training_diverged() -> None:
    """`mpnn compare` ends such a curve with more steps than any other has."""
    diverged = Curve([10, 20, 1 << 40], [1.0, 2.0, 5.0], [0.5, 0.4, math.inf])
    assert Result("a", 0.1, {0: diverged}).seconds_per_step == 0.1
    assert Result("a", 0.1, {0: Curve([1 << 40], [5.0], [math.inf])}).seconds_per_step == math.inf


def test_a_training_that_diverges_loses() -> None:
    def train(graph: str, rate: float, seed: int, seconds: float) -> Curve:
        if rate > 1 or graph == "unstable":
            return Curve([1], [seconds], [math.inf])
        return Curve([1], [seconds], [1.0])

    found = compare(["stable", "unstable", "also stable"], [2.0, 1.0], [0, 1], 9.0, train)
    assert {result.graph for result in found.last} == {"stable", "also stable"}
    assert found.results[0].rate == 1.0


def test_of_rates_that_are_equally_good_the_middle_is_kept() -> None:
    found = compare(["a"], [0.5, 1.0, 2.0], [0], 9.0, lambda *_: Curve([1, 10], [1.0, 9.0], [0.5, 0.5]))
    assert found.results[0].rate == 1.0


@pytest.mark.parametrize("empty", ["graphs", "rates", "seeds", "budget"])
def test_what_is_missing_is_refused(empty: str) -> None:
    given = {"graphs": ["a"], "rates": [1.0], "seeds": [0], "budget": 1.0}
    given[empty] = [] if empty != "budget" else 0.0
    with pytest.raises(ValueError, match="a comparison needs graphs, learning rates, seeds and seconds"):
        compare(**given, train=Machine())  # type: ignore[arg-type]
