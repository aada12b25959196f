"""The functional interface: attention and aggregation over a graph, without layers or parameters."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, overload

import torch
from torch import Tensor, nn

from mpnn import engine
from mpnn.aggregate import NAMED, SUM, Aggregator, Index, Max, Mean, Min, Name, Sum, Var, aggregator, plain_sum
from mpnn.graph import Graph
from mpnn.graph.bound import BoundGraph
from mpnn.graph.edge_tables import BiasTable, PerEdge
from mpnn.graph.exchange import LOCAL, AttendCall, Layer, Terms
from mpnn.graph.modes import uncompiled
from mpnn.graph.sharding import ACTIVE, active
from mpnn.graph.topology import Topology
from mpnn.graphs import jagged
from mpnn.graphs.explicit import edges_into
from mpnn.round import NodeBias as NodeBias, Normalize, Round, validation
from mpnn.round.needs import class_of
from mpnn.scores import Dot, check_scale

if TYPE_CHECKING:
    from typing_extensions import Unpack

Reduce = Name | Aggregator | Callable[[Tensor, Index], Tensor]
"""The name of an aggregator, an aggregator, or a function of messages and index."""


class _AttendOptions(TypedDict, total=False):
    """The options of `attend` that do not change what it returns."""

    bias: PerEdge | NodeBias | tuple[PerEdge | NodeBias, ...] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    normalize: Normalize
    dropout: float
    backend: str
    log_gate: Tensor | None
    beta: Tensor | None
    state: Tensor | None
    reduce: Reduce
    mix_logits: Tensor | None
    mix_weights: Tensor | None
    edge_value: PerEdge | None


@overload
def attend(
    graph: Graph | Topology,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_weights: Literal[False] = False,
    return_lse: Literal[False] = False,
    return_state: Literal[False] = False,
    **options: "Unpack[_AttendOptions]",
) -> Tensor: ...


@overload
def attend(
    graph: Graph | Topology,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_weights: Literal[True],
    **options: "Unpack[_AttendOptions]",
) -> tuple[Tensor, Tensor]: ...


@overload
def attend(
    graph: Graph | Topology,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **options: "Unpack[_AttendOptions]",
) -> tuple[Tensor, Tensor]: ...


@overload
def attend(
    graph: Graph | Topology,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_state: Literal[True],
    **options: "Unpack[_AttendOptions]",
) -> tuple[Tensor, Tensor]: ...


@overload
def attend(
    graph: Graph | Topology,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_weights: bool = False,
    return_lse: bool = False,
    return_state: bool = False,
    **options: "Unpack[_AttendOptions]",
) -> Any: ...


def attend(
    graph: Graph | Topology,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: PerEdge | NodeBias | tuple[PerEdge | NodeBias, ...] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    normalize: Normalize = "softmax",
    dropout: float = 0.0,
    backend: str = "auto",
    return_weights: bool = False,
    return_lse: bool = False,
    log_gate: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    reduce: Reduce = "sum",
    mix_logits: Tensor | None = None,
    mix_weights: Tensor | None = None,
    edge_value: PerEdge | None = None,
) -> Any:
    """Computes dot-product attention along the edges of a graph (Vaswani et al. 2017, eq. 1, over any graph).

        w_ij = softmax_j( cap(scale * <query_i, key_j>) + bias_ij )   over the in-neighbors j of i
        out_i = sum_j w_ij * value_j                                  or another aggregate of w_ij * value_j

    cap(l) is softcap * tanh(l / softcap) (Gemma 2), or l without softcap.

    Args:
        graph: a Graph; or for jagged features the topology of each sequence, or a Graph over all their nodes.
        query: [..., N_dst, H, D]. key: [..., N_src, H_kv, D]. value: [..., N_src, H_kv, D_v]; H a multiple of H_kv. All
            three may be jagged, [B, j, H, D] (`torch.nested`).
        bias: [E, H] or [E, 1] in the caller's edge order; a `BiasTable`, which holds a bias for each edge type; or a
            `NodeBias`, numbers of the two ends of an edge. A tuple of these is their sum.
        scale: default 1 / sqrt(D).
        softcap: a positive number that bounds the products.
        sinks: [H], the logit of one more source of each destination, whose value is 0 (gpt-oss; Xiao et al. 2023,
            arXiv:2309.17453): the weights of a row add up to less than 1. For normalize="softmax".
        normalize: "softmax"; "softmax_dst", over the destinations of each source (slot attention, Locatello et al.
            2020, arXiv:2006.15055); "sigmoid" or "none"; "sparsemax" (Martins and Astudillo 2016, arXiv:1602.02068) or
            "entmax15" (Peters et al. 2019, arXiv:1905.05702), which give sources of low logits the weight 0.
        dropout: probability that a weight is dropped; the mask is drawn from torch's default generator.
        backend: "auto", or the name of a backend. A named backend runs, or raises an error that states the reason.
        return_weights: also return the weights before dropout, [..., E, H] in the caller's edge order.
        return_lse: also return the log-sum-exp of the logits, [..., N_dst, H], -inf without in-neighbors: `merge` needs
            it. Not with sinks or return_weights.
        log_gate, beta, state, return_state: a recurrence, for normalize="none" over `causal()`, or `causal() &
            documents(lengths)`, where each document starts again. log_gate [..., N, H] (RetNet, Mamba-2) or
            [..., N, H, D] (GLA): the logarithms of gates; an edge j -> i also weighs the product of the gates of the
            nodes after j up to i. beta [..., N, H]: the delta rule (Yang et al. 2024, arXiv:2406.06484), a node stores
            beta times what its key does not read from the state yet. state [..., H, D, D_v]: the sum of key^T value
            before the first node, which a later call continues; return_state returns it after the last node. Heads may
            share queries as they share keys.
        reduce: how the weighted values of a destination are aggregated: a name ("max", "std", ...), an object with
            `reduce(messages, index)`, or a function of (messages, index). Messages are [E, ..., H, D_v].
        mix_logits, mix_weights: [H, H], maps of the heads of each edge: of its logits, biases included, before they are
            normalized, and of its weights (talking heads, Shazeer et al. 2020, arXiv:2003.02436).
        edge_value: [E, H, D_v] in the caller's edge order, or an `EmbeddingTable`: added to the value of an edge's
            source. With values of zeros, the value depends on the edge only.

    Within `mpnn.distributed.sharded`, the graph is the whole graph, and query, key and value are those of this
    process's nodes; or the graph is a part, `partition(graph).shard()`.

    Returns:
        out [..., N_dst, H, D_v] (wider for an aggregator of several numbers), or (out, weights), or (out, lse), or
        (out, state), which is float32 for 16-bit features. A destination without in-neighbors gets zeros.

    Raises:
        ValueError, TypeError: if shapes, dtypes or devices do not fit together, the named backend cannot run this, or
            nodes are divided over processes and the options are not served there.
    """
    if validation.types(graph, query, key, value):
        keywords: dict[str, Any] = {
            "bias": bias,
            "scale": scale,
            "softcap": softcap,
            "sinks": sinks,
            "normalize": normalize,
        }
        keywords |= {"dropout": dropout, "backend": backend, "log_gate": log_gate, "beta": beta, "state": state}
        keywords |= {"return_weights": return_weights, "return_lse": return_lse, "return_state": return_state}
        keywords |= {"reduce": reduce, "mix_logits": mix_logits, "mix_weights": mix_weights, "edge_value": edge_value}
        return _over_sequences(graph, (query, key, value), keywords)
    if TYPE_CHECKING:
        assert isinstance(graph, Graph)
    if scale is None:
        scale = max(query.shape[-1], 1) ** -0.5
    elif type(scale) is not float or not -math.inf < scale < math.inf:  # two calls fewer for a plain number
        check_scale(scale)
    of_recurrence = (log_gate, beta, state, return_state)
    of_edges = (mix_logits, mix_weights, edge_value)
    options = (bias, softcap, sinks, normalize, dropout, return_weights, return_lse, *of_recurrence, reduce, *of_edges)
    compiles = torch.compiler.is_compiling()
    divides = not compiles and ((ACTIVE and active() is not None) or graph.exchange is not LOCAL)
    if options == _NO_OPTIONS and not divides:
        graph = _traced(graph, value) if compiles else graph
        return engine.run(Round(graph, value, Dot(query, key, float(scale))), backend)[0]
    maps = (("mix_logits", mix_logits), ("mix_weights", mix_weights))
    for name, x in (("log_gate", log_gate), ("beta", beta), ("state", state), *maps):
        if x is not None:
            validation.tensor(name, x)

    aggregate = plain_sum() if isinstance(reduce, str) and reduce == "sum" else _aggregator(reduce)

    def build(query: Tensor, key: Tensor, value: Tensor, graph: Graph) -> Round:
        return Round(
            graph,
            value,
            Dot(query, key, float(scale), softcap=softcap),
            bias=() if bias is None else cast(Any, bias if type(bias) is tuple else (bias,)),
            normalize=normalize,
            dropout=dropout,
            reduce=aggregate,
            return_weights=return_weights,
            return_lse=return_lse,
            sinks=sinks,
            log_gate=log_gate if log_gate is None or log_gate.dim() > value.dim() - 1 else log_gate.unsqueeze(-1),
            beta=beta,
            state=state,
            return_state=return_state,
            mix_logits=mix_logits,
            mix_weights=mix_weights,
            edge_value=edge_value,
        )

    if divides:
        unserved = (
            return_weights,
            return_lse,
            *of_recurrence,
            class_of(aggregate) is not Sum,
            mix_logits,
            mix_weights,
            edge_value,
        )
        if unserved != (False, False, None, None, None, False, False, None, None, None) or type(bias) not in (
            type(None),
            BiasTable,
        ):
            raise ValueError(
                "over a part of a graph, attend takes a bias by edge type (BiasTable), scale, softcap, sinks, "
                "normalize, dropout and backend; call it outside of mpnn.distributed.sharded for other options"
            )
        call = AttendCall(query.shape[-2], key.shape[-2], value.shape[-1], normalize, sinks)
        return _over_parts(call, build, graph, (query, key, value), backend)
    round = build(query, key, value, _traced(graph, value))
    out, more = engine.run(round, backend)
    return (out, more) if return_weights or return_lse or return_state else out


@uncompiled
def _over_sequences(graph: Graph | Topology, features: tuple[Tensor, Tensor, Tensor], options: dict[str, Any]) -> Any:
    """`attend` over jagged features: what has a number for each query is jagged, too."""
    query, key, _ = features
    terms = [jagged.values_of(name, x) for name, x in zip(("query", "key", "value"), features, strict=True)]
    options |= {name: jagged.values_of(name, options[name]) for name in ("log_gate", "beta")}
    graph = jagged.graph_of(graph, query, key)
    if isinstance(graph, Topology):
        graph = graph.bind(len(terms[0]), len(terms[1])).to(query.device)
    result = attend(graph, *terms, **options)
    if isinstance(result, Tensor):
        return jagged.like(result, query)
    out, more = result
    return jagged.like(out, query), jagged.like(more, query) if options["return_lse"] else more


# The defaults of all keywords but scale and backend: a keyword added to `attend` takes part in the comparison.
_NO_OPTIONS = tuple(
    p.default
    for p in signature(attend).parameters.values()
    if p.kind is p.KEYWORD_ONLY and p.name not in ("scale", "backend")
)


def merge(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint sets of sources to the attention over all of them.

        lse = log sum_k exp(lse_k)        out = sum_k exp(lse_k - lse) out_k

    A long context can thus be computed in pieces, and a shared prefix once (Milakov & Gimelshein 2018,
    arXiv:1805.02867; Dao et al. 2022).

        merge([ops.attend(part, query, key[first:last], value[first:last], return_lse=True) for ...])

    Args:
        parts: (out [..., N_dst, H, D_v], lse [..., N_dst, H]) of each set, as `attend(return_lse=True)` returns them.

    Returns:
        (out, lse) of the union.
    """
    outs, sums = zip(*parts, strict=True)
    every = torch.stack(sums)
    largest = every.detach().amax(0)
    largest = largest.masked_fill(largest.isinf(), 0.0)
    shares = (every - largest).exp()
    total = shares.sum(0)
    some = total > 0
    total = torch.where(some, total, torch.ones_like(total))
    merged = sum((share / total)[..., None] * out for share, out in zip(shares, outs, strict=True))
    return cast(Tensor, merged).to(outs[0].dtype), torch.where(some, largest + total.log(), -torch.inf)


