"""One replica of an engine: what runs there, which policy it holds, and whether it can be called at all."""

import asyncio
import logging
import time
from typing import Protocol

from polar.engines.base import Engine
from polar.engines.probe import logprob_kind
from polar.errors import EngineError

log = logging.getLogger(__name__)

_FIRST_BACKOFF, _LAST_BACKOFF = 0.5, 15.0
_PROBE_LIMIT = 30.0  # seconds; an engine that hangs must not keep everything from starting


class Running(Protocol):
    """A call in progress, as far as a weight update concerns it."""

    def version_changed(self, version: int, *, frozen: bool) -> None: ...

    def froze(self) -> None: ...

    def thawed(self) -> None: ...


class Replica:
    def __init__(self, engine: Engine, version: int = 0) -> None:
        self.engine = engine
        self.version = version
        self.frozen = False
        self.stuck = False  # it may stand frozen: nobody knows whether it heard what it was told
        self.asleep = False
        self.weights_lost = False  # its process was started again: nobody knows what it samples with
        self._process: float | None = None  # when the process was started that has the version's weights
        self._known_connections = -1  # how many there were when the process was looked at last
        self._look: asyncio.Task[None] | None = None
        self.unsure = False  # another process may have frozen it, or sent it to sleep, before this one began
        self.running: set[Running] = set()
        self._told = version  # the version that running calls know of
        self._idle = asyncio.Event()
        self._idle.set()
        self._met = False
        self._meeting = asyncio.Lock()
        self._failures = 0
        self._down_until = 0.0

    @property
    def url(self) -> str:
        return self.engine.url

    # Calls

    def enter(self, call: Running) -> None:
        self.running.add(call)
        self._idle.clear()

    def leave(self, call: Running) -> None:
        self.running.discard(call)
        if not self.running:
            self._idle.set()

    async def idle(self) -> None:
        """Until no call of ours runs there."""
        await self._idle.wait()

    # Whether it can be reached

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

    @property
    def met(self) -> bool:
        return self._met

    async def meet(self, *, samples: bool = True) -> None:
        """Finds out what the engine can do, once. Raises EngineError where it can't be reached. Without `samples`, only
        what it can tell while it stands still."""
        if self._met:
            return
        async with self._meeting:
            if self._met:
                return
            found = await self.engine.start()
            if not samples:
                return
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

    async def try_to_meet(self, *, samples: bool = True) -> None:
        """One that can't be reached yet is tried again by its first call."""
        try:
            await self.meet(samples=samples)
        except EngineError as error:
            log.warning("%s", error)
            self.failed()

    # Standing still

    async def ask(self) -> None:
        """How another process left it. One that does not answer is taken to be as it would begin."""
        self.unsure = False
        try:
            standing = await self.engine.standing()
        except EngineError as error:
            log.warning("Nobody knows whether %s stands still: %s", self.url, error)
            return
        if standing is not None:
            self.asleep = standing == "asleep"
            self.stuck = standing == "frozen"

    async def freeze(self) -> bool:
        try:
            self.frozen = await self.engine.freeze() or self.frozen
        except EngineError as error:
            self.stuck = self.stuck or error.kind != "overloaded"  # one that is gone comes back running
            self.failed()
            raise
        if self.frozen:
            for call in self.running:
                call.froze()
        return self.frozen

    async def thaw(self) -> None:
        """Calls that have not heard of new weights until now can't know where they begin: where several gateways share
        an engine, another one may have let it go on already."""
        self._tell(known=False)
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

    async def sleep(self) -> bool:
        """Only while nothing runs there. One that another process was to send to sleep, and that can't tell whether it
        did, is taken to sleep: not every engine stands being told twice."""
        try:
            if self.unsure:
                self.asleep = await self.engine.standing() in ("asleep", None)
                self.unsure = False
            if not self.asleep:
                self.asleep = True  # also where nobody waits for the answer any more
                self.asleep = await self.engine.sleep()
        except EngineError as error:
            self._left_unsure(error)
            raise
        return self.asleep

    async def wake(self) -> None:
        try:
            await self.engine.wake()
        except EngineError as error:
            self._left_unsure(error)
            raise
        self.asleep = False

    def _left_unsure(self, error: EngineError) -> None:
        """One that is gone comes back awake. Of any other nobody knows: it gets no call until it was woken."""
        self.asleep = error.kind != "overloaded"
        self.failed()

    # Weights

    def settle(self) -> None:
        """Frozen calls hear of new weights, and stay frozen: tokens that were on their way when they froze have come.
        Where several gateways share an engine, all of them know before the first one lets it go on."""
        self._tell(known=self.frozen)

    def set_version(self, version: int) -> None:
        if version != self.version:
            self.weights_lost, self._process, self._known_connections = False, None, -1
            self.version = version
            self.look_for_restart()
        if not self.frozen:
            self._tell(known=False)

    def look_for_restart(self) -> None:
        """Asks the engine when its process was started, where connections were made since that was known: a process
        that was started again has other weights than it was given. Version 0 are those that it starts with."""
        stale = self.engine.connections != self._known_connections
        if stale and self._look is None and self.version and not self.engine.capabilities.knows_weights:
            self._look = asyncio.get_running_loop().create_task(self._look_at_process())

    async def know_process(self) -> None:
        """Until an answer that is under way has come."""
        if self._look is not None:
            await asyncio.wait({self._look})

    async def _look_at_process(self) -> None:
        try:
            version = self.version
            started = await self.engine.process_start()
            if started is None or version != self.version:
                return
            self._known_connections = self.engine.connections
            if self._process is not None and started > self._process:
                self._lose_weights()
            self._process = started
        except EngineError as error:
            log.debug("%s does not say when its process was started: %s", self.url, error)
        finally:
            self._look = None

    def _lose_weights(self) -> None:
        if not self.weights_lost:
            self.weights_lost = True
            log.warning(
                "%s was started again: it may have lost the weights of version %d, and what it samples has no known "
                "version until POST /policy names another one.",
                self.url,
                self.version,
            )
        for call in self.running:
            call.version_changed(self.version, frozen=False)

    def _tell(self, *, known: bool) -> None:
        if self.version != self._told:
            self._told = self.version
            for call in self.running:
                call.version_changed(self.version, frozen=known)
