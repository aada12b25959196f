"""Cases: what one request is made of, as plain data that JSON can hold, drawn from a seed.

A case says everything but the numbers, which follow from its `seed`; `leaves` draws them in the memory layouts that
the case asks for.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .oracle import DTYPES
from .topologies import Edges, count_types, edges_of

Case = dict[str, Any]

LAYOUTS = ("turned", "offset", "every second", "expanded", "read-only", "negative")


def draw_group(seed: int, count: int = 8) -> list[Case]:
    """Cases over one graph, so that what the graph caches for one request meets the next one."""
    graph = _graph(random.Random(seed))
    edges = edges_of(graph)
    return [_request(random.Random(f"{seed} {k}"), seed * count + k, graph, edges) for k in range(count)]


def _request(r: random.Random, seed: int, graph: dict[str, Any], edges: Edges) -> Case:
    size = len(edges.dst)
    large = size > 1000
    heads = 1 if large else r.choice([1, 1, 2, 3, 4, 8])
    case: Case = {
        "seed": seed,
        "graph": graph,
        "batch": [] if large else r.choice([[], [], [], [1], [2], [2], [3], [2, 2], [1, 3], [0]]),
        "heads": heads,
        "dtype": r.choice(["float64", "float64", "float32", "float32", "float32", "bfloat16", "float16"]),
        "value": {"heads": _divisor(r, heads), "width": _width(r)},
        "score": None,
        "bias": [],
        "edge_value": None,
        "sinks": False,
        "normalize": "none",
        "dropout": 0.0,
        "dropout_seed": r.choice([0, 1, -1, 2**62 - 1, -(2**63), r.randrange(2**62)]),
        "reduce": "sum",
        "return_weights": False,
        "grad": [],
        "layout": {},
        "upstream": r.choice(["random", "random", "random", "ones", "ones", "negative"]),
        "threads": 2 if r.random() < 0.02 else 1,
        "repeat": r.random() < 0.05,
        "auto": r.random() < 0.3,
        "reference": r.random() < 0.4,
    }
    if r.random() < 0.78:
        _attention(r, case, edges)
    else:
        _aggregation(r, case, edges)
    if edges.present is not None:
        _stacked(r, case, *edges.present.shape[:2])
    elif case["score"] is None:  # then values and biases alone say how many heads there are
        case["heads"] = max([case["value"]["heads"], *(spec["heads"] for spec in case["bias"])])
        if case["edge_value"] and case["edge_value"]["heads"] > 1:
            case["edge_value"]["heads"] = case["heads"]
    names = list(shapes(case, edges))
    case["grad"] = r.choice([[], [], [], names, [n for n in names if r.random() < 0.4]])
    case["layout"] = {n: r.choice(LAYOUTS) for n in names if r.random() < 0.3}
    if names and r.random() < 0.02:
        case["layout"][r.choice(names)] = "large"
    return case


def shapes(case: Case, edges: Edges | None = None) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf."""
    edges = edges_of(case["graph"]) if edges is None else edges
    batch, heads, value, score = tuple(case["batch"]), case["heads"], case["value"], case["score"]
    n, m = edges.num_dst, edges.num_src
    found: dict[str, tuple[int, ...]] = {"value": (*batch, m, value["heads"], value["width"])}
    if score and score["kind"] == "dot":
        found["query"] = (*batch, n, heads, score["width"])
        found["key"] = (*batch, m, score["key_heads"], score["width"])
    elif score:
        width = (score["width"],) if score["kind"] == "additive v2" else ()
        found["dst"], found["src"] = (*batch, n, heads, *width), (*batch, m, heads, *width)
        if width:
            found["vector"] = (heads, *width)
    for name in case.get("node_bias", ()):
        found[name] = (*batch, n if name == "dst_bias" else m, heads)
    if case["sinks"]:
        found["sinks"] = (heads,)
    per_edge = {f"bias{k}": (spec, ()) for k, spec in enumerate(case["bias"])}
    if case["edge_value"]:
        per_edge["edge_value"] = case["edge_value"], (value["width"],)
    if score and (spec := score.get("edge_key") or score.get("edge")):
        width = () if score["kind"] == "additive" else (score["width"],)
        per_edge["edge_key" if score["kind"] == "dot" else "edge"] = spec, width
    for name, (spec, width) in per_edge.items():
        if spec["form"] == "table":
            found[name] = (_table_rows(spec, edges) + spec["extra"], spec["heads"], *width)
        else:
            leading = batch if spec["batch"] else ()
            found[name] = (*leading, len(edges.dst), spec["heads"], *width)
    return found


