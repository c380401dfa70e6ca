"""A node's worker: leases sessions from a rollout server, runs them, sends heartbeats and reports results.

    lease ─► plan ─► submit ─► FinishedSession ─► outbox ─► finish

The server may be local or remote (protocol.RolloutServer), and may be unreachable for a while: sessions continue, and
their outcomes wait in the outbox. A lease is held until the server has acknowledged its outcome or declared it lost. A
lost session is cancelled, and its result is dropped.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from polar.engines.base import DesiredEngines
from polar.errors import ConfigError, PolarError, StoreError
from polar.node.finished_session import FinishedSession
from polar.node.remote_server import KeepAlive
from polar.node.task_plan import PlanCache, TaskPlan
from polar.records.session import NOT_RUNNABLE
from polar.records.task import TaskRequest
from polar.rollout.protocol import (
    INTERRUPTED,
    FinishStatus,
    Heartbeat,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseId,
    RolloutServer,
    ServerUnreachable,
    SessionOutcome,
    UnknownNode,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

EngineProblems = dict[str, list[str]]
"""By run: what could not be applied of the desired engines."""


_MAX_BATCH = 128  # outcomes in one request
_RESULT_REFUSED = "result_refused"  # the reason of sessions whose outcome the server refused to store
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 5.0  # between two attempts to reach the server
_LEAVE_SECONDS = 20.0  # for the last outcomes and the farewell of a node that closes


class SessionHandle(Protocol):
    """A submitted session (node.RunningSession)."""

    @property
    def finished(self) -> "asyncio.Future[FinishedSession]": ...

    def cancel(self) -> bool: ...


class SessionHost(Protocol):
    """Runs sessions (node.Node)."""

    async def plan(self, task: TaskRequest) -> TaskPlan: ...

    async def wait_for_room(self) -> None: ...

    def count_free_slots(self) -> int: ...

    async def submit(self, plan: TaskPlan, sample: int, work_id: int) -> SessionHandle: ...


class WorkerContext(Struct):
    """What a worker knows of its node, and how it reaches the node's engines and store."""

    node_id: str
    name: str
    backends: list[str]
    slots: int
    store: str  # the id of the store that sessions are written to
    replaces: list[str]
    get_load: Callable[[], dict[str, Any]]
    apply_engines: Callable[[DesiredEngines], Awaitable[EngineProblems]]  # puts engines and policy in force here
    export_session: Callable[[str], Awaitable[bytes]]  # a copy of a session
    disown_session: Callable[[str, str], Awaitable[None]]  # revokes a session's reward, with the reason
    stopped: list[str] = []  # the nodes among `replaces` that had been asked to stop
    mark_ending: Callable[[], None] | None = None  # records on disk that this node was asked to stop
    drain_seconds: float = 0.0  # how long running sessions may continue once the node drains
    stays_when_drained: bool = False  # a drained node leases nothing, but still follows the engines


