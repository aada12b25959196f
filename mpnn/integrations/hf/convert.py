"""`from_hf`: a copy of a model of transformers, changed by `use`."""

import copy
from typing import Any

from transformers import PreTrainedModel

from mpnn.integrations.hf.use import Graphs, use


def from_hf(
    hf_model: PreTrainedModel,
    graph: Graphs | None = None,
    *,
    causal: bool = True,
    unpad: bool | None = None,
    maps: bool = True,
) -> Any:
    """A copy of a transformers model whose attention layers run here: the same class, call, weights and outputs.

    Args:
        hf_model: the model, which stays as it is.
        graph, causal, unpad, maps: as for `use`, which changes a model in place.

    Raises:
        TypeError: if `hf_model` is no model of transformers.
        ValueError: if its weights are on the meta device; and as `use`.
    """
    if not isinstance(hf_model, PreTrainedModel):
        raise TypeError(f"from_hf takes a model of transformers, such as BertModel; got {type(hf_model).__name__}")
    if meta := [name for name, weight in hf_model.named_parameters() if weight.is_meta]:
        raise ValueError(f"from_hf takes weights that are there; {meta[0]} is on the meta device. Load them before")
    return use(copy.deepcopy(hf_model), graph, causal=causal, unpad=unpad, maps=maps).model
