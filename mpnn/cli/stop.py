"""Ctrl-C and SIGTERM during training: the first signal stops it after the current step, the second immediately."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mpnn.cli.console import warn


class Stopped(KeyboardInterrupt):
    """Training stopped after a complete step because of a signal from the user or the system.

    Args:
        number: the signal number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number  # as in shells: 130 for Ctrl-C


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], None]]:
    """Yields a function to call after every step. It raises `Stopped` if a signal has arrived.

    A second signal raises KeyboardInterrupt immediately. Signals that were ignored when the command started (`nohup`,
    or `&` in a script) stay ignored.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        warn("stopping after this step; press Ctrl-C again to stop immediately")

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
