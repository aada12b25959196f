"""What computes: the things of the law of change, from the registries of operators, models, families and convolutions.

A thing makes a module, always with the same weights, and calls it. Functions without weights, such as those of
FlexAttention, are in modules whose queries, masks and lengths are parameters and buffers.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from every_model import CAUSAL, GRAPHS, ROWS, VOCABULARY, World
from torch import Tensor, nn
from torch.nn.attention import flex_attention as of_torch

from mpnn import MessagePassing, aggregate, attention, flex, graphs, ops, position, update, varlen
from mpnn.graph import Graph
from mpnn.integrations import natten, xformers

DIM, HEADS, EDGE, TYPES, NODES, HIDDEN = 64, 2, 2, 3, 17, 128
HEAD = DIM // HEADS


class Thing(NamedTuple):
    """`make()` returns a module and `call(module, *inputs)` its outputs. `peer()` returns a module with the same
    weights that computes the same by code that keeps nothing. `depth` and `width` bound the roundings.
    `is_loose`: the peer may draw other random numbers, and round in other places under autocast."""

    make: Callable[[], nn.Module]
    call: Callable[..., Tensor | dict[str, Tensor]]
    peer: Callable[[], nn.Module] | None = None
    inputs: tuple[Tensor, ...] = ()
    depth: int = 2
    width: int = HIDDEN
    is_loose: bool = False


def dtype_of(module: Any) -> torch.dtype:
    """The dtype of inputs for a module."""
    tensors = [*module.parameters(), *module.buffers()]
    return next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The module, with weights that all matter: tables and biases begin at zero."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build().eval()
        with torch.no_grad():
            for weight in module.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    return module


def by_specification(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with all operators on lists of edges."""
    module = _seeded(build)
    for inner in module.modules():
        if isinstance(inner, MessagePassing):
            inner.backend = "edge_list"
    return module


# --------------------------------------------------------------------------------------------------------- operators

X = drawn(NODES, DIM)


def edges() -> Graph:
    """A list of edges with attributes and types; node 0 has no in-neighbors."""
    random = torch.Generator().manual_seed(1)
    ends = torch.stack([torch.randint(n, NODES, (60,), generator=random) for n in (0, 1)]).unique(dim=1)
    count = ends.shape[1]
    return graphs.from_edges(
        ends, NODES, edge_attr=drawn(count, EDGE, seed=2).sigmoid(), edge_type=torch.arange(count) % TYPES
    )


def weighted_edges() -> Graph:
    graph = edges()
    assert graph.edge_attr is not None
    return graphs.from_edges(graph.edge_index, NODES, edge_attr=graph.edge_attr[:, 0])


