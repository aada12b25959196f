"""`from_hf`: models of Hugging Face's transformers run as message passing, with the same weights and the same call.

A family is one file beside this one, whose `convert` makes a module of this library out of the bare model of
transformers, and one row in `FAMILIES`. What stands on a bare model (heads for language modelling, classification, ...)
is kept as it is: a copy of it that calls our model where the original calls theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn

from mpnn.models.hf import bert
from mpnn.models.hf.weights import Copies
from mpnn.topology import Topology

FAMILIES: dict[str, Callable[[Any, Topology | None, Copies], nn.Module]] = {
    "bert": bert.convert,
}
"""By `config.model_type`: what makes our module out of a bare model, a topology or None for its own, and a memo."""


def from_hf(hf_model: Any, graph: Topology | None = None) -> nn.Module:
    """A Hugging Face model as message passing: `from_hf(model, graph=window(16))` swaps who hears whom.

    The result has a copy of the weights, on the same device, in the same precision and in the same mode (training or
    evaluation), is called as the original is, and answers with the same output object.

    Args:
        hf_model: a model of transformers, bare (`BertModel`) or with a head (`BertForMaskedLM`).
        graph: a topology; None keeps the model's own (BERT: `complete()`).

    Raises:
        ImportError: transformers is not installed.
        TypeError: not a model of transformers, or a graph that is no topology.
        ValueError: a family, a model class or a configuration that is not supported; the sentence names it.
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
    copies: Copies = {}
    bare = hf_model.base_model
    ours = FAMILIES[family](bare, graph, copies).train(bare.training)
    if bare is hf_model:
        return ours
    copies[id(bare)] = (
        ours  # deepcopy then finds our model wherever the head refers to theirs, and shared weights shared
    )
    return copy.deepcopy(hf_model, copies)


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError('from_hf needs transformers, which is not installed; run: pip install "mpnn[hf]"') from error
    return transformers
