"""Validation: checks the parts of a round and names the wrong one before anything runs."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpnn.aggregate import Sum
from mpnn.graph import Graph
from mpnn.graph.bound import BoundGraph
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, numbers
from mpnn.graph.exchange import Exchange, Layer
from mpnn.graph.topology import Topology
from mpnn.round import NORMALIZERS, Round
from mpnn.round.needs import class_of, first
from mpnn.scores import Dot, Role


def transport(exchange: Exchange, layer: Layer) -> None:
    """Raises ValueError if an exchange between processes cannot serve a layer."""
    if getattr(layer.attention, "normalize", None) == "softmax_dst" and exchange.transport != "heads":
        raise ValueError(
            'normalize="softmax_dst" adds up over the destinations of each source, which are divided over processes; '
            'take transport="heads"'
        )
    if (reason := exchange.refusal(layer)) is not None:
        raise ValueError(f'transport="{exchange.transport}" cannot run this layer: {reason}; take transport="halo"')


def round(round: Round) -> None:
    """Validates a round.

    Raises:
        ValueError, TypeError: if parts of the round do not fit together; the message names the part.
    """
    if round.normalize not in NORMALIZERS:
        raise ValueError(f"there is no normalizer {round.normalize!r}; there are {', '.join(NORMALIZERS)}")
    rate("dropout", round.dropout)
    tensor("value", round.value)
    if not hasattr(round.reduce, "reduce"):
        raise TypeError(f"reduce must be an Aggregator, as mpnn.aggregate.aggregator makes one; got {round.reduce!r}")
    if any(bias is None for bias in round.bias):
        raise TypeError("bias is a tuple of tensors and tables; got None in it")
    seed = round.seed
    ids = round.head_ids
    if seed is not None and not (isinstance(seed, Tensor) and seed.dtype == torch.int64 and not seed.dim()):
        raise TypeError(f"seed must be an int64 scalar tensor, or None; got {seed!r}")
    if ids is not None and not 0 <= ids[0] <= ids[0] + round.heads <= ids[1]:
        raise ValueError(f"head_ids must be the first of {round.heads} heads and the number of all; got {ids}")
    for name in ("mix_logits", "mix_weights"):
        if (mix := getattr(round, name)) is not None:
            _beside_value(name, mix, round)
            if not round.weighted or mix.shape != (round.heads, round.heads):
                raise ValueError(
                    f"{name} must be a map of the {round.heads} heads of weighted edges, [{round.heads}, "
                    f"{round.heads}]; got {list(mix.shape)}"
                )
    if round.score is not None:
        score(round.score)
    of_nodes, of_edges = _features(round)
    for name, data, _ in of_edges:
        tensor(name, numbers(data))
    device(round.graph, round.value)
    for name, x, role in of_nodes:
        features(name, x, "destinations" if role.of == "dst" else "sources", role.trailing, round.graph)
        _same_device(name, x, round)
        if x.shape[: -1 - role.trailing] != round.batch:
            raise ValueError(
                f"{name} and value must have the same batch dimensions before the nodes; "
                f"got {list(x.shape)} and {list(round.value.shape)}"
            )
    if round.recurrent:
        recurrence(round)
    for name, x, role in of_nodes:
        heads = x.shape[-role.trailing]
        grouped = role.grouped or round.recurrent
        shares = f"{round.heads} heads cannot share {heads} heads of {name}: {heads} does not divide {round.heads}"
        reasons = {
            shares: grouped and (heads == 0 or round.heads % heads),
            f"{name} has {heads} heads, and the score has {round.heads}": not grouped and heads != round.heads,
        }
        if heads != 1 or not (grouped or name in _BIASES):
            _refuse(ValueError, reasons)
    if round.score is not None and hasattr(round.score, "validate"):
        round.score.validate(round.value)
    for name, data, role in of_edges:
        _per_edge(name, data, role.trailing, round)
    if round.sinks is not None:
        sinks(round.sinks, round)
    if round.return_lse:
        lse(round)


def recurrence(round: Round) -> None:
    """Raises ValueError or TypeError unless the round is a causal sum of values weighted by dot products alone, and its
    gates, beta and state fit."""
    score = round.score
    plain = round.normalize == "none" and class_of(round.reduce) is Sum
    plain = plain and not (round.biased or round.edge_value is not None or round.dropout or round.return_lse)
    dots = type(score) is Dot and score.softcap is None and score.edge_key is None
    reasons = {
        "log_gate, beta and states go with sums weighted by dot products alone: normalize='none', without bias, "
        "softcap, data of edges, dropout and return_lse": not (dots and plain),
        "return_state cannot be combined with return_weights": round.return_state and round.return_weights,
    }
    _refuse(ValueError, reasons)
    shapes = {"log_gate": "[..., N, H, 1 or D]", "beta": "[..., N, H]", "state": "[..., H, D, D_v]"}
    for name, shape in shapes.items():
        x = getattr(round, name)
        if x is None:
            continue
        if isinstance(x, Tensor) and x.dim() < shape.count(","):
            raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}")
        _beside_value(name, x, round)
    nodes = round.graph.num_dst
    heads = round.heads
    width = cast(Dot, score).key.shape[-1]
    _fits("log_gate", round.log_gate, (*round.batch, nodes, heads), ((1,), (width,)))
    _fits("beta", round.beta, (*round.batch, nodes, heads), ((),))
    _fits("state", round.state, (*round.batch, heads, width, round.value.shape[-1]), ((),))
    graph = round.graph  # A compiled program checks when it runs, and the plan refuses a stack.
    if isinstance(graph, Graph) and (graph.parts is None or not graph.parts.is_causal):
        raise ValueError(
            "log_gate, beta and states need causal() or causal() & documents(lengths), where the gates form a product "
            f"from node to node; got {graph}"
        )


def _refuse(kind: type[Exception], reasons: Mapping[str, object]) -> None:
    """Raises an error with the first sentence that applies."""
    if (reason := first(reasons)) is not None:
        raise kind(reason)


def _fits(name: str, x: Tensor | None, shape: tuple[int, ...], last: tuple[tuple[int, ...], ...]) -> None:
    """Raises ValueError if the shape of `x` is not `shape` followed by one of `last`."""
    if x is not None and x.shape not in [(*shape, *more) for more in last]:
        expected = " or ".join(str([*shape, *more]) for more in last)
        raise ValueError(f"{name} must have shape {expected}; got {list(x.shape)}")


def lse(round: Round) -> None:
    """Raises ValueError unless the round has logits, of a softmax, and returns nothing else with them."""
    mixes = round.mix_logits is not None or round.mix_weights is not None
    plain = round.normalize == "softmax" and round.weighted and class_of(round.reduce) is Sum and not mixes
    reasons = {
        "return_lse needs a sum weighted by a softmax, whose logits it adds up": not plain,
        "return_lse cannot be combined with return_weights": round.return_weights,
        "return_lse cannot be combined with sinks": round.sinks is not None,
    }
    _refuse(ValueError, reasons)


def sinks(sinks: Any, round: Round) -> None:
    """Raises ValueError or TypeError unless these are sinks of the round's softmax: a number for each head."""
    _beside_value("sinks", sinks, round)
    shape = f"sinks must have shape [{round.heads}], a logit for each head; got {list(sinks.shape)}"
    reasons = {
        "sinks are logits of a softmax; call with normalize='softmax', or without sinks": (
            round.normalize != "softmax" or not round.weighted
        ),
        shape: sinks.shape != (round.heads,),
    }
    _refuse(ValueError, reasons)


