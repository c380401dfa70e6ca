"""Engines and the policy: changed here once, and in force at every node when the caller is answered."""

import asyncio
from collections import defaultdict

from polar.engines.base import server_root
from polar.engines.wanted import Engines, PauseMode
from polar.errors import ConfigError, EngineError, PolarError
from polar.rollout.events import Events
from polar.rollout.leasing import Leasing
from polar.rollout.policy import Policy
from polar.rollout.queue import Queue
from polar.store.base import Store


class NotInForce(PolarError):
    """Some nodes have not done in time what was asked of all; they still will."""


class Steering:
    def __init__(self, policy: Policy, leasing: Leasing, queue: Queue, store: Store, events: Events) -> None:
        self._policy = policy
        self._leasing = leasing
        self._queue = queue
        self._store = store
        self._events = events
        self._turns: defaultdict[str, int] = defaultdict(int)  # of those who pause and resume, by run

    @property
    def engines(self) -> Engines:
        return self._policy.engines

    def urls(self, run: str) -> list[str]:
        return self._policy.urls(run)

    async def add_replica(self, run: str, url: str, version: int | None, seconds: float) -> None:
        url = server_root(url)
        for other, pool in self._policy.engines.pools.items():
            if other != run and any(replica.url == url for replica in pool.replicas):
                raise ConfigError(f"{url} is an engine of the run {other}: what pauses one would pause the other.")
        if version is not None:
            await self._store.set_policy({url: version})
            self._policy.versions[url] = version
        self._policy.add(run, url)
        await self._in_force(run, "engines.changed", seconds)

    async def remove_replica(self, run: str, url: str, seconds: float) -> bool:
        """False where it is none of the run's own."""
        if not self._policy.remove(run, server_root(url)):
            return False
        await self._in_force(run, "engines.changed", seconds)
        return True

    async def set_version(self, run: str, version: int, url: str | None, seconds: float) -> bool:
        """The weights have changed. False where there is no such replica."""
        chosen = [known for known in self._policy.urls(run) if url is None or known == server_root(url)]
        if not chosen:
            return False
        versions = dict.fromkeys(chosen, version)
        await self._store.set_policy(versions)
        self._policy.versions.update(versions)
        self._leasing.cancel_stale(run)
        await self._in_force(run, "policy.changed", seconds)
        return True

    async def pause(self, run: str, mode: PauseMode, seconds: float) -> None:
        if mode == "sleep":  # an engine breaks off the calls that any node still has there
            await self._in_steps(run, ["drain", "sleep"], seconds)
        else:
            await self._in_steps(run, [mode], seconds)

    async def resume(self, run: str, seconds: float) -> None:
        paused = self._policy.settings(run).paused
        if paused in ("freeze", "settle"):  # every node's calls hear of new weights before the first engine goes on
            await self._in_steps(run, ["settle", None], seconds)
        elif paused in ("sleep", "drain"):  # no node calls an engine before it is awake
            await self._in_steps(run, ["hold", None], seconds)
        else:
            await self._in_steps(run, [None], seconds)

    async def _in_steps(self, run: str, modes: list[PauseMode | None], seconds: float) -> None:
        """Each in force before the next one begins. Whoever pauses or resumes meanwhile has the last word."""
        turn = self._turns[run] = self._turns[run] + 1
        deadline = asyncio.get_running_loop().time() + seconds
        for mode in modes:
            if self._turns[run] != turn:
                raise NotInForce("Somebody else has paused or resumed generation meanwhile.")
            self._policy.pause(run, mode)
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                await self._in_force(run, "policy.changed", left)
            except NotInForce as error:
                if mode == modes[-1]:
                    raise
                raise NotInForce(f"{error} Until then generation stays paused: say it again.") from error

    async def _in_force(self, run: str, kind: str, seconds: float) -> None:
        """Kept, told, and applied at every node that is alive. Raises NotInForce, and EngineError where an engine does
        not do what it is told; it is tried again all the same."""
        generation = self._policy.changed()
        await self._queue.keep_run(run, self._policy.settings(run).encode())
        self._events.publish(kind, run=run, version=self._policy.newest(run), paused=self._policy.pool(run).paused)
        self._leasing.tell_all()
        late = await self._leasing.applied(generation, seconds)
        if late:
            names = ", ".join(member.name for member in late)
            raise NotInForce(f"Not in force yet at {names}: it will be, as soon as they answer.")
        problems = [problem for one in self._leasing.members.values() for problem in one.problems.get(run, [])]
        if problems:
            raise EngineError(problems[0])
