"""The rollout server as nodes see it (protocol.RolloutServer): membership, leases, heartbeats and outcomes."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from msgspec import Struct

from polar.config import ServerSettings
from polar.engines.base import DesiredEngines, DesiredPool
from polar.errors import StoreError
from polar.records.session import NOT_RUNNABLE
from polar.rollout.events import EventBus
from polar.rollout.ledger import Ledger
from polar.rollout.protocol import (
    CancelOrder,
    FinishStatus,
    Heartbeat,
    HeartbeatResponse,
    JoinRequest,
    JoinResponse,
    Lease,
    LeaseId,
    SessionOutcome,
    UnknownNode,
)
from polar.rollout.queue import Queue
from polar.rollout.queue.records import Lane, LeaseAllowance, TrackedLease, WorkChange
from polar.rollout.results import parse_result_form
from polar.rollout.runs import RunRegistry, parse_staleness_limits
from polar.store.base import Store

log = logging.getLogger(__name__)

_UNLIMITED = 1 << 31
_MAX_RETRY_SECONDS = 30.0
_MAX_REMEMBERED_NODES = 1000  # nodes that were declared dead


class NodeView(Struct):
    """A node, as the control plane shows it."""

    node_id: str
    name: str
    backends: list[str]
    slots: int
    leases: int
    load: dict[str, Any]
    seen: float  # seconds ago
    draining: bool


class NodeMember:
    """A node that is alive as far as the server knows, and its leases.

    A node stays a member as long as it sends heartbeats. Times are those of the event loop's clock, which cannot be set
    back. After a restart, and after the server itself was suspended, every node gets a full term.
    """

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.registration: JoinRequest | None = None
        """None: known only from leases in the database; the node has not called yet."""
        self.leases: dict[LeaseId, TrackedLease] = {}
        self.cancelled: dict[LeaseId, str] = {}  # the reasons
        self.load: dict[str, Any] = {}
        self.seen_generation = -1  # the newest generation of the engines that was sent to it
        self.applied_generation = -1
        self.problems: dict[str, list[str]] = {}  # by run
        self.draining = False
        self.ending = False  # it was asked to stop
        self.lost = False
        self.last_seen = asyncio.get_running_loop().time()
        self._lifetime_recorded_at = self.last_seen
        self._wake = asyncio.Event()

    @property
    def name(self) -> str:
        return self.registration.name if self.registration is not None else self.node_id

    @property
    def backends(self) -> frozenset[str]:
        return frozenset(self.registration.backends) if self.registration is not None else frozenset()

    @property
    def slots(self) -> int:
        return self.registration.slots if self.registration is not None else 0

    def to_view(self) -> NodeView | None:
        """None where the node has not called yet."""
        joined = self.registration
        if joined is None:
            return None
        return NodeView(
            node_id=self.node_id,
            name=joined.name,
            backends=joined.backends,
            slots=joined.slots,
            leases=len(self.leases),
            load=self.load,
            seen=asyncio.get_running_loop().time() - self.last_seen,
            draining=self.draining,
        )

    def mark_alive(self) -> None:
        self.last_seen = asyncio.get_running_loop().time()

    def take_lifetime(self) -> float:
        """The seconds that the node has lived since the last call of this."""
        seconds, self._lifetime_recorded_at = self.last_seen - self._lifetime_recorded_at, self.last_seen
        return seconds

    def add_lease(self, tracked: TrackedLease) -> None:
        """Adds a lease, which may be cancelled already."""
        self.leases[tracked.lease_id] = tracked
        if tracked.cancelled is not None:
            self.cancel(tracked.lease_id, tracked.cancelled)

    def cancel(self, lease_id: LeaseId, reason: str) -> None:
        if lease_id in self.leases and lease_id not in self.cancelled:
            self.cancelled[lease_id] = reason
            self._wake.set()

    def drop_lease(self, lease_id: LeaseId) -> None:
        self.cancelled.pop(lease_id, None)
        self.leases.pop(lease_id, None)

    def wake(self) -> None:
        """Lets the pending heartbeat be answered now."""
        self._wake.set()

    async def wait_for_orders(self, heartbeat: Heartbeat, generation: int, seconds: float) -> HeartbeatResponse:
        """Answers a heartbeat: at once where there are orders, else after `seconds`."""
        self.load = heartbeat.load
        lost = [lease_id for lease_id in heartbeat.holding if lease_id not in self.leases]
        if not lost and not self._wake.is_set() and heartbeat.seen == generation:
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()
        return HeartbeatResponse(
            lost=lost,
            cancel=[CancelOrder(lease_id, reason) for lease_id, reason in self.cancelled.items()],
            drain=self.draining,
        )


class LeaseManager:
    def __init__(
        self,
        queue: Queue,
        ledger: Ledger,
        run_registry: RunRegistry,
        events: EventBus,
        settings: ServerSettings,
        *,
        store: Store,
        store_id: str,
        schedule: Callable[[float, Callable[[], Awaitable[None]]], None],
        recount_if_uncertain: Callable[[], Awaitable[None]],
    ) -> None:
        """`schedule` runs a function after a delay. `recount_if_uncertain` recounts the queue where it is unknown
        whether a commit was made."""
        self._queue = queue
        self._ledger = ledger
        self._run_registry = run_registry
        self._events = events
        self._settings = settings
        self._store = store
        self._store_id = store_id
        self._schedule = schedule
        self._recount_if_uncertain = recount_if_uncertain
        self._unrunnable: dict[tuple[str, str], tuple[Lane, set[str]]] = {}  # tasks, and the nodes that can't run them
        self._awaiting_retry: set[int] = set()  # work whose retry is scheduled
        self._lease_lock = asyncio.Lock()  # checks a quota and uses it in one step
        self._members_changed = asyncio.Condition()  # a node has applied a generation, or has left
        self._tracks_lifetimes = False  # there may be work under which nodes have died
        self._suspects_by_node: dict[
            str, list[int]
        ] = {}  # nodes that were declared dead, and the work that was marked as suspect for it
        self.members: dict[str, NodeMember] = {}
        self.sleep_node_id: str | None = None  # the node that puts engines to sleep and wakes them

    async def restore(self) -> None:
        """Restores leases and scheduled retries from the database. Nodes that have not called yet get a full term."""
        for tracked in await self._queue.list_leases():
            member = self.members.setdefault(tracked.node, NodeMember(tracked.node))
            if not member.lost:
                member.add_lease(tracked)
        self._tracks_lifetimes = True
        for work_id in await self._queue.list_waiting_work():
            self._schedule_retry(work_id, self._settings.beat_seconds)

    async def join(self, request: JoinRequest) -> JoinResponse:
        for node_id in request.replaces:
            if node_id in self.members:
                self.members[node_id].ending |= node_id in request.stopped
                await self.remove_member(self.members[node_id], died=True)
        member = self.members.get(request.node_id)
        if member is not None and member.lost:
            await self.remove_member(member, died=True)  # finish a removal that has begun, before the node joins again
        if (suspect_work := self._suspects_by_node.pop(request.node_id, None)) is not None:  # it was silent, not dead
            await self._queue.retract_kills(suspect_work)
        if self.members.get(request.node_id) is None:
            member = NodeMember(request.node_id)
            for tracked in await self._queue.list_node_leases(request.node_id):  # the database decides
                member.add_lease(tracked)
            self.members.setdefault(request.node_id, member)  # unless a concurrent call was faster
        member = self.members[request.node_id]
        if member.registration is None:
            self._events.publish("node.joined", node_id=request.node_id, name=request.name)
        member.registration = request
        member.mark_alive()
        return JoinResponse(
            term=self._settings.lease_seconds,
            beat=self._settings.beat_seconds,
            shares_store=request.store == self._store_id,
            engines=self._get_desired_engines(request.node_id),
        )

    def _require_member(self, node_id: str) -> NodeMember:
        member = self.members.get(node_id)
        if member is None or member.registration is None or member.lost:
            raise UnknownNode(f"The server does not know the node {node_id}: join again.")
        member.mark_alive()
        return member

    # Work

    async def lease(self, node_id: str, holding: list[LeaseId], room: int) -> list[Lease]:
        member = self._require_member(node_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.beat_seconds
        while True:
            async with self._lease_lock:
                await self._recount_if_uncertain()
                if member.lost:  # declared lost while this waited: it must not get back the same leases
                    raise UnknownNode(f"The node {node_id} was declared lost: join again.")
                leases = await self._lease_work(member, holding, room)
            if len(leases) >= room:
                self._ledger.notify_work()  # more work may be left for other nodes
            remaining = deadline - loop.time()
            if leases or remaining <= 0:
                return leases
            await self._ledger.wait_for_work(member.backends, remaining)

    async def _lease_work(self, member: NodeMember, holding: list[LeaseId], room: int) -> list[Lease]:
        allowances = [] if member.draining or room <= 0 else self._compute_allowances(member)
        if not allowances and member.leases.keys() <= set(holding):
            return []
        unrunnable = self._find_unrunnable_tasks(member)
        pairs = await self._queue.lease(member.node_id, holding, allowances, room, member.slots, unrunnable)
        for lease, tracked in pairs:
            if tracked.lease_id not in member.leases:  # else it is repeated
                member.add_lease(tracked)
                self._ledger.record_leased(tracked.lane, lease.task_id, lease.sample, member.node_id)
        return [lease for lease, _ in pairs]

    def _compute_allowances(self, member: NodeMember) -> list[LeaseAllowance]:
        busy: defaultdict[str, int] = defaultdict(int)
        for lane, counts in self._ledger.lanes.items():
            busy[lane.run] += counts.leased
        allowances = []
        for lane, counts in self._ledger.lanes.items():
            if counts.queued > 0 and lane.name in member.backends:
                max_sessions = self._compute_session_budget(lane.run, busy[lane.run])
                if max_sessions > 0:
                    version = self._run_registry.get_newest_version(lane.run)
                    isolates = self._is_isolation_node(member, lane)
                    allowances.append(LeaseAllowance(lane, max_sessions, busy[lane.run], version, isolates))
        return allowances

    def _is_isolation_node(self, member: NodeMember, lane: Lane) -> bool:
        """Whether the node is kept free for work that must run alone, so that such work does not starve."""
        eligible = (
            candidate.node_id
            for candidate in self.members.values()
            if lane.name in candidate.backends and not candidate.draining
        )
        return member.node_id == min(eligible, default=None)

    def _find_unrunnable_tasks(self, member: NodeMember) -> frozenset[tuple[str, str]]:
        """Tasks that a node can't run, but another active node may."""
        active_members = [
            other for other in self.members.values() if other.registration is not None and not other.draining
        ]
        return frozenset(
            task
            for task, (lane, refused) in self._unrunnable.items()
            if member.node_id in refused
            and any(other.node_id not in refused and lane.name in other.backends for other in active_members)
        )

    def _compute_session_budget(self, run: str, busy: int) -> int:
        """How many sessions of a run may begin now under its quotas."""
        quotas = self._run_registry.get_quotas(run)
        limits = [_UNLIMITED]
        if quotas.max_running is not None:
            limits.append(quotas.max_running - busy)
        if quotas.max_ahead is not None:
            limits.append(quotas.max_ahead - busy - self._ledger.untaken[run])
        return min(limits)

    async def finish(self, node_id: str, outcomes: list[SessionOutcome]) -> list[FinishStatus]:
        """Accepts results from any node; only the current fencing token counts."""
        member = self.members.get(node_id)
        if member is not None:
            member.mark_alive()
        for outcome in outcomes:
            outcome.node_id = node_id
            tracked = None if member is None else member.leases.get(outcome.lease_id)
            if tracked is not None:
                form = parse_result_form(tracked.request)
                outcome.builder, outcome.mask_traces = form.builder, form.mask_traces
                self._record_staleness(outcome, tracked)
                if outcome.stale and outcome.reason == "stale" and outcome.session_id is not None:
                    # Before the outcome is written: where the store fails, the node reports it again.
                    await self._store.revoke_session_reward(outcome.session_id, "stale")
        results = await self._queue.finish(outcomes, self._settings.attempts)
        for outcome, result in zip(outcomes, results, strict=True):
            if member is not None:
                member.drop_lease(outcome.lease_id)
            if result.change is not None:
                self._record_change(result.change)
        self._ledger.notify_work()
        return [result.status for result in results]

    def _record_change(self, change: WorkChange) -> None:
        self._ledger.record_change(change)
        if change.triggers_early_stop:
            self.cancel(change.lane.run, change.task_id, "early_stop")
        if change.ended_task is not None:
            self._unrunnable.pop((change.lane.run, change.task_id), None)
        elif change.outcome.reason == NOT_RUNNABLE and change.outcome.node_id is not None:
            _, refused = self._unrunnable.setdefault((change.lane.run, change.task_id), (change.lane, set()))
            refused.add(change.outcome.node_id)
        if change.new_state == "waiting":
            log.info("Task %s, sample %d will be retried: %s.", change.task_id, change.sample, change.outcome.reason)
            self._schedule_retry(change.outcome.work_id, min(2.0 ** min(change.outcome.fence, 9), _MAX_RETRY_SECONDS))

    def _schedule_retry(self, work_id: int, seconds: float) -> None:
        if work_id not in self._awaiting_retry:
            self._awaiting_retry.add(work_id)
            self._schedule(seconds, partial(self._requeue, work_id))

    async def _requeue(self, work_id: int) -> None:
        self._awaiting_retry.discard(work_id)
        try:
            lanes = await self._queue.requeue([work_id])
        except StoreError as error:
            log.warning("Work %d waits for the store: %s", work_id, error)
            self._schedule_retry(work_id, self._settings.beat_seconds)
            return
        for lane in lanes:
            counts = self._ledger.get_counts(lane)
            counts.waiting -= 1
            counts.queued += 1
        self._ledger.notify_work()

    def _record_staleness(self, outcome: SessionOutcome, tracked: TrackedLease) -> None:
        limits = parse_staleness_limits(tracked.request)
        newest = self._run_registry.get_newest_version(tracked.lane.run)
        oldest = tracked.version if outcome.oldest_version is None else outcome.oldest_version
        outcome.lag = None if oldest is None else newest - oldest
        outcome.stale = limits.is_stale(oldest, newest)
        if outcome.stale and limits.on_stale == "cancel" and outcome.reason in (None, "cancelled"):
            outcome.reward, outcome.reason = None, "stale"

    async def send_session(self, node_id: str, data: bytes) -> None:
        self._require_member(node_id)
        await self._store.import_session(data)

    # Orders

    async def heartbeat(self, node_id: str, heartbeat: Heartbeat) -> HeartbeatResponse:
        member = self._require_member(node_id)
        if heartbeat.ending:
            member.draining = member.ending = True
        reported = heartbeat.seen, heartbeat.applied, heartbeat.problems
        if reported != (member.seen_generation, member.applied_generation, member.problems):
            member.seen_generation, member.applied_generation, member.problems = reported
            await self._notify()
        generation = self._run_registry.engines.generation
        orders = await member.wait_for_orders(heartbeat, generation, self._settings.beat_seconds)
        if member.lost:
            raise UnknownNode(f"The node {node_id} was silent for too long: join again.")
        engines = self._run_registry.engines
        orders.engines = self._get_desired_engines(node_id) if engines.generation != heartbeat.seen else None
        return orders

    def cancel(self, run: str, task_id: str, reason: str) -> int:
        """Orders the nodes to cancel the running sessions of a task. Returns how many there are."""
        return self._cancel(lambda tracked: (tracked.lane.run, tracked.task_id) == (run, task_id), reason)

    def cancel_stale(self, run: str) -> None:
        newest = self._run_registry.get_newest_version(run)

        def is_stale(tracked: TrackedLease) -> bool:
            if self._run_registry.get_replica_urls(tracked.lane.run) != self._run_registry.get_replica_urls(run):
                return False
            limits = parse_staleness_limits(tracked.request)
            return limits.on_stale == "cancel" and limits.is_stale(tracked.version, newest)

        self._cancel(is_stale, "stale")

    def _cancel(self, is_selected: Callable[[TrackedLease], bool], reason: str) -> int:
        count = 0
        for member in self.members.values():
            for tracked in member.leases.values():
                if is_selected(tracked):
                    member.cancel(tracked.lease_id, reason)
                    count += 1
        return count

    def wake_all(self) -> None:
        for member in self.members.values():
            member.wake()

    def _get_desired_engines(self, node_id: str) -> DesiredEngines:
        """The desired engines for a node. Only one node puts the shared engines to sleep, since not every engine can be
        told twice; for the others, `sleep` becomes `hold`."""
        engines = self._run_registry.engines
        if node_id == self.sleep_node_id:
            return engines
        pools = {
            run: DesiredPool(pool.replicas, "hold" if pool.paused == "sleep" else pool.paused, pool.since, pool.engine)
            for run, pool in engines.pools.items()
        }
        return DesiredEngines(engines.generation, pools, engines.server)

    async def wait_until_applied(self, generation: int, seconds: float) -> list[NodeMember]:
        """Waits until every live node has applied the generation. Returns those that have not in time."""
        try:
            async with asyncio.timeout(seconds), self._members_changed:
                await self._members_changed.wait_for(lambda: not self._find_lagging_members(generation))
        except TimeoutError:
            pass
        return self._find_lagging_members(generation)

    def _find_lagging_members(self, generation: int) -> list[NodeMember]:
        """Includes nodes that are known only from the database: their sessions may be running."""
        return [
            member
            for member in self.members.values()
            if member.applied_generation < generation and (member.registration or member.leases)
        ]

    async def _notify(self) -> None:
        async with self._members_changed:
            self._members_changed.notify_all()

    # Ends

    async def drain(self, node_id: str) -> bool:
        """Gives the node no more work, so that it leaves when its sessions are done. False for an unknown node."""
        member = self.members.get(node_id)
        if member is None:
            return False
        member.draining = True
        member.wake()
        return True

    async def leave(self, node_id: str) -> None:
        member = self.members.get(node_id)
        if member is not None:
            await self.remove_member(member, died=False)

    async def remove_member(self, member: NodeMember, *, died: bool) -> None:
        """Removes a node and requeues its work. To be repeated where the database fails."""
        member.lost = True  # the node must join again from here on
        counts_as_kill = died and not member.ending
        if counts_as_kill and self._tracks_lifetimes:
            # The lifetime of a node that joined an earlier server is unknown; a long one favours the work.
            await self.record_lifetimes({} if member.registration else {member.node_id: self._settings.lease_seconds})
        changes = await self._queue.release_leases(member.node_id, died=counts_as_kill)
        if counts_as_kill and changes:
            self._tracks_lifetimes = True
            self._suspects_by_node[member.node_id] = [
                change.outcome.work_id for change in changes if change.new_state == "queued"
            ]
            while len(self._suspects_by_node) > _MAX_REMEMBERED_NODES:
                del self._suspects_by_node[next(iter(self._suspects_by_node))]
        if self.members.get(member.node_id) is member:
            del self.members[member.node_id]
        for change in changes:
            self._record_change(change)
        self._events.publish("node.lost" if died else "node.left", node_id=member.node_id, sessions=len(changes))
        if died:
            self._ledger.metrics.count_expired(len(changes))
            log.warning("Node %s is lost; its %d sessions are requeued.", member.node_id, len(changes))
        self._ledger.notify_work()
        await self._notify()

    async def expire_silent_members(self, now: float) -> None:
        """Removes nodes that were silent for a term. The caller takes `now` before it waits for anything."""
        for member in list(self.members.values()):
            if member.lost or now - member.last_seen > self._settings.lease_seconds:
                await self.remove_member(member, died=True)

    async def record_lifetimes(self, departed: dict[str, float] | None = None) -> None:
        """Records how long nodes have lived, while there is work under which nodes have died (queue/selection.py)."""
        lived = {member.node_id: member.take_lifetime() for member in self.members.values() if member.registration}
        if self._tracks_lifetimes:
            self._tracks_lifetimes = await self._queue.record_lifetimes(lived | (departed or {}))

    def renew_terms(self) -> None:
        """Gives every node a full term, after the server itself was suspended."""
        for member in self.members.values():
            member.mark_alive()