def _beside_value(name: str, x: Any, round: Round, advice: str = "") -> None:
    """Raises TypeError or ValueError unless this is a floating-point tensor on the device of the values."""
    tensor(name, x)
    floating(name, x, advice)
    _same_device(name, x, round)


def _same_device(name: str, x: Tensor, round: Round) -> None:
    if x.device != round.value.device:
        raise ValueError(f"{name} is on {x.device} and value on {round.value.device}; move one")


def types(over: Any, query: Any, key: Any, value: Any) -> bool:
    """Whether these are a graph, or a topology, and jagged tensors. Raises TypeError unless they are these, or a graph
    and three tensors. Tests all at once, as it runs in every call."""
    tensors = isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
    if tensors and isinstance(over, BoundGraph) and not (query.is_nested or key.is_nested or value.is_nested):
        return False
    if (
        tensors
        and torch.jagged == query.layout == key.layout == value.layout
        and isinstance(over, (BoundGraph, Topology))
    ):
        return True
    graph(over)
    for name, x in (("query", query), ("key", key), ("value", value)):
        tensor(name, x)
    return False


def graph(value: Any) -> None:
    """Raises TypeError if `value` is not a Graph; the message says how to make one."""
    if isinstance(value, Topology):
        raise TypeError(f"graph must be of a size, and {value} is a rule without one; bind it first: .bind(num_nodes)")
    if (
        not isinstance(value, BoundGraph) and not torch.compiler.is_compiling()
    ):  # a traced program has a stand-in instead
        advice = "; an edge_index becomes one by graphs.from_edges(edge_index, num_nodes)"
        if isinstance(value, Tensor) and value.is_floating_point():
            advice = " of floats; the graph comes first, then the features"
        raise TypeError(f"graph must be a Graph; got {type(value).__name__}{advice}")


