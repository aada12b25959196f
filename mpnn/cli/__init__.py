"""The command line: `mpnn demo`, `graph`, `explain`, `data`, `train`.

Nothing here is imported by `import mpnn`; Typer, Rich and matplotlib come with the extra `mpnn[cli]`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

_REQUIRED = ("typer", "rich", "matplotlib", "sklearn", "safetensors")


def main() -> None:
    """The entry point `mpnn`."""
    missing = [name for name in _REQUIRED if find_spec(name) is None]
    if missing:
        print(f'the mpnn command needs {", ".join(missing)}; run: pip install "mpnn[cli]"', file=sys.stderr)
        sys.exit(2)
    from mpnn.cli.app import app

    app()
