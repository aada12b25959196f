"""A transformer layer, its round and its update, by one compiled call (`mpnn/kernels/encoder_layer.py`).

    MessagePassing(complete(), "sum", PreNorm(dim, FeedForward(dim)), DotProduct(dim, heads))

is such a layer, with PostNorm too, over any graph in which all nodes of a sequence receive from all of them. The call
runs in inference, in float32 on a CPU, and returns the same numbers up to rounding. Its bits depend on the sequence
alone. Layers in place (`mpnn/integrations/hf/encoder_layers.py`) run by the same rules.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from mpnn.aggregate import Sum
from mpnn.attention.dot_product import DotProduct
from mpnn.graph import Graph
from mpnn.graph.exchange import LOCAL
from mpnn.graph.sharding import active
from mpnn.graph.topology import Topology
from mpnn.kernels.cpu import library
from mpnn.kernels.encoder_layer import Documents, EncoderLayer, Form, Weights
from mpnn.update import MLP, FeedForward, PostNorm, PreNorm
from mpnn.update.dropout import Dropout, DropPath
from mpnn.update.maps import Linear

_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_version = Tensor._version.__get__  # type: ignore[attr-defined]


class Parts:
    """The modules and tensors of a layer as the kernel reads them, to be compared with what the layer has later.

    maps: of queries, keys, values, output, to hidden columns, and back. norms: of attention and of the network. It
    refers to what is inside the layer, not to the layer, which it must not keep alive.
    """

    def __init__(self, module: nn.Module, maps: Sequence[nn.Linear], norms: Sequence[nn.LayerNorm]) -> None:
        self.maps, self.norms = maps, norms
        inner = list(module.modules())
        parameters = [part._parameters for part in (*maps, *norms)]
        self._tensors = [t for owner in parameters for t in owner.values() if t is not None]
        self._inner = inner[1:]
        self._own = [vars(part) for part in self._inner]
        self._hooks = [hooks for part in self._inner for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        # Modules and parameters by name. The numbers of objects stay theirs while this object refers to them.
        self._owners: list[dict[str, Any]] = [*(part._modules for part in inner), *parameters]
        self._ids = self._read_ids()
        self._versions: list[int] = []

    def remember(self) -> bool:
        """Keeps the versions of the weights; False if the kernel cannot read them, or something acts on the layer."""
        if not self._are_plain():
            return False
        self._versions = self._read_versions()
        return self.are_unchanged()

    @property
    def width(self) -> int:
        return self.maps[0].in_features

    def weights(self) -> Weights:
        return Weights(
            tuple(map.weight for map in self.maps),
            tuple(map.bias for map in self.maps),
            tuple(norm.weight for norm in self.norms),
            tuple(norm.bias for norm in self.norms),
        )

    def need_gradients(self, x: Tensor) -> bool:
        return x.requires_grad or any(t.requires_grad for t in self._tensors)

    def are_unchanged(self) -> bool:
        """Whether the layer has the modules and weights that it had, and a call of its modules does what their classes
        do, in inference."""
        for own in self._own:
            if own["training"] or ("forward" in own and not getattr(own["forward"], "computes_the_same", False)):
                return False
        if any(self._hooks) and not self.has_only_idle_hooks():
            return False
        return self._read_ids() == self._ids and self._read_versions() == self._versions

    def has_only_idle_hooks(self) -> bool:
        """Whether the hooks of the inner modules do nothing in this call."""
        return False

    def _read_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(_values, self._owners))))

    def _read_versions(self) -> list[int]:
        """What changes with the numbers of the weights, but for changes through `.data`."""
        return [*map(Tensor.data_ptr, self._tensors), *map(_version, self._tensors)]

    def _are_plain(self) -> bool:
        """Whether the weights have the shapes of a layer, and the kernel can read them."""
        width, hidden = self.width, self.maps[4].out_features
        shapes = [(width, width)] * 4 + [(hidden, width), (width, hidden)]
        return (
            [tuple(map.weight.shape) for map in self.maps] == shapes
            and all(norm.normalized_shape == (width,) for norm in self.norms)
            and all(map(_is_readable, self._tensors))
        )


def _is_readable(weight: Tensor) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.dtype is torch.float32
        and weight.is_cpu
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and not (weight.is_inference() or weight.is_neg())
    )


def is_special(x: Tensor) -> bool:
    """Whether the modes that are on, or the tensor, ask for more than its numbers."""
    return (
        torch.is_autocast_enabled("cpu")
        or bool(torch._C._get_tracing_state())
        or torch._C._are_functorch_transforms_active()
        or bool(torch._C._len_torch_dispatch_stack())
        or bool(torch._C._len_torch_function_stack())
        or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None)
        or x.is_neg()
        or active() is not None
        or bool(_has_any_global_hook())
    )


# ------------------------------------------------------------------------------------------------ operators


class _Layer(NamedTuple):
    form: Form
    parts: Parts
    kernel: EncoderLayer | None  # None: there is none for these sizes


_LAYERS: weakref.WeakKeyDictionary[nn.Module, _Layer] = weakref.WeakKeyDictionary()
"""The packed weights of operators. A copy of an operator packs its own, and a saved one holds none."""


_METHODS = {"project", "round", "merge", "prepare", "forward", "rounds", "_run", "_attend", "_completed", "_exchanged"}


def find(operator: Any, graph: Topology | Graph | None, x: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The function that computes the layer y [..., N, dim] of an operator from x [..., N, dim] in one call; None where
    the operator, the graph, or the modes of torch ask for something else."""
    if type(operator.attention) is not DotProduct or type(x) is not Tensor or torch.compiler.is_compiling():
        return None
    if x.dtype is not torch.float32 or not x.is_cpu or x.layout is not torch.strided:
        return None
    if x.dim() < 2 or not x.numel() or is_special(x):
        return None
    form = _form(operator)
    if form is None or x.shape[-1] != form.width:
        return None
    documents = _documents(graph, x)
    if documents is None:
        return None
    known = _LAYERS.get(operator)
    if known is None or known.form != form or not known.parts.are_unchanged():
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in operator.parameters()):
            return None  # nothing is packed for calls that do not use it
        known = _packed(operator, form)
        if known is None:
            return None
        _LAYERS[operator] = known
    if known.kernel is None or (torch.is_grad_enabled() and known.parts.need_gradients(x)):
        return None
    return partial(_run, known.kernel, documents)


