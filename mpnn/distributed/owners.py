"""Which process owns which nodes: consecutive blocks of nodes, each with its owner."""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from mpnn.distributed.groups import all_gather


class Owners:
    """The owner of each of `num_nodes` nodes.

    Args:
        bounds: the first node of each block, and the number of nodes: int64 [blocks + 1], ascending from 0.
        owner: the owner of each block, int64 [blocks].
        ranks: the number of processes.
    """

    def __init__(self, bounds: Tensor, owner: Tensor, ranks: int) -> None:
        self.bounds = bounds
        self.owner = owner
        self.ranks = ranks
        self._kept: dict[torch.device, tuple[Tensor, Tensor] | None] = {}

    @staticmethod
    def of_sizes(sizes: Sequence[int]) -> "Owners":
        """Assigns consecutive nodes: rank r owns the `sizes[r]` nodes after those of the ranks before it."""
        bounds = torch.tensor([0, *sizes]).cumsum(0)
        return Owners(bounds, torch.arange(len(sizes)), len(sizes))

    @staticmethod
    def of_nodes(owner: Tensor, ranks: int) -> "Owners":
        """Creates owners from the owner of each node, int64 [num_nodes]."""
        change = (owner.diff() != 0).nonzero().squeeze(1) + 1
        first = torch.cat([change.new_zeros(min(1, len(owner))), change])
        return Owners(torch.cat([first, first.new_tensor([len(owner)])]), owner[first], ranks)

    @staticmethod
    def of_cost(cost: Tensor, ranks: int) -> "Owners":
        """Assigns each rank consecutive nodes of about the same total cost. cost: [num_nodes], not negative."""
        total = cost.double().cumsum(0)
        share = (total[-1] if len(total) else total.new_zeros(())) * torch.arange(1, ranks, dtype=torch.float64) / ranks
        cuts = torch.searchsorted(total - cost.double() / 2, share)
        return Owners.of_sizes(torch.cat([cuts.new_zeros(1), cuts, cuts.new_tensor([len(cost)])]).diff().tolist())

    @staticmethod
    def equal(num_nodes: int, ranks: int) -> "Owners":
        """Assigns each rank the same number of consecutive nodes; numbers differ by at most one."""
        return Owners.of_sizes([num_nodes * (r + 1) // ranks - num_nodes * r // ranks for r in range(ranks)])

    @staticmethod
    def zigzag(num_nodes: int, ranks: int) -> "Owners":
        """Assigns rank r the r-th block from the front and the r-th from the back of 2 * ranks equal blocks, so that
        each has its share of the long rows of a causal graph (Llama 3: Grattafiori et al. 2024, section 3.3.2)."""
        bounds = torch.tensor([num_nodes * b // (2 * ranks) for b in range(2 * ranks + 1)])
        return Owners(bounds, torch.tensor([*range(ranks), *reversed(range(ranks))]), ranks)

    @property
    def num_nodes(self) -> int:
        return int(self.bounds[-1])

    @cached_property
    def sizes(self) -> list[int]:
        """The number of nodes of each rank."""
        return torch.zeros(self.ranks, dtype=torch.int64).index_add(0, self.owner, self.bounds.diff()).tolist()

    def nodes(self, rank: int) -> Tensor:
        """Returns the nodes of a rank, int64 ascending."""
        mine = (self.owner == rank).nonzero().squeeze(1)
        first = self.bounds[mine]
        size = self.bounds.diff()[mine]
        before = size.cumsum(0) - size  # nodes of the rank before each of its blocks
        return torch.arange(int(size.sum())) + torch.repeat_interleave(first - before, size)

    def block(self, rank: int) -> tuple[int, int] | None:
        """Returns the first and last + 1 node of a rank that owns one block; None if it owns several."""
        mine = ((self.owner == rank) & (self.bounds.diff() > 0)).nonzero().squeeze(1).tolist()
        if not mine:
            return 0, 0
        return (int(self.bounds[mine[0]]), int(self.bounds[mine[0] + 1])) if len(mine) == 1 else None

    def of(self, nodes: Tensor) -> Tensor:
        """Returns the owner of each of these nodes, int64."""
        return self.owner[torch.searchsorted(self.bounds, nodes, right=True) - 1]

    def gather(self, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        """Gathers the rows along `dim` of all processes, in the order of nodes, from this process's. It has no
        gradient."""
        rows = x.movedim(dim, 0)
        padded = torch.cat([rows, rows.new_zeros(max(self.sizes) - len(rows), *rows.shape[1:])])
        parts = [part[:size] for part, size in zip(all_gather(padded, group), self.sizes, strict=True)]
        return self.in_order(torch.cat(parts)).movedim(0, dim)

    def by_owner(self, x: Tensor) -> Tensor:
        """Reorders the rows of all nodes, [num_nodes, ...], by owner, those of rank 0 first."""
        orders = self._orders(x.device)
        return x if orders is None else x.index_select(0, orders[0])

    def in_order(self, x: Tensor) -> Tensor:
        """Reorders rows by owner, those of rank 0 first, to the order of nodes; the inverse of `by_owner`."""
        orders = self._orders(x.device)
        return x if orders is None else x.index_select(0, orders[1])

    def _orders(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """The nodes by owner, and the place of each node there; None if that is their order."""
        if device not in self._kept:
            nodes = torch.cat([self.nodes(rank) for rank in range(self.ranks)])
            ordered = bool((nodes.diff() > 0).all())
            self._kept[device] = None if ordered else (nodes.to(device), nodes.argsort().to(device))
        return self._kept[device]

    def __repr__(self) -> str:
        return f"Owners({self.num_nodes:,} nodes: {', '.join(f'{size:,}' for size in self.sizes)})"
