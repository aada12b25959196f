"""A made-up city: streets on a grid whose traffic jams grow backwards, and trips through it whose times are known.

Real arrival times belong to those who measured them. Here congestion follows a rule that makes neighbours worth
listening to, as in real traffic: a queue on a street reaches the streets that lead into it some minutes later, so what
a driver will meet is seen, at departure, further down the road.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MORNING, _EVENING = 6 * 60, 22 * 60  # minutes of the day between which traffic is simulated
_KEEPS, _SPREADS = 0.6, 0.34  # of congestion: what stays on a street in a minute, what comes from ahead
_INCIDENTS = 0.0003  # that begin, a minute and street
_BLOCKED = 8, 20  # minutes that an incident lasts
_JAMMED = 0.85  # the share of its free speed that a street can lose
_RUSH = 0.012  # added to congestion in a minute, at most
_ERROR = 0.15  # of measured speeds, relatively
_LEAST = 8  # segments of a trip
_SLOT = 30  # minutes over which the typical time of a street is taken

FEATURES = ("free", "now", "usual", "speed", "usual speed", "ahead", "on route", "morning", "evening")
"""What is known of a segment at departure: minutes to cross it at its free speed, at its present speed (which is
measured with some error), and as usual at this hour; the present and the usual speed as shares of the free
speed; minutes until it is reached, at free speeds; whether it is part of the route; how high the morning's and the
evening's rush hours stand."""


@dataclass(frozen=True, eq=False)
class City:
    """Segments (one-way streets between neighbouring crossings) and days of their traffic.

    Args:
        start, end: the crossings of each segment, int64 [S], counted row by row on a grid of `side` x `side`.
        free: minutes to cross each segment at its free speed, [S].
        congestion: the share of the free speed that is lost, [days, minutes, S].
    """

    side: int
    start: Ints
    end: Ints
    free: Floats
    congestion: Floats

    @property
    def days(self) -> int:
        return len(self.congestion)


@dataclass(frozen=True, eq=False)
class Trips:
    """Routes with the streets that leave them, each a graph of its own, their segments one after another.

    Args:
        x: float32 [N, 9], see `FEATURES`.
        edge_index: int64 [2, E]: a segment hears those that it leads into, and those that lead into it.
        edge_attr: float32 [E, 2], which of the two: (1, 0) and (0, 1).
        route: the route of each segment, int64 [N]. on_route: whether it is part of it, bool [N].
        segment_minutes: what crossing it took, [N], 0 beside the route. route_minutes: what the whole took, [R].
    """

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    route: Tensor
    on_route: Tensor
    segment_minutes: Tensor
    route_minutes: Tensor

    @staticmethod
    def join(parts: Sequence[Trips]) -> Trips:
        """Several as one: nodes and routes numbered on."""
        nodes = np.cumsum([0, *(len(part.x) for part in parts)])[:-1].tolist()
        routes = np.cumsum([0, *(len(part.route_minutes) for part in parts)])[:-1].tolist()
        return Trips(
            x=torch.cat([part.x for part in parts]),
            edge_index=torch.cat([part.edge_index + first for part, first in zip(parts, nodes, strict=True)], 1),
            edge_attr=torch.cat([part.edge_attr for part in parts]),
            route=torch.cat([part.route + first for part, first in zip(parts, routes, strict=True)]),
            on_route=torch.cat([part.on_route for part in parts]),
            segment_minutes=torch.cat([part.segment_minutes for part in parts]),
            route_minutes=torch.cat([part.route_minutes for part in parts]),
        )


