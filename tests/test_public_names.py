"""What is public is a list, and a change of it is made on purpose."""

import inspect
import re

import pytest
from public_names import SNAPSHOT, functions, names

pytest.importorskip("transformers")
pytest.importorskip("torch_geometric")


@pytest.mark.filterwarnings("ignore")  # of libraries that the integrations import
def test_public_names_are_those_of_the_snapshot() -> None:
    """Names that go are deprecated for a minor version first (docs/releasing.md). New ones are added by
    `python tests/support/public_names.py`, with a line in the changes."""
    listed = SNAPSHOT.read_text().splitlines()
    found = names()
    assert len(found) == len(set(found)) > 400
    assert [name for name in listed if name not in found] == [], "public names are gone"
    assert [name for name in found if name not in listed] == [], "public names are new"


NOUNS = {"Edges", "Images", "Messages", "Nodes", "Pairs", "Points", "Queries", "Rows", "Scores", "Types"}
"""Plurals that a sentence could begin with in place of a verb."""


def begins_with_a_verb(text: str) -> bool:
    """Whether a docstring says what a function does: "Returns ...". Topologies say who receives from whom."""
    first = text.split()[0]
    sentence = " ".join(text.split("\n\n")[0].split())
    is_verb = re.fullmatch(r"[A-Z][a-z]+s,?", first) and (first not in NOUNS or sentence.startswith("Scores links"))
    return bool(is_verb) or "receives from" in sentence


@pytest.mark.filterwarnings("ignore")
def test_docstrings_of_public_functions_begin_with_a_verb() -> None:
    texts = {name: inspect.getdoc(function) for name, function in functions().items() if function.__doc__}
    assert len(texts) > 350
    assert {name: text.split("\n")[0] for name, text in texts.items() if not begins_with_a_verb(text)} == {}
    assert not begins_with_a_verb("The owner of each node.")
    assert not begins_with_a_verb("Points of x.")
