"""Functions that graphs and topologies call, from modules that import graphs: `parse`, `text_of`, `plot` and `html`.

Graphs cannot import these modules in turn. The parser enters itself here when it is imported, and `mpnn` enters the
two that draw, which it imports when they are first called.
"""

from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}
