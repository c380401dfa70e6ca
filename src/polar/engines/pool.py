"""The replicas of one run's engine: routes calls to them, and pauses, updates and puts to sleep all of them together.

Versions are kept per replica: a token's version is known if the replica had one version while the call ran, or if the
call stood frozen while the version changed; otherwise it is recorded as unknown.

A session stays where its prefix is cached. A session without a replica gets one by rendezvous hashing: replicas are
ranked by a hash that depends on the session's group alone. So sessions of one task, which begin with the same prompt,
meet at one replica, at every gateway and also after a restart; and a replica that is added or removed changes nothing
for groups whose first choice is another.

Load comes first: a replica with clearly more calls than the mean takes no newcomers, which go to the next in their
order. A session leaves its replica only at a much higher load, and takes its call's load along: so only the excess
leaves, it spreads over different replicas, and it stays there, since a replica that took it is far below the load at
which sessions leave.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from polar.config import DEFAULT_RUN, EngineSettings
from polar.engines.base import Chunk, Engine, LaunchedEngine, TokenPrompt, normalize_engine_url
from polar.engines.replica import Replica, RunningCall
from polar.engines.run_model import RunModel
from polar.errors import ConfigError, EngineError
from polar.plugins import load
from polar.types import Request

log = logging.getLogger(__name__)

T = TypeVar("T")
_MODEL_CHECK_SECONDS = 5.0  # that `check_models` waits for a replica
_POLL_SECONDS = 0.05  # between two looks at running calls
_NEWCOMER_LOAD_FACTOR = 1.25  # times the mean of calls: up to this load a replica takes new sessions
_RESIDENT_LOAD_FACTOR = 1.5  # times the mean of calls: up to this load it keeps its sessions
_SLACK_CALLS = 16  # calls above the mean for which no session gives up its cache


class Gate:
    """Holds every new call while it is closed."""

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
            while self.paused:  # it may have closed again before this call was woken
                await self._open.wait()
        finally:
            self.held -= 1


class EnginePool:
    def __init__(self, engines: Iterable[Engine], model: RunModel, launched: LaunchedEngine | None = None) -> None:
        self.model = model
        self.replicas = [Replica(engine, model) for engine in engines]
        self.gate = Gate()
        self._switch_lock = asyncio.Lock()  # pausing and resuming take turns
        self._should_sleep = False  # `sleep` was the last switch
        self._switch_count = 0  # grows with every pause, sleep and resume
        self._max_inflight = model.settings.max_inflight
        self._launched = launched
        self._probe_tasks: dict[Replica, asyncio.Task[None]] = {}
        self._departing: dict[Replica, asyncio.Task[None]] = {}

    @classmethod
    async def from_settings(cls, settings: EngineSettings) -> "EnginePool":
        """Creates a pool of the configured replicas. If none is named, a kind that can launches its own server. With
        `urls = []` the pool is empty, and a trainer adds its own engines."""
        kind = load("engines", settings.kind)
        model = RunModel(DEFAULT_RUN, settings)
        can_launch = hasattr(kind, "launch")
        if settings.urls or ("urls" in settings.model_fields_set and not can_launch):
            return cls([kind(url, settings) for url in settings.urls], model)
        if not can_launch:
            raise ConfigError(
                'No engine is configured: set [engine] urls, for example ["http://127.0.0.1:8000"], or [] where a '
                "trainer adds its own."
            )
        launched: LaunchedEngine = await kind.launch(settings)
        return cls([kind(launched.url, settings)], model, launched)

    @property
    def launched_versions(self) -> dict[str, int]:
        """The engine that was launched with this process, if any: its URL, and the version that it started with."""
        return {} if self._launched is None else {normalize_engine_url(self._launched.url): self._launched.version}

    async def start(self, *, may_sample: bool = True) -> None:
        """Probes each replica; without `may_sample`, only as far as an engine that stands still can answer."""
        await asyncio.gather(*(replica.try_probe(may_sample=may_sample) for replica in self.replicas))

    async def close(self) -> None:
        tasks = [*self._probe_tasks.values(), *self._departing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in (*self.replicas, *self._departing):
            await replica.close()
        if self._launched is not None:
            await self._launched.stop()

    # Replicas that come and go

    def add(self, engine: Engine, version: int = 0) -> Replica:
        """Adds a replica, which gets calls from now on."""
        replica = Replica(engine, self.model, version)
        self.replicas.append(replica)
        replica.check_for_restart()
        if not self.gate.paused:  # else on resume: an engine that stands still can't be probed
            self._start_probe(replica)
        return replica

    async def check_models(self) -> list[str]:
        """Returns why replicas are refused: they have another model than the run. A replica that does not answer in
        time, or stands still, is checked before its first call."""

        async def check(replica: Replica) -> None:
            try:
                async with asyncio.timeout(_MODEL_CHECK_SECONDS):
                    await replica.check_model()
            except TimeoutError:
                replica.mark_unreachable()
            except EngineError as error:  # the probe reports it, too
                log.debug("%s", error)

        if not self.gate.paused:
            await asyncio.gather(*(check(replica) for replica in self.replicas if not replica.down))
        return [replica.refusal for replica in self.replicas if replica.refusal is not None]

    def _start_probe(self, replica: Replica) -> None:
        if replica not in self._probe_tasks:
            probe = self._probe_tasks[replica] = asyncio.get_running_loop().create_task(replica.try_probe())
            probe.add_done_callback(lambda _: self._probe_tasks.pop(replica, None))

    def remove(self, replica: Replica) -> None:
        """Removes a replica. Its engine is closed when the last call there has ended."""
        self.replicas.remove(replica)
        self._departing[replica] = asyncio.get_running_loop().create_task(self._close_when_idle(replica))

    async def _close_when_idle(self, replica: Replica) -> None:
        try:
            if replica.frozen or replica.may_be_frozen:
                await replica.thaw()
        except EngineError as error:
            log.warning("Calls at %s, which was removed, may stand still until they time out: %s", replica.url, error)
        if (probe := self._probe_tasks.get(replica)) is not None:
            probe.cancel()
            await asyncio.wait({probe})
        await replica.wait_until_idle()
        await replica.close()
        del self._departing[replica]

    @property
    def has_departing_replicas(self) -> bool:
        """Whether calls still run at replicas that were removed."""
        return bool(self._departing)

    # Which replica

    def pick(self, group: str, preferred: Replica | None, tried: set[Replica]) -> Replica:
        """Chooses a replica that was not tried yet. Raises EngineError if there is none."""
        untried = self._list_routable(tried)
        if not untried:
            raise EngineError("There is no engine to call: add one, or wake those that sleep.", kind="overloaded")
        reachable = [replica for replica in untried if not replica.down]
        return choose_replica(group, preferred, reachable or untried, self._max_inflight)

    def _list_routable(self, tried: set[Replica]) -> list[Replica]:
        return [replica for replica in self.replicas if replica not in tried and not replica.asleep]

    async def wait_until_routable(self) -> None:
        """Waits until there is a replica to call. Raises EngineError if there is none although the gate is open."""
        if not self._list_routable(set()):
            await self.gate.wait_until_open()
            self.pick("", None, set())

    # Sampling

    async def generate(
        self,
        request: Request,
        *,
        stream: bool,
        prompt: TokenPrompt | None = None,
        group: str,
        preferred: Replica | None,
        call: RunningCall,
        on_chosen: Callable[[Replica], None],
    ) -> AsyncGenerator[Chunk, None]:
        """Samples on a replica, and on another one if that can't be reached or refuses before its first chunk. While
        generation is paused, calls are held, also those whose engine has failed.

        `on_chosen` is called with the replica each time before the call starts there. Calls of one `group` have
        prompts that begin alike.
        """
        tried: set[Replica] = set()
        while True:
            if self.gate.paused:
                call.on_frozen()
                await self.gate.wait_until_open()
            replica = self.pick(group, preferred, tried)
            on_chosen(replica)
            replica.enter(call)
            chunks = replica.engine.generate(request, stream=stream, prompt=prompt)
            has_begun = False
            try:
                await replica.ensure_probed()
                async for chunk in chunks:
                    if not has_begun:
                        has_begun = True
                        replica.mark_reachable()
                        replica.check_for_restart()
                    yield chunk
                return
            except EngineError as error:
                if has_begun or not error.retry_elsewhere:
                    raise
                if error.kind == "overloaded":  # the request may be the cause of other failures
                    replica.mark_unreachable()
                if not self._may_retry(tried, replica):
                    raise
            finally:
                try:  # the check must have ended before the call is recorded
                    await replica.wait_for_restart_check()
                finally:  # also if the call is cancelled meanwhile
                    replica.leave(call)
                    # An abandoned stream must end at the engine now, not when it is garbage-collected.
                    await chunks.aclose()

    def _may_retry(self, tried: set[Replica], replica: Replica) -> bool:
        """Whether a call that failed at a replica may be tried again."""
        if self.gate.paused:
            tried.clear()  # every replica may have recovered when the gate opens
            return True
        tried.add(replica)
        return bool(self._list_routable(tried))

    async def count_tokens(self, request: Request, group: str, preferred: Replica | None) -> int:
        tried: set[Replica] = set()
        while True:
            await self.wait_until_routable()
            replica = self.pick(group, preferred, tried)
            try:
                await replica.ensure_probed()
                return await replica.engine.count_tokens(request)
            except EngineError as error:
                if not error.retry_elsewhere or not self._may_retry(tried, replica):
                    raise
            await self.gate.wait_until_open()

    # Policy

    async def pause(self, *, freeze: bool = True) -> bool:
        """Holds new calls and freezes the running ones if the engine can; without `freeze` they run on. Returns whether
        all calls stand still. Sleeping engines are woken, so that weights can be loaded before calls go on. Raises the
        first failure after all replicas were switched."""
        async with self._switch_lock:
            self._switch_count += 1
            self._should_sleep = False
            self.gate.close()
            if freeze:
                await self._refresh_states()
            answers: list[object] = [*await self._wake()]
            if freeze:
                frozen = await _gather_outcomes(replica.freeze() for replica in self.replicas)
                self.gate.frozen = all(answer is True for answer in frozen)
                answers += frozen
            else:
                answers += await self._thaw()
        _raise_first_failure(answers)
        return self.gate.frozen or not any(replica.running for replica in self.replicas)

    async def drain(self) -> None:
        """Holds new calls, and waits until the running ones have ended or another switch was made."""
        await self.pause(freeze=False)
        turn = self._switch_count
        while self._switch_count == turn:
            if not any(replica.running for replica in self.replicas):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def settle(self) -> None:
        """Announces new weights to frozen calls, and changes nothing else."""
        async with self._switch_lock:
            await self._refresh_states()
            self._settle()

    def note_missed_thaw(self) -> None:
        """Notes that frozen calls may have gone on meanwhile, with unknown weights, and were frozen again."""
        for replica in self.replicas:
            replica.frozen = False

    def _settle(self) -> None:
        for replica in self.replicas:
            replica.settle()

    async def _refresh_states(self) -> None:
        await asyncio.gather(*(replica.refresh_state() for replica in self.replicas if replica.state_unknown))

    async def _wake(self) -> list[BaseException | None]:
        return await _gather_outcomes(replica.wake() for replica in self.replicas if replica.asleep)

    async def _thaw(self) -> list[BaseException | None]:
        self.gate.frozen = False
        return await _gather_outcomes(
            replica.thaw() for replica in self.replicas if replica.frozen or replica.may_be_frozen
        )

    async def sleep(self) -> bool:
        """Holds new calls, waits for the running ones (frozen ones are thawed), and makes the engines free their
        memory. Returns whether all of them sleep: False if one can't, or if another switch was made meanwhile."""
        async with self._switch_lock:
            self._switch_count += 1
            self._should_sleep = True
            self.gate.close()
            thawed = await self._thaw()
        while self._should_sleep:
            if not await self._is_busy():
                break
            await asyncio.sleep(_POLL_SECONDS)
        async with self._switch_lock:
            if not self._should_sleep:
                return False
            asleep = await _gather_outcomes(replica.sleep() for replica in self.replicas)
        _raise_first_failure([*thawed, *asleep])
        return all(asleep)

    async def _is_busy(self) -> bool:
        """Whether calls run at the engines, including other gateways' calls: sleep would break them off."""
        if any(replica.running for replica in self.replicas):
            return True
        awake = [replica.engine for replica in self.replicas if not replica.asleep]
        return any(await asyncio.gather(*(engine.count_running_calls() for engine in awake)))

    async def resume(self, *, exclusive: bool = True) -> None:
        """Lets calls go on, even if a replica can't be thawed or woken: that failure is raised, and the next resume
        tries again. If all replicas stay asleep, calls stay held. Without `exclusive`, other gateways share the
        engines, and the caller must have called `settle` before."""
        async with self._switch_lock:
            self._switch_count += 1
            self._should_sleep = False
            await self._refresh_states()
            if exclusive:
                self._settle()
            answers = [*await self._wake(), *await self._thaw()]
            if not self.replicas or not all(replica.asleep for replica in self.replicas):
                self.gate.open()
                for replica in self.replicas:
                    if not (replica.is_probed or replica.asleep):
                        self._start_probe(replica)
        _raise_first_failure(answers)

    def set_version(self, version: int, url: str | None = None) -> list[Replica]:
        """Notes that the weights of one replica (default: all) are now those of `version`. Returns the replicas."""
        changed = [replica for replica in self.replicas if url is None or replica.url == normalize_engine_url(url)]
        for replica in changed:
            replica.set_version(version)
        return changed


