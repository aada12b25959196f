"""Prices from measured times: how `mpnn tune` and `python -m benchmarks fit` find what each operation costs.

A backend's estimate is the sum of its counts times their prices p. Prices minimize, over rounds q and backends b,

    sum_qb w_qb^2 (e_qb - c m_q)^2  +  sum_k (s_k / freedom)^2  +  sum_g (s_g / GROUP_FREEDOM)^2,
    log(p_k / start_k) = s_k + s_g,      e_qb = log(estimate_qb / time_qb)

where g is one of two groups of operations of a backend, those once per call and all others: machines differ mostly by
a factor for each group. m_q is the mean of e_qb over the backends of a round: plans compare backends, and a busy
machine slows all backends of a round alike, so errors that they share weigh less, by c = `SHARED`. Backends that are
much slower than the fastest weigh less too: w_qb is the minimum time of the round over the backend's, but at least
`MIN_WEIGHT`. A robust loss (soft L1) replaces the squares, so that single disturbed times matter little.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from mpnn.backends.cost_model import Counts, is_once
from mpnn.backends.tuned import Prices

SHARED = 0.9
MIN_WEIGHT = 0.1
GROUP_FREEDOM = 4.0
_SMALLEST = 1e-4  # nanoseconds; a price changes by factors, so it cannot start at 0


class Sample(NamedTuple):
    """One round: the counts of each backend that ran it, and the seconds it took."""

    counts: dict[str, Counts]
    seconds: dict[str, float]


def fit(prices: Prices, samples: Sequence[Sample], freedom: float, shared: float = SHARED) -> Prices:
    """The prices that best explain the times, near `prices`: to change a single price by a factor of e costs as much as
    an error by a factor of e ** (1 / freedom) in one time. Operations that no sample counts keep their prices."""
    rows = [(q, b) for q, sample in enumerate(samples) for b in sample.seconds]
    columns = sorted({(b, kind) for sample in samples for b in sample.seconds for kind in sample.counts[b]})
    at = {column: k for k, column in enumerate(columns)}
    shares = np.zeros((len(rows), len(columns)))  # of a nanosecond per operation in the time
    for i, (q, b) in enumerate(rows):
        for kind, count in samples[q].counts[b].items():
            shares[i, at[b, kind]] = 1e-9 * count / samples[q].seconds[b]
    start = np.array([max(prices[b][kind], _SMALLEST) for b, kind in columns])
    # From here on an entry is the share of a time that the start price explains, and a step in log(price) its exponent.
    shares *= start
    owner = np.array([q for q, _ in rows])
    weight = np.array([max(min(samples[q].seconds.values()) / samples[q].seconds[b], MIN_WEIGHT) for q, b in rows])
    total = np.bincount(owner, weight)

    def compared(x: np.ndarray) -> np.ndarray:
        """Rows x without the part that all backends of a round share, weighted."""
        mean = np.stack([np.bincount(owner, weight * column) / total for column in x.T], 1)
        return weight[:, None] * (x - shared * mean[owner])

    groups = sorted({(b, is_once(kind)) for b, kind in columns})
    member = np.array([[(b, is_once(kind)) == group for group in groups] for b, kind in columns], float)
    steps = np.concatenate([np.eye(len(columns)), member], 1)  # from (s_k, s_g) to log(p_k / start_k)
    slack = np.repeat([1 / freedom, 1 / GROUP_FREEDOM], [len(columns), len(groups)])

    def errors(s: np.ndarray) -> np.ndarray:
        return np.append(compared(np.log(shares @ np.exp(steps @ s))[:, None])[:, 0], slack * s)

    def slopes(s: np.ndarray) -> np.ndarray:
        parts = shares * np.exp(steps @ s)
        return np.concatenate([compared(parts / parts.sum(1, keepdims=True)) @ steps, np.diag(slack)])

    solution = least_squares(errors, np.zeros(len(slack)), jac=slopes, loss="soft_l1", f_scale=0.3)
    result = {b: dict(costs) for b, costs in prices.items()}
    for (b, kind), price in zip(columns, start * np.exp(steps @ solution.x), strict=True):
        # Measured times do not carry more than three digits.
        result[b][kind] = float(f"{price:.3g}")
    return result
