"""Scores: how the logit of an edge follows from the features of its two ends and of the edge itself.

A score is declared once, here or in a file of its own. The round derives its heads and tensors from the declaration,
validation its shapes, `edge_list` its reference, compiled programs its arguments, and the row kernels of `csr` the form
that they compute. Scores are never modified. They are not frozen dataclasses, because a frozen one takes longer to
create than a sum over a molecule takes to run.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.graph.edge_tables import PerEdge


class Role(NamedTuple):
    """The role of a field of a score: the features of one end of each edge, or of the edge itself.

    Attributes:
        of: in a score "dst" for [..., N_dst, H, D], "src" for [..., N_src, H, D], or "edge" for [..., E, H, D] in the
            caller's edge order or a table [edge types, H, D], or None.
        vectors: False for numbers, which have no last dimension D.
        grouped: heads may share a vector: [..., H_kv, D], with H a multiple of H_kv.
    """

    of: Literal["dst", "src", "edge", "table", "parameter", "none"]
    vectors: bool = True
    grouped: bool = False

    @property
    def trailing(self) -> int:
        """The number of dimensions after the nodes or edges."""
        return 2 if self.vectors else 1


PARAMETER = Role("parameter", vectors=False)


class Score(Protocol):
    """A score gives its reference in plain torch. It is a dataclass of features and parameters.

    `roles` names the fields that hold features of nodes and edges. All other fields are parameters: tensors such as
    [H, D], numbers, functions. `logits` gets each field in `roles` by name, with one row for each edge, [E, ..., H, D]
    or [E, ..., H], or None if the field is None. It returns the logits [E, ..., H].

    Two methods are optional. `validate(value)` raises ValueError or TypeError if the fields do not fit together, or to
    the values. `lower()` returns an equal `Dot`, `AdditiveScore` or `AdditiveV2Score` over features that it computes,
    or None. Every backend that runs that one then runs this score; `backend="edge_list"` still runs `logits`. Without
    `lower`, only `edge_list` runs the score. A subclass of a built-in score is another score, too.
    """

    @property
    def roles(self) -> Mapping[str, Role]: ...

    def logits(self, *args: Any, **features: Any) -> Tensor: ...


@dataclass(eq=False)
class Dot:
    """`scale * <query_i, key_j + edge_key_ij>`, where `softcap` replaces a logit l by `softcap * tanh(l / softcap)`.

    query [..., N_dst, H, D]; key [..., N_src, H_kv, D] with H a multiple of H_kv (grouped heads share a key);
    edge_key [E, H, D] in the caller's edge order, or a table [edge types, H, D].
    """

    query: Tensor
    key: Tensor
    scale: float
    edge_key: PerEdge | None = None
    softcap: float | None = None

    label: ClassVar = "dot-product"
    roles: ClassVar = {"query": Role("dst"), "key": Role("src", grouped=True), "edge_key": Role("edge")}

    def logits(self, query: Tensor, key: Tensor, edge_key: Tensor | None) -> Tensor:
        logits = self.scale * (query * (key if edge_key is None else key + edge_key)).sum(-1)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def validate(self, value: Tensor) -> None:
        query = self.query
        key = self.key
        check_scale(self.scale)
        check_softcap(self.softcap)
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(f"query and key must be equally wide; got {query.shape[-1]} and {key.shape[-1]}")
        if not query.dtype == key.dtype == value.dtype:
            raise TypeError(
                f"query, key and value must have one dtype; got {query.dtype}, {key.dtype} and {value.dtype}"
            )


@dataclass(frozen=True)
class LeakyReLU:
    """`max(x, slope * x)`: GAT's activation, named so that a fused kernel can recognize it."""

    slope: float = 0.2

    def __call__(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope)


