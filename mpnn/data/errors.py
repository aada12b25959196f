"""Errors of dataset files. Each message names the file and the fix."""


class DatasetNotFound(FileNotFoundError):
    """The dataset is not on this machine and cannot be downloaded; the message explains how to get it."""


class DamagedFile(ValueError):
    """A data file exists but is truncated or has the wrong format; the message names the file (and line)."""
