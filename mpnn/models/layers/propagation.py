"""Propagation: messages that travel several hops with the same weights (MAGNA, APPNP)."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from mpnn import engine
from mpnn.engine.rewrites.prepare import prepared
from mpnn.graph.arguments import one_set
from mpnn.graph.exchange import LOCAL
from mpnn.message_passing import MessagePassing
from mpnn.round import Round
from mpnn.update.dropout import edge_scale


class Propagation(MessagePassing):
    """`MessagePassing` whose messages are aggregated several times with the same weights A, without powers of A.

        Z_0 = V,   Z_{k+1} = (1 - teleport) A Z_k + teleport V,   m = merge(Z_hops)

    MAGNA (Wang et al. 2021, eq. 5 to 7) takes A from attention, APPNP (Gasteiger et al. 2019) from degrees. The graph
    has one set of nodes.

    Args:
        parts, options: those of `MessagePassing`.
        hops: the number of times that messages are aggregated, at least 1.
        teleport: the share of the initial values V in each hop, in [0, 1].
    """

    mixes_values = True

    def __init__(self, *parts: Any, hops: int = 1, teleport: float = 0.0, **options: Any) -> None:
        super().__init__(*parts, **options)
        if not isinstance(hops, int) or hops < 1:
            raise ValueError(f"hops must be an integer of at least 1; got {hops!r}")
        if not 0.0 <= teleport <= 1.0:
            raise ValueError(f"teleport must lie in [0, 1]; got {teleport}")
        self.hops = hops
        self.teleport = float(teleport)

    def _run(self, round: Round) -> tuple[Tensor, Tensor | None]:
        """Runs all hops. The weights are computed in the first one only."""
        graph = round.graph
        exchange = round.graph.exchange
        if exchange is LOCAL:
            one_set("Propagation", graph)
        round = prepared(round, self.backend)  # one seed, so that all hops drop the same edges
        reused = round.weighted and self.hops > 1
        out, weights = engine.run(replace(round, return_weights=True) if reused else round, self.backend)
        value = round.value.repeat_interleave(round.heads // round.value.shape[-2], -2)
        value = value if exchange is LOCAL else value.index_select(-3, exchange.own)
        scale = (1 - self.teleport) * edge_scale(self, round)
        out = scale * out + self.teleport * value
        hop = replace(round, return_weights=False)
        if weights is not None:
            hop = replace(hop, score=None, bias=(weights,), normalize="none", sinks=None, dst_bias=None, src_bias=None)
        for _ in range(self.hops - 1):
            message, _ = engine.run(replace(hop, value=exchange(out, -3)), self.backend)
            out = scale * message + self.teleport * value
        return out, weights
