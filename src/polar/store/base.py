"""What is kept: sessions, and every model call they made.

The store is the truth. `append` returns when the exchange would survive kill -9 (or loss of power, if so
configured), and only then does the harness get the last byte of the reply.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from msgspec import Meta, Raw, Struct, field
from numpy.typing import NDArray

from polar.dialects.base import RawRequest
from polar.engines.base import LogprobKind, TokenIds, VersionSpan
from polar.rendering.context_mark import ContextMark
from polar.types import FinishReason, Reply, SamplingParams, Usage, UsageTotals

Logprobs = NDArray[np.float32]
ExchangeStatus = Literal["complete", "partial", "failed", "interrupted"]
"""interrupted: the gateway's process ended before the call did, and only its start is known."""
Continuation = Literal["recorded", "rendered", "engine"]


EvidenceKind = Literal[
    "test_edited",  # a protected test, or a file that configures tests, was changed, added or deleted
    "link_out",  # a link of the agent's leads to something that was not carried with it
    "grader_path",  # files were left where the grader's own stand, or the agent looked for them
    "grader_environment",  # something that the grader loads, reads or runs by itself was changed
    "canary_passed",  # a test that must fail passed
    "results_forged",  # results that the grader's own process did not write
    "grader_disrupted",  # the grader was stopped, starved or kept from its work
]


class Evidence(Struct, frozen=True):
    """One observation that an agent interfered with its grading.

    `proven` says that honest work can't explain it. The task's `suspicious` setting decides what becomes of a session
    with proven evidence; all other evidence is only recorded."""

    kind: EvidenceKind
    subject: str  # the path, test or program that it is about
    proven: bool = False
    detail: str = ""
    count: Annotated[int, Meta(ge=1)] = 1  # observations that this entry stands for


def is_suspicious(evidence: Iterable[Evidence]) -> bool:
    """Whether any of it is proven."""
    return any(one.proven for one in evidence)


class Verdict(Struct, frozen=True):
    """What a session earned: a reward, or the reason why there is none; and perhaps rewards of single turns."""

    reward: float | None = None
    reason: str | None = None
    turn_rewards: dict[str, float] = field(default_factory=dict)  # by exchange id
    detail: dict[str, Any] = field(default_factory=dict)  # for people; kept beside the session, not in the store
    evidence: list[Evidence] = field(default_factory=list)  # of tampering


class Session(Struct):
    """One harness run. The key itself is never stored, only its SHA-256."""

    session_id: str
    key_hash: bytes
    created_at: float
    run: str = "default"
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Literal["open", "ended"] = "open"
    ended_at: float | None = None
    reward: float | None = None
    reason: str | None = None  # why there is no reward, where somebody said so
    turn_rewards: dict[str, float] = field(default_factory=dict)  # by exchange id
    evidence: list[Evidence] = field(default_factory=list)  # of tampering with its grading

    @property
    def suspicious(self) -> bool:
        return is_suspicious(self.evidence)


class Exchange(Struct):
    """One captured model call: what the harness asked (as it wrote it), what was sampled, and how it got there."""

    exchange_id: str
    session_id: str
    seq: int  # order of arrival within the session
    dialect: str
    params: dict[str, str]  # of the route: a model named in the path, say
    hints: dict[str, str]  # request headers that say something of the harness (never credentials)
    raw_request: RawRequest
    status: ExchangeStatus
    started_at: float
    ended_at: float
    first_token_at: float | None = None
    reply: Reply | None = None  # None where nothing was sampled
    error: str | None = None
    prompt_ids: TokenIds | None = None
    sampled_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    logprob_kind: LogprobKind = "none"
    delivered: int = 0  # sampled tokens whose text was written to the harness
    sampling: SamplingParams = field(default_factory=SamplingParams)  # as used
    versions: list[VersionSpan] = field(default_factory=list)  # empty where unknown
    replica: str = ""
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    continuation: Continuation = "engine"
    branch_reason: str | None = None
    untrainable: str | None = None
    routed_experts: bytes | None = None
    parent: str | None = (
        None  # the exchange whose turn this one goes on from; found by the store where the gateway is silent
    )
    context_mark: ContextMark | None = None  # of a prompt that the gateway rendered
    malformed: bool = False  # something looked like a tool call and did not parse: it went on as text
    checksum: bytes | None = None  # of the tokens and numbers, as the store took them in

    def request_body(self) -> dict[str, Raw | list[Raw]]:
        """The harness's request body, field by field."""
        body: dict[str, Raw | list[Raw]] = dict(self.raw_request.fields)
        if self.raw_request.items or self.raw_request.list_name not in body:
            body[self.raw_request.list_name] = self.raw_request.items
        return body


