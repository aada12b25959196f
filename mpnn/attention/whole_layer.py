"""A transformer layer, its round and its update, by one compiled call (`mpnn/kernels/layers/encoder_layer.py`).

    MessagePassing(complete(), "sum", PreNorm(dim, FeedForward(dim)), DotProduct(dim, heads))

is such a layer, with PostNorm too, over any graph in which all nodes of a sequence receive from all of them. The call
runs in inference, in float32 on a CPU, and returns the same numbers up to rounding. Its bits depend on the sequence
alone. Over `causal()` and causal documents, those of a node depend only on the nodes up to itself. Layers as Llama's,
with nn.RMSNorm, GatedFeedForward, Rotary and shared heads of keys, run so too.

Each call reads the weights where they lie: nothing of a layer is copied. What else the call replaces, the options, the
hooks and the code of the operator and its modules, was read by a witness (`mpnn/graph/witness.py`), which reads all of
it again before each call. Layers in place (`mpnn/integrations/hf/encoder_layers.py`) run by the same rules.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mpnn.aggregate import Sum
from mpnn.attention.dot_product import DotProduct
from mpnn.graph import Graph
from mpnn.graph.bound import cached_on_graph
from mpnn.graph.exchange import LOCAL
from mpnn.graph.guard import is_plain
from mpnn.graph.sharding import ACTIVE, active
from mpnn.graph.witness import Unwatchable, Witness
from mpnn.kernels.layers import EncoderLayer, Form, Weights, refusal
from mpnn.kernels.parts import Parts
from mpnn.position import Llama3Rotary, Rotary
from mpnn.round.needs import class_of
from mpnn.update import MLP, FeedForward, GatedFeedForward, PostNorm, PreNorm
from mpnn.update.dropout import Dropout, DropPath
from mpnn.update.maps import Linear

Layer = Callable[[Tensor], Tensor]


class _Refused(Exception):
    """The reason why an operator is not a layer of the kernel."""


class _Known(NamedTuple):
    """The kernel of an operator, or the reason why it has none, valid while its witness holds. `maps`: of
    queries, keys, values, output, to hidden columns, back, and of gates. `norms`: of attention and of the network."""

    witness: Witness | None  # None if something cannot be watched
    reason: str
    kernel: EncoderLayer | None = None
    maps: Sequence[nn.Linear] = ()
    norms: Sequence[Any] = ()

    @property
    def holds(self) -> bool:
        """Whether this still holds. An operator that cannot be watched has no kernel, which stays right."""
        return self.witness is None or self.witness.holds()

    def weights(self) -> Weights:
        """The weights as they are now."""
        return Weights(
            tuple(map.weight for map in self.maps),
            tuple(map.bias for map in self.maps),
            tuple(norm.weight for norm in self.norms),
            tuple(getattr(norm, "bias", None) for norm in self.norms),
        )


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()
"""What is known of operators. A copy of an operator is another one, and a saved one has nothing of it."""


def why_not_now(x: Any, is_training: bool) -> str | None:
    """Why no compiled call computes a layer of these features in the modes that are on, a clause; None if one may.
    Operators and layers in place ask this before anything else."""
    if torch.compiler.is_compiling() or (ACTIVE and active() is not None) or not is_plain(x):
        return (
            "the compiled call takes plain features on a CPU, outside of autocast, tracing, transforms and several "
            "processes"
        )
    if x.dtype is not torch.float32 or x.dim() < 2 or not x.numel():
        return "the compiled call takes float32 features of one node or more"
    if torch.is_grad_enabled() and (x.requires_grad or is_training):
        return RECORDS
    return "a hook is registered for all modules" if _has_any_global_hook() else None


def find(operator: Any, graph: Any, x: Tensor) -> Layer | str:
    """Returns the function that computes the layer y [..., N, dim] of an operator from x [..., N, dim] in one call,
    where `why_not_now` sees no reason. Where the operator or the graph ask for something else: the reason, a clause."""
    parts = None
    if isinstance(graph, Graph) and graph.num_dst == graph.num_src == x.shape[-2]:
        parts = parts_of(graph, x.shape[:-2].numel())
    if parts is None:
        return "the graph, or one of its documents, is not complete or causal"
    if class_of(operator.aggregate) is None:
        return "the aggregate has a reduce of its own"
    known = _KNOWN.get(operator)
    if known is None or not known.holds:
        known = _KNOWN[operator] = _learn(operator)
    if known.kernel is None:
        return known.reason
    weights = known.weights()
    if x.shape[-1] != known.kernel.form.width or not known.kernel.reads(weights):
        return OTHER_WEIGHTS
    if torch.is_grad_enabled() and any(t.requires_grad for group in weights for t in group if t is not None):
        return RECORDS
    return partial(_run, known.kernel, weights, parts, _cos_sin(operator.attention, graph, x))


RECORDS = "the compiled call has no backward pass, and gradients are recorded: call the layer in torch.no_grad()"
OTHER_WEIGHTS = "features or weights have other sizes or dtypes, or weights are no plain tensors"


def _run(
    kernel: EncoderLayer, weights: Weights, parts: Parts, cos_sin: tuple[Tensor, Tensor] | None, x: Tensor
) -> Tensor:
    return kernel(x.contiguous(), weights, parts, cos_sin)


# ------------------------------------------------------------------------------------------------ operators


def _learn(operator: Any) -> _Known:
    """Reads an operator: the form of the kernel and everything that its call would replace."""
    try:
        witness = _read(operator)
    except Unwatchable as error:
        return _Known(None, f"{error}, so that a call could not know when it is outdated")
    try:
        form, maps, norms = _form(operator)
    except _Refused as reason:
        return _Known(witness, str(reason))
    if (why := refusal(form)) is not None:
        return _Known(witness, why)
    return _Known(witness, "", EncoderLayer(form), maps, norms)


def _read(operator: Any) -> Witness:
    """The witness of what an operator computes. It does not keep the operator alive."""
    witness = Witness()
    witness.attributes(operator)
    witness.method(type(operator), "_forward")
    for part, name in ((operator.attention, "merge"), (operator.update, "prepare")):
        witness.module(part)
        witness.method(type(part), name)
    return witness


def _form(operator: Any) -> tuple[Form, Sequence[nn.Linear], Sequence[Any]]:
    """The form of the kernel of an operator in inference, its maps and its norms.

    Raises:
        _Refused: if the operator computes something else.
    """
    attention = operator.attention
    update = operator.update
    is_post_norm = type(update) is PostNorm
    _require(not any(part.training for part in operator.modules()), "the compiled call is for inference: call eval()")
    _require(operator.edges is None, "edges have states")
    _require(operator.backend == "auto", f"the backend {operator.backend!r} is named")
    _require(
        type(operator.aggregate) is Sum,
        f"the compiled call sums, and the aggregate is {type(operator.aggregate).__name__}",
    )
    _require(type(update) in (PreNorm, PostNorm), f"the update is {type(update).__name__}, not PreNorm or PostNorm")
    for part in operator.modules():
        _require("forward" not in vars(part), f"an instance of {type(part).__name__} has its own forward")
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        _require(not any(hooks), f"a hook is registered on {type(part).__name__}")
    _require(not _has_own_methods(operator), "an instance has a method of its own")
    for kind in {base for part in operator.modules() for base in type(part).__mro__}:
        _require(_is_as_imported(kind), f"{kind.__name__} has other methods than it was imported with")
    norm = type(update.norm)
    _require(norm in (nn.LayerNorm, nn.RMSNorm) and type(update.ffn_norm) is norm, "the norms are of another kind")
    _require(type(update.dropout) is Dropout, "dropout is of another kind")
    _require(update.alpha == 1 if is_post_norm else type(update.drop_path) is DropPath, "residuals are scaled")
    _require(attention.to_edge is None, "edges have attributes")
    _require(
        attention.normalize == "softmax" and attention.softcap is None,
        "the compiled call is for a softmax without softcap",
    )
    _require(
        [type(p) in (Rotary, Llama3Rotary) for p in attention.positions] in ([], [True]), "positions are not rotary"
    )
    _require(all(p.dim == attention.head_dim for p in attention.positions), "rotary positions have another width")
    _require(type(attention.scale) in (int, float) and attention.scale > 0, "the scale is not a positive number")
    network = _network(update.ffn)
    maps = (attention.to_query, attention.to_key, attention.to_value, attention.to_out, *network.maps)
    _require(all(type(map) is Linear for map in maps), "a map is not a Linear")
    epsilons = update.norm.eps, update.ffn_norm.eps
    _require(None not in epsilons, "a norm has no eps")
    form = Form(
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
    return form, maps, (update.norm, update.ffn_norm)


def _require(holds: bool, reason: str) -> None:
    """Raises _Refused with the reason unless the condition holds."""
    if not holds:
        raise _Refused(reason)


def remember(*kinds: type) -> None:
    """Keeps the attributes of classes and of their bases as they are now, which is as they were imported."""
    for kind in kinds:
        for base in kind.__mro__:
            _IMPORTED.setdefault(base, dict(vars(base)))


_IMPORTED: dict[type, dict[str, Any]] = {}
remember(DotProduct, PreNorm, PostNorm, FeedForward, MLP, GatedFeedForward, Linear, Dropout, DropPath)
remember(Rotary, Llama3Rotary, nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.ReLU, nn.SiLU, nn.Sequential, nn.ModuleList)


def _is_as_imported(kind: type) -> bool:
    """Whether a class has the methods that it had when it was imported: the kernel computes what they do."""
    known = _IMPORTED.get(kind, {})
    here = vars(kind)
    if kind is nn.Module:  # other libraries add methods to it, and only its call matters
        names = {"__call__", "_call_impl", *nn.Module._wrapped_call_impl.__code__.co_names} & known.keys()
        return all(here.get(name) is known[name] for name in names)
    return {name for name in here if callable(here[name])} <= known.keys() and all(
        here.get(name) is value for name, value in known.items() if callable(value)
    )


def _has_own_methods(operator: Any) -> bool:
    """Whether an instance has an attribute in place of a method of its class."""
    parts = (operator, operator.attention, operator.update)
    return any(callable(getattr(type(part), name, None)) for part in parts for name in vars(part))


class _Network(NamedTuple):
    """The maps of a feed-forward network: to hidden columns, back, and of gates if it has them."""

    maps: tuple[nn.Linear, ...]
    activation: str


def _network(ffn: Any) -> _Network:
    """Raises _Refused for another network."""
    if type(ffn) is GatedFeedForward:
        return _Network((ffn.to_hidden, ffn.to_out, ffn.to_gate), _activation(ffn.activation))
    is_plain_network = type(ffn) in (FeedForward, MLP) and len(ffn) == 4 and type(ffn[2]) is Dropout
    _require(is_plain_network, f"the network is {type(ffn).__name__}, not FeedForward or GatedFeedForward")
    return _Network((ffn[0], ffn[3]), _activation(ffn[1]))


def _activation(function: nn.Module) -> str:
    """The kernel's name of an activation. Raises _Refused for one that it does not have."""
    if type(function) is nn.GELU:
        return "gelu" if function.approximate == "none" else "gelu_tanh"
    name = {nn.ReLU: "relu", nn.SiLU: "silu"}.get(type(function))
    _require(name is not None, f"the compiled call has no activation {type(function).__name__}")
    return str(name)


def _cos_sin(attention: DotProduct, graph: Graph, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of the angles by which queries and keys are rotated, [rows, width of a head]; None if not."""
    if not len(attention.positions):
        return None
    rotary = attention.positions[0]
    batch = x.shape[:-2].numel()
    assert isinstance(rotary, Rotary)

    def make() -> tuple[Tensor, Tensor]:
        cos, sin = (part.float().squeeze(1).repeat(batch, 2) for part in rotary.angles(graph)[0])
        return cos, sin

    cos_sin: tuple[Tensor, Tensor] = graph.cached(("cos_sin", rotary.frequencies, batch), make)
    return cos_sin


# ------------------------------------------------------------------------------------------------ graphs


@cached_on_graph
def parts_of(graph: Graph, batch: int) -> Parts | None:
    """The parts of a graph for each item of a batch; None if there are none, their nodes are not consecutive, or edges
    have more than their ends."""
    if graph.is_explicit or graph.exchange is not LOCAL or graph.edge_attr is not None:
        return None
    parts = graph.parts
    return None if parts is None or parts.order is not None else parts.repeated(batch)
