"""Measurements of a model besides its loss, and the description of the machine."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import mpnn
from mpnn import MessagePassing
from mpnn.backends.tuned import processor
from mpnn.engine.plan import plan


def bytes_for_backward(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """The bytes that one forward pass in training stores for its backward pass: the storages of all tensors saved by
    autograd, without duplicates and without the model's parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    model.train()
    with _buffers_kept(model), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss()
    return sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in parameters)


@torch.no_grad()
def attention_weights(model: nn.Module, *inputs: Any) -> list[Tensor]:
    """The weights [..., E, H] of every layer of `model(*inputs)`, first layer first."""
    calls: Iterable[tuple[Any, Any]] = _calls(model.eval(), *inputs)
    return [layer(*args, return_weights=True)[1] for layer, args in calls]


def backends(model: nn.Module, *inputs: Any) -> str:
    """The backends that the plan selects for the layers of `model(*inputs)` in training."""
    chosen = [plan(layer.rounds(*args)[0]).backend for layer, args in _calls(model.train(), *inputs)]
    return ", ".join(dict.fromkeys(chosen))


@torch.no_grad()
def estimates(model: nn.Module, *inputs: Any) -> tuple[float, float]:
    """Seconds and bytes of working memory that the plan expects of all message passing in a step of training."""
    best = []
    for layer, args in _calls(model.train(), *inputs):
        with torch.enable_grad():
            best.append(plan(layer.rounds(*args)[0]).candidates[0])
    return sum(one.seconds for one in best), max((one.bytes for one in best), default=0.0)


def _calls(model: nn.Module, *inputs: Any) -> list[tuple[MessagePassing, tuple[Any, ...]]]:
    """All `MessagePassing` layers that run in `model(*inputs)`, with their arguments."""
    calls: list[tuple[MessagePassing, tuple[Any, ...]]] = []
    layers = [module for module in model.modules() if isinstance(module, MessagePassing)]
    handles = [layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args))) for layer in layers]
    try:
        with _buffers_kept(model):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restores the buffers of the model after the block: a forward pass in training changes the statistics of batch
    normalization, and a measured model is the one that was trained."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread in the block. Operations of a few microseconds are slower on several threads, and much
    slower if other processes keep the cores busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def machine() -> str:
    return f"{processor()}, {os.cpu_count()} cores, threads used by torch: {torch.get_num_threads()}"


def versions() -> str:
    return (
        f"mpnn {mpnn.__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"
    )
