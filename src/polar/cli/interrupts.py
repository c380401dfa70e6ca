"""Ctrl-C and SIGTERM for a command that has something to tear down."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Use as a context manager. The first signal cancels the task that entered it, for as long as `cancels` is true;
    the second one leaves at once."""

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """What is done besides, at each."""
        self._first = first
        self._second = second
        self._task: asyncio.Task[Any] | None = None
        self.received: int | None = None
        self.cancels = True

    def __enter__(self) -> "Interrupts":
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._got, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _got(self, number: int) -> None:
        if self.received is not None:
            self._second()
            os._exit(128 + number)
        self.received = number
        self._first()
        if self._task is not None and self.cancels:
            self._task.cancel()

    @property
    def status(self) -> int | None:
        """The exit status that says so, as shells have it."""
        return None if self.received is None else 128 + self.received
