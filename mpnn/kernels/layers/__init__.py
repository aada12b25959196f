"""Whole transformer layers in one call: `encoder_layer.py`, with its loops in `../cpu/encoder_layer.cpp`.

`attention/whole_layer.py` calls it for layers of this library, `integrations/hf/encoder_layers.py` for those of
transformers in place. There is no gradient: both call it in inference only. The twin is the layer itself, in rounds.
"""

from mpnn.kernels.layers.encoder_layer import (
    ACTIVATIONS,
    MAPS,
    EncoderLayer,
    Form,
    Located,
    Places,
    Weights,
    are_plain,
    refusal,
)

__all__ = [
    "ACTIVATIONS",
    "MAPS",
    "EncoderLayer",
    "Form",
    "Located",
    "Places",
    "Weights",
    "are_plain",
    "refusal",
]
