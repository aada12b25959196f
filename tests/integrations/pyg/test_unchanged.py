"""A convolution in place computes what an unused copy with the same change computes, whatever changes after a call."""

import copy
import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch_geometric import nn as pyg

import mpnn.pyg
from mpnn.integrations.pyg import unchanged
from mpnn.integrations.pyg.convolutions import Replacement

Change = Callable[[Any], Any]
NODES = 12


def _wrapped(function: Any) -> Any:
    """A function that claims to be the one that it wraps."""

    @wraps(function)
    def twice(*inputs: Any, **named: Any) -> Any:
        return 2 * function(*inputs, **named)

    return twice


def _set(name: str, value: Any) -> Change:
    return lambda conv: setattr(conv, name, value)


def _own(name: str) -> Change:
    return lambda conv: setattr(conv, name, _wrapped(getattr(conv, name)))


def _doubled(module: Any, inputs: Any, output: Any) -> Any:
    return 2 * output


CHANGES: dict[str, Change] = {
    "message of the instance": _own("message"),
    "aggregate of the instance": _own("aggregate"),
    "update of the instance": _own("update"),
    "propagate of the instance": _own("propagate"),
    "forward of the aggregation": lambda conv: setattr(conv.aggr_module, "forward", _wrapped(conv.aggr_module.forward)),
    "hook of propagate": lambda conv: conv.register_propagate_forward_hook(_doubled),
    "hook of message": lambda conv: conv.register_message_forward_hook(_doubled),
    "hook of aggregate": lambda conv: conv.register_aggregate_forward_hook(_doubled),
    "hook of the aggregation": lambda conv: conv.aggr_module.register_forward_hook(_doubled),
    "hook of the convolution": lambda conv: conv.register_forward_hook(_doubled),
    "aggregation": _set("aggr_module", pyg.aggr.MaxAggregation()),
    "a weight replaced": lambda conv: setattr(conv, "bias", torch.nn.Parameter(conv.bias.detach() + 1)),
    "explain": lambda conv: (_set("_edge_mask", torch.rand(40))(conv), _set("explain", True)(conv)),
}
CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "GAT": lambda: pyg.GATConv(8, 4, 2, add_self_loops=False),
    "GCN": lambda: pyg.GCNConv(8, 8, add_self_loops=False, normalize=False),
    "Graph": lambda: pyg.GraphConv(8, 8),
}


def _pair(name: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """A convolution of PyTorch Geometric, the same in place after a call, and inputs."""
    torch.manual_seed(0)
    conv = CONVOLUTIONS[name]()
    if not isinstance(getattr(conv, "bias", None), torch.Tensor):
        conv.bias = torch.nn.Parameter(torch.zeros(8))
    ours = copy.deepcopy(conv)
    assert mpnn.pyg.use(ours).replaced
    inputs = torch.randn(NODES, 8), torch.randint(NODES, (2, 40))
    torch.testing.assert_close(ours(*inputs), conv(*inputs))
    return conv, ours, inputs


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_change_after_a_call_acts(name: str, change: str) -> None:
    conv, ours, inputs = _pair(name)
    for each in (conv, ours):
        torch.manual_seed(1)
        CHANGES[change](each)
    for _ in range(2):
        torch.testing.assert_close(ours(*inputs), conv(*inputs))


@pytest.mark.parametrize("method", ["message", "propagate", "aggregate", "update"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_method_that_is_patched_on_a_class_runs_until_it_is_restored(name: str, method: str) -> None:
    conv, ours, inputs = _pair(name)
    before = conv(*inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(conv), method, _wrapped(getattr(type(conv), method)))
        assert not conv(*inputs).equal(before)
        torch.testing.assert_close(ours(*inputs), conv(*inputs))
        assert "changed" in next(iter(mpnn.pyg.use(CONVOLUTIONS[name]()).left.values()))
    torch.testing.assert_close(ours(*inputs), before)
    assert unchanged.decided(ours)


@pytest.mark.parametrize("function", ["gcn_conv.gcn_norm", "gcn_conv.scatter", "gat_conv.softmax"])
def test_a_function_that_is_patched_in_the_file_of_a_class_runs_until_it_is_restored(function: str) -> None:
    file, called = function.split(".")
    module = importlib.import_module(f"torch_geometric.nn.conv.{file}")
    torch.manual_seed(0)
    conv = pyg.GCNConv(8, 8) if file == "gcn_conv" else pyg.GATConv(8, 4, 2)
    ours = copy.deepcopy(conv)
    mpnn.pyg.use(ours)
    inputs = torch.randn(NODES, 8), torch.randint(NODES, (2, 40))
    before = ours(*inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, called, _twice(getattr(module, called)))
        assert not conv(*inputs).allclose(before)
        torch.testing.assert_close(ours(*inputs), conv(*inputs))
    torch.testing.assert_close(ours(*inputs), before)
    assert unchanged.decided(ours)


def _twice(function: Any) -> Any:
    """The function, whose tensors of floating point numbers are doubled."""

    def doubled(*args: Any, **options: Any) -> Any:
        out = function(*args, **options)
        parts = out if isinstance(out, tuple) else (out,)
        parts = tuple(2 * x if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in parts)
        return parts if isinstance(out, tuple) else parts[0]

    return doubled


@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.nn.Sequential])
def test_maps_of_pairs_whose_class_is_patched_are_called(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    conv = pyg.EdgeConv(torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU()), aggr="sum")
    ours = copy.deepcopy(conv)
    mpnn.pyg.use(ours, maps=False)
    inputs = torch.randn(NODES, 8), torch.randint(NODES, (2, 40))
    before = ours(*inputs)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * forward(self, x))
    assert not conv(*inputs).allclose(before)
    torch.testing.assert_close(ours(*inputs), conv(*inputs))


