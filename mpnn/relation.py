"""Relations: an integer class on every edge, by rule.

A learned number, vector or linear map per class is what Shaw's and T5's relative positions, ALiBi, Swin's table,
Graphormer's spatial encoding and convolution have in common; they differ in the rule that names an edge's class.
A rule is looked up where it is needed, from the positions of the two ends; nothing of N x N is ever stored.
(Explicit graphs may carry a class per edge as data instead: `edge_type`.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Relation(ABC):
    """A rule from the positions of a destination and a source to a class in `[0, count)`."""

    count: int

    @abstractmethod
    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        """Classes of the edges src -> dst; integer positions that broadcast against each other, int64 result."""

    @property
    def is_value(self) -> bool:
        """Whether rules of this kind are compared by what they say. A rule that is equal only to itself may be new in
        each call, so a graph must not keep it."""
        return type(self).__eq__ is not object.__eq__


@dataclass(frozen=True)
class Offset(Relation):
    """How far the source stands from the destination, clipped: `clamp(j - i, -clip, clip) + clip`."""

    clip: int

    @property
    def count(self) -> int:  # type: ignore[override]
        return 2 * self.clip + 1

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (src - dst).clamp(-self.clip, self.clip) + self.clip


@dataclass(frozen=True)
class GridOffset(Relation):
    """Offset on an image of `width` pixels a row: `(dy + rows) * (2 * columns + 1) + (dx + columns)`.

    Offsets beyond `rows` and `columns` are clipped.
    """

    width: int
    rows: int
    columns: int

    @property
    def count(self) -> int:  # type: ignore[override]
        return (2 * self.rows + 1) * (2 * self.columns + 1)

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        dy = (src // self.width - dst // self.width).clamp(-self.rows, self.rows) + self.rows
        dx = (src % self.width - dst % self.width).clamp(-self.columns, self.columns) + self.columns
        return dy * (2 * self.columns + 1) + dx


@dataclass(frozen=True)
class Taps(Relation):
    """Which weight of a kernel lies on an edge between two images, as a convolution slides it: destination (y, x) hears
    source (y * stride - padding + a * dilation, x * stride - padding + b * dilation) by class a * columns + b.

    `width`: pixels a row of the sources. `dst_width`: of the destinations. `kernel`: its rows and columns. All pairs
    are (down, across). Offsets beyond the kernel are clipped.
    """

    width: int
    dst_width: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.kernel[0] * self.kernel[1]

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        down = self._tap(dst // self.dst_width, src // self.width, 0)
        across = self._tap(dst % self.dst_width, src % self.width, 1)
        return down * self.kernel[1] + across

    def _tap(self, dst: Tensor, src: Tensor, axis: int) -> Tensor:
        offset = src - dst * self.stride[axis] + self.padding[axis]
        return (offset // self.dilation[axis]).clamp(0, self.kernel[axis] - 1)


class Table(Relation):
    """Classes given outright, [num_dst, num_src] of integers: shortest-path lengths, say. Equal only to itself."""

    def __init__(self, classes: Tensor) -> None:
        if classes.dim() != 2 or classes.is_floating_point():
            raise ValueError(f"a relation table is an integer matrix [num_dst, num_src]; got {_describe(classes)}")
        if classes.numel() and int(classes.min()) < 0:
            raise ValueError("a relation table holds classes from 0 upward; it holds a negative one")
        self.classes = classes.long()
        self._moved = {self.classes.device: self.classes}
        self.count = int(classes.max()) + 1 if classes.numel() else 0

    def check_fits(self, num_dst: int, num_src: int, shift: int = 0) -> None:
        """Raises unless there is a class for every pair of a graph of this size."""
        if shift:
            raise ValueError("a relation table knows nothing of remembered sources (memory); give a rule instead")
        if self.classes.shape != (num_dst, num_src):
            raise ValueError(f"{self} does not fit a graph of {num_dst} x {num_src} (destinations x sources)")

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        if dst.device not in self._moved:
            self._moved[dst.device] = self.classes.to(dst.device)
        return self._moved[dst.device][dst, src]

    def __reduce__(self) -> Any:
        """The classes, checked again, without the copies on other devices."""
        return Table, (self.classes,)

    def __repr__(self) -> str:
        return f"Table({self.classes.shape[0]} x {self.classes.shape[1]}, {self.count} classes)"


@dataclass(frozen=True)
class Flipped(Relation):
    """The classes of the edges turned round."""

    inner: Relation

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.inner.count

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return self.inner.ids(src, dst)


def flipped(relation: Relation) -> Relation:
    """The same classes for the edges turned round."""
    return relation.inner if isinstance(relation, Flipped) else Flipped(relation)


def as_relation(given: Relation | Tensor) -> Relation:
    """A relation as it is, or the table that a matrix of classes stands for."""
    if isinstance(given, Relation):
        return given
    try:
        return Table(torch.as_tensor(given))
    except (TypeError, RuntimeError):
        raise TypeError(
            f"relation must be a Relation, or an integer matrix [num_dst, num_src]; got {type(given).__name__}"
        ) from None


def _describe(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}"
