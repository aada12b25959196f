"""Whether the parts of a request fit together, so that a wrong one is named before anything runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.scores import NORMALIZERS, AdditiveScore, AdditiveV2Score, Dot, Lookup, PerEdge, Request
from mpnn.topology import Topology


def request(given: Request) -> None:
    """
    Raises:
        ValueError, TypeError: naming what does not fit.
    """
    if given.normalize not in NORMALIZERS:
        raise ValueError(f"there is no normaliser {given.normalize!r}; there are {', '.join(NORMALIZERS)}")
    rate("dropout", given.dropout)
    for name, data, _ in _on_edges(given):
        tensor(name, data.table if isinstance(data, Lookup) else data)
    device(given.graph, given.value)
    for name, x, role, trailing in _on_nodes(given):
        features(name, x, role, trailing, given.graph)
        if x.device != given.value.device:
            raise ValueError(f"{name} is on {x.device} and value on {given.value.device}; move one")
        if x.shape[: -1 - trailing] != given.batch:
            raise ValueError(
                f"{name} and value must be alike in the dimensions before their nodes; "
                f"got {list(x.shape)} and {list(given.value.shape)}"
            )
    for name, heads in _grouped(given):
        if heads != 1 and (heads == 0 or given.heads % heads):
            raise ValueError(
                f"{given.heads} heads cannot share {heads} heads of {name}: {heads} does not divide {given.heads}"
            )
    if isinstance(given.score, Dot):
        _dot(given.score, given.value)
    for name, data, trailing in _on_edges(given):
        _per_edge(name, data, trailing, given)


def types(over: Any, query: Any, key: Any, value: Any) -> None:
    """Raises TypeError unless these are a graph and three tensors; asked at every call, so first of all together."""
    if isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor) and isinstance(over, Graph):
        return
    graph(over)
    for name, x in (("query", query), ("key", key), ("value", value)):
        tensor(name, x)


def graph(given: Any) -> None:
    """Raises TypeError if this is of another type than a graph, saying what would make it one."""
    if isinstance(given, Topology):
        raise TypeError(f"graph must be of a size, and {given} is a rule without one; bind it first: .bind(num_nodes)")
    if not isinstance(given, Graph) and not torch.compiler.is_compiling():  # when what stands for a graph will do
        advice = "; an edge_index becomes one by graphs.from_edges(edge_index, num_nodes)"
        raise TypeError(f"graph must be a Graph; got {type(given).__name__}{advice}")


def tensor(name: str, x: Any) -> None:
    """Raises TypeError if this is none."""
    if isinstance(x, Tensor):
        return
    if isinstance(x, (Graph, Topology)):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}: features come first, then the graph")
    raise TypeError(f"{name} must be a tensor; got {type(x).__name__}: torch.as_tensor makes one")


Takes = tuple[int | None, torch.dtype | None]
"""The width and the type of features that a module takes; None where it takes any, or does not say."""


def takes(module: nn.Module | None) -> Takes:
    """What a linear map, a norm, a cell or a sequence that begins with one takes."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    if isinstance(module, nn.Linear):
        exact = module.weight.is_floating_point() and module.weight.element_size() > 1  # else quantised
        return module.in_features, module.weight.dtype if exact else None
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return module.normalized_shape[-1], None
    if isinstance(module, nn.GRUCell):
        return module.input_size, module.weight_ih.dtype
    return None, None


def fits(owner: str, name: str, x: Tensor, wanted: Takes) -> None:
    """Raises ValueError or TypeError unless these features are as wide as wanted, and of that type; autocast converts
    types itself."""
    width, dtype = wanted
    if width is not None and x.shape[-1] != width:
        raise ValueError(
            f"{name} is {x.shape[-1]} wide (shape {list(x.shape)}), but {owner} was made for a width of {width}"
        )
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{name} is {x.dtype} and the weights of {owner} are {dtype}; call .to({dtype}) on {name}, or "
            f".to({x.dtype}) on the layer"
        )


def width(name: str, given: Any) -> None:
    """Raises TypeError unless this is an integer."""
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)):
        shown = type(given).__name__ if isinstance(given, nn.Module) else repr(given)
        raise TypeError(f"{name} must be an integer; got {shown}")


def function(name: str, given: Any) -> None:
    """Raises TypeError unless this is a module or a function, or None."""
    if given is not None and (isinstance(given, type) or not callable(given)):
        raise TypeError(f"{name} must be a module or a function; got {given!r}")


def widened(owner: str, width: int, wanted: int) -> None:
    """Raises ValueError unless messages come back as wide as a spec made them."""
    if width != wanted:
        raise ValueError(
            f"the aggregate made messages {width} wide, but {owner} takes them {wanted} wide; an aggregator that "
            'widens messages, such as "pna", goes with attention=Mapped(value, out), whose out takes that width'
        )


def rate(name: str, p: Any) -> None:
    """Raises unless this is a probability below 1."""
    if isinstance(p, bool) or not hasattr(p, "__float__"):
        raise TypeError(f"{name} must be a number in [0, 1); got {p!r}")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name} must lie in [0, 1); got {p}")


