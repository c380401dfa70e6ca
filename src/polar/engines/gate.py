"""Where calls wait while generation is paused."""

import asyncio


class Gate:
    """Open, or holding every new call until it opens again."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.frozen = False
        self.held = 0

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self.frozen = False
        self._open.set()

    async def wait_until_open(self) -> None:
        if self._open.is_set():
            return
        self.held += 1
        try:
            while self.paused:  # it may have closed again by the time that a call hears of its opening
                await self._open.wait()
        finally:
            self.held -= 1