def city(side: int = 10, days: int = 12, seed: int = 0) -> City:
    """A grid of `side` x `side` crossings, its segments 300 to 700 metres long at 30 or, every third street, 50 km/h.

    Each minute, congestion on a street is part of what it was, part of the worst on the streets it leads into, more in
    the rush hours; and now and then an incident blocks a street for a while. The same arguments give the same city.
    """
    if side < 2 or days < 1:
        raise ValueError(f"a city needs a side of at least 2 and at least one day; got {side} and {days}")
    rng = np.random.default_rng(seed)
    at = np.arange(side * side).reshape(side, side)
    ways = np.stack([at[:, :-1], at[:, 1:]], -1).reshape(-1, 2), np.stack([at[:-1], at[1:]], -1).reshape(-1, 2)
    start, end = np.concatenate([*ways, *(way[:, ::-1] for way in ways)]).T
    along_row = start // side == end // side
    fast = np.where(along_row, start // side, start % side) % 3 == 0
    free = rng.uniform(0.3, 0.7, len(start)) / np.where(fast, 50, 30) * 60
    popular = rng.uniform(0.2, 1.0, len(start))
    next_ones = _leads_into(start, end)
    congestion = np.zeros((days, _EVENING - _MORNING, len(start)))
    for day in congestion:
        busy = rng.uniform(0.7, 1.3)
        blocked = np.zeros(len(start))
        for minute in range(1, len(day)):
            last = np.append(day[minute - 1], 0.0)  # where a street leads nowhere, nothing comes back
            rush = busy * sum(_rush(_MORNING + minute))
            flow = _KEEPS * last[:-1] + _SPREADS * last[next_ones].max(1) + _RUSH * rush * popular
            begins = rng.random(len(start)) < _INCIDENTS
            blocked = np.where(begins, rng.uniform(*_BLOCKED, len(start)), blocked - 1)
            day[minute] = np.where(blocked > 0, _JAMMED, np.minimum(flow, _JAMMED))
    return City(side, start, end, free, congestion)


def trips(
    city: City, count: int, days: Sequence[int], seed: int = 0, *, usual: Sequence[int] | None = None
) -> list[Trips]:
    """Trips between random crossings at random times of these days, without detours, of at least 8 segments.

    Args:
        usual: the days that the typical times are taken from; default: the same.

    Raises:
        ValueError: the city has not these days, or is too small for such trips.
    """
    usual = days if usual is None else usual
    if not all(0 <= day < city.days for day in (*days, *usual)):
        raise ValueError(f"days must be among the {city.days} of the city, counted from 0; got {[*days, *usual]}")
    if 2 * (city.side - 1) < _LEAST:
        raise ValueError(f"a trip has at least {_LEAST} segments, too many for a city of {city.side} x {city.side}")
    rng = np.random.default_rng(seed)
    segment = {ends: s for s, ends in enumerate(zip(city.start.tolist(), city.end.tolist(), strict=True))}
    known = city.congestion[list(usual)].reshape(len(usual), -1, _SLOT, len(city.free))
    typical = (city.free / (1 - known)).mean((0, 2))
    found: list[Trips] = []
    while len(found) < count:
        stops = _crossings(city.side, rng)
        if len(stops) > _LEAST:
            route = np.array([segment[ends] for ends in pairwise(stops)])
            found.append(_trip(city, route, int(rng.choice(days)), typical, rng))
    return found


def _trip(city: City, route: Ints, day: int, typical: Floats, rng: np.random.Generator) -> Trips:
    """One trip, which begins early enough to end on the same day."""
    minutes = city.congestion.shape[1]
    begin = rng.integers(0, minutes - 120)
    clock, taken = float(begin), []
    for s in route:
        at = min(int(clock), minutes - 1)
        taken.append(city.free[s] / (1 - city.congestion[day, at, s]))
        clock += taken[-1]
    reached = np.append(0.0, np.cumsum(city.free[route]))  # the last is the arrival
    beside = {s: k for k, at in enumerate(city.end[route]) for s in np.flatnonzero(city.start == at).tolist()}
    beside = {s: k for s, k in beside.items() if s not in route}
    nodes = np.array([*route.tolist(), *beside])
    ahead = np.append(reached[:-1], [reached[k + 1] for k in beside.values()])
    now = city.free[nodes] / (1 - city.congestion[day, begin, nodes]) * rng.normal(1, _ERROR, len(nodes)).clip(0.5)
    on_route = np.arange(len(nodes)) < len(route)
    morning, evening = _rush(_MORNING + begin)
    hour = np.broadcast_to([morning, evening], (len(nodes), 2))
    free, usual = city.free[nodes], typical[begin // _SLOT, nodes]
    columns = (free, now, usual, free / now, free / usual, ahead, on_route, *hour.T)
    dst, src = np.nonzero(city.end[nodes][:, None] == city.start[nodes][None, :])  # dst leads into src
    attr = np.repeat([[1.0, 0.0], [0.0, 1.0]], len(dst), 0)
    return Trips(
        x=_numbers(np.stack(columns, 1)),
        edge_index=torch.from_numpy(np.stack([np.append(src, dst), np.append(dst, src)])),
        edge_attr=_numbers(attr),
        route=torch.zeros(len(nodes), dtype=torch.int64),
        on_route=torch.from_numpy(on_route),
        segment_minutes=_numbers(np.append(taken, np.zeros(len(nodes) - len(route)))),
        route_minutes=_numbers(np.array([sum(taken)])),
    )


def _crossings(side: int, rng: np.random.Generator) -> list[int]:
    """From one random crossing to another, in a random order of steps across and down."""
    (row, column), goal = rng.integers(0, side, 2), rng.integers(0, side, 2)
    down, across = goal[0] - row, goal[1] - column
    steps = [(int(np.sign(down)), 0)] * abs(int(down)) + [(0, int(np.sign(across)))] * abs(int(across))
    stops = [int(row * side + column)]
    for k in rng.permutation(len(steps)):
        stops.append(stops[-1] + steps[k][0] * side + steps[k][1])
    return stops


def _leads_into(start: Ints, end: Ints) -> Ints:
    """[S, 3]: the segments that each leads into, going back left out; -1 where there are fewer."""
    out = np.full((len(start), 3), -1)
    for s in range(len(start)):
        after = np.flatnonzero((start == end[s]) & (end != start[s]))
        out[s, : len(after)] = after
    return out


def _rush(minute: float) -> tuple[float, float]:
    """How high the morning's and the evening's wave stand at a minute of the day, 0 to 1."""
    morning, evening = (float(np.exp(-(((minute - peak * 60) / 75) ** 2))) for peak in (8.5, 17.5))
    return morning, evening


def _numbers(x: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))
