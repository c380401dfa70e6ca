"""The replicas of one run's engine, as one: which one a call goes to, and pausing, weights and sleep of all of them.

Versions are kept per replica: a token's version is known if the replica held one version while the call ran, or if the
call stood frozen while the version changed; otherwise it is unknown, and we say so.

A session stays where its prefix is cached. One without a replica gets it by rendezvous hashing: replicas are ordered by
a hash that depends on the session's group alone. So sessions of one task, which begin with the same prompt, meet at one
replica, at every gateway and also after a restart; and a replica that comes or goes changes nothing for groups whose
first choice is another.

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
_MODEL_CHECK_SECONDS = 5.0  # that whoever adds an engine waits for what it says of its model
_POLL_SECONDS = 0.05  # seconds between two looks at what still runs
_NEWCOMER_LOAD_FACTOR = 1.25  # times the mean of calls: up to here a replica takes newcomers
_RESIDENT_LOAD_FACTOR = 1.5  # times the mean: up to here it keeps those that it has
_SLACK_CALLS = 16  # calls above the mean that no engine minds, and for which no session gives up its cache


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


class EnginePool:
    def __init__(self, engines: Iterable[Engine], model: RunModel, launched: LaunchedEngine | None = None) -> None:
        self.model = model
        self.replicas = [Replica(engine, model) for engine in engines]
        self.gate = Gate()
        self._switch_lock = asyncio.Lock()  # pausing and resuming take turns
        self._should_sleep = False  # it was to sleep, and nobody has said otherwise since
        self._switch_count = 0  # grows whenever somebody pauses or resumes
        self._max_inflight = model.settings.max_inflight
        self._launched = launched
        self._probe_tasks: dict[Replica, asyncio.Task[None]] = {}
        self._departing: dict[Replica, asyncio.Task[None]] = {}

    @classmethod
    async def from_settings(cls, settings: EngineSettings) -> "EnginePool":
        """The configured replicas; an engine that comes with a server of its own is launched where none is named. There
        may be none yet of the others (`urls = []`): a trainer adds its own."""
        kind = load("engines", settings.kind)
        model = RunModel(DEFAULT_RUN, settings)
        launches = hasattr(kind, "launch")
        if settings.urls or ("urls" in settings.model_fields_set and not launches):
            return cls([kind(url, settings) for url in settings.urls], model)
        if not launches:
            raise ConfigError(
                'No engine is configured: set [engine] urls, for example ["http://127.0.0.1:8000"], or [] where a '
                "trainer adds its own."
            )
        launched: LaunchedEngine = await kind.launch(settings)
        return cls([kind(launched.url, settings)], model, launched)

    @property
    def launched_versions(self) -> dict[str, int]:
        """The engine that came with this process, where one did: its address, and the version that it began with."""
        return {} if self._launched is None else {normalize_engine_url(self._launched.url): self._launched.version}

    async def start(self, *, may_sample: bool = True) -> None:
        """Finds out what each replica can do; without `may_sample`, only what it can tell
        while it stands still."""
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
        """Calls go there from now on."""
        replica = Replica(engine, self.model, version)
        self.replicas.append(replica)
        replica.check_for_restart()
        if not self.gate.paused:  # else when calls may go on: an engine that stands still can't tell
            self._start_probe(replica)
        return replica

    async def check_models(self) -> list[str]:
        """Why replicas are refused, which have another model than the run. One that does not answer soon, or stands
        still, is looked at before its first call."""

        async def check(replica: Replica) -> None:
            try:
                async with asyncio.timeout(_MODEL_CHECK_SECONDS):
                    await replica.check_model()
            except TimeoutError:
                replica.mark_unreachable()
            except EngineError as error:  # whoever probes it says so, too
                log.debug("%s", error)

        if not self.gate.paused:
            await asyncio.gather(*(check(replica) for replica in self.replicas if not replica.down))
        return [replica.refusal for replica in self.replicas if replica.refusal is not None]

    def _start_probe(self, replica: Replica) -> None:
        if replica not in self._probe_tasks:
            probe = self._probe_tasks[replica] = asyncio.get_running_loop().create_task(replica.try_probe())
            probe.add_done_callback(lambda _: self._probe_tasks.pop(replica, None))

    def remove(self, replica: Replica) -> None:
        """It gets no more calls; its engine is let go when the last of those that run there has ended."""
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
        """Raises EngineError where there is none left to try."""
        left = self._list_routable(tried)
        if not left:
            raise EngineError("There is no engine to call: add one, or wake those that sleep.", kind="overloaded")
        up = [replica for replica in left if not replica.down]
        return choose_replica(group, preferred, up or left, self._max_inflight)

    def _list_routable(self, tried: set[Replica]) -> list[Replica]:
        return [replica for replica in self.replicas if replica not in tried and not replica.asleep]

    async def wait_until_routable(self) -> None:
        """Until there is a replica to call. Raises EngineError where none is, though nobody holds calls back."""
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
        """Samples on a replica, and on another where one can't be reached or refuses before its first chunk. While
        generation is paused, calls are held, also those whose engine goes away under them.

        `on_chosen` is called with the replica each time before the call starts there. Calls of a `group` begin alike.
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
            begun = False
            try:
                await replica.ensure_probed()
                async for chunk in chunks:
                    if not begun:
                        begun = True
                        replica.mark_reachable()
                        replica.check_for_restart()
                    yield chunk
                return
            except EngineError as error:
                if begun or not error.retry_elsewhere:
                    raise
                if error.kind == "overloaded":  # any other failure may be this request's own
                    replica.mark_unreachable()
                if not self._may_retry(tried, replica):
                    raise
            finally:
                try:  # before the call is recorded, and long known where sampling took a while
                    await replica.wait_for_restart_check()
                finally:  # also where the call is cancelled again meanwhile
                    replica.leave(call)
                    # An abandoned stream must end at the engine now, not when the garbage collector comes by.
                    await chunks.aclose()

    def _may_retry(self, tried: set[Replica], replica: Replica) -> bool:
        """Whether a call that failed at a replica has another chance."""
        if self.gate.paused:
            tried.clear()  # by the time that it may go on, all may be well
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
        """Holds new calls and, where the engine can, freezes the running ones; without `freeze` they run on. True if
        all stand still. Engines that sleep are woken: so weights can be loaded before calls go on. A failure is told
        when all that could be done is done."""
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
        """Holds new calls, and waits for the running ones; or until somebody says otherwise."""
        await self.pause(freeze=False)
        turn = self._switch_count
        while self._switch_count == turn:
            if not any(replica.running for replica in self.replicas):
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def settle(self) -> None:
        """Frozen calls hear of new weights; all stays as it is otherwise."""
        async with self._switch_lock:
            await self._refresh_states()
            self._settle()

    def note_missed_thaw(self) -> None:
        """Calls that stood frozen may have gone on meanwhile, under whatever weights, and have been frozen again."""
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
        """Holds new calls, waits for the running ones (frozen ones go on), and has the engines give their memory back.
        True if all sleep; False where one can't, or where it was paused otherwise, or resumed, before all had ended."""
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
        """Whether calls run at the engines, also those of others: they would be broken off."""
        if any(replica.running for replica in self.replicas):
            return True
        awake = [replica.engine for replica in self.replicas if not replica.asleep]
        return any(await asyncio.gather(*(engine.count_running_calls() for engine in awake)))

    async def resume(self, *, exclusive: bool = True) -> None:
        """Lets calls go on, also where a replica can't be thawed or woken: that is told, and tried again by the next
        resume. Where all of them sleep on, calls stay held. Without `exclusive`, other gateways share the engines, and
        whoever resumes has called `settle` before."""
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
        """The weights of one replica (default: all) are now those of `version`."""
        changed = [replica for replica in self.replicas if url is None or replica.url == normalize_engine_url(url)]
        for replica in changed:
            replica.set_version(version)
        return changed


