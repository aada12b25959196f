"""No silent slowness: where the plan has nothing but plain torch on edge lists for a large round, it warns once, and
says what would make it fast. `explain` always says it."""

import warnings
from collections.abc import Hashable

import torch

from mpnn.aggregate import Function, PerNode, Sum
from mpnn.backends import csr
from mpnn.engine.choice import Choice, refusal
from mpnn.round import Round

_RATIO = 8.0
"""How many times the time of a kernel for the same edges and numbers is slow."""
_SECONDS = 0.005
"""Shorter rounds are not worth a warning."""
_ATTENDING = 3.0
"""Weights take about this many times as long as a sum over the same edges in `csr`."""

_ADVICE = {
    "own score": "give the score a `lower()` that returns a Dot, an AdditiveScore or an AdditiveV2Score",
    "own activation": "use mpnn.scores.LeakyReLU or torch.tanh as the activation",
    "own aggregate": "write the aggregator as an object with `combine`, `identity` and `gradient`, or with "
    "`parts` that have kernels",
}


class SlowRound(UserWarning):
    """A round runs as plain torch on edge lists, where kernels would take a fraction of the time."""


def sentence(round: Round, choice: Choice) -> str:
    """Why a choice is slow, and what would make it fast; empty if it is not slow."""
    if "edge_list" not in choice.backends or choice.estimate is None or round.recurrent:
        return ""
    seconds = choice.estimate.seconds
    fast = _kernels(round)
    if seconds < _RATIO * fast:
        return ""
    needs = [need for need in _ADVICE if need in round.needs]
    reason = refusal(csr, round) or "no kernel runs all of it"
    advice = _ADVICE[needs[0]] if needs else "mpnn.explain lists what each backend lacks"
    # A user cannot give the library's own aggregators a `combine`. Another aggregator is what helps.
    reduce = round.reduce.inner if isinstance(round.reduce, PerNode) else round.reduce
    if type(reduce).__module__ == Sum.__module__ and type(reduce) is not Function:
        advice = "use sum, mean, max, min, var, std or pna, which have kernels"
    return (
        f"runs as plain torch on edge lists, in about {seconds / fast:.0f} times the time of a kernel over as many "
        f"edges ({_shown(seconds)} instead of {_shown(fast)}): {reason}. To make it fast: {advice}"
    )


_said: set[Hashable] = set()


def warn(round: Round, choice: Choice) -> None:
    """Warns of a slow choice, once for each kind of score, aggregator and normalizer."""
    # The estimate is known, while the message prices a second round.
    if choice.estimate is None or choice.estimate.seconds < _SECONDS:
        return
    kind = type(round.score), type(round.reduce), round.normalize
    # A training loop may bind a new graph in each step, so a graph is not part of the kind.
    if kind not in _said and (said := sentence(round, choice)):
        _said.add(kind)
        warnings.warn(f"a round over {round.graph} {said}", SlowRound, stacklevel=2)


def _kernels(round: Round) -> float:
    """The time of a sum of the same values over the same edges in kernels, with weights if the round has them."""
    plain = Round(round.graph, round.value, normalize="none")
    return csr.estimate(plain).seconds * (_ATTENDING if round.weighted else 1.0)


def _shown(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def estimated(choice: Choice) -> bool:
    """Whether a choice may be slow, so that it is worth an estimate."""
    return "edge_list" in choice.backends and not torch.compiler.is_compiling()
