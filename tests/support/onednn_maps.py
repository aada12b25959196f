"""A fixture under which oneDNN computes every map that it may, whatever the processor: its prices are lower."""

from collections.abc import Iterator

import pytest

from mpnn.backends import cost_model
from mpnn.kernels.dense import onednn
from mpnn.update import maps

Products = list[tuple[int, int]]

QUICK = {
    maps.TORCH: {"call": 1.0, "product": 1.0},
    maps.ONEDNN: {"call": 0.0, "product": 0.0, "read number": 0.0},
}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Products]:
    """The rows and the width of each product that oneDNN computed."""
    if (reason := onednn.why_missing()) is not None:
        pytest.skip(reason)
    computed: Products = []
    by_onednn = onednn._by_onednn

    def counted(x, weight, bias):  # type: ignore[no-untyped-def]
        out = by_onednn(x, weight, bias)
        computed.append((out.shape[0], out.shape[1]))
        return out

    monkeypatch.setattr(onednn, "_by_onednn", counted)
    monkeypatch.setattr(cost_model, "map_prices", lambda threads: QUICK)
    monkeypatch.setattr(maps, "_RECORDING", 0.0)
    maps.forget()
    yield computed
    maps.forget()
