"""The server, as nodes see it (protocol.Server): who is alive, who has what, and what each may have next."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial

from polar.config import ServerSettings
from polar.engines.wanted import Engines, PoolState
from polar.errors import StoreError
from polar.rollout.events import Events
from polar.rollout.ledger import Ledger
from polar.rollout.members import Member
from polar.rollout.policy import Policy
from polar.rollout.protocol import (
    NOT_RUNNABLE,
    Answer,
    Beat,
    Ended,
    Held,
    Joined,
    Joining,
    Lease,
    Orders,
    UnknownNode,
)
from polar.rollout.queue import Queue
from polar.rollout.records import Allowance, Change, Lane, Tracked
from polar.rollout.results import form_of
from polar.rollout.runs import freshness
from polar.store.base import Store

log = logging.getLogger(__name__)

_UNLIMITED = 1 << 31
_SLOWEST_RETRY = 30.0  # seconds
_REMEMBERED = 1000  # nodes that seem to have died


class Leasing:
    def __init__(
        self,
        queue: Queue,
        ledger: Ledger,
        policy: Policy,
        events: Events,
        settings: ServerSettings,
        *,
        store: Store,
        store_id: str,
        later: Callable[[float, Callable[[], Awaitable[None]]], None],
        recount: Callable[[], Awaitable[None]],
    ) -> None:
        """`later` has something done after so many seconds; `recount` is for when the queue is in doubt."""
        self._queue = queue
        self._ledger = ledger
        self._policy = policy
        self._events = events
        self._settings = settings
        self._store = store
        self._store_id = store_id
        self._later = later
        self._recount = recount
        self._refused: dict[tuple[str, str], tuple[Lane, set[str]]] = {}  # tasks, and the nodes that can't run them
        self._resting: set[int] = set()  # work that waits for another try, and will get it
        self._taking = asyncio.Lock()  # quotas are looked at and used up by one at a time
        self._moved = asyncio.Condition()  # a node has applied something, or is no more
        self._watching = False  # there may be work under which nodes have died
        self._marked_by: dict[str, list[int]] = {}  # nodes that seem to have died, and the work that was marked for it
        self.members: dict[str, Member] = {}
        self.sleeper: str | None = None  # the node that sends engines to sleep, and wakes them

    async def restore(self) -> None:
        """What the database says, as far as it is not known: who has what (nodes that were not heard of yet have a full
        term to be), and what waits for another try."""
        for tracked in await self._queue.leases():
            member = self.members.setdefault(tracked.node, Member(tracked.node))
            if not member.lost:
                member.has(tracked)
        self._watching = True
        for work_id in await self._queue.waiting():
            self._rest(work_id, self._settings.beat_seconds)

    async def join(self, joining: Joining) -> Joined:
        for dead in joining.replaces:
            if dead in self.members:
                self.members[dead].ending |= dead in joining.stopped
                await self.lose(self.members[dead], died=True)
        member = self.members.get(joining.node_id)
        if member is not None and member.lost:
            await self.lose(member, died=True)  # to its end: it is not to be taken from the one that joins now
        if (marked := self._marked_by.pop(joining.node_id, None)) is not None:  # it was only silent
            await self._queue.acquit(marked)
        if self.members.get(joining.node_id) is None:
            member = Member(joining.node_id)
            for tracked in await self._queue.leases_of(joining.node_id):  # what the database says it has, it has
                member.has(tracked)
            self.members.setdefault(joining.node_id, member)  # unless it was quicker, in another call
        member = self.members[joining.node_id]
        if member.joined is None:
            self._events.publish("node.joined", node_id=joining.node_id, name=joining.name)
        member.joined = joining
        member.hear()
        return Joined(
            term=self._settings.lease_seconds,
            beat=self._settings.beat_seconds,
            shares_store=joining.store == self._store_id,
            engines=self._engines_for(joining.node_id),
        )

    def _member(self, node_id: str) -> Member:
        member = self.members.get(node_id)
        if member is None or member.joined is None or member.lost:
            raise UnknownNode(f"There is no node {node_id} (any more): join again.")
        member.hear()
        return member

    # Work

    async def lease(self, node_id: str, holding: list[Held], room: int) -> list[Lease]:
        member = self._member(node_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.beat_seconds
        while True:
            async with self._taking:
                if self._queue.doubtful:
                    await self._recount()
                if member.lost:  # while this waited: it must not get again what was just taken from it
                    raise UnknownNode(f"Node {node_id} is counted among the lost: join again.")
                given = await self._take(member, holding, room)
            if len(given) >= room:
                self._ledger.feed()  # there may be more, for others
            left = deadline - loop.time()
            if given or left <= 0:
                return given
            await self._ledger.hunger(member.backends, left)

    async def _take(self, member: Member, holding: list[Held], room: int) -> list[Lease]:
        allowances = [] if member.draining or room <= 0 else self._allowances(member)
        if not allowances and member.leases.keys() <= set(holding):
            return []
        unfit = self._unfit(member)
        pairs = await self._queue.lease(member.node_id, holding, allowances, room, member.slots, unfit)
        for lease, tracked in pairs:
            if tracked.held not in member.leases:  # else it comes again
                member.has(tracked)
                self._ledger.leased(tracked.lane, lease.task_id, lease.sample, member.node_id)
        return [lease for lease, _ in pairs]

    def _allowances(self, member: Member) -> list[Allowance]:
        busy: defaultdict[str, int] = defaultdict(int)
        for lane, counts in self._ledger.lanes.items():
            busy[lane.run] += counts.leased
        found = []
        for lane, counts in self._ledger.lanes.items():
            if counts.queued > 0 and lane.name in member.backends:
                most = self._may_begin(lane.run, busy[lane.run])
                if most > 0:
                    version, isolates = self._policy.newest(lane.run), self._isolates(member, lane)
                    found.append(Allowance(lane, most, busy[lane.run], version, isolates))
        return found

    def _isolates(self, member: Member, lane: Lane) -> bool:
        """One node is kept free for work that is to run alone, so that it gets its turn while all are busy."""
        able = (one.node_id for one in self.members.values() if lane.name in one.backends and not one.draining)
        return member.node_id == min(able, default=None)

    def _unfit(self, member: Member) -> frozenset[tuple[str, str]]:
        """Tasks that a node can't run, and that others may be able to."""
        able = [one for one in self.members.values() if one.joined is not None and not one.draining]
        return frozenset(
            task
            for task, (lane, refused) in self._refused.items()
            if member.node_id in refused
            and any(one.node_id not in refused and lane.name in one.backends for one in able)
        )

    def _may_begin(self, run: str, busy: int) -> int:
        """How many sessions of a run may begin now."""
        quotas = self._policy.quotas(run)
        limits = [_UNLIMITED]
        if quotas.max_running is not None:
            limits.append(quotas.max_running - busy)
        if quotas.ahead is not None:
            limits.append(quotas.ahead - busy - self._ledger.untaken[run])
        return min(limits)

    async def finish(self, node_id: str, ended: list[Ended]) -> list[Answer]:
        """Whoever says it: the fence decides."""
        member = self.members.get(node_id)
        if member is not None:
            member.hear()
        for one in ended:
            one.node_id = node_id
            tracked = None if member is None else member.leases.get(one.held)
            if tracked is not None:
                form = form_of(tracked.request)
                one.builder, one.mask_traces = form.builder, form.mask_traces
                self._judge_age(one, tracked)
                if one.stale and one.reason == "stale" and one.session_id is not None:
                    # Before its end is written: where the store fails, the node tells it again, and so is this.
                    await self._store.disown_session(one.session_id, "stale")
        outcomes = await self._queue.finish(ended, self._settings.attempts)
        for one, outcome in zip(ended, outcomes, strict=True):
            if member is not None:
                member.drop(one.held)
            if outcome.change is not None:
                self._note(outcome.change)
        self._ledger.feed()
        return [outcome.answer for outcome in outcomes]

    def _note(self, change: Change) -> None:
        self._ledger.changed(change)
        if change.enough:
            self.cancel(change.lane.run, change.task_id, "early_stop")
        if change.task is not None:
            self._refused.pop((change.lane.run, change.task_id), None)
        elif change.ended.reason == NOT_RUNNABLE and change.ended.node_id is not None:
            _, refused = self._refused.setdefault((change.lane.run, change.task_id), (change.lane, set()))
            refused.add(change.ended.node_id)
        if change.became == "waiting":
            log.info("Task %s, sample %d is tried again: %s.", change.task_id, change.sample, change.ended.reason)
            # After a while, longer each time: what failed may need it.
            self._rest(change.ended.work_id, min(2.0 ** min(change.ended.fence, 9), _SLOWEST_RETRY))

    def _rest(self, work_id: int, seconds: float) -> None:
        if work_id not in self._resting:
            self._resting.add(work_id)
            self._later(seconds, partial(self._go_on, work_id))

    async def _go_on(self, work_id: int) -> None:
        self._resting.discard(work_id)
        try:
            lanes = await self._queue.go_on([work_id])
        except StoreError as error:
            log.warning("Work %d waits for the store: %s", work_id, error)
            self._rest(work_id, self._settings.beat_seconds)
            return
        for lane in lanes:
            counts = self._ledger.counts(lane)
            counts.waiting -= 1
            counts.queued += 1
        self._ledger.feed()

    def _judge_age(self, ended: Ended, tracked: Tracked) -> None:
        wanted = freshness(tracked.request)
        newest = self._policy.newest(tracked.lane.run)
        oldest = tracked.version if ended.oldest_version is None else ended.oldest_version
        ended.lag = None if oldest is None else newest - oldest
        ended.stale = wanted.too_old(oldest, newest)
        if ended.stale and wanted.on_stale == "cancel" and ended.reason in (None, "cancelled"):
            ended.reward, ended.reason = None, "stale"

    async def send_session(self, node_id: str, data: bytes) -> None:
        self._member(node_id)
        await self._store.import_session(data)

    # Orders

    async def beat(self, node_id: str, beat: Beat) -> Orders:
        member = self._member(node_id)
        if beat.ending:
            member.draining = member.ending = True
        told = beat.seen, beat.applied, beat.problems
        if told != (member.heard, member.applied, member.problems):
            member.heard, member.applied, member.problems = told
            await self._notify()
        orders = await member.orders(beat, self._policy.engines.generation, self._settings.beat_seconds)
        if member.lost:
            raise UnknownNode(f"Node {node_id} was silent for too long: join again.")
        engines = self._policy.engines
        orders.engines = self._engines_for(node_id) if engines.generation != beat.seen else None
        return orders

    def cancel(self, run: str, task_id: str, reason: str) -> int:
        """Of a task, what runs: its nodes are told to end it. How many there are."""
        return self._cancel(lambda one: (one.lane.run, one.task_id) == (run, task_id), reason)

    def cancel_stale(self, run: str) -> None:
        newest = self._policy.newest(run)

        def is_stale(tracked: Tracked) -> bool:
            if self._policy.urls(tracked.lane.run) != self._policy.urls(run):
                return False
            wanted = freshness(tracked.request)
            return wanted.on_stale == "cancel" and wanted.too_old(tracked.version, newest)

        self._cancel(is_stale, "stale")

    def _cancel(self, wanted: Callable[[Tracked], bool], reason: str) -> int:
        count = 0
        for member in self.members.values():
            for tracked in member.leases.values():
                if wanted(tracked):
                    member.cancel(tracked.held, reason)
                    count += 1
        return count

    def tell_all(self) -> None:
        for member in self.members.values():
            member.tell()

    def _engines_for(self, node_id: str) -> Engines:
        """All nodes share the engines: one of them is enough to send them to sleep, and not every engine stands being
        told twice."""
        engines = self._policy.engines
        if node_id == self.sleeper:
            return engines
        pools = {
            run: PoolState(pool.replicas, "hold" if pool.paused == "sleep" else pool.paused, pool.since)
            for run, pool in engines.pools.items()
        }
        return Engines(engines.generation, pools, engines.server)

    async def applied(self, generation: int, seconds: float) -> list[Member]:
        """Waits until every node that is alive has done what it could: those that have not."""
        try:
            async with asyncio.timeout(seconds), self._moved:
                await self._moved.wait_for(lambda: not self._behind(generation))
        except TimeoutError:
            pass
        return self._behind(generation)

    def _behind(self, generation: int) -> list[Member]:
        """Also those of which only the database knows yet: their sessions may well be running."""
        return [one for one in self.members.values() if one.applied < generation and (one.joined or one.leases)]

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    # Ends

    async def drain(self, node_id: str) -> bool:
        """It gets no more work, and leaves when all is done. False where there is no such node."""
        member = self.members.get(node_id)
        if member is None:
            return False
        member.draining = True
        member.tell()
        return True

    async def leave(self, node_id: str) -> None:
        member = self.members.get(node_id)
        if member is not None:
            await self.lose(member, died=False)

    async def lose(self, member: Member, *, died: bool) -> None:
        """A node is no more. Where the database fails, it is to be tried again."""
        member.lost = True  # from here on it has to join again
        marks = died and not member.ending
        if marks and self._watching:
            # Of one that was here before this server, nobody knows how long: rather too long, to the work's favour.
            await self.record_lifetimes({} if member.joined else {member.node_id: self._settings.lease_seconds})
        changes = await self._queue.lose(member.node_id, died=marks)
        if marks and changes:
            self._watching = True
            self._marked_by[member.node_id] = [one.ended.work_id for one in changes if one.became == "queued"]
            while len(self._marked_by) > _REMEMBERED:
                del self._marked_by[next(iter(self._marked_by))]
        if self.members.get(member.node_id) is member:
            del self.members[member.node_id]
        for change in changes:
            self._note(change)
        self._events.publish("node.lost" if died else "node.left", node_id=member.node_id, sessions=len(changes))
        if died:
            self._ledger.watcher.expired(len(changes))
            log.warning("Node %s is lost; %d sessions go to others.", member.node_id, len(changes))
        self._ledger.feed()
        await self._notify()

    async def lose_silent(self, now: float) -> None:
        """Those that were not heard of for a term. (`now`: before anything was waited for, lest this stood still.)"""
        for member in list(self.members.values()):
            if member.lost or now - member.seen > self._settings.lease_seconds:
                await self.lose(member, died=True)

    async def record_lifetimes(self, others: dict[str, float] | None = None) -> None:
        """Where nodes have died under some work: how long others live meanwhile (blame.py)."""
        lived = {member.node_id: member.take_lifetime() for member in self.members.values() if member.joined}
        if self._watching:
            self._watching = await self._queue.record_lifetimes(lived | (others or {}))

    def give_term(self) -> None:
        """We stood still ourselves, and have heard of nobody meanwhile."""
        for member in self.members.values():
            member.hear()