class Sent(nn.Module):
    """A message for each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2 * DIM + EDGE, DIM)

    def forward(self, dst: Tensor, src: Tensor, edge: Tensor) -> Tensor:
        return self.map(torch.cat([dst, src, edge.expand(*src.shape[:-1], -1)], -1))


NEEDED: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("dim", "in_dim", "out_dim", "channels"), lambda: DIM),
    **dict.fromkeys(("coordinates", "edge_dim"), lambda: EDGE),
    "heads": lambda: HEADS, "size": lambda: 4, "top": lambda: 2, "k": lambda: 3, "kernels": lambda: 2,
    "relations": lambda: TYPES, "encode": lambda: nn.Linear(DIM, DIM + 2), "vector_dim": lambda: 2, "function": Sent,
    "max_distance": lambda: 3, "activation": lambda: nn.Tanh(), "alpha": lambda: 1.5, "q": lambda: 0.3,
    "ffn": lambda: update.FeedForward(DIM, HIDDEN), "filter": lambda: nn.Sequential(nn.Linear(EDGE, DIM), nn.SiLU()),
}  # fmt: skip
"""A value for each name of a parameter that a part of the operator needs."""
OTHER: dict[str, Callable[[], Any]] = {
    "negative_slope": lambda: 0.4, "dropout": lambda: 0.3, "drop_path": lambda: 0.3, "edge_dim": lambda: EDGE,
    "activation": lambda: torch.tanh, "position": lambda: position.Rotary(HEAD), "kv_heads": lambda: 1,
    "normalize": lambda: "sigmoid", "softcap": lambda: 2.0, "head_dim": lambda: 16, "scale": lambda: 0.3,
    "features": lambda: "elu", "seed": lambda: 1,
    **dict.fromkeys(("value", "out"), lambda: nn.Linear(DIM, DIM)),
    "filter": NEEDED["filter"], "value_dim": lambda: 12, "key_heads": lambda: 1, "rank": lambda: 4,
    "temperature": lambda: 4.0, "state": lambda: 8, "groups": lambda: 2, "limits": lambda: (0.1, 1.0),
    "kernel": lambda: 3, "eps": lambda: 0.3, "norm": lambda: nn.RMSNorm, "f": lambda: nn.Linear(DIM, DIM),
    "ffn": NEEDED["ffn"], "index_heads": lambda: 2, "index_dim": lambda: 8, "hidden": lambda: HIDDEN,
    "base": lambda: 100.0, "factor": lambda: 2.0, "slow": lambda: 2.0, "fast": lambda: 5.0, "context": lambda: 64,
    "buckets": lambda: 8, "max_distance": lambda: 9, "p": lambda: 2.0,
    "limit": lambda: 1.0, "average_log_degree": lambda: 1.0, "aggregators": lambda: ("mean", "max"),
    "scalers": lambda: ("identity", "amplification"),
    "EdgeUpdate, f": lambda: nn.Sequential(nn.ReLU(), nn.Linear(EDGE, EDGE)),
}  # fmt: skip
"""Another value than the default of each option; that of a bool is its opposite."""
VALUES = {**NEEDED, **OTHER}
LEFT_OUT = {
    "source_dim": "features of sources are x",
    "query_dim": "features of destinations are x",
    "src_dim": "features of sources are x",
    "message_dim": "messages are as wide as x",
    "mapped": "features would be the parts of a recurrence",
    "TopK, edge_dim": "refused",
    "BlockTopK, edge_dim": "refused",
    "Table, relation": "relations are given",
    "EdgeFilter, filter": "given",
    "EdgeUpdate, out_dim": "f would have to map it back",
}
"""Options, of any class or of one, that are not varied."""
OF_CLASS: dict[str, dict[str, Callable[[], Any]]] = {
    "EdgeFilter": {"filter": NEEDED["filter"]},
    "Table": {"relations": NEEDED["relations"]},
    "Reversible": {"dim": lambda: DIM // 2, "ffn": lambda: update.FeedForward(DIM // 2, HIDDEN)},
    **{name: {"dim": lambda: HEAD} for name in ("Rotary", "Llama3Rotary", "Shaw")},
}
"""Values that a class needs, others than those of `NEEDED`."""


def variants(kind: type) -> Iterator[tuple[str, Callable[[], Any]]]:
    """A name and a maker of a class of the operator's parts as it is by default, and with each of its options."""
    parameters = _parameters(kind)
    needed = {p.name: NEEDED[p.name] for p in parameters if p.default is p.empty} | OF_CLASS.get(kind.__name__, {})

    def make(**options: Callable[[], Any]) -> Any:
        return kind(**{name: value() for name, value in (needed | options).items()})

    yield kind.__name__, make
    for p in parameters:
        name = f"{kind.__name__}, {p.name}"
        if p.name not in needed and LEFT_OUT.keys().isdisjoint((p.name, name)):
            value = (lambda p=p: not p.default) if isinstance(p.default, bool) else VALUES.get(name, VALUES.get(p.name))
            yield name, partial(make, **{p.name: value})


def _parameters(kind: type) -> list[inspect.Parameter]:
    """The parameters of a constructor; those behind `**options` are the base class's."""
    found: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        own = inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}  # type: ignore[misc]
        for p in own.values():
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self":
                found.setdefault(p.name, p)
        if own and not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            break
    return list(found.values())


def classes(module: Any, base: type) -> list[type]:
    """The classes that a module exports to be used, not to be derived from."""
    found = [kind for kind in vars(module).values() if inspect.isclass(kind) and issubclass(kind, base)]
    return [kind for kind in found if kind is not base and not inspect.isabstract(kind) and kind.__name__[0] != "_"]


