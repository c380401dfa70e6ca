"""Open sessions and their keys.

A key is random, unrelated to the session's id, stored only as a hash, and works only while its session is open.
"""

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakValueDictionary

from polar import ids
from polar.config import SamplingOverrides
from polar.engines.replica import Replica
from polar.gateway.meter import Meter
from polar.records.session import Session, Verdict
from polar.store.base import Store
from polar.trajectory.roles import RoleOverrides

_MAX_MODELS = 8


class OpenSession:
    """A running session in the gateway's memory. It is small, since thousands may be idle."""

    __slots__ = (
        "_next_seq",
        "ended",
        "group",
        "meter",
        "models",
        "replica",
        "resumed",
        "run",
        "sampling",
        "session_id",
    )

    def __init__(
        self,
        session: Session,
        next_seq: int,
        *,
        meter: Meter | None = None,
        sampling: SamplingOverrides | None = None,
    ) -> None:
        task, model = session.metadata.get("task_id"), session.metadata.get("model")
        self.session_id = session.session_id
        self.run = session.run
        self.group = task if isinstance(task, str) else session.session_id  # sessions of a task begin alike
        self.meter = meter or Meter()
        self.sampling = sampling  # the task's
        self.ended = False
        self.models: tuple[str, ...] = (model,) if isinstance(model, str) else ()  # names that the harness has used
        self.replica: Replica | None = None  # where its last call went
        self.resumed = next_seq > 0  # it has exchanges from before this process
        self._next_seq = next_seq

    def take_seq(self) -> int:
        seq = self._next_seq
        self._next_seq += 1
        return seq

    def add_model(self, name: str) -> None:
        """Notes a model name that the harness has used. Only the latest few are kept."""
        if name not in self.models:
            self.models = (*self.models[1 - _MAX_MODELS :], name)


EndListener = Callable[[OpenSession], Awaitable[None]]


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class SessionRegistry:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions_by_key_hash: dict[bytes, OpenSession] = {}
        self._key_hashes: dict[str, bytes] = {}
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()  # see `_lock_key`
        self._end_listeners: list[EndListener] = []

    def add_end_listener(self, listener: EndListener) -> None:
        """Makes `end` call and await `listener` for each session whose key has stopped working."""
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
        """Creates a session. Returns it with its key, of which only the hash is kept. `meter` limits its use, and
        `sampling` overrides what its harness asks for. Raises ConfigError if the metadata name unknown roles."""
        RoleOverrides.from_metadata(metadata)
        key = ids.new_session_key()
        session = Session(session_id or ids.new_session_id(), hash_key(key), time.time(), run, metadata)
        await self._store.create_session(session)
        self._register(session, OpenSession(session, 0, meter=meter, sampling=sampling))
        return session, key

    async def find_by_key(self, key: str) -> OpenSession | None:
        """Returns the key's open session. Sessions from before a restart are found in the store."""
        hashed = hash_key(key)
        open_session = self._sessions_by_key_hash.get(hashed)
        if open_session is not None:
            return open_session
        async with self._lock_key(hashed):
            open_session = self._sessions_by_key_hash.get(hashed)  # another call may have got here first
            if open_session is not None:
                return open_session
            session = await self._store.find_session_by_key(hashed)
            if session is None or session.status != "open":
                return None
            opened = OpenSession(session, await self._store.read_next_seq(session.session_id))
            self._register(session, opened)
            return opened

    def _lock_key(self, hashed: bytes) -> asyncio.Lock:
        """Returns the key's lock: a session is not loaded from the store while it is being ended there."""
        return self._locks.setdefault(hashed, asyncio.Lock())

    def _register(self, session: Session, opened: OpenSession) -> None:
        self._sessions_by_key_hash[session.key_hash] = opened
        self._key_hashes[session.session_id] = session.key_hash

    async def end(self, session_id: str, verdict: Verdict | None = None) -> Session | None:
        """Ends a session: its key stops working, and the end listeners end its calls."""
        hashed = self._key_hashes.get(session_id)
        if hashed is None:
            session = await self._store.find_session(session_id)
            if session is None:
                return None
            hashed = session.key_hash
        async with self._lock_key(hashed):
            ended = await self._store.end_session(session_id, ended_at=time.time(), verdict=verdict or Verdict())
            self._key_hashes.pop(session_id, None)
            opened = self._sessions_by_key_hash.pop(hashed, None)
        if opened is not None:
            opened.ended = True
            for listener in self._end_listeners:
                await listener(opened)
        return ended

    def __len__(self) -> int:
        return len(self._sessions_by_key_hash)
