"""The authors' weights of the attention model for the travelling salesman problem, in the names of `TSP`."""

from collections.abc import Mapping

import torch
from torch import Tensor


def state_from_published(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Converts the authors' state dict, whose maps have one [dim, D] slice per head, to that of a `TSP`."""
    state = {
        "embed.weight": weights["init_embed.weight"],
        "embed.bias": weights["init_embed.bias"],
        "nowhere": weights["W_placeholder"],
        "glimpse.attention.to_query.weight": torch.cat(
            [weights["project_fixed_context.weight"], weights["project_step_context.weight"]], 1
        ),
        "glimpse.attention.to_out.weight": weights["project_out.weight"],
    }
    node_maps = weights["project_node_embeddings.weight"].chunk(3)
    for name, weight in zip(
        ("glimpse.attention.to_key", "glimpse.attention.to_value", "to_key"), node_maps, strict=True
    ):
        state[f"{name}.weight"] = weight
    for k in range(layers):
        source, target = f"embedder.layers.{k}.", f"layers.{k}."
        for a, b in (("query", "query"), ("key", "key"), ("val", "value")):
            weight = weights[f"{source}0.module.W_{a}"].transpose(1, 2).flatten(0, 1)
            state[f"{target}attention.to_{b}.weight"] = weight
        state[f"{target}attention.to_out.weight"] = weights[f"{source}0.module.W_out"].flatten(0, 1).T
        for a, b in (
            ("1.normalizer", "norm"),
            ("3.normalizer", "ffn_norm"),
            ("2.module.0", "ffn.0"),
            ("2.module.2", "ffn.3"),
        ):
            prefix = f"{source}{a}."
            state |= {
                f"{target}update.{b}.{name.removeprefix(prefix)}": weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
    return state
