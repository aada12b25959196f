"""What backends count of rounds, from which their prices follow: as in `counts.json`.

A change of a formula shows here as the numbers that it changes. Where it is meant, write the file again:

    PYTHONPATH=.:tests/support python tests/backends/test_counts.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from capabilities import REQUESTS, converted
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.backends import BACKENDS
from mpnn.engine.choice import own_refusal
from mpnn.engine.rewrites.prepare import as_planned
from mpnn.round import Round

FILE = Path(__file__).with_name("counts.json")
GRAPHS = {
    "documents": (graphs.documents([40, 24]) & graphs.causal()).bind(64),
    "a window and a hub": (graphs.window(3) | graphs.global_nodes(1)).bind(64),
    "edges": graphs.from_edges((graphs.causal() & graphs.window(5)).bind(64).edge_index.flip(1), 64),
}


def counted(name: str, graph: Graph, grad: bool) -> dict[str, Any]:
    """What each backend counts of a round, its bytes of working memory, or that it refuses it."""

    def convert(x: Tensor) -> Tensor:
        return x.detach().float().requires_grad_(grad) if x.is_floating_point() else x

    round = as_planned(converted(REQUESTS[name](graph), convert), "auto")
    return {backend.NAME: _of(backend, round) for backend in BACKENDS if backend.NAME != "scatter"}


def _of(backend: Any, round: Round) -> Any:
    if own_refusal(backend, round) is not None:
        return "refused"
    counts = {**backend.counts(round), "bytes": backend.estimate(round).bytes}
    return {kind: int(n) if n == int(n) else float(f"{n:.6g}") for kind, n in counts.items()}


def all_counts() -> dict[str, Any]:
    return {
        f"{name}, {of}, {'with' if grad else 'without'} gradients": counted(name, graph, grad)
        for name in REQUESTS
        for of, graph in GRAPHS.items()
        for grad in (False, True)
        if not (grad and "without gradients" in name)
    }


@pytest.mark.parametrize("name", REQUESTS)
def test_backends_count_what_the_record_has(name: str) -> None:
    recorded = json.loads(FILE.read_text())
    for of, graph in GRAPHS.items():
        for grad in (False, True):
            if grad and "without gradients" in name:
                continue
            expected = recorded[f"{name}, {of}, {'with' if grad else 'without'} gradients"]
            assert counted(name, graph, grad) == expected, (of, grad)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as tests do
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in all_counts().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
