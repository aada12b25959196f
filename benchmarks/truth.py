"""No timing without a correctness check: rows drawn from the output, computed again in float64 by the specification.

The direction in which gradients are taken is zero everywhere but in these rows. Then gradients of queries, keys and
values follow from the drawn rows alone, and are exact at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor

from benchmarks.contest import BOTH, Entry
from mpnn import Graph, MessagePassing, graphs

MAX_ROWS = 48
MAX_NUMBERS = 2e7  # of the drawn rows' edges times features, in float64: 160 MB a tensor
# Of the largest number: some hundred times what float32 sums of thousands of terms lose, and far below one wrong edge.
TOLERANCE = 2e-4
NARROW = 3e-2  # bfloat16 keeps 8 bits of a number: results and gradients that were rounded several times on the way


class Wrong(AssertionError):
    """A result that must not be timed."""


class Sampled:
    """The truth of some rows.

    Args:
        graph: the edges of the attention.
        inputs: what the work is a function of, in the type in which it runs.
        compute: `compute(part, rows, *inputs)`, the output of these rows, which alone are the destinations of the
            graph `part`; it is called in float64.
        width: features an edge, which bounds the number of rows.
    """

    def __init__(
        self, graph: Graph, inputs: Sequence[Tensor], compute: Callable[..., Tensor], width: int, seed: int = 0
    ) -> None:
        self.rows = drawn(graph, width, seed)
        exact = [x.detach().double().requires_grad_() for x in inputs]
        out = compute(part_of(graph, self.rows), self.rows, *exact)
        self.direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.device)
        self.out = out.detach()
        self.gradients = torch.autograd.grad(out, exact, self.direction.double())

    @property
    def description(self) -> str:
        return f"float64 specification on {len(self.rows)} rows"

    def __call__(self, entry: Entry, direction: str) -> float:
        with torch.set_grad_enabled(direction == BOTH):
            out = entry.call()
        worst = error(entry.name, "output", out.detach()[self.rows], self.out)
        if direction == BOTH:
            on_rows = torch.zeros_like(out)
            on_rows[self.rows] = self.direction.to(out.dtype)
            found = torch.autograd.grad(out, list(entry.leaves), on_rows)
            # Some gradients are zero but for rounding, as that of a bias on all keys alike is.
            least = 1e-3 * max(float(g.abs().max()) for g in self.gradients)
            for i, (gradient, expected) in enumerate(zip(found, self.gradients, strict=True)):
                worst = max(worst, error(entry.name, f"gradient {i}", entry.view(gradient), expected, least))
        return worst


def of_layer(op: MessagePassing, graph: Graph, x: Tensor, width: int) -> Sampled:
    """The truth of a layer on features x [N, F] and of the gradients of x and every parameter, edge by edge.

    A graph of fewer nodes than x stands for the first of them, which over a causal graph do not attend to the others.
    """
    exact = deepcopy(op).double().eval()
    exact.backend = "edge_list"
    names, first = [name for name, _ in op.named_parameters()], graph.num_src

    def compute(part: Graph, rows: Tensor, x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(exact, named, (x[rows], part, x[:first]))

    return Sampled(graph, [x, *op.parameters()], compute, width)


class Agreement:
    """Where no specification is at hand: every entry must agree with the one that was asked first."""

    description = "the entries against each other"

    def __init__(self) -> None:
        self.first: dict[str, list[Tensor]] = {}

    def __call__(self, entry: Entry, direction: str) -> float:
        with torch.set_grad_enabled(direction == BOTH):
            out = entry.call() if entry.answer is None else entry.answer()
        found = [out.detach()]
        if direction == BOTH:
            same = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
            found += [entry.view(g) for g in torch.autograd.grad(out, list(entry.leaves), same)]
        expected = self.first.setdefault(direction, found)
        return max(error(entry.name, f"result {i}", *both) for i, both in enumerate(zip(found, expected, strict=True)))


def error(who: str, what: str, found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """The largest difference, relative to the largest number that is expected, or to `least` where that is larger.

    Raises:
        Wrong: it is above the tolerance, or not a number.
    """
    if found.shape != expected.shape:
        raise Wrong(f"{who}: its {what} has shape {list(found.shape)} and not {list(expected.shape)}")
    scale = expected.abs().max().clamp(min=least)
    worst = float((found.to(expected.dtype) - expected).abs().max() / scale)
    if not worst <= (TOLERANCE if found.dtype.itemsize > 2 else NARROW):
        raise Wrong(f"{who}: its {what} is off by {worst:.1e} of the largest number")
    return worst


def drawn(graph: Graph, width: int, seed: int) -> Tensor:
    """Rows to check, sorted: the first, the last and others at random, as long as their edges are not too many."""
    candidates = np.random.default_rng(seed).permutation(graph.num_dst)
    degree, left = graph.degree().cpu().numpy(), MAX_NUMBERS
    rows: list[int] = []
    for row in dict.fromkeys([0, graph.num_dst - 1, *candidates.tolist()]):
        if degree[row] * width <= left and len(rows) < MAX_ROWS:
            rows.append(row)
            left -= degree[row] * width
    return torch.tensor(sorted(rows), device=graph.device)


def part_of(graph: Graph, rows: Tensor) -> Graph:
    """The edges into these destinations, with the destinations renumbered."""
    if graph.is_explicit:
        place = torch.full((graph.num_dst,), -1, device=graph.device)
        place[rows] = torch.arange(len(rows), device=graph.device)
        src, dst = graph.edge_index[:, place[graph.edge_index[1]] >= 0]
        edges = torch.stack([src, place[dst]])
    else:
        dst, src = graph.runs.take(rows.cpu().numpy()).edges()
        edges = torch.from_numpy(np.stack([src, dst])).to(graph.device)
    return graphs.from_edges(edges, num_dst=len(rows), num_src=graph.num_src)
