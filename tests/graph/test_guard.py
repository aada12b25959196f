"""A guard tells tensors and modes apart: torch's own, and the one in Python where torch has none."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpnn.graph import guard as guards


@pytest.fixture(params=["torch's", "Python's"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python's":
        monkeypatch.setattr(guards, "TensorGuards", None)
    else:
        assert guards.TensorGuards is not None, "this version of torch has no guard of its own"
    return request.param


class _Subclass(Tensor):
    pass


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **kwargs or {})


X = torch.ones(4, 3)
OTHERS: dict[str, Callable[[], Tensor]] = {
    "another dtype": lambda: X.double(),
    "another width": lambda: torch.ones(4, 2),
    "another number of dimensions": lambda: torch.ones(1, 4, 3),
    "other strides": lambda: torch.ones(3, 4).mT,
    "a gradient": lambda: torch.ones(4, 3, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.ones(4, 3), requires_grad=False),
    "a subclass": lambda: torch.ones(4, 3).as_subclass(_Subclass),
    "sparse": lambda: X.to_sparse(),
    "meta": lambda: torch.ones(4, 3, device="meta"),
    "a pending negation": lambda: torch._neg_view(torch.ones(4, 3)),
    "made in inference mode": lambda: _in(torch.inference_mode()),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(4, 3)),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "a mode of dispatch": _Dispatch,
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
}


def _in(mode: AbstractContextManager[Any]) -> Tensor:
    with mode:
        return torch.ones(4, 3)


def test_the_same_form_passes() -> None:
    check = guards.guard(X)
    assert check(torch.zeros(4, 3))
    with torch.no_grad():
        assert check(X)


@pytest.mark.parametrize("name", OTHERS)
def test_another_tensor_is_refused(name: str) -> None:
    assert not guards.guard(X)(OTHERS[name]())


@pytest.mark.parametrize("name", MODES)
def test_another_mode_is_refused(name: str) -> None:
    check = guards.guard(X)
    with MODES[name]():
        assert guards.is_special(X) or not check(X)
        here = guards.guard(X)
        assert here(X)
    assert check(X)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_transforms_are_refused(transform: Callable[..., Any]) -> None:
    check = guards.guard(X)
    seen = []

    def see(x: Tensor) -> Tensor:
        seen.append(check(x))
        seen.append(check(X))
        return x.sum()

    transform(see)(torch.ones(4, 3) if transform is torch.func.grad else torch.ones(2, 4, 3))
    assert seen == [False, False]


def test_any_number_of_nodes() -> None:
    check = guards.of_any_nodes(X)
    assert check(torch.ones(9, 3))
    assert check(torch.ones(3, 9).mT)
    assert not check(torch.ones(9, 4))
    assert not guards.of_any_nodes(X, strides=(3, 1))(torch.ones(3, 9).mT)


def _modes() -> Iterator[tuple[str, AbstractContextManager[Any], bool]]:
    yield "none", nullcontext(), False
    yield "functions", _Functions(), True
    yield "forward derivatives", forward_ad.dual_level(), True


@pytest.mark.parametrize(("mode", "special"), [(mode, special) for _, mode, special in _modes()])
def test_what_the_guard_does_not_see_is_special(mode: AbstractContextManager[Any], special: bool) -> None:
    with mode:
        assert guards.is_special(X) is special


def test_in_a_compiled_program_a_call_is_special() -> None:
    seen = []

    @torch.compile(backend="eager", fullgraph=True)
    def program(x: Tensor) -> Tensor:
        return x + 1 if guards.is_special(x) else x

    seen.append(program(X))
    assert seen[0].equal(X + 1)


def test_several_tensors_are_compared_each_with_its_own() -> None:
    a, b = torch.zeros(2, 3), nn.Parameter(torch.zeros(4))
    check = guards.of_all([a, b])
    assert check(torch.ones(2, 3), nn.Parameter(torch.ones(4)))
    assert not check(torch.ones(2, 3), torch.ones(4))
    assert not check(torch.ones(2, 3), None)
    assert not check(torch.ones(3, 2).mT, b)
    assert not check(a.double(), b)
    assert not check(a, nn.Parameter(torch.ones(4), requires_grad=False))
    assert guards.of_all([a, a])(a, torch.ones(2, 3))
    with torch.autocast("cpu"):
        assert not check(a, b)