class StartedCall(Struct, frozen=True):
    """A call that is under way: what is known of it should its process be killed."""

    exchange_id: str
    session_id: str
    seq: int
    dialect: str
    list_name: str  # of the field that grows from turn to turn (Wire)
    model: str
    started_at: float
    request_bytes: int


class SessionRecord(Struct):
    """A session, whole."""

    session: Session | None = None  # None: there is no such session
    exchanges: list[Exchange] = []
    damage: str | None = None  # why it can't be read


class Store(Protocol):
    """Raises StoreError, which says what to do."""

    @property
    def write_failure(self) -> str | None:
        """Why nothing can be written now, as the last writes showed; None where they succeeded. Any thread may ask."""
        ...

    async def create_session(self, session: Session) -> None: ...

    async def end_session(self, session_id: str, *, ended_at: float, verdict: Verdict) -> Session | None:
        """None where there is no such session. Ending twice keeps the first end (a verdict may still be added)."""
        ...

    async def revoke_session_reward(self, session_id: str, reason: str) -> None:
        """Takes back what an ended session earned: another one stands for the same sample."""
        ...

    async def session(self, session_id: str) -> Session | None: ...

    async def accepted_session(self, run: str, task_id: str, work_id: int) -> str | None:
        """Of the sessions that were begun for some work of a task at a rollout server, the one whose end counts; None
        where there is none, or none yet."""
        ...

    async def session_by_key(self, key_hash: bytes) -> Session | None: ...

    async def sessions(self, *, limit: int = 100, before: str | None = None) -> list[Session]:
        """Newest first; `before` is the last session id of the page before."""
        ...

    async def append(self, exchange: Exchange) -> None:
        """Durable on return."""
        ...

    async def record_interrupted(self, calls: Sequence[StartedCall]) -> list[str]:
        """Records calls whose gateway's process ended first, but for those that are recorded already and those whose
        session is gone. The ids of their exchanges. Durable on return."""
        ...

    async def amend(self, exchange_id: str, *, status: ExchangeStatus, delivered: int) -> None:
        """Corrects what was delivered, after a harness went away at the last moment. Durable on return."""
        ...

    async def set_policy_versions(self, versions: Mapping[str, int]) -> None:
        """Which version of the policy each replica (by its URL) holds now. Durable on return."""
        ...

    async def policy_versions(self) -> dict[str, int]: ...

    def exchanges(self, session_id: str) -> AsyncIterator[Exchange]:
        """In order of `seq`, with whole prompts and requests."""
        ...

    def read_sessions(self, session_ids: Iterable[str | None]) -> AsyncIterator[list[SessionRecord]]:
        """Sessions with all of their exchanges, each in its place; short ones come several at a time."""
        ...

    async def export_session(self, session_id: str) -> bytes:
        """A copy for another store: the session as it is stored, by difference."""
        ...

    async def import_session(self, data: bytes) -> str:
        """Takes in a copy, whole or not at all, and returns the session's id. Durable on return. One that comes again
        changes nothing; one of a session that is here with other content is an error, as is a damaged one. How large
        a copy may be is for the caller to say."""
        ...

    async def context_ids(self, session_id: str, seq: int) -> TokenIds:
        """An exchange's prompt and sampled ids, one after the other."""
        ...

    async def usage_totals(self, session_id: str) -> UsageTotals:
        """What its calls used, of which nothing else is read."""
        ...

    async def next_seq(self, session_id: str) -> int:
        """One more than the highest stored, 0 for none."""
        ...

    async def close(self) -> None: ...
