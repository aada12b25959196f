"""The calls of functions of this library that a warm call takes."""

import os
import sys
from collections.abc import Callable
from typing import Any

import mpnn

ROOT = os.path.dirname(mpnn.__file__)


def frames(call: Callable[[], Any]) -> list[str]:
    """The calls of functions of this library in a warm call."""
    for _ in range(3):
        call()
    found: list[str] = []

    def count(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(f"{frame.f_code.co_filename[len(ROOT) + 1 :]}:{frame.f_code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found
