"""No timing without a correctness check: rows drawn from the output, computed again in float64 by the specification.

The direction in which gradients are taken is zero everywhere but in these rows. Then gradients of queries, keys and
values follow from the drawn rows alone, and are exact at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from benchmarks.contest import BOTH, Entry
from mpnn import Graph, MessagePassing, graphs

MAX_ROWS = 48
MAX_NUMBERS = 2e7  # of the drawn rows' edges times features, in float64: 160 MB a tensor
# Of the largest number: some hundred times what float32 sums of thousands of terms lose, and far below one wrong edge.
TOLERANCE = 2e-4
# Of the norm: bfloat16 keeps 8 bits of a number, and results and gradients were rounded several times on the way.
NARROW = 6e-2


class Wrong(AssertionError):
    """A result that must not be timed."""


class Sampled:
    """The truth of some rows.

    Args:
        graph: the edges of the attention.
        inputs: what the work is a function of, in the type in which it runs.
        compute: `compute(part, rows, *inputs)`, the output of these rows, which alone are the destinations of the
            graph `part`; it is called in float64, when something is checked.
        width: features an edge, which bounds the number of rows.
        dim: of the output, along which rows are counted.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Tensor],
        compute: Callable[..., Tensor],
        width: int,
        seed: int = 0,
        dim: int = 0,
    ) -> None:
        self.rows = drawn(graph, width, seed)
        self.dim = dim
        self.inputs = inputs
        self.compute = lambda *exact: compute(part_of(graph, self.rows), self.rows, *exact)

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The output of the rows, a direction, and the gradients along it."""
        exact = [x.detach().double().requires_grad_() for x in self.inputs]
        with torch.enable_grad():
            out = self.compute(*exact)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)
        return out.detach(), direction, torch.autograd.grad(out, exact, direction.double())

    @property
    def description(self) -> str:
        return f"float64 specification on {len(self.rows)} rows"

    def __call__(self, entry: Entry, direction: str) -> float:
        with torch.set_grad_enabled(direction == BOTH):
            out = entry.call() if entry.answer is None else entry.answer()
        expected, along, gradients = self.exact
        worst = error(entry.name, "output", out.detach().index_select(self.dim, self.rows), expected)
        if direction == BOTH:
            on_rows = torch.zeros_like(out).index_copy(self.dim, self.rows, along.to(out.dtype))
            found = torch.autograd.grad(out, list(entry.leaves), on_rows)
            # Some gradients are zero but for rounding, as that of a bias on all keys alike is.
            narrow = is_narrow(entry)
            least = smallest(gradients, narrow)
            for i, (gradient, expected) in enumerate(zip(found, gradients, strict=True)):
                worst = max(worst, error(entry.name, f"gradient {i}", entry.view(gradient), expected, least, narrow))
        return worst


def of_layer(op: MessagePassing, graph: Graph, x: Tensor, width: int) -> Sampled:
    """The truth of a layer on features x [..., N, F] and of the gradients of x and every parameter, edge by edge.

    A graph of fewer nodes than x stands for the first of them, which over a causal graph do not attend to the others.
    """
    exact = deepcopy(op).double().eval()
    exact.backend = "edge_list"
    names, first = [name for name, _ in op.named_parameters()], graph.num_src
    prepare = getattr(exact.update, "prepare", lambda x: x)

    def compute(part: Graph, rows: Tensor, x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        sources = x.narrow(-2, 0, first)
        # a function, which is called while the parameters are those given
        return torch.func.functional_call(exact, named, (x.index_select(-2, rows), part, lambda _: prepare(sources)))

    return Sampled(graph, [x, *op.parameters()], compute, width, dim=-2)


class Whole:
    """All numbers of a function of the inputs and all their gradients, which `compute` gives in float64. The entry must
    give the same bits twice."""

    description = "float64 specification, all numbers, and the same bits twice"

    def __init__(self, inputs: Sequence[Tensor], compute: Callable[..., Tensor]) -> None:
        self.inputs, self.compute = inputs, compute

    def __call__(self, entry: Entry, direction: str) -> float:
        exact = [x.detach().double().requires_grad_() for x in self.inputs]
        expected = self.compute(*exact)
        generator = torch.Generator(expected.device).manual_seed(0)
        along = torch.randn(expected.shape, generator=generator, device=expected.device)
        found = [self._results(entry, along, direction) for _ in range(2)]
        for what, (once, again) in enumerate(zip(*found, strict=True)):
            if not torch.equal(once.nan_to_num(), again.nan_to_num()):
                raise Wrong(f"{entry.name}: result {what} has other bits the second time")
        exact_results = [expected.detach()]
        if direction == BOTH:
            exact_results += torch.autograd.grad(expected, exact, along.double())
        narrow = is_narrow(entry)
        least = smallest(exact_results, narrow)
        return max(
            error(entry.name, f"result {i}", *both, least, narrow)
            for i, both in enumerate(zip(found[0], exact_results, strict=True))
        )

    def _results(self, entry: Entry, along: Tensor, direction: str) -> list[Tensor]:
        with torch.set_grad_enabled(direction == BOTH):
            out = entry.call()
        gradients = torch.autograd.grad(out, list(entry.leaves), along.to(out.dtype)) if direction == BOTH else ()
        return [out.detach(), *gradients]


class Agreement:
    """Where there is no specification: every entry must agree with the one that was asked first."""

    description = "the entries against each other"

    def __init__(self) -> None:
        self.first: dict[str, list[Tensor]] = {}

    def __call__(self, entry: Entry, direction: str) -> float:
        with torch.set_grad_enabled(direction == BOTH):
            out = entry.call() if entry.answer is None else entry.answer()
        found = [out.detach()]
        if direction == BOTH:
            generator = torch.Generator(out.device).manual_seed(0)
            same = torch.randn(out.shape, generator=generator, device=out.device).to(out)
            found += [entry.view(g) for g in torch.autograd.grad(out, list(entry.leaves), same)]
        expected = self.first.setdefault(direction, found)
        return max(error(entry.name, f"result {i}", *both) for i, both in enumerate(zip(found, expected, strict=True)))


def is_narrow(entry: Entry) -> bool:
    return any(x.dtype.itemsize <= 2 for x in entry.leaves)


def smallest(results: Sequence[Tensor], narrow: bool) -> float:
    """The size that the error of a result is relative to at least: what cancels is not compared with itself."""
    if narrow:
        return 0.3 * max(float(x.norm()) for x in results)
    return 1e-3 * max(float(x.abs().max()) for x in results)


def error(
    who: str, what: str, found: Tensor, expected: Tensor, least: float = 1e-30, narrow: bool | None = None
) -> float:
    """The largest difference, relative to the largest number that is expected, or to `least` where that is larger. Of
    numbers that come from 16 bits, where single ones may cancel: the norm of the difference over that of the numbers.

    Raises:
        Wrong: it is above the tolerance, or not a number.
    """
    if found.shape != expected.shape:
        raise Wrong(f"{who}: its {what} has shape {list(found.shape)} and not {list(expected.shape)}")
    narrow = found.dtype.itemsize <= 2 if narrow is None else narrow
    difference, size = found.double() - expected.double(), expected.double()
    if narrow:
        worst = float(difference.norm() / size.norm().clamp(min=least))
    else:
        worst = float(difference.abs().max() / size.abs().max().clamp(min=least))
    if not worst <= (NARROW if narrow else TOLERANCE):
        raise Wrong(f"{who}: its {what} is off by {worst:.1e} of {'its norm' if narrow else 'the largest number'}")
    return worst


def drawn(graph: Graph, width: int, seed: int) -> Tensor:
    """Rows to check, sorted: the first, the last and others at random, as long as their edges are not too many."""
    candidates = np.random.default_rng(seed).permutation(graph.num_dst)
    degree, left = graph.degree().cpu().numpy(), MAX_NUMBERS
    rows: list[int] = []
    for row in dict.fromkeys([0, graph.num_dst - 1, *candidates.tolist()]):
        if not rows or (degree[row] * width <= left and len(rows) < MAX_ROWS):
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
