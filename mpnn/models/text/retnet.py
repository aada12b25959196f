"""RetNet (Sun et al. 2023, arXiv:2307.08621): GPT with retention, whose weights decay with the distance.

topology   causal()
attention  Retention(dim, heads, position=Rotary)  w_ij = gamma_h^(i-j) <R_i q_i, R_j k_j>, gamma_h = 1 - 2^(-5-h)
aggregate  "sum"                                   m_i  = sum_{j <= i} w_ij v_j
update     z = x + W_O ( silu(W_G h) * norm_h(m) ) h = norm(x);   y = z + ffn(norm'(z)), ffn(x) = W_2 gelu(W_1 x)
"""

from dataclasses import dataclass
from functools import partial

from torch import nn

from mpnn.attention import Retention
from mpnn.models.layers.decoder import PlainDecoder
from mpnn.models.layers.recurrent import GatedNorm, RecurrentLayer, WithFeedForward
from mpnn.position import Rotary
from mpnn.update import FeedForward


@dataclass(frozen=True)
class RetNetConfig:
    """Configuration of a RetNet. The defaults are those of the 1.3B model.

    vocabulary: number of tokens. dim: width of the model. value_dim: of all heads' values together; None: 2 * dim.
    hidden: width of the feed-forward network. context: maximum sequence length. base: of the rotary frequencies.
    """

    vocabulary: int = 50257
    dim: int = 2048
    layers: int = 24
    heads: int = 8
    value_dim: int | None = None
    hidden: int = 4096
    context: int = 1 << 20
    base: float = 10000.0
    eps: float = 1e-6
    tied: bool = True


class RetNet(PlainDecoder):
    """Decoder-only language model of retention. The cost of a new token does not depend on the length (`generate`).

    Args:
        config: sizes and options.
    """

    def __init__(self, config: RetNetConfig) -> None:
        dim = config.dim
        heads = config.heads
        norm = partial(nn.LayerNorm, eps=config.eps)
        values = 2 * dim if config.value_dim is None else config.value_dim

        def layer() -> WithFeedForward:
            rotary = Rotary(dim // heads, config.base)
            attention = Retention(dim, heads, value_dim=values // heads, position=rotary, mapped=True)
            gated = GatedNorm(values, heads, eps=config.eps)
            return WithFeedForward(
                RecurrentLayer(dim, attention, gated, values, norm), norm(dim), FeedForward(dim, config.hidden, nn.GELU)
            )

        super().__init__(config, (layer() for _ in range(config.layers)), norm)
