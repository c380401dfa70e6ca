"""Changes to engines and policy: each is in force at every node when the caller is answered."""

import asyncio
import contextlib
from collections import defaultdict

from polar.config import DEFAULT_RUN
from polar.engines.base import DesiredEngines, DesiredPool, RunEngine, normalize_engine_url
from polar.errors import ConfigError, EngineError, PolarError
from polar.records.policy import PauseState
from polar.rollout.events import EventBus
from polar.rollout.lease_manager import LeaseManager
from polar.rollout.queue import Queue
from polar.rollout.runs import RunRegistry
from polar.store.base import Store


class NotAppliedYet(PolarError):
    """Some nodes did not apply a change in time; they still will."""


class EngineController:
    def __init__(
        self, run_registry: RunRegistry, lease_manager: LeaseManager, queue: Queue, store: Store, events: EventBus
    ) -> None:
        self._run_registry = run_registry
        self._lease_manager = lease_manager
        self._queue = queue
        self._store = store
        self._events = events
        self._pause_requests: defaultdict[str, int] = defaultdict(int)  # pauses and resumes so far, by run

    @property
    def engines(self) -> DesiredEngines:
        return self._run_registry.engines

    def get_replica_urls(self, run: str) -> list[str]:
        return self._run_registry.get_replica_urls(run)

    async def add_replica(self, run: str, url: str, version: int | None, seconds: float) -> None:
        url = normalize_engine_url(url)
        for other, pool in self._run_registry.engines.pools.items():
            if other != run and any(replica.url == url for replica in pool.replicas):
                raise ConfigError(f"{url} is an engine of the run {other}: pausing one run would pause the other.")
        if version is not None:
            await self._store.set_policy_versions({url: version})
            self._run_registry.versions[url] = version
        was_present = url in self._run_registry.engines.pools.get(run, DesiredPool()).replica_urls
        self._run_registry.add_replica(run, url)
        try:
            await self._apply_everywhere(run, "engines.changed", seconds)
        except EngineError:  # it serves another model than the run's, for example
            if not was_present and self._run_registry.remove_replica(run, url):
                with contextlib.suppress(EngineError, NotAppliedYet):
                    await self._apply_everywhere(run, "engines.changed", seconds)
            raise

    def describe_engine(self, run: str) -> RunEngine:
        return self._run_registry.get_pool(run).engine

    async def set_engine(self, run: str, engine: RunEngine, seconds: float) -> None:
        """Sets the kind and model of the run's engines; those that it has must match."""
        if run == DEFAULT_RUN:
            raise ConfigError(
                f"The engine of the run {DEFAULT_RUN} comes from the [engine] settings: set an engine for another run."
            )
        self._run_registry.get_settings(run).engine = engine
        await self._apply_everywhere(run, "engines.changed", seconds)

    async def remove_replica(self, run: str, url: str, seconds: float) -> bool:
        """False where the run has no such replica of its own."""
        if not self._run_registry.remove_replica(run, normalize_engine_url(url)):
            return False
        await self._apply_everywhere(run, "engines.changed", seconds)
        return True

    async def set_version(self, run: str, version: int, url: str | None, seconds: float) -> bool:
        """Sets the policy version of the run's replicas, or of one. False where there is no such replica."""
        urls = self._run_registry.get_replica_urls(run)
        if url is not None:
            urls = [known for known in urls if known == normalize_engine_url(url)]
        if not urls:
            return False
        versions = dict.fromkeys(urls, version)
        await self._store.set_policy_versions(versions)
        self._run_registry.versions.update(versions)
        self._lease_manager.cancel_stale(run)
        await self._apply_everywhere(run, "policy.changed", seconds)
        return True

    async def pause(self, run: str, mode: PauseState, seconds: float) -> None:
        if mode == "sleep":  # a sleeping engine aborts its calls: drain those of every node first
            await self._apply_pause_modes(run, ["drain", "sleep"], seconds)
        else:
            await self._apply_pause_modes(run, [mode], seconds)

    async def resume(self, run: str, seconds: float) -> None:
        paused = self._run_registry.get_settings(run).paused
        if paused in ("freeze", "settle"):  # every node learns of new weights before the first engine continues
            await self._apply_pause_modes(run, ["settle", None], seconds)
        elif paused in ("sleep", "drain"):  # no node calls an engine before it is awake
            await self._apply_pause_modes(run, ["hold", None], seconds)
        else:
            await self._apply_pause_modes(run, [None], seconds)

    async def _apply_pause_modes(self, run: str, modes: list[PauseState | None], seconds: float) -> None:
        """Applies each mode everywhere before the next one. A later pause or resume takes precedence."""
        request = self._pause_requests[run] = self._pause_requests[run] + 1
        deadline = asyncio.get_running_loop().time() + seconds
        for mode in modes:
            if self._pause_requests[run] != request:
                raise NotAppliedYet("Another request has paused or resumed generation meanwhile.")
            self._run_registry.pause(run, mode)
            remaining = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                await self._apply_everywhere(run, "policy.changed", remaining)
            except NotAppliedYet as error:
                if mode == modes[-1]:
                    raise
                raise NotAppliedYet(f"{error} Generation stays paused until then: repeat the request.") from error

    async def _apply_everywhere(self, run: str, kind: str, seconds: float) -> None:
        """Stores and publishes the run's settings, and waits until every live node has applied them. Raises
        NotAppliedYet, and EngineError where an engine refuses; nodes keep trying in both cases."""
        generation = self._run_registry.advance_generation()
        await self._queue.save_run(run, self._run_registry.get_settings(run).encode())
        self._events.publish(
            kind,
            run=run,
            version=self._run_registry.get_newest_version(run),
            paused=self._run_registry.get_pool(run).paused,
        )
        self._lease_manager.wake_all()
        late = await self._lease_manager.wait_until_applied(generation, seconds)
        if late:
            names = ", ".join(member.name for member in late)
            raise NotAppliedYet(f"Not in force yet at {names}: it will be as soon as they answer.")
        problems = [
            problem for member in self._lease_manager.members.values() for problem in member.problems.get(run, [])
        ]
        if problems:
            raise EngineError(problems[0])
