"""A transformer layer, its round and its update, by one compiled call (`mpnn/kernels/encoder_layer.py`).

    MessagePassing(complete(), "sum", PreNorm(dim, FeedForward(dim)), DotProduct(dim, heads))

is such a layer, with PostNorm too, over any graph in which all nodes of a sequence receive from all of them. The call
runs in inference, in float32 on a CPU, and returns the same numbers up to rounding. Its bits depend on the sequence
alone. Over `causal()` and causal documents, those of a node depend on the nodes up to itself alone. Layers as Llama's,
with nn.RMSNorm, GatedFeedForward, Rotary and shared heads of keys, run so too.

Each call reads the weights where they lie: nothing of a layer is copied. Layers in place
(`mpnn/integrations/hf/encoder_layers.py`) run by the same rules.
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
from mpnn.graph import Graph, causal
from mpnn.graph.exchange import LOCAL
from mpnn.graph.sharding import active
from mpnn.graph.topology import Topology
from mpnn.kernels.cpu import library
from mpnn.kernels.encoder_layer import Documents, EncoderLayer, Form, Weights, has_kernel
from mpnn.position import Llama3Rotary, Rotary
from mpnn.update import MLP, FeedForward, GatedFeedForward, PostNorm, PreNorm
from mpnn.update.dropout import Dropout, DropPath
from mpnn.update.maps import Linear

_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_version = Tensor._version.__get__  # type: ignore[attr-defined]


class Parts:
    """The modules and tensors of a layer as the kernel reads them, to be compared with what the layer has later.

    maps: of queries, keys, values, output, to hidden columns, back, and of gates. norms: of attention and of the
    network. shapes: of the maps' weights, [out, in]. It refers to what is inside the layer, not to the layer, which it
    must not keep alive.
    """

    def __init__(
        self,
        module: nn.Module,
        maps: Sequence[nn.Module],
        norms: Sequence[Any],
        shapes: list[tuple[int, int]],
    ) -> None:
        self.maps = maps
        self.norms = norms
        self.shapes = shapes
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
        return self.shapes[0][1]

    def weights(self) -> Weights:
        is_one = len(self.maps) == 4  # for queries, keys and values
        maps = [part for map in self.maps for part in _split(map, 3 if is_one and map is self.maps[0] else 1)]
        return Weights(
            tuple(weight for weight, _ in maps),
            tuple(bias for _, bias in maps),
            tuple(norm.weight for norm in self.norms),
            tuple(getattr(norm, "bias", None) for norm in self.norms),
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
        weights = self.weights()
        width = (self.width,)
        of_norms = (*weights.norm_weights, *weights.norm_biases)
        return (
            [tuple(weight.shape) for weight in weights.maps] == self.shapes
            and all(getattr(norm, "normalized_shape", width) == width for norm in self.norms)
            and all(weight is None or tuple(weight.shape) == width for weight in of_norms)
            and all(map(_is_readable, self._tensors))
        )


def _split(map: Any, parts: int) -> list[tuple[Tensor, Tensor | None]]:
    """The weights [out, in] and the biases of the maps that this one is, nn.Linear or GPT-2's."""
    weight, bias = (map.weight, map.bias) if isinstance(map, nn.Linear) else (map.weight.detach().mT, map.bias.detach())
    if parts == 1:
        return [(weight, bias)]
    biases = [None] * parts if bias is None else bias.chunk(parts)
    return list(zip(weight.chunk(parts), biases, strict=True))


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
"""What is known of operators. A copy of an operator does not copy it."""


_METHODS = {"project", "round", "merge", "prepare", "forward", "rounds", "_run", "_attend", "_exchanged"}


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
            return None
        known = _layer(operator, form)
        if known is None:
            return None
        _LAYERS[operator] = known
    if known.kernel is None or (torch.is_grad_enabled() and known.parts.need_gradients(x)):
        return None
    turns = _turns(operator.attention, graph, x)
    return partial(_run, known.kernel, known.parts, documents, turns)


def _run(
    kernel: EncoderLayer, parts: Parts, documents: Documents, turns: tuple[Tensor, Tensor] | None, x: Tensor
) -> Tensor:
    return kernel(x.contiguous(), parts.weights(), documents, turns)


