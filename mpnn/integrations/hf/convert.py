"""`from_hf`: models of Hugging Face's transformers run as message passing, with the same weights and the same call.

A family is one file beside this one, whose `convert` makes a module of this library out of the bare model of
transformers, and one row in `FAMILIES`. What stands on a bare model (heads for language modelling, classification, ...)
is copied: the copy calls our model instead of the original.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from mpnn.graph.topology import Topology
from mpnn.integrations.hf import bart, bert, big_bird, gpt, llama, longformer, reformer, swin, vit, vit_mae, xlnet
from mpnn.integrations.hf.export import Converted, as_converted, attach_original
from mpnn.integrations.hf.weights import Copies

FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "bert": bert.convert,
    "roberta": bert.convert,
    "longformer": longformer.convert,
    "big_bird": big_bird.convert,
    "reformer": reformer.convert,
    "xlnet": xlnet.convert,
    "gpt2": gpt.convert_gpt2,
    "openai-gpt": gpt.convert_gpt,
    "llama": llama.convert,
    "mistral": llama.convert,
    "vit": vit.convert,
    "vit_mae": vit_mae.convert,
    "swin": swin.convert,
    "bart": bart.convert,
    "marian": bart.convert,
}
"""By `config.model_type`: what makes our module out of a bare model, a topology or None for its own, and a memo."""

PARTS: dict[str, Callable[..., nn.Module]] = {"ViTMAEDecoder": vit_mae.convert_decoder}
"""By class, the parts of heads that pass messages too."""

REFUSED = ("SwinBackbone",)
"""Classes that ask their bare model for what ours does not give, here the states before patches are merged."""

STRETCHABLE = ("bert", "roberta", "longformer", "big_bird", "bart")
"""Families that also take a context, because their positions are rows of a table."""


def from_hf(hf_model: Any, graph: Topology | None = None, *, context: int | None = None) -> Converted:
    """A Hugging Face model as message passing: `from_hf(model, graph=window(16))` replaces the attention graph.

    The result has a copy of the weights, on the same device, in the same precision and in the same mode (training or
    evaluation), is called as the original is, and answers with the same output object. `save_pretrained` and `to_hf`
    lead back.

    What it answers is zeros where there is no token, and heads go on from there. So heads that look at padding give
    other numbers than in transformers, which computes states there too: the loss of question answering, which is over
    all places; that of language models for the first token after padding on the left; and RoBERTa's, Longformer's and
    BigBird's classification of sentences by their first place, and GPT's and XLNet's by the last or the mean, where
    that is padding.

    Args:
        hf_model: a model of transformers, bare (`BertModel`) or with a head (`BertForMaskedLM`).
        graph: a topology; None keeps the model's own (BERT: `complete()`).
        context: how many positions the result has: the model's own, repeated as often as need be. So
            `from_hf(roberta, graph=longformer(512, globals=1), context=4096)` is a Longformer made of a RoBERTa, to be
            trained on (Beltagy et al. 2020, section 5).

    Raises:
        ImportError: transformers is not installed.
        TypeError: not a model of transformers, or a graph that is no topology.
        ValueError: a family, a model class or a configuration that is not supported; the message names it.
    """
    transformers = _transformers()
    if not isinstance(hf_model, transformers.PreTrainedModel):
        raise TypeError(f"from_hf takes a model of transformers, such as BertModel; got {type(hf_model).__name__}")
    if graph is not None and not isinstance(graph, Topology):
        raise TypeError(
            f"graph must be a Topology, such as window(16), because sentences differ in length; got {graph!r}"
        )
    family = hf_model.config.model_type
    if family not in FAMILIES:
        raise ValueError(f"from_hf has no config.model_type {family!r}; it has {', '.join(FAMILIES)}")
    if (name := type(hf_model).__name__) in REFUSED:
        raise ValueError(f"from_hf does not take {name}; it takes the bare model and the other heads of {family!r}")
    if context is not None and family not in STRETCHABLE:
        raise ValueError(f"from_hf stretches {', '.join(STRETCHABLE)} to a context; config.model_type is {family!r}")
    for weight, at in hf_model.named_parameters():
        if at.is_meta:
            raise ValueError(f"from_hf takes weights that are there; {weight} is on the meta device. Load them before")
    copies: Copies = {}
    bare = hf_model.base_model
    options = {} if context is None else {"context": context}
    ours = _convert_part(bare, FAMILIES[family], graph, copies, **options)
    if bare is hf_model:
        return as_converted(ours)
    for part in hf_model.modules():
        if (name := type(part).__name__) in PARTS:
            copies[id(part)] = _convert_part(part, PARTS[name], graph, copies)
    copies[id(bare)] = ours
    return as_converted(copy.deepcopy(hf_model, copies))  # the memo replaces their bare model and weights by ours


def _convert_part(
    part: Any, convert: Callable[..., nn.Module], graph: Topology | None, copies: Copies, **options: Any
) -> nn.Module:
    """Converts one module, with a copy of its configuration, so that `to_hf` can convert it back."""
    copies[id(part.config)] = copy.deepcopy(part.config)
    ours = convert(part, graph, copies, **options).train(part.training)
    if hasattr(ours, "config"):
        ours.config = copies[id(part.config)]
    return attach_original(ours, part, partial(convert, graph=graph))


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "from_hf needs transformers, which is not installed; run: pip install transformers"
        ) from error
    return transformers
