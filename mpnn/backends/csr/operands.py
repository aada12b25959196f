"""What a score brings to the row kernels of either device, and the score of such operands again."""

from typing import Any, NamedTuple

from torch import Tensor

from mpnn.graph.edge_tables import PerEdge
from mpnn.kernels.rows.spec import ACTIVATED, ADDITIVE, CONSTANT, DOT, NORMALIZERS
from mpnn.round import Round
from mpnn.scores import Activation, AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Score, slope_of

KINDS: dict[type, int] = {type(None): CONSTANT, Dot: DOT, AdditiveScore: ADDITIVE, AdditiveV2Score: ACTIVATED}


class Operands(NamedTuple):
    """The features of a score, what it adds for each edge, and its numbers.

    `scale` is 0 for rounds without a score, whose logits are their biases. An activation is LeakyReLU with `slope`, or
    tanh.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    vector: Tensor | None = None
    edge: PerEdge | None = None
    scale: float = 1.0
    softcap: float = 0.0
    slope: float = 1.0
    tanh: bool = False
    activation: Activation | None = None


def of(round: Round) -> Operands:
    """The operands of a round's score."""
    match round.score:
        case Dot(query, key, scale, edge, softcap):
            return Operands(query, key, None, edge, scale, softcap or 0.0)
        case AdditiveScore(dst, src, activation, edge):
            vector = None
        case AdditiveV2Score(dst, src, vector, activation, edge):
            pass
        case _:
            return Operands(scale=0.0 if round.weighted else 1.0)
    slope: Any = activation.slope if type(activation) is LeakyReLU else slope_of(activation)
    tanh = slope == "tanh"
    return Operands(dst, src, vector, edge, slope=1.0 if tanh else slope, tanh=tanh, activation=activation)


def normalizer(round: Round) -> int:
    """The number of the normalizer that the kernels apply."""
    return NORMALIZERS[round.normalize if round.weighted else "none"]


NORMALIZER_NAMES = {number: name for name, number in NORMALIZERS.items()}


def score_of(kind: int, operands: Operands) -> Score | None:
    """The score of these operands, for derivatives of higher order."""
    query: Any = operands.query
    key: Any = operands.key
    vector: Any = operands.vector
    activation: Any = operands.activation
    if kind == DOT:
        return Dot(query, key, operands.scale, operands.edge, operands.softcap or None)
    if kind == ADDITIVE:
        return AdditiveScore(query, key, activation, operands.edge)
    if kind == ACTIVATED:
        return AdditiveV2Score(query, key, vector, activation, operands.edge)
    return None
