"""The replicas of one engine, as one.

A session stays with one replica, for its prefix cache; it moves when that one is saturated, down or gone. Versions are
kept per replica: a token's version is known if the replica held one version while the call ran, or if the call stood
frozen while the version changed; otherwise it is unknown, and we say so.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from polar.config import EngineSettings
from polar.engines.base import Chunk, Engine, Launched, TokenPrompt, server_root
from polar.engines.gate import Gate
from polar.engines.replica import Replica, Running
from polar.engines.routing import choose
from polar.errors import ConfigError, EngineError
from polar.plugins import load
from polar.types import Request

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK = 0.05  # seconds between two looks at what still runs


class Pool:
    def __init__(self, engines: Iterable[Engine], max_inflight: int, launched: Launched | None = None) -> None:
        self.replicas = [Replica(engine) for engine in engines]
        self.gate = Gate()
        self._switching = asyncio.Lock()  # pausing and resuming take turns
        self._sleeps = False  # it was to sleep, and nobody has said otherwise since
        self._turn = 0  # grows whenever somebody pauses or resumes
        self._max_inflight = max_inflight
        self._launched = launched
        self._meeting: set[asyncio.Task[None]] = set()
        self._leaving: dict[Replica, asyncio.Task[None]] = {}

    @classmethod
    async def from_settings(cls, settings: EngineSettings) -> "Pool":
        """The configured replicas; an engine that comes with a server of its own is launched where none is named. There
        may be none yet of the others (`urls = []`): a trainer adds its own."""
        kind = load("engines", settings.kind)
        launches = hasattr(kind, "launch")
        if settings.urls or ("urls" in settings.model_fields_set and not launches):
            return cls([kind(url, settings) for url in settings.urls], settings.max_inflight)
        if not launches:
            raise ConfigError(
                'No engine is configured: set [engine] urls, for example ["http://127.0.0.1:8000"], or [] where a '
                "trainer adds its own."
            )
        launched: Launched = await kind.launch(settings)
        return cls([kind(launched.url, settings)], settings.max_inflight, launched)

    @property
    def launched(self) -> dict[str, int]:
        """The engine that came with this process, where one did: its address, and the version that it began with."""
        return {} if self._launched is None else {server_root(self._launched.url): self._launched.version}

    async def start(self, *, samples: bool = True) -> None:
        """Finds out what each replica can do; without `samples`, only what it can tell while it stands still."""
        await asyncio.gather(*(replica.try_to_meet(samples=samples) for replica in self.replicas))

    async def close(self) -> None:
        tasks = [*self._meeting, *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in (*self.replicas, *self._leaving):
            await replica.engine.close()
        if self._launched is not None:
            await self._launched.stop()

    # Replicas that come and go

    def add(self, engine: Engine, version: int = 0) -> Replica:
        """Calls go there from now on."""
        replica = Replica(engine, version)
        self.replicas.append(replica)
        replica.look_for_restart()
        if not self.gate.paused:  # else when calls may go on: an engine that stands still can't tell
            self._meet(replica)
        return replica

    def _meet(self, replica: Replica) -> None:
        meeting = asyncio.get_running_loop().create_task(replica.try_to_meet())
        self._meeting.add(meeting)
        meeting.add_done_callback(self._meeting.discard)

    def remove(self, replica: Replica) -> None:
        """It gets no more calls; its engine is let go when the last of those that run there has ended."""
        self.replicas.remove(replica)
        self._leaving[replica] = asyncio.get_running_loop().create_task(self._let_go(replica))

    async def _let_go(self, replica: Replica) -> None:
        try:
            if replica.frozen or replica.stuck:
                await replica.thaw()
        except EngineError as error:
            log.warning("Calls at %s, which was removed, may stand still until they time out: %s", replica.url, error)
        await replica.idle()
        await replica.engine.close()
        del self._leaving[replica]

    @property
    def leaving(self) -> bool:
        """Whether calls still run at replicas that were removed."""
        return bool(self._leaving)

    # Which replica

    def pick(self, group: str, preferred: Replica | None, tried: set[Replica]) -> Replica:
        """Raises EngineError where there is none left to try."""
        left = self._left(tried)
        if not left:
            raise EngineError("There is no engine to call: add one, or wake those that sleep.", kind="overloaded")
        up = [replica for replica in left if not replica.down]
        return choose(group, preferred, up or left, self._max_inflight)

    def _left(self, tried: set[Replica]) -> list[Replica]:
        return [replica for replica in self.replicas if replica not in tried and not replica.asleep]

    async def occupied(self) -> None:
        """Until there is a replica to call. Raises EngineError where none is, though nobody holds calls back."""
        if not self._left(set()):
            await self.gate.passed()
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
        call: Running,
        chosen: Callable[[Replica], None],
    ) -> AsyncGenerator[Chunk, None]:
        """Samples on a replica, and on another where one can't be reached or refuses before its first chunk. While
        generation is paused, calls are held, also those whose engine goes away under them.

        `chosen` is told where the call runs, each time before it starts there. Calls of a `group` begin alike.
        """
        tried: set[Replica] = set()
        while True:
            if self.gate.paused:
                call.froze()
                await self.gate.passed()
            replica = self.pick(group, preferred, tried)
            chosen(replica)
            replica.enter(call)
            chunks = replica.engine.generate(request, stream=stream, prompt=prompt)
            begun = False
            try:
                await replica.meet()
                async for chunk in chunks:
                    if not begun:
                        begun = True
                        replica.answered()
                        replica.look_for_restart()
                    yield chunk
                return
            except EngineError as error:
                if begun or not error.elsewhere:
                    raise
                if error.kind == "overloaded":  # any other failure may be this request's own
                    replica.failed()
                if not self._try_on(tried, replica):
                    raise
            finally:
                try:  # before the call is recorded, and long known where sampling took a while
                    await replica.know_process()
                finally:  # also where the call is cancelled again meanwhile
                    replica.leave(call)
                    # An abandoned stream must end at the engine now, not when the garbage collector comes by.
                    await chunks.aclose()

    def _try_on(self, tried: set[Replica], replica: Replica) -> bool:
        """Whether a call that failed at a replica has another chance."""
        if self.gate.paused:
            tried.clear()  # by the time that it may go on, all may be well
            return True
        tried.add(replica)
        return bool(self._left(tried))

    async def count_tokens(self, request: Request, group: str, preferred: Replica | None) -> int:
        tried: set[Replica] = set()
        while True:
            await self.occupied()
            replica = self.pick(group, preferred, tried)
            try:
                await replica.meet()
                return await replica.engine.count_tokens(request)
            except EngineError as error:
                if not error.elsewhere or not self._try_on(tried, replica):
                    raise
            await self.gate.passed()

    # Policy

    async def pause(self, *, freeze: bool = True) -> bool:
        """Holds new calls and, where the engine can, freezes the running ones; without `freeze` they run on. True if
        all stand still. Engines that sleep are woken: so weights can be loaded before calls go on. A failure is told
        when all that could be done is done."""
        async with self._switching:
            self._turn += 1
            self._sleeps = False
            self.gate.close()
            if freeze:
                await self._ask()
            answers: list[object] = [*await self._wake()]
            if freeze:
                frozen = await _all(replica.freeze() for replica in self.replicas)
                self.gate.frozen = all(answer is True for answer in frozen)
                answers += frozen
            else:
                answers += await self._thaw()
        _all_well(answers)
        return self.gate.frozen or not any(replica.running for replica in self.replicas)

    async def drain(self) -> None:
        """Holds new calls, and waits for the running ones; or until somebody says otherwise."""
        await self.pause(freeze=False)
        turn = self._turn
        while self._turn == turn:
            if not any(replica.running for replica in self.replicas):
                return
            await asyncio.sleep(_LOOK)

    async def settle(self) -> None:
        """Frozen calls hear of new weights; all stays as it is otherwise."""
        async with self._switching:
            await self._ask()
            self._settle()

    def missed_thaw(self) -> None:
        """Calls that stood frozen may have gone on meanwhile, under whatever weights, and have been frozen again."""
        for replica in self.replicas:
            replica.frozen = False

    def _settle(self) -> None:
        for replica in self.replicas:
            replica.settle()

    async def _ask(self) -> None:
        await asyncio.gather(*(replica.ask() for replica in self.replicas if replica.unsure))

    async def _wake(self) -> list[BaseException | None]:
        return await _all(replica.wake() for replica in self.replicas if replica.asleep)

    async def _thaw(self) -> list[BaseException | None]:
        self.gate.frozen = False
        return await _all(replica.thaw() for replica in self.replicas if replica.frozen or replica.stuck)

    async def sleep(self) -> bool:
        """Holds new calls, waits for the running ones (frozen ones go on), and has the engines give their memory back.
        True if all sleep; False where one can't, or where it was paused otherwise, or resumed, before all had ended."""
        async with self._switching:
            self._turn += 1
            self._sleeps = True
            self.gate.close()
            thawed = await self._thaw()
        while self._sleeps:
            if not await self._busy():
                break
            await asyncio.sleep(_LOOK)
        async with self._switching:
            if not self._sleeps:
                return False
            asleep = await _all(replica.sleep() for replica in self.replicas)
        _all_well([*thawed, *asleep])
        return all(asleep)

    async def _busy(self) -> bool:
        """Whether calls run at the engines, also those of others: they would be broken off."""
        if any(replica.running for replica in self.replicas):
            return True
        awake = [replica.engine for replica in self.replicas if not replica.asleep]
        return any(await asyncio.gather(*(engine.running() for engine in awake)))

    async def resume(self, *, alone: bool = True) -> None:
        """Lets calls go on, also where a replica can't be thawed or woken: that is told, and tried again by the next
        resume. Where all of them sleep on, calls stay held. Who is not `alone` with the engines settles before."""
        async with self._switching:
            self._turn += 1
            self._sleeps = False
            await self._ask()
            if alone:
                self._settle()
            answers = [*await self._wake(), *await self._thaw()]
            if not self.replicas or not all(replica.asleep for replica in self.replicas):
                self.gate.open()
                for replica in self.replicas:
                    if not (replica.met or replica.asleep):
                        self._meet(replica)
        _all_well(answers)

    def set_version(self, version: int, url: str | None = None) -> list[Replica]:
        """The weights of one replica (default: all) are now those of `version`."""
        changed = [replica for replica in self.replicas if url is None or replica.url == server_root(url)]
        for replica in changed:
            replica.set_version(version)
        return changed


async def _all(steps: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """Each to its end, whatever becomes of the others."""
    return await asyncio.gather(*steps, return_exceptions=True)


def _all_well(answers: Iterable[object]) -> None:
    """Raises the first failure."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