def aggregate(
    graph: Graph | Topology,
    x: Tensor,
    reduce: Reduce = "sum",
    *,
    weight: Tensor | None = None,
    normalized: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Aggregates features over in-neighbors: `out_i = reduce_j( weight_ij * x_j )`.

    Args:
        graph: a Graph; or for jagged x the topology of each sequence, or a Graph over all its nodes.
        x: [..., N_src, F], or jagged, [B, j, F].
        reduce: a name ("sum", "mean", "max", ...), an object with `reduce(messages, index)`, or a function of
            (messages, index). Messages are [E, batch..., 1, F]. See `mpnn.aggregate`; its `per_node` is for
            aggregators that rank messages.
        weight: in the caller's edge order: [E] or [E, 1], one for each edge; or [E, F] or [..., E, F], one for each
            edge and feature, for "sum", "mean", "max", "min" and "var". `csr` writes no tensor of E x F products.
        normalized: divides the sum of a destination by that of its weights, each feature by its own: the weighted mean,
            as of the gates of GatedGCN (Bresson & Laurent 2018, arXiv:1711.07553). A sum of 0 divides nothing. For
            reduce="sum" with weights.

    Returns:
        [..., N_dst, F]; F is wider if the aggregator returns several numbers per feature. Destinations without
        in-neighbors get zeros. It can be differentiated any number of times, by x and weight.
    """
    if isinstance(x, Tensor) and x.layout is torch.jagged:
        return _aggregate_sequences(graph, x, reduce, weight, normalized, backend)
    if not isinstance(graph, BoundGraph):
        validation.graph(graph)
    if TYPE_CHECKING:
        assert isinstance(graph, Graph)
    if ACTIVE:
        _refuse_divided_nodes()
    if torch.compiler.is_compiling():
        graph = _traced(graph, x)
    validation.features("x", x, "sources", 1, graph)
    bias: tuple[PerEdge, ...] = ()
    aggregate = _aggregator(reduce)
    width = 1
    if weight is not None:
        width = _weight_width(weight, graph.num_edges, x)
        if width > 1 and class_of(aggregate) not in (Sum, Mean, Max, Min, Var):
            raise ValueError(
                f"{type(aggregate).__name__} may compare the features of a message, and weight has one number for each "
                'of them; the aggregators for such weights are "sum", "mean", "max", "min" and "var"'
            )
        bias = (weight if weight.dim() > 1 else weight.view(-1, 1),)
    if normalized and (weight is None or class_of(aggregate) is not Sum):
        raise ValueError(f'normalized divides by the sums of weights: pass weight, and reduce="sum"; got {reduce!r}')
    dim = -1 if width > 1 else -2  # with a weight for each feature, each is a head of width 1
    round = Round.of_messages(graph, x.unsqueeze(dim))
    round.bias = bias
    round.reduce = aggregate
    out = engine.run(round, backend)[0].squeeze(dim)
    return out / _sums_of_weights(graph, bias[0], backend) if normalized else out


@uncompiled
def _aggregate_sequences(
    graph: Graph | Topology, x: Tensor, reduce: Any, weight: Tensor | None, normalized: bool, backend: str
) -> Tensor:
    """`aggregate` over jagged features."""
    values = jagged.values_of("x", x)
    graph = jagged.graph_of(graph, x, x)
    if isinstance(graph, Topology):
        graph = graph.bind(len(values)).to(values.device)
    return jagged.like(aggregate(graph, values, reduce, weight=weight, normalized=normalized, backend=backend), x)


def _sums_of_weights(graph: Graph, weight: Any, backend: str) -> Tensor:
    """The sums of weights [..., E, F] at each destination, [..., N_dst, F]; 1 where they are 0."""
    into = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
    sums = aggregate(into, weight, "sum", backend=backend)
    return torch.where(sums == 0, torch.ones_like(sums), sums)


def _weight_width(weight: Tensor, num_edges: int, x: Tensor) -> int:
    """The width of weights for features x, 1 or F. Raises ValueError or TypeError if they do not fit."""
    validation.tensor("weight", weight)
    validation.floating("weight", weight, f": call .to({x.dtype})")
    features = x.shape[-1]
    fits = weight.dim() > 1 and weight.shape[-2] == num_edges and weight.shape[-1] in (1, features)
    if weight.shape != (num_edges,) and not (fits and weight.shape[:-2] in ((), x.shape[:-2])):
        raise ValueError(
            f"weight must have shape [{num_edges}], one for each edge, or [{num_edges}, {features}], one for each edge "
            f"and feature, also after the dimensions {list(x.shape[:-2])} of x; got {list(weight.shape)}"
        )
    return 1 if weight.dim() == 1 else weight.shape[-1]


def _over_parts(call: AttendCall, build: Callable[..., Round], graph: Graph, terms: Terms, backend: str) -> Tensor:
    """`attend` over this process's part of a graph."""
    query, key, _ = terms
    layer = Layer(call, SUM, False, False, False, query.dtype, query.shape[:-3])
    sharding = active()
    if sharding is not None and graph.stack:
        raise ValueError(f"{graph} differs by item and head, and its nodes are not divided over processes")
    if sharding is not None and graph.exchange is LOCAL:
        graph = sharding.part(graph, query.shape[-3], key.shape[-3], layer).to(query.device)
    validation.transport(graph.exchange, layer)
    rounds = graph.exchange.terms(terms, build, graph)
    return graph.exchange.run(rounds, partial(engine.run, backend=backend))[0]


def _refuse_divided_nodes() -> None:
    """Raises ValueError while nodes are divided over processes: a function would see those of this process alone."""
    if active() is not None:
        raise ValueError(
            "ops.aggregate, models of PyTorch Geometric in place, and readouts of graphs see the nodes of one process "
            "alone: call them outside of mpnn.distributed.sharded. Inside it, layers of MessagePassing, ops.attend and "
            "models of transformers in place (mpnn.hf.use) are divided"
        )


def standard_operators(program: "torch.export.ExportedProgram") -> "torch.export.ExportedProgram":
    """Returns a program of `torch.export` with matrix products, masks, gathers and scatters in place of this library's
    operator, so that it runs without Python: in an AOTInductor package, or after another conversion.
    `torch.onnx.export` applies it automatically.

    It computes all pairs of a topology, and each edge of edges that are an input; it is not differentiated.

    Raises:
        NotImplementedError: a layer has an option that standard operators do not support. The message names it.
    """
    from mpnn.engine.compile import standard  # imports torch's compiler

    return program.run_decompositions({torch.ops.mpnn.run.default: standard.run})


def _traced(graph: Graph, x: Tensor) -> Graph:
    """The graph, or its stand-in while a program is traced."""
    return (
        engine.traced_graph(graph, graph.num_dst, graph.num_src, x.device) if torch.compiler.is_compiling() else graph
    )


def _aggregator(reduce: str | Any | Callable[..., Tensor]) -> Any:
    if torch.compiler.is_compiling():
        from mpnn.engine.compile.form import aggregator_of

        return aggregator_of(reduce)
    known = _WITHOUT_STATE.get(reduce) if type(reduce) is str else None
    return aggregator(reduce) if known is None else known


# A step compares aggregators by identity first, so the functions of a name share one.
_WITHOUT_STATE = {name: shared for name, make in NAMED.items() if not isinstance(shared := make(), nn.Module)}
