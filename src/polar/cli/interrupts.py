"""Handles Ctrl-C and SIGTERM in commands that have to tear something down."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Use as a context manager. The first signal cancels the task that entered it, while `cancels_task` is true; the
    second one exits at once."""

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        """`on_first` and `on_second` are called at each signal."""
        self._on_first = on_first
        self._on_second = on_second
        self._task: asyncio.Task[Any] | None = None
        self.received_signal: int | None = None
        self.cancels_task = True

    def __enter__(self) -> "Interrupts":
        self._task = asyncio.current_task()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._handle_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _handle_signal(self, number: int) -> None:
        if self.received_signal is not None:
            self._on_second()
            os._exit(128 + number)
        self.received_signal = number
        self._on_first()
        if self._task is not None and self.cancels_task:
            self._task.cancel()

    @property
    def exit_status(self) -> int | None:
        """128 plus the signal's number, as in shells; None without a signal."""
        return None if self.received_signal is None else 128 + self.received_signal
