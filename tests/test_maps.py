"""Which product computes a linear map: by prices, and torch's in every mode that oneDNN does not know."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_maps import Products, products
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mpnn import MessagePassing, explain, graphs
from mpnn.attention import DotProduct
from mpnn.backends import cost_model, tuned
from mpnn.engine import tune
from mpnn.kernels.dense import onednn
from mpnn.update import Concat, FeedForward, GatedFeedForward, PreNorm, maps

__all__ = ["products"]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the processor's family."""

    def forget() -> None:
        cost_model.map_prices.cache_clear()
        maps.forget()

    def change(name: str) -> None:
        monkeypatch.setattr(tuned, "family", lambda: name)
        forget()

    yield change
    forget()


# ------------------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("name", ["GenuineIntel 6", "AuthenticAMD 25", "AuthenticAMD 23", ""])
def test_torch_computes_every_map_where_no_prices_hold(name: str, family: Callable[[str], None]) -> None:
    family(name)
    assert not maps.is_useful()
    assert maps.least_rows(768, 3072, 1) == math.inf
    assert not maps.chosen(100_000, 768, 768)


@pytest.mark.skipif(onednn.why_missing() is not None, reason="no oneDNN")
def test_shipped_prices_take_onednn_from_few_rows_on(family: Callable[[str], None]) -> None:
    family("AuthenticAMD 26")
    assert maps.is_useful()
    assert 16 <= maps.least_rows(768, 768, 1) <= 32
    assert 45 <= maps.least_rows(128, 128, 1) <= 100
    assert maps.chosen(768, 2048, 768, True)
    assert not maps.chosen(8, 768, 768)
    # The derivative of a map of oneDNN is written in Python, which takes longer than small products gain.
    assert maps.least_rows(64, 64, 1) < 576 < maps.least_rows(64, 64, 1, is_learned=True)
    assert maps.least_rows(768, 768, 1, is_learned=True) <= 32
    for depth, width in ((4096, 4096), (64, 64), (1, 1)):  # decoding
        assert maps.least_rows(depth, width, 1) > 8


