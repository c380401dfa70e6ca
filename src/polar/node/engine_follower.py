"""What a rollout server wants of the engines, put in force here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from polar.engines.base import DesiredEngines

log = logging.getLogger(__name__)

EngineProblems = dict[str, list[str]]
"""By run: what of the wanted engines could not be had."""


class EngineFollower:
    """`applied` is the generation that is in force, but for `problems`, which are tried again."""

    def __init__(
        self, apply: Callable[[DesiredEngines], Awaitable[EngineProblems]], on_change: Callable[[], None]
    ) -> None:
        """`changed` is told when there is something new to say of it."""
        self._apply = apply
        self._on_change = on_change
        self._wanted_changed = asyncio.Event()
        self.wanted = DesiredEngines(-1)
        self.applied_generation = -1
        self.problems: EngineProblems = {}

    def set_wanted(self, engines: DesiredEngines) -> None:
        self.wanted = engines
        self._wanted_changed.set()

    async def follow(self, retry_seconds: float) -> None:
        """For ever. What fails is tried again after so many seconds."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wanted_changed.wait()
                self._wanted_changed.clear()
                self.problems = {}
                # In a task of its own: an older one may still wait for calls to end.
                tasks.create_task(self._apply_until_done(self.wanted, retry_seconds))

    async def _apply_until_done(self, wanted: DesiredEngines, retry_seconds: float) -> None:
        while True:
            try:
                problems = await self._apply(wanted)
            except Exception as error:
                log.exception("What is wanted of the engines could not be put in force")
                problems = {run: [repr(error)] for run in wanted.pools}
            if wanted is not self.wanted:
                return
            self.applied_generation, self.problems = wanted.generation, problems
            self._on_change()
            if not problems:
                return
            await asyncio.sleep(retry_seconds)