def leaves(case: Case, edges: Edges) -> dict[str, Tensor]:
    """The numbers of a case, of its type and in its memory layouts."""
    generator = np.random.default_rng([case["seed"] % 2**63, 1])
    dtype = DTYPES[case["dtype"]]
    found = {}
    for name, shape in shapes(case, edges).items():
        numbers = generator.standard_normal(shape)
        hidden = case["bias"][int(name[4:])].get("hidden", 0.0) if name.startswith("bias") else 0.0
        if hidden:
            numbers[generator.random(shape) < hidden] = -np.inf
        found[name] = laid_out(torch.from_numpy(numbers).to(dtype), case["layout"].get(name, "contiguous"))
        found[name].requires_grad_(name in case["grad"])
    return found


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers (for "expanded": those of the first row along the first dimension) elsewhere in memory."""
    if layout == "turned" and x.dim() > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "offset":
        room = x.new_full((x.numel() + 3,), torch.nan)
        room[3:] = x.flatten()
        return room[3:].view(x.shape)
    if layout == "every second":
        room = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        room[..., ::2] = x
        return room[..., ::2]
    if layout == "expanded" and x.dim() and x.shape[0]:
        return x[:1].expand(x.shape)
    if layout == "large":  # a slice of memory that comes fresh from the system
        room = x.new_full((1 << 20,), torch.nan)
        room[64 : 64 + x.numel()] = x.flatten()
        return room[64 : 64 + x.numel()].view(x.shape)
    if layout == "negative":  # a view whose negative bit is set
        return torch._neg_view(-x)
    if layout == "read-only" and x.dtype != torch.bfloat16:
        numbers = x.numpy().copy()
        numbers.flags.writeable = False
        return torch.from_numpy(numbers)
    return x


# ------------------------------------------------------------------------------------------------ requests


def _attention(r: random.Random, case: Case, edges: Edges) -> None:
    heads = case["heads"]
    kind = r.choice(["dot"] * 6 + ["additive", "additive v2"] + ["none"])
    case["normalize"] = r.choice(["softmax"] * 6 + ["softmax_dst", "sigmoid", "none"])
    if kind == "dot":
        case["score"] = {
            "kind": "dot",
            "width": _width(r),
            "key_heads": _divisor(r, heads),
            "scale": r.choice([0.3, 1.0, 0.125, -0.7, 0.0, 3.0]),
            "softcap": r.choice([None] * 6 + [1.5, 20.0]),
            "edge_key": _per_edge(r, case, edges) if r.random() < 0.15 else None,
        }
    elif kind != "none":
        case["score"] = {
            "kind": kind,
            "activation": r.choice([0.2, 0.0, 1.0, "tanh", "relu"]),
            "edge": _on_edges(r, case) if r.random() < 0.3 else None,
            **({"width": _width(r)} if kind == "additive v2" else {}),
        }
    most = 3 if r.random() < 0.1 else 1
    if kind == "none" or r.random() < 0.4:
        case["bias"] = [_per_edge(r, case, edges) for _ in range(r.randint(1, most))]
        for spec in case["bias"]:
            if case["normalize"] == "softmax" and spec["form"] == "edges" and r.random() < 0.3:
                spec["hidden"] = r.choice([0.2, 0.8, 1.0])
    case["node_bias"] = r.choice([[]] * 9 + [["dst_bias"], ["src_bias"], ["dst_bias", "src_bias"]])
    if r.random() < 0.12:
        case["edge_value"] = _per_edge(r, case, edges)
    case["dropout"] = r.choice([0.0] * 5 + [0.1, 0.5, 0.97])
    case["reduce"] = r.choice(["sum"] * 12 + ["mean", "mean", "max", "std"])
    case["return_weights"] = r.random() < 0.15
    if kind == "dot" and not edges.explicit and (p := r.random()) < 0.5:  # what the kernels for structured graphs take
        case["score"]["edge_key"] = case["edge_value"] = None
        case["reduce"], case["return_weights"] = "sum", False
        if p < 0.15:  # linear attention
            case["normalize"], case["bias"], case["dropout"], case["score"]["softcap"] = "none", [], 0.0, None
            case["node_bias"] = []
        else:
            case["normalize"] = r.choice(["softmax"] * 7 + ["softmax_dst"])
    case["sinks"] = case["normalize"] == "softmax" and r.random() < 0.12


def _stacked(r: random.Random, case: Case, items: int, groups: int) -> None:
    """Changes a case to what graphs that differ by item and head take: sums, without numbers of edges."""
    heads = groups * r.choice([1, 1, 2, 3])
    case["heads"], case["reduce"], case["return_weights"] = heads, "sum", False
    if case["normalize"] == "softmax_dst":  # which no stack takes
        case["normalize"] = "softmax"
    case["batch"] = [items] if items > 1 else r.choice([[], [1], [2], [2, 2]])
    score, kept = case["score"], groups * _divisor(r, heads // groups)
    case["value"]["heads"] = kept if score else heads
    by_rule = {"form": "table", "relation": ["offset", 2], "heads": r.choice([1, heads]), "extra": 0}
    case["bias"] = [by_rule] * (bool(case["bias"]) or (case["normalize"] != "none" and not score))
    case["edge_value"] = case["edge_value"] and {**by_rule, "heads": 1}
    if score and score["kind"] == "dot":
        score["key_heads"] = kept
        score["edge_key"] = score["edge_key"] and {**by_rule, "heads": 1}
        if not case.get("node_bias") and r.random() < 0.2:  # heads with graphs of their own share all keys
            case["value"]["heads"] = score["key_heads"] = 1
    elif score:  # the vector of the other additive score is that of all heads
        case["score"] = {"kind": "additive", "activation": score["activation"], "edge": None}
        case["value"]["heads"] = heads
    if case["edge_value"]:
        case["value"]["heads"] = heads
        if score and score["kind"] == "dot":
            score["key_heads"] = heads


def _aggregation(r: random.Random, case: Case, edges: Edges) -> None:
    case["reduce"] = r.choice(
        ["sum", "sum", "mean", "mean", "max", "max", "min", "var", "std", "softmax", "powermean", "median", "pna"]
    )
    if r.random() < 0.4:
        case["bias"] = [{"form": "edges", "heads": r.choice([1, case["heads"]]), "batch": False}]
    case["return_weights"] = bool(case["bias"]) and r.random() < 0.1


def _per_edge(r: random.Random, case: Case, edges: Edges) -> dict[str, Any]:
    """Numbers for each edge, or a table by edge type, which may have more rows than there are types."""
    if r.random() < 0.45:
        return _on_edges(r, case)
    relation: Any = r.choice(
        [["offset", r.choice([0, 1, 2, 5, 40])], ["grid", r.choice([1, 3, 5]), 1, 2], ["custom", 3]]
    )
    if edges.num_types and r.random() < 0.6:
        relation = None
    return {"form": "table", "relation": relation, "heads": _all_or_one(r, case), "extra": r.choice([0, 0, 1, 3])}


def _on_edges(r: random.Random, case: Case) -> dict[str, Any]:
    return {"form": "edges", "heads": _all_or_one(r, case), "batch": r.random() < 0.3}


def _all_or_one(r: random.Random, case: Case) -> int:
    heads: int = case["heads"]
    return r.choice([1, heads, heads])


def _table_rows(spec: dict[str, Any], edges: Edges) -> int:
    return edges.num_types if spec["relation"] is None else count_types(spec["relation"])


def _width(r: random.Random) -> int:
    return r.choice([1, 2, 3, 4, 5, 7, 8, 8, 11, 16, 17]) if r.random() < 0.97 else r.choice([32, 33, 64, 65])


def _divisor(r: random.Random, heads: int) -> int:
    return r.choice([heads] * 3 + [h for h in range(1, heads + 1) if heads % h == 0])


# ------------------------------------------------------------------------------------------------ graphs


def _graph(r: random.Random) -> dict[str, Any]:
    p = r.random()
    if p < 0.06:
        return _tree(r)
    if p < 0.16:
        return _choice(r)
    return _explicit(r) if p < 0.5 else _structured(r)


def _tree(r: random.Random) -> dict[str, Any]:
    n, far = _size(r), r.choice([1, 2, 40])  # chains, forks, bushes
    parent = [-1 if r.random() < 0.1 else r.randint(max(i - far, -1), i - 1) for i in range(n)]
    graph: dict[str, Any] = {"parent": parent, "radius": r.choice([None, None, 0, 2, 5]), "num_dst": n, "num_src": n}
    graph["changes"] = _changes(r, graph)
    return graph


def _choice(r: random.Random) -> dict[str, Any]:
    """Sources, or blocks of them, that each row chooses: for all, for each item, or for each item and head."""
    m = 1 + _size(r) % 40
    n = m if r.random() < 0.7 else r.randint(1, 40)
    stack = r.choice([[], [2], [3], [1, 2], [2, 2], [2, 1], [1, 4]])
    size = r.choice([None, 1, 2, 3, 5])
    rows = n if size is None or r.random() < 0.5 else -(-n // size)
    count = m if size is None else -(-m // size)
    listed = [r.randint(-1, count - 1) for _ in range(math.prod(stack) * rows * r.randint(1, 6))]
    rule = draw_rule(r, n, m, None, r.choice([0, 1])) if n == m and r.random() < 0.5 else None
    graph = {"choice": listed, "stack": stack, "rows": rows, "size": size, "rule": rule, "num_dst": n, "num_src": m}
    return {**graph, "changes": [] if stack else _changes(r, graph)}


def _size(r: random.Random) -> int:
    p = r.random()
    if p < 0.12:
        return r.choice([0, 1, 2, 3])
    if p < 0.95:
        return r.randint(2, 18)
    return r.choice([31, 32, 33, 61, 95, 96, 97, 127]) if p < 0.995 else r.randint(98, 260)


def _structured(r: random.Random) -> dict[str, Any]:
    n = _size(r)
    image = None
    if r.random() < 0.2:
        size = r.choice([1, 2, 3])
        image = size * r.randint(1, 4), size * r.randint(1, 4), size
        n = image[0] * image[1]
    m, p = n, r.random()
    if p < 0.1 and not image:
        m = max(0, n + r.randint(-5, 9))
        rule = r.choice([["complete"], ["~", ["~", ["complete"]]]])
    elif p < 0.2 and not image:
        m = n + r.randint(0, 6)
        rule = r.choice([["memory", m - n], ["&", ["memory", m - n], ["complete"]], ["~", ["memory", m - n]]])
    elif p < 0.3 and not image:
        rule = r.choice([["causal"], ["complete"], ["prefix", n // 2], ["documents", _lengths(r, n)]])
    else:
        rule = draw_rule(r, n, n, image, depth=r.choice([0, 0, 1, 1, 2, 3]))
    graph: dict[str, Any] = {"rule": rule, "num_dst": n, "num_src": m}
    if r.random() < 0.15:
        graph["related"] = r.choice([["offset", r.randint(0, 4)], ["custom", r.randint(1, 4)]])
    graph["changes"] = _changes(r, graph)
    return graph


def draw_rule(r: random.Random, n: int, m: int, image: tuple[int, int, int] | None, depth: int) -> Any:
    """A rule for n destinations and m sources: topologies joined `depth` times at the most."""
    if depth and r.random() < 0.75:
        symbol = r.choice(["|", "|", "&", "&", "-", "~"])
        if symbol == "~":
            return ["~", draw_rule(r, n, m, image, depth - 1)]
        return [symbol, draw_rule(r, n, m, image, depth - 1), draw_rule(r, n, m, image, depth - 1)]
    if image and r.random() < 0.7:
        height, width, size = image
        return r.choice(
            [
                ["grid", height, width, r.choice([4, 8])],
                ["neighborhood", height, width, r.randint(0, 3)],
                ["windows", height, width, size, r.randint(0, size - 1)],
            ]
        )
    order = list(range(n))
    r.shuffle(order)
    hubs = sorted(r.sample(range(n), min(n, r.randint(0, 9))))
    choices: list[Any] = [
        ["complete"],
        ["causal"],
        ["causal"],
        ["identity"],
        ["window", r.choice([0, 1, 2, 3, 8, 40]), 1],
        ["window", r.randint(0, 4), r.randint(1, 5)],
        ["strided", r.randint(1, 6)],
        ["fixed", *r.choice([(1, 0), (3, 1), (4, 2), (5, 5), (7, 0)])],
        ["global_nodes", r.randint(0, 3)],
        ["global_nodes", hubs],
        ["prefix", r.randint(0, 9)],
        ["documents", _lengths(r, n)],
        ["documents", _lengths(r, n)],
        ["permutation", order],
    ]
    return r.choice(choices)


def _lengths(r: random.Random, n: int) -> list[int]:
    lengths = []
    while n:
        lengths.append(r.randint(0 if r.random() < 0.1 else 1, min(n, r.choice([1, 4, 12, 64]))))
        n -= lengths[-1]
    return lengths


def _explicit(r: random.Random) -> dict[str, Any]:
    n = _size(r)
    m = n if r.random() < 0.6 else _size(r)
    count = 0 if not n or not m else min(r.choice([0, 1, n // 2, n, 2 * n, 3 * n, 5 * n, 8 * n]), 1200)
    kind = r.choice(["uniform", "uniform", "skewed", "one row", "one column"])
    power = 3 if kind == "skewed" else 1
    dst = [0 if kind == "one row" else int(n * r.random() ** power) for _ in range(count)]
    src = [m - 1 if kind == "one column" else int(m * r.random() ** power) for _ in range(count)]
    if r.random() < 0.3:  # the order in which kernels walk them
        pairs = sorted(zip(dst, src, strict=True))
        dst, src = [d for d, _ in pairs], [s for _, s in pairs]
    graph: dict[str, Any] = {"edges": [src, dst], "num_dst": n, "num_src": m}
    if r.random() < 0.25:
        graph["edge_type"] = [r.randrange(3) for _ in range(count)]
    graph["changes"] = _changes(r, graph)
    return graph


def _changes(r: random.Random, graph: dict[str, Any]) -> list[Any]:
    """Up to two changes of the graph, each fitting what the ones before have left."""
    changes: list[Any] = []
    typed = graph.get("edge_type") is not None or graph.get("related") is not None
    for _ in range(r.choice([0, 0, 0, 1, 1, 2])):
        now = edges_of({**graph, "changes": changes})
        n, m, square = now.num_dst, now.num_src, now.num_dst == now.num_src
        start = r.randint(0, n)
        stop = r.randint(start, n)
        options: list[Any] = [["rows", start, stop], ["compact"]]
        plain = np.array_equal(now.dst_position, np.arange(n)) and np.array_equal(now.src_position, np.arange(m))
        if plain:
            options += [["reverse"], ["positions", _drawn(r, n), _drawn(r, m)]]
        if square:
            options += [
                ["subgraph", sorted(r.sample(range(n), r.randint(0, n)))],
                ["reordered", r.choice(["rcm", "degree"])],
            ]
            options += [["and", draw_rule(r, n, m, None, 1)], ["minus", draw_rule(r, n, m, None, 1)]]
            if not typed:
                options += [["self_loops"], ["undirected"]]
        changes.append(r.choice(options))
    return changes


def _drawn(r: random.Random, count: int) -> list[int]:
    return [r.randrange(50) for _ in range(count)]
