"""Attention over sources that arrive block by block: of one other process at a time, so that a process holds its own
nodes and two blocks, however large its halo is (ring attention: Liu et al. 2023, arXiv:2310.01889; SAR: Mostafa 2022).

Keys and values travel. Results over the blocks are merged by their log-sum-exp. The backward pass fetches the blocks
again and computes each a second time, with the gradients that follow from the merged result:

    out = sum_k w_k out_k,   w_k = exp(lse_k - lse)      d_out_k = w_k d_out,   d_lse_k = w_k <d_out, out_k - out>
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpnn import ops
from mpnn.distributed.groups import all_to_all
from mpnn.distributed.halo import (
    Kind,
    OwnExchange,
    Part,
    checked_pieces,
    lists,
    mapped,
    operands,
    refusal_in_pieces,
    rows_of,
)
from mpnn.distributed.owners import Owners
from mpnn.graph import Graph
from mpnn.graph.exchange import Layer
from mpnn.kernels.derivatives import once_differentiable
from mpnn.round import Round

Run = Callable[[Round], tuple[Tensor, "Tensor | None"]]


def view_of(graph: Graph, dst: Owners, src: Owners, group: dist.ProcessGroup) -> Graph:
    """The destinations of this process over all sources."""
    rank = dist.get_rank(group)
    view = rows_of(graph, rank, dst).alias()
    everything = torch.arange(graph.num_src, dtype=torch.int32, device=graph.device)
    view.node_ids = dst.nodes(rank).int().to(graph.device), everything
    view.name = graph.name
    view.exchange = StreamExchange(graph, dst, src, group)
    return view


class StreamExchange(OwnExchange):
    """Brings the sources of one process after the other. See `mpnn.graph.exchange.Exchange`."""

    transport = "stream"

    def __init__(self, graph: Graph, dst: Owners, src: Owners, group: dist.ProcessGroup) -> None:
        super().__init__(graph, dst, src, group)
        part = Part.of(graph, self.rank, dst, src)
        self._leaving = lists(part, src, group)[1]
        self._arriving = part.fetched
        self.own = src.nodes(self.rank).to(graph.device)
        owner = src.of(part.sources.cpu()).to(graph.device)
        self._sources = [part.sources[owner == r] for r in range(self.ranks)]
        self._sources[self.rank] = self.own

    def refusal(self, layer: Layer) -> str | None:
        return refusal_in_pieces(layer)

    def run(self, rounds: tuple[Round, ...], run: Run) -> tuple[Tensor, None]:
        (round,) = checked_pieces(rounds, self.transport)
        tensors = [x for x, _, _ in operands(round)]
        return _Stream.apply(self, round, run, *tensors), None

    def owner(self, step: int) -> int:
        """The process whose block is used in a step, from this process's own on."""
        return (self.rank + step) % self.ranks

    def fetch(self, x: Tensor, step: int, dim: int) -> Tensor:
        """The rows of the block of a step, from its owner; x holds the own rows along `dim`."""
        if not step:
            return x
        to = (self.rank - step) % self.ranks
        source = self.owner(step)
        rows = x.movedim(dim, 0).index_select(0, self._leaving[to])
        arrived = self._travel(rows, self._arriving[source], source, to)
        self.received += arrived.nbytes
        return arrived.movedim(0, dim)

    def send_back(self, gradient: Tensor, step: int, dim: int, total: Tensor) -> None:
        """Adds the gradients of the rows that were sent in a step to `total`, and sends those of the block back."""
        if not step:
            total += gradient
            return
        to = (self.rank - step) % self.ranks
        source = self.owner(step)
        arrived = self._travel(gradient.movedim(dim, 0), len(self._leaving[to]), to, source)
        total.movedim(dim, 0).index_add_(0, self._leaving[to], arrived.to(total.dtype))

    def _travel(self, rows: Tensor, arriving: int, source: int, to: int) -> Tensor:
        of_source = [arriving if rank == source else 0 for rank in range(self.ranks)]
        of_target = [len(rows) if rank == to else 0 for rank in range(self.ranks)]
        return all_to_all(rows.contiguous(), of_source, of_target, self.group)

    def block(self, round: Round, step: int, features: list[Tensor]) -> Round:
        """The round over the block of a step. `features`: its tensors, sources being those of the block."""
        graph = round.graph
        sources = self._sources[self.owner(step)]
        part = graph.cached(("sources of", self.owner(step)), lambda: graph.columns(sources))
        if part.node_ids is None and graph.node_ids is not None:
            part.node_ids = graph.node_ids[0], sources.int()
        following = iter(features)

        def visit(x: Tensor, kind: Kind, trailing: int) -> Tensor:
            x = next(following)
            if kind != "edge":
                return x
            key = "edges of", self.owner(step)
            kept = graph.cached(key, lambda: torch.isin(graph.ends[0], sources).nonzero().squeeze(1))
            return x.index_select(-1 - trailing, kept)

        return replace(mapped(round, visit), graph=part, return_lse=True)


class _Stream(torch.autograd.Function):
    """Inputs: the exchange, the round, what runs a round, and the tensors of the round in `mapped`'s order."""

    @staticmethod
    def forward(ctx: Any, exchange: StreamExchange, round: Round, run: Run, *tensors: Tensor) -> Tensor:
        nodes = _dimensions(round)
        out = lse = None
        for step in range(exchange.ranks):
            features = [
                x if dim is None else exchange.fetch(x, step, dim) for x, dim in zip(tensors, nodes, strict=True)
            ]
            part, more = run(exchange.block(round, step, features))
            assert more is not None
            part = part.to(round.accumulate_dtype)
            out, lse = (part, more) if out is None or lse is None else ops.merge([(out, lse), (part, more)])
        assert out is not None
        assert lse is not None
        ctx.exchange = exchange
        ctx.round = round
        ctx.run = run
        ctx.nodes = nodes
        ctx.save_for_backward(out, lse, *tensors)
        return out.to(round.value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        out, lse, *tensors = ctx.saved_tensors
        exchange = ctx.exchange
        needed = ctx.needs_input_grad[3:]
        totals = [torch.zeros_like(x) if need else None for x, need in zip(tensors, needed, strict=True)]
        d_out = d_out.to(out.dtype)
        for step in range(exchange.ranks):
            features = [
                (x if dim is None else exchange.fetch(x, step, dim)).detach().requires_grad_(need)
                for x, dim, need in zip(tensors, ctx.nodes, needed, strict=True)
            ]
            with torch.enable_grad():
                part, more = ctx.run(exchange.block(ctx.round, step, features))
            share = torch.where(lse == -torch.inf, torch.zeros_like(lse), (more.detach() - lse).exp())
            d_part = share[..., None] * d_out
            d_more = (d_part * (part.detach().to(out.dtype) - out)).sum(-1)
            wanted = [x for x in features if x.requires_grad]
            computed = torch.autograd.grad((part, more), wanted, (d_part.to(part.dtype), d_more), allow_unused=True)
            gradients = iter(computed)
            for x, dim, total in zip(features, ctx.nodes, totals, strict=True):
                if total is None:
                    continue
                gradient = next(gradients)
                gradient = torch.zeros_like(x) if gradient is None else gradient
                if dim is None:
                    total += gradient
                else:
                    exchange.send_back(gradient, step, dim, total)
        return None, None, None, *totals


def _dimensions(round: Round) -> list[int | None]:
    """For each tensor of the round, the dimension along which sources stand, if it has one."""
    return [-1 - trailing if kind == "src" else None for _, kind, trailing in operands(round)]
