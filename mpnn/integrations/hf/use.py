"""`use` runs models of Hugging Face's transformers by message passing over graphs, in place; `from_hf` runs a copy."""

import copy
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mpnn.graph import Graph
from mpnn.graph.bound import BoundGraph
from mpnn.graph.topology import Topology
from mpnn.graphs.listed import as_topology, most_nodes
from mpnn.graphs.parse import text_of as written
from mpnn.integrations import maps as linear_maps
from mpnn.integrations.callers import put
from mpnn.integrations.hf import compat, encoder_layers, packing, ranks, recurrences
from mpnn.integrations.hf.builders import bound
from mpnn.integrations.hf.closures import parse
from mpnn.integrations.hf.compat import PretrainedConfig
from mpnn.integrations.hf.interface import NAME, ROLES, must_be_causal, refusal, role_of, text_of
from mpnn.integrations.hf.offset_bias import by_offset
from mpnn.integrations.hf.unpadded import is_encoder, remove_padding

Graphs = str | Topology | Graph | Mapping[Any, Any] | Callable[[int], str | Topology | Graph | None]

_OWN_MASKS = "longformer", "reformer", "xlnet", "openai-gpt"
_SHARED_MASKS = "big_bird", "bloom", "deberta", "deberta-v2", "falcon", "gptj", "mpnet", "mpt"

NATIVE = (*_OWN_MASKS, *_SHARED_MASKS)
"""Families whose attention does not dispatch; `native.py` has classes for their layers. Those of `_SHARED_MASKS` get
their masks from `AttentionMaskInterface`, or, as DeBERTa, compute them from the padding."""

_UNDISPATCHED = "BigBirdPegasusSelfAttention", "BigBirdPegasusBlockSparseAttention", "GitSelfAttention"
"""Layers that compute with a mask that other layers of their models get, and do not dispatch."""

_RECORD = "attn_implementation", "mpnn_graph", "mpnn_causal"  # what config.json keeps
_CHANGED = compat.INTERNAL, *_RECORD

_TRIAL_TOKENS = 512  # tokens over which a topology is tried at once; a run tries its own number