async def _gather_outcomes(steps: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """Awaits all steps, and returns the result or the exception of each."""
    return await asyncio.gather(*steps, return_exceptions=True)


def _raise_first_failure(answers: Iterable[object]) -> None:
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


# Routing


class RoutableReplica(Protocol):
    """What routing needs of a replica."""

    @property
    def url(self) -> str: ...

    @property
    def running(self) -> Collection[object]: ...


ReplicaT = TypeVar("ReplicaT", bound=RoutableReplica)


def choose_replica(group: str, home: ReplicaT | None, replicas: Sequence[ReplicaT], max_calls: int) -> ReplicaT:
    """Chooses one of `replicas`, which must not be empty. `home` is where the session's last call went; `max_calls` is
    how many calls a replica should have at most. If none has room, the least busy one is chosen."""
    mean = (1 + sum(len(replica.running) for replica in replicas)) / len(replicas)
    if (
        home is not None
        and home in replicas
        and len(home.running) < min(max_calls, max(_RESIDENT_LOAD_FACTOR * mean, mean + _SLACK_CALLS))
    ):
        return home
    ranked = rank_replicas(group, replicas)
    room = min(max_calls, max(1, int(_NEWCOMER_LOAD_FACTOR * mean)))
    return next(
        (replica for replica in ranked if len(replica.running) < room),
        min(ranked, key=lambda replica: len(replica.running)),
    )


def rank_replicas(group: str, replicas: Sequence[ReplicaT]) -> list[ReplicaT]:
    """Ranks the replicas in a group's order of preference."""
    return sorted(replicas, key=lambda replica: _compute_rendezvous_hash(group, replica.url), reverse=True)


def _compute_rendezvous_hash(group: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group}\0{url}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
