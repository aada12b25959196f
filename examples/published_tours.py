"""Travelling salesman problem: the published test instances, and the weights of a model that solves them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.locate import locate
from mpnn.models import TSP

_FILE = "attention_model_tsp20.safetensors"


def cities(count: int = 10_000, size: int = 20, seed: int = 1234) -> Tensor:
    """Instances of `size` points in the unit square, float32 [count, size, 2]: by default those of Kool et al. 2019.

    A smaller `count` gives the first `count` of the same instances.
    """
    points = np.random.RandomState(seed).uniform(size=(count, size, 2))
    return torch.from_numpy(points.astype(np.float32))


def tsp_weights() -> dict[str, Tensor]:
    """The attention model of Kool et al. 2019, trained by its authors on 20 cities: tensors by name, for
    `published_model`.

    Raises:
        DatasetNotFound: if the file is not on this machine; the message explains how to get it.
        DamagedFile: if the file is truncated or not a safetensors file.
        ImportError: if safetensors is not installed.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(
            "the weights are stored with safetensors, which is not installed; run: pip install safetensors"
        ) from error
    path = locate("tsp", _FILE) / _FILE
    try:
        weights: dict[str, Tensor] = load_file(path)
    except Exception as error:  # safetensors raises its own exception types
        raise DamagedFile(f"{path} does not contain weights ({error}); delete it and fetch it again") from None
    return weights


def published_model(weights: Mapping[str, Tensor]) -> TSP:
    """Creates the model from the authors' published weights, in evaluation mode; see `tsp_weights`.

    Raises:
        ValueError: if the weights are not those of an attention model for the TSP.
    """
    try:
        heads, dim, _ = weights["embedder.layers.0.0.module.W_query"].shape
        layers = sum(name.endswith(".W_query") for name in weights)
        hidden = len(weights["embedder.layers.0.2.module.0.weight"])
        model = TSP(dim, heads, layers, hidden)
        model.load_state_dict(_state_from_published(weights, layers))
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"these are not the weights of an attention model for the TSP: {error}") from None
    return model.eval()


def _state_from_published(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
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
