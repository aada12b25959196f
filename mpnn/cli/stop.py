"""Ctrl-C and SIGTERM during training: the first ends it after the present step, the second at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mpnn.cli.console import warn


class Stopped(KeyboardInterrupt):
    """The user, or the system, asked the command to end, and training ended after a whole step.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as shells have it: 130 for Ctrl-C


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function to call after every step: it raises `Stopped` if a signal has arrived since.

    A second signal raises KeyboardInterrupt at once. Signals that the command was started to ignore (`nohup`, or `&` in
    a script) stay ignored.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        warn("stopping after this step; once more to stop at once")

    def check() -> None:
        if received:
            raise Stopped(received[0])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, receive)
        yield check
        check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
