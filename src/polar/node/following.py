"""What a rollout server wants of the engines, put in force here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from polar.engines.wanted import Engines

log = logging.getLogger(__name__)

Problems = dict[str, list[str]]
"""By run: what of the wanted engines could not be had."""


class Following:
    """`applied` is the generation that is in force, but for `problems`, which are tried again."""

    def __init__(self, apply: Callable[[Engines], Awaitable[Problems]], changed: Callable[[], None]) -> None:
        """`changed` is told when there is something new to say of it."""
        self._apply = apply
        self._changed = changed
        self._news = asyncio.Event()
        self.wanted = Engines(-1)
        self.applied = -1
        self.problems: Problems = {}

    def want(self, engines: Engines) -> None:
        self.wanted = engines
        self._news.set()

    async def follow(self, again: float) -> None:
        """For ever. What fails is tried again after so many seconds."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._news.wait()
                self._news.clear()
                self.problems = {}
                # In a task of its own: an older one may still wait for calls to end.
                tasks.create_task(self._put_in_force(self.wanted, again))

    async def _put_in_force(self, wanted: Engines, again: float) -> None:
        while True:
            try:
                problems = await self._apply(wanted)
            except Exception as error:
                log.exception("What is wanted of the engines could not be put in force")
                problems = {run: [repr(error)] for run in wanted.pools}
            if wanted is not self.wanted:
                return
            self.applied, self.problems = wanted.generation, problems
            self._changed()
            if not problems:
                return
            await asyncio.sleep(again)