class Handle:
    """The handle of a model that `use` changed; its `repr` lists what runs there now. `restore()` changes it back.
    `replaced` is the topology that the model had before its own masks replaced it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replaced = ""
        self._undo: list[Callable[[], None]] = []
        self._later: list[Handle] = []
        for inner in _inner(model):
            latest = _LATEST.get(inner, lambda: None)()
            if latest is not None and self not in latest._later:
                latest._later.append(self)
            _LATEST[inner] = weakref.ref(self)

    @property
    def maps(self) -> int:
        """The number of linear maps of the model that run by the faster product."""
        return sum(map(linear_maps.runs_here, self.model.modules())) if self._undo else 0

    def restore(self) -> nn.Module:
        """Gives the model back the attention, the mask, the maps and the forward pass that it had. Later calls of `use`
        on this model, on one inside it and on one around it are undone first."""
        while self._later:
            self._later.pop().restore()
        while self._undo:
            self._undo.pop()()
        return self.model

    def __repr__(self) -> str:
        layers = [layer for part in _models(self.model) for layer in _layers(part)] if self._undo else []
        # The text of a topology that was parsed abbreviates long lists.
        masks = [str(parse(text)) if (text := text_of(layer)) else "the model's own masks" for layer in layers]
        kinds = Counter((type(layer).__name__, mask) for layer, mask in zip(layers, masks, strict=True))
        recurrent = filter(recurrences.runs_here, self.model.modules())
        kinds += Counter((type(layer).__name__, "causal(), as a recurrence") for layer in recurrent)
        lines = [f"{count} x {kind} over {text}" for (kind, text), count in kinds.items()]
        whole = sum(map(encoder_layers.runs_here, self.model.modules())) if self._undo else 0
        lines += [f"whole layers by one compiled call each: {whole}"] if whole else []
        lines += [f"no longer over {self.replaced}, which use(model, graph=...) sets again"] if self.replaced else []
        lines += [f"{maps} linear maps by the faster of torch and oneDNN"] if (maps := self.maps) else []
        return f"Handle of {type(self.model).__name__}: " + ("; ".join(lines) or "nothing is changed")


_LATEST: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Handle]] = weakref.WeakKeyDictionary()
"""The handle of the latest call of `use` that changed a model of transformers."""


def use(
    model: nn.Module,
    graph: Graphs | None = None,
    *,
    causal: bool = True,
    unpad: bool | None = None,
    classes: Sequence[type[nn.Module]] = (),
    maps: bool = True,
    layers: bool = True,
    frozen: bool = False,
) -> Handle:
    """Runs the attention layers of a transformers model by `mpnn.ops.attend`, its linear maps by the faster product,
    and whole layers by one compiled call, in place.

    Args:
        model: any model whose attention layers dispatch through transformers' `AttentionInterface`, a Longformer,
            BigBird, Reformer, XLNet, OpenAI GPT, MPNet, DeBERTa, GPT-J, BLOOM, MPT or Falcon, or a module that contains
            such models, such as a `SentenceTransformer` or a `CrossEncoder`.
        graph: None for the masks that the model has (causal, windows, chunks, padding, packed sequences), also where an
            earlier call or a checkpoint gave it a topology (`model.config.mpnn_graph` keeps that one); or a topology
            that replaces causal masks, windows and chunks, while padding and packed sequences stay as they are: a
            topology or its text, such as "causal() & window(256)"; a `Graph` of the tokens (its edges become
            `graphs.listed(...)`; a call of another number of tokens is refused, but for prefixes of a causal graph in
            a decoder); a dictionary from layer types (of
            `config.layer_types`) or layer numbers to these; or a function of the layer's number. For an
            encoder-decoder: a dictionary with some of the keys "encoder", "decoder" and "cross"; the destinations of
            "cross" are the decoder's tokens, its sources the encoder's. For a model of several towers, such as CLIP or
            LLaVA: a dictionary from "text", "vision", ... (its sub-configurations) to any of these; without it, the
            graph is the text's. Layers without an entry keep their mask.
            Positions count from the first token that is not padding, and from the start of each packed sequence.
        causal: whether a decoder, whose own masks are causal, refuses a topology with edges from later tokens, over
            which it would read the tokens that it predicts. False allows it on purpose. Encoders are not concerned.
        unpad: whether an encoder computes the tokens of a padded batch only, in all of its layers
            (`mpnn/integrations/hf/unpadded.py`). States at padding are then zeros. None: in a `SentenceTransformer` or
            `CrossEncoder` of sentence-transformers, which ignore those states, and inside modules of `classes`.
        classes: classes of your own modules around encoders that ignore their states at padding, as a pooling by the
            attention mask does. Encoders in other modules keep their padding unless `unpad` is True.
        maps: whether linear maps (`nn.Linear` and GPT-2's `Conv1D`, not their subclasses) run by oneDNN where this is
            faster than torch's product (`maps.py`): in float32 on CPU, on processors of AMD with AVX-512 or where
            `mpnn tune` measured it. They stay the same objects. `torch.jit.script` is refused until `restore()`.
        layers: whether whole layers (BERT, RoBERTa, DistilBERT, ALBERT, ViT, CLIP's and BART's encoders, GPT-2, OPT,
            Llama and others with their parts) run by one compiled call each, in inference in float32 on a CPU, over
            their own masks. Each call reads their weights where they are stored, and checks whether modules, hooks,
            numbers, configuration and code are as they were when the layer was compared with its class: after a change
            it is compared again. Calls that need more run as before: tokens after those of a cache, gradients, hooks on
            a layer's modules, `output_attentions`, autocast, a topology. So do layers whose changes could not be seen,
            with buffers, quantized weights or objects of unknown kinds.
        frozen: a promise that no weight changes. It is accepted and has no effect: layers read weights where they
            are stored, so a change counts in the next call.

    Returns:
        A handle, which lists the changed layers and whose `restore()` undoes the change. A saved model loads without
        mpnn, and computes with its family's own code. The topologies are in `config.mpnn_graph` as text, which
        `save_pretrained` saves: such a model says `attn_implementation: mpnn` in its config.json, and loads only where
        `mpnn.hf` was imported, since its own code would run over another graph. After
        `model.set_attn_implementation("sdpa")`, the model has its own masks, and so has what it saves.

    Raises:
        TypeError: if `model` is not a model of transformers, or the graph is of another type.
        ValueError: if attention layers of the model do not dispatch, or there are none; if no layer reads the graph; if
            the model has cross-attention and the graph does not say for which attention; if a topology cannot be
            written as text, depends on the length (`random`, `bigbird`), or has edges from later tokens in a decoder;
            if padding cannot be removed; if the model holds no module of `classes`.

    Warns:
        UserWarning: if only some layers read a graph that is given for all.
    """
    if not isinstance(model, nn.Module) or not (inner := _models(model)):
        given = f"the class {model.__name__}; pass a model" if isinstance(model, type) else type(model).__name__
        if isinstance(getattr(model, "model", None), nn.Module):  # a pipeline
            given += "; pass its attribute model"
        raise TypeError(f"model must be a PreTrainedModel of transformers, or contain one; got {given}")
    ignoring = _inside(model, classes)
    ignores_padding = _ignores_padding(model)
    handle = Handle(model)
    try:
        for part in inner:
            configs = _configs(part)
            handle._undo += [_keep(config) for config in configs]
            handle._undo += recurrences.adapt(part)
            handle._undo += ranks.divide(part)
            if any(map(recurrences.runs_here, part.modules())) and not _layers(part):
                if graph is not None:
                    raise ValueError(f"the layers of {type(part).__name__} are recurrences, which read no graph")
                handle._undo += _divide(part)
                continue
            if compat.has_no_attention(type(part)):
                raise ValueError(
                    f"{type(part).__name__} has no attention, so there is nothing for mpnn.hf.use to change"
                )
            handle._undo += _set_implementation(part)
            handle._undo += by_offset(part)
            handle._undo += _divide(part)
            for config in configs:
                before = config.__dict__.pop("mpnn_graph", None)
                handle.replaced = handle.replaced or ("" if graph is not None or before is None else str(before))
                config.__dict__.pop("mpnn_causal", None)
            if graph is not None:
                _set_graph(part, graph, causal)
            part.config.__dict__.pop("attn_implementation", None)
            # config.json keeps this name, unlike _attn_implementation. Native layers read masks of their own.
            if _has_graph(part) and part.config.model_type not in NATIVE:
                part.config.attn_implementation = NAME
            _check_layers(part, graph)
            asked = ignores_padding or part in ignoring
            if unpad or (unpad is None and asked and is_encoder(part.base_model)):
                handle._undo.append(remove_padding(part.base_model))
        # Without them, those of an earlier call are turned off, too.
        handle._undo += linear_maps.use(model) if maps else linear_maps.drop(model)
        handle._undo += encoder_layers.use(model) if layers else encoder_layers.drop(model)
    except BaseException:
        handle.restore()
        raise
    return handle


def _models(module: nn.Module) -> list[PreTrainedModel]:
    """The outermost models of transformers in a module."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [model for child in module.children() for model in _models(child)]


def _inner(module: nn.Module) -> list[PreTrainedModel]:
    """All models of transformers in a module, itself included."""
    return [inner for inner in module.modules() if isinstance(inner, PreTrainedModel)]


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The attention layers that this library runs."""
    if model.config.model_type in NATIVE:
        from mpnn.integrations.hf import native

        return [module for module in model.modules() if native.is_ours(module)]
    return [module for module in model.modules() if compat.dispatches(module)]


def _check_layers(model: PreTrainedModel, graph: Graphs | None) -> None:
    """Raises ValueError if no layer reads the graph, or a layer must not run over its own."""
    layers = _layers(model)
    name = type(model).__name__
    if not layers:
        raise ValueError(f"no attention layer of {name} dispatches through transformers' AttentionInterface")
    readers = [(layer, text) for layer in layers if (text := text_of(layer)) is not None]
    for text, is_causal in {(text, _is_causal(layer)) for layer, text in readers}:
        _try(parse(text), is_causal)
    others = _places(model, {layer for layer in layers if text_of(layer) is None})
    said = f"{len(readers)} of the {len(layers)} attention layers of {name} read the graph; not {others}"
    if not readers and any(getattr(config, "mpnn_graph", None) for config in _configs(model)):
        raise ValueError(f"{said}. Call mpnn.hf.use on the part of the model whose tokens have this graph")
    if others and isinstance(graph, (str, Topology, BoundGraph)):
        warnings.warn(said, stacklevel=3)


def _places(model: nn.Module, layers: set[nn.Module]) -> str:
    """The classes of some layers of a model, each with the innermost module that holds them all."""
    paths: dict[str, list[list[str]]] = {}
    for path, layer in model.named_modules():
        if layer in layers:
            paths.setdefault(type(layer).__name__, []).append(path.split("."))
    places = []
    for kind, several in paths.items():
        shared = takewhile(lambda names: len({*names}) == 1, zip(*several, strict=False))
        place = ".".join(name for name, *_ in shared)
        places.append(f"{kind} in {place}" if place else kind)
    return ", ".join(places)


def _divide(part: PreTrainedModel) -> list[Callable[[], None]]:
    """Lets the layers of a model know how each pass is divided into texts."""
    undo: list[Callable[[], None]] = []
    for model in _inner(part):
        keeps_states = any(map(recurrences.keeps_texts_apart, model.modules()))
        numbers = _own_positions(model)
        reads_positions = keeps_states or is_causal(model) or bool(numbers)
        reasons = [recurrences.refusal(model), numbers, _trigrams(model), *map(refusal, _layers(model))]
        reason = next(filter(None, reasons), "")
        undo += packing.divide(model, reads_positions, reason, keeps_states)
    return undo


def _own_positions(model: PreTrainedModel) -> str:
    """Why a model would number the tokens of packed texts along the row, or an empty string."""
    takes = any("position_ids" in inspect.signature(type(inner).forward).parameters for inner in _inner(model))
    kinds = {type(module).__name__ for module in model.modules() if "PositionalEmbedding" in type(module).__name__}
    if takes or not kinds:
        return ""
    return f"{type(model).__name__} takes no position_ids, and {min(kinds)} numbers the tokens of the whole row"


def _trigrams(model: PreTrainedModel) -> str:
    """Why embeddings of packed texts would contain tokens of others, or an empty string."""
    mixing = {type(module).__name__ for module in model.modules() if getattr(module, "trigram_input", False)}
    return f"{min(mixing)} adds to each token those before and after it in the row" if mixing else ""


def is_causal(model: PreTrainedModel) -> bool:
    """Returns whether a model has attention layers over causal masks, as decoders have."""
    return any(map(_is_causal, _layers(model)))


def _is_causal(layer: Any) -> bool:
    """Whether a topology of this layer must have no edges from later tokens."""
    return bool(getattr(layer, "is_causal", getattr(layer, "is_decoder", False))) and must_be_causal(layer)


def _try(topology: Topology, is_causal: bool) -> None:
    tokens = most_nodes(topology) or _TRIAL_TOKENS
    try:
        topology.bind(tokens)
    except ValueError:  # it takes one length only, and is tried over the tokens that come
        return
    bound(topology, tokens, is_causal)


def _keep(config: PretrainedConfig) -> Callable[[], None]:
    """Returns what gives a configuration the attributes back that it has now."""
    before = {name: config.__dict__[name] for name in _CHANGED if name in config.__dict__}

    def restore() -> None:
        for name in _CHANGED:
            config.__dict__.pop(name, None)
        config.__dict__.update(before)

    return restore


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Each configuration that the model or one of its modules reads, once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return [*{id(config): config for config in configs if isinstance(config, PretrainedConfig)}.values()]


def _set_implementation(model: PreTrainedModel) -> list[Callable[[], None]]:
    """Makes the attention layers call this library; returns what gives layers that do not dispatch their class back."""
    if model.config.model_type in NATIVE:
        from mpnn.integrations.hf import native  # imports the models of these families

        if model.config.model_type in _SHARED_MASKS:
            model.config._attn_implementation = NAME
        native.adapt(model, model.config)
        return [partial(native.restore, model)]
    stays = {type(layer).__name__ for layer in model.modules() if type(layer).__name__ in _UNDISPATCHED}
    if not stays:
        model.set_attn_implementation(NAME)
        stays = {type(inner).__name__ for inner in _inner(model) if inner.config._attn_implementation != NAME}
    if stays:
        raise ValueError(
            f"the attention of {', '.join(sorted(stays))} does not dispatch through transformers' AttentionInterface, "
            f"so it cannot be replaced; of such families mpnn has {', '.join(NATIVE)}"
        )
    new = [inner for inner in _inner(model) if "set_attn_implementation" not in vars(inner)]
    return [put(inner, "set_attn_implementation", _SetImplementation(inner)) for inner in new]


class _SetImplementation:
    """`set_attn_implementation` of a model, after which its configuration keeps no topology that no layer reads. It is
    an object, not a closure: copies of the model change themselves, and a process that unpickles the model imports
    this module, which registers the attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, *args: Any, **options: Any) -> None:
        model = self.model
        type(model).set_attn_implementation(model, *args, **options)
        for config in _configs(model):
            if config._attn_implementation != NAME:
                for name in _RECORD:
                    config.__dict__.pop(name, None)
        if model.config._attn_implementation == NAME and _has_graph(model):
            model.config.attn_implementation = NAME


