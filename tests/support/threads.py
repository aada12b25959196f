"""Numbers of threads, for results that must not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def threads(count: int) -> Iterator[None]:
    """The block runs with so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_bits(compute: Callable[[], Sequence[Tensor]], *counts: int) -> bool:
    """Whether `compute()` gives the same bits with each of these numbers of threads."""
    found = []
    for count in counts:
        with threads(count):
            found.append(compute())
    return all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
