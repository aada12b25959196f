"""ViT of transformers as message passing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.graph.topology import Topology
from mpnn.integrations.hf.arguments import as_token_mask, refuse
from mpnn.integrations.hf.modules import Adapter
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.layers.images import kernel_as_linear
from mpnn.models.vision.vit import ViT, ViTConfig


def convert(hf_model: Any, graph: Topology | None, copies: Copies) -> ViTEncoder:
    """A `ViTModel` as message passing; `graph` is over the patches."""
    check_class(hf_model, "ViTModel")
    config, pooler = hf_model.config, hf_model.pooler
    ours = vit_config(config)
    model = with_weights(
        lambda: ViT(
            ours,
            graph,
            pooler=0 if pooler is None else config.pooler_output_size,
            pooler_activation="tanh" if pooler is None else activation(config, "pooler_act"),
            mask_token=hf_model.embeddings.mask_token is not None,
        ),
        hf_model,
        NAMES,
        copies,
        change,
    )
    return ViTEncoder(model, config)


def vit_config(config: Any, **others: Any) -> ViTConfig:
    """The sizes that all ViT-like encoders have."""
    check_config(config, qkv_bias=True, quantization_config=None)
    return ViTConfig(
        image=size(config.image_size),
        patch=size(config.patch_size),
        channels=config.num_channels,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        hidden=config.intermediate_size,
        activation=activation(config, "hidden_act"),
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        **others,
    )


def size(given: Any) -> int | list[int]:
    """A size of transformers' configurations, which may be a tuple."""
    return given if isinstance(given, int) else list(given)


def change(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Weights that have another shape here."""
    if name == "patches.to_dim.weight":
        return {name: kernel_as_linear(weight)}
    if name in ("class_token", "mask_token"):
        return {name: weight.flatten()}
    return {name: weight[0] if name == "positions.weight" else weight}


LAYER_NAMES = (
    (".attention.q_proj.", ".attention.to_query."),
    (".attention.k_proj.", ".attention.to_key."),
    (".attention.v_proj.", ".attention.to_value."),
    (".attention.o_proj.", ".attention.to_out."),
    (".layernorm_before.", ".update.norm."),
    (".layernorm_after.", ".update.ffn_norm."),
    (".mlp.fc1.", ".update.ffn.0."),
    (".mlp.fc2.", ".update.ffn.3."),
)
NAMES = (
    ("embeddings.cls_token", "class_token"),
    ("embeddings.mask_token", "mask_token"),
    ("embeddings.position_embeddings", "positions.weight"),
    ("embeddings.patch_embeddings.projection.", "patches.to_dim."),
    ("pooler.dense.", "pooler.0."),
    *LAYER_NAMES,
    ("layernorm.", "norm."),
)


class ViTEncoder(Adapter):
    """A ViT with the call of transformers."""

    model: ViT

    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B images of N patches.

        Args:
            pixel_values: [B, channels, H, W].
            bool_masked_pos: [B, N], 1 for the patches that are hidden behind the mask token.
            interpolate_pos_encoding: whether positions are stretched to images of another size.
            attention_mask: [B, 1 + N], 1 for the nodes that take part, the class token first.
            output_hidden_states, output_attentions, return_dict: as in transformers; default: the configuration's.

        Returns:
            `BaseModelOutputWithPooling`, or its tuple: last_hidden_state [B, 1 + N, dim], pooler_output [B, width],
            hidden_states, attentions [B, H, 1 + N, 1 + N]. All are zeros at nodes that take no part.

        Raises:
            ValueError, TypeError: an invalid argument; the message names it.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        refuse(**others)
        images = pixels(pixel_values, self.model.patches.to_dim.weight)
        rows, columns = self.model.patches.grid(images)
        shape = (len(images), rows * columns)
        found = self.model(
            images,
            None if bool_masked_pos is None else as_token_mask(bool_masked_pos, shape, "bool_masked_pos"),
            None if attention_mask is None else as_token_mask(attention_mask, (shape[0], 1 + shape[1])),
            stretch=bool(interpolate_pos_encoding),
            **self.requested_outputs(output_hidden_states, output_attentions),
        )
        output = BaseModelOutputWithPooling(
            last_hidden_state=found.last,
            pooler_output=None if self.model.pooler is None else found.pooled,
            hidden_states=found.states,
            attentions=found.weights,
        )
        return self.answer(output, return_dict)


def pixels(pixel_values: Tensor | None, weight: Tensor) -> Tensor:
    """The images, in the precision of the weights, as transformers has it."""
    if pixel_values is None:
        raise ValueError("give pixel_values, the images [batch, channels, height, width]")
    if pixel_values.dim() != 4:
        raise ValueError(f"pixel_values must be [batch, channels, height, width]; got {list(pixel_values.shape)}")
    return pixel_values.to(weight.dtype)