def _has_graph(model: PreTrainedModel) -> bool:
    return any(getattr(config, "mpnn_graph", None) for config in _configs(model))


def _ignores_padding(module: nn.Module) -> bool:
    """Whether this is a model of sentence-transformers that reads the states of tokens only: by pooling after the
    transformer, or by the head of a classifier."""
    if not type(module).__module__.startswith("sentence_transformers."):
        return False
    kinds = [type(child).__name__ for child in module.children()]
    return type(module).__name__ == "CrossEncoder" or kinds[:2] == ["Transformer", "Pooling"]


def _inside(model: nn.Module, classes: Sequence[type[nn.Module]]) -> set[nn.Module]:
    """The modules inside those of the classes."""
    if isinstance(classes, (str, type)) or not all(isinstance(kind, type) for kind in classes):
        raise TypeError(f"classes must be classes of modules, such as [MyEncoder]; got {classes!r}")
    around = [module for module in model.modules() if isinstance(module, tuple(classes))]
    if classes and not around:
        names = ", ".join(kind.__name__ for kind in classes)
        raise ValueError(f"{type(model).__name__} holds no module of the classes {names}")
    return {inner for module in around for inner in module.modules()}


def _set_graph(model: PreTrainedModel, graph: Graphs, causal: bool) -> None:
    towers = _towers(model.config)
    named = set(graph) & set(towers) if isinstance(graph, Mapping) else set()
    if not named:
        return _set_graph_of(model, model.config.get_text_config(), graph, causal)
    assert isinstance(graph, Mapping)
    if others := set(graph) - named:
        raise ValueError(
            f"the graph has the keys {sorted(map(str, named))}, towers of {type(model).__name__}, and "
            f"{sorted(map(str, others))}; its towers are {', '.join(towers)}"
        )
    for name in sorted(named):
        _set_graph_of(model, towers[name], graph[name], causal)
        readers = {type(getattr(layer, "config", None)) for layer in _layers(model) if text_of(layer) is not None}
        if type(towers[name]) not in readers:
            raise ValueError(f"no attention layer of the {name} tower of {type(model).__name__} reads a graph")


