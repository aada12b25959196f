"""Encoders without padding: the tokens of a padded batch become one row of documents, so no layer computes padding.

Attention separates the documents (`cu_seq_lens_q`), positions are those of the padded batch, and all other layers of an
encoder treat each token by itself. The forward pass of the bare model is replaced, so its heads and
sentence-transformers see the shapes that they expect.
"""

import inspect
import sys
from collections.abc import Callable
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

_MIXING = nn.Conv1d, nn.Conv2d, nn.RNNBase  # layers in which tokens of two documents would meet


def remove_padding(model: Any) -> Callable[[], None]:
    """Makes a bare encoder (`BertModel`) compute the tokens of a padded batch only; returns what undoes it.

    States at padding are zeros. A call without padding or with padding between tokens, with `output_attentions=True`,
    with `inputs_embeds` or with a cache runs as before."""
    if not is_encoder(model):
        raise ValueError(
            f"padding cannot be removed from {type(model).__name__}: it is not an encoder whose forward pass takes "
            "input_ids, attention_mask and position_ids and was not replaced (by hooks of accelerate), and whose other "
            "layers treat each token by itself"
        )
    if isinstance(vars(model).get("forward"), _WithoutPadding):
        return lambda: None
    model.forward = _WithoutPadding(model)

    def restore() -> None:
        del model.forward

    return restore


def is_encoder(model: Any) -> bool:
    """Whether the tokens of a padded batch can be moved: attention is bidirectional, positions are an argument, and no
    other layer mixes tokens."""
    config = model.config
    if not isinstance(vars(model).get("forward", None), (_WithoutPadding, NoneType)):  # replaced, by accelerate's hooks
        return False
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        return False
    if not {"input_ids", "attention_mask", "position_ids"} <= set(_signature(model).parameters):
        return False
    return not any(getattr(module, "is_causal", False) or isinstance(module, _MIXING) for module in model.modules())


class _WithoutPadding:
    """The forward pass of a model. It is an object, not a closure, so that copies of the model call themselves."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def __signature__(self) -> inspect.Signature:
        """What the trainer of transformers chooses the columns of a dataset by."""
        _, *rest = _signature(self.model).parameters.values()
        return inspect.Signature(rest)

    def __call__(self, *args: Any, **options: Any) -> Any:
        model = self.model
        forward: Any = type(model).forward
        given = _arguments(_signature(model), (model, *args), options)
        if not _has_padding(model, given):
            return forward(model, *args, **options)
        keep = given.pop("attention_mask").bool()
        return_dict = given.pop("return_dict", None)
        if given.get("position_ids") is None:
            given["position_ids"] = default_positions(model, given["input_ids"])
        packed = {name: _packed(value, keep) for name, value in given.items()}
        out = forward(model, **packed, **_documents(keep), attention_mask=None, return_dict=True)
        out.last_hidden_state = padded(out.last_hidden_state, keep)
        if out.get("hidden_states") is not None:
            out.hidden_states = tuple(padded(states, keep) for states in out.hidden_states)
        if out.get("pooler_output") is not None:
            out.pooler_output = model.pooler(out.last_hidden_state)
        wants_dict = model.config.return_dict if return_dict is None else return_dict
        return out if wants_dict else out.to_tuple()


def _signature(model: Any) -> inspect.Signature:
    """The signature of the class's forward pass, whose first parameter is the model."""
    return _signature_of(type(model).forward)


@lru_cache(maxsize=64)
def _signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def default_positions(model: Any, input_ids: Tensor) -> Tensor:
    """The positions int64 [B, N] that the model gives tokens [B, N] if it gets none: RoBERTa's depend on padding."""
    embeddings = getattr(model, "embeddings", None)
    make = getattr(embeddings, "create_position_ids_from_input_ids", None)
    make = make or getattr(sys.modules[type(model).__module__], "create_position_ids_from_input_ids", None)
    padding_idx = getattr(embeddings, "padding_idx", None)
    if make is not None and padding_idx is not None:
        return make(input_ids, padding_idx)
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


def padded(states: Tensor, keep: Tensor) -> Tensor:
    """States of tokens [1, T, D] -> [B, N, D] with zeros where `keep`, bool [B, N], is False."""
    out = states.new_zeros(*keep.shape, states.shape[-1])
    return out.masked_scatter(keep[..., None], states)


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What a call gives, by name."""
    bound = signature.bind(*args, **options).arguments
    del bound["self"]
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), "")
    return bound | bound.pop(rest, {})


def _has_padding(model: Any, given: dict[str, Any]) -> bool:
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None or mask is None or mask.shape != ids.shape or ids.dim() != 2:
        return False
    if any(given.get(name) is not None for name in ("inputs_embeds", "past_key_values", "encoder_hidden_states")):
        return False
    attentions = given.get("output_attentions")
    if model.config.output_attentions if attentions is None else attentions:
        return False
    return _is_on_one_side(mask.bool())


def _is_on_one_side(keep: Tensor) -> bool:
    """Whether there is padding, and none between tokens, where it would count in the distances of windows."""
    tokens = keep.sum(1)
    gaps = keep.int().diff(dim=1).abs().sum(1) + keep[:, 0].int() + keep[:, -1].int()
    return bool(tokens.any()) and not bool(keep.all()) and bool((gaps <= 2).all())


def _packed(value: Any, keep: Tensor) -> Any:
    """Tensors [B, N, ...] as [1, T, ...]; everything else as it is."""
    if isinstance(value, Tensor) and value.shape[:2] == keep.shape:
        return value[keep][None]
    return value


def _documents(keep: Tensor) -> dict[str, Any]:
    """The tokens' documents as transformers' flash attention takes them; rows without tokens are none."""
    lengths = keep.sum(1)
    lengths = lengths[lengths > 0]
    ends = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
