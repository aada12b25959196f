"""The law of change: what computes gives after a change what an unused copy with the same change gives.

    use; call; change; call         equals          change; call           of a copy that nobody has called

Fast ways keep what they made from a module: plans, packed weights, graphs, programs. A kept thing must not outlive what
it was made from. A case is a thing that computes (`things.py`), a change between two calls, and the mode of the calls.
Things come from the registries, so that a new family, option, convolution or model is among the cases unasked.

A change is a function of a module. A generator changes it step by step: after each `yield` the module is called, or
what was yielded in its place, and once more behind the last. The reference is made anew for each step. Where a thing
has a peer, the same computation by code that keeps nothing, the results must be those of the peer, too. A thing may
refuse a change with a ValueError or TypeError of this library. At least one step must have an effect on the reference,
else the case proves nothing.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from typing import Any
from unittest import mock

import torch
from error_bound import error_bound
from things import HAS_TRANSFORMERS, Thing, dtype_of
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mpnn
from mpnn.graph import Graph

Change = Callable[[Any], Any]
Results = dict[str, Any]


class Nothing(Exception):
    """A thing has nothing that a change could change."""


# ------------------------------------------------------------------------------------------------------------- modes


MODES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "grad": (torch.enable_grad, torch.enable_grad),
    "no_grad": (torch.no_grad, torch.no_grad),
    "inference_mode": (torch.inference_mode, torch.inference_mode),
    "no_grad, then grad": (torch.no_grad, torch.enable_grad),
}
"""The mode of the first calls, and that of the calls after a change. `compiled` makes a thing that is a program."""


def compiled(thing: Thing) -> Thing:
    """The thing, called by a program that its first call compiles."""
    programs: dict[nn.Module, Any] = {}

    def call(module: Any, *inputs: Tensor) -> Any:
        if module not in programs:
            programs[module] = torch.compile(module, backend="eager")
        return thing.call(programs[module], *inputs)

    return thing._replace(call=call)


# ----------------------------------------------------------------------------------------------------------- changes

CHANGES: dict[str, Change] = {}
WITHOUT_EFFECT: set[Change] = set()
"""Changes that must not change a result."""
LOOSE: set[Change] = set()
"""Changes after which a peer may draw other random numbers, or round in other places."""
BEFORE_A_CALL: set[Change] = set()
"""Changes that come before the first call."""
OF_GRADIENTS: set[Change] = set()
"""Changes that gradients alone show."""
WITHOUT_GRADIENTS: set[Change] = set()
"""Changes that autograd refuses."""
WHERE_READ: set[Change] = set()
"""Changes of what is found in a thing, which may not read it."""
COARSE: set[Change] = set()
"""Changes after which numbers are rounded to 16 bits."""


def change(*kinds: set[Change]) -> Callable[[Change], Change]:
    """Enters a change under its name, and in these sets."""

    def enter(function: Change) -> Change:
        CHANGES[function.__name__.replace("_", " ")] = function
        for kind in kinds:
            kind.add(function)
        return function

    return enter


def other(x: Tensor) -> Tensor:
    """Other numbers of the same kind."""
    return 1.2 * x.detach() + 0.05


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    found = [weight for weight in module.parameters() if weight.is_floating_point() and weight.numel()]
    if not found:
        raise Nothing("it has no weights")
    return found


def owners_of(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Each weight with the module that has it, and its name there; tied ones each time."""
    found = [(owner, name) for owner in module.modules() for name in owner._parameters]
    held = [(owner, name, owner._parameters[name]) for owner, name in found]
    if not held:
        raise Nothing("it has no weights")
    return [(owner, name, x) for owner, name, x in held if x is not None and x.is_floating_point()]


