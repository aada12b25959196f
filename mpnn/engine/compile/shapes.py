"""The shapes of the results of `torch.ops.mpnn.run`, which torch asks for while it traces a program."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mpnn.engine.compile.form import Call, read, unflatten
from mpnn.graph import Graph
from mpnn.round import validation
from mpnn.scores import Dot


def forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = Call(*arguments)
    form = read(call.form)
    value = call.tensors[0]
    round = unflatten(call, cast(Graph, Sizes(call.sizes, value.device)))
    # Wrong shapes are refused while the program is traced: the traceback then shows the caller's line.
    validation.round(round)
    # Most aggregators keep heads and width. `reduced` holds both for one that does not.
    heads, width = form.reduced or (round.heads, value.shape[-1])
    out = value.new_empty(*round.batch, call.sizes[0], heads, width)
    # A log-sum-exp has a row for each destination, weights have one for each edge.
    rows = call.sizes[0] if round.return_lse else call.sizes[2]
    more = value.new_empty((*round.batch, rows, round.heads) if round.return_weights or round.return_lse else (0,))
    if round.return_state:
        shape = (*round.batch, round.heads, cast(Dot, round.score).key.shape[-1], value.shape[-1])
        more = value.new_empty(shape, dtype=round.accumulate_dtype)
    return out, more, torch.empty((), dtype=torch.int64)


class Sizes:
    """A stand-in for a graph, of whose numbers of nodes and edges some may be symbols."""

    positions = types = None
    shift = 0
    num_edge_types = 0

    def __init__(self, sizes: Sequence[Any], device: torch.device | None = None) -> None:
        self.num_dst, self.num_src, self.num_edges = sizes[:3]
        self.device = device

    def cached(self, key: Any, build: Callable[[], Any]) -> Any:
        return build()

    def __repr__(self) -> str:
        return f"the graph ({self.num_dst} x {self.num_src})"
