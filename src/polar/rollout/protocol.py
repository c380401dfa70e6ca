"""The protocol between a node and the rollout server: calls within one process, else JSON over HTTP.

    join ─► lease ─► (the session runs; beat, beat, ...) ─► finish ─► ... ─► leave

Work is leased with a fence, a number that grows with each lease of it: outcomes with an old fence are ignored. Every
call may be repeated where its answer was lost, and gets the same answer.
"""

from typing import Any, Literal, Protocol

from msgspec import Raw, Struct, field

from polar.engines.base import DesiredEngines
from polar.errors import PolarError
from polar.records.session import Evidence

FinishStatus = Literal["taken", "lost"]


INTERRUPTED = "interrupted"
"""The node stopped: the session is requeued, and no attempt is counted."""


class UnknownNode(PolarError):
    """The server does not know this node, or has declared it lost: it must join again."""


class ServerUnreachable(PolarError):
    """The server did not answer, and may or may not have received the call. To be repeated later."""


class LeaseId(Struct, frozen=True):
    """Identifies a lease: the work and its fence."""

    work_id: int
    fence: int


class JoinRequest(Struct):
    node_id: str  # new with every start
    name: str
    backends: list[str]  # runtime backends that work there
    slots: int  # sessions that it runs at the same time
    store: str  # the id of the store that it writes to
    replaces: list[str] = []  # dead nodes whose leftovers this one has found
    stopped: list[str] = []  # those of them that had been asked to stop: no session killed them


class JoinResponse(Struct):
    term: float  # seconds without a heartbeat after which leases are lost
    beat: float  # seconds between heartbeats
    shares_store: bool  # else the node sends a copy of each session before its outcome
    engines: DesiredEngines


class Lease(Struct):
    work_id: int
    fence: int
    run: str
    task_id: str
    sample: int
    attempt: int
    digest: str  # of the request, so that equal tasks are planned once
    request: Raw  # a TaskRequest

    @property
    def lease_id(self) -> LeaseId:
        return LeaseId(self.work_id, self.fence)


class Heartbeat(Struct):
    holding: list[LeaseId]
    load: dict[str, bool | int | float] = {}
    seen: int = -1  # the newest generation of the engines that the node has received
    applied: int = -1  # the generation in force there
    problems: dict[str, list[str]] = {}  # by run: what could not be applied, and is retried
    ending: bool = False  # the node was asked to stop: it begins no session, and no session is to blame for its end


class CancelOrder(Struct):
    held: LeaseId
    reason: str


class HeartbeatResponse(Struct):
    lost: list[LeaseId] = []  # leases that the node does not hold any more
    cancel: list[CancelOrder] = []
    engines: DesiredEngines | None = None  # if they have changed
    drain: bool = False  # lease nothing more, and leave when all sessions are done


class SessionOutcome(Struct):
    """The outcome of a session, as reported to the server. Its calls are in the store."""

    work_id: int
    fence: int
    session_id: str | None  # None where no session began
    reward: float | None = None
    reason: str | None = None  # why there is no reward
    error: str | None = None  # the error message behind the reason
    node_id: str | None = None
    outcome: Any = None
    detail: dict[str, Any] = field(default_factory=dict)
    evidence: list[Evidence] = field(default_factory=list)  # of tampering
    seconds: dict[str, float] = field(default_factory=dict)  # in each stage
    turns: int = 0
    tokens: int = 0  # sampled
    oldest_version: int | None = None  # of the policy, among the sampled tokens
    newest_version: int | None = None
    lag: int | None = None  # versions that the policy was ahead; this and the next three are set by the server
    stale: bool = False
    builder: str | None = None  # of its traces, as its task names it
    mask_traces: bool = False  # if it has no reward

    @property
    def lease_id(self) -> LeaseId:
        return LeaseId(self.work_id, self.fence)


class RolloutServer(Protocol):
    """The rollout server, as nodes see it. Raises UnknownNode and ServerUnreachable."""

    async def join(self, request: JoinRequest) -> JoinResponse: ...

    async def lease(self, node_id: str, holding: list[LeaseId], room: int) -> list[Lease]:
        """Leases up to `room` sessions; waits up to `beat` seconds for work. Leases that are missing in `holding` are
        repeated: their answer was lost."""
        ...

    async def heartbeat(self, node_id: str, heartbeat: Heartbeat) -> HeartbeatResponse:
        """Waits up to `beat` seconds for orders."""
        ...

    async def finish(self, node_id: str, ended: list[SessionOutcome]) -> list[FinishStatus]:
        """Durable on return."""
        ...

    async def send_session(self, node_id: str, data: bytes) -> None:
        """Imports a copy of a session (store.session_copy) from a node with its own store. Durable on return."""
        ...

    async def leave(self, node_id: str) -> None: ...
