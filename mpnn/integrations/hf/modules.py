"""The base of all adapters: modules with the call of a Hugging Face model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpnn.integrations.hf.arguments import as_token_mask, expanded_ids, option
from mpnn.message_passing import MessagePassing


class Adapter(nn.Module):
    """Gives `model` the call of a Hugging Face model; options that a call omits are those of `config`."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model, self.config = model, config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """In training, stores only the inputs of each layer and computes the layer again in the backward pass.

        Args:
            gradient_checkpointing_kwargs: options of `torch.utils.checkpoint.checkpoint`; default: use_reentrant=False.
        """
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        for layer in self.modules():
            if isinstance(layer, MessagePassing):
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = partial(checkpoint, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Stores what the backward pass needs, and computes each layer once."""
        for layer in self.modules():
            if isinstance(layer, MessagePassing):
                layer.gradient_checkpointing = False

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, or the patch embedding of an image model."""
        for name in ("token", "embeddings.token", "source.token", "patches"):
            if part := _part(self.model, name):
                return part
        raise NotImplementedError(f"{type(self.model).__name__} has no token embedding")

    def requested_outputs(self, output_hidden_states: bool | None, output_attentions: bool | None) -> dict[str, Any]:
        """The options of our models for the outputs that a call requests besides the result."""
        return {
            "return_states": option(self.config, "output_hidden_states", output_hidden_states),
            "return_weights": option(self.config, "output_attentions", output_attentions),
        }

    def answer(self, output: Any, return_dict: bool | None) -> Any:
        """The output object of transformers, or the tuple of its fields."""
        return output if option(self.config, "return_dict", return_dict) else output.to_tuple()


def _part(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def mask_of(tokens: Tensor, mask: Tensor | None, name: str = "attention_mask") -> Tensor | None:
    """A mask over tokens [B, N, ...] as bool [B, N]; None stays None."""
    return None if mask is None else as_token_mask(mask, (tokens.shape[0], tokens.shape[1]), name)


def padding_mask_of(tokens: Tensor, attention_mask: Tensor | None, name: str = "attention_mask") -> Tensor | None:
    """The padding mask [B, N] of tokens [B, N, ...], the inverse of an attention mask."""
    mask = mask_of(tokens, attention_mask, name)
    return None if mask is None else ~mask


def ids_of(tokens: Tensor, ids: Tensor | None, name: str) -> Tensor | None:
    """One integer for each of tokens [B, N, ...] as int64 [B, N]; None stays None."""
    return None if ids is None else expanded_ids(name, ids, (tokens.shape[0], tokens.shape[1]))