def _towers(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    """The configurations of a model's towers, such as "text" and "vision". Layers are found by the class of their
    configuration, so that towers of one class are none."""
    parts = {name.removesuffix("_config"): getattr(config, name, None) for name in config.sub_configs}
    count = Counter(map(type, parts.values()))
    return {name: part for name, part in parts.items() if part is not None and count[type(part)] == 1}


def _set_graph_of(model: PreTrainedModel, config: PretrainedConfig, graph: Graphs, causal: bool) -> None:
    decodes = any(getattr(module, "is_causal", False) for module in model.modules())
    spec = _text_by_role(graph, model) if config.is_encoder_decoder else _text(graph, config, decodes)
    if getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{type(model).__name__} has cross-attention in a decoder of its own, to which a topology over one "
            "sequence does not apply; call mpnn.hf.use(model) without graph"
        )
    for part in _configs(model):
        if part is config or type(part) is type(config):
            part.mpnn_graph = spec
            if not causal:
                part.mpnn_causal = False


def _text_by_role(graph: Graphs, model: PreTrainedModel) -> dict[str, str]:
    """The graphs of an encoder-decoder as `config.mpnn_graph` stores them."""
    if not isinstance(graph, Mapping) or not set(graph) <= set(ROLES):
        raise ValueError(
            f"{type(model).__name__} has an encoder, a decoder and cross-attention; graph must be a dictionary with "
            f"some of the keys {', '.join(ROLES)}, each a topology or its text; got {graph!r}"
        )
    layers = [module for module in model.modules() if hasattr(module, "is_decoder") and hasattr(module, "is_causal")]
    if missing := set(graph) - {role_of(module) for module in layers}:
        raise ValueError(f"the attention layers of {type(model).__name__} do not say which are {sorted(missing)[0]}")
    return {role: _written(topology, role == "decoder") for role, topology in graph.items()}


