"""What a store does: it keeps sessions, and every model call they made.

The store is the truth. `append` returns when the exchange would survive kill -9 (or loss of power, if so
configured), and only then does the harness get the last byte of the reply.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Protocol

from polar.records.exchange import Exchange, ExchangeStatus, StartedCall, TokenIds
from polar.records.session import Session, SessionRecord, Verdict
from polar.types import UsageTotals


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

    async def find_session(self, session_id: str) -> Session | None: ...

    async def find_accepted_session(self, run: str, task_id: str, work_id: int) -> str | None:
        """Of the sessions that were begun for some work of a task at a rollout server, the one whose end counts; None
        where there is none, or none yet."""
        ...

    async def find_session_by_key(self, key_hash: bytes) -> Session | None: ...

    async def list_sessions(self, *, limit: int = 100, before: str | None = None) -> list[Session]:
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

    async def read_policy_versions(self) -> dict[str, int]: ...

    def read_exchanges(self, session_id: str) -> AsyncIterator[Exchange]:
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

    async def read_context_ids(self, session_id: str, seq: int) -> TokenIds:
        """An exchange's prompt and sampled ids, one after the other."""
        ...

    async def read_usage_totals(self, session_id: str) -> UsageTotals:
        """What its calls used, of which nothing else is read."""
        ...

    async def read_next_seq(self, session_id: str) -> int:
        """One more than the highest stored, 0 for none."""
        ...

    async def close(self) -> None: ...
