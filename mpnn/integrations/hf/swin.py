"""Swin of transformers as message passing.

In training, what a layer adds is left out (stochastic depth) after the attention and after the feed-forward network, as
published; transformers leaves out the first only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.graph.topology import Topology
from mpnn.integrations.hf.arguments import as_token_mask, refuse
from mpnn.integrations.hf.modules import Adapter
from mpnn.integrations.hf.vit import LAYER_NAMES, pixels, size
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.layers.images import as_image, kernel_as_linear
from mpnn.models.vision.swin import Swin, SwinConfig


def convert(hf_model: Any, graph: Topology | None, copies: Copies) -> SwinEncoder:
    """A `SwinModel` as message passing; `graph` is over the patches, in every layer of every stage."""
    config = hf_model.config
    check_class(hf_model, "SwinModel")
    check_config(config, qkv_bias=True, quantization_config=None)
    ours = SwinConfig(
        image=size(config.image_size),
        patch=size(config.patch_size),
        channels=config.num_channels,
        dim=config.embed_dim,
        depths=tuple(config.depths),
        heads=tuple(config.num_heads),
        window=config.window_size,
        ratio=config.mlp_ratio,
        positions=config.use_absolute_embeddings,
        activation=activation(config, "hidden_act"),
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        drop_path=config.drop_path_rate,
    )
    mask_token = hf_model.embeddings.mask_token is not None
    model = with_weights(lambda: Swin(ours, graph, mask_token=mask_token), hf_model, _NAMES, copies, _change)
    return SwinEncoder(model, config, pools=hf_model.pooler is not None)


_NAMES = (
    ("embeddings.mask_token", "mask_token"),
    ("embeddings.position_embeddings", "positions.weight"),
    ("embeddings.patch_embeddings.projection.", "patches.to_dim."),
    ("embeddings.norm.", "patch_norm."),
    ("encoder.layers.", "stages."),
    (".blocks.", ".layers."),
    (".attention.relative_position_bias.relative_position_bias_table", ".attention.positions.0.table"),
    (".downsample.reduction.weight", ".merge.round.attention.weight"),
    (".downsample.norm.", ".merge.round.attention.norm."),
    *LAYER_NAMES,
    (".attention.to_", ".round.attention.to_"),
    (".attention.positions.", ".round.attention.positions."),
    (".update.", ".round.update."),
    ("layernorm.", "norm."),
)


def _change(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Weights that have another shape or order here."""
    if name == "patches.to_dim.weight":
        return {name: kernel_as_linear(weight)}
    if name == "mask_token":
        return {name: weight.flatten()}
    if name == "positions.weight":
        return {name: weight[0]}
    if name.endswith(".positions.0.table"):  # indexed by the offset of the destination there, of the source here
        return {name: weight.flip(0)}
    if ".merge." in name:  # the four patches: column by column there, row by row here
        cells = weight.unflatten(-1, (4, -1))[..., (0, 2, 1, 3), :]
        return {name: cells.movedim(0, -1) if name.endswith("attention.weight") else cells.flatten()}
    return {name: weight}


class SwinEncoder(Adapter):
    """A Swin with the call of transformers."""

    model: Swin

    def __init__(self, model: Swin, config: Any, pools: bool) -> None:
        super().__init__(model, config)
        self.pools = pools

    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = False,
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
            interpolate_pos_encoding: whether absolute positions, where there are any, are stretched to the images.
            output_hidden_states, output_attentions, return_dict: as in transformers; default: the configuration's.

        Returns:
            `SwinModelOutput`, or its tuple: last_hidden_state [B, n, width], pooler_output [B, width], hidden_states
            and reshaped_hidden_states of each stage, attentions [B * windows, H, S, S] of each stage's last layer (rows
            of padding are zeros).

        Raises:
            ValueError, TypeError: an invalid argument; the message names it.
        """
        from transformers.models.swin.modeling_swin import SwinModelOutput

        refuse(**others)
        images = pixels(pixel_values, self.model.patches.to_dim.weight)
        grid = self.model.pad_images(images)[1]
        masked = bool_masked_pos
        found = self.model(
            images,
            None if masked is None else as_token_mask(masked, (len(images), grid[0] * grid[1]), "bool_masked_pos"),
            stretch=bool(interpolate_pos_encoding),
            **self.requested_outputs(output_hidden_states, output_attentions),
        )
        output = SwinModelOutput(
            last_hidden_state=found.last,
            pooler_output=found.pooled if self.pools else None,
            hidden_states=found.states,
            attentions=found.weights and tuple(w.flatten(0, 1) for w in found.weights),
            reshaped_hidden_states=found.states and self._as_images(found.states, grid),
        )
        return self.answer(output, return_dict)

    def _as_images(self, states: tuple[Tensor, ...], grid: tuple[int, int]) -> tuple[Tensor, ...]:
        grids, last = [grid], len(states) - 2
        for k in range(len(states) - 1):
            rows, columns = grids[-1]
            grids.append(((rows + 1) // 2, (columns + 1) // 2) if k < last else grids[-1])
        return tuple(as_image(x, *size) for x, size in zip(states, grids, strict=True))
