"""Which graph suits the data? One model over several graphs, compared at equal time and at equal steps.

Weights start the same and batches are the same; only the graph differs. The time for training is spent in rounds. In
the first, each graph tries each learning rate with one seed, and keeps the best. In each further round all seeds train
on, and the worse half of the graphs drops out, until two are left (successive halving, Jamieson & Talwalkar 2016). The
learning rate does not decay, so every point of a curve is a fair end of training.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy.special import stdtrit

_CONFIDENCE = 0.95
_FIRST_ROUND = 1 / 3  # of the time, for learning rates
_SURVIVORS = 2
_ALIKE = 0.01  # of the error: graphs that are so close are alike


@dataclass(frozen=True)
class Curve:
    """The course of one training: after `steps[k]` steps, which took `seconds[k]` without validations, the validation
    error was `errors[k]` (a loss, or the share of wrong answers)."""

    steps: Sequence[int]
    seconds: Sequence[float]
    errors: Sequence[float]

    def after_seconds(self, seconds: float) -> float:
        """The lowest error in this many seconds, with straight lines between validations."""
        return self._lowest(self.seconds, seconds)

    def after_steps(self, steps: float) -> float:
        """The lowest error in this many steps."""
        return self._lowest(self.steps, steps)

    def _lowest(self, at: Sequence[float], end: float) -> float:
        before = [error for x, error in zip(at, self.errors, strict=True) if x <= end]
        return min([*before, float(np.interp(end, at, self.errors))])


Train = Callable[[str, float, int, float], Curve]
"""`train(graph, rate, seed, seconds)`: trains the model over this graph, with this learning rate and seed, until its
steps have taken `seconds` in all, and returns the curve from the first step on. A later call with more seconds
continues. A training that diverges returns a curve that ends with an infinite error."""


@dataclass
class Result:
    """The result of a graph.

    rate: its best learning rate. curves: by seed. dropped_after: the seconds of each training when it dropped out, or
    None if it is one of the last.
    """

    graph: str
    rate: float
    curves: dict[int, Curve]
    dropped_after: float | None = None

    def errors(self, *, seconds: float | None = None, steps: float | None = None) -> list[float]:
        """The error of each seed after this many seconds or steps; at the end if neither is given."""
        curves = self.curves.values()
        if seconds is not None:
            return [curve.after_seconds(seconds) for curve in curves]
        if steps is not None:
            return [curve.after_steps(steps) for curve in curves]
        return [min(curve.errors) for curve in curves]

    @property
    def seconds(self) -> float:
        """The training time that all seeds have reached."""
        return min(curve.seconds[-1] for curve in self.curves.values())

    @property
    def steps(self) -> int:
        return min(curve.steps[-1] for curve in self.curves.values())

    @property
    def seconds_per_step(self) -> float:
        """Up to the last finite error; infinite without one."""
        curves = [[*zip(c.seconds, c.steps, c.errors, strict=True)] for c in self.curves.values()]
        lasts = [[s / n for s, n, error in curve if math.isfinite(error)][-1:] for curve in curves]
        return float(np.median([x for last in lasts for x in last] or [math.inf]))


@dataclass(frozen=True)
class Comparison:
    """The results of all graphs, and the amounts of training at which all of them can be compared."""

    results: Sequence[Result]
    unit: str = ""

    @property
    def seconds(self) -> float:
        """The training time that every graph has reached with all seeds."""
        return min(result.seconds for result in self.results)

    @property
    def steps(self) -> int:
        return min(result.steps for result in self.results)

    @property
    def last(self) -> list[Result]:
        """The graphs that trained to the end, the best first."""
        last = [result for result in self.results if result.dropped_after is None]
        return sorted(last, key=lambda result: mean(result.errors(seconds=self.last_seconds)))

    @property
    def last_seconds(self) -> float:
        return min(result.seconds for result in self.results if result.dropped_after is None)

    @property
    def dominated(self) -> list[str]:
        """Graphs for which another one is as cheap in each step and as good after equal steps, and better in one."""
        points = {r.graph: (r.seconds_per_step, mean(r.errors(steps=self.steps))) for r in self.results}
        return [
            graph
            for graph, (cost, error) in points.items()
            if any(c <= cost and e <= error and (c, e) != (cost, error) for c, e in points.values())
        ]

    def verdict(self) -> str:
        """The best graph, by how much, how sure that is, and the best after equally many steps: a sentence each."""
        best, *others = self.last
        errors = best.errors(seconds=self.last_seconds)
        if not all(map(math.isfinite, errors)):
            return "Training over each graph diverged."
        seeds = f"{len(errors)} seeds" if len(errors) > 1 else "one seed"
        how = f"mean ± standard deviation of {seeds}" if len(errors) > 1 else seeds
        reached = f"{spread(errors, self.unit)} ({how})"
        first = f"{best.graph} has the lowest validation error after {_time(self.last_seconds)} of training: {reached}."
        if not others:
            return f"{first} No other graph trained as long."
        second = self._next_best(best, others[0], seeds)
        return f"{first} {second} {self._after_equal_steps(best)}"

    def _next_best(self, best: Result, other: Result, seeds: str) -> str:
        """How far the error of the second graph is from that of the best, and how sure that is."""
        gaps = paired_gaps(best.errors(seconds=self.last_seconds), other.errors(seconds=self.last_seconds))
        if not all(map(math.isfinite, gaps)):
            return f"Training over {other.graph} diverged."
        faster = min((best, other), key=lambda result: result.seconds_per_step).graph
        if not any(gaps):
            return f"The error of {other.graph} is the same with {seeds}. A step over {faster} takes less time."
        margin = mean(gaps)
        half = half_interval(gaps)
        said = f"The error of the next best, {other.graph}, is higher by {margin:.3g}{self.unit}"
        if math.isinf(half):
            return f"{said}. One seed cannot show whether this difference is chance."
        interval = f"{margin - half:.3g} to {margin + half:.3g}{self.unit}"
        if margin > half:
            return f"{said} (95% interval: {interval}), which is more than chance between seeds."
        return (
            f"{said}. This difference may be chance: its 95% interval over {seeds}, {interval}, includes 0. "
            f"A step over {faster} takes less time."
        )

    def _after_equal_steps(self, best: Result) -> str:
        errors = {result.graph: mean(result.errors(steps=self.steps)) for result in self.results}
        ahead = [graph for graph, error in errors.items() if error == min(errors.values())]
        if len(ahead) > 1:
            return f"After {self.steps:,} steps each, the errors of {', '.join(ahead[:-1])} and {ahead[-1]} are equal."
        if ahead == [best.graph]:
            return f"After {self.steps:,} steps each, {best.graph} has the lowest error, too."
        return f"After {self.steps:,} steps each, however, {ahead[0]} has the lowest error."

    def too_short(self) -> str:
        """A sentence if the best graph gained more in the second half of its training than it is ahead, or ""."""
        best, *others = self.last
        half, end = (mean(best.errors(seconds=part * self.last_seconds)) for part in (0.5, 1.0))
        ahead = min((mean(other.errors(seconds=self.last_seconds)) for other in others), default=math.inf) - end
        if not math.isfinite(ahead) or half - end <= ahead:
            return ""
        return (
            f"A longer training may change the order: in the second half of this one, the error of {best.graph} fell "
            f"by {half - end:.3g}{self.unit}, which is more than its lead of {ahead:.3g}{self.unit}."
        )

    def alike(self) -> str:
        """Sentences if the errors of all graphs after equal steps are within 1%, or "". They say that the graph matters
        little only where the errors fall no more, and the 95% interval between the best and the worst is within 1%."""
        by_error = sorted(self.results, key=lambda result: mean(result.errors(steps=self.steps)))
        best, worst = (by_error[k].errors(steps=self.steps) for k in (0, -1))
        least = mean(best)
        gap = mean(worst) - mean(best)
        if len(by_error) < 2 or not gap < _ALIKE * least:
            return ""
        half = half_interval(paired_gaps(best, worst))
        if gap == 0 and half in (0, math.inf):
            equal = "errors of all graphs that are equal with every seed" if half == 0 else "equal errors of all graphs"
            return f"Such {equal} decide nothing: the test is too small, or the training too short."
        said = f"After {self.steps:,} steps each, the highest error is only {gap / least:.1%} above the lowest."
        if math.isinf(half):
            return f"{said} One seed cannot show whether this difference is chance."
        said += f" The 95% interval of this difference is {gap - half:.3g} to {gap + half:.3g}{self.unit}."
        if mean(by_error[0].errors(steps=self.steps / 2)) - least > _ALIKE * least:
            return f"{said} But the errors still fall: a longer training would show whether the graph matters."
        if max(half - gap, gap + half) < _ALIKE * least:
            return f"{said} The graph hardly matters here: choose the fastest."
        return f"{said} More seeds would show whether the graphs differ."


def half_interval(gaps: Sequence[float]) -> float:
    """Half the length of the 95% confidence interval of the mean (Student's t); infinite for one number."""
    if len(gaps) < 2:
        return math.inf
    quantile = float(stdtrit(len(gaps) - 1, (1 + _CONFIDENCE) / 2))
    return float(quantile * stdev(gaps) / math.sqrt(len(gaps)))


def paired_gaps(best: Sequence[float], other: Sequence[float]) -> list[float]:
    """How much larger the other error is, seed by seed: both have the same weights and batches for a seed."""
    return [b - a for a, b in zip(best, other, strict=True)]


def spread(errors: Sequence[float], unit: str = "") -> str:
    """Mean and standard deviation."""
    if not all(map(math.isfinite, errors)):
        return "diverged"
    return f"{mean(errors):.3f}" + (f" ± {stdev(errors):.3f}" if len(errors) > 1 else "") + unit


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def compare(
    graphs: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    budget: float,
    train: Train,
    report: Callable[[str], None] = lambda sentence: None,
    unit: str = "",
) -> Comparison:
    """Trains over all graphs in rounds, as described above.

    Args:
        graphs: names that `train` understands. rates: learning rates to try. seeds: of weights and batches.
        budget: seconds for training steps in all; validations come on top.
        report: called with a line of text before each round.

    Raises:
        ValueError: if there is no graph, rate or seed, or the budget is not positive.
    """
    if not graphs or not rates or not seeds or not budget > 0:
        raise ValueError(
            f"a comparison needs graphs, learning rates, seeds and seconds; got {len(graphs)}, {len(rates)}, "
            f"{len(seeds)} and {budget}"
        )
    first = seeds[0]
    seconds = budget * _FIRST_ROUND / (len(graphs) * len(rates))
    report(f"learning rates: {len(rates)} for each of {len(graphs)} graphs, {_time(seconds)} each")
    states = {graph: _best_rate(graph, rates, first, seconds, train) for graph in graphs}
    alive = list(graphs)
    rounds = num_rounds(len(graphs))
    for number in range(rounds):
        spent = [s.curves[k].seconds[-1] for graph in alive for k in seeds if k in (s := states[graph]).curves]
        share = budget * (1 - _FIRST_ROUND) / rounds
        seconds = max((share + sum(spent)) / (len(alive) * len(seeds)), seconds)
        report(f"round {number + 1} of {rounds}: {len(alive)} graphs, {len(seeds)} seeds, {_time(seconds)} each")
        for graph in alive:
            for seed in seeds:
                states[graph].curves[seed] = train(graph, states[graph].rate, seed, seconds)
        if number + 1 < rounds:
            reached = min(curve.seconds[-1] for graph in alive for curve in states[graph].curves.values())
            order = sorted(alive, key=lambda graph: mean(states[graph].errors(seconds=reached)))
            alive = order[: max(_SURVIVORS, math.ceil(len(alive) / 2))]
            for graph in set(order) - set(alive):
                states[graph].dropped_after = seconds
    return Comparison(list(states.values()), unit)


def num_rounds(graphs: int) -> int:
    """The rounds after the first: so many that halving leaves two graphs for the last."""
    rounds = 1
    while graphs > _SURVIVORS:
        graphs = max(_SURVIVORS, math.ceil(graphs / 2))
        rounds = rounds + 1
    return rounds


def _best_rate(graph: str, rates: Sequence[float], seed: int, seconds: float, train: Train) -> Result:
    curves = {rate: train(graph, rate, seed, seconds) for rate in rates}
    middle = rates[len(rates) // 2]  # kept where others are only as good
    best = min(rates, key=lambda rate: (min(curves[rate].errors), rate != middle))
    return Result(graph, best, {seed: curves[best]})
