"""A witness sees each change of what it read, and refuses what it cannot compare."""

import math
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from mpnn.graph import witness as witnesses
from mpnn.graph.witness import Constant, Unwatchable, Witness

FACTOR = 2.0


def doubled(x: Tensor) -> Tensor:
    return FACTOR * x


class _Options:
    def __init__(self) -> None:
        self.sizes = [1, 2]
        self.names = {"a": 1}
        self.kinds = {"one"}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Options)

    __hash__ = object.__hash__


class _Layer(nn.Module):
    power = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.options = _Options()
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.norm(self.map(x)))

    def finish(self, x: Tensor) -> Tensor:
        return doubled(x) ** self.power * math.pi


def _witness(layer: nn.Module) -> Witness:
    witness = Witness()
    witness.module(layer)
    return witness


def _noop(*arguments: Any) -> None:
    return None


CHANGES: dict[str, Callable[[_Layer], Any]] = {
    "a number": lambda layer: setattr(layer.norm, "eps", 0.5),
    "a new attribute": lambda layer: setattr(layer, "other", 1),
    "an attribute that goes": lambda layer: delattr(layer, "options"),
    "eval": lambda layer: layer.eval(),
    "eval of a part": lambda layer: layer.norm.eval(),
    "a parameter": lambda layer: setattr(layer.map, "weight", nn.Parameter(torch.zeros(3, 3))),
    "a parameter that goes": lambda layer: setattr(layer.map, "bias", None),
    "a buffer": lambda layer: setattr(layer, "shift", torch.ones(3)),
    "a submodule": lambda layer: setattr(layer, "norm", nn.LayerNorm(3)),
    "a method of an instance": lambda layer: setattr(layer.map, "forward", _noop),
    "a class": lambda layer: setattr(layer.map, "__class__", nn.Bilinear),
    "a hook": lambda layer: layer.map.register_forward_hook(_noop),
    "a hook before": lambda layer: layer.register_forward_pre_hook(_noop),
    "a backward hook": lambda layer: layer.norm.register_full_backward_hook(_noop),
    "a parametrization": lambda layer: parametrize.register_parametrization(layer.map, "weight", nn.Identity()),
    "a mask": lambda layer: prune.random_unstructured(layer.map, "weight", 0.5),
    "other hooks": lambda layer: setattr(layer.map, "_forward_hooks", OrderedDict()),
    "other submodules": lambda layer: setattr(layer, "_modules", dict(layer._modules)),
    "an equal object": lambda layer: setattr(layer, "options", _Options()),
    "a method of the layer itself": lambda layer: setattr(layer, "finish", _noop),
    "an option's list": lambda layer: layer.options.sizes.append(3),
    "an item of an option's list": lambda layer: layer.options.sizes.__setitem__(0, 3),
    "an option's set": lambda layer: layer.options.kinds.add("two"),
    "an option's dictionary": lambda layer: layer.options.names.update(a=2),
    "half": lambda layer: layer.map._apply(lambda x: x.half()) and setattr(layer, "was", 1),
}


@pytest.fixture(params=["by versions", "by entries"])
def comparison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the versions of dictionaries, and where Python or torch has none."""
    if request.param == "by entries":
        monkeypatch.setattr(witnesses, "_version_of", witnesses._new_version)


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="attributes of Python 3.13.0 change without a version")
def test_dictionaries_have_versions() -> None:
    """Else nothing is wrong, but slow."""
    assert witnesses._version_of is not witnesses._new_version


def test_versions_that_miss_attributes_are_not_used() -> None:
    """As those of Python 3.13.0: a dictionary has one, and those of objects' attributes do not move."""
    assert witnesses.dict_version is not None

    def of_tables_only(table: dict[str, Any]) -> int:
        return 0 if "number" in table else witnesses.dict_version(table)

    assert not witnesses._moves_with_changes(of_tables_only)
    assert not witnesses._moves_with_changes(None)


def test_an_attribute_set_in_a_loop_moves_the_version() -> None:
    """Python specializes such code."""
    owner = types.SimpleNamespace(number=0)
    versions = set()
    for k in range(1000):
        owner.number = k + 1000
        versions.add(witnesses._version_of(vars(owner)))
    assert len(versions) == 1000


@pytest.mark.usefixtures("comparison")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_module_is_seen(name: str) -> None:
    layer = _Layer()
    witness = _witness(layer)
    assert witness.holds()
    CHANGES[name](layer)
    assert not witness.holds()


