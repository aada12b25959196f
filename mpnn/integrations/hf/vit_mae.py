"""ViTMAE of transformers as message passing: the bare model, and the decoder of its pre-training head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mpnn.graph.topology import Topology
from mpnn.integrations.hf import vit
from mpnn.integrations.hf.arguments import refuse
from mpnn.integrations.hf.modules import Adapter
from mpnn.integrations.hf.weights import Copies, check_class, check_config, with_weights
from mpnn.models.vision.mae import MAEConfig, PixelDecoder, visible_patches, with_class
from mpnn.models.vision.vit import ViT


def convert(hf_model: Any, graph: Topology | None, copies: Copies) -> MAEEncoder:
    """A `ViTMAEModel` as message passing; `graph` is over all patches, and those left out take their edges along."""
    check_class(hf_model, "ViTMAEModel")
    check_config(hf_model.config, hidden_dropout_prob=0.0)
    ours = vit.vit_config(hf_model.config, sinusoidal=True)
    model = with_weights(lambda: ViT(ours, graph), hf_model, vit.NAMES, copies, vit.change)
    return MAEEncoder(model, hf_model.config)


def convert_decoder(hf_decoder: Any, graph: Topology | None, copies: Copies) -> MAEDecoder:
    """A `ViTMAEDecoder` as message passing."""
    config = hf_decoder.config  # the decoder's own, in which the encoder's sizes are replaced
    ours = MAEConfig(
        **vars(vit.vit_config(config)) | {"dim": hf_decoder.decoder_embed.in_features, "sinusoidal": True},
        decoder_dim=config.hidden_size,
        decoder_layers=config.num_hidden_layers,
        decoder_heads=config.num_attention_heads,
        decoder_hidden=config.intermediate_size,
    )
    return MAEDecoder(with_weights(lambda: PixelDecoder(ours, graph), hf_decoder, _NAMES, copies, vit.change))


_NAMES = (
    ("decoder_embed.", "to_dim."),
    ("decoder_pos_embed", "positions.weight"),
    ("decoder_norm.", "norm."),
    ("decoder_pred.", "to_pixels."),
    ("decoder_layers.", "layers."),
    *vit.LAYER_NAMES,
)


class MAEEncoder(Adapter):
    """The encoder of an MAE with the call of transformers."""

    model: ViT

    def forward(
        self,
        pixel_values: Tensor | None = None,
        noise: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B images of N patches, of which n are seen.

        Args:
            pixel_values: [B, channels, H, W].
            noise: [B, N], the n patches with the least of it are seen, in that order; default: drawn anew.
            interpolate_pos_encoding: whether positions are stretched to images of another size.
            output_hidden_states, output_attentions, return_dict: as in transformers; default: the configuration's.

        Returns:
            `ViTMAEModelOutput`, or its tuple: last_hidden_state [B, 1 + n, dim], mask [B, N] (1 where a patch is not
            seen), ids_restore int64 [B, N], hidden_states, attentions [B, H, 1 + n, 1 + n].

        Raises:
            ValueError, TypeError: an invalid argument; the message names it.
        """
        from transformers.models.vit_mae.modeling_vit_mae import ViTMAEModelOutput

        refuse(**others)
        images = vit.pixels(pixel_values, self.model.patches.to_dim.weight)
        rows, columns = self.model.patches.grid(images)
        shape = (len(images), rows * columns)
        noise = torch.rand(shape, device=images.device) if noise is None else noise
        if noise.shape != shape:
            raise ValueError(f"noise must have shape [batch, patches] = {list(shape)}; got {list(noise.shape)}")
        seen = visible_patches(noise, self.config.mask_ratio)
        found = self.model(
            images,
            node_mask=with_class(seen),
            stretch=bool(interpolate_pos_encoding),
            **self.requested_outputs(output_hidden_states, output_attentions),
        )
        shuffled = noise.argsort(1)
        order = _with_class_token(shuffled[:, : int(seen[0].sum())] + 1)
        fields: dict[str, Any] = {
            "last_hidden_state": _gather_nodes(found.last, order),
            "mask": (~seen).float(),
            "ids_restore": shuffled.argsort(1),
            "hidden_states": found.states and tuple(_gather_nodes(x, order) for x in found.states),
            "attentions": found.weights
            and tuple(_gather_nodes(_gather_nodes(w.mT, order).mT, order) for w in found.weights),
        }
        output = ViTMAEModelOutput(**fields)
        return self.answer(output, return_dict)


class MAEDecoder(nn.Module):
    """The decoder of an MAE with the call of transformers."""

    def __init__(self, model: PixelDecoder) -> None:
        super().__init__()
        self.model = model
        rows, columns = model.positions.size
        model.positions.size = (1, rows * columns)

    def forward(self, hidden_states: Tensor, ids_restore: Tensor, interpolate_pos_encoding: bool = False) -> Any:
        """hidden_states [B, 1 + n, dim], the class token and the patches that were seen; ids_restore int64 [B, N],
        where each patch stands in the order in which these come first. `ViTMAEDecoderOutput` with logits
        [B, N, pixels * C].

        Where positions are stretched, they are as those of a line of N patches, as transformers has it.
        """
        from transformers.models.vit_mae.modeling_vit_mae import ViTMAEDecoderOutput

        seen = ids_restore < hidden_states.shape[1] - 1
        place = torch.where(seen, ids_restore + 1, 0)  # masked patches are ignored
        latent = _gather_nodes(hidden_states, _with_class_token(place))
        logits = self.model(latent, seen, (1, ids_restore.shape[1]), stretch=bool(interpolate_pos_encoding))
        return ViTMAEDecoderOutput(logits=logits)


def _with_class_token(patches: Tensor) -> Tensor:
    """Node 0, the class token, before these nodes [B, n]."""
    return torch.cat([patches.new_zeros(len(patches), 1), patches], 1)


def _gather_nodes(x: Tensor, nodes: Tensor) -> Tensor:
    """The rows `nodes` [B, n] of x [B, ..., N, d]."""
    index = nodes.view(len(nodes), *[1] * (x.dim() - 3), -1, 1).expand(*x.shape[:-2], -1, x.shape[-1])
    return x.gather(-2, index)
