"""Numba kernels for CPU around a few vector instructions, imported when first needed.

Numba compiles a kernel at its first call and keeps the result on disk; whoever waits for that is told so, once.
"""

from __future__ import annotations

import logging
from typing import Any

from numba.core import event


class _Announcement(event.Listener):
    """Logs, before the first kernel of this package is compiled (and not merely loaded), what takes so long."""

    def __init__(self) -> None:
        self.made = False

    def on_start(self, event: Any) -> None:
        module = event.data["dispatcher"].py_func.__module__
        if not self.made and module.startswith(__name__):
            self.made = True
            logging.getLogger("mpnn").warning(
                "mpnn compiles CPU kernels that were not needed before, each once for this machine; "
                "this takes up to a minute"
            )

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcement())