PATCHES: dict[str, Callable[[], Any]] = {
    "forward": lambda: mock.patch.object(_Layer, "forward", _noop),
    "a method that forward names": lambda: mock.patch.object(_Layer, "finish", _noop),
    "an attribute of the class": lambda: mock.patch.object(_Layer, "power", 2.0),
    "a function of the file": lambda: mock.patch.dict(_Layer.forward.__globals__, doubled=_noop),
    "a number of the file": lambda: mock.patch.dict(_Layer.forward.__globals__, FACTOR=3.0),
    "an attribute of a module": lambda: mock.patch.object(math, "pi", 3.0),
    "a function of torch": lambda: mock.patch.object(nn.functional, "linear", _noop),
    "a new attribute of the class": lambda: mock.patch.object(_Layer, "map", property(_noop), create=True),
    "an attribute of a base class": lambda: mock.patch.object(nn.Module, "__getattr__", _noop),
    "a class of torch": lambda: mock.patch.object(nn.Linear, "forward", _noop),
    "a call of modules": lambda: mock.patch.object(nn.Module, "_call_impl", _noop),
}


def test_other_code_of_a_function_is_seen() -> None:
    witness = _witness(_Layer())
    code = doubled.__code__
    doubled.__code__ = (lambda x: x).__code__
    try:
        assert not witness.holds()
    finally:
        doubled.__code__ = code
    assert witness.holds()


@pytest.mark.usefixtures("comparison")
@pytest.mark.parametrize("name", PATCHES)
def test_a_change_of_code_is_seen(name: str) -> None:
    witness = _witness(_Layer())
    with PATCHES[name]():
        assert not witness.holds()
    assert witness.holds()


def test_each_entry_of_a_dictionary_is_seen() -> None:
    layer = _Layer()
    for read in list(_witness(layer).reads()):
        if not isinstance(read.owner, dict) or "__name__" in read.owner:
            continue
        witness = _witness(layer)
        with mock.patch.dict(read.owner, {read.name: object()}):
            assert not witness.holds(), read


def test_what_changes_and_changes_back_is_the_same() -> None:
    layer = _Layer()
    witness = _witness(layer)
    layer.map.eval()
    assert not witness.holds()
    layer.map.train()
    assert witness.holds()
    handle = layer.map.register_forward_hook(_noop)
    assert not witness.holds()
    handle.remove()
    assert witness.holds()
    layer.norm.eps = float(str(layer.norm.eps))
    assert witness.holds(), "another object of the same number"


def test_a_call_changes_nothing() -> None:
    layer = _Layer()
    witness = _witness(layer)
    layer(torch.zeros(3))
    layer.state_dict()
    assert witness.holds()


def test_what_is_skipped_is_not_seen() -> None:
    layer = _Layer()
    witness = Witness()
    witness.skip(layer.map._parameters)
    witness.module(layer)
    layer.map.weight = nn.Parameter(torch.zeros(3, 3))
    assert witness.holds()
    layer.other = layer.norm
    assert not witness.holds()


def test_tensors_whose_numbers_are_not_seen() -> None:
    layer = _Layer()
    witness = Witness()
    witness.skip(layer.map._parameters, layer.norm._parameters)
    witness.module(layer)
    assert [x is layer.shift for x in witness.unread] == [True]


def test_a_global_of_a_method_of_an_instance_is_seen() -> None:
    layer = _Layer()
    vars(layer)["finish"] = doubled
    witness = _witness(layer)
    with mock.patch.dict(doubled.__globals__, FACTOR=3.0):
        assert not witness.holds()
    assert witness.holds()


def test_numbers_of_a_tensor_are_seen() -> None:
    x = torch.zeros(3)
    witness = Witness()
    assert witness.tensor(x) is x
    assert witness.holds()
    x.add_(1)
    assert not witness.holds()


def test_a_variable_of_a_closure_is_seen() -> None:
    offset = 1

    def rule(x: int) -> int:
        return x + offset

    witness = Witness()
    witness.code(rule)
    assert witness.holds()
    offset = 2
    assert not witness.holds()


def _in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize("x", [torch.zeros(3).as_subclass(type("Own", (Tensor,), {})), _in_inference_mode()])
def test_tensors_without_versions_are_refused(x: Tensor) -> None:
    with pytest.raises(Unwatchable, match="not seen"):
        Witness().tensor(x)


def test_what_reads_very_many_objects_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witnesses, "_MOST", 100)
    _witness(nn.Linear(1, 1))
    with pytest.raises(Unwatchable, match="it reads more than 100 objects"):
        _witness(nn.Sequential(*(nn.Linear(1, 1) for _ in range(101))))


def test_unknown_containers_are_refused() -> None:
    with pytest.raises(Unwatchable, match=r"collections\.deque"):
        Witness().state(types.SimpleNamespace(items=deque([1])))


def test_objects_that_refer_to_one_another_are_read_once() -> None:
    first = types.SimpleNamespace()
    second = types.SimpleNamespace(other=first)
    first.other = second
    witness = Witness()
    witness.state(first)
    assert witness.holds()
    second.more = 1
    assert not witness.holds()


def test_constants_are_compared_by_identity() -> None:
    class Plans(Constant):
        pass

    owner = types.SimpleNamespace(plans=Plans())
    witness = Witness()
    witness.state(owner)
    owner.plans.new = 1
    assert witness.holds()
    owner.plans = Plans()
    assert not witness.holds()
