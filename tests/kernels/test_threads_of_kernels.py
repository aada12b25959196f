"""Threads of this library that run parts of work in Python."""

import threading

from mpnn.kernels.cpu import threads


def test_threads_have_the_name_of_this_library() -> None:
    """So that a list of the threads of a process says whose they are."""
    name = threads._pool(1, 0).submit(lambda: threading.current_thread().name).result()
    assert name.startswith("mpnn")