async def _gather_outcomes(steps: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """Each to its end, whatever becomes of the others."""
    return await asyncio.gather(*steps, return_exceptions=True)


def _raise_first_failure(answers: Iterable[object]) -> None:
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer


# Routing


class RoutableReplica(Protocol):
    """What is asked of a replica."""

    @property
    def url(self) -> str: ...

    @property
    def running(self) -> Collection[object]: ...


ReplicaT = TypeVar("ReplicaT", bound=RoutableReplica)


def choose_replica(group: str, home: ReplicaT | None, replicas: Sequence[ReplicaT], max_calls: int) -> ReplicaT:
    """One of `replicas`, of which there must be some. `home` is where the session was last; `max_calls` is how many
    calls a replica should get at most. Where none has room, the least busy one is taken."""
    mean = (1 + sum(len(replica.running) for replica in replicas)) / len(replicas)
    if (
        home is not None
        and home in replicas
        and len(home.running) < min(max_calls, max(_RESIDENT_LOAD_FACTOR * mean, mean + _SLACK_CALLS))
    ):
        return home
    ordered = rank_replicas(group, replicas)
    room = min(max_calls, max(1, int(_NEWCOMER_LOAD_FACTOR * mean)))
    return next(
        (replica for replica in ordered if len(replica.running) < room),
        min(ordered, key=lambda replica: len(replica.running)),
    )


def rank_replicas(group: str, replicas: Sequence[ReplicaT]) -> list[ReplicaT]:
    """The replicas as a group prefers them."""
    return sorted(replicas, key=lambda replica: _compute_rendezvous_hash(group, replica.url), reverse=True)


def _compute_rendezvous_hash(group: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group}\0{url}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
