"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a language model whose attention has gates in place of a softmax.

topology   causal(), after causal() & window(3)
attention  StateSpace(inner, heads, state=S)     w_ij = <C_i, B_j> exp(-a_h sum_{t = j+1..i} dt_t),  u_j = dt_j x_j
           ShortConvolution(channels, 4)         a weight for each offset and channel, of x, B and C
aggregate  "sum"                                 m_i  = sum_{j <= i} w_ij u_j
update     Skip(heads)                           y_i  = m_i + D_h x_i;   h <- h + W_out norm(y silu(z))
"""

from dataclasses import dataclass
from functools import partial

from torch import nn

from mpnn.attention import StateSpace
from mpnn.models.layers.decoder import PlainDecoder
from mpnn.models.layers.recurrent import GatedNorm, RecurrentLayer, Skip


@dataclass(frozen=True)
class Mamba2Config:
    """Configuration of a Mamba-2. The defaults are those of the 130M model.

    vocabulary: number of tokens. dim: width of the model. expand: width of a layer over that of the model. head_dim:
    width of a head. state: width of B and C. groups: of heads that share them. kernel: nodes of the short convolution.
    step_limits: the smallest and the largest dt. context: maximum sequence length. eps: added to mean squares by norms.
    tied: whether the output layer shares its weight with the token embedding.
    """

    vocabulary: int = 50288
    dim: int = 768
    layers: int = 24
    expand: int = 2
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    kernel: int = 4
    convolution_bias: bool = True
    bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    context: int = 1 << 20
    eps: float = 1e-5
    tied: bool = True


class Mamba2(PlainDecoder):
    """Decoder-only language model of state spaces. The cost of a new token does not depend on the length (`generate`).

    Args:
        config: sizes and options.
    """

    def __init__(self, config: Mamba2Config) -> None:
        norm = partial(nn.RMSNorm, eps=config.eps)
        inner = config.expand * config.dim
        if inner % config.head_dim:
            raise ValueError(f"a layer is {inner} wide, which is no multiple of head_dim={config.head_dim}")
        heads = inner // config.head_dim

        def layer() -> RecurrentLayer:
            attention = StateSpace(
                inner, heads, state=config.state, groups=config.groups, limits=config.step_limits, mapped=True
            )
            return RecurrentLayer(
                config.dim,
                attention,
                GatedNorm(inner, config.groups, eps=config.eps, inside=True),
                inner,
                norm,
                update=Skip(heads),
                kernel=config.kernel,
                bias=config.convolution_bias,
                map_bias=config.bias,
            )

        super().__init__(config, (layer() for _ in range(config.layers)), norm)