def test_tuned_prices_hold_on_any_processor(family: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    family("GenuineIntel 6")
    prices = {name: dict(costs) for name, costs in tuned.shipped()["maps"]["nanoseconds"].items()}
    monkeypatch.setattr(tuned, "read", lambda threads: {"csr": {"sum call": 1.0}})
    assert cost_model.map_prices(1) is None
    cost_model.map_prices.cache_clear()
    monkeypatch.setattr(tuned, "read", lambda threads: prices)
    assert cost_model.map_prices(1) == prices


@pytest.mark.skipif(onednn.why_missing() is not None, reason="no oneDNN")
def test_tuning_measures_maps() -> None:
    prices, shipped = tune.tune_maps(0.0), tuned.shipped()["maps"]["nanoseconds"]
    assert {name: set(costs) for name, costs in prices.items()} == {name: set(costs) for name, costs in shipped.items()}
    assert all(price > 0 for costs in prices.values() for price in costs.values())
    assert prices != shipped


def test_the_family_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    text = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
    monkeypatch.setattr(tuned.Path, "read_text", lambda self: text)
    assert tuned.family.__wrapped__() == "AuthenticAMD 26"
    monkeypatch.setattr(tuned.Path, "read_text", lambda self: "")
    monkeypatch.setattr(tuned.platform, "processor", lambda: "AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD")
    assert tuned.family.__wrapped__() == "AuthenticAMD 26"
    monkeypatch.setattr(tuned.platform, "processor", lambda: "arm")
    assert tuned.family.__wrapped__() == ""


# ------------------------------------------------------------------------------------------------ modes


class Own(Tensor):
    pass


def under_autocast(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return maps.linear(x, weight, bias)


def under_flop_counter(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        out = maps.linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 50 * 6 * 7
    return out


def without_onednn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # as torch.backends.mkldnn.flags does, which also warns of TF32
    try:
        return maps.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(before)


def in_forward_mode(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = maps.linear(forward_ad.make_dual(x, torch.ones_like(x)), weight, bias)
        tangent = forward_ad.unpack_dual(out).tangent
        assert torch.allclose(tangent, F.linear(torch.ones_like(x), weight))
        return out.clone()


TORCHS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "float64": lambda *t: maps.linear(*(a.double() for a in t)),
    "bfloat16": lambda *t: maps.linear(*(a.bfloat16() for a in t)),
    "float16": lambda *t: maps.linear(*(a.half() for a in t)),
    "meta": lambda *t: maps.linear(*(a.to("meta") for a in t)),
    "autocast": under_autocast,
    "few rows": lambda x, w, b: maps.linear(x[:15], w, b),
    "one vector": lambda x, w, b: maps.linear(x[0], w, b),
    "no rows": lambda x, w, b: maps.linear(x[:0], w, b),
    "no depth": lambda x, w, b: maps.linear(x[:, :0], w[:, :0], b),
    "no width": lambda x, w, b: maps.linear(x, w[:0], b[:0]),
    "a subclass": lambda x, w, b: maps.linear(x.as_subclass(Own), w, b),
    "a negative view": lambda x, w, b: maps.linear(torch.complex(x, x).conj().imag, w, b),
    "mkldnn layout": lambda x, w, b: maps.linear(x.to_mkldnn(), w, b).to_dense(),
    "a dispatch mode": under_flop_counter,
    "oneDNN switched off": without_onednn,
    "forward-mode": in_forward_mode,
    "jvp": lambda x, w, b: torch.func.jvp(lambda x: maps.linear(x, w, b), (x,), (x,))[0],
    "vmap": lambda x, w, b: torch.func.vmap(lambda x: maps.linear(x, w, b))(x.expand(3, 50, 6)),
    "grad": lambda x, w, b: torch.func.grad(lambda w: maps.linear(x, w, b).square().sum())(w),
    "trace": lambda x, w, b: torch.jit.trace(maps.linear, (x, w, b), check_trace=False)(x, w, b),
    "compile": lambda x, w, b: torch.compile(maps.linear, fullgraph=True, backend="eager")(x, w, b),
    "make_fx": lambda x, w, b: torch.fx.experimental.proxy_tensor.make_fx(maps.linear)(x, w, b),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TORCHS)
def test_torch_computes_what_onednn_does_not_know(name: str, products: Products) -> None:
    torch.manual_seed(0)
    out = TORCHS[name](torch.randn(50, 6), torch.randn(7, 6), torch.randn(7))
    assert out is not None
    assert products == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.usefixtures("products")
def test_modes_of_autograd(mode: Any) -> None:
    layer, x = maps.Linear(6, 7), torch.randn(50, 6)
    with mode():
        out, expected = layer(x), F.linear(x, layer.weight, layer.bias)
    assert torch.allclose(out, expected, atol=1e-5)
    assert (out.requires_grad, out.is_inference()) == (expected.requires_grad, expected.is_inference())


@pytest.mark.parametrize("error", ["depth", "bias", "dtype"])
@pytest.mark.usefixtures("products")
def test_mistakes_raise_torchs_errors(error: str) -> None:
    x, weight, bias = torch.randn(60, 6), torch.randn(7, 5 if error == "depth" else 6), torch.randn(7)
    bias = torch.randn(3) if error == "bias" else bias.double() if error == "dtype" else bias
    with pytest.raises(RuntimeError) as expected:
        F.linear(x, weight, bias)
    with pytest.raises(RuntimeError) as got:
        maps.linear(x, weight, bias)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, products: Products) -> None:
    layer, x = maps.Linear(6, 6), torch.randn(50, 6, requires_grad=True)

    def gradients(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        layer.zero_grad()
        x.grad = None
        run(x).square().sum().backward()
        return x.grad, layer.weight.grad  # type: ignore[return-value]

    expected = gradients(lambda x: layer(layer(x)))
    count = len(products)
    got = gradients(lambda x: checkpoint(lambda x: layer(layer(x)), x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(products) > 2 * count


# ------------------------------------------------------------------------------------------------ our layers


def test_a_map_is_torchs_in_all_but_speed() -> None:
    torch.manual_seed(0)
    ours = maps.Linear(6, 7)
    torch.manual_seed(0)
    torchs = nn.Linear(6, 7)
    assert repr(ours) == repr(torchs)
    assert vars(ours).keys() == vars(torchs).keys()
    for name, value in torchs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is maps.Linear
        assert torch.equal(other.weight, ours.weight)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (FeedForward(8), [(64, 32), (64, 8)]),
        (GatedFeedForward(8, 12), [(64, 12), (64, 12), (64, 8)]),
        (MessagePassing(graphs.complete(), "sum", PreNorm(8, FeedForward(8)), DotProduct(8, 2)), None),
        (MessagePassing(graphs.complete(), "sum", Concat(8, 5)), [(64, 5), (64, 5)]),
    ],
)
def test_layers_use_the_quicker_product(layer: nn.Module, expected: Any, products: Products) -> None:
    x = torch.randn(64, 8)
    with torch.no_grad():
        out = layer(x)
        assert products == (expected or [(64, 8)] * 4 + [(64, 32), (64, 8)])
        expected = copy.deepcopy(layer).double()(x.double())
        assert torch.allclose(out.double(), expected, atol=1e-5)


def test_explain_says_which_product_computes_the_maps(products: Products, capsys: pytest.CaptureFixture[str]) -> None:
    op = MessagePassing(graphs.complete(), "sum", PreNorm(8, FeedForward(8)), DotProduct(8, 2))
    assert "maps    6 by oneDNN, 0 by torch, for 40 rows" in str(explain(op, torch.randn(40, 8)))
    assert "maps    0 by oneDNN, 6 by torch, for 4 rows" in str(explain(op, torch.randn(4, 8)))
    assert "maps    0 by oneDNN, 6 by torch, for 60 rows" in str(explain(op.double(), torch.randn(3, 20, 8).double()))
    assert "maps" not in str(explain(MessagePassing(graphs.complete(), "sum"), torch.randn(40, 8)))
    assert "linear maps: " in explain(op, torch.randn(4, 8).double())._repr_html_()
    capsys.readouterr()
