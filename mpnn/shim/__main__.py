"""`python -m mpnn.shim flash_attn[,natten,...] script.py [arguments]`, or `-m module` in the place of the script."""

import runpy
import sys
from pathlib import Path

from mpnn.shim import MODULES, provide


def main(arguments: list[str]) -> None:
    """Provides the libraries named first, then runs the script or the module as Python does."""
    is_module = arguments[1:2] == ["-m"]
    if len(arguments) < (3 if is_module else 2):
        sys.exit(f"usage: python -m mpnn.shim NAME[,NAME...] script.py [arguments]; names: {', '.join(MODULES)}")
    try:
        provide(*arguments[0].split(","))
    except ValueError as error:
        sys.exit(str(error))
    if is_module:
        sys.argv = arguments[2:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments[1:]
    sys.path.insert(0, str(Path(arguments[1]).resolve().parent))
    runpy.run_path(arguments[1], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
