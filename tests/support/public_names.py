"""The public names of the package: what a change must not take away without a line in the changes.

python tests/support/public_names.py     writes public_names.txt, after a change on purpose
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_suffix(".txt")
MODULES = (
    *("mpnn", "mpnn.aggregate", "mpnn.attention", "mpnn.backends", "mpnn.data", "mpnn.decoding", "mpnn.distributed"),
    *("mpnn.engine", "mpnn.flex", "mpnn.graphs", "mpnn.hf", "mpnn.models", "mpnn.ops", "mpnn.position", "mpnn.pyg"),
    *(
        "mpnn.round",
        "mpnn.scores",
        "mpnn.shim",
        "mpnn.testing",
        "mpnn.train",
        "mpnn.update",
        "mpnn.varlen",
        "mpnn.view",
    ),
    *("mpnn.integrations.natten", "mpnn.integrations.pyg_lib", "mpnn.integrations.torch_cluster"),
    *("mpnn.integrations.torch_scatter", "mpnn.integrations.xformers"),
)


def names() -> list[str]:
    """Each public name of each public module: `__all__`, or what the module defines or exports on purpose."""
    return [f"{module}.{name}" for module in MODULES for name in sorted(_names(importlib.import_module(module)))]


def _names(module: object) -> set[str]:
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return set(listed)
    path = getattr(module, "__name__", "")
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and (inspect.isclass(value) or inspect.isfunction(value))
        and str(getattr(value, "__module__", "")).startswith(path if path != "mpnn.shim" else "mpnn")
    }


def functions() -> dict[str, Any]:
    """The public functions and methods that the package defines, by name; properties are not among them."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        for name in sorted(_names(module)):
            thing = getattr(module, name, None)
            members = vars(thing) if inspect.isclass(thing) else {"": thing}
            for member, value in members.items():
                function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
                if isinstance(value, (classmethod, staticmethod)):
                    function = value.__func__
                if member.startswith("_") or not inspect.isfunction(function):
                    continue
                if function.__module__.startswith("mpnn."):
                    found[".".join(filter(None, (module.__name__, name, member)))] = function
    return found


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(names()) + "\n")
