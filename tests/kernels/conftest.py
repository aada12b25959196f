"""A machine without compiled kernels, for the tests of several families."""

import pytest

from mpnn.kernels.cpu import library


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an edit of the sources: no library has their digest."""
    library.why_missing.cache_clear()
    monkeypatch.setattr(library, "digest", lambda: "0" * 12)
    yield
    monkeypatch.undo()
    library.why_missing.cache_clear()
