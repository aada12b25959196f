"""Look-ups by name: functions that graphs and topologies call, and the nearest to a misspelled name.

Functions stand here if their modules import graphs, which cannot import them in turn. The parser enters itself and
`text_of` when it is imported, and `mpnn` enters the two that draw, which it imports when they are first called.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}


def install(*extras: str) -> str:
    """Text for an error: the command that installs extras, as README and site have it. It leaves torch as it is."""
    return f"""pip install -c constraints.txt ".[{",".join(extras)}]" in the folder of mpnn's source"""


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """Text for an error: that there is no such `what`, which name is close, and all names."""
    names = list(known)
    return f"there is no {what} {name!r}{did_you_mean(name, names)}; there are {', '.join(names)}"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Text for an error: " (did you mean window?)" if a known name is close to `name`, or ""."""
    close = get_close_matches(str(name), list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""
