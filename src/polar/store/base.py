"""The Protocol of a store, which keeps sessions and their model calls.

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
        """Why the last writes failed, or None if they succeeded. May be read in any thread."""
        ...

    async def create_session(self, session: Session) -> None: ...

    async def end_session(self, session_id: str, *, ended_at: float, verdict: Verdict) -> Session | None:
        """Ends a session. Returns None if there is no such session. Ending it twice keeps the first end; a verdict may
        still be added."""
        ...

    async def revoke_session_reward(self, session_id: str, reason: str) -> None:
        """Removes an ended session's reward, since another session counts for the same sample."""
        ...

    async def find_session(self, session_id: str) -> Session | None: ...

    async def find_accepted_session(self, run: str, task_id: str, work_id: int) -> str | None:
        """Returns the id of the session whose end counts for a work item of a task, or None if there is none yet."""
        ...

    async def find_session_by_key(self, key_hash: bytes) -> Session | None: ...

    async def list_sessions(self, *, limit: int = 100, before: str | None = None) -> list[Session]:
        """Lists sessions, newest first. `before` is the last session id of the previous page."""
        ...

    async def append(self, exchange: Exchange) -> None:
        """Stores an exchange. Durable on return."""
        ...

    async def record_interrupted(self, calls: Sequence[StartedCall]) -> list[str]:
        """Records calls whose gateway's process ended first, and returns the ids of their exchanges. Skips calls that
        are recorded already and calls whose session is gone. Durable on return."""
        ...

    async def amend(self, exchange_id: str, *, status: ExchangeStatus, delivered: int) -> None:
        """Corrects what was delivered of an exchange. Durable on return."""
        ...

    async def set_policy_versions(self, versions: Mapping[str, int]) -> None:
        """Stores each replica's policy version, by its URL. Durable on return."""
        ...

    async def read_policy_versions(self) -> dict[str, int]: ...

    def read_exchanges(self, session_id: str) -> AsyncIterator[Exchange]:
        """Reads a session's exchanges in order of `seq`, with complete prompts and requests."""
        ...

    def read_sessions(self, session_ids: Iterable[str | None]) -> AsyncIterator[list[SessionRecord]]:
        """Reads sessions with all of their exchanges, in the order of `session_ids`. Short ones come several at a
        time."""
        ...

    async def export_session(self, session_id: str) -> bytes:
        """Copies a session for another store, in the form in which it is stored, by difference."""
        ...

    async def import_session(self, data: bytes) -> str:
        """Imports a copy completely or not at all, and returns the session's id. Durable on return. The same copy again
        changes nothing. Raises StoreError if the copy is damaged, or if the session exists with other content. The
        caller must bound the copy's size."""
        ...

    async def read_context_ids(self, session_id: str, seq: int) -> TokenIds:
        """Reads an exchange's prompt and sampled ids, concatenated."""
        ...

    async def read_usage_totals(self, session_id: str) -> UsageTotals:
        """Sums up the usage of a session's calls, without reading the exchanges."""
        ...

    async def read_next_seq(self, session_id: str) -> int:
        """Returns the highest stored `seq` plus one, or 0 if the session has no exchanges."""
        ...

    async def close(self) -> None: ...
