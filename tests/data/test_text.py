"""Text to learn from: plays, captions, Python's manual and its sentences; characters as numbers, and crops of them."""

import sys

import pytest
import torch
from real_data import real

from mpnn.data.errors import DatasetNotFound
from mpnn.data.sentences import sentences
from mpnn.data.text import Characters, batches, multi30k, pydoc_topics, tinyshakespeare, topics


def test_tinyshakespeare():
    play = real(tinyshakespeare)
    assert play.startswith("First Citizen:\nBefore we proceed any further")
    assert (len(play), len(Characters(play))) == (1115394, 65)


def test_multi30k():
    splits = {split: real(multi30k, split) for split in ("train", "val", "test_2016_flickr")}
    assert [len(captions) for captions in splits.values()] == [29000, 1014, 1000]
    assert all(english.strip() and german.strip() for captions in splits.values() for english, german in captions)
    assert splits["train"][0] == (
        "Two young, White males are outside near many bushes.",
        "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    )


def test_the_manual_is_english_in_a_fixed_order_without_repeated_paragraphs():
    manual = pydoc_topics()
    assert manual == pydoc_topics()
    assert list(topics()) == sorted(topics())
    assert len(manual) > 300_000
    assert manual.count(" the ") > 2000
    paragraphs = manual.rstrip("\n").split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


def test_a_python_without_its_manual_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DatasetNotFound, match="installed without its manual"):
        pydoc_topics()


def test_characters_by_hand():
    vocabulary = Characters("hello")
    assert vocabulary.symbols == "ehlo"
    indices = vocabulary.encode("hole")
    assert indices.dtype == torch.int64
    assert indices.tolist() == [1, 3, 2, 0]
    assert vocabulary.decode(indices) == "hole"
    assert vocabulary.encode("").shape == (0,)
    assert vocabulary.decode(vocabulary.encode("")) == ""


def test_what_is_not_in_the_vocabulary_is_named():
    vocabulary = Characters("abc")
    with pytest.raises(ValueError, match="'ß' at position 2 is not among the 3"):
        vocabulary.encode("abß")
    with pytest.raises(ValueError, match="index 3 at position 1 is outside this vocabulary of 3"):
        vocabulary.decode(torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="index -1 at position 0"):
        vocabulary.decode(torch.tensor([-1]))
    with pytest.raises(ValueError, match=r"got \[1, 2\]; decode row by row"):
        vocabulary.decode(torch.tensor([[0, 1]]))


def test_batches_are_crops_and_their_next_characters():
    data = torch.arange(100)
    x, y = batches(data, length=7, batch=50, generator=torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (50, 7)
    assert (y == x + 1).all()
    assert (x[:, 1:] == y[:, :-1]).all()
    again, _ = batches(data, 7, 50, torch.Generator().manual_seed(0))
    assert (x == again).all()


def test_batches_reach_both_ends_of_the_data():
    x, y = batches(torch.arange(5), length=3, batch=64, generator=torch.Generator().manual_seed(0))
    assert set(x[:, 0].tolist()) == {0, 1}
    assert y.max() == 4


def test_batches_refuse_what_they_cannot_crop():
    with pytest.raises(ValueError, match="crops of 5 characters need at least 6 of them, got 5"):
        batches(torch.arange(5), 5, 1)
    with pytest.raises(ValueError, match=r"shape \[characters\], got \[1, 5\]"):
        batches(torch.arange(5)[None], 2, 1)
    with pytest.raises(ValueError, match="length must be at least 1; got 0"):
        batches(torch.arange(5), 0, 1)


def test_sentences_are_sentences():
    found = sentences()
    assert found == sentences()
    assert len(found) == len(set(found)) == 400
    for sentence in found:
        assert 5 <= len(sentence.split()) <= 40
        assert sentence[0].isupper()
        assert "\n" not in sentence
        assert "::=" not in sentence
        assert ">>>" not in sentence


def test_fewer_sentences_are_spread_over_the_whole_manual():
    everything = sentences(10**6)
    few = sentences(4)
    assert few == [everything[i * len(everything) // 4] for i in range(4)]
    with pytest.raises(ValueError, match="limit must be at least 1; got 0"):
        sentences(0)
