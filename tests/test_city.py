"""The made-up city: its streets fit together, its queues grow backwards, and trips say what driving through it took."""

from __future__ import annotations

from dataclasses import fields

import city
import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def town() -> city.City:
    return city.city(side=6, days=2, seed=3)


def test_streets_join_neighboring_crossings_both_ways(town: city.City) -> None:
    assert len(town.start) == 4 * 6 * 5
    assert set(np.abs(town.end - town.start)) == {1, 6}
    there = set(zip(town.start.tolist(), town.end.tolist(), strict=True))
    assert {(end, start) for start, end in there} == there


def test_queues_grow_backwards(town: city.City) -> None:
    """Two minutes after a street is blocked, those that lead into it are fuller, and those that it leads into are not
    (later they may be: a queue goes round the block)."""
    day = town.congestion[0]
    behind, ahead = [], []
    for s in range(len(town.start)):
        minute = np.flatnonzero((day[1:-3, s] > 0.8) & (day[:-4, s] < 0.6))
        for into, found in ((town.end == town.start[s], behind), (town.start == town.end[s], ahead)):
            near = into & ((town.start != town.end[s]) | (town.end != town.start[s]))  # not the way back
            found += (day[minute + 3][:, near] - day[minute][:, near]).ravel().tolist()
    assert np.mean(behind) > 0.1
    assert abs(np.mean(ahead)) < 0.02


def test_the_same_seeds_give_the_same_trips(town: city.City) -> None:
    again = city.city(side=6, days=2, seed=3)
    assert (again.congestion == town.congestion).all()
    one, other = (city.Trips.join(city.trips(c, 3, [0], seed=1)) for c in (town, again))
    for field in fields(city.Trips):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name))


def test_a_trip_drives_on_from_segment_to_segment(town: city.City) -> None:
    trips = list(city.trips(town, 5, [0, 1], seed=2))
    assert len(trips) == 5
    for trip in trips:
        on = int(trip.on_route.sum())
        assert on >= 8
        assert trip.on_route[:on].all(), "the route comes first, and beside it"
        links = set(zip(*trip.edge_index[:, trip.edge_attr[:, 0] == 1].tolist(), strict=True))
        assert {(k + 1, k) for k in range(on - 1)} <= links, "each segment has an edge from the next"
        assert len(trip.x) > on, "and streets that leave the route are there"
        assert {dst for src, dst in links if src >= on} >= set(range(on - 1))
        torch.testing.assert_close(trip.segment_minutes[:on].sum(), trip.route_minutes[0])
        assert not trip.segment_minutes[on:].any()


def test_features_are_what_their_names_say(town: city.City) -> None:
    trip = city.Trips.join(city.trips(town, 20, [0, 1], seed=2))
    column = {name: trip.x[:, k] for k, name in enumerate(city.FEATURES)}
    assert trip.x.shape[1] == len(city.FEATURES)
    torch.testing.assert_close(column["speed"], column["free"] / column["now"])
    assert torch.equal(column["on route"].bool(), trip.on_route)
    assert (trip.segment_minutes >= column["free"])[trip.on_route].all(), "no segment is driven faster than allowed"
    first = column["ahead"] == 0  # where a trip begins, it takes what it takes now, but for the error of measuring
    ratio = (trip.segment_minutes / column["now"])[first]
    assert abs(ratio.mean() - 1) < 4 * 0.15 / len(ratio) ** 0.5


def test_joined_trips_stay_apart(town: city.City) -> None:
    parts = city.trips(town, 3, [0], seed=5)
    whole = city.Trips.join(parts)
    src, dst = whole.edge_index
    assert torch.equal(whole.route[src], whole.route[dst])
    assert whole.route.tolist() == [k for k, part in enumerate(parts) for _ in part.route]
    assert whole.route_minutes.tolist() == [part.route_minutes.item() for part in parts]


def test_refusals_say_what_there_is(town: city.City) -> None:
    with pytest.raises(ValueError, match="at least 2 and at least one day; got 1 and 3"):
        city.city(side=1, days=3)
    with pytest.raises(ValueError, match=r"among the 2 of the city, counted from 0; got \[0, 2, 0, 2\]"):
        city.trips(town, 1, [0, 2])
    with pytest.raises(ValueError, match="too many for a city of 3 x 3"):
        city.trips(city.city(side=3, days=1), 1, [0])
