"""Real data for tests: what is on this machine (`$MPNN_DATA`, else the cache), never fetched over the network."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NoReturn, TypeVar

import pytest

from mpnn.data.errors import DatasetNotFound

T = TypeVar("T")

# The package re-exports a function of the module's own name, which hides the module from `import ... as`.
locate_module = importlib.import_module("mpnn.data.locate")


def no_network(url: str) -> NoReturn:
    raise OSError("the tests use no network")


def real(load: Callable[..., T], *args: object) -> T:
    """What `load(*args)` finds here; where that is nothing, the test is skipped with the sentence a user would get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate_module, "_open", no_network)
        try:
            return load(*args)
        except DatasetNotFound as error:
            pytest.skip(str(error))
