"""GPSConv as message passing."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from mpnn.integrations.pyg.weights import linear, with_weights
from mpnn.models.graph.gps import GPSLayer


def gps(conv: Any) -> GPSLayer:
    """GPSConv. For a batch of graphs of these sizes, call `op(x, graph=g, among=documents(sizes))`."""
    from mpnn.integrations.pyg.convert import from_pyg  # imported here because convert imports this file

    local = None if conv.conv is None else from_pyg(conv.conv)
    attention, norms = _attention(conv), _norms(conv)

    def build() -> GPSLayer:
        layer = GPSLayer(
            local,
            conv.channels,
            conv.heads,
            dropout=conv.dropout,
            attention_dropout=attention.dropout,
            norm=nn.Identity if norms is None else nn.BatchNorm1d,
            activation=lambda: copy.deepcopy(conv.mlp[1]),
        )
        if norms is not None:
            layer.everybody.update.norm, layer.keep_both.norm = norms[1:]
            if layer.keep_local is not None:
                layer.keep_local.norm = norms[0]
        return layer

    maps = zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3), strict=True)
    weights = {}
    for name, (weight, bias) in zip(("query", "key", "value"), maps, strict=True):
        weights[f"everybody.attention.to_{name}.weight"] = weight
        weights[f"everybody.attention.to_{name}.bias"] = bias
    return with_weights(
        build,
        {
            **weights,
            **linear("everybody.attention.to_out", attention.out_proj),
            **linear("mlp.0.0", conv.mlp[0]),
            **linear("mlp.0.3", conv.mlp[3]),
        },
    )


def _attention(conv: Any) -> nn.MultiheadAttention:
    if conv.attn_type != "multihead":
        raise ValueError(f"from_pyg does not support GPSConv with attn_type = {conv.attn_type!r}, only 'multihead'")
    attention: nn.MultiheadAttention = conv.attn
    for name, unsupported in (("bias", attention.in_proj_bias is None), ("add_bias_kv", attention.bias_k is not None)):
        if unsupported:
            raise ValueError(f"from_pyg does not support GPSConv whose attention has a non-default {name}")
    if attention.add_zero_attn:
        raise ValueError("from_pyg does not support GPSConv whose attention has add_zero_attn")
    return attention


def _norms(conv: Any) -> list[nn.Module] | None:
    """Copies of the normalizations of the local operator, the attention and their sum; None if there are none."""
    norms = [conv.norm1, conv.norm2, conv.norm3]
    if conv.norm3 is None:
        return None
    if type(conv.norm3).__name__ != "BatchNorm":
        raise ValueError(f"from_pyg does not support GPSConv with norm = {conv.norm3}, only 'batch_norm' and None")
    return [copy.deepcopy(norm.module) for norm in norms]
