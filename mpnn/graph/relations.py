"""Relations: rules that give every edge an integer edge type.

Shaw's and T5's relative positions, ALiBi, Swin's table, Graphormer's spatial encoding and convolution all learn a
number, a vector or a linear map per edge type; they differ in the rule that assigns the type. A rule is evaluated
inside the kernel from the positions of source and destination, so no N x N tensor is stored. Explicit graphs may store
the types as data instead: `edge_type`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph.arguments import INTEGERS, MAX_VALUE, check_form
from mpnn.graph.modes import outside_modes


class Relation(ABC):
    """A rule that maps the positions of a destination and a source to an edge type in `[0, count)`."""

    count: int

    @abstractmethod
    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        """The types of the edges src -> dst, int64. `dst` and `src` are integer positions that broadcast."""

    @property
    def is_value(self) -> bool:
        """Whether this rule compares by value. A rule that compares by identity may be a new object in each call, so
        graphs must not cache values under it."""
        return type(self).__eq__ is not object.__eq__

    def stamp(self) -> Hashable | None:
        """Of a rule that compares by identity: what the types depend on that may change. Graphs keep types as long as
        it stays the same. None: this is unknown, and the rule is called in each round."""
        return None


class _Checked(Relation):
    """A rule whose fields are validated, because kernels compute with them."""

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # while torch traces, they are symbols
            self._check(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._check(state)
        self.__dict__.update(state)

    def _check(self, state: dict[str, Any]) -> None:
        for name, least in _MIN_VALUES.items():
            numbers = state.get(name, least)
            for x in numbers if type(numbers) is tuple else (numbers,):
                if isinstance(x, bool) or not isinstance(x, (int, np.integer)) or not least <= x <= MAX_VALUE:
                    raise ValueError(f"{name} of {type(self).__name__} holds integers from {least} to 2**61; got {x!r}")


_MIN_VALUES = {"clip": 0, "rows": 0, "columns": 0, "padding": 0}
_MIN_VALUES |= {"width": 1, "dst_width": 1, "kernel": 1, "stride": 1, "dilation": 1}


@dataclass(frozen=True)
class Offset(_Checked):
    """The clipped relative position of the source: `clamp(j - i, -clip, clip) + clip`."""

    clip: int

    @property
    def count(self) -> int:  # type: ignore[override]
        return 2 * self.clip + 1

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (src - dst).clamp(-self.clip, self.clip) + self.clip


@dataclass(frozen=True)
class GridOffset(_Checked):
    """The relative position in an image of `width` pixels per row: `(dy + rows) * (2 * columns + 1) + (dx + columns)`.

    `dy` and `dx` are clipped to `rows` and `columns`.
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
class KernelOffset(_Checked):
    """The kernel weight of each edge of a convolution between two images.

    Destination (y, x) receives from source (y * stride - padding + a * dilation, x * stride - padding + b * dilation)
    with edge type a * columns + b. Offsets outside the kernel are clipped.

    `width` and `dst_width` are the pixels per row of the source and the destination image. `kernel` holds the rows and
    columns of the kernel. All pairs are (vertical, horizontal).
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
    """Edge types as an integer matrix [num_dst, num_src], such as shortest-path lengths. Compares by identity."""

    def __init__(self, classes: Tensor) -> None:
        if not isinstance(classes, Tensor):
            raise TypeError(f"a relation table is an integer matrix [num_dst, num_src]; got {classes!r}")
        expected = "a relation table is an integer matrix [num_dst, num_src]"
        check_form(expected, classes, (*INTEGERS, "bool"), (None, None))
        if classes.numel() and int(classes.min()) < 0:
            raise ValueError("edge types in a relation table must not be negative; it holds a negative one")
        # A copy, because kernels do not check types again.
        self.classes = outside_modes(lambda: classes.to(torch.int64, copy=True))
        self._moved: dict[torch.device, tuple[Hashable, Tensor]] = {}
        self.count = int(classes.max()) + 1 if classes.numel() else 0

    def check_fits(self, num_dst: int, num_src: int, shift: int = 0) -> None:
        """Raises ValueError unless the table has an edge type for every pair of a graph of this size."""
        if shift:
            raise ValueError("a relation table does not support memory nodes (memory); use a rule instead")
        if self.classes.shape != (num_dst, num_src):
            raise ValueError(f"{self} does not fit a graph of {num_dst} x {num_src} (destinations x sources)")

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        if dst.device == self.classes.device:
            return self.classes[dst, src]
        stamp = self.stamp()
        held = self._moved.get(dst.device)
        if held is None or held[0] != stamp:
            held = self._moved[dst.device] = stamp, outside_modes(lambda: self.classes.to(dst.device))
        return held[1][dst, src]

    def stamp(self) -> Hashable:
        return id(self.classes), self.classes._version

    def __reduce__(self) -> Any:
        """Pickles the matrix without its copies on other devices; unpickling validates it again."""
        return Table, (self.classes,)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle that is not made by `__reduce__` goes through the same checks."""
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"Table({self.classes.shape[0]} x {self.classes.shape[1]}, {self.count} edge types)"


@dataclass(frozen=True)
class Flipped(Relation):
    """The relation of the reversed edges."""

    inner: Relation

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.inner.count

    @property
    def is_value(self) -> bool:
        return self.inner.is_value

    def stamp(self) -> Hashable | None:
        return self.inner.stamp()

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return self.inner.ids(src, dst)


def flipped(relation: Relation) -> Relation:
    """Returns the relation that gives reversed edges the same types."""
    return relation.inner if type(relation) is Flipped else Flipped(relation)


def as_relation(relation: Relation | Tensor) -> Relation:
    """Returns a relation unchanged and converts an integer matrix to a `Table`."""
    if isinstance(relation, Relation):
        return relation
    try:
        return Table(torch.as_tensor(relation))
    except (TypeError, RuntimeError):
        raise TypeError(
            f"relation must be a Relation, or an integer matrix [num_dst, num_src]; got {type(relation).__name__}"
        ) from None
