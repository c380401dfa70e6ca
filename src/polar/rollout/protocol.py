"""What a node and the rollout server say to each other: in one process as calls, else as JSON over HTTP.

    join ─► lease ─► (the session runs; beat, beat, ...) ─► finish ─► ... ─► leave

Work is leased with a fence, a number that grows with each lease of it: what somebody says of work that was leased anew
since then is not heard. Every call may be made again where its answer was lost, and is then answered as before.
"""

from typing import Any, Literal, Protocol

from msgspec import Raw, Struct, field

from polar.engines.base import DesiredEngines
from polar.errors import PolarError
from polar.records.session import Evidence

FinishStatus = Literal["taken", "lost"]


INTERRUPTED = "interrupted"
"""The node closed: the session goes back, and nothing is counted."""


class UnknownNode(PolarError):
    """The server knows nothing of this node, or counts it among the dead: it is to join (again)."""


class ServerUnreachable(PolarError):
    """The server did not answer; it may or may not have heard. To be said again, a little later."""


class LeaseId(Struct, frozen=True):
    """A lease, as whoever holds it names it."""

    work_id: int
    fence: int


class JoinRequest(Struct):
    node_id: str  # new with every start
    name: str
    backends: list[str]  # runtimes that it can make
    slots: int  # sessions that it runs at the same time
    store: str  # the id of the store that it writes to
    replaces: list[str] = []  # nodes that are certainly dead: this one found what they left
    stopped: list[str] = []  # those of them that had been told to end: nothing that ran there killed them


class JoinResponse(Struct):
    term: float  # seconds that leases live without a beat
    beat: float  # seconds between beats
    shares_store: bool  # else it sends a copy of each session, before it says that it has ended
    engines: DesiredEngines


class Lease(Struct):
    work_id: int
    fence: int
    run: str
    task_id: str
    sample: int
    attempt: int
    digest: str  # of the request: tasks that are equal can be planned once
    request: Raw  # a TaskRequest

    @property
    def lease_id(self) -> LeaseId:
        return LeaseId(self.work_id, self.fence)


class Heartbeat(Struct):
    holding: list[LeaseId]
    load: dict[str, bool | int | float] = {}
    seen: int = -1  # the generation of the engines that it has heard of
    applied: int = -1  # the one that is in force there
    problems: dict[str, list[str]] = {}  # by run: what of it could not be done, and is tried again
    ending: bool = False  # it was told to end: it begins nothing more, and nothing that runs there is to blame


class CancelOrder(Struct):
    held: LeaseId
    reason: str


class HeartbeatResponse(Struct):
    lost: list[LeaseId] = []  # somebody else's by now, or nobody's
    cancel: list[CancelOrder] = []
    engines: DesiredEngines | None = None  # where they have changed
    drain: bool = False  # take no more, and leave when all is done


class SessionOutcome(Struct):
    """What became of a session. What trainers read besides is in the store."""

    work_id: int
    fence: int
    session_id: str | None  # None where none was begun
    reward: float | None = None
    reason: str | None = None  # why there is no reward
    error: str | None = None  # the same, in words
    node_id: str | None = None
    outcome: Any = None
    detail: dict[str, Any] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)  # of tampering
    seconds: dict[str, float] = field(default_factory=dict)  # in each stage
    turns: int = 0
    tokens: int = 0  # sampled
    oldest_version: int | None = None  # of the policy, among the sampled tokens
    newest_version: int | None = None
    lag: int | None = None  # versions that the policy was ahead then; the server's to say, as is the next
    stale: bool = False
    builder: str | None = None  # of its traces, as its task names it; the server's to say as well, as is the next
    mask_traces: bool = False  # where it has no reward

    @property
    def lease_id(self) -> LeaseId:
        return LeaseId(self.work_id, self.fence)


class RolloutServer(Protocol):
    """The rollout server, as nodes see it. Raises UnknownNode and Unreachable."""

    async def join(self, request: JoinRequest) -> JoinResponse: ...

    async def lease(self, node_id: str, holding: list[LeaseId], room: int) -> list[Lease]:
        """Waits a beat for some. What was leased before and is not in `holding` comes again: its answer was lost."""
        ...

    async def heartbeat(self, node_id: str, heartbeat: Heartbeat) -> HeartbeatResponse:
        """Waits a beat for something to tell."""
        ...

    async def finish(self, node_id: str, ended: list[SessionOutcome]) -> list[FinishStatus]:
        """Durable on return."""
        ...

    async def send_session(self, node_id: str, data: bytes) -> None:
        """A copy of a session (store.copying), from a node with a store of its own. Durable on return."""
        ...

    async def leave(self, node_id: str) -> None: ...
