"""One replica of an engine: its running calls, its policy version, and whether it can be called."""

import asyncio
import logging
import time
from typing import Protocol

from polar.engines.base import Engine
from polar.engines.probe import detect_logprob_kind
from polar.engines.run_model import ModelMismatchError, RunModel
from polar.errors import EngineError

log = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.5, 15.0
_PROBE_TIMEOUT_SECONDS = 30.0  # an engine that hangs must not prevent the start


class RunningCall(Protocol):
    """A running call, as its replica notifies it of weight updates."""

    def on_version_changed(self, version: int, *, frozen: bool) -> None: ...

    def on_frozen(self) -> None: ...

    def on_thawed(self) -> None: ...


class Replica:
    def __init__(self, engine: Engine, model: RunModel, version: int = 0) -> None:
        self.engine = engine
        self.refusal: str | None = None  # why it is not called: it has another model than its run
        self._model = model
        self._has_right_model = False
        self._model_lock = asyncio.Lock()
        self._closed = False
        self.version = version
        self.frozen = False
        self.may_be_frozen = False  # a freeze or thaw failed, so its effect is unknown
        self.asleep = False
        self.weights_lost = False  # its process was restarted, so its weights are unknown
        self._process_start_time: float | None = None  # of the process that has the version's weights
        self._known_connections = -1  # connections made when the process was checked last
        self._restart_check: asyncio.Task[None] | None = None
        self.state_unknown = False  # another process may have frozen it, or sent it to sleep, before this one began
        self.running: set[RunningCall] = set()
        self._announced_version = version  # the version that was announced to running calls
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_probed = False
        self._probe_lock = asyncio.Lock()
        self._failures = 0
        self._down_until = 0.0

    @property
    def url(self) -> str:
        return self.engine.url

    # Calls

    def enter(self, call: RunningCall) -> None:
        self.running.add(call)
        self._idle.clear()

    def leave(self, call: RunningCall) -> None:
        self.running.discard(call)
        if not self.running:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Waits until no call of this gateway runs there."""
        await self._idle.wait()

    async def close(self) -> None:
        async with self._model_lock:  # a later `check_model` would open another connection
            self._closed = True
        await self.engine.close()

    # Whether it can be reached

    @property
    def down(self) -> bool:
        return time.monotonic() < self._down_until

    def mark_unreachable(self) -> None:
        """Notes that the replica could not be reached: it gets no calls for a while, longer each time."""
        self._failures += 1
        self._down_until = time.monotonic() + min(
            _FIRST_BACKOFF_SECONDS * 2 ** (self._failures - 1), _MAX_BACKOFF_SECONDS
        )

    def mark_reachable(self) -> None:
        self._failures = 0
        self._down_until = 0.0

    @property
    def is_probed(self) -> bool:
        return self._is_probed

    async def ensure_probed(self, *, may_sample: bool = True) -> None:
        """Probes the engine once. Raises EngineError if it can't be reached. Without `may_sample`, finds out only what
        an engine that stands still can answer."""
        if self._is_probed:
            return
        async with self._probe_lock:
            if self._is_probed:
                return
            await self.check_model()
            if not may_sample:
                return
            capabilities = self.engine.capabilities
            if capabilities.logprobs != "none":
                try:
                    async with asyncio.timeout(_PROBE_TIMEOUT_SECONDS):
                        kind = await detect_logprob_kind(self.engine)
                    capabilities.logprobs = kind if kind != "none" else capabilities.logprobs
                except (EngineError, TimeoutError) as error:
                    log.warning(
                        "Log-probabilities of %s are taken for %s ones: %r", self.url, capabilities.logprobs, error
                    )
                    if isinstance(error, TimeoutError) or error.retry_elsewhere:
                        return  # the next call probes again
            self._is_probed = True

    async def check_model(self) -> None:
        """Connects, and checks once that the engine has the run's model. Raises EngineError if it can't be reached, or
        has another model."""
        async with self._model_lock:
            if self._has_right_model:
                return
            if self._closed:
                raise EngineError(f"{self.url} was removed.", kind="overloaded", retry_elsewhere=True)
            await self.engine.start()
            try:
                await self._model.check(self.engine)
            except ModelMismatchError as error:
                self.refusal = str(error)
                raise
            self.refusal, self._has_right_model = None, True

    async def try_probe(self, *, may_sample: bool = True) -> None:
        """Probes the engine. If it can't be reached yet, its first call probes it again."""
        try:
            await self.ensure_probed(may_sample=may_sample)
        except EngineError as error:
            log.warning("%s", error)
            self.mark_unreachable()

    # Standing still

    async def refresh_state(self) -> None:
        """Asks for the state in which another process left the engine. If there is no answer, the state stays as it
        is."""
        self.state_unknown = False
        try:
            state = await self.engine.get_state()
        except EngineError as error:
            log.warning("It is unknown whether %s stands still: %s", self.url, error)
            return
        if state is not None:
            self.asleep = state == "asleep"
            self.may_be_frozen = state == "frozen"

    async def freeze(self) -> bool:
        try:
            self.frozen = await self.engine.freeze() or self.frozen
        except EngineError as error:
            self.may_be_frozen = self.may_be_frozen or error.kind != "overloaded"  # a restarted engine runs
            self.mark_unreachable()
            raise
        if self.frozen:
            for call in self.running:
                call.on_frozen()
        return self.frozen

    async def thaw(self) -> None:
        """Thaws the engine. Calls to which new weights were not announced before can't know where these begin: another
        gateway that shares the engine may have thawed it already."""
        self._announce_version(frozen=False)
        try:
            await self.engine.thaw()
        except EngineError:
            # It may run or not, so the next change of weights has no known boundary in calls that run there now.
            self.may_be_frozen = True
            self.mark_unreachable()
            raise
        finally:
            self.frozen = False
            for call in self.running:
                call.on_thawed()
        self.may_be_frozen = False

    async def sleep(self) -> bool:
        """Puts the engine to sleep; call it only while no call runs there. If its state is unknown and it does not
        report it, it counts as asleep already: not every engine survives being put to sleep twice."""
        try:
            if self.state_unknown:
                self.asleep = await self.engine.get_state() in ("asleep", None)
                self.state_unknown = False
            if not self.asleep:
                self.asleep = True  # in case this task is cancelled before the answer
                self.asleep = await self.engine.sleep()
        except EngineError as error:
            self._mark_possibly_asleep(error)
            raise
        return self.asleep

    async def wake(self) -> None:
        try:
            await self.engine.wake()
        except EngineError as error:
            self._mark_possibly_asleep(error)
            raise
        self.asleep = False

    def _mark_possibly_asleep(self, error: EngineError) -> None:
        """Marks the replica after a failed sleep or wake. An unreachable engine will come back awake; any other may be
        asleep, and gets no calls until it was woken."""
        self.asleep = error.kind != "overloaded"
        self.mark_unreachable()

    # Weights

    def settle(self) -> None:
        """Announces new weights to frozen calls, which stay frozen: their last tokens have arrived by now. If several
        gateways share an engine, all of them settle before the first one thaws it."""
        self._announce_version(frozen=self.frozen)

    def set_version(self, version: int) -> None:
        if version != self.version:
            self.weights_lost, self._process_start_time, self._known_connections = False, None, -1
            self.version = version
            self.check_for_restart()
        if not self.frozen:
            self._announce_version(frozen=False)

    def check_for_restart(self) -> None:
        """Asks the engine when its process was started, if new connections were made since the last check: a restarted
        process has lost the weights that it was given. Version 0 is what it starts with."""
        stale = self.engine.connections_opened != self._known_connections
        if (
            stale
            and self._restart_check is None
            and self.version
            and not self.engine.capabilities.reports_weight_version
        ):
            self._restart_check = asyncio.get_running_loop().create_task(self._check_process())

    async def wait_for_restart_check(self) -> None:
        """Waits for a restart check that is under way."""
        if self._restart_check is not None:
            await asyncio.wait({self._restart_check})

    async def _check_process(self) -> None:
        try:
            version = self.version
            started_at = await self.engine.get_process_start_time()
            if started_at is None or version != self.version:
                return
            self._known_connections = self.engine.connections_opened
            if self._process_start_time is not None and started_at > self._process_start_time:
                self._mark_weights_lost()
            self._process_start_time = started_at
        except EngineError as error:
            log.debug("%s does not say when its process was started: %s", self.url, error)
        finally:
            self._restart_check = None

    def _mark_weights_lost(self) -> None:
        if not self.weights_lost:
            self.weights_lost = True
            log.warning(
                "%s was started again: it may have lost the weights of version %d, and what it samples has no known "
                "version until POST /policy names another one.",
                self.url,
                self.version,
            )
        for call in self.running:
            call.on_version_changed(self.version, frozen=False)

    def _announce_version(self, *, frozen: bool) -> None:
        if self.version != self._announced_version:
            self._announced_version = self.version
            for call in self.running:
                call.on_version_changed(self.version, frozen=frozen)
