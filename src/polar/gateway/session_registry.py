"""Sessions and their keys.

A key is random, unrelated to the session's id, stored only as a hash, and works only while its session is open.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from polar import ids
from polar.config import SamplingOverrides
from polar.engines.replica import Replica
from polar.gateway.meter import Meter
from polar.records.session import Session, Verdict
from polar.rendering.continuation import TurnHistory
from polar.store.base import Store
from polar.trajectory.roles import RoleOverrides

if TYPE_CHECKING:
    from polar.gateway.generation import Generation


class OpenSession:
    """What the gateway keeps in memory of a session that is running: little, since thousands may be idle."""

    __slots__ = (
        "_next_seq",
        "ended",
        "group",
        "history",
        "meter",
        "models",
        "orphans",
        "replica",
        "resumed",
        "run",
        "running",
        "sampling",
        "session_id",
    )

    def __init__(self, session: Session, next_seq: int) -> None:
        task, model = session.metadata.get("task_id"), session.metadata.get("model")
        self.session_id = session.session_id
        self.run = session.run
        self.group = task if isinstance(task, str) else session.session_id  # sessions of a task begin alike
        self.meter = Meter()
        self.sampling: SamplingOverrides | None = None  # the task's
        self.ended = False
        self.models = (model,) if isinstance(model, str) else ()  # names that the harness has used
        self.replica: Replica | None = None
        self.running: set[Generation] = set()
        self.orphans: list[Generation] = []  # their harness went away a moment ago
        self.resumed = next_seq > 0  # it has exchanges from before this process
        self.history: TurnHistory | None = None  # its turns, once a prompt has been rendered
        self._next_seq = next_seq

    def take_seq(self) -> int:
        seq = self._next_seq
        self._next_seq += 1
        return seq


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class SessionRegistry:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions_by_key_hash: dict[bytes, OpenSession] = {}
        self._key_hashes: dict[str, bytes] = {}
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # see `_alone`
        self._end_listeners: list[Callable[[OpenSession], None]] = []

    def add_end_listener(self, listener: Callable[[OpenSession], None]) -> None:
        """Calls `listener` with each session that has ended, once all of its calls are recorded. From then on nobody
        needs what is kept in memory for its next call."""
        self._end_listeners.append(listener)

    async def create(
        self,
        metadata: dict[str, Any],
        run: str = "default",
        *,
        session_id: str | None = None,
        meter: Meter | None = None,
        sampling: SamplingOverrides | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key, which is not to be had again. Raises ConfigError where the metadata give roles
        that don't exist. `meter` holds it to what it may use, and `sampling` replaces what its harness asks for."""
        RoleOverrides.from_metadata(metadata)
        key = ids.new_session_key()
        session = Session(session_id or ids.new_session_id(), hash_key(key), time.time(), run, metadata)
        await self._store.create_session(session)
        opened = self._register(session, 0)
        opened.meter = meter or opened.meter
        opened.sampling = sampling
        return session, key

    async def find_by_key(self, key: str) -> OpenSession | None:
        """The open session that this key belongs to. Sessions from before a restart are found in the store."""
        hashed = hash_key(key)
        open_session = self._sessions_by_key_hash.get(hashed)
        if open_session is not None:
            return open_session
        async with self._lock_key(hashed):
            open_session = self._sessions_by_key_hash.get(hashed)  # another call may have got here first
            if open_session is not None:
                return open_session
            session = await self._store.session_by_key(hashed)
            if session is None or session.status != "open":
                return None
            return self._register(session, await self._store.next_seq(session.session_id))

    def _lock_key(self, hashed: bytes) -> asyncio.Lock:
        """No session is taken in from the store while it is being ended there."""
        return self._locks.setdefault(hashed, asyncio.Lock())

    def _register(self, session: Session, next_seq: int) -> OpenSession:
        opened = OpenSession(session, next_seq)
        self._sessions_by_key_hash[session.key_hash] = opened
        self._key_hashes[session.session_id] = session.key_hash
        return opened

    async def end(self, session_id: str, verdict: Verdict | None = None) -> Session | None:
        """Ends a session: its key stops working, and what still runs is given up and recorded."""
        hashed = self._key_hashes.get(session_id)
        if hashed is None:
            session = await self._store.session(session_id)
            if session is None:
                return None
            hashed = session.key_hash
        async with self._lock_key(hashed):
            ended = await self._store.end_session(session_id, ended_at=time.time(), verdict=verdict or Verdict())
            self._key_hashes.pop(session_id, None)
            opened = self._sessions_by_key_hash.pop(hashed, None)
        if opened is not None:
            opened.ended = True
            await give_up_generations(opened)
            for listener in self._end_listeners:
                listener(opened)
        return ended

    async def close(self) -> None:
        """Gives up whatever runs; the sessions stay open in the store."""
        await asyncio.gather(*(give_up_generations(opened) for opened in self._sessions_by_key_hash.values()))

    def __len__(self) -> int:
        return len(self._sessions_by_key_hash)


async def give_up_generations(session: OpenSession) -> None:
    generations = [*session.running, *session.orphans]
    for generation in generations:
        generation.give_up()
    for generation in generations:
        await generation.wait_until_recorded()
