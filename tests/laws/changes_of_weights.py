"""Changes of numbers: weights and buffers, lengths and edges, written where they lie or replaced."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from changes import OF_GRADIENTS, WHERE_READ, Nothing, change, other, owners_of, weights_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mpnn.graph import Graph


def _step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in weights_of(module):
        weight.grad = torch.arange(weight.numel(), dtype=torch.float32).cos().view(weight.shape).to(weight.dtype)
    optimizer.step()
    optimizer.zero_grad()


@change()
def an_optimizer_steps_weight_by_weight(module: nn.Module) -> None:
    _step(module, torch.optim.AdamW(weights_of(module), lr=0.1, foreach=False))


@change()
def an_optimizer_steps_for_all_weights_at_once(module: nn.Module) -> None:
    _step(module, torch.optim.AdamW(weights_of(module), lr=0.1, foreach=True))


@change()
def a_fused_optimizer_steps(module: nn.Module) -> None:
    _step(module, torch.optim.AdamW(weights_of(module), lr=0.1, fused=True))


@change()
def moving_averages_follow_the_weights(module: nn.Module) -> Iterator[Any]:
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    yield average.module
    average.update_parameters(module)
    an_optimizer_steps_for_all_weights_at_once(module)
    average.update_parameters(module)
    yield average.module


@change()
def stochastic_averages_replace_the_weights(module: nn.Module) -> None:
    average = AveragedModel(module, use_buffers=True)
    for _ in range(2):
        average.update_parameters(module)
        an_optimizer_steps_weight_by_weight(module)
    with torch.no_grad():
        for weight, mean in zip(module.parameters(), average.module.parameters(), strict=True):
            weight.copy_(mean)


@change()
def weights_are_swapped_with_a_shadow(module: nn.Module) -> Iterator[None]:
    """As trainers evaluate moving averages."""
    shadow = [other(weight) for weight in weights_of(module)]
    for _ in range(2):
        for k, weight in enumerate(weights_of(module)):
            weight.data, shadow[k] = shadow[k], weight.data
        yield


@change()
def weights_are_copied_over(module: nn.Module) -> None:
    with torch.no_grad():
        for weight in weights_of(module):
            weight.copy_(other(weight))


@change()
def each_weight_in_turn_is_written_through_data(module: nn.Module) -> Iterator[None]:
    weights = weights_of(module)
    for weight in weights[:: -(-len(weights) // 12)]:
        weight.data.view(-1)[:: max(1, weight.numel() // 7)] = 0.7
        yield


@change()
def a_neuron_is_written_through_data(module: nn.Module) -> None:
    for weight in weights_of(module):
        (weight.data[..., -1:] if weight.dim() else weight.data).fill_(0.9)


@change()
def weights_are_written_through_numpy(module: nn.Module) -> None:
    for weight in weights_of(module):
        view = weight.detach().numpy()
        view[...] = 1.3 * view + 0.05


@change()
def weights_get_other_data(module: nn.Module) -> None:
    for weight in weights_of(module):
        weight.data = other(weight)


@change()
def weights_get_other_strides(module: nn.Module) -> None:
    for weight in weights_of(module):
        weight.data = other(weight).mT.contiguous().mT if weight.dim() > 1 else other(weight).repeat(2)[::2].mul(1.3)


@change()
def weights_are_swapped_as_tensors(module: nn.Module) -> None:
    for weight in weights_of(module):
        torch.utils.swap_tensors(weight, nn.Parameter(other(weight), weight.requires_grad))


@change()
def weights_are_replaced_by_other_parameters(module: nn.Module) -> None:
    new = {id(x): nn.Parameter(other(x), x.requires_grad) for _, _, x in owners_of(module)}
    for owner, name, x in owners_of(module):
        setattr(owner, name, new[id(x)])


def _state(module: nn.Module) -> dict[str, Tensor]:
    weights_of(module)
    return {
        name: other(x) if isinstance(x, Tensor) and x.is_floating_point() else copy.deepcopy(x)
        for name, x in module.state_dict().items()
    }


@change()
def a_state_is_loaded(module: nn.Module) -> None:
    module.load_state_dict(_state(module))


@change()
def a_state_is_loaded_by_assignment(module: nn.Module) -> None:
    module.load_state_dict(_state(module), assign=True)


@change()
def another_process_writes_shared_weights(module: nn.Module) -> Iterator[None]:
    module.share_memory()
    yield
    views = [weight.detach().numpy() for weight in weights_of(module)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads exist, and none of them runs here
        child = os.fork()
    if child == 0:
        for view in views:
            view[...] = 1.3 * view + 0.05
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@change()
def weights_become_half_and_float_again(module: nn.Module) -> None:
    weights_of(module)
    weights_are_copied_over(module.bfloat16())
    module.float()


@change()
def weights_become_double(module: nn.Module) -> Iterator[None]:
    weights_of(module)
    module.double()
    yield
    weights_are_copied_over(module)
    yield
    module.float()


@change()
def weights_become_double_as_swapped_tensors(module: nn.Module) -> Iterator[None]:
    weights_of(module)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    weights_are_copied_over(module)
    yield
    module.float()


@change()
def weights_lose_their_memory_and_are_written_again(module: nn.Module) -> None:
    weights_of(module)
    kept = {name: x.detach().clone() for name, x in (*module.named_parameters(), *module.named_buffers())}
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            x.copy_(other(kept[name]) if isinstance(x, nn.Parameter) and x.is_floating_point() else kept[name])


@change(OF_GRADIENTS)
def weights_are_frozen_and_one_is_not(module: nn.Module) -> Iterator[None]:
    module.requires_grad_(False)
    yield
    weights_of(module)[0].requires_grad_()
    yield
    weights_are_copied_over(module)


def _set_as(module: nn.Module, place: Callable[[nn.Module, str, Tensor], None]) -> Iterator[None]:
    """Weights that are not parameters, and replaced after a call."""
    held = owners_of(module)
    for owner, name, _ in held:
        del owner._parameters[name]
    for _ in range(2):
        new = {id(x): other(x).requires_grad_(x.requires_grad) for _, _, x in held}
        for owner, name, x in held:
            place(owner, name, new[id(x)])
        yield
        held = [(owner, name, new[id(x)]) for owner, name, x in held]


@change()
def weights_become_attributes_and_are_replaced(module: nn.Module) -> Iterator[None]:
    yield from _set_as(module, setattr)


@change()
def weights_become_buffers_and_are_replaced(module: nn.Module) -> Iterator[None]:
    yield from _set_as(module, lambda owner, name, x: owner._buffers.__setitem__(name, x))


@change(WHERE_READ)
def buffers_are_written(module: nn.Module) -> Iterator[None]:
    buffers = [x for x in module.buffers() if x.is_floating_point() and bool((x * (1 - x)).any())]
    if not buffers:
        raise Nothing("it has no buffers but masks")
    for x in buffers:
        x.mul_(1.2)
    yield
    for x in buffers:
        x.data[...] = 1.2 * x.data
    yield


def _data_of(module: nn.Module) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """The lengths, offsets and edges that modules have as buffers, with others to take their place."""
    found = [(inner, inner.other_data()) for inner in module.modules() if hasattr(type(inner), "other_data")]
    if not any(data for _, data in found):
        raise Nothing("it reads no lengths, offsets or edges")
    return found


@change()
def lengths_offsets_and_edges_are_written(module: nn.Module) -> None:
    for inner, data in _data_of(module):
        for name, x in data.items():
            getattr(inner, name).copy_(x)


@change()
def lengths_offsets_and_edges_are_written_through_data(module: nn.Module) -> None:
    for inner, data in _data_of(module):
        for name, x in data.items():
            getattr(inner, name).data[...] = x


@change()
def lengths_offsets_and_edges_are_written_through_numpy(module: nn.Module) -> None:
    for inner, data in _data_of(module):
        for name, x in data.items():
            getattr(inner, name).numpy()[...] = x.numpy()


@change()
def lengths_offsets_and_edges_are_replaced(module: nn.Module) -> None:
    for inner, data in _data_of(module):
        for name, x in data.items():
            setattr(inner, name, x)


def _attributes_of_edges(module: nn.Module) -> list[Tensor]:
    held = [vars(inner).get("graph") for inner in module.modules()]
    found = [graph.edge_attr for graph in held if isinstance(graph, Graph) and graph.edge_attr is not None]
    if not found:
        raise Nothing("its graph has no attributes of edges")
    return found


@change(WHERE_READ)
def attributes_of_edges_are_written(module: nn.Module) -> Iterator[None]:
    for x in _attributes_of_edges(module):
        x.mul_(0.7)
    yield
    for x in _attributes_of_edges(module):
        x.data[1:] = 0.3
    yield
    for x in _attributes_of_edges(module):
        x.numpy()[:7] = 0.6


@change()
def the_graph_is_replaced(module: nn.Module) -> None:
    found = [inner for inner in module.modules() if isinstance(vars(inner).get("graph"), Graph)]
    found = [inner for inner in found if inner.graph.is_explicit]
    if not found:
        raise Nothing("it has no list of edges")
    for inner in found:
        old = inner.graph
        data = {"edge_attr": old.edge_attr, "edge_type": old.edge_type}
        inner.graph = Graph.from_edges(old.edge_index.flip(0), old.num_src, old.num_dst, **data)
