"""Waiting for a condition, with a limit that no working test comes near, however slow the machine is."""

import asyncio
from collections.abc import Awaitable, Callable

LIMIT_SECONDS = 120.0
_POLL_SECONDS = 0.01


async def wait_until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = LIMIT_SECONDS) -> None:
    """Polls a condition, which may be a coroutine function, until it holds; raises TimeoutError at the limit."""
    async with asyncio.timeout(seconds):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(_POLL_SECONDS)