class _Quantized(torch.Tensor):
    """A weight that other libraries compute with, as torchao's: it can be multiplied, and not be cut."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.chunk:
            raise NotImplementedError("chunk")
        return super().__torch_function__(function, kinds, args, options or {})


def test_maps_of_pairs_whose_weight_is_no_plain_tensor_are_called() -> None:
    torch.manual_seed(0)
    conv = pyg.EdgeConv(torch.nn.Linear(16, 8), aggr="sum")
    ours = copy.deepcopy(conv)
    mpnn.pyg.use(ours, maps=False)
    inputs = torch.randn(NODES, 8), torch.randint(NODES, (2, 40))
    ours.nn.weight = torch.nn.Parameter(ours.nn.weight.detach().as_subclass(_Quantized))
    torch.testing.assert_close(ours(*inputs).as_subclass(torch.Tensor), conv(*inputs))


def test_an_aggregation_with_a_part_of_another_class_is_called() -> None:
    conv = pyg.SAGEConv(8, 8, aggr="std")
    ours = copy.deepcopy(conv)
    mpnn.pyg.use(ours)
    inputs = torch.randn(NODES, 8), torch.randint(NODES, (2, 40))
    ours(*inputs)
    for each in (conv, ours):
        each.aggr_module.var_aggr = pyg.aggr.SumAggregation()
    torch.testing.assert_close(ours(*inputs), conv(*inputs))


def test_a_method_that_is_patched_on_the_class_of_an_aggregation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, ours, inputs = _pair("Graph")
    monkeypatch.setattr(pyg.aggr.SumAggregation, "forward", _wrapped(pyg.aggr.SumAggregation.forward))
    conv.fuse = ours.fuse = False
    torch.testing.assert_close(ours(*inputs), conv(*inputs))


def test_a_hook_of_all_modules_runs_for_the_aggregation() -> None:
    conv, ours, inputs = _pair("Graph")
    handle = torch.nn.modules.module.register_module_forward_hook(_doubled)
    try:
        torch.testing.assert_close(ours(*inputs), conv(*inputs))
    finally:
        handle.remove()
    torch.testing.assert_close(ours(*inputs), conv(*inputs))


def test_a_later_call_decides_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours, inputs = _pair("GAT")
    ours.eval()(*inputs)
    monkeypatch.setattr(Replacement, "decide", None)
    ours.train()(*inputs)
    ours.eval()(*inputs)


def test_decisions_die_with_their_convolution() -> None:
    _, ours, inputs = _pair("GCN")
    ours(*inputs)
    before = len(unchanged._DECISIONS)
    del ours
    assert len(unchanged._DECISIONS) == before - 1
