"""The operands of a score for the row kernels of either device, and the score of such operands."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from mpnn.backends import reference as again
from mpnn.graph.edge_tables import PerEdge
from mpnn.kernels.rows.spec import ACTIVATED, ADDITIVE, CONSTANT, DOT, NORMALIZERS
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, slope_of

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
    return Operands(dst, src, vector, edge, slope=1.0 if tanh else slope, tanh=tanh)


def normalizer(round: Round) -> int:
    """The number of the normalizer that the kernels apply."""
    return NORMALIZERS[round.normalize if round.weighted else "none"]


_OPERANDS: dict[type, dict[str, str]] = {
    type(None): {},
    Dot: {"query": "query", "key": "key", "edge_key": "edge_key"},
    AdditiveScore: {"dst": "query", "src": "key", "edge": "edge_term"},
    AdditiveV2Score: {"dst": "query", "src": "key", "vector": "vector", "edge": "edge_key"},
}
"""The operand of the kernels that each field of a score is."""
_OF_EDGES = {"edge_key": 3, "edge_value": 3, "edge_term": 2, "bias": 2, "table": 2}  # dimensions from the edges on


def reference(
    form: Round, types: dict[str, Tensor], tensors: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The results of the kernels by operations that are differentiable again. `types`: those of the edges, for operands
    with a row for each edge type."""
    of = dict(tensors)
    for name, ids in types.items():
        of[name] = of[name].index_select(of[name].dim() - _OF_EDGES[name], ids)
    for name, features in (("edge_key", "query"), ("edge_value", "value")):
        if (x := of.get(name)) is not None:  # features are padded to whole vectors
            of[name] = F.pad(x, (0, of[features].shape[-1] - x.shape[-1]))
    score = {field: of.get(operand) for field, operand in _OPERANDS[type(form.score)].items()}
    fields = {name: of.get(name) for name in ("value", "edge_value", "dst_bias", "src_bias")}
    round = again.filled(form, score, bias=(of.get("bias"), of.get("table")), **fields)
    out, weights, lse, _ = again.run(round)
    return out, weights, lse