def _graph_of(kind: type) -> Any:
    if issubclass(kind, (attention.Recurrent, attention.TopK, attention.BlockTopK)):
        return graphs.causal()
    if issubclass(kind, attention.ShortConvolution):
        return graphs.causal() & graphs.window(2)
    return weighted_edges() if kind in (attention.EdgeWeight, attention.Degree) else edges()


def operators() -> Iterator[tuple[str, Callable[[], MessagePassing]]]:
    """Each attention, aggregator, update and position, each with each of its options, and graphs of each form."""
    for kind in classes(attention, attention.Attention):
        for name, make in variants(kind):
            yield name, lambda make=make, kind=kind: MessagePassing(_graph_of(kind), "sum", None, make())
    for name in aggregate.NAMED:
        yield f"aggregate {name}", lambda name=name: MessagePassing(edges(), name, update.Activate(nn.Tanh()))
        # the messages of pna are wider than what the map of a dot product takes
        attend = _mapped if name == "pna" else _dot_product
        yield (
            f"aggregate {name} under attention",
            lambda name=name, attend=attend: MessagePassing(edges(), name, None, attend()),
        )
    for kind in classes(update, update.Update):
        for name, make in variants(kind):
            yield f"update {name}", lambda make=make: MessagePassing(edges(), "mean", make())
    for kind in classes(position, position.Position):
        for name, make in variants(kind):
            for form, graph in {"edges": edges, "causal": graphs.causal}.items():
                if form == "edges" or name.split(",")[0] not in ("Table", "EdgeBias"):
                    yield (
                        f"position {name} over {form}",
                        lambda make=make, graph=graph: MessagePassing(
                            graph(), "sum", None, _dot_product(position=make())
                        ),
                    )
    for name, make in variants(update.EdgeUpdate):
        yield name, lambda make=make: MessagePassing(edges(), "sum", update.Concat(DIM, DIM, EDGE), edges=make())
    for name, graph in STRUCTURED.items():
        yield f"attention over {name}", lambda graph=graph: MessagePassing(graph(), "sum", None, _dot_product())
        yield f"mean over {name}", lambda graph=graph: MessagePassing(graph(), "mean", update.Add(_mlp()))


def _dot_product(**options: Any) -> attention.DotProduct:
    return attention.DotProduct(DIM, HEADS, **options)


def _mapped() -> attention.Mapped:
    return attention.Mapped(nn.Linear(DIM, DIM))


def _mlp() -> update.MLP:
    return update.MLP(DIM, DIM, HIDDEN)


STRUCTURED: dict[str, Callable[[], Any]] = {
    "complete": graphs.complete, "causal": graphs.causal, "window": lambda: graphs.window(3),
    "documents": lambda: graphs.documents([5, 12]), "longformer": lambda: graphs.longformer(4, globals=1),
}  # fmt: skip


def whole_layers() -> Iterator[tuple[str, Callable[[], MessagePassing]]]:
    """Transformer layers: norms, networks, positions and graphs."""
    networks = {
        "FeedForward": lambda: update.FeedForward(DIM, HIDDEN),
        "GatedFeedForward": lambda: update.GatedFeedForward(DIM, HIDDEN),
        "MLP": lambda: update.MLP(DIM, DIM, HIDDEN),
    }
    norms = {"PreNorm": update.PreNorm, "PostNorm": update.PostNorm}
    attentions = {
        "DotProduct": lambda: attention.DotProduct(DIM, HEADS),
        "Rotary": lambda: attention.DotProduct(DIM, HEADS, kv_heads=1, bias=False, position=position.Rotary(HEAD)),
    }
    for k, (norm, kind) in enumerate(norms.items()):
        for n, (network, ffn) in enumerate(networks.items()):
            for a, (name, attend) in enumerate(attentions.items()):
                of_norm = (nn.LayerNorm, partial(nn.RMSNorm, eps=1e-5))[(k + n + a) % 2]
                graph = list(STRUCTURED.values())[(0, 1, 3)[(k + n) % 3]]
                yield (
                    f"{norm}({network}), {name}",
                    lambda kind=kind, ffn=ffn, attend=attend, of_norm=of_norm, graph=graph: MessagePassing(
                        graph(), "sum", kind(DIM, ffn(), norm=of_norm), attend()
                    ),
                )