class _LeasedSession:
    """A lease, and the session that runs for it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.running: SessionHandle | None = None
        self.cancelled: str | None = None  # why
        self.ended: SessionOutcome | None = None

    def cancel(self, reason: str) -> None:
        if self.cancelled is None:
            self.cancelled = reason
            if self.running is not None:
                self.running.cancel()


class Worker:
    def __init__(
        self,
        server: RolloutServer,
        host: SessionHost | None,
        context: WorkerContext,
        keep_alive: KeepAlive | None = None,
    ) -> None:
        """Without a host, the worker leases nothing and only follows the engines and the policy. `keep_alive` sends
        heartbeats while this event loop is busy; a server on the same loop does not need them."""
        self._server = server
        self._host = host
        self._context = context
        self._keep_alive = keep_alive
        self._held: dict[LeaseId, _LeasedSession] = {}
        self._plan_cache = None if host is None else PlanCache(host.plan)
        self._outbox: list[_LeasedSession] = []
        self._outbox_filled = asyncio.Event()  # the outbox is not empty
        self._idle = asyncio.Event()  # no lease is held
        self._idle.set()
        self._join_response: JoinResponse | None = None
        self._join_lock = asyncio.Lock()
        self._beat_now = asyncio.Event()  # a heartbeat is due before its time
        self._engine_follower = EngineFollower(context.apply_engines, self._beat_now.set)
        self._draining = asyncio.Event()
        self._ending = False  # this process was asked to stop
        self._lease_delay = 0.0  # seconds to wait before leasing again, while sessions can't begin
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def node_id(self) -> str:
        return self._context.node_id

    async def run(self, stop: asyncio.Event, drain: asyncio.Event | None = None) -> None:
        """Runs until `stop` is set or the server drains this node; then hands back the sessions that still run and
        leaves. When `drain` is set, no session begins any more, and running ones get `drain_seconds` to finish."""
        stopping = asyncio.ensure_future(stop.wait())
        winding_down = asyncio.ensure_future((drain or asyncio.Event()).wait())
        ends = {stopping, winding_down}
        joining = asyncio.ensure_future(self._join())
        await asyncio.wait({*ends, joining}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():  # asked to stop before a server answered
            for task in (joining, *ends):
                task.cancel()
            return
        joining.result()
        loops = [
            self._spawn(work)
            for work in (self._lease_work, self._send_heartbeats, self._send_outcomes, self._follow_engines)
        ]
        draining = asyncio.ensure_future(self._wait_until_drained())
        try:
            await asyncio.wait({*ends, draining, *loops}, return_when=asyncio.FIRST_COMPLETED)
            if winding_down.done() and not stopping.done():
                await self._wind_down({stopping, *loops})
            elif stopping.done():
                self._announce_end()
            failed = [loop for loop in loops if loop.done()]
            await self._leave(leasing=loops[0], beating=loops[1])
            for loop in failed:
                loop.result()  # raises
        finally:
            for task in (*ends, draining, *self._tasks):
                task.cancel()
            await asyncio.gather(*ends, draining, *self._tasks, return_exceptions=True)

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> "asyncio.Task[None]":
        async def run() -> None:
            await work(*arguments)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The server

    async def _join(self) -> None:
        context = self._context
        request = JoinRequest(
            node_id=context.node_id,
            name=context.name,
            backends=context.backends,
            slots=context.slots,
            store=context.store,
            replaces=context.replaces,
            stopped=context.stopped,
        )
        self._join_response = await self._retry_until_reached(lambda: self._server.join(request))
        self._engine_follower.set_wanted(self._join_response.engines)

    async def _retry_until_reached(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats the call until the server answers."""
        delay = _FIRST_RETRY_SECONDS
        while True:
            try:
                return await call()
            except (ServerUnreachable, StoreError) as error:
                log.log(logging.WARNING if delay == _FIRST_RETRY_SECONDS else logging.DEBUG, "%s", error)
            await asyncio.sleep(delay)
            max_delay = _MAX_RETRY_SECONDS if self._join_response is None else self._join_response.beat
            delay = min(
                2 * delay, _MAX_RETRY_SECONDS, max_delay
            )  # a server that is back has to hear of us within a term

    async def _call_as_member(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats the call until the server answers it; joins again where the server does not know this node."""
        while True:
            response = self._join_response
            try:
                return await self._retry_until_reached(call)
            except UnknownNode as error:
                async with self._join_lock:
                    if self._join_response is response:  # else a concurrent call has joined already
                        log.warning("%s", error)
                        await self._join()

    # Work

    async def _lease_work(self) -> None:
        host = self._host
        while host is not None and not self._draining.is_set():
            await asyncio.sleep(self._lease_delay)
            await host.wait_for_room()
            starting = sum(session.running is None and session.ended is None for session in self._held.values())
            room = host.count_free_slots() - starting
            if room <= 0:
                await asyncio.sleep(0.01)  # sessions that are starting will take the free slots
                continue
            for lease in await self._call_as_member(
                lambda room=room: self._server.lease(self._context.node_id, list(self._held), room)  # type: ignore[misc]
            ):
                if lease.lease_id not in self._held:
                    session = self._held[lease.lease_id] = _LeasedSession(lease)
                    self._idle.clear()
                    self._spawn(self._run_session, session)
        await asyncio.Event().wait()

    async def _run_session(self, session: _LeasedSession) -> None:
        """Runs a session and puts its outcome into the outbox."""
        session.ended = await self._run_to_outcome(session)
        if self._held.get(session.lease.lease_id) is session:
            self._outbox.append(session)
            self._outbox_filled.set()
        else:  # the lease was lost meanwhile, and may have been granted anew
            await self._disown(session.ended)

    async def _disown(self, outcome: SessionOutcome) -> None:
        """Revokes the reward of a session whose sample another session has taken over, so that only one counts."""
        if outcome.session_id is not None:
            try:
                await self._context.disown_session(outcome.session_id, "superseded")
            except StoreError as error:
                log.error("The reward of the superseded session %s could not be revoked: %s", outcome.session_id, error)

    async def _run_to_outcome(self, session: _LeasedSession) -> SessionOutcome:
        lease, host = session.lease, self._host
        assert host is not None
        assert self._plan_cache is not None
        outcome = SessionOutcome(lease.work_id, lease.fence, None)
        try:
            plan = await self._plan_cache.get(lease)
            if self._ending:  # the lease was granted while this node began to stop: another node may have it
                outcome.reason = INTERRUPTED
                return outcome
            try:
                session.running = await host.submit(plan, lease.sample, lease.work_id)
            except (StoreError, OSError) as error:
                # The disk is full, for example. Nothing was begun: another node may have it. Lease less often.
                log.warning("A session of task %s could not begin here: %s", lease.task_id, error)
                self._lease_delay = min(2 * self._lease_delay or _FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS)
                outcome.reason, outcome.error = INTERRUPTED, str(error)
                return outcome
        except ConfigError as error:  # another node may be able to run it
            self._lease_delay = min(2 * self._lease_delay or _FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS)
            outcome.reason, outcome.error = NOT_RUNNABLE, str(error)
            return outcome
        except Exception as error:
            if not isinstance(error, PolarError):
                log.exception("A session of task %s could not begin", lease.task_id)
            outcome.reason, outcome.error = "node_failed", str(error)
            return outcome
        self._lease_delay = 0.0
        if session.cancelled is not None:  # while it began
            session.running.cancel()
        try:
            # Shielded: cancelling the worker must not cancel a session that is being torn down.
            return _fill_outcome(outcome, await asyncio.shield(session.running.finished), session.cancelled)
        except Exception as error:
            log.exception("A session of task %s failed", lease.task_id)
            outcome.reason, outcome.error = "node_failed", repr(error)
            return outcome

    async def _send_outcomes(self) -> None:
        while True:
            await self._outbox_filled.wait()
            batch = self._outbox[:_MAX_BATCH]
            outcomes = [session.ended for session in batch if session.ended is not None]
            await self._send_copies(outcomes)
            statuses = await self._finish(outcomes)
            del self._outbox[: len(batch)]
            for session, status in zip(batch, statuses, strict=True):
                if status == "lost":
                    log.warning("The outcome of a session of task %s came too late.", session.lease.task_id)
                    if session.ended is not None:
                        await self._disown(session.ended)
                self._release(session.lease.lease_id)
            if not self._outbox:
                self._outbox_filled.clear()

    async def _finish(self, outcomes: list[SessionOutcome]) -> list[FinishStatus]:
        """Reports outcomes. One that the server refuses is replaced by an error, and the others are still reported."""
        try:
            return await self._retry_until_reached(lambda: self._server.finish(self._context.node_id, outcomes))
        except ConfigError as error:
            if len(outcomes) > 1:
                return [status for outcome in outcomes for status in await self._finish([outcome])]
            (outcome,) = outcomes
            if outcome.reason == _RESULT_REFUSED:  # the server refuses this node, not the outcome
                raise
            log.error("The server refused a session's outcome: %s", error)
            refused = SessionOutcome(
                outcome.work_id, outcome.fence, outcome.session_id, reason=_RESULT_REFUSED, error=str(error)
            )
            return await self._finish([refused])

    async def _send_copies(self, outcomes: list[SessionOutcome]) -> None:
        """Sends copies of the sessions to a server that can't read this node's store."""
        assert self._join_response is not None
        if self._join_response.shares_store:
            return
        for outcome in outcomes:
            if outcome.session_id is not None:
                try:
                    data = await self._context.export_session(outcome.session_id)
                except StoreError as error:  # a session without its calls is useless: it has to be run again
                    _drop_result(outcome, "store_failed", error)
                    continue
                try:
                    await self._call_as_member(lambda data=data: self._server.send_session(self._context.node_id, data))  # type: ignore[misc]
                except ConfigError as error:  # too large, for example: the server would refuse it again
                    _drop_result(outcome, "copy_refused", error)

    def _release(self, lease_id: LeaseId) -> None:
        self._held.pop(lease_id, None)
        if not self._held:
            self._idle.set()

    # Orders

    async def _send_heartbeats(self) -> None:
        while True:
            self._beat_now.clear()
            beat = asyncio.ensure_future(self._call_as_member(self._send_heartbeat))
            change = asyncio.ensure_future(self._beat_now.wait())
            try:
                await asyncio.wait({beat, change}, return_when=asyncio.FIRST_COMPLETED)
                if beat.done():
                    self._apply_orders(beat.result())
            finally:
                for task in (beat, change):
                    task.cancel()
                await asyncio.gather(beat, change, return_exceptions=True)

    async def _send_heartbeat(self) -> HeartbeatResponse:
        holding = [lease_id for lease_id, session in self._held.items() if session.ended is None]
        beat = Heartbeat(
            holding,
            self._context.get_load(),
            seen=self._engine_follower.wanted.generation,
            applied=self._engine_follower.applied_generation,
            problems=self._engine_follower.problems,
            ending=self._ending,
        )
        if self._keep_alive is not None and self._join_response is not None:
            self._keep_alive.record(self._context.node_id, beat, self._join_response.beat)
        return await self._server.heartbeat(self._context.node_id, beat)

    def _apply_orders(self, orders: HeartbeatResponse) -> None:
        for lease_id in orders.lost:
            session = self._held.get(lease_id)
            if session is not None and session.ended is None:
                log.warning("The lease of a session of task %s was lost.", session.lease.task_id)
                session.cancel("lease_lost")
                self._release(lease_id)
        for cancel in orders.cancel:
            if cancel.held in self._held:
                self._held[cancel.held].cancel(cancel.reason)
        if orders.engines is not None:
            self._engine_follower.set_wanted(orders.engines)
        if orders.drain:
            self._draining.set()

    async def _follow_engines(self) -> None:
        assert self._join_response is not None
        await self._engine_follower.follow(self._join_response.beat)

    # The end

    async def _wait_until_drained(self) -> None:
        await self._draining.wait()
        log.info("The server drains this node: it takes no more sessions.")
        await (asyncio.Event() if self._context.stays_when_drained else self._idle).wait()

    def _announce_end(self) -> None:
        self._ending = True
        if self._context.mark_ending is not None:
            self._context.mark_ending()
        self._draining.set()
        self._beat_now.set()

    async def _wind_down(self, until: "set[asyncio.Future[Any]]") -> None:
        """Gives running sessions time to finish. The server leases this node nothing more, and should the node be
        killed, blames none of its sessions."""
        self._announce_end()
        if self._held:
            log.warning("Asked to stop: %d sessions get %g seconds.", len(self._held), self._context.drain_seconds)
        idle = asyncio.ensure_future(self._idle.wait())
        until = {*until, idle}
        await asyncio.wait(until, timeout=self._context.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if self._held:
            log.warning("%d sessions did not finish in time: other nodes will run them.", len(self._held))

    async def _leave(self, leasing: "asyncio.Task[None]", beating: "asyncio.Task[None]") -> None:
        """Hands back the sessions that still run, reports the rest and leaves, as far as the server can be reached."""
        leasing.cancel()
        for session in self._held.values():
            session.cancel(INTERRUPTED)
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._idle.wait()
                beating.cancel()  # a heartbeat answered after we left would make us join again
                await asyncio.wait({beating})
                if self._keep_alive is not None:
                    self._keep_alive.forget()
                await self._server.leave(self._context.node_id)
        except (TimeoutError, UnknownNode, ServerUnreachable, StoreError) as error:
            log.warning("Could not tell the server that this node stops (%r): it will notice.", error)


def _drop_result(outcome: SessionOutcome, reason: str, error: Exception) -> None:
    outcome.session_id, outcome.reward, outcome.reason, outcome.error = None, None, reason, str(error)


def _fill_outcome(outcome: SessionOutcome, finished: FinishedSession, cancelled: str | None) -> SessionOutcome:
    verdict = finished.verdict
    outcome.session_id = finished.session_id
    outcome.reward = verdict.reward
    outcome.reason = cancelled if verdict.reason == "cancelled" and cancelled is not None else verdict.reason
    outcome.error = finished.error
    outcome.outcome = None if finished.outcome is None else msgspec.to_builtins(finished.outcome)
    outcome.detail = verdict.detail
    outcome.evidence = verdict.evidence
    outcome.seconds = finished.seconds
    outcome.turns = finished.turns
    outcome.tokens = finished.tokens
    if finished.versions is not None:
        outcome.oldest_version, outcome.newest_version = finished.versions
    return outcome


class EngineFollower:
    """Applies the engines and policy that the rollout server desires.

    `applied_generation` is in force, except for `problems`, which are retried.
    """

    def __init__(
        self, apply: Callable[[DesiredEngines], Awaitable[EngineProblems]], on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when the applied generation or its problems have changed."""
        self._apply = apply
        self._on_change = on_change
        self._wanted_changed = asyncio.Event()
        self.wanted = DesiredEngines(-1)
        self.applied_generation = -1
        self.problems: EngineProblems = {}

    def set_wanted(self, engines: DesiredEngines) -> None:
        self.wanted = engines
        self._wanted_changed.set()

    async def follow(self, retry_seconds: float) -> None:
        """Runs until it is cancelled. Failures are retried after `retry_seconds`."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wanted_changed.wait()
                self._wanted_changed.clear()
                self.problems = {}
                # In a task of its own: an older generation may still wait for calls to end.
                tasks.create_task(self._apply_until_done(self.wanted, retry_seconds))

    async def _apply_until_done(self, wanted: DesiredEngines, retry_seconds: float) -> None:
        while True:
            try:
                problems = await self._apply(wanted)
            except Exception as error:
                log.exception("The desired state of the engines could not be applied")
                problems = {run: [repr(error)] for run in wanted.pools}
            if wanted is not self.wanted:
                return
            self.applied_generation, self.problems = wanted.generation, problems
            self._on_change()
            if not problems:
                return
            await asyncio.sleep(retry_seconds)
