"""The engines of every run. A run without engines of its own uses those of "default"."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping

from polar.config import DEFAULT_RUN, EngineSettings
from polar.engines.base import DesiredEngines, DesiredReplica, PauseState, normalize_engine_url
from polar.engines.pool import EnginePool
from polar.errors import EngineError
from polar.plugins import load

log = logging.getLogger(__name__)


class EngineFleet:
    """All of them are engines of one kind, with one model and tokenizer: those of the settings."""

    def __init__(self, settings: EngineSettings, default: EnginePool | None = None) -> None:
        """Without a pool to begin with, there is no engine until `apply` names some."""
        self._settings = settings
        self._pools = {DEFAULT_RUN: default or EnginePool([], settings.max_inflight)}
        self._generation = -1
        self._frozen_since: dict[str, int] = {}  # by run: the freeze that was heard of last
        self._server: str | None = None  # whose document is in force
        self._awaits_desired_state = False
        self._departing_pools: set[EnginePool] = set()  # of runs that have none of their own any more

    @classmethod
    async def from_settings(cls, settings: EngineSettings) -> "EngineFleet":
        """With the configured engines, or the launched one, as those of "default"."""
        return cls(settings, await EnginePool.from_settings(settings))

    @property
    def default(self) -> EnginePool:
        return self._pools[DEFAULT_RUN]

    def get_pool(self, run: str) -> EnginePool:
        if run not in self._pools and self._awaits_desired_state:  # it may have engines of its own
            self._pools[run] = EnginePool([], self._settings.max_inflight)
            self._pools[run].gate.close()
        return self._pools.get(run) or self.default

    def get_pools_by_run(self) -> Mapping[str, EnginePool]:
        """Those of runs that have some of their own, and "default"."""
        return self._pools

    async def start(self) -> None:
        await self.default.start()

    async def start_held(self) -> None:
        """Instead of `start`, where a document will say how engines are to be (`apply`): until then calls are held, and
        engines are asked only for what they can tell while they stand still."""
        self._awaits_desired_state = True
        self.default.gate.close()
        await self.default.start(may_sample=False)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in (*self._pools.values(), *self._departing_pools)))

    async def apply(self, engines: DesiredEngines) -> dict[str, list[str]]:
        """Makes everything be as the document says: replicas, their versions, pauses. What could not be done is
        returned by run, in words; the rest is done all the same, and the same document can be applied again. One that
        is older than what is in force, and of the same server, is not heard; a newer one may be applied while an older
        one still waits for calls to end."""
        if engines.server == self._server and engines.generation < self._generation:
            return {}
        first = self._server is None
        self._generation, self._server, self._awaits_desired_state = engines.generation, engines.server, False
        self._departing_pools = {pool for pool in self._departing_pools if pool.has_departing_replicas}
        # First all that takes no waiting: no call gets in between.
        for run in self._pools.keys() - engines.pools.keys() - {DEFAULT_RUN}:
            self._retire_pool(self._pools.pop(run))
        for run, state in engines.pools.items():
            pool = self._pools.setdefault(run, EnginePool([], self._settings.max_inflight))
            if state.paused is not None:
                pool.gate.close()
            if self._frozen_since.get(run, state.since) != state.since:
                pool.note_missed_thaw()
            self._frozen_since[run] = state.since
            self._reconcile_replicas(pool, state.replicas)
            for replica in pool.replicas if first else []:
                replica.state_unknown = True
        return await _collect_problems(
            {run: _apply_pause_mode(self._pools[run], state.paused) for run, state in engines.pools.items()}
        )

    def _reconcile_replicas(self, pool: EnginePool, desired: list[DesiredReplica]) -> None:
        """Versions are set before anything is frozen or thawed: calls that stand frozen will know where the new weights
        began, once they are settled, and those that run won't."""
        versions = {normalize_engine_url(replica.url): replica.version for replica in desired}
        for replica in list(pool.replicas):
            if replica.url in versions:
                replica.set_version(versions.pop(replica.url))
            else:
                pool.remove(replica)
        kind = load("engines", self._settings.kind)
        for url, version in versions.items():
            pool.add(kind(url, self._settings), version)

    def _retire_pool(self, pool: EnginePool) -> None:
        """Its calls go on to their end; those that were held are told that there is no engine any more, and find
        others when they ask again."""
        self._reconcile_replicas(pool, [])
        pool.gate.open()
        self._departing_pools.add(pool)


async def _apply_pause_mode(pool: EnginePool, paused: PauseState | None) -> None:
    if paused is None:
        await pool.resume(exclusive=False)
    elif paused == "sleep":
        await pool.sleep()
    elif paused == "drain":
        await pool.drain()
    elif paused == "settle":
        await pool.settle()
    else:
        await pool.pause(freeze=paused == "freeze")


async def _collect_problems(steps: Mapping[str, Coroutine[None, None, None]]) -> dict[str, list[str]]:
    problems: dict[str, list[str]] = {}
    for run, answer in zip(steps, await asyncio.gather(*steps.values(), return_exceptions=True), strict=True):
        if isinstance(answer, EngineError):
            log.error("Engines of the run %s: %s", run, answer)
            problems[run] = [str(answer)]
        elif answer is not None:
            raise answer
    return problems