def _operator(build: Callable[[], nn.Module]) -> Thing:
    def call(module: Any, x: Tensor) -> Any:
        out = module(x)
        return dict(zip(("nodes", "edges"), out, strict=True)) if isinstance(out, tuple) else out

    return Thing(partial(_seeded, build), call, partial(by_specification, build), (X,))


OPERATORS = {name: _operator(build) for name, build in operators()}
LAYERS = {name: _operator(build) for name, build in whole_layers()}

# ----------------------------------------------------------------------------------------------------- ready models

_WORLD = World.draw(torch.Generator().manual_seed(1), (5, 8), 3)


def _of_graphs(name: str) -> Thing:
    entry = GRAPHS[name]

    def call(module: Any) -> dict[str, Tensor]:
        dtype = dtype_of(module)
        return entry.call(
            module, replace(_WORLD, x=_WORLD.x.to(dtype, copy=True), attr=_WORLD.attr.to(dtype, copy=True))
        )

    return Thing(partial(_seeded, entry.make), call, partial(by_specification, entry.make), depth=16)


def _of_rows(name: str) -> Thing:
    entry = ROWS[name]
    rows = entry.draw(torch.Generator().manual_seed(2), 2)

    def call(module: Any) -> Tensor:
        dtype = dtype_of(module)
        return entry.call(module, *(x.to(dtype if x.is_floating_point() else x.dtype, copy=True) for x in rows))

    return Thing(partial(_seeded, entry.make), call, partial(by_specification, entry.make), depth=16)


def _cached(name: str) -> Thing:
    """Decoding in two pieces. A cache takes no gradients."""
    entry = CAUSAL[name]
    assert entry.cached is not None
    run = entry.cached
    tokens = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(3))

    def call(module: Any) -> Tensor:
        with nullcontext() if torch.is_inference_mode_enabled() else torch.no_grad():
            return run(module, list(tokens.split([5, 1], 1)))

    return Thing(partial(_seeded, entry.make), call, partial(by_specification, entry.make), depth=8)


MODELS = {name: _of_graphs(name) for name in GRAPHS} | {name: _of_rows(name) for name in ROWS}
CACHES = {f"{name} with a cache": _cached(name) for name, entry in CAUSAL.items() if entry.cached is not None}

# -------------------------------------------------------------------------------------------------------- functions


