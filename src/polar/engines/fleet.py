"""The engines of every run. A run without engines of its own uses those of "default"."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping

import msgspec

from polar.config import DEFAULT_RUN, EngineSettings
from polar.engines.base import DesiredEngines, DesiredReplica, RunEngine, normalize_engine_url
from polar.engines.pool import EnginePool
from polar.engines.run_model import RunModel
from polar.errors import EngineError
from polar.plugins import load
from polar.records.policy import PauseState

log = logging.getLogger(__name__)


class EngineFleet:
    """The engine pools of all runs. Each run has one model, by default that of the settings."""

    def __init__(self, settings: EngineSettings, default: EnginePool | None = None) -> None:
        """Without a default pool, there is no engine until `apply` names some."""
        self._settings = settings
        self._pools = {DEFAULT_RUN: default or EnginePool([], RunModel(DEFAULT_RUN, settings))}
        self._generation = -1
        self._frozen_since: dict[str, int] = {}  # by run: DesiredPool.since of the document in force
        self._server: str | None = None  # that made the document in force
        self._awaits_desired_state = False
        self._departing_pools: set[EnginePool] = set()  # of runs that no longer have their own

    @classmethod
    async def from_settings(cls, settings: EngineSettings) -> "EngineFleet":
        """Creates a fleet whose default pool has the configured engines, or a launched one."""
        return cls(settings, await EnginePool.from_settings(settings))

    @property
    def default(self) -> EnginePool:
        return self._pools[DEFAULT_RUN]

    def get_pool(self, run: str) -> EnginePool:
        if run not in self._pools and self._awaits_desired_state:  # it may have engines of its own
            self._pools[run] = EnginePool([], RunModel(run, self._settings, default=self.default.model))
            self._pools[run].gate.close()
        return self._pools.get(run) or self.default

    def get_pools_by_run(self) -> Mapping[str, EnginePool]:
        """Returns the pools of runs that have their own, and "default"."""
        return self._pools

    async def start(self) -> None:
        await self.default.start()

    async def start_held(self) -> None:
        """Starts with all calls held until `apply` brings the desired state. Until then, engines are probed only as far
        as they can be while they stand still."""
        self._awaits_desired_state = True
        self.default.gate.close()
        await self.default.start(may_sample=False)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in (*self._pools.values(), *self._departing_pools)))

    async def apply(self, engines: DesiredEngines) -> dict[str, list[str]]:
        """Brings about the desired state: replicas, their versions, pauses. Returns problems by run; everything else is
        done all the same, and the document can be applied again. A document older than the one in force, of the same
        server, is ignored; a newer one may be applied while an older one still waits for calls to end."""
        if engines.server == self._server and engines.generation < self._generation:
            return {}
        is_first = self._server is None
        self._generation, self._server, self._awaits_desired_state = engines.generation, engines.server, False
        self._departing_pools = {pool for pool in self._departing_pools if pool.has_departing_replicas}
        # The steps without waiting come first, so that no call gets in between.
        for run in self._pools.keys() - engines.pools.keys() - {DEFAULT_RUN}:
            self._retire_pool(self._pools.pop(run))
        for run, state in engines.pools.items():
            pool = self._prepare_pool(run, state.engine)
            if state.paused is not None:
                pool.gate.close()
            if self._frozen_since.get(run, state.since) != state.since:
                pool.note_missed_thaw()
            self._frozen_since[run] = state.since
            self._reconcile_replicas(pool, state.replicas)
            for replica in pool.replicas if is_first else []:
                replica.state_unknown = True
        pools = {run: self._pools[run] for run in engines.pools}
        problems = await _collect_problems(
            {run: _apply_pause_mode(pools[run], state.paused) for run, state in engines.pools.items()}
        )
        answers = await asyncio.gather(*(pool.check_models() for pool in pools.values()))
        for run, refusals in zip(pools, answers, strict=True):
            if refusals:
                problems.setdefault(run, []).extend(refusals)
        return problems

    def _prepare_pool(self, run: str, engine: RunEngine) -> EnginePool:
        """Returns the run's pool; a new one if its engine's settings have changed."""
        settings = self._derive_settings(engine)
        pool = self._pools.get(run)
        if pool is not None and pool.model.settings != settings:
            self._retire_pool(self._pools.pop(run))
            pool = None
        if pool is None:
            default = self.default.model if settings == self._settings else None
            pool = self._pools[run] = EnginePool([], RunModel(run, settings, name=engine.model, default=default))
        return pool

    def _derive_settings(self, engine: RunEngine) -> EngineSettings:
        """Derives the settings of a run's engine. With another kind or model, the default's model settings don't
        apply."""
        changes = {name: value for name, value in msgspec.structs.asdict(engine).items() if value is not None}
        if engine.kind is not None or engine.model is not None:
            changes = {"model": None, "tokenizer": None, "template_kwargs": {}} | changes
        if engine.kind not in (None, self._settings.kind):
            changes["options"] = {}
        return self._settings.model_copy(update=changes)

    def _reconcile_replicas(self, pool: EnginePool, desired: list[DesiredReplica]) -> None:
        """Adds and removes replicas, and sets versions. Versions are set before anything is frozen or thawed: when they
        are settled, frozen calls know where the new weights began; running calls don't."""
        versions = {normalize_engine_url(replica.url): replica.version for replica in desired}
        for replica in list(pool.replicas):
            if replica.url in versions:
                replica.set_version(versions.pop(replica.url))
            else:
                pool.remove(replica)
        settings = pool.model.settings
        kind = load("engines", settings.kind)
        for url, version in versions.items():
            pool.add(kind(url, settings), version)

    def _retire_pool(self, pool: EnginePool) -> None:
        """Removes a pool's replicas once their calls have ended. Held calls fail with an error that says that there is
        no engine; when they are retried, they get the run's new pool."""
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