def _text(graph: Graphs, config: PretrainedConfig, decodes: bool) -> str | dict[str, str]:
    """The graph as `config.mpnn_graph` stores it: text, or text by layer type or number. `decodes`: texts may be
    prefixes of the one that a `Graph` is of."""
    if isinstance(graph, (str, Topology, BoundGraph)):
        return _written(graph, decodes)
    if callable(graph):
        by_layer = {k: graph(k) for k in range(config.num_hidden_layers)}
        return {str(k): _written(topology, decodes) for k, topology in by_layer.items() if topology is not None}
    if not isinstance(graph, Mapping):
        raise TypeError(f"graph must be a topology, its text, a dictionary or a function; got {type(graph).__name__}")
    types = set(getattr(config, "layer_types", None) or ())
    numbers = {str(k) for k in range(config.num_hidden_layers)}
    if unknown := [k for k in graph if str(k) not in types | numbers]:
        raise ValueError(
            f"there is no layer type or number {unknown[0]!r}; there are "
            f"{', '.join([*sorted(types), f'0 to {config.num_hidden_layers - 1}'])}"
        )
    return {str(k): _written(topology, decodes) for k, topology in graph.items()}


def _written(topology: str | Topology | Graph, decodes: bool = False) -> str:
    """A topology as text that can be read back. A `Graph` is never cut, but a prefix of a text that is decoded has the
    edges that it has in the whole text."""
    if isinstance(topology, BoundGraph):
        topology = as_topology(topology, prefixes=decodes and _has_no_later_sources(topology))
    if isinstance(topology, str):
        parse(topology)
        return topology
    if not isinstance(topology, Topology):
        raise TypeError(f"a graph must be a topology or its text; got {type(topology).__name__}")
    if (text := written(topology)) is None:
        raise ValueError(f"{topology} cannot be saved as text; register its builder with mpnn.graphs.register")
    return text


def _has_no_later_sources(graph: Any) -> bool:
    # Others, by item and head, are refused.
    return isinstance(graph, Graph) and bool((graph.edge_index[0] <= graph.edge_index[1]).all())


def from_hf(
    hf_model: PreTrainedModel,
    graph: Graphs | None = None,
    *,
    causal: bool = True,
    unpad: bool | None = None,
    maps: bool = True,
    layers: bool = True,
) -> Any:
    """A copy of a transformers model whose attention layers run here: the same class, call, weights and outputs.

    Args:
        hf_model: the model, which stays as it is.
        graph, causal, unpad, maps, layers: as for `use`, which changes a model in place.

    Raises:
        TypeError: if `hf_model` is not a model of transformers.
        ValueError: if its weights are on the meta device; and as `use`.
    """
    if not isinstance(hf_model, PreTrainedModel):
        raise TypeError(f"from_hf takes a model of transformers, such as BertModel; got {type(hf_model).__name__}")
    if meta := [name for name, weight in hf_model.named_parameters() if weight.is_meta]:
        raise ValueError(f"from_hf takes weights that are there; {meta[0]} is on the meta device. Load them before")
    return use(copy.deepcopy(hf_model), graph, causal=causal, unpad=unpad, maps=maps, layers=layers).model
