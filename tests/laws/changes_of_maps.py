"""Changes of what a weight is: parametrized, pruned, normalized, quantized, or with an adapter beside it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from changes import COARSE, LOOSE, WHERE_READ, Nothing, change, other
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class Moved(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.2 * x + 0.05

    def right_inverse(self, x: Tensor) -> Tensor:
        return x


def maps_of(module: nn.Module) -> list[Any]:
    """Modules with a matrix that other libraries would wrap."""
    kinds = nn.Linear, nn.Embedding, nn.Conv2d
    found = [inner for inner in module.modules() if isinstance(inner, kinds) or type(inner).__name__ == "Conv1D"]
    if not found:
        raise Nothing("it has no linear maps")
    return found


@change()
def weights_are_parametrized(module: nn.Module) -> Iterator[None]:
    maps = maps_of(module)
    for inner in maps:
        parametrize.register_parametrization(inner, "weight", Moved())
    yield
    with torch.no_grad():
        for inner in maps:
            inner.parametrizations.weight.original.mul_(1.2)
    yield
    for inner in maps:
        parametrize.remove_parametrizations(inner, "weight")


@change()
def weights_are_pruned(module: nn.Module) -> Iterator[None]:
    maps = maps_of(module)
    for inner in maps:
        prune.l1_unstructured(inner, "weight", 0.3)
    yield
    for inner in maps:
        prune.remove(inner, "weight")


@change()
def weights_are_normalized(module: nn.Module) -> Iterator[None]:
    for inner in maps_of(module):
        parametrizations.weight_norm(inner)
    yield
    with torch.no_grad():
        for inner in maps_of(module):
            inner.parametrizations.weight.original0.mul_(1.2)


class LowRank(nn.Module):
    """A map with a term of low rank beside it, as adapters are by hand."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(other(inner.weight[:2]))
        self.up = nn.Parameter(other(inner.weight[:, :2]))
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out + x @ self.down.mT @ self.up.mT if self.is_on else out


@change()
def terms_of_low_rank_come_and_go(module: nn.Module) -> Iterator[None]:
    places = [(p, n, m) for p in module.modules() for n, m in p._modules.items() if isinstance(m, nn.Linear)]
    if not places:
        raise Nothing("it has no linear maps")
    adapters = []
    for parent, name, inner in places:
        adapters.append(LowRank(inner))
        parent._modules[name] = adapters[-1]
    yield
    for adapter in adapters:
        adapter.is_on = False
    yield
    for (parent, name, inner), adapter in zip(places, adapters, strict=True):
        inner.weight.data += adapter.up.data @ adapter.down.data
        parent._modules[name] = inner
    yield


@change()
def adapters_of_peft_come_and_go(module: nn.Module) -> Iterator[Any]:
    peft = _import("peft")
    targets = [name for name, inner in module.named_modules() if isinstance(inner, nn.Linear)]
    if not targets:
        raise Nothing("it has no linear maps")
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        wrapped = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=targets, init_lora_weights=False), module)
    layers = [inner for inner in wrapped.modules() if isinstance(inner, peft.tuners.lora.LoraLayer)]
    yield
    for switch in (False, True):
        for layer in layers:
            layer.enable_adapters(switch)
        yield
    for layer in layers:
        layer.merge()
    yield
    for layer in layers:
        layer.unmerge()


@change(WHERE_READ)
def weights_are_quantized_by_torchao(module: nn.Module) -> None:
    quantization = _import("torchao.quantization")
    if not any(isinstance(inner, nn.Linear) for inner in module.modules()):
        raise Nothing("it has no linear maps")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())


@change(COARSE, LOOSE, WHERE_READ)
def maps_are_quantized_dynamically(module: nn.Module) -> Iterator[Any]:
    if not any(type(inner) is nn.Linear for inner in module.modules()):
        raise Nothing("it has no linear maps of torch's class")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)


def _import(name: str) -> Any:
    try:
        __import__(name)
    except ImportError:
        raise Nothing(f"{name} is not installed") from None
    return sys.modules[name]
