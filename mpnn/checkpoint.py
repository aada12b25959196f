"""A checkpoint of a training: all that the training needs to continue, in one file that is always whole."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import IO, Any, cast

import torch

from mpnn.files import remove_abandoned, write_atomically

_FORMAT = 1
_CONTENT = {"format", "run", "step", "state"}


class CheckpointError(ValueError):
    """A file that is no checkpoint, a damaged one, or one of another training."""


class Checkpoint:
    """The file from which a training continues; `mpnn.train.fit_language_model` and `fit_node_classifier` take one.

    It holds weights, optimizer, history, and the states of torch's random generators, which also draw the batches. A
    training that was killed and continues from it ends with the same weights, bit for bit, as one that was not: on the
    same machine, with the same versions and number of threads. It is read with `weights_only=True`, which runs no code.

    Args:
        path: the file; its folder must exist. If the file exists, training continues from it, else it begins anew.
        seconds: the time between two writes; 0 for one after every step. The last step is always followed by one.
        run: what else has to be the same when training continues, such as the seed and the name of the data, as numbers
            and text by name. The training adds its own settings.

    Attributes:
        step: the number of steps done when the file was written, as far as this object has written or read it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, seconds: float = 30.0, run: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.seconds, self.run = Path(path), seconds, dict(run or {})
        self.step: int | None = None
        self._last = monotonic()

    @property
    def due(self) -> bool:
        """Whether the last write is `seconds` ago."""
        return monotonic() - self._last >= self.seconds

    def write(self, step: int, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Replaces the file as a whole.

        Raises:
            OSError: the disk is full, or the folder cannot be written; the old file is still there.
        """
        content = {"format": _FORMAT, "run": self.run | dict(settings), "step": step, "state": dict(state)}
        write_atomically(self.path, lambda temporary: _save(content, temporary))
        self.step, self._last = step, monotonic()

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state that was written last, or None if there is no file.

        Raises:
            CheckpointError: the file is damaged, not a checkpoint, or of a run with other settings.
        """
        if not self.path.exists():
            return None
        content = _load(self.path)
        if changes := differences(content["run"], self.run | dict(settings)):
            raise CheckpointError(f"{self.path} is a checkpoint of another training: {changes}")
        self.step = content["step"]
        return content["state"]

    def delete(self) -> None:
        """Deletes the file, and what killed processes left of it."""
        self.path.unlink(missing_ok=True)
        if self.path.parent.is_dir():
            remove_abandoned(self.path)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The settings that have changed, as a sentence; empty if there are none."""
    changes = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return "; ".join(f"{name} was {before.get(name)} and is {now.get(name)} now" for name in changes)


class _Sink:
    """Keeps the first OSError of writing a file, which torch's writer would hide behind a RuntimeError of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, part: Any) -> int:
        try:
            if self.error is None:
                self._file.write(part)
        except OSError as error:
            self.error = error
        return len(part)

    def flush(self) -> None:
        """Does nothing: closing the file flushes it, and raises what that raises."""


def _save(content: Mapping[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        sink = _Sink(file)
        torch.save(content, cast(IO[bytes], sink))
        if sink.error is not None:
            raise sink.error


def _load(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch, zip and pickle raise many kinds for damaged files
            why = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path} is damaged ({why}); delete it to begin anew") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.keys() != _CONTENT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of mpnn; delete it to begin anew")
    return content
