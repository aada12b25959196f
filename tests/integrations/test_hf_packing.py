"""Packed texts that a call tells by `cu_seq_lens` alone: each gets the numbers that it has alone, or a sentence."""

from typing import Any

import hf_walk
import pytest
import torch
import transformers
from torch import Tensor

import mpnn.hf

LENGTHS = [5, 1, 7]
IDS = torch.randint(3, 50, (1, 13), generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 7, "max_length_k": 7}


def states(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


@pytest.mark.parametrize("name", ["Kosmos2_5ForConditionalGeneration", "RobertaModel", "EsmModel", "BertModel"])
@pytest.mark.parametrize("is_embedded", [False, True])
def test_texts_are_numbered_as_their_family_numbers_them_alone(name: str, is_embedded: bool) -> None:
    """From 0, from 1, from behind the number of padding."""
    model = hf_walk.tiny(getattr(transformers, name))
    options = {"use_cache": False} if "Kosmos" in name else {}

    def inputs(ids: Tensor) -> dict[str, Any]:
        if is_embedded:
            return {"inputs_embeds": model.get_input_embeddings()(ids).detach()} | options
        return {"input_ids": ids} | options

    alone = torch.cat([states(model, **inputs(text)) for text in IDS.split(LENGTHS, 1)], 1)
    mpnn.hf.use(model)
    found = states(model, **inputs(IDS), **PACKED)
    assert (found - alone).abs().max() <= 2e-5 * alone.abs().max()


def test_padding_inside_a_text_is_numbered_as_alone() -> None:
    model = hf_walk.tiny(transformers.RobertaModel)
    ids = IDS.clone()
    ids[0, 2] = ids[0, 9] = model.config.pad_token_id
    alone = torch.cat([states(model, input_ids=text) for text in ids.split(LENGTHS, 1)], 1)
    mpnn.hf.use(model)
    found = states(model, input_ids=ids, **PACKED)
    assert (found - alone).abs().max() <= 2e-5 * alone.abs().max()


@pytest.mark.parametrize(
    "told", [PACKED, {"seq_idx": torch.tensor([[0] * 5 + [1] + [2] * 7]).int()}], ids=["ends", "seq_idx"]
)
def test_embeddings_of_three_tokens_refuse_packed_texts(told: dict[str, Any]) -> None:
    model = hf_walk.tiny(transformers.MobileBertModel)
    mpnn.hf.use(model)
    with pytest.raises(ValueError, match="MobileBertEmbeddings adds to each token those before and after it"):
        states(model, input_ids=IDS, **told)


def test_a_mobilebert_without_them_takes_packed_texts() -> None:
    config = hf_walk.tiny(transformers.MobileBertModel).config
    config.trigram_input = False
    torch.manual_seed(0)
    model = transformers.MobileBertModel(config).eval()
    alone = torch.cat([states(model, input_ids=text) for text in IDS.split(LENGTHS, 1)], 1)
    mpnn.hf.use(model)
    found = states(model, input_ids=IDS, **PACKED)
    assert (found - alone).abs().max() <= 2e-5 * alone.abs().max()
