"""How few calls of this library a warm call of a model in place takes."""

from typing import Any

import pytest
import torch
import transformers
from frames import frames

import mpnn.hf

GPT2 = transformers.GPT2Config(
    n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=128, bos_token_id=0, eos_token_id=0
)
BERT = transformers.BertConfig(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=100
)

MOST: dict[str, tuple[Any, str | None, int]] = {
    "GPT-2": (lambda: transformers.GPT2Model(GPT2), None, 86),
    "GPT-2 over a topology": (lambda: transformers.GPT2Model(GPT2), "causal() & window(16)", 90),
    "BERT": (lambda: transformers.BertModel(BERT), None, 88),
}


@pytest.mark.parametrize("name", MOST)
def test_a_warm_call_takes_few_calls_of_this_library(name: str) -> None:
    """Two layers, each of them by its own functions. Maps by oneDNN run on some processors only."""
    make, graph, most = MOST[name]
    model = make().eval()
    mpnn.hf.use(model, graph, maps=False, layers=False)
    tokens = torch.randint(100, (1, 64))
    with torch.no_grad():
        found = frames(lambda: model(tokens))
    assert any("engine/steps.py:find" in call for call in found)
    assert len(found) <= most, "\n".join(found)
