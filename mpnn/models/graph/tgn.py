"""TGN's memory: a state of each node, which its events change."""

from typing import Any

import torch
from torch import Tensor

from mpnn import Graph, MessagePassing
from mpnn.graphs.compressed import check_nodes
from mpnn.graphs.encodings import TimeEncoding
from mpnn.models.saving import Model
from mpnn.update import GRU


class TGNMemory(Model):
    """The memory of temporal graph networks (Rossi et al. 2020, arXiv:2006.10637, eq. 1 to 3). An event between i and j
    at time t, with features e, sends a message to both.

        m_i = [s_i || s_j || e || Phi(t - t_i)],   s_i <- GRU( input = last or mean of m_i, hidden = s_i )

    t_i is the time of the last event of i before. Memories and times are buffers, zero at first.

    - topology: bipartite, from events to the nodes at their ends; for "last", from the last event of each node
    - attention: none
    - aggregate: sum (of the one message), or mean
    - update: GRU

    Args:
        num_nodes, message_dim, dim, time_dim: number of nodes; widths of the features of events, of memories, and of
            the encoding of times.
        aggregate: "last" or "mean".
    """

    memory: Tensor
    times: Tensor

    def __init__(
        self, num_nodes: int, message_dim: int, dim: int = 100, time_dim: int = 100, aggregate: str = "last"
    ) -> None:
        super().__init__()
        if aggregate not in ("last", "mean"):
            raise ValueError(f"aggregate must be 'last' or 'mean'; got {aggregate!r}")
        self.message_dim = message_dim
        self.is_last = aggregate == "last"
        self.encode = TimeEncoding(time_dim)
        update = GRU(dim, 2 * dim + message_dim + time_dim)
        self.round = MessagePassing(None, "sum" if self.is_last else "mean", update)
        self.register_buffer("memory", torch.zeros(num_nodes, dim))
        self.register_buffer("times", torch.zeros(num_nodes, dtype=torch.int64))
        self._changes: tuple[Tensor, Tensor, Tensor, Tensor, Graph] | None = None

    def forward(self, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Maps nodes int64 [n] to their memories [n, dim], and the times of their last events, int64 [n]. Gradients
        flow to the weights through the update of the memories by the last `observe`."""
        memory, times = self.memory.index_select(0, nodes), self.times.index_select(0, nodes)
        if self._changes is None or not torch.is_grad_enabled():
            return memory, times
        changed, before, parts, age, to_nodes = self._changes
        at = torch.searchsorted(changed, nodes).clamp(max=len(changed) - 1)
        new = self._updated(before, parts, age, to_nodes).index_select(0, at)
        return torch.where((changed[at] == nodes)[:, None], new, memory), times

    @torch.no_grad()
    def observe(self, src: Tensor, dst: Tensor, time: Tensor, message: Tensor) -> None:
        """Updates the memories of the ends of events, which follow the events before in time. A node that has several
        is updated once, and messages are computed from memories before all of them. Of events at one time, the last is
        the last in the order of the arguments.

        Args:
            src, dst, time: int64 [E]. message: [E, message_dim], which gets no gradient.

        Raises:
            ValueError: shapes, dtypes or nodes do not fit, or an event is before the last of one of its nodes.
        """
        for ends in (src, dst):
            check_nodes(ends.cpu().numpy(), len(self.memory), distinct=False)
        if time.dtype != torch.int64 or not src.shape == dst.shape == time.shape:
            raise ValueError(f"time must be int64 [{len(src)}], as src and dst; got {time.dtype} {list(time.shape)}")
        if message.shape != (len(src), self.message_dim):
            raise ValueError(f"message must be [{len(src)}, {self.message_dim}]; got {list(message.shape)}")
        own = torch.stack([src, dst], 1).flatten()  # event by event, so that stable sorting keeps the order of events
        other = torch.stack([dst, src], 1).flatten()
        time = time.repeat_interleave(2)
        if (late := time < self.times[own]).any():
            k = int(late.nonzero()[0])
            raise ValueError(f"an event of node {own[k]} at {time[k]} is before its last one, at {self.times[own[k]]}")
        nodes, end = own.unique(return_inverse=True)
        order = time.argsort(stable=True)
        order = order[end[order].argsort(stable=True)]
        last = order[end.bincount(minlength=len(nodes)).cumsum(0) - 1]
        sent = last if self.is_last else torch.arange(len(own), device=own.device)
        own = own[sent]
        other = other[sent]
        parts = torch.cat([self.memory[own], self.memory[other], message[sent // 2]], -1)
        edges = torch.stack([torch.arange(len(sent), device=own.device), end[sent]])
        to_nodes = Graph.from_edges(edges, len(nodes), len(sent))
        changes = self.memory[nodes], parts, time[sent] - self.times[own], to_nodes
        self._changes = (nodes, *changes) if len(nodes) else None
        self.memory.index_copy_(0, nodes, self._updated(*changes))
        self.times.index_copy_(0, nodes, time[last])

    def reset(self) -> None:
        """Forgets all events."""
        self._changes = None
        self.memory.zero_()
        self.times.zero_()

    def _updated(self, memory: Tensor, parts: Tensor, age: Tensor, to_nodes: Graph) -> Tensor:
        messages = torch.cat([parts, self.encode(age)], -1)
        return self.round(memory, to_nodes, source=messages).to(memory.dtype)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._changes = None