class Attending(nn.Module):
    """A function of attention in a module: queries, keys and values [N, H, D] are parameters, lengths are buffers."""

    def __init__(self, *shape: int, is_peer: bool = False, **data: Tensor) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(drawn(*shape, seed=k)) for k in range(3))
        self.is_peer = is_peer
        for name, x in data.items():
            self.register_buffer(name, x.clone())

    def other_data(self) -> dict[str, Tensor]:
        """Other lengths, offsets or edges for the buffers of these names."""
        return {}

    def by_pairs(self, mask: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        """The formula over all pairs, for queries, keys and values [..., N, H, D]."""
        with torch.autocast("cpu", enabled=False):
            logits = torch.einsum("...ihd,...jhd->...hij", self.query, self.key) * self.query.shape[-1] ** -0.5 + bias
            weights = logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()
            return torch.einsum("...hij,...jhd->...ihd", weights, self.value)


class OverGraph(Attending):
    """`mpnn.ops.attend` by a backend."""

    def __init__(self, graph: Callable[[], Graph], backend: str = "auto", is_peer: bool = False) -> None:
        super().__init__(NODES, HEADS, 8)
        self.graph = graph()
        self.backend = "edge_list" if is_peer else backend
        self.bias = nn.Parameter(drawn(self.graph.num_edges, HEADS, seed=5))

    def forward(self) -> Tensor:
        return ops.attend(self.graph, self.query, self.key, self.value, bias=self.bias, backend=self.backend)


class Summing(OverGraph):
    """`mpnn.ops.aggregate` with weights, by a backend."""

    def forward(self) -> Tensor:
        return ops.aggregate(self.graph, self.value.flatten(1), "sum", weight=self.bias[:, 0], backend=self.backend)


class Flex(Attending):
    """A block mask whose rule reads an offset and documents, and a score_mod that reads a table."""

    def __init__(self, makes_mask: Callable[..., Any] = flex.create_block_mask, is_peer: bool = False) -> None:
        documents = torch.arange(NODES) // 6
        super().__init__(1, NODES, HEADS, 8, is_peer=is_peer, offset=torch.tensor(2), documents=documents)
        self.table = nn.Parameter(drawn(2 * NODES, seed=5))
        self.mask = makes_mask(lambda b, h, i, j: self.rule(b, h, i, j), None, None, NODES, NODES, device="cpu")

    def rule(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i + self.offset) & (self.documents[i] == self.documents[j])

    def bias(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + self.table[i - j + NODES]

    def other_data(self) -> dict[str, Tensor]:
        return {"offset": self.offset + 3, "documents": torch.arange(NODES) // 4}

    def forward(self) -> Tensor:
        if self.is_peer:
            i, j = torch.arange(NODES)[:, None], torch.arange(NODES)
            zero = torch.tensor(0)
            return self.by_pairs(self.rule(zero, zero, i, j), self.bias(zero, zero, zero, i, j)).transpose(1, 2)
        query, key, value = (x.transpose(1, 2) for x in (self.query, self.key, self.value))
        return flex.flex_attention(query, key, value, lambda score, b, h, i, j: self.bias(score, b, h, i, j), self.mask)


def _spans_of(ends: Tensor) -> Tensor:
    """Which pairs of tokens are of one text, from cumulative lengths."""
    text = torch.bucketize(torch.arange(NODES), ends[1:], right=True)
    return text[:, None] == text


class Texts(Attending):
    """Texts one behind the other, told by cumulative lengths."""

    def __init__(self, is_peer: bool = False) -> None:
        super().__init__(NODES, HEADS, 8, is_peer=is_peer, ends=torch.tensor([0, 5, 6, NODES], dtype=torch.int32))

    def other_data(self) -> dict[str, Tensor]:
        return {"ends": torch.tensor([0, 2, 11, NODES], dtype=torch.int32)}

    def forward(self) -> Tensor:
        if self.is_peer:
            return self.by_pairs(_spans_of(self.ends) & torch.ones(NODES, NODES, dtype=torch.bool).tril())
        return self.run(self.query, self.key, self.value)

    def run(self, *qkv: Tensor) -> Tensor:
        return varlen.flash_attn_varlen_func(*qkv, self.ends, self.ends, NODES, NODES, causal=True)


class TextsOfTorch(Texts):
    def run(self, *qkv: Tensor) -> Tensor:
        return varlen.varlen_attn(*qkv, self.ends, self.ends, NODES, NODES, window_size=(-1, 0))


class TextsOfXformers(Texts):
    """The lengths are those of a bias, which is made in each call."""

    def run(self, *qkv: Tensor) -> Tensor:
        bias = xformers.BlockDiagonalMask.from_seqlens(self.ends.diff().tolist()).make_causal()
        return xformers.memory_efficient_attention(*(x[None] for x in qkv), bias)[0]


class TextsInJaggedTensors(Texts):
    def run(self, *qkv: Tensor) -> Tensor:
        # in inference mode, torch makes jagged tensors of tensors of this mode alone
        jagged = [torch.nested.nested_tensor_from_jagged(x * 1, self.ends.long()) for x in qkv]
        return ops.attend(graphs.causal(), *jagged).values()


class Neighborhood(Attending):
    def __init__(self, is_peer: bool = False) -> None:
        super().__init__(1, NODES, HEADS, 8, is_peer=is_peer)

    def forward(self) -> Tensor:
        if not self.is_peer:
            return natten.na1d(self.query, self.key, self.value, kernel_size=5)
        return self.by_pairs(graphs.neighborhood(NODES, kernel_size=[5], border="natten").bind(NODES).dense())


class JaggedLayer(nn.Module):
    """A layer over texts of a jagged tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MessagePassing(
            graphs.causal(), "sum", update.PreNorm(DIM, update.FeedForward(DIM)), _dot_product()
        )
        self.register_buffer("ends", torch.tensor([0, 5, 6, NODES]))

    def other_data(self) -> dict[str, Tensor]:
        return {"ends": torch.tensor([0, 2, 11, NODES])}

    def forward(self, x: Tensor) -> Tensor:
        if self.layer.backend == "edge_list":
            return torch.cat([self.layer(part) for part in x.split(self.ends.diff().tolist())])
        return self.layer(torch.nested.nested_tensor_from_jagged(x, self.ends)).values()


def _function(kind: Callable[..., nn.Module], *args: Any, **options: Any) -> Thing:
    def make(**more: Any) -> nn.Module:
        return kind(*args, **options, **more).eval()

    return Thing(make, lambda module: module(), partial(make, is_peer=True), depth=1)


FUNCTIONS: dict[str, Thing] = {
    "flex_attention over a block mask": _function(Flex),
    "flex_attention over a block mask of torch": _function(Flex, of_torch.create_block_mask),
    "flash_attn_varlen_func": _function(Texts),
    "varlen_attn": _function(TextsOfTorch),
    "memory_efficient_attention": _function(TextsOfXformers),
    "attend over jagged tensors": _function(TextsInJaggedTensors),
    "na1d": _function(Neighborhood),
    "a layer over jagged tensors": _operator(JaggedLayer)._replace(is_loose=True),
    "attend over edges by csr": _function(OverGraph, edges, "csr"),
    "attend over edges by dense": _function(OverGraph, edges, "dense"),
    "attend over a window by tiles": _function(OverGraph, lambda: graphs.window(3).bind(NODES), "tiles"),
    "aggregate over edges by csr": _function(Summing, edges, "csr"),
}

# ------------------------------------------------------------------------- convolutions of PyTorch Geometric in place

CONVOLUTIONS: dict[str, Thing] = {}
HAS_PYG = find_spec("torch_geometric") is not None
if HAS_PYG:
    import pyg_cases
    from torch_geometric.nn import GCN2Conv

    import mpnn.pyg


class OnEdges(nn.Module):
    """A convolution with the edges that it is called with, and their attributes."""

    def __init__(self, make: Callable[[], nn.Module], kind: str | None, is_peer: bool = False) -> None:
        super().__init__()
        self.conv = make()
        self.register_buffer("edge_index", pyg_cases.EDGES.clone())
        attr = pyg_cases.attributes(kind, pyg_cases.EDGES.shape[1])
        if attr is None or not attr.is_floating_point():
            self.attr = attr
        else:
            self.attr = nn.Parameter(drawn(*attr.shape).sigmoid())
        if not is_peer:
            mpnn.pyg.use(self)

    def other_data(self) -> dict[str, Tensor]:
        return {"edge_index": pyg_cases.random_edges(seed=7)}

    def forward(self, x: Tensor) -> Tensor:
        first = (x, x) if isinstance(self.conv, GCN2Conv) else (x,)
        return self.conv(*first, self.edge_index, *(() if self.attr is None else (self.attr,)))


def _convolution(make: Callable[[], nn.Module], kind: str | None) -> Thing:
    def build(**options: Any) -> nn.Module:
        return _seeded(lambda: OnEdges(make, kind, **options))

    x = drawn(pyg_cases.N, pyg_cases.IN)
    return Thing(build, lambda module, x: module(x), partial(build, is_peer=True), (x,), 2, 32, is_loose=True)


if HAS_PYG:
    # The cache of a convolution is PyTorch Geometric's, which reads the edges of the first call alone.
    kept = {name: case for name, case in pyg_cases.CASES.items() if "cached" not in name}
    CONVOLUTIONS |= {f"in place: {name}": _convolution(*case) for name, case in kept.items()}
    CONVOLUTIONS["in place: GCN2"] = _convolution(lambda: GCN2Conv(pyg_cases.IN, 0.3), None)

# --------------------------------------------------------------------------------- families of transformers in place

FAMILIES: dict[str, Thing] = {}
HAS_TRANSFORMERS = find_spec("transformers") is not None
if HAS_TRANSFORMERS:
    import company
    import hf_walk
    import transformers

    import mpnn.hf
    from mpnn.integrations.hf.use import NATIVE

_WIDE = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"), HIDDEN),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 1),
    "head_dim": HEAD,
}
"""Sizes of families that have whole layers: the compiled layer needs them."""


def tiny(model: Any) -> nn.Module:
    """A small model of a family, of sizes for which whole layers run, if its configuration allows them."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with mock.patch.dict(hf_walk._SIZES, _WIDE), torch.no_grad():
                hf_walk.output(kind_of(model), hf_walk.tiny(model))
                return hf_walk.tiny(model)
        except Exception:
            return hf_walk.tiny(model)


def kind_of(model: Any) -> str:
    return "vision" if model.main_input_name == "pixel_values" else "text"


_PRISTINE: dict[Any, nn.Module] = {}


def plain(model: Any) -> Any:
    """transformers' own model, which was not called."""
    if model not in _PRISTINE:
        _PRISTINE[model] = tiny(model)
    return copy.deepcopy(_PRISTINE[model])


def in_place(model: Any, **options: Any) -> nn.Module:
    made = plain(model)
    mpnn.hf.use(made, **options)
    return made


def _in_place(model: Any, call: Callable[[Any], Tensor], **options: Any) -> Thing:
    has_peer = options.get("graph") is None
    peer = partial(plain, model) if has_peer else None
    return Thing(partial(in_place, model, **options), call, peer, depth=64, is_loose=True)


def of_family(model: Any) -> Thing:
    return _in_place(model, partial(hf_walk.output, kind_of(model)))


def all_families() -> dict[str, Any]:
    """The classes that walk through transformers: of texts, images, decoders and recurrences."""
    found = {model.__name__: model for _, _, model in hf_walk.families()}
    decoders = [getattr(transformers, company.class_of(family), None) for family in company.families()]
    return found | {model.__name__: model for model in decoders if model is not None}


def _states(model: Any) -> Tensor:
    """The states of tokens that are not padding."""
    return model(input_ids=hf_walk._IDS, attention_mask=hf_walk._KEEP)[0][hf_walk._KEEP.bool()]


def _generated(model: Any) -> Tensor:
    """The logits of tokens that are generated one by one, with the model's cache."""
    out = model.generate(
        hf_walk._IDS, max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    return torch.stack(out.logits)


_NAMES = {
    "whole layers": (
        "AlbertForMaskedLM", "BartForConditionalGeneration", "BertLMHeadModel", "CLIPForImageClassification",
        "DistilBertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM", "ViTForImageClassification",
    ),
    "attention": (
        "DeepseekV3ForCausalLM", "Gemma2ForCausalLM", "GptOssForCausalLM", "ModernBertForMaskedLM",
        "SwinForImageClassification", "T5ForConditionalGeneration",
    ),
    "recurrences": (
        "JambaForCausalLM", "Lfm2ForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "Qwen3NextForCausalLM",
        "RecurrentGemmaForCausalLM",
    ),
    "without padding": ("AlbertModel", "BertModel", "ModernBertModel"),
    "with a cache": ("GPT2LMHeadModel", "LlamaForCausalLM", "Mamba2ForCausalLM"),
    "over a graph": ("BertModel", "LlamaForCausalLM"),
}  # fmt: skip
"""Models of each shape of code. Those that transformers runs by code of its own, `NATIVE`, are added."""


def _representatives() -> Iterator[tuple[str, Thing]]:
    for shape, names in _NAMES.items():
        for name in names:
            model = getattr(transformers, name)
            if shape == "without padding":
                thing = _in_place(model, _states, unpad=True)
            elif shape == "with a cache":
                thing = _in_place(model, _generated)
            elif shape == "over a graph":
                thing = _in_place(model, _states, graph="causal() & window(3)")
            else:
                thing = of_family(model)
            yield f"{shape}: {name}", thing
    for family in NATIVE:
        model = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[family]]
        # transformers refuses gradients of a Reformer in evaluation
        yield (
            f"native: {model.__name__}",
            _in_place(model, torch.no_grad()(_states) if family == "reformer" else _states),
        )


if HAS_TRANSFORMERS:
    FAMILIES = dict(_representatives())
