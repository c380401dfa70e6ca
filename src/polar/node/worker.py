"""A node at work for a rollout server: it leases sessions, runs them, shows that it lives, and tells what came of them.

    lease ─► plan ─► submit ─► Finished ─► outbox ─► finish

The server may be here or elsewhere (protocol.Server), and may be away for a while: sessions go on meanwhile, and what
has ended waits in the outbox. Each lease is held from when it comes until the server has answered to its end, or has
said that it is lost. What is lost is cancelled here, and nobody hears of it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from polar.engines.wanted import Engines
from polar.errors import ConfigError, PolarError, StoreError
from polar.node.finished import Finished
from polar.node.following import Following, Problems
from polar.node.keep_alive import KeepAlive
from polar.node.plan import Plan
from polar.node.planning import Plans
from polar.rollout.models import TaskRequest
from polar.rollout.protocol import (
    INTERRUPTED,
    NOT_RUNNABLE,
    Answer,
    Beat,
    Ended,
    Held,
    Joined,
    Joining,
    Lease,
    Orders,
    Server,
    UnknownNode,
    Unreachable,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_BATCH = 128  # ends that are told at once
_REFUSED = "result_refused"  # why there is no reward: the server can't keep what was told of the end
_FIRST_WAIT, _LAST_WAIT = 0.1, 5.0  # seconds between two tries to reach the server
_PARTING = 20.0  # seconds in which a node that closes tells what it still can


class Running(Protocol):
    """A session that was taken in (node.Running)."""

    @property
    def finished(self) -> "asyncio.Future[Finished]": ...

    def cancel(self) -> bool: ...


class Host(Protocol):
    """What runs sessions (node.Node)."""

    async def plan(self, task: TaskRequest) -> Plan: ...

    async def room(self) -> None: ...

    def free(self) -> int: ...

    async def submit(self, plan: Plan, sample: int, work_id: int) -> Running: ...


class Place(Struct):
    """Where a worker works."""

    node_id: str
    name: str
    backends: list[str]
    slots: int
    store: str  # the id of the store that sessions are written to
    replaces: list[str]
    load: Callable[[], dict[str, Any]]
    apply: Callable[[Engines], Awaitable[Problems]]  # makes engines and policy be like this here
    export: Callable[[str], Awaitable[bytes]]  # a copy of a session
    disown: Callable[[str, str], Awaitable[None]]  # a session, for a reason: another one stands for its sample
    stopped: list[str] = []  # of those that it replaces, the ones that had been told to end
    mark_ending: Callable[[], None] | None = None  # leaves a note that this one was told to end
    drain_seconds: float = 0.0  # that sessions may go on when the node is told to drain
    stays: bool = False  # drained, it takes no more sessions, but goes on following what is said of engines


class _Session:
    """A lease, and what goes on because of it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.running: Running | None = None
        self.cancelled: str | None = None  # why
        self.ended: Ended | None = None

    def cancel(self, reason: str) -> None:
        if self.cancelled is None:
            self.cancelled = reason
            if self.running is not None:
                self.running.cancel()


