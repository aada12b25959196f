"""BERT by itself: what it answers with, its options, and its errors."""

import pytest
import torch

from mpnn import graphs
from mpnn.models import Bert, BertConfig

SIZES = {"vocabulary": 50, "dim": 16, "layers": 2, "heads": 2, "hidden": 32, "context": 10}


def test_positions_that_begin_after_the_pad_count_tokens():
    model = Bert(BertConfig(**SIZES, types=1, pad=1, after_pad=True), [graphs.window(1), graphs.window(2)]).eval()
    tokens = torch.tensor([[4, 5, 6, 7], [8, 9, 1, 1]])
    found = model(tokens, padding_mask=tokens == 1).last
    torch.testing.assert_close(found[1, :2], model(tokens[1:, :2]).last[0])
    with pytest.raises(ValueError, match="needs a pad"):
        Bert(BertConfig(pad=None, after_pad=True))
