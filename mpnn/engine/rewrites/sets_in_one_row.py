"""Aggregation over rows with the same sources, `complete()` and `documents(lengths)`: once for each set of sources.

    out_i = reduce_(j in S)( value_j )    for all i whose sources are S

So a function of a set takes O(N), where each row by itself would take O(N^2).
"""

import numpy as np
import torch
from torch import Tensor

from mpnn.backends.cost_model import Estimate
from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner, work
from mpnn.graph import Graph
from mpnn.graph.runs import Runs
from mpnn.round import Result, Round
from mpnn.round.needs import AGGREGATES, ANYWHERE, first


class SetsInOneRow(Rewrite):
    NAME = "each set once"
    SERVES = (ANYWHERE | AGGREGATES | {"no score", "keep_accumulate_dtype"}) - {"explicit graph"}

    def applies(self, round: Round) -> bool:
        return not round.weighted and round.score is None

    def refusal(self, round: Round) -> str | None:
        sizes = _sizes(round.graph)
        count = round.graph.num_dst if sizes is None else len(sizes)
        reasons = {
            # Sets of one row each are computed once in any case.
            "its rows do not share their sources": count == round.graph.num_dst,
            "on this device the sum of the gradients of a set has no fixed order": count > 1 and not round.value.is_cpu,
        }
        return first(reasons)

    def estimate(self, round: Round) -> Estimate:
        numbers = float(round.graph.num_dst * round.batch.numel() * round.value.shape[-2:].numel())
        return work({"call": 1.0, "copied number": numbers}, round, numbers * round.accumulate_dtype.itemsize)

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        graph = round.graph
        rows, owner = graph.cached("one row for each set", lambda: _rows(graph))

        def finish(result: Result) -> Result:
            if owner is None:
                # A row for each destination: a view of one row would be written to in all of them.
                return Result(result.out.repeat_interleave(graph.num_dst, -3))
            return Result(result.out.index_select(-3, owner))

        return round.with_fields(graph=rows), finish


def _sizes(graph: Graph) -> np.ndarray | None:
    """The sizes of the sets of sources, in the order of the nodes; None if rows do not share their sources."""
    parts = graph.parts
    if parts is None:
        return np.array([graph.num_src]) if graph.num_dst and graph.runs.is_complete else None
    # Parts lie one after the other, so that their sizes give their runs. Scattered ones do not.
    return parts.lengths if parts.count and parts.is_complete and not graph.is_scattered else None


def _rows(graph: Graph) -> tuple[Graph, Tensor | None]:
    """The graph with a row for each set, and the row of each destination; None if there is one."""
    sizes = _sizes(graph)
    assert sizes is not None
    stop = np.cumsum(sizes)
    runs = Runs(len(sizes), graph.num_src, np.arange(len(sizes) + 1), stop - sizes, stop)
    rows = Graph.from_runs(runs).to(graph.device)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return rows, None if len(sizes) == 1 else torch.from_numpy(owner).to(graph.device)
