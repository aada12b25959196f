"""Checkpoints: everything needed to continue a training run, in one file that is never half-written."""

import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from mpnn.graph.files import DIGITS, digest, remove_abandoned, write_atomically

_FORMAT = 2
_CONTENT = {"format", "run", "step", "state"}


class CheckpointError(ValueError):
    """The file is not a checkpoint, is damaged, or belongs to another training run."""


class Checkpoint:
    """A checkpoint file of a training run, for `mpnn.train.loop.fit`.

    It contains weights, optimizer, history, and the states of torch's random generators, which also sample the batches.
    A run that was killed and resumed ends with the same weights, bit for bit, as an uninterrupted run on the same
    machine with the same versions and number of threads. Reading uses `weights_only=True`, which runs no code. The file
    ends with a digest of its content, so that a changed byte is noticed.

    Args:
        path: the file; its folder must exist. If the file exists, training continues from it, else it starts over.
        seconds: the time between two writes; 0 writes after every step. The file is always written after the last step.
        run: further settings that must not change when training continues, such as the seed and the name of the data:
            a mapping from names to numbers or text. The training loop adds its own settings.

    Attributes:
        step: the number of completed steps in the file, or None before this object has read or written it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, seconds: float = 30.0, run: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(path)
        self.seconds = seconds
        self.run = dict(run or {})
        self.step: int | None = None
        self._last = monotonic()

    def describe(self, **settings: Any) -> None:
        """Adds settings that must not change when training continues."""
        self.run |= settings

    @property
    def due(self) -> bool:
        """Whether the last write was at least `seconds` ago."""
        return monotonic() - self._last >= self.seconds

    def write(self, step: int, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Replaces the file atomically.

        Raises:
            OSError: if the disk is full or the folder cannot be written. The old file then remains.
        """
        content = {"format": _FORMAT, "run": self.run | dict(settings), "step": step, "state": dict(state)}
        write_atomically(self.path, lambda temporary: _save(content, temporary))
        self.step = step
        self._last = monotonic()

    def read(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state that was written last, or None if there is no file.

        Raises:
            CheckpointError: if the file is damaged, is not a checkpoint, or belongs to a run with other settings.
        """
        if not self.path.exists():
            return None
        content = _load(self.path)
        if changes := differences(content["run"], self.run | dict(settings)):
            raise CheckpointError(f"{self.path} is a checkpoint of another training run: {changes}")
        self.step = content["step"]
        return content["state"]

    def best(self) -> dict[str, torch.Tensor] | None:
        """The weights of the best validation so far, from the file; None if there is no file or was no validation.

        Raises:
            CheckpointError: if the file is damaged or is not a checkpoint.
        """
        return _load(self.path)["state"]["best"] if self.path.exists() else None

    def delete(self) -> None:
        """Deletes the file and temporary files of killed processes."""
        self.path.unlink(missing_ok=True)
        if self.path.parent.is_dir():
            remove_abandoned(self.path)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A sentence that lists the settings that changed; empty if there are none."""
    changes = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return "; ".join(f"{name} was {before.get(name)} and is {now.get(name)} now" for name in changes)


def _save(content: Mapping[str, Any], path: Path) -> None:
    with open(path, "w+b") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # of a full disk, in whose place torch raises its own
                raise error.__context__ from None
            raise
        file.write(digest(file, file.tell()))


def _load(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch, zip and pickle raise many exception types for damaged files
            why = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path} is damaged ({why}); delete it to start over") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.keys() != _CONTENT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of mpnn; delete it to start over")
    with open(path, "rb") as file:
        at = file.seek(-DIGITS, os.SEEK_END)
        if file.read() != digest(file, at):
            raise CheckpointError(f"{path} is damaged (a byte has changed since); delete it to start over")
    return content