def floating(name: str, x: Tensor, advice: str = "") -> None:
    """Raises TypeError unless these are numbers that kernels compute with, lying row by row."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}{advice}")
    if x.dtype.itemsize < 2:
        raise TypeError(f"{name} must have 16 bits or more; got {x.dtype}: call .to(torch.bfloat16)")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor; got {x.layout}: call .to_dense()")


def device(graph: Graph, x: Tensor) -> None:
    if x.device != graph.device:
        raise ValueError(
            f"the graph is on {graph.device} and the features on {x.device}; call graph.to({str(x.device)!r})"
        )


def features(name: str, x: Tensor, role: str, trailing: int, graph: Graph) -> None:
    """Features of the graph's "sources" or "destinations", with so many dimensions behind the nodes."""
    tensor(name, x)
    shape = f"[..., N, {'H, D' if trailing == 2 else 'D'}]"
    if x.dim() < trailing + 1:
        raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}")
    floating(name, x)
    found, wanted = x.shape[-1 - trailing], graph.num_src if role == "sources" else graph.num_dst
    if found != wanted:
        hint = f"; {name} is read as {shape}" if wanted in x.shape else ""
        raise ValueError(f"{name} has {found} nodes (shape {list(x.shape)}), but {graph} has {wanted} {role}{hint}")


def _on_nodes(given: Request) -> list[tuple[str, Tensor, str, int]]:
    """Whatever nodes have: its name, the numbers, whose they are, how many dimensions stand behind the nodes."""
    found = [("value", given.value, "sources", 2)]
    match given.score:
        case Dot(query, key):
            found += [("query", query, "destinations", 2), ("key", key, "sources", 2)]
        case AdditiveScore(dst, src):
            found += [("dst", dst, "destinations", 1), ("src", src, "sources", 1)]
        case AdditiveV2Score(dst, src):
            found += [("dst", dst, "destinations", 2), ("src", src, "sources", 2)]
    return found


def _on_edges(given: Request) -> list[tuple[str, PerEdge, int]]:
    """Whatever edges have: its name, the numbers, how many dimensions stand behind the edges."""
    found: list[tuple[str, PerEdge | None, int]] = [("bias", bias, 1) for bias in given.bias]
    found.append(("edge_value", given.edge_value, 2))
    match given.score:
        case Dot(edge_key=edge):
            found.append(("edge_key", edge, 2))
        case AdditiveScore(edge=edge):
            found.append(("edge", edge, 1))
        case AdditiveV2Score(edge=edge):
            found.append(("edge", edge, 2))
    return [(name, data, trailing) for name, data, trailing in found if data is not None]


def _grouped(given: Request) -> list[tuple[str, int]]:
    """What several heads may share, and how many of it there are."""
    key = [("key", given.score.key.shape[-2])] if isinstance(given.score, Dot) else []
    return [("value", given.value.shape[-2]), *key]


def _dot(score: Dot, value: Tensor) -> None:
    query, key = score.query, score.key
    scale(score.scale)
    if score.softcap is not None and not 0 < score.softcap < math.inf:
        raise ValueError(f"softcap must be a positive finite number, or None; got {score.softcap!r}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must be equally wide; got {query.shape[-1]} and {key.shape[-1]}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype; got {query.dtype}, {key.dtype} and {value.dtype}")


def scale(given: Any) -> None:
    """Raises TypeError unless `given` is one number, and ValueError unless that number is finite."""
    if isinstance(given, Tensor) and given.requires_grad:
        raise TypeError("scale is a number, to which no gradient flows; multiply a learned one into the query")
    if not isinstance(given, (float, int)) and not hasattr(given, "__float__"):
        raise TypeError(f"scale must be a number; got {given!r}")
    shape = list(given.shape) if isinstance(given, (Tensor, np.ndarray)) else []
    if shape:
        raise TypeError(
            f"scale must be one number; got {type(given).__name__} of shape {shape}: multiply one for each head into "
            "the query"
        )
    if not torch.compiler.is_compiling() and not math.isfinite(given):  # a program checks when it runs
        raise ValueError(f"scale must be a finite number; got {given!r}")


def _per_edge(name: str, data: PerEdge, trailing: int, given: Request) -> None:
    numbers = data.table if isinstance(data, Lookup) else data
    mask = name == "bias" and numbers.dtype == torch.bool
    advice = "a bias is added to scores; for a mask choose the graph, or give -inf"
    floating(name, numbers, f": {advice if mask else f'call .to({given.value.dtype})'}")
    rows = _classes(data, given.graph) if isinstance(data, Lookup) else given.graph.num_edges
    if numbers.device != given.value.device:
        raise ValueError(f"{name} is on {numbers.device} and value on {given.value.device}; move one")
    batch = () if isinstance(data, Lookup) else tuple(given.batch)
    leading = tuple(numbers.shape[: -1 - trailing])
    fits = (
        numbers.dim() > trailing
        and (numbers.shape[-1 - trailing] == rows or (isinstance(data, Lookup) and len(numbers) > rows))
        and numbers.shape[-trailing] in (1, given.heads)
        and len(leading) <= len(batch)
        and all(m in (1, n) for m, n in zip(reversed(leading), reversed(batch), strict=False))
    )
    if not fits:
        wanted = f"[{rows}, {given.heads}{', D' if trailing == 2 else ''}]"
        what = "class" if isinstance(data, Lookup) else "edge"
        raise ValueError(f"{name} must have shape {wanted}, one row for each {what}; got {list(numbers.shape)}")


def _classes(table: Lookup, graph: Graph) -> int:
    if table.relation is not None:
        return table.relation.count
    return graph.memo("number of classes", lambda: graph.num_relations)