def spots_of(module: nn.Module, most: int = 4) -> list[Any]:
    """The module and some inside it, of different classes."""
    by_class = {type(inner): inner for inner in reversed(list(module.modules())) if has_code(inner)}
    inner = list(by_class.values())[::-1]
    return [inner[k * len(inner) // most] for k in range(most)] if len(inner) > most else inner


def has_code(module: nn.Module) -> bool:
    return "_forward_unimplemented" not in type(module).forward.__qualname__


# Weights, written where they lie or replaced.


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


# Hooks.


def _scaled(x: Any, by: float = 1.2) -> Any:
    """The floating point tensors of a result, multiplied."""
    if isinstance(x, Tensor):
        return x * by if x.is_floating_point() else x
    if type(x) in (tuple, list):
        return type(x)(_scaled(part, by) for part in x)
    return x


def _scale_in_place(x: Any) -> None:
    if isinstance(x, Tensor) and x.is_floating_point() and not torch.is_grad_enabled():
        x.mul_(1.2)
    elif type(x) in (tuple, list):
        for part in x:
            _scale_in_place(part)


def _hooked(module: nn.Module, register: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Each of some modules with a hook, in turn; then none."""
    for spot in spots_of(module):
        handle = register(spot)
        yield
        handle.remove()


@change()
def outputs_are_replaced_by_hooks(module: nn.Module) -> Iterator[None]:
    yield from _hooked(module, lambda spot: spot.register_forward_hook(lambda m, i, o: _scaled(o)))


@change(WITHOUT_GRADIENTS)
def outputs_are_written_by_hooks(module: nn.Module) -> Iterator[None]:
    yield from _hooked(module, lambda spot: spot.register_forward_hook(lambda m, i, o: _scale_in_place(o)))


@change()
def hooks_read_keywords_and_are_always_called(module: nn.Module) -> Iterator[None]:
    def scale(module: Any, args: Any, options: Any, out: Any) -> Any:
        return _scaled(out)

    yield from _hooked(
        module, lambda spot: spot.register_forward_hook(scale, with_kwargs=True, prepend=True, always_call=True)
    )


@change(WHERE_READ)
def inputs_are_replaced_by_hooks(module: nn.Module) -> Iterator[None]:
    yield from _hooked(
        module,
        lambda spot: spot.register_forward_pre_hook(
            lambda m, args, options: (
                _scaled(args),
                {k: v if k.endswith("mask") else _scaled(v) for k, v in options.items()},
            ),
            with_kwargs=True,
        ),
    )


@change(OF_GRADIENTS)
def gradients_are_replaced_by_hooks_of_modules(module: nn.Module) -> Iterator[None]:
    yield from _hooked(module, lambda spot: spot.register_full_backward_hook(lambda m, i, o: _scaled(i)))
    yield from _hooked(module, lambda spot: spot.register_full_backward_pre_hook(lambda m, o: _scaled(o)))


@change(OF_GRADIENTS)
def gradients_are_replaced_by_hooks_of_weights(module: nn.Module) -> Iterator[None]:
    learned = [weight for weight in weights_of(module) if weight.requires_grad]
    if not learned:
        raise Nothing("it learns nothing")
    handles = [weight.register_hook(_scaled) for weight in learned]
    yield
    for handle in handles:
        handle.remove()


def _globally_hooked(module: nn.Module, register: Callable[[Callable[..., Any]], Any], argument: int) -> Iterator[None]:
    """A hook of all modules that scales one of its arguments, for some modules in turn."""
    for spot in spots_of(module):
        handle = register(lambda *given, spot=spot: _scaled(given[argument]) if given[0] is spot else None)
        try:
            yield
        finally:
            handle.remove()


@change()
def outputs_are_replaced_by_a_global_hook(module: nn.Module) -> Iterator[None]:
    yield from _globally_hooked(module, hooks.register_module_forward_hook, 2)


@change(WHERE_READ)
def inputs_are_replaced_by_a_global_hook(module: nn.Module) -> Iterator[None]:
    yield from _globally_hooked(module, hooks.register_module_forward_pre_hook, 1)


@change(OF_GRADIENTS)
def gradients_are_replaced_by_a_global_hook(module: nn.Module) -> Iterator[None]:
    yield from _globally_hooked(module, hooks.register_module_full_backward_hook, 1)
    yield from _globally_hooked(module, hooks.register_module_full_backward_pre_hook, 1)


# Modules and code.


class Scaled(nn.Module):
    """A module whose results are multiplied."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return _scaled(self.inner(*args, **options))


@change(WHERE_READ)
def a_module_inside_is_replaced(module: nn.Module) -> Iterator[None]:
    for spot in spots_of(module):
        for parent, name in [(p, n) for p in module.modules() for n, child in p._modules.items() if child is spot]:
            try:
                setattr(parent, name, Scaled(spot))
            except TypeError:  # an operator takes no other attention
                continue
            yield
            setattr(parent, name, spot)


@change()
def a_module_gets_a_forward_of_its_own(module: nn.Module) -> Iterator[None]:
    for spot in spots_of(module):
        before = spot.forward
        spot.forward = lambda *args, before=before, **options: _scaled(before(*args, **options))
        yield
        if isinstance(before, types.MethodType):
            del spot.forward
        else:
            spot.forward = before


@change()
def the_forward_of_a_class_is_patched(module: nn.Module) -> Iterator[None]:
    for kind in {type(spot): None for spot in spots_of(module)}:
        before = kind.forward

        def forward(self: Any, *args: Any, before: Any = before, **options: Any) -> Any:
            return _scaled(before(self, *args, **options))

        with mock.patch.object(kind, "forward", forward):
            yield


@change()
def the_call_of_a_class_is_patched(module: nn.Module) -> Iterator[None]:
    for kind in {type(spot): None for spot in spots_of(module)}:
        before = kind.__call__

        def call(self: Any, *args: Any, before: Any = before, **options: Any) -> Any:
            return _scaled(before(self, *args, **options))

        with mock.patch.object(kind, "__call__", call):
            yield


@change()
def a_module_gets_another_class(module: nn.Module) -> Iterator[None]:
    for spot in spots_of(module):
        before = type(spot)

        def forward(self: Any, *args: Any, before: Any = before, **options: Any) -> Any:
            return _scaled(before.forward(self, *args, **options))

        spot.__class__ = type(f"Own{before.__name__}", (before,), {"forward": forward, "__module__": before.__module__})
        yield
        spot.__class__ = before


@change(WHERE_READ)
def each_number_of_a_module_in_turn_is_set(module: nn.Module) -> Iterator[None]:
    """Epsilons, scales, slopes, limits: all floats that are attributes."""
    found = {}
    for inner in module.modules():
        for name, value in vars(inner).items():
            if name != "p" and (type(value) is float or _are_numbers(value)):
                found.setdefault((type(inner), name), []).append(inner)
    if not found:
        raise Nothing("its modules have no numbers")
    for (_, name), inner in found.items():
        for one in inner:
            value = getattr(one, name)
            setattr(one, name, 2 * value + 0.1 if type(value) is float else type(value)(2 * x for x in value))
        yield


def _are_numbers(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(type(x) is float for x in value)


@change(WHERE_READ)
def functions_of_the_file_are_patched(module: nn.Module) -> Iterator[None]:
    """Those that return tensors, one after the other, where other libraries patch them."""
    files = {sys.modules[kind.__module__] for inner in module.modules() for kind in type(inner).__mro__}
    patched = [file for file in files if file.__name__.startswith(("transformers.models.", "torch_geometric.nn."))]
    if not patched:
        raise Nothing("its code is ours or torch's")
    for file in sorted(patched, key=lambda file: file.__name__):
        for name, function in list(vars(file).items()):
            if type(function) is types.FunctionType and not name.startswith("_") and name not in replaced_functions():

                def scaled(*args: Any, function: Any = function, **options: Any) -> Any:
                    return _scaled(function(*args, **options))

                with mock.patch.object(file, name, scaled):
                    yield


def replaced_functions() -> set[str]:
    """The functions of transformers in whose place `mpnn.hf.use` puts its own."""
    if not HAS_TRANSFORMERS:
        return set()
    from mpnn.integrations.hf import recurrences

    return {"eager_attention_forward", "repeat_kv", *recurrences._KNOWN}


@change(LOOSE, WHERE_READ)
def dropout_is_set_and_it_trains(module: nn.Module) -> Iterator[None]:
    found = [inner for inner in module.modules() if isinstance(inner, nn.Dropout)]
    named = [inner for inner in module.modules() if type(vars(inner).get("dropout")) is float]
    if not found and not named:
        raise Nothing("it has no dropout")
    module.train()
    yield
    for inner in found:
        inner.p = 0.5
    for inner in named:
        inner.dropout = 0.5
    yield


@change(WITHOUT_EFFECT)
def it_trains_and_does_not(module: nn.Module) -> None:
    module.train()
    module.eval()


# Weights that are computed.


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


# Copies, calls and threads.


class Functional(nn.Module):
    """A module called with other weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module
        self.__dict__["tensors"] = {
            name: other(x).requires_grad_(x.requires_grad) for name, x in module.named_parameters()
        }
        vars(self).update({f"weight {name}": x for name, x in self.tensors.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def forward(self, *args: Any, **options: Any) -> Any:
        return torch.func.functional_call(self.module, self.tensors, args, options, tie_weights=False)


@change(WHERE_READ)
def it_is_called_with_other_weights(module: nn.Module) -> Iterator[Any]:
    weights_of(module)
    if not has_code(module):
        raise Nothing("it is called by a name of its own")
    yield Functional(module)


def _shallow(module: nn.Module) -> Any:
    """A copy that shares all but its modules and weights."""
    twin = copy.copy(module)
    twin._parameters = {name: None if x is None else nn.Parameter(other(x)) for name, x in module._parameters.items()}
    twin._modules = {name: None if child is None else _shallow(child) for name, child in module._modules.items()}
    return twin


@change()
def a_shallow_copy_gets_other_weights(module: nn.Module) -> Iterator[Any]:
    weights_of(module)
    yield _shallow(module)


@change()
def a_copy_gets_other_weights(module: nn.Module) -> Iterator[Any]:
    twin = copy.deepcopy(module)
    weights_are_copied_over(twin)
    yield twin


@change()
def a_pickled_copy_gets_other_weights(module: nn.Module) -> Iterator[Any]:
    twin = pickle.loads(pickle.dumps(module))
    weights_are_copied_over(twin)
    yield twin


class Threaded(nn.Module):
    """A module that another thread calls."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__["_modules"].get("module")
        return found if name == "module" else getattr(found, name)

    def forward(self, *args: Any, **options: Any) -> Any:
        results: list[Any] = []
        mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.set_grad_enabled
        is_on = True if mode is torch.inference_mode else torch.is_grad_enabled()

        def run() -> None:
            try:
                with mode(is_on):
                    results.append(self.module(*args, **options))
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]


@change()
def another_thread_calls_it(module: nn.Module) -> Iterator[Any]:
    if not has_code(module):
        raise Nothing("it is called by a name of its own")
    weights_are_copied_over(module)
    yield Threaded(module)
    thread = threading.Thread(target=weights_are_written_through_numpy, args=(module,))
    thread.start()
    thread.join()


@change(BEFORE_A_CALL)
def the_default_dtype_has_16_bits(module: nn.Module) -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
        weights_are_copied_over(module)
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@change(COARSE, LOOSE, WHERE_READ)
def autocast_is_on(module: nn.Module) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


# ------------------------------------------------------------------------------------------------------------- check


def check(thing: Thing, change: Change, mode: str) -> None:
    """Raises AssertionError if the law does not hold, and Nothing if the change does not concern the thing."""
    first, later = MODES[mode]
    has_gradients = later is torch.enable_grad
    if (change in OF_GRADIENTS and not has_gradients) or (change in WITHOUT_GRADIENTS and has_gradients):
        raise Nothing("the change is of other modes")
    before = _before(thing, later)
    assert isinstance(before, dict), f"the thing does not compute: {before!r}"
    if change in OF_GRADIENTS and not any(value is True for value in before.values()):
        raise Nothing("it has no gradients")
    references = _references(thing, change, first, later)
    found = _along(thing, _used(thing, thing.make(), change, first), change, later)
    has_effect = change in WITHOUT_EFFECT
    dtype = torch.bfloat16 if change in COARSE else torch.float32
    for k, (result, expected) in enumerate(zip(found, references, strict=True)):
        right = {name: x for name, x in expected.items() if isinstance(x, dict)}
        for x in right.values():
            has_effect = has_effect or _difference(x, before, thing) > 20
        if isinstance(result, Exception) and isinstance(expected.get("its peer"), Exception):
            continue  # the peer, which was called before, too, raises as well
        for name, x in right.items():
            _must_equal(result, x, f"step {k + 1} of {len(found)}: {name}", thing, dtype)
        if not right:
            assert not isinstance(result, dict), f"step {k + 1}: {expected} raise, and what was called before does not"
    if not has_effect and (change in WHERE_READ or not any(map(_has_result, references))):
        raise Nothing("it does not read what changes, or does not allow it")
    assert has_effect, "the change has no effect on the reference: the case proves nothing"


@cache
def _before(thing: Thing, mode: Any) -> Results | Exception:
    return outcome(thing, thing.make(), mode)


def _has_result(expected: dict[str, Results | Exception]) -> bool:
    return any(isinstance(x, dict) for x in expected.values())


def _used(thing: Thing, module: Any, change: Change, mode: Any) -> Any:
    """The module, called twice: what a first call learns, a second one may take."""
    if change not in BEFORE_A_CALL:
        for _ in range(2):
            outcome(thing, module, mode)
    return module


def _references(thing: Thing, change: Change, first: Any, later: Any) -> list[dict[str, Results | Exception]]:
    """What is right after each step of a change: by the peer, and by an unused copy, after the last step and where the
    peer raises. A change that an unused copy or the peer does not allow is none."""
    try:
        with closing(_states(thing.make(), change)) as states:
            *others, last = states
        references: list[dict[str, Results | Exception]] = [{} for _ in others]
        references.append({"an unused copy": outcome(thing, last, later)})
        if thing.peer is not None and not (change in LOOSE and thing.is_loose):
            peer = _used(thing, thing.peer(), change, first)
            for k, result in enumerate(_along(thing, peer, change, later)):
                references[k]["its peer"] = result
        for k in range(len(others)):
            if not isinstance(references[k].get("its peer"), dict):
                references[k]["an unused copy"] = _unused(thing, change, k, later)
    except Nothing:
        raise
    except Exception as error:
        raise Nothing(f"it does not allow the change: {error!r}") from error
    return references


def _along(thing: Thing, module: Any, change: Change, mode: Any) -> list[Results | Exception]:
    """The results after each step of a change."""
    with closing(_states(module, change)) as states:
        return [outcome(thing, state, mode) for state in states]


def _unused(thing: Thing, change: Change, step: int, mode: Any) -> Results | Exception:
    """The result after a step of a change, of a module that nobody has called."""
    with closing(_states(thing.make(), change)) as states:
        for _ in range(step):
            next(states)
        return outcome(thing, next(states), mode)


def _states(module: Any, change: Change) -> Iterator[Any]:
    """What to call after each step of a change."""
    if not inspect.isgeneratorfunction(change):
        change(module)
    else:
        for other in change(module):
            yield module if other is None else other
    yield module


def outcome(thing: Thing, module: Any, mode: Any) -> Results | Exception:
    """The outputs of a call, whether they need gradients, and the gradients; or the error that it raises."""
    torch.random.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _outcome(thing, module, mode)
        except Exception as error:
            return error


def _outcome(thing: Thing, module: Any, mode: Any) -> Results:
    with mode():
        inputs = [_as_input(x, dtype_of(module)) for x in thing.inputs]
        out = thing.call(module, *inputs)
        outputs = out if isinstance(out, dict) else {"output": out}
        results: Results = {name: x.detach().clone() for name, x in outputs.items()}
    needs = {name: x for name, x in outputs.items() if x.requires_grad}
    results |= {f"{name} needs gradients": name in needs for name in outputs}
    if needs:
        leaves = {f"input {k}": x for k, x in enumerate(inputs) if x.is_floating_point()} | _leaves(module)
        results |= _gradients(needs, leaves)
    return results


def _as_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not x.is_floating_point():
        return x.clone()
    return x.to(dtype, copy=True).requires_grad_(torch.is_grad_enabled())


def _gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> Results:
    """The gradient of each leaf by `backward`, which calls all hooks."""
    for leaf in leaves.values():
        leaf.grad = None
    torch.autograd.backward([(x.float() * _slope(x)).sum() for x in outputs.values()])
    found = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return {
        f"gradient of {name}": torch.zeros_like(leaves[name]) if x is None else x.clone() for name, x in found.items()
    }


def _slope(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=torch.float32).cos().view(x.shape)


def _leaves(module: nn.Module) -> dict[str, Tensor]:
    """Each tensor that a gradient may reach, parameter or not."""
    found = {}
    for path, owner in module.named_modules():
        for name, x in (*owner._parameters.items(), *owner._buffers.items(), *vars(owner).items()):
            if isinstance(x, Tensor) and x.requires_grad and x.is_leaf:
                found[f"{path}.{name}"] = x
    return found


def _must_equal(found: Results | Exception, expected: Results, name: str, thing: Thing, dtype: torch.dtype) -> None:
    if isinstance(found, Exception):
        assert is_refusal(found), f"{name} computes, and what was called before raises {found!r}"
        return
    assert found.keys() == expected.keys(), f"{name} has other results: {found.keys() ^ expected.keys()}"
    for key, x in found.items():
        y = expected[key]
        if isinstance(y, Tensor) and isinstance(x, Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{name}, {key}: {x.dtype}, {x.shape}"
            far = _distance(key, x, y, thing, _scale(key, expected), dtype)
            assert far <= 1, f"{name}, {key}: {far:.3g} times further than roundings explain"
        else:
            assert x is y or x == y, f"{name}, {key}: {x}, and not {y}"


def _difference(found: Results, other: Results, thing: Thing) -> float:
    """The largest difference of two results, relative to what roundings explain."""
    if found.keys() != other.keys():
        return float("inf")
    largest = 0.0
    for key, x in found.items():
        y = other[key]
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            largest = largest if x is y or x == y else float("inf")
        elif (x.dtype, x.shape) != (y.dtype, y.shape):
            return float("inf")
        else:
            largest = max(largest, _distance(key, x, y, thing, _scale(key, found)))
    return largest


def _scale(key: str, results: Results) -> float:
    """The size of the numbers that were rounded: a gradient is a sum of gradients that may cancel."""
    kind = "gradient of" if key.startswith("gradient of") else key
    tensors = [x for name, x in results.items() if name.startswith(kind) and isinstance(x, Tensor) and x.numel()]
    return max([1.0, *(float(x.double().nan_to_num(0, 0, 0).abs().max()) for x in tensors)])


def _distance(key: str, x: Tensor, y: Tensor, thing: Thing, scale: float, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference, relative to what roundings explain."""
    if not x.numel():
        return 0.0
    if not x.is_floating_point():
        return 0.0 if x.equal(y) else float("inf")
    finite = y.isfinite()
    if not finite.equal(x.isfinite()):
        return float("inf")
    coarsest = max((dtype, x.dtype), key=lambda dtype: torch.finfo(dtype).eps)  # of double, tables may be float32
    is_gradient = key.startswith("gradient")
    bound = error_bound(thing.depth * (3 if is_gradient else 1), thing.width, coarsest, scale)
    bound *= CONDITION if is_gradient else 1
    return float(torch.where(finite, x - y, 0).double().abs().max() / bound)


CONDITION = 3.0
"""By how much a gradient may amplify roundings. Measured, not derived: at most 2.6, of standard deviations of the few
messages of a node. What is outdated is off by more than a hundred bounds."""


def is_refusal(error: Exception) -> bool:
    """Whether an error is a sentence of this library about what it does not support."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    is_ours = frame is not None and frame.tb_frame.f_code.co_filename.startswith(os.path.dirname(mpnn.__file__))
    return is_ours and isinstance(error, (ValueError, TypeError)) and len(str(error).split()) >= 5