def tensor(name: str, x: Any) -> None:
    """Raises TypeError if `x` is not a Tensor, or a nested one."""
    if isinstance(x, Tensor) and not x.is_nested:
        return
    if isinstance(x, Tensor):
        advice = "concatenate the sequences, x.values(), over graphs.documents(lengths), or pad them"
        raise TypeError(f"{name} must be a tensor of one shape; got a nested one: {advice}")
    if isinstance(x, (BoundGraph, Topology)):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}: features come first, then the graph")
    advice = of_data(x) or ": torch.as_tensor makes one"
    raise TypeError(f"{name} must be a tensor; got {type(x).__name__}{advice}")


def input_features(name: str, x: Any) -> None:
    """Raises TypeError if `x` is not a Tensor of floating point numbers, or a nested one."""
    tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}: pass {name}.float()")


def of_data(x: Any) -> str:
    """How to pass a graph of PyTorch Geometric that is given in place of features; empty for others."""
    return "; pass its features, data.x, and its edges, graphs.from_pyg(data)" if hasattr(x, "edge_index") else ""


Takes = tuple[int | None, torch.dtype | None]
"""The width and the dtype of the features that a module accepts; None if it accepts any, or if it is unknown."""


def takes(module: nn.Module | None) -> Takes:
    """The features accepted by a linear map, a norm, a cell, or a Sequential that begins with one of these."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    if isinstance(module, nn.Linear):
        exact = module.weight.is_floating_point() and module.weight.element_size() > 1  # else quantized
        return module.in_features, module.weight.dtype if exact else None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return module.normalized_shape[-1], None
    if isinstance(module, nn.GRUCell):
        return module.input_size, module.weight_ih.dtype
    return None, None


def fits(owner: str, name: str, x: Tensor, expected: Takes) -> None:
    """Raises ValueError if the features have another width, TypeError if they have another dtype. Under autocast the
    dtype is not checked."""
    width, dtype = expected
    if width is not None and x.shape[-1] != width:
        raise ValueError(
            f"{name} is {x.shape[-1]} wide (shape {list(x.shape)}), but {owner} was made for a width of {width}"
        )
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        other = f", or .to({x.dtype}) on the layer" if x.is_floating_point() else ""
        raise TypeError(
            f"{name} is {x.dtype} and the weights of {owner} are {dtype}; call .to({dtype}) on {name}{other}"
        )


def edge_features(owner: str, edge_attr: Tensor | None) -> Tensor:
    """The features of edges. Raises ValueError if there are none."""
    if edge_attr is None:
        raise ValueError(f"{owner} needs edge features: pass edge_attr, or a graph that has edge_attr")
    return edge_attr


def function(name: str, value: Any) -> None:
    """Raises TypeError if `value` is not a module, a function or None."""
    if value is not None and (isinstance(value, type) or not callable(value)):
        raise TypeError(f"{name} must be a module or a function; got {value!r}")


def widened(owner: str, width: int, expected: int) -> None:
    """Raises ValueError if the aggregator changed the width of a spec's messages."""
    if width != expected:
        raise ValueError(
            f"the aggregate made messages {width} wide, but {owner} takes them {expected} wide; an aggregator that "
            'widens messages, such as "pna", goes with attention=Mapped(value, out), whose out takes that width'
        )


def rate(name: str, p: Any) -> float:
    """The number `p`. Raises TypeError if it is not a number, ValueError if it is not in [0, 1)."""
    if isinstance(p, (bool, Tensor)) or not hasattr(p, "__float__"):
        raise TypeError(f"{name} must be a number in [0, 1); got {p!r}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must lie in [0, 1); got {p}")
    return float(p)


