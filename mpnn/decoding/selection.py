"""Selection without replacement: orders a set of items by selecting one after the other, as pointer networks do."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpnn.graph import Graph

Step = Callable[[Tensor, Graph], Tensor]
"""The items selected so far, int64 [B, n], and a graph in which destination b receives from the remaining items of
entry b, numbered `b * count + item` -> probabilities of the remaining items, [E] in the order of its edges."""


@torch.no_grad()
def select_in_order(
    step: Step,
    batch: int,
    count: int,
    device: torch.device,
    *,
    sample: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Returns orders of `count` items for each of `batch` entries, int64 [B, count].

    Args:
        step: computes the probabilities of the remaining items.
        sample: sample from the probabilities; otherwise select the most likely item.
        generator: random generator for sampling.
    """
    remaining = torch.ones(batch, count, dtype=torch.bool, device=device)
    order = torch.empty(batch, 0, dtype=torch.int64, device=device)
    for left in range(count, 0, -1):
        entry, item = remaining.nonzero(as_tuple=True)
        graph = Graph.from_edges(torch.stack([entry * count + item, entry]), batch, batch * count)
        probability = step(order, graph).view(batch, left)
        if sample:
            choice = torch.multinomial(probability, 1, generator=generator)
        else:
            choice = probability.argmax(1, keepdim=True)
        selected = item.view(batch, left).gather(1, choice)
        remaining.scatter_(1, selected, False)
        order = torch.cat([order, selected], 1)
    return order