class Worker:
    def __init__(self, server: Server, host: Host | None, place: Place, keep_alive: KeepAlive | None = None) -> None:
        """Without a host it leases nothing, and only follows what is said of engines and the policy. `keep_alive` beats
        while this loop is busy; a server on the same loop is just as busy, and needs none."""
        self._server = server
        self._host = host
        self._place = place
        self._keep_alive = keep_alive
        self._held: dict[Held, _Session] = {}
        self._plans = None if host is None else Plans(host.plan)
        self._outbox: list[_Session] = []
        self._posted = asyncio.Event()  # something is in the outbox
        self._idle = asyncio.Event()  # nothing is held
        self._idle.set()
        self._joined: Joined | None = None
        self._joining = asyncio.Lock()
        self._tell = asyncio.Event()  # there is something to say before the next beat
        self._following = Following(place.apply, self._tell.set)
        self._draining = asyncio.Event()
        self._ending = False  # somebody told this process to end
        self._pause = 0.0  # seconds before more is leased, where sessions can't begin
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def node_id(self) -> str:
        return self._place.node_id

    async def run(self, stop: asyncio.Event, drain: asyncio.Event | None = None) -> None:
        """Until `stop`, or until the server has it drained. Then what still runs is handed back, and it leaves. With
        `drain`, sessions first get `drain_seconds` to end by themselves, and no more begin."""
        stopping = asyncio.ensure_future(stop.wait())
        winding_down = asyncio.ensure_future((drain or asyncio.Event()).wait())
        ends = {stopping, winding_down}
        joining = asyncio.ensure_future(self._join())
        await asyncio.wait({*ends, joining}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():  # it is told to end before a server answered
            for task in (joining, *ends):
                task.cancel()
            return
        joining.result()
        loops = [self._spawn(work) for work in (self._lease, self._beat, self._send, self._follow_engines)]
        draining = asyncio.ensure_future(self._drained())
        try:
            await asyncio.wait({*ends, draining, *loops}, return_when=asyncio.FIRST_COMPLETED)
            if winding_down.done() and not stopping.done():
                await self._wind_down({stopping, *loops})
            elif stopping.done():
                self._announce_end()
            failed = [loop for loop in loops if loop.done()]
            await self._part(leasing=loops[0], beating=loops[1])
            for loop in failed:
                loop.result()  # raises
        finally:
            for task in (*ends, draining, *self._tasks):
                task.cancel()
            await asyncio.gather(*ends, draining, *self._tasks, return_exceptions=True)

    def _spawn(self, work: Callable[..., Awaitable[None]], *arguments: Any) -> "asyncio.Task[None]":
        async def done() -> None:
            await work(*arguments)

        task = asyncio.get_running_loop().create_task(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # The server

    async def _join(self) -> None:
        place = self._place
        joining = Joining(
            node_id=place.node_id,
            name=place.name,
            backends=place.backends,
            slots=place.slots,
            store=place.store,
            replaces=place.replaces,
            stopped=place.stopped,
        )
        self._joined = await self._reach(lambda: self._server.join(joining))
        self._following.want(self._joined.engines)

    async def _reach(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until the server answers."""
        wait = _FIRST_WAIT
        while True:
            try:
                return await call()
            except (Unreachable, StoreError) as error:
                log.log(logging.WARNING if wait == _FIRST_WAIT else logging.DEBUG, "%s", error)
            await asyncio.sleep(wait)
            beat = _LAST_WAIT if self._joined is None else self._joined.beat
            wait = min(2 * wait, _LAST_WAIT, beat)  # a server that is back has to hear of us within a term

    async def _say(self, call: Callable[[], Awaitable[T]]) -> T:
        """The same, as a member: where the server does not know us, we join first."""
        while True:
            joined = self._joined
            try:
                return await self._reach(call)
            except UnknownNode as error:
                async with self._joining:
                    if self._joined is joined:  # else another of our calls has done so
                        log.warning("%s", error)
                        await self._join()

    # Work

    async def _lease(self) -> None:
        host = self._host
        while host is not None and not self._draining.is_set():  # whatever a server that was started since then says
            await asyncio.sleep(self._pause)
            await host.room()
            beginning = sum(session.running is None and session.ended is None for session in self._held.values())
            room = host.free() - beginning
            if room <= 0:
                await asyncio.sleep(0.01)  # those that begin are about to take their places
                continue
            for lease in await self._say(
                lambda room=room: self._server.lease(self._place.node_id, list(self._held), room)  # type: ignore[misc]
            ):
                if lease.held not in self._held:
                    session = self._held[lease.held] = _Session(lease)
                    self._idle.clear()
                    self._spawn(self._live, session)
        await asyncio.Event().wait()

    async def _live(self, session: _Session) -> None:
        """One session, to its place in the outbox."""
        session.ended = await self._lived(session)
        if self._held.get(session.lease.held) is session:
            self._outbox.append(session)
            self._posted.set()
        else:  # it was lost meanwhile, and may have come again
            await self._disown(session.ended)

    async def _disown(self, ended: Ended) -> None:
        """What it earned, another session earns: nobody is to find both."""
        if ended.session_id is not None:
            try:
                await self._place.disown(ended.session_id, "superseded")
            except StoreError as error:
                log.error(
                    "Session %s still has its reward, though another one took its place: %s", ended.session_id, error
                )

    async def _lived(self, session: _Session) -> Ended:
        lease, host = session.lease, self._host
        assert host is not None
        assert self._plans is not None
        ended = Ended(lease.work_id, lease.fence, None)
        try:
            plan = await self._plans.of(lease)
            if self._ending:  # it was on its way here: others may have it
                ended.reason = INTERRUPTED
                return ended
            try:
                session.running = await host.submit(plan, lease.sample, lease.work_id)
            except (StoreError, OSError) as error:
                # Our disk is full, say. Nothing was begun: others may have it, and we take no more for a while.
                log.warning("A session of task %s could not begin here: %s", lease.task_id, error)
                self._pause = min(2 * self._pause or _FIRST_WAIT, _LAST_WAIT)
                ended.reason, ended.error = INTERRUPTED, str(error)
                return ended
        except ConfigError as error:  # others may be able to
            self._pause = min(2 * self._pause or _FIRST_WAIT, _LAST_WAIT)
            ended.reason, ended.error = NOT_RUNNABLE, str(error)
            return ended
        except Exception as error:
            if not isinstance(error, PolarError):
                log.exception("A session of task %s could not begin", lease.task_id)
            ended.reason, ended.error = "node_failed", str(error)
            return ended
        self._pause = 0.0
        if session.cancelled is not None:  # while it began
            session.running.cancel()
        try:
            # Shielded: who ends this ends not the session, which is being torn down.
            return _told(ended, await asyncio.shield(session.running.finished), session.cancelled)
        except Exception as error:
            log.exception("A session of task %s failed", lease.task_id)
            ended.reason, ended.error = "node_failed", repr(error)
            return ended

    async def _send(self) -> None:
        while True:
            await self._posted.wait()
            batch = self._outbox[:_BATCH]
            ended = [session.ended for session in batch if session.ended is not None]
            await self._send_copies(ended)
            answers = await self._finish(ended)
            del self._outbox[: len(batch)]
            for session, answer in zip(batch, answers, strict=True):
                if answer == "lost":
                    log.warning("Session of task %s came too late: it was leased anew.", session.lease.task_id)
                    if session.ended is not None:
                        await self._disown(session.ended)
                self._drop(session.lease.held)
            if not self._outbox:
                self._posted.clear()

    async def _finish(self, ended: list[Ended]) -> list[Answer]:
        """Where one can't be taken as it is, the others are, and its work ends all the same."""
        try:
            return await self._reach(lambda: self._server.finish(self._place.node_id, ended))
        except ConfigError as error:
            if len(ended) > 1:
                return [answer for one in ended for answer in await self._finish([one])]
            (one,) = ended
            if one.reason == _REFUSED:  # it is not what is said, but who says it
                raise
            log.error("The end of a session was not taken: %s", error)
            refused = Ended(one.work_id, one.fence, one.session_id, reason=_REFUSED, error=str(error))
            return await self._finish([refused])

    async def _send_copies(self, ended: list[Ended]) -> None:
        """Where the server can't read our store, it gets what it needs of it."""
        assert self._joined is not None
        if self._joined.shares_store:
            return
        for one in ended:
            if one.session_id is not None:
                try:
                    data = await self._place.export(one.session_id)
                except StoreError as error:  # without its calls it is of no use; another try has some
                    one.session_id, one.reward, one.reason, one.error = None, None, "store_failed", str(error)
                    continue
                try:
                    await self._say(lambda data=data: self._server.send_session(self._place.node_id, data))  # type: ignore[misc]
                except ConfigError as error:  # too large, say: it will not be taken the next time either
                    one.session_id, one.reward, one.reason, one.error = None, None, "copy_refused", str(error)

    def _drop(self, held: Held) -> None:
        self._held.pop(held, None)
        if not self._held:
            self._idle.set()

    # Orders

    async def _beat(self) -> None:
        while True:
            self._tell.clear()
            beat = asyncio.ensure_future(self._say(self._beat_once))
            tell = asyncio.ensure_future(self._tell.wait())
            try:
                await asyncio.wait({beat, tell}, return_when=asyncio.FIRST_COMPLETED)
                if beat.done():
                    self._follow(beat.result())
            finally:
                for task in (beat, tell):
                    task.cancel()
                await asyncio.gather(beat, tell, return_exceptions=True)

    async def _beat_once(self) -> Orders:
        holding = [held for held, session in self._held.items() if session.ended is None]
        beat = Beat(
            holding,
            self._place.load(),
            seen=self._following.wanted.generation,
            applied=self._following.applied,
            problems=self._following.problems,
            ending=self._ending,
        )
        if self._keep_alive is not None and self._joined is not None:
            self._keep_alive.record(self._place.node_id, beat, self._joined.beat)
        return await self._server.beat(self._place.node_id, beat)

    def _follow(self, orders: Orders) -> None:
        for held in orders.lost:
            session = self._held.get(held)
            if session is not None and session.ended is None:
                log.warning("A session of task %s was lost to another node.", session.lease.task_id)
                session.cancel("lease_lost")
                self._drop(held)
        for cancel in orders.cancel:
            if cancel.held in self._held:
                self._held[cancel.held].cancel(cancel.reason)
        if orders.engines is not None:
            self._following.want(orders.engines)
        if orders.drain:
            self._draining.set()

    async def _follow_engines(self) -> None:
        assert self._joined is not None
        await self._following.follow(self._joined.beat)

    # The end

    async def _drained(self) -> None:
        await self._draining.wait()
        log.info("The server has this node drained: it takes no more sessions.")
        await (asyncio.Event() if self._place.stays else self._idle).wait()

    def _announce_end(self) -> None:
        self._ending = True
        if self._place.mark_ending is not None:
            self._place.mark_ending()
        self._draining.set()
        self._tell.set()

    async def _wind_down(self, until: "set[asyncio.Future[Any]]") -> None:
        """Sessions get some time to end; the server gives this node no more, and blames none should it be killed."""
        self._announce_end()
        if self._held:
            log.warning("Told to end: %d sessions get %g seconds.", len(self._held), self._place.drain_seconds)
        idle = asyncio.ensure_future(self._idle.wait())
        until = {*until, idle}
        await asyncio.wait(until, timeout=self._place.drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if self._held:
            log.warning("%d sessions did not end in time: others get them.", len(self._held))

    async def _part(self, leasing: "asyncio.Task[None]", beating: "asyncio.Task[None]") -> None:
        """Hands back what still runs, tells all that is known, and leaves; as far as the server can be reached."""
        leasing.cancel()
        for session in self._held.values():
            session.cancel(INTERRUPTED)
        try:
            async with asyncio.timeout(_PARTING):
                await self._idle.wait()
                beating.cancel()  # a beat that is answered after we left would make us join again
                await asyncio.wait({beating})
                if self._keep_alive is not None:
                    self._keep_alive.forget()
                await self._server.leave(self._place.node_id)
        except (TimeoutError, UnknownNode, Unreachable, StoreError) as error:
            log.warning("The server was not told that this node ends (%r): it will notice.", error)


def _told(ended: Ended, finished: Finished, cancelled: str | None) -> Ended:
    verdict = finished.verdict
    ended.session_id = finished.session_id
    ended.reward = verdict.reward
    ended.reason = cancelled if verdict.reason == "cancelled" and cancelled is not None else verdict.reason
    ended.error = finished.error
    ended.outcome = None if finished.outcome is None else msgspec.to_builtins(finished.outcome)
    ended.detail = verdict.detail
    ended.evidence = verdict.evidence
    ended.seconds = finished.seconds
    ended.turns = finished.turns
    ended.tokens = finished.tokens
    if finished.versions is not None:
        ended.oldest_version, ended.newest_version = finished.versions
    return ended
