"""The graphs and the budget of `mpnn compare` as it reads them; and numbers in graphs, doubled or found by Optuna."""

import itertools
import math
import re
from collections.abc import Callable
from importlib.util import find_spec

from mpnn.graph.registry import install

RANGE = re.compile(r"(\d+)\s*\.\.\s*(\d+)")
_SEED = 0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class UnusableGraph(Exception):
    """The model cannot use the graph, or no number gives a graph that it can learn over."""


def require_optuna() -> None:
    """Raises ImportError, which says how to get it, if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise ImportError(f"--search needs Optuna, which is not installed; run: {install('search')}")


def bounds(expression: str) -> list[tuple[int, int]]:
    """The ranges a..b of an expression."""
    ranges = [(int(low), int(high)) for low, high in RANGE.findall(expression)]
    for low, high in ranges:
        if not 0 < low <= high:
            raise ValueError(f"{low}..{high} is an empty range; write the smaller number first, from 1 on")
    return ranges


def expanded(graphs: str) -> list[str]:
    """The expressions between the semicolons; `a..b` in one stands for a, 2a, 4a, ... up to b."""
    expressions = []
    for expression in separated(graphs):
        pieces = re.split(r"(\d+\s*\.\.\s*\d+)", expression)
        choices = [_doubled(piece) if k % 2 else [piece] for k, piece in enumerate(pieces)]
        expressions += ["".join(choice) for choice in itertools.product(*choices)]
    if not expressions:
        raise ValueError('there is no graph in --graphs; write for example "causal; causal & window(16..64)"')
    return list(dict.fromkeys(expressions))


def separated(graphs: str) -> list[str]:
    return list(filter(None, map(str.strip, graphs.split(";"))))


def _doubled(piece: str) -> list[str]:
    ((low, high),) = bounds(piece)
    return [str(low << k) for k in range((high // low).bit_length())]


def seconds_of(budget: str) -> float:
    """Seconds of a time such as 90s, 10m or 1h."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", budget)
    seconds = float(match[1]) * _UNITS[match[2] or "s"] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"--budget must be a time such as 90s, 10m or 1h; got {budget!r}")
    return seconds


def best_numbers(expression: str, trials: int, error: Callable[[str], float]) -> tuple[str, float]:
    """Replaces each range a..b of the expression by the number with the smallest error, and returns the error as well.

    Optuna's tree-structured Parzen estimator (Bergstra et al. 2011) proposes the numbers, on a logarithmic scale, from
    the errors of the trials before. A graph is measured once.

    Args:
        error: the error of a graph. It raises UnusableGraph for a graph that the model cannot use.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ranges = bounds(expression)
    measured = dict[str, float]()
    refused = ""

    def objective(trial: optuna.Trial) -> float:
        nonlocal refused
        numbers = iter([trial.suggest_int(str(k), low, high, log=True) for k, (low, high) in enumerate(ranges)])
        graph = RANGE.sub(lambda _: str(next(numbers)), expression)
        if graph not in measured:
            try:
                measured[graph] = error(graph)
            except UnusableGraph as why:
                measured[graph], refused = math.inf, str(why)
        return measured[graph]

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=_SEED))
    study.optimize(objective, n_trials=trials)
    best = min(measured, key=measured.__getitem__)
    if not math.isfinite(measured[best]):
        raise UnusableGraph(f"no trial of {expression} ended with a finite error{refused and ': ' + refused}")
    return best, measured[best]
