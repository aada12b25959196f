"""What a case should give: one round of message passing in float64, and how far rounding may move each number.

Imports nothing of the project. Edges are laid out in a table [N_dst, most in-neighbors], padded, so that the sums over
in-neighbors are torch's own sums, and torch differentiates them.

**Bars.** With unit roundoff u of the arithmetic, a dot product of D terms has the absolute error (D + 2) u S, where S
is the sum of the absolute values of its terms (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1).
So a logit has the error (D + c) u S_ij, a softmax weight twice the largest of its row as relative error, and every
later sum the errors of its terms plus the number of its terms times u. `magnitudes` computes each output and each
gradient with all terms positive; the bar is that number times the relative error, plus the rounding of the result to
the type of the features. 16-bit features: torch's own kernels round weights to 16 bits between the two products, so
their weights have the roundoff of the 16-bit type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .topologies import Edges, types_by_rule

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Aggregators that are not linear in the messages, and how much steeper than their messages they can get; "pna" divides
# by logarithms of degrees. A standard deviation moves by no more than its messages, and its gradient
# (m - mean) / (n std) by as much more as the messages are larger than it: `flatness`.
STEEPNESS = {"var": 2.0, "std": 4.0, "pna": 160.0, "softmax": 4.0, "powermean": 1.0, "median": 1.0}


@dataclass
class Answer:
    """Numbers and their bars, by name: "out", "weights", and "d NAME" for the gradient of each leaf."""

    numbers: dict[str, Tensor]
    bars: dict[str, Tensor]


def solve(case: dict[str, Any], edges: Edges, leaves: dict[str, Tensor], upstream: Tensor) -> Answer:
    """The answer for these leaves (of the case's dtype); `upstream` is the gradient of the output."""
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    round_ = _Round(case, edges)
    out, weights, parts = round_.forward(exact)
    numbers = {"out": out.detach()}
    if weights is not None and case["return_weights"]:
        numbers["weights"] = weights.detach()
    # Of repeated edges, whose weights may differ in the last bit, rounding decides which one is the extreme.
    undecided = case["score"] and case["reduce"] in ("max", "min", "median", "pna")
    wanted = {} if undecided else {name: exact[name] for name in case["grad"]}
    if wanted:
        out.backward(upstream.double())
        for name, x in wanted.items():
            numbers[f"d {name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return Answer(numbers, round_.bars(exact, parts, numbers, upstream.double()))


class _Round:
    """One round over the padded table of in-neighbors."""

    def __init__(self, case: dict[str, Any], edges: Edges) -> None:
        self.case, self.edges = case, edges
        self.table = _table(edges.dst, edges.num_dst)
        self.valid = self.table < len(edges.dst)
        self.degree = torch.from_numpy(np.bincount(edges.dst, minlength=edges.num_dst))
        by_source = case["normalize"] == "softmax_dst"
        self.normalized = _table(edges.src, edges.num_src) if by_source else self.table
        self.owner = torch.from_numpy((edges.src if by_source else edges.dst).copy())  # of each edge, in `normalized`
        self.dst, self.src = torch.from_numpy(edges.dst.copy()), torch.from_numpy(edges.src.copy())
        self.batch = math.prod(case["batch"])
        self.heads = case["heads"]
        self.flatness = 0.0
        shape = self.batch, len(edges.dst), self.heads
        self.present = torch.ones(shape, dtype=torch.bool)  # whether each item and head has an edge
        if edges.present is not None:
            each = torch.from_numpy(edges.present).mT.repeat_interleave(self.heads // edges.present.shape[1], 2)
            self.present = each.expand(shape)

    # -------------------------------------------------------------------------------------------- features of edges

    def of_nodes(self, x: dict[str, Tensor]) -> Tensor | float:
        """The biases of both ends of each edge, [B, E, H]."""
        dst, src = x.get("dst_bias"), x.get("src_bias")
        of_dst = 0.0 if dst is None else self.of_destinations(dst, 1)
        return of_dst if src is None else of_dst + self.of_sources(src, 1)

    def of_sources(self, x: Tensor, trailing: int) -> Tensor:
        """[B, E, H(, D)] of x [..., N_src, H_kv(, D)]."""
        return self._gathered(x, self.src, trailing)

    def of_destinations(self, x: Tensor, trailing: int) -> Tensor:
        return self._gathered(x, self.dst, trailing)

    def _gathered(self, x: Tensor, nodes: Tensor, trailing: int) -> Tensor:
        x = x.reshape(self.batch, *x.shape[len(x.shape) - 1 - trailing :])[:, nodes]
        return x.repeat_interleave(self.heads // x.shape[2], 2)

    def of_edges(self, spec: dict[str, Any], x: Tensor, trailing: int) -> Tensor:
        """[B, E, H(, D)] of numbers for each edge, or of a table by edge type."""
        if spec["form"] == "table":
            relation = spec["relation"]
            kind = self.edges.types if relation is None else types_by_rule(relation, self.edges)
            x = x[torch.from_numpy(np.asarray(kind, np.int64))]
        shape = (*self.case["batch"], len(self.dst), self.heads, *([] if trailing == 1 else [x.shape[-1]]))
        return x.expand(shape).reshape(self.batch, *shape[len(self.case["batch"]) :])

    def rows(self, x: Tensor, fill: float, table: Tensor | None = None) -> Tensor:
        """[B, N, most, H(, D)] of numbers on edges, [B, E, H(, D)]."""
        padded = torch.cat([x, x.new_full((x.shape[0], 1, *x.shape[2:]), fill)], 1)
        return padded[:, self.table if table is None else table]

    # -------------------------------------------------------------------------------------------- the computation

    def forward(self, x: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Out [..., N, H, D], weights [..., E, H] and what the bars need."""
        case, parts = self.case, {}
        message = self.of_sources(x["value"], 2)
        if case["edge_value"]:
            message = message + self.of_edges(case["edge_value"], x["edge_value"], 2)
        weights = None
        if case["score"] or case["bias"]:
            logits = self.logits(x)
            weights = self.normalize(logits.masked_fill(~self.present, -math.inf), x.get("sinks"))
            weights = weights.masked_fill(~self.present, 0.0)
            parts["weights"] = weights.detach()
            parts["keep"] = self.keep()
            kept = weights * parts["keep"]
            message = kept[..., None] * message
        else:
            message = message * self.present[..., None]
        out = self.reduce(message)
        out = out.reshape(*case["batch"], *out.shape[1:])
        shown = None if weights is None else weights.reshape(*case["batch"], *weights.shape[1:])
        return out, shown, parts

    def logits(self, x: dict[str, Tensor]) -> Tensor:
        """[B, E, H]."""
        case, score = self.case, self.case["score"]
        total: Tensor | float = 0.0
        if score and score["kind"] == "dot":
            key = self.of_sources(x["key"], 2)
            if score["edge_key"]:
                key = key + self.of_edges(score["edge_key"], x["edge_key"], 2)
            total = score["scale"] * (self.of_destinations(x["query"], 2) * key).sum(-1)
            if score["softcap"]:
                total = score["softcap"] * torch.tanh(total / score["softcap"])
        elif score:
            trailing = 1 if score["kind"] == "additive" else 2
            total = self.of_destinations(x["dst"], trailing) + self.of_sources(x["src"], trailing)
            if score["edge"]:
                total = total + self.of_edges(score["edge"], x["edge"], trailing)
            total = activate(score["activation"], total)
            if score["kind"] == "additive v2":
                total = (total * x["vector"]).sum(-1)
        for k, spec in enumerate(case["bias"]):
            total = total + self.of_edges(spec, x[f"bias{k}"], 1)
        total = total + self.of_nodes(x)
        assert isinstance(total, Tensor)
        return total

    def normalize(self, logits: Tensor, sinks: Tensor | None) -> Tensor:
        """Weights [B, E, H]."""
        if self.case["normalize"] == "none":
            return logits
        if self.case["normalize"] == "sigmoid":
            return logits.sigmoid()
        rows = self.rows(logits, -math.inf, self.normalized)
        most = rows.detach().amax(2, keepdim=True) if rows.shape[2] else rows.detach().sum(2, keepdim=True)
        alone = most == -math.inf  # a row without in-neighbors, or whose logits are all -inf, has weights of zero
        exponentials = (rows - most.masked_fill(alone, 0.0)).exp()
        total = exponentials.sum(2, keepdim=True)
        if sinks is not None:
            total = total + (sinks - most.masked_fill(alone, 0.0)).exp()
        rows = exponentials / total.masked_fill(total == 0, 1.0)
        flat = rows.new_zeros(rows.shape[0], len(self.dst) + 1, rows.shape[3])
        valid = self.normalized < len(self.dst)
        return flat.index_copy(1, self.normalized[valid], rows[:, valid])[:, :-1]

    def keep(self) -> Tensor:
        """What dropout multiplies each weight by, [B, E, H]: 0, or 1 / (1 - p)."""
        p = self.case["dropout"]
        if not p:
            return torch.ones(self.batch, len(self.dst), self.heads, dtype=torch.float64)
        dst, src = self.dst.numpy()[:, None], self.src.numpy()[:, None]
        batch, head = np.arange(self.batch)[:, None, None], np.arange(self.heads)
        streams = batch * self.heads + head
        if self.edges.present is not None:  # the nodes of each item and head are nodes of one graph
            items, groups, _ = self.edges.present.shape
            each, item = self.heads // groups, batch if items > 1 else 0
            counts = {self.case["value"]["heads"], (self.case["score"] or {}).get("key_heads", self.heads)}
            of_sources = groups if all(count % groups == 0 for count in counts) else min(counts)
            group = head // each
            dst = (item * groups + group) * self.edges.num_dst + dst
            src = (item * of_sources + group * of_sources // groups) * self.edges.num_src + src
            streams = (0 if items > 1 else batch * each) + head % each
        kept = drop_hash(self.case["dropout_seed"], streams, dst, src)
        return torch.from_numpy((kept >= round(p * 2**32)) / (1 - p))

    def reduce(self, message: Tensor) -> Tensor:
        """[B, N, H, D'] of messages [B, E, H, D]."""
        kind = self.case["reduce"]
        if kind in ("sum", "mean"):
            total = self.rows(message, 0.0).sum(2)
            return total / self.count() if kind == "mean" else total
        if kind == "pna":
            found = [self.reduce_as(name, message) for name in ("mean", "max", "min", "std")]
            side_by_side = torch.cat(found, -1)
            log_degree = (self.degree + 1).double().log()
            mean = float(log_degree.mean()) if len(log_degree) else 1.0
            delta = mean if mean > 0 else 1.0
            scalers = [torch.ones_like(log_degree), log_degree / delta, delta / log_degree.clamp(min=math.log(2))]
            return torch.cat([side_by_side * s[:, None, None] for s in scalers], -1)
        return self.reduce_as(kind, message)

    def reduce_as(self, kind: str, message: Tensor) -> Tensor:
        none = (self.degree == 0)[:, None, None]
        if kind in ("max", "min", "median") and self.table.shape[1] == 0:
            return self.rows(message, 0.0).sum(2)
        if kind == "max":
            return torch.where(none, 0.0, self.rows(message, -math.inf).amax(2))
        if kind == "min":
            return torch.where(none, 0.0, self.rows(message, math.inf).amin(2))
        if kind == "median":
            middle = ((self.degree - 1).clamp(min=0) // 2)[None, :, None, None, None]
            ordered = self.rows(message, math.inf).sort(dim=2, stable=True).values  # of equal ones, the first
            at = middle.expand(ordered.shape[0], -1, 1, *ordered.shape[3:])
            return torch.where(none, 0.0, ordered.gather(2, at).squeeze(2))
        rows, valid = self.rows(message, 0.0), self.valid[:, :, None, None].double()
        if kind == "mean":
            return rows.sum(2) / self.count()
        if kind in ("var", "std"):
            # The distances of equal messages from one of them are 0, and so is their variance.
            rows = (rows - rows[:, :, :1].detach()) * valid if rows.shape[2] else rows
            mean = rows.sum(2, keepdim=True) / self.count()[:, None]
            var = ((rows - mean).square() * valid).sum(2) / self.count()
            if kind == "var":
                return var
            self.flatness = self._flatness(message.detach(), var.detach())
            return torch.where(var > 0, torch.where(var > 0, var, 1.0).sqrt(), 0.0)
        if kind == "softmax":
            high = self.rows(message.detach(), -math.inf).amax(2, keepdim=True) if rows.shape[2] else 0.0
            e = torch.where(self.valid[:, :, None, None], (rows - high), -math.inf).exp()
            total = e.sum(2, keepdim=True)
            return (e / torch.where(total == 0, 1.0, total) * rows).sum(2)
        if kind == "powermean":
            mean = (rows.clamp(1e-7, 100.0) * valid).sum(2) / self.count()
            return torch.where(none, 0.0, mean)
        raise ValueError(f"no aggregator {kind!r}")

    def _flatness(self, message: Tensor, var: Tensor) -> float:
        """How many times as large as their standard deviation messages are, at most. Repeated edges have weights that
        may differ in the last bit, so that rounding decides whether their deviation is 0."""
        size = self.rows(message.abs(), 0.0).amax(2) if self.table.shape[1] else torch.zeros_like(var)
        undecided = (var == 0) & (self.degree[:, None, None] > 1) & bool(self.case["score"] or self.case["bias"])
        std = torch.where(undecided, 2.0**-53 * size, var.sqrt())
        return float(torch.where(std > 0, size / std, 0.0).amax()) if std.numel() else 0.0

    def count(self) -> Tensor:
        """Degrees that can be divided by, [N, 1, 1]."""
        return self.degree.clamp(min=1).double()[:, None, None]

    # -------------------------------------------------------------------------------------------- bars

    def bars(
        self, x: dict[str, Tensor], parts: dict[str, Tensor], numbers: dict[str, Tensor], upstream: Tensor
    ) -> dict[str, Tensor]:
        """How far each number may be off."""
        dtype = DTYPES[self.case["dtype"]]
        own = torch.finfo(dtype).eps / 2
        wide = 2.0**-53 if dtype == torch.float64 else 2.0**-24  # roundoff of the arithmetic
        # Weights below the smallest normal number may be flushed to zero, and what they are multiplied by is less than
        # 2^20; results of 16 bits have coarser steps.
        tiny = 2.0**-1002 if dtype == torch.float64 else 2.0**-106
        tiny += torch.finfo(dtype).smallest_normal * own
        positive = {name: v.detach().abs().nan_to_num(posinf=0.0).requires_grad_() for name, v in x.items()}
        out, gradients, logit = self.magnitudes(positive, parts, upstream)
        depth = max([8, *(x[name].shape[-1] for name in ("query", "dst") if name in x)])
        most = max(self.table.shape[1], self.normalized.shape[1])
        terms = max(most, len(self.dst) * self.batch * self.heads)
        narrow = 2 * own if own > wide else 0.0
        weights = 2 * (depth + 4) * (logit + 1) * wide + narrow
        steep = STEEPNESS.get(self.case["reduce"], 1.0)
        relative = (weights + (most + 8) * wide) * steep
        back = (2 * weights + (terms + 16) * wide) * steep * max(steep, self.flatness) + narrow
        floor = 64 * tiny
        found = {"out": relative * out + 2 * own * numbers["out"].abs() + floor * (1 + out)}
        if "weights" in numbers:
            size = self._weight_size(parts, positive).reshape(numbers["weights"].shape)
            found["weights"] = (weights + 8 * wide) * size + 2 * own * numbers["weights"].abs() + floor
        for name in numbers:
            if name.startswith("d "):
                size = gradients[name[2:]]
                found[name] = back * size + 2 * own * numbers[name].abs() + floor * (1 + size)
        return found

    def magnitudes(
        self, x: dict[str, Tensor], parts: dict[str, Tensor], upstream: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], float]:
        """The output and the gradients with every term positive, and the largest sum of absolute terms of a logit."""
        case = self.case
        message = self.of_sources(x["value"], 2)
        if case["edge_value"]:
            message = message + self.of_edges(case["edge_value"], x["edge_value"], 2)
        up = upstream.abs().reshape(self.batch, *upstream.shape[len(case["batch"]) :])
        linear = case["reduce"] in ("sum", "mean", "max", "min")
        if not linear:  # every number of a row counts by the largest message there is
            up = up.sum(-1, keepdim=True).expand(*up.shape[:-1], message.shape[-1])
        up = self._to_edges(up)
        surrogate, logit = x["value"].sum() * 0.0, 0.0
        wanted = list(case["grad"])
        if "weights" in parts:
            size, keep = self._weight_size(parts, x), parts["keep"]
            weighted = (size * keep)[..., None] * message.detach()
            pushed = (size * keep)[..., None] * up
            logits = self._logit_size(x)
            logit = float(logits.detach().max()) if logits.numel() and case["normalize"] != "none" else 0.0
            if "sinks" in x and x["sinks"].numel():
                logit += float(x["sinks"].detach().max())
            if wanted:
                by_weight = keep * (up * message.detach()).sum(-1)  # gradient of each weight
                by_logit = by_weight if case["normalize"] == "none" else size * by_weight
                if case["normalize"] == "softmax_dst":  # kernels compute a second softmax, by row, whose terms cancel
                    of_rows = self.rows(by_logit, 0.0).sum(2) / self.rows(size, 0.0).sum(2).clamp(min=2.0**-1000)
                    by_logit = by_logit + size * self._to_edges(of_rows)
                if case["normalize"] in ("softmax", "softmax_dst"):
                    of_rows = self.rows(by_logit, 0.0, self.normalized).sum(2)
                    by_row = size * of_rows[:, self.owner]
                    if "sinks" in x:
                        surrogate = surrogate + (of_rows.detach() * x["sinks"]).sum()
                        # Some compute a softmax without the sink, and scale it: of its gradient, what the sink takes
                        # from the edges cancels.
                        shares = self.rows(size, 0.0, self.normalized).sum(2).clamp(min=2.0**-1000)
                        by_row = by_row / shares[:, self.owner]
                    by_logit = by_logit + by_row
                surrogate = surrogate + (by_logit.detach() * logits).sum()
        else:
            weighted, pushed = message.detach() * self.present[..., None], up * self.present[..., None]
        surrogate = surrogate + (pushed.detach() * message).sum()
        if linear:
            out = self.rows(weighted, 0.0).sum(2)
        else:
            rows = self.rows(weighted, 0.0)
            most = (
                rows.amax((2, 4), keepdim=True).squeeze(2) if rows.numel() else rows.sum((2, 4), keepdim=True)[:, :, 0]
            )
            width = message.shape[-1] * (12 if case["reduce"] == "pna" else 1)
            out = (1 + most).square().expand(*most.shape[:-1], width) * (1 + (self.degree[:, None, None] + 1.0).log())
            surrogate = surrogate * (1 + float(most.max()) if most.numel() else 1.0)
        found = torch.autograd.grad(surrogate, [x[n] for n in wanted], allow_unused=True) if wanted else ()
        pairs = zip(wanted, found, strict=True)
        gradients = {n: torch.zeros_like(x[n]) if g is None else g for n, g in pairs}
        return out.reshape(*case["batch"], *out.shape[1:]).detach(), gradients, logit

    def _to_edges(self, rows: Tensor) -> Tensor:
        """[B, E, ...] of numbers of destinations, [B, N, ...]."""
        return rows[:, self.dst]

    def _weight_size(self, parts: dict[str, Tensor], x: dict[str, Tensor]) -> Tensor:
        """Weights [B, E, H] with all terms positive; without a normalizer a weight is a logit."""
        return self._logit_size(x).detach() * self.present if self.case["normalize"] == "none" else parts["weights"]

    def _logit_size(self, x: dict[str, Tensor]) -> Tensor:
        """The sum of the absolute values of a logit's terms, [B, E, H]; x are absolute values."""
        case, score = self.case, self.case["score"]
        total: Tensor = x["value"].new_zeros(self.batch, len(self.dst), self.heads)
        if score and score["kind"] == "dot":
            key = self.of_sources(x["key"], 2)
            if score["edge_key"]:
                key = key + self.of_edges(score["edge_key"], x["edge_key"], 2)
            total = total + abs(score["scale"]) * (self.of_destinations(x["query"], 2) * key).sum(-1)
        elif score:
            trailing = 1 if score["kind"] == "additive" else 2
            ends = self.of_destinations(x["dst"], trailing) + self.of_sources(x["src"], trailing)
            if score["edge"]:
                ends = ends + self.of_edges(score["edge"], x["edge"], trailing)
            if score["activation"] == "tanh":  # csr computes it from an exponential: exact to a few u, however small
                ends = ends + 1.0
            total = total + ((ends * x["vector"]).sum(-1) if score["kind"] == "additive v2" else ends)
        for k, spec in enumerate(case["bias"]):
            total = total + self.of_edges(spec, x[f"bias{k}"], 1)
        total = total + self.of_nodes(x)
        return total


def _table(owner: np.ndarray, count: int) -> Tensor:
    """The edges of each node [count, most], padded with the number of edges."""
    degree = np.bincount(owner, minlength=count)
    order, first = np.argsort(owner, kind="stable"), np.cumsum(degree) - degree
    table = np.full((count, int(degree.max(initial=0))), len(owner))
    table[owner[order], np.arange(len(order)) - first[owner[order]]] = order
    return torch.from_numpy(table)


def activate(name: str | float, x: Tensor) -> Tensor:
    """LeakyReLU of a slope, or a function by its name."""
    if isinstance(name, str):
        return {"tanh": torch.tanh, "relu": torch.relu}[name](x)
    return torch.where(x > 0, x, name * x)


def drop_hash(seed: int, stream: np.ndarray, dst: np.ndarray, src: np.ndarray) -> np.ndarray:
    """The 32 bits that decide whether an edge is dropped: the product of three odd words, of the (batch, head) pair,
    the destination and the source, counted from half of the range on. Each is the mixing function "lowbias32" (Wellons
    2018) of a number and a key, which is a function of the seed's two halves."""
    low, high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)
    with np.errstate(over="ignore"):
        nodes = _mix(low) ^ high
        keys = low ^ _mix(high), _mix(nodes), _mix(~nodes)
        words = [
            _mix(key ^ x.astype(np.uint32)) | np.uint32(1) for key, x in zip(keys, (stream, dst, src), strict=True)
        ]
        return (words[0] * words[1] * words[2]) ^ np.uint32(1 << 31)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
