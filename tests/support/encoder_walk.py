"""Every encoder of transformers whose forward pass could do without padding, as a tiny model: does it keep texts apart?

python tests/support/encoder_walk.py      prints an answer for each family
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from hf_walk import tiny
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

import mpnn.hf
from mpnn.integrations.hf import unpadded

APART, MIXES, NO_MODEL = "keeps texts apart", "mixes texts", "no tiny model"

_LENGTHS = torch.tensor([[17], [5], [11]])
_RIGHT = (torch.arange(17) < _LENGTHS).long()
_IDS = torch.randint(5, 50, (3, 17), generator=torch.Generator().manual_seed(3))


def families() -> Iterator[tuple[str, Any]]:
    """Each family whose bare model takes tokens, a mask and positions, by name and class."""
    for family, classes in auto.MODEL_MAPPING_NAMES.items():
        name = classes if isinstance(classes, str) else classes[0]
        model = getattr(transformers, name, None)
        try:
            if model is not None and unpadded.takes_positions(model):
                yield family, model
        except ImportError:  # it needs another library
            continue


def _states(made: Any, ids: Tensor, keep: Tensor) -> list[Tensor]:
    """The states of tokens of each text, and what the model pools of it."""
    out = made(input_ids=ids, attention_mask=keep)
    pooled = out.get("pooler_output")
    states = [row[mask.bool()] for row, mask in zip(out.last_hidden_state, keep, strict=True)]
    return states if pooled is None else [torch.cat([x, y.view(1, -1)]) for x, y in zip(states, pooled, strict=True)]


def difference(made: Any) -> float:
    """How far states of texts are from those with padding, or from those beside other texts, of the largest state."""
    pad = getattr(made.config, "pad_token_id", None) or 0
    mask_token = getattr(made.config, "mask_token_id", None)
    ids = _IDS.clone()
    if mask_token is not None and mask_token < 60:  # some embeddings depend on how many tokens are masked
        ids[:, 2] = mask_token
    with torch.no_grad():
        worst = 0.0
        for keep in (_RIGHT, _RIGHT.flip(1)):
            batch = ids.masked_fill(keep == 0, pad)
            made.set_attn_implementation("eager")
            expected = _states(made, batch, keep)
            handle = mpnn.hf.use(made, unpad=True)
            try:
                found = _states(made, batch, keep)
                other = batch.clone()
                other[0] = (batch[0] + 7) % 40 + 5
                beside = _states(made, other, keep)
            finally:
                handle.restore()
            scale = max(float(x.abs().max()) for x in expected)
            rows = slice(None) if keep is _RIGHT else slice(0, 1)  # pooled states are those of padding on the left
            pairs = [*zip(found[rows], expected[rows], strict=True), *zip(found[1:], beside[1:], strict=True)]
            worst = max(worst, *(float((x - y).abs().max()) / scale for x, y in pairs))
    return worst


def walk(first: str = "") -> Iterator[tuple[str, str, str]]:
    """Family, answer and detail of each encoder."""
    for family, model in families():
        if family < first:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = tiny(model)
            except Exception as error:
                yield family, NO_MODEL, f"{type(error).__name__}: {str(error)[:80]!r}"
                continue
            if not unpadded.could_unpad(made):
                continue
            try:
                far = difference(made)
            except Exception as error:
                yield family, MIXES, f"{type(error).__name__}: {str(error)[:100]!r}"
                continue
        yield family, APART if far <= 1e-5 else MIXES, f"{far:.0e}"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for answer in walk(*sys.argv[1:]):
        print(*answer, flush=True)
