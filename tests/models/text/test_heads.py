"""Heads on encoders: what they predict, what they learn, how they are kept."""

import pytest
import torch
from error_bound import error_bound
from torch.nn import functional as F

from mpnn.models import Bert, BertConfig, MaskedLM, SentenceClassifier, TokenClassifier, load_weights
from mpnn.models.text.heads import IGNORED, mask_tokens

transformers = pytest.importorskip("transformers")

from hf_models import made  # noqa: E402

SIZES = BertConfig(vocabulary=20, dim=16, layers=1, heads=2, hidden=32, context=12, dropout=0.0, attention_dropout=0.0)
TOKENS = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]])
KEEP = TOKENS != 0
PADDING = ~KEEP
BOUND = error_bound(2, 24)


def test_masked_lm_equals_hugging_face(measured):
    theirs = made("bert", transformers.BertForMaskedLM, vocab_size=20, pad_token_id=0)
    config = BertConfig(vocabulary=20, dim=16, layers=2, heads=2, hidden=24, context=32)
    ours = MaskedLM(load_weights(Bert(config, pooler=False), theirs.bert.state_dict())).eval()
    head = theirs.cls.predictions
    with torch.no_grad():
        for mine, original in (
            (ours.transform[0], head.transform.dense),
            (ours.transform[2], head.transform.LayerNorm),
        ):
            mine.load_state_dict(original.state_dict())
        ours.bias.copy_(head.decoder.bias.normal_())
    targets = torch.where(KEEP, TOKENS.flip(1), IGNORED)
    expected = theirs(TOKENS, attention_mask=KEEP.long(), labels=targets)
    system, peer = "BERT, RoBERTa; masked LM, both directions", "Hugging Face BertForMaskedLM, our head"
    measured(system, peer, (ours(TOKENS, padding_mask=PADDING) - expected.logits)[KEEP].abs().max().item(), BOUND)
    measured(system, peer, (ours.loss(TOKENS, targets, padding_mask=PADDING) - expected.loss).abs().item(), BOUND)


def test_masked_tokens_are_never_padding():
    tokens, mask = torch.full((50, 200), 7), 3
    keep = torch.rand(50, 200) < 0.8
    seen, targets = mask_tokens(tokens, mask, 20, keep, generator=torch.Generator().manual_seed(1))
    chosen = targets != IGNORED
    assert not (chosen & ~keep).any()
    assert (targets[chosen] == 7).all()
    assert (seen[~chosen] == 7).all()
    count = keep.sum().item()  # 8000 draws: within five standard deviations of what they are on average
    assert abs(chosen.sum().item() / count - 0.15) < 5 * (0.15 * 0.85 / count) ** 0.5
    count = chosen.sum().item()
    assert abs((seen[chosen] == mask).float().mean().item() - 0.8 - 0.1 / 20) < 5 * (0.8 * 0.2 / count) ** 0.5
    assert abs((seen[chosen] == 7).float().mean().item() - 0.1 - 0.1 / 20) < 5 * (0.1 * 0.9 / count) ** 0.5
    with pytest.raises(ValueError, match=r"rate .* got 0"):
        mask_tokens(tokens, mask, 20, rate=0)


def test_loss_is_the_cross_entropy_of_what_has_a_target():
    model, targets = TokenClassifier(Bert(SIZES), 3), torch.tensor([[0, IGNORED, 2, 1], [1, 1, IGNORED, IGNORED]])
    some = targets != IGNORED
    expected = F.cross_entropy(model(TOKENS, padding_mask=PADDING)[some], targets[some])
    assert torch.allclose(model.loss(TOKENS, targets, padding_mask=PADDING), expected)


def test_sentences_are_classified_by_a_pooler():
    with pytest.raises(ValueError, match="pooler=True"):
        SentenceClassifier(Bert(SIZES, pooler=False), 3)