def _form(operator: Any) -> Form | None:
    """The form of the kernel for an operator in inference; None if the operator computes something else."""
    attention = operator.attention
    update = operator.update
    if operator.training or operator.edges is not None or operator.backend != "auto":
        return None
    if any(not _METHODS.isdisjoint(vars(part)) for part in (operator, attention, update)):
        return None  # an instance has a method of its own
    if type(operator.aggregate) is not Sum or type(update) not in (PreNorm, PostNorm):
        return None
    is_post_norm = type(update) is PostNorm
    norm = type(update.norm)
    if norm not in (nn.LayerNorm, nn.RMSNorm) or type(update.ffn_norm) is not norm:
        return None
    if type(update.dropout) is not Dropout:
        return None
    if update.alpha != 1 if is_post_norm else type(update.drop_path) is not DropPath:
        return None
    if attention.to_edge is not None or attention.normalize != "softmax" or attention.softcap is not None:
        return None
    if [type(position) in (Rotary, Llama3Rotary) for position in attention.positions] not in ([], [True]):
        return None
    if any(position.dim != attention.head_dim for position in attention.positions):
        return None  # an error of the rounds
    if type(attention.scale) not in (int, float) or attention.scale <= 0:
        return None
    network = _network(update.ffn)
    if network is None or any(type(map) is not Linear for map in (*_maps(attention), *network.maps)):
        return None
    epsilons = update.norm.eps, update.ffn_norm.eps
    if None in epsilons:
        return None
    return Form(
        width=network.maps[0].in_features,
        heads=attention.heads,
        hidden=network.maps[0].out_features,
        activation=network.activation,
        pre_norm=not is_post_norm,
        epsilons=epsilons,
        scale=float(attention.scale),
        kv_heads=attention.kv_heads,
        head_width=attention.head_dim,
        rms_norm=norm is nn.RMSNorm,
        gated=len(network.maps) == 3,
    )


class _Network(NamedTuple):
    """The maps of a feed-forward network: to hidden columns, back, and of gates if it has them."""

    maps: tuple[nn.Linear, ...]
    activation: str


def _network(ffn: Any) -> _Network | None:
    """None for another network."""
    maps: tuple[nn.Linear, ...]
    if type(ffn) is GatedFeedForward:
        maps = (ffn.to_hidden, ffn.to_out, ffn.to_gate)
        function = ffn.activation
    elif type(ffn) in (FeedForward, MLP) and len(ffn) == 4 and type(ffn[2]) is Dropout:
        maps = (ffn[0], ffn[3])
        function = ffn[1]
    else:
        return None
    activation = _activation(function)
    return None if activation is None else _Network(maps, activation)


def _maps(attention: DotProduct) -> tuple[nn.Linear, ...]:
    return attention.to_query, attention.to_key, attention.to_value, attention.to_out


def _activation(function: nn.Module) -> str | None:
    """The kernel's name of an activation."""
    if type(function) is nn.GELU:
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    return {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(function))


def _layer(operator: Any, form: Form) -> _Layer | None:
    """The parts and the kernel of a layer; None if the kernel cannot read its weights."""
    if library.why_missing() is not None:
        return None
    update = operator.update
    network = _network(update.ffn)
    assert network is not None
    maps = *_maps(operator.attention), *network.maps
    parts = Parts(operator, maps, (update.norm, update.ffn_norm), form.shapes)
    if not parts.remember():
        return None
    return _Layer(form, parts, EncoderLayer(form) if has_kernel(form) else None)


def _turns(attention: DotProduct, graph: Topology | Graph | None, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of the angles by which queries and keys turn, [rows, width of a head]; None if they do not."""
    if not len(attention.positions):
        return None
    rotary = attention.positions[0]
    nodes = x.shape[-2]
    batch = x.shape[:-2].numel()
    assert isinstance(rotary, Rotary)
    bound = graph.bind(nodes, nodes) if isinstance(graph, Topology) else graph
    assert isinstance(bound, Graph)

    def make() -> tuple[Tensor, Tensor]:
        cos, sin = (part.float().squeeze(1).repeat(batch, 2) for part in rotary.angles(bound)[0])
        return cos, sin

    turns: tuple[Tensor, Tensor] = bound.cached(("turns", rotary.frequencies, batch), make)
    return turns


def _documents(graph: Topology | Graph | None, x: Tensor) -> Documents | None:
    """The sequences of x, all of whose nodes receive from each other, or from those up to themselves; None for another
    graph."""
    nodes = x.shape[-2]
    if isinstance(graph, Topology):
        graph = graph.bind(nodes, nodes)
    if not isinstance(graph, Graph) or (graph.num_dst, graph.num_src) != (nodes, nodes):
        return None
    return documents_of(graph, x.shape[:-2].numel())


def documents_of(graph: Graph, batch: int) -> Documents | None:
    """The documents of a graph for each item of a batch; None if there are none, or edges have more than their ends."""
    if graph.is_explicit or graph.exchange is not LOCAL or graph.edge_attr is not None:
        return None
    documents: Documents | None = graph.cached(("documents", batch), lambda: _as_documents(graph, batch))
    return documents


def _as_documents(graph: Graph, batch: int) -> Documents | None:
    """None if the nodes of a document are not consecutive."""
    if graph.labels is None:
        lengths = causal.documents(graph)
        return None if lengths is None else Documents(lengths * batch, is_causal=True)
    if graph.has_scattered_cliques:
        return None
    sizes = np.unique(graph.labels, return_counts=True)[1]
    return Documents(np.tile(sizes, batch).tolist())
