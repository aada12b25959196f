"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): a node stores what its key does not read from the state yet.

topology   causal(), after causal() & window(3)
attention  DeltaRule(dim, heads, gated=True)     u_i = beta_i (v_i - k_i gate_i S_(i-1)),  w_ij: <q_i, k_j> and gates
           ShortConvolution(channels, 4)         a weight for each offset and channel, of q, k and v
aggregate  "sum"                                 m_i = sum_{j <= i} w_ij u_j
update     z = x + W_O ( norm_h(m) silu(W_G h) ) h = norm(x);  y = z + ffn(norm'(z)), a gated feed-forward network

The layers of Qwen3-Next without softmax are these.
"""

from dataclasses import dataclass
from functools import partial

from torch import nn

from mpnn.attention import DeltaRule
from mpnn.models.layers.decoder import PlainDecoder
from mpnn.models.layers.recurrent import GatedNorm, RecurrentLayer, WithFeedForward
from mpnn.update import GatedFeedForward


@dataclass(frozen=True)
class DeltaNetConfig:
    """Configuration of a DeltaNet. The defaults are those of the published 1.3B Gated DeltaNet.

    vocabulary: number of tokens. dim, hidden: widths of the model and of its feed-forward network. heads: of values.
    key_heads: heads of queries and keys; None: `heads`. head_dim, value_dim: widths of a head's keys and values.
    gated: False for DeltaNet (arXiv:2406.06484). kernel: nodes of the short convolution. context: maximum length.
    """

    vocabulary: int = 32000
    dim: int = 2048
    layers: int = 21
    heads: int = 8
    key_heads: int | None = None
    head_dim: int = 256
    value_dim: int = 512
    hidden: int = 5632
    kernel: int = 4
    gated: bool = True
    context: int = 1 << 20
    eps: float = 1e-6
    tied: bool = False

    def layer(self) -> RecurrentLayer:
        """Returns a layer without its feed-forward network."""
        attention = DeltaRule(
            self.dim,
            self.heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            key_heads=self.key_heads,
            gated=self.gated,
            mapped=True,
        )
        values = self.heads * self.value_dim
        gated = GatedNorm(values, self.heads, eps=self.eps, shared=True)
        norm = partial(nn.RMSNorm, eps=self.eps)
        return RecurrentLayer(self.dim, attention, gated, values, norm, kernel=self.kernel)


class DeltaNet(PlainDecoder):
    """Decoder-only language model of the delta rule. The cost of a new token does not depend on the length
    (`generate`).

    Args:
        config: sizes and options.
    """

    def __init__(self, config: DeltaNetConfig) -> None:
        norm = partial(nn.RMSNorm, eps=config.eps)
        layers = (
            WithFeedForward(config.layer(), norm(config.dim), GatedFeedForward(config.dim, config.hidden, nn.SiLU))
            for _ in range(config.layers)
        )
        super().__init__(config, layers, norm)
