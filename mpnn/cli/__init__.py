"""The command line: `mpnn demo`, `graph`, `explain`, `train`, `generate`, `eval`, `data`, `tune`.

Nothing here is imported by `import mpnn`; Typer, Rich and matplotlib come with the extra `mpnn[cli]`.
"""

import sys
from importlib.util import find_spec
from io import TextIOWrapper

from mpnn.graph.registry import install

_REQUIRED = {
    "typer": "typer",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "safetensors": "safetensors",
}
"""The modules that the commands import, and the packages that they come in."""


def main() -> None:
    """The entry point `mpnn`."""
    missing = [package for module, package in _REQUIRED.items() if find_spec(module) is None]
    if missing:
        print(f"the mpnn command needs {', '.join(missing)}; run: {install('cli')}", file=sys.stderr)
        sys.exit(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets "?" and no traceback
    from mpnn.cli.app import app

    app()
