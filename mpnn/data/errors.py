"""What can be wrong with a dataset on disk, as three errors that each name the file and say what to do."""

from __future__ import annotations


class DatasetNotFound(FileNotFoundError):
    """The dataset is neither on this machine nor to be downloaded; the message says how to get it."""


class DamagedFile(ValueError):
    """A data file is there but truncated or not in its format; the message names the file (and line)."""


class UnsafePickle(ValueError):
    """A pickle asks for something that plain data never needs; the message names it. Nothing was run."""
