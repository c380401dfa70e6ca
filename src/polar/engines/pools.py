"""The engines of every run. A run without engines of its own uses those of "default"."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping

from polar.config import DEFAULT_RUN, EngineSettings
from polar.engines.base import server_root
from polar.engines.pool import Pool
from polar.engines.wanted import Engines, PauseMode, WantedReplica
from polar.errors import EngineError
from polar.plugins import load

log = logging.getLogger(__name__)


class Pools:
    """All of them are engines of one kind, with one model and tokenizer: those of the settings."""

    def __init__(self, settings: EngineSettings, default: Pool | None = None) -> None:
        """Without a pool to begin with, there is no engine until `apply` names some."""
        self._settings = settings
        self._pools = {DEFAULT_RUN: default or Pool([], settings.max_inflight)}
        self._generation = -1
        self._frozen_since: dict[str, int] = {}  # by run: the freeze that was heard of last
        self._server: str | None = None  # whose document is in force
        self._waiting = False
        self._leaving: set[Pool] = set()  # of runs that have none of their own any more

    @classmethod
    async def from_settings(cls, settings: EngineSettings) -> "Pools":
        """With the configured engines, or the launched one, as those of "default"."""
        return cls(settings, await Pool.from_settings(settings))

    @property
    def default(self) -> Pool:
        return self._pools[DEFAULT_RUN]

    def of(self, run: str) -> Pool:
        if run not in self._pools and self._waiting:  # it may have engines of its own
            self._pools[run] = Pool([], self._settings.max_inflight)
            self._pools[run].gate.close()
        return self._pools.get(run) or self.default

    def by_run(self) -> Mapping[str, Pool]:
        """Those of runs that have some of their own, and "default"."""
        return self._pools

    async def start(self) -> None:
        await self.default.start()

    async def wait(self) -> None:
        """Instead of `start`, where a document will say how engines are to be (`apply`): until then calls are held, and
        engines are asked only for what they can tell while they stand still."""
        self._waiting = True
        self.default.gate.close()
        await self.default.start(samples=False)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in (*self._pools.values(), *self._leaving)))

    async def apply(self, engines: Engines) -> dict[str, list[str]]:
        """Makes everything be as the document says: replicas, their versions, pauses. What could not be done is
        returned by run, in words; the rest is done all the same, and the same document can be applied again. One that
        is older than what is in force, and of the same server, is not heard; a newer one may be applied while an older
        one still waits for calls to end."""
        if engines.server == self._server and engines.generation < self._generation:
            return {}
        first = self._server is None
        self._generation, self._server, self._waiting = engines.generation, engines.server, False
        self._leaving = {pool for pool in self._leaving if pool.leaving}
        # First all that takes no waiting: no call gets in between.
        for run in self._pools.keys() - engines.pools.keys() - {DEFAULT_RUN}:
            self._drop(self._pools.pop(run))
        for run, state in engines.pools.items():
            pool = self._pools.setdefault(run, Pool([], self._settings.max_inflight))
            if state.paused is not None:
                pool.gate.close()
            if self._frozen_since.get(run, state.since) != state.since:
                pool.missed_thaw()
            self._frozen_since[run] = state.since
            self._populate(pool, state.replicas)
            for replica in pool.replicas if first else []:
                replica.unsure = True
        return await _problems({run: _switch(self._pools[run], state.paused) for run, state in engines.pools.items()})

    def _populate(self, pool: Pool, wanted: list[WantedReplica]) -> None:
        """Versions are set before anything is frozen or thawed: calls that stand frozen will know where the new weights
        began, once they are settled, and those that run won't."""
        versions = {server_root(replica.url): replica.version for replica in wanted}
        for replica in list(pool.replicas):
            if replica.url in versions:
                replica.set_version(versions.pop(replica.url))
            else:
                pool.remove(replica)
        kind = load("engines", self._settings.kind)
        for url, version in versions.items():
            pool.add(kind(url, self._settings), version)

    def _drop(self, pool: Pool) -> None:
        """Its calls go on to their end; those that were held are told that there is no engine any more, and find
        others when they ask again."""
        self._populate(pool, [])
        pool.gate.open()
        self._leaving.add(pool)


async def _switch(pool: Pool, paused: PauseMode | None) -> None:
    if paused is None:
        await pool.resume(alone=False)
    elif paused == "sleep":
        await pool.sleep()
    elif paused == "drain":
        await pool.drain()
    elif paused == "settle":
        await pool.settle()
    else:
        await pool.pause(freeze=paused == "freeze")


async def _problems(steps: Mapping[str, Coroutine[None, None, None]]) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for run, answer in zip(steps, await asyncio.gather(*steps.values(), return_exceptions=True), strict=True):
        if isinstance(answer, EngineError):
            log.error("Engines of the run %s: %s", run, answer)
            problems[run] = [str(answer)]
        elif answer is not None:
            raise answer
    return problems
