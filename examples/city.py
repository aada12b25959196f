"""A simulated city: streets on a grid with traffic jams, and trips with known times.

Real arrival times are rarely public. In this simulation, as in real traffic, a queue on a street spreads backwards to
the streets that lead into it some minutes later. The traffic that a driver will meet is therefore visible at departure
on the streets ahead, so messages from neighboring segments improve the prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MORNING, _EVENING = 6 * 60, 22 * 60  # traffic is simulated between these minutes of the day
_KEEPS, _SPREADS = 0.6, 0.34  # shares of congestion per minute: of the street itself, of the street ahead
_INCIDENTS = 0.0003  # probability of a new incident per minute and street
_BLOCKED = 8, 20  # range of the duration of an incident in minutes
_JAMMED = 0.85  # maximum congestion: the share of the free speed that is lost
_RUSH = 0.012  # maximum increase of congestion per minute
_ERROR = 0.15  # relative error of measured speeds
_SHORTEST = 8  # of a trip
_SLOT = 30  # the typical time of a street is the mean over slots of this many minutes

FEATURES = ("free", "now", "usual", "speed", "usual speed", "ahead", "on route", "morning", "evening")
"""The features of a segment at departure: minutes to cross it at its free speed, at its present speed (measured with
some error), and at its usual speed at this hour; the present and the usual speed as shares of the free speed; minutes
until it is reached at free speeds; whether it is part of the route; the intensity of the morning and of the evening
rush hour."""


@dataclass(frozen=True, eq=False)
class City:
    """Segments (one-way streets between neighboring crossings) and their traffic over several days.

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
    """Routes and the streets that leave them, as disjoint graphs whose nodes are segments.

    Args:
        x: float32 [N, 9], see `FEATURES`.
        edge_index: int64 [2, E]: a segment receives from the segments that it leads into, and from those that lead into
            it.
        edge_attr: float32 [E, 2], which of the two: (1, 0) or (0, 1).
        route: the route of each segment, int64 [N]. on_route: whether the segment is part of the route, bool [N].
        segment_minutes: minutes to cross each segment, [N], 0 if it is not on the route.
        route_minutes: minutes of each route, [R].
    """

    x: Tensor
    edge_index: Tensor
    edge_attr: Tensor
    route: Tensor
    on_route: Tensor
    segment_minutes: Tensor
    route_minutes: Tensor

    @staticmethod
    def join(parts: Sequence["Trips"]) -> "Trips":
        """Concatenates several trips; nodes and routes are renumbered consecutively."""
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
    """A grid of `side` x `side` crossings. Segments are 300 to 700 m long, with 30 km/h, or 50 km/h on every third
    street.

    Each minute, the congestion of a street is a share of its previous value plus a share of the maximum on the streets
    that it leads into, plus an increase in the rush hours. Random incidents block streets for some minutes. The same
    arguments give the same city.

    Raises:
        ValueError: if side is less than 2 or days less than 1.
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
    successors = _successors(start, end)
    congestion = np.zeros((days, _EVENING - _MORNING, len(start)))
    for day in congestion:
        busy = rng.uniform(0.7, 1.3)
        blocked = np.zeros(len(start))
        for minute in range(1, len(day)):
            last = np.append(day[minute - 1], 0.0)  # index -1 (no successor) has no congestion
            rush = busy * sum(_rush(_MORNING + minute))
            flow = _KEEPS * last[:-1] + _SPREADS * last[successors].max(1) + _RUSH * rush * popular
            begins = rng.random(len(start)) < _INCIDENTS
            blocked = np.where(begins, rng.uniform(*_BLOCKED, len(start)), blocked - 1)
            day[minute] = np.where(blocked > 0, _JAMMED, np.minimum(flow, _JAMMED))
    return City(side, start, end, free, congestion)


def trips(
    city: City, count: int, days: Sequence[int], seed: int = 0, *, usual: Sequence[int] | None = None
) -> list[Trips]:
    """Trips of at least 8 segments between random crossings at random times of these days, without detours.

    Args:
        usual: the days over which typical times are averaged; default: `days`.

    Raises:
        ValueError: if a day is out of range, or the city is too small for trips of 8 segments.
    """
    usual = days if usual is None else usual
    if not all(0 <= day < city.days for day in (*days, *usual)):
        raise ValueError(f"days must be among the {city.days} of the city, counted from 0; got {[*days, *usual]}")
    if 2 * (city.side - 1) < _SHORTEST:
        raise ValueError(f"a trip has at least {_SHORTEST} segments, too many for a city of {city.side} x {city.side}")
    rng = np.random.default_rng(seed)
    segment = {ends: s for s, ends in enumerate(zip(city.start.tolist(), city.end.tolist(), strict=True))}
    congestion = city.congestion[list(usual)].reshape(len(usual), -1, _SLOT, len(city.free))
    typical = (city.free / (1 - congestion)).mean((0, 2))
    result: list[Trips] = []
    while len(result) < count:
        stops = _crossings(city.side, rng)
        if len(stops) > _SHORTEST:
            route = np.array([segment[ends] for ends in pairwise(stops)])
            result.append(_trip(city, route, int(rng.choice(days)), typical, rng))
    return result


def _trip(city: City, route: Ints, day: int, typical: Floats, rng: np.random.Generator) -> Trips:
    """One trip that starts early enough to end on the same day."""
    minutes = city.congestion.shape[1]
    begin = rng.integers(0, minutes - 120)
    clock, durations = float(begin), []
    for s in route:
        at = min(int(clock), minutes - 1)
        durations.append(city.free[s] / (1 - city.congestion[day, at, s]))
        clock += durations[-1]
    reached = np.append(0.0, np.cumsum(city.free[route]))  # the last is the arrival
    off_route = {s: k for k, at in enumerate(city.end[route]) for s in np.flatnonzero(city.start == at).tolist()}
    off_route = {s: k for s, k in off_route.items() if s not in route}
    nodes = np.array([*route.tolist(), *off_route])
    ahead = np.append(reached[:-1], [reached[k + 1] for k in off_route.values()])
    now = city.free[nodes] / (1 - city.congestion[day, begin, nodes]) * rng.normal(1, _ERROR, len(nodes)).clip(0.5)
    on_route = np.arange(len(nodes)) < len(route)
    morning, evening = _rush(_MORNING + begin)
    hour = np.broadcast_to([morning, evening], (len(nodes), 2))
    free, usual = city.free[nodes], typical[begin // _SLOT, nodes]
    columns = (free, now, usual, free / now, free / usual, ahead, on_route, *hour.T)
    dst, src = np.nonzero(city.end[nodes][:, None] == city.start[nodes][None, :])  # dst leads into src
    attr = np.repeat([[1.0, 0.0], [0.0, 1.0]], len(dst), 0)
    return Trips(
        x=_to_float32(np.stack(columns, 1)),
        edge_index=torch.from_numpy(np.stack([np.append(src, dst), np.append(dst, src)])),
        edge_attr=_to_float32(attr),
        route=torch.zeros(len(nodes), dtype=torch.int64),
        on_route=torch.from_numpy(on_route),
        segment_minutes=_to_float32(np.append(durations, np.zeros(len(nodes) - len(route)))),
        route_minutes=_to_float32(np.array([sum(durations)])),
    )


def _crossings(side: int, rng: np.random.Generator) -> list[int]:
    """The crossings of a shortest path between two random crossings, with its steps in random order."""
    (row, column), goal = rng.integers(0, side, 2), rng.integers(0, side, 2)
    down, across = goal[0] - row, goal[1] - column
    steps = [(int(np.sign(down)), 0)] * abs(int(down)) + [(0, int(np.sign(across)))] * abs(int(across))
    stops = [int(row * side + column)]
    for k in rng.permutation(len(steps)):
        stops.append(stops[-1] + steps[k][0] * side + steps[k][1])
    return stops


def _successors(start: Ints, end: Ints) -> Ints:
    """[S, 3]: the segments that follow each segment, without U-turns; filled with -1."""
    out = np.full((len(start), 3), -1)
    for s in range(len(start)):
        after = np.flatnonzero((start == end[s]) & (end != start[s]))
        out[s, : len(after)] = after
    return out


def _rush(minute: float) -> tuple[float, float]:
    """The intensity of the morning and of the evening rush hour at a minute of the day, 0 to 1."""
    morning, evening = (float(np.exp(-(((minute - peak * 60) / 75) ** 2))) for peak in (8.5, 17.5))
    return morning, evening


def _to_float32(x: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, np.float32))