Activation = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class AdditiveScore:
    """`activation(dst_i + src_j + edge_ij)` (GAT); dst [..., N_dst, H], src [..., N_src, H], edge [E, H]."""

    dst: Tensor
    src: Tensor
    activation: Activation
    edge: PerEdge | None = None

    label: ClassVar = "additive"
    roles: ClassVar = {"dst": Role("dst", False), "src": Role("src", False), "edge": Role("edge", False)}

    def logits(self, dst: Tensor, src: Tensor, edge: Tensor | None) -> Tensor:
        return self.activation(dst + src if edge is None else dst + src + edge)


@dataclass(eq=False)
class AdditiveV2Score:
    """`<vector, activation(dst_i + src_j + edge_ij)>` (GATv2, Bahdanau).

    dst [..., N_dst, H, D], src [..., N_src, H, D], vector [H, D], edge [E, H, D].
    """

    dst: Tensor
    src: Tensor
    vector: Tensor
    activation: Activation
    edge: PerEdge | None = None

    label: ClassVar = "additive (v2)"
    roles: ClassVar = {"dst": Role("dst"), "src": Role("src"), "edge": Role("edge")}

    def logits(self, dst: Tensor, src: Tensor, edge: Tensor | None) -> Tensor:
        activated = self.activation(dst + src if edge is None else dst + src + edge)
        return (activated * self.vector.to(activated.dtype)).sum(-1)

    def validate(self, value: Tensor) -> None:
        if self.src.shape[-2:] != self.dst.shape[-2:] or self.vector.shape != self.dst.shape[-2:]:
            shapes = (list(x.shape) for x in (self.dst, self.src, self.vector))
            raise ValueError(
                "dst, src and vector must have the same heads and width; got {}, {} and {}".format(*shapes)
            )


BUILT_IN: tuple[type, ...] = (Dot, AdditiveScore, AdditiveV2Score)
"""The scores that kernels compute. Types count exactly: a subclass may override `logits`."""


def lowered(score: Any) -> Any:
    """Returns the built-in score that a score lowers to, or the score itself if there is none.

    Raises:
        TypeError: if its `lower` returns anything else.
    """
    if score is None or type(score) in BUILT_IN or not hasattr(score, "lower"):
        return score
    built_in = score.lower()
    if built_in is not None and type(built_in) not in BUILT_IN:
        raise TypeError(
            f"lower() of {type(score).__name__} must return a Dot, an AdditiveScore, an AdditiveV2Score or None; it "
            f"returned {type(built_in).__name__}"
        )
    return score if built_in is None else built_in


def slope_of(activation: Activation | None) -> float | str | None:
    """Returns the slope of a LeakyReLU, "tanh", or None for any other activation."""
    if type(activation) is LeakyReLU:
        return activation.slope
    if activation is F.leaky_relu:
        return 0.01
    return "tanh" if activation in (torch.tanh, F.tanh) else None


def check_scale(scale: Any) -> None:
    """Raises TypeError if `scale` is not one number without gradient, ValueError if it is not finite."""
    _check_number("scale", scale, "multiply {} into the query")
    if not torch.compiler.is_compiling() and not math.isfinite(scale):  # a program checks when it runs
        raise ValueError(f"scale must be a finite number; got {scale!r}")


def check_softcap(softcap: Any) -> None:
    """Raises TypeError if `softcap` is neither None nor one number without gradient, ValueError if it is not positive
    and finite."""
    if softcap is None:
        return
    _check_number("softcap", softcap, "write a score with {}, as in mpnn.scores")
    if not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be a positive finite number, or None; got {softcap!r}")


def _check_number(name: str, x: Any, advice: str) -> None:
    if isinstance(x, Tensor) and x.requires_grad:
        raise TypeError(f"{name} is a number, to which no gradient flows; {advice.format('a learned one')}")
    if not isinstance(x, (float, int)) and not hasattr(x, "__float__"):
        raise TypeError(f"{name} must be a number; got {x!r}")
    if shape := list(x.shape) if isinstance(x, (Tensor, np.ndarray)) else []:
        raise TypeError(
            f"{name} must be one number; got {type(x).__name__} of shape {shape}: {advice.format('one for each head')}"
        )
