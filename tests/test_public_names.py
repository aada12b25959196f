"""What is public is a list, and a change of it is made on purpose."""

import pytest
from public_names import SNAPSHOT, names

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
