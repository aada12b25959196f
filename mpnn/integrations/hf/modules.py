"""What modules that are called as those of transformers have in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpnn.integrations.hf.arguments import kept, per_token, wanted
from mpnn.message_passing import MessagePassing


class Called(nn.Module):
    """`model` behind the call of a model of transformers, whose configuration says what a call leaves out."""

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
        """In training, every layer keeps its inputs alone and is computed a second time in the backward pass.

        Args:
            gradient_checkpointing_kwargs: options of `torch.utils.checkpoint.checkpoint`; default: use_reentrant=False.
        """
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        for layer in self.modules():
            if isinstance(layer, MessagePassing):
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = partial(checkpoint, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Every layer keeps what its backward pass needs."""
        for layer in self.modules():
            if isinstance(layer, MessagePassing):
                layer.gradient_checkpointing = False

    def get_input_embeddings(self) -> nn.Module:
        """The table of tokens, or what makes nodes of patches."""
        for name in ("token", "embeddings.token", "source.token", "patches"):
            if part := _part(self.model, name):
                return part
        raise NotImplementedError(f"{type(self.model).__name__} has no table of tokens")

    def shown(self, output_hidden_states: bool | None, output_attentions: bool | None) -> dict[str, Any]:
        """What a call wants to see besides the result, as our models are asked for it."""
        return {
            "return_states": wanted(self.config, "output_hidden_states", output_hidden_states),
            "return_weights": wanted(self.config, "output_attentions", output_attentions),
        }

    def answer(self, output: Any, return_dict: bool | None) -> Any:
        """The output object of transformers, or its tuple."""
        return output if wanted(self.config, "return_dict", return_dict) else output.to_tuple()


def _part(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def mask_of(tokens: Tensor, mask: Tensor | None, name: str = "attention_mask") -> Tensor | None:
    """A mask of tokens [B, N, ...] as bool [B, N], where it is given."""
    return None if mask is None else kept(mask, (tokens.shape[0], tokens.shape[1]), name)


def padding_mask_of(tokens: Tensor, attention_mask: Tensor | None, name: str = "attention_mask") -> Tensor | None:
    """The padding mask [B, N] of tokens [B, N, ...], the inverse of an attention mask."""
    mask = mask_of(tokens, attention_mask, name)
    return None if mask is None else ~mask


def ids_of(tokens: Tensor, ids: Tensor | None, name: str) -> Tensor | None:
    """An integer for each of tokens [B, N, ...], int64 [B, N], where they are given."""
    return None if ids is None else per_token(name, ids, (tokens.shape[0], tokens.shape[1]))
