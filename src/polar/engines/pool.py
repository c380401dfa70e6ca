"""Several replicas of one engine, and which policy each of them holds.

A session stays with one replica, for its prefix cache; it moves when that one is saturated or down. Versions are
kept per replica: a token's version is known if the replica held one version while the call ran, or if the call stood
frozen while the version changed; otherwise it is unknown, and we say so.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from polar.config import EngineSettings
from polar.engines.base import Chunk, Engine, Launched, TokenPrompt
from polar.engines.probe import logprob_kind
from polar.errors import ConfigError, EngineError
from polar.plugins import load
from polar.types import Request

log = logging.getLogger(__name__)

_FIRST_BACKOFF, _LAST_BACKOFF = 0.5, 15.0
_PROBE_LIMIT = 30.0  # seconds; an engine that hangs must not keep everything from starting


class Running(Protocol):
    """A call in progress, as far as a weight update concerns it."""

    def version_changed(self, version: int, *, frozen: bool) -> None: ...

    def froze(self) -> None: ...

    def thawed(self) -> None: ...


class Replica:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = 0
        self.frozen = False
        self.stuck = False  # it was frozen, and did not answer when it was to go on
        self.running: set[Running] = set()
        self._told = 0  # the version that running calls know of
        self._met = False
        self._meeting = asyncio.Lock()
        self._failures = 0
        self._down_until = 0.0

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def down(self) -> bool:
        return time.monotonic() < self._down_until

    def failed(self) -> None:
        """Not reached: leave it alone for a while, longer each time."""
        self._failures += 1
        self._down_until = time.monotonic() + min(_FIRST_BACKOFF * 2 ** (self._failures - 1), _LAST_BACKOFF)

    def answered(self) -> None:
        self._failures = 0
        self._down_until = 0.0

    async def meet(self) -> None:
        """Finds out what the engine can do, once. Raises EngineError where it can't be reached."""
        if self._met:
            return
        async with self._meeting:
            if self._met:
                return
            found = await self.engine.start()
            if found.logprobs != "none":
                try:
                    async with asyncio.timeout(_PROBE_LIMIT):
                        kind = await logprob_kind(self.engine)
                    found.logprobs = kind if kind != "none" else found.logprobs
                except (EngineError, TimeoutError) as error:
                    log.warning("Log-probabilities of %s are taken for %s ones: %r", self.url, found.logprobs, error)
                    if isinstance(error, TimeoutError) or error.elsewhere:
                        return  # and asked about again by the next call
            self._met = True

    async def freeze(self) -> bool:
        self.frozen = await self.engine.freeze() or self.frozen
        if self.frozen:
            for call in self.running:
                call.froze()
        return self.frozen

    async def thaw(self) -> None:
        """Only now do frozen calls hear of new weights: tokens that were on their way when they froze have come."""
        self._tell()
        try:
            await self.engine.thaw()
        except EngineError:
            # It may go on or not: whoever runs there now must take the next change of weights for one in mid-call.
            self.stuck = True
            self.failed()
            raise
        finally:
            self.frozen = False
            for call in self.running:
                call.thawed()
        self.stuck = False

    def set_version(self, version: int) -> None:
        self.version = version
        if not self.frozen:
            self._tell()

    def _tell(self) -> None:
        if self.version != self._told:
            self._told = self.version
            for call in self.running:
                call.version_changed(self.version, frozen=self.frozen)


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

    async def passed(self) -> None:
        if self._open.is_set():
            return
        self.held += 1
        try:
            await self._open.wait()
        finally:
            self.held -= 1


