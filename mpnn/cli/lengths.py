"""How the time of a training step grows with the length of the text, over several graphs."""

from collections.abc import Callable, Mapping, Sequence

import torch

from mpnn import Topology, ops
from mpnn.engine.tune import least
from mpnn.models import GPT

_VOCABULARY, _DIM, _HEADS, _LAYERS = 96, 64, 4, 2  # those of the demo's text model


def step_seconds(topologies: Mapping[str, Topology], lengths: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of a training step (forward, backward, update) of a GPT on one text of each length, for each topology."""
    by_length = [least([{name: _step(t, n) for name, t in topologies.items()}], 0)[0] for n in lengths]
    return {name: [of[name] for of in by_length] for name in topologies}


def attention_seconds(topologies: Mapping[str, Topology], length: int) -> dict[str, float]:
    """Seconds of attention alone, forward and backward, in the sizes of that GPT."""
    return least([{name: _attention(topology, length) for name, topology in topologies.items()}], 0)[0]


def _step(topology: Topology, length: int) -> Callable[[], object]:
    model = GPT(_VOCABULARY, _DIM, _HEADS, _LAYERS, topology, context=length)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tokens = torch.randint(_VOCABULARY, (1, length + 1))

    def step() -> None:
        optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()

    return step


def _attention(topology: Topology, length: int) -> Callable[[], object]:
    graph = topology.bind(length)
    query, key, value = (torch.randn(1, length, _HEADS, _DIM // _HEADS, requires_grad=True) for _ in range(3))
    return lambda: ops.attend(graph, query, key, value).sum().backward()
