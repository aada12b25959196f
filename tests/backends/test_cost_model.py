"""mpnn.backends.cost_model: what threads share, and whose prices apply."""

from collections.abc import Iterator

import pytest
import torch

from mpnn.backends import cost_model, tuned


def test_threads_share_all_but_what_is_done_once() -> None:
    counts = {"dot call": 1.0, "pair": 12.0, "dot call, back": 1.0, "pair, back": 6.0}
    assert cost_model.per_thread(counts, 1) == counts
    assert cost_model.per_thread(counts, 2) == {**counts, "pair": 6.0, "pair, back": 3.0}
    assert cost_model.per_thread(counts, 3) == {**counts, "pair": 4.0, "pair, back": 2.0}


def test_a_gpu_has_prices_of_its_own_and_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    counts = {"call": 1.0, "pair": 1e6}
    for device, prices, pairs in (
        ("cpu", cost_model.prices(2)["dense"], 5e5),
        ("cuda", tuned.shipped()["cuda"]["nanoseconds"]["dense"], 1e6),
    ):
        estimate = cost_model.priced(torch.device(device), "dense", counts, 7.0)
        assert estimate.seconds == pytest.approx(1e-9 * (prices["call"] + prices["pair"] * pairs))
        assert estimate.bytes == 7.0


@pytest.fixture
def no_cache() -> Iterator[None]:
    cost_model.map_prices.cache_clear()
    yield
    cost_model.map_prices.cache_clear()


@pytest.mark.usefixtures("no_cache")
def test_prices_of_maps_are_tuned_or_those_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tuned.shipped()["maps"]
    names = shipped["nanoseconds"]
    own = {name: dict.fromkeys(costs, 3.0) for name, costs in names.items()}
    some = dict(list(own.items())[:-1])
    for read, family, expected in (
        (own, "another", own),
        ({**own, "dense": {}}, "another", own),
        (some, "another", None),
        (some, shipped["family"], names),
        ({}, shipped["family"], names),
    ):
        cost_model.map_prices.cache_clear()
        monkeypatch.setattr(tuned, "read", lambda threads, read=read: read)
        monkeypatch.setattr(tuned, "family", lambda family=family: family)
        assert cost_model.map_prices(1) == expected