def floating(name: str, x: Tensor, advice: str = "") -> None:
    """Raises TypeError if `x` is not floating point, has fewer than 16 bits, or is not strided."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}{advice}")
    if x.dtype.itemsize < 2:
        raise TypeError(f"{name} must have 16 bits or more; got {x.dtype}: call .to(torch.bfloat16)")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got {x.layout}: call .to_dense()")


def device(graph: Graph, x: Tensor) -> None:
    """Raises ValueError if the graph and the features are on different devices."""
    if x.device != graph.device:
        raise ValueError(
            f"the graph is on {graph.device} and the features on {x.device}; call graph.to({str(x.device)!r})"
        )


_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def features(name: str, x: Tensor, role: str, trailing: int, graph: Graph) -> None:
    """Validates the features of the graph's "sources" or "destinations", with `trailing` dimensions after the nodes."""
    expected = graph.num_src if role == "sources" else graph.num_dst
    is_usual = isinstance(x, Tensor) and x.dtype in _FLOATS and x.layout is torch.strided and not x.is_nested
    if is_usual and x.dim() > trailing and x.shape[-1 - trailing] == expected:
        return
    tensor(name, x)
    shape = f"[..., N, {'H, D' if trailing == 2 else 'H' if name.endswith('bias') else 'D'}]"
    if x.dim() < trailing + 1:
        hint = f": for one head, {name}.unsqueeze(-2)" if x.dim() == trailing == 2 else ""
        raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}{hint}")
    floating(name, x)
    nodes = x.shape[-1 - trailing]
    if nodes != expected:
        hint = f"; {name} is read as {shape}" if expected in x.shape else ""
        raise ValueError(f"{name} has {nodes} nodes (shape {list(x.shape)}), but {graph} has {expected} {role}{hint}")


def score(score: Any) -> None:
    """Raises TypeError if this is not a score."""
    what = "score must be a dataclass with `roles` and `logits`, as mpnn.scores.Dot"
    if isinstance(score, type) or not is_dataclass(score):
        raise TypeError(
            f"{what}; got {type(score).__name__}: pass logits that are already computed as a bias for each edge"
        )
    if missing := [name for name in ("roles", "logits") if not hasattr(score, name)]:
        raise TypeError(f"{what}; {type(score).__name__} has no {' and no '.join(f'`{name}`' for name in missing)}")
    declared: Any = score
    roles: dict[str, Role] = declared.roles
    for name, role in roles.items():
        if role.of not in ("dst", "src", "edge"):
            raise TypeError(
                f'the role of {name} in {type(score).__name__} must be "dst", "src" or "edge"; got {role.of!r}'
            )
        if not hasattr(score, name):
            raise TypeError(f"{type(score).__name__} has a role for {name!r}, and no field of this name")


_BIASES = "dst_bias", "src_bias"
_Named = list[tuple[str, Any, Role]]


def _features(round: Round) -> tuple[_Named, _Named]:
    """The tensors of nodes, and the data of edges, with their names and roles."""
    roles: dict[str, Role] = round.roles
    named: _Named = [("value", round.value, roles["value"]), *round.features]
    named += [(name, x, roles[name]) for name in _BIASES if (x := getattr(round, name)) is not None]
    named += [("bias", bias, roles["bias"]) for bias in round.bias]
    named.append(("edge_value", round.edge_value, roles["edge_value"]))
    of_nodes = [entry for entry in named if entry[2].of != "edge"]
    return of_nodes, [entry for entry in named if entry[2].of == "edge" and entry[1] is not None]


def _per_edge(name: str, data: PerEdge, trailing: int, round: Round) -> None:
    x = numbers(data)
    mask = name == "bias" and x.dtype == torch.bool
    advice = "a bias is added to logits; to mask, choose the graph, or use -inf"
    _beside_value(name, x, round, f": {advice if mask else f'call .to({round.value.dtype})'}")
    rows = _num_edge_types(data, round.graph) if isinstance(data, EmbeddingTable) else round.graph.num_edges
    batch = () if isinstance(data, EmbeddingTable) else tuple(round.batch)
    leading = tuple(x.shape[: -1 - trailing])
    fits = (
        x.dim() > trailing
        and (x.shape[-1 - trailing] == rows or (isinstance(data, EmbeddingTable) and len(x) > rows))
        and x.shape[-trailing] in (1, round.heads)
        and len(leading) <= len(batch)
        and all(m in (1, n) for m, n in zip(reversed(leading), reversed(batch), strict=False))
    )
    if not fits:
        shape = f"[{rows}, {round.heads}{', D' if trailing == 2 else ''}]"
        what = "edge type" if isinstance(data, EmbeddingTable) else "edge"
        hint = f": for one head, {name}[:, None]" if x.dim() == trailing == 1 else ""
        raise ValueError(f"{name} must have shape {shape}, one row for each {what}; got {list(x.shape)}{hint}")


def _num_edge_types(table: EmbeddingTable, graph: Graph) -> int:
    if table.relation is not None:
        return table.relation.count
    return graph.cached("number of edge types", lambda: graph.num_edge_types)