def _run(kernel: EncoderLayer, documents: Documents, x: Tensor) -> Tensor:
    return kernel(x.contiguous(), documents)


def _form(operator: Any) -> Form | None:
    """The form of the kernel for an operator in inference; None if the operator computes something else."""
    attention, update = operator.attention, operator.update
    if operator.training or operator.edges is not None or operator.backend != "auto":
        return None
    if any(not _METHODS.isdisjoint(vars(part)) for part in (operator, attention, update)):
        return None  # an instance has a method of its own
    if type(operator.aggregate) is not Sum or type(update) not in (PreNorm, PostNorm):
        return None
    is_post_norm = type(update) is PostNorm
    if type(update.ffn) not in (FeedForward, MLP) or len(update.ffn) != 4 or type(update.norm) is not nn.LayerNorm:
        return None
    if type(update.dropout) is not Dropout:
        return None
    if update.alpha != 1 if is_post_norm else type(update.drop_path) is not DropPath:
        return None
    if type(update.ffn_norm) is not nn.LayerNorm or attention.to_edge is not None or len(attention.positions):
        return None
    if attention.normalize != "softmax" or attention.softcap is not None or attention.kv_heads != attention.heads:
        return None
    up, function, dropout, down = update.ffn
    activation = _activation(function)
    if type(attention.scale) not in (int, float) or attention.scale <= 0:
        return None
    if activation is None or type(dropout) is not Dropout or attention.head_dim * attention.heads != up.in_features:
        return None
    if any(type(map) is not Linear for map in (up, down, *_maps(attention))):
        return None
    epsilons = update.norm.eps, update.ffn_norm.eps
    return Form(
        up.in_features, attention.heads, up.out_features, activation, not is_post_norm, epsilons, float(attention.scale)
    )


def _maps(attention: DotProduct) -> tuple[nn.Linear, ...]:
    return attention.to_query, attention.to_key, attention.to_value, attention.to_out


def _activation(function: nn.Module) -> str | None:
    """The kernel's name of an activation."""
    if type(function) is nn.GELU:
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(function))


def _packed(operator: Any, form: Form) -> _Layer | None:
    """The layer with its weights packed; None if the kernel cannot read them."""
    if library.why_missing() is not None:
        return None
    update = operator.update
    maps = *_maps(operator.attention), update.ffn[0], update.ffn[3]
    parts = Parts(operator, maps, (update.norm, update.ffn_norm))
    if not parts.remember():
        return None
    try:
        return _Layer(form, parts, EncoderLayer(form, parts.weights()))
    except ValueError:  # there is no kernel for these sizes
        return _Layer(form, parts, None)


def _documents(graph: Topology | Graph | None, x: Tensor) -> Documents | None:
    """The sequences of x, all of whose nodes receive from each other; None for another graph."""
    nodes = x.shape[-2]
    if isinstance(graph, Topology):
        graph = graph.bind(nodes, nodes)
    if not isinstance(graph, Graph) or (graph.num_dst, graph.num_src) != (nodes, nodes):
        return None
    if graph.is_explicit or graph.labels is None or graph.exchange is not LOCAL or graph.edge_attr is not None:
        return None
    batch = x.shape[:-2].numel()
    documents: Documents | None = graph.cached(("documents", batch), lambda: _as_documents(graph, batch))
    return documents


def _as_documents(graph: Graph, batch: int) -> Documents | None:
    """The cliques of a graph, of each item of a batch; None if their nodes are not consecutive."""
    if graph.has_scattered_cliques:
        return None
    lengths = np.unique(graph.labels, return_counts=True)[1]
    return Documents(np.tile(lengths, batch).tolist())
