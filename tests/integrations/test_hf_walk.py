"""All families of transformers that a tiny model can be made of, against eager: each agrees, or raises a sentence."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hf_walk import AGREES, BLIND, DIFFERS, NO_MODEL, PAGE, REFUSED, refused, walk, with_refused

from mpnn.integrations.hf.use import NATIVE


@pytest.mark.slow
def test_each_family_agrees_with_eager_or_raises() -> None:
    answers = list(walk())
    assert [f"{name}: {detail}" for _, name, what, detail in answers if what in (DIFFERS, BLIND)] == []
    counts = Counter(what for _, _, what, _ in answers)
    agree, refuse, untried = map(int, re.findall(r"\*\*(\d+)\*\*", PAGE.read_text())[:3])
    assert (counts[AGREES], counts[REFUSED], counts[NO_MODEL]) == (agree, refuse, untried), counts
    text = PAGE.read_text()
    for _, name, what, _ in answers:
        assert what == AGREES or f"`{name}`" in text, f"docs/families.md does not name {name}, which {what}"


@pytest.mark.slow
def test_the_page_names_the_families_of_texts_that_are_refused() -> None:
    names = refused()
    assert "rembert" in names
    assert not set(NATIVE) & set(names)
    assert with_refused(PAGE.read_text(), names) == PAGE.read_text(), "run python tests/support/hf_walk.py refused"