class Pool:
    def __init__(self, engines: list[Engine], max_inflight: int, launched: Launched | None = None) -> None:
        if not engines:
            raise ConfigError('No engine is configured: set [engine] urls, for example ["http://127.0.0.1:8000"].')
        self.replicas = [Replica(engine) for engine in engines]
        self.gate = Gate()
        self._switching = asyncio.Lock()  # pausing and resuming take turns
        self._max_inflight = max_inflight
        self._launched = launched

    @classmethod
    async def from_settings(cls, settings: EngineSettings) -> "Pool":
        """The configured replicas; an engine that comes with a server of its own is launched where none is named."""
        kind = load("engines", settings.kind)
        if settings.urls or not hasattr(kind, "launch"):
            return cls([kind(url, settings) for url in settings.urls], settings.max_inflight)
        launched: Launched = await kind.launch(settings)
        return cls([kind(launched.url, settings)], settings.max_inflight, launched)

    async def start(self) -> None:
        """Finds out what each replica can do. One that can't be reached yet is tried again by its first call."""
        await asyncio.gather(*(self._try_to_meet(replica) for replica in self.replicas))

    async def _try_to_meet(self, replica: Replica) -> None:
        try:
            await replica.meet()
        except EngineError as error:
            log.warning("%s", error)
            replica.failed()

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.engine.close()
        if self._launched is not None:
            await self._launched.stop()

    # Which replica

    def pick(self, preferred: Replica | None, tried: set[Replica]) -> Replica:
        """`preferred` while it has room; else the least busy one. Saturated ones are used only if all are."""
        if preferred is not None and preferred not in tried and self._has_room(preferred):
            return preferred
        candidates = [replica for replica in self.replicas if replica not in tried]
        return min(candidates, key=lambda replica: (replica.down, not self._has_room(replica), len(replica.running)))

    def _has_room(self, replica: Replica) -> bool:
        return not replica.down and len(replica.running) < self._max_inflight

    # Sampling

    async def generate(
        self,
        request: Request,
        *,
        stream: bool,
        prompt: TokenPrompt | None = None,
        preferred: Replica | None,
        call: Running,
        chosen: Callable[[Replica], None],
    ) -> AsyncGenerator[Chunk, None]:
        """Samples on a replica, and on another where one can't be reached or refuses before its first chunk.

        `chosen` is told where the call runs, each time before it starts there.
        """
        tried: set[Replica] = set()
        while True:
            await self.gate.passed()
            replica = self.pick(preferred, tried)
            chosen(replica)
            replica.running.add(call)
            chunks = replica.engine.generate(request, stream=stream, prompt=prompt)
            begun = False
            try:
                await replica.meet()
                async for chunk in chunks:
                    if not begun:
                        begun = True
                        replica.answered()
                    yield chunk
                return
            except EngineError as error:
                if begun or not error.elsewhere:
                    raise
                if error.kind == "overloaded":  # any other failure may be this request's own
                    replica.failed()
                tried.add(replica)
                if len(tried) == len(self.replicas):
                    raise
            finally:
                replica.running.discard(call)
                # An abandoned stream must end at the engine now, not when the garbage collector comes by.
                await chunks.aclose()

    async def count_tokens(self, request: Request, preferred: Replica | None) -> int:
        tried: set[Replica] = set()
        while True:
            replica = self.pick(preferred, tried)
            try:
                await replica.meet()
                return await replica.engine.count_tokens(request)
            except EngineError as error:
                tried.add(replica)
                if not error.elsewhere or len(tried) == len(self.replicas):
                    raise

    # Policy

    async def pause(self, *, freeze: bool = True) -> bool:
        """Holds new calls and, where the engine can, freezes the running ones. True if all stand still."""
        async with self._switching:
            self.gate.close()
            if freeze:
                answers = await asyncio.gather(*(replica.freeze() for replica in self.replicas))
                self.gate.frozen = all(answers)
            return self.gate.frozen or not any(replica.running for replica in self.replicas)

    async def resume(self) -> None:
        """Lets calls go on, also where a replica can't be thawed: that is told, and tried again by the next resume."""
        async with self._switching:
            frozen = [replica for replica in self.replicas if replica.frozen or replica.stuck]
            answers = await asyncio.gather(*(replica.thaw() for replica in frozen), return_exceptions=True)
            self.gate.open()
        for answer in answers:
            if answer is not None:
                raise answer

    def set_version(self, version: int, url: str | None = None) -> list[Replica]:
        """The weights of one replica (default: all) are now those of `version`."""
        changed = [replica for replica in self.replicas if url is None or replica.url == url.rstrip("/")]
        for replica in changed:
            replica.set_version(version)
        return changed
