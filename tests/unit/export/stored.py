"""Sessions in a store, as a gateway would have left them."""

from pathlib import Path
from typing import Any

import msgspec

from polar.records.session import Session
from polar.store.sqlite import open_sqlite_store
from polar.testing.conversations import Talk, said

START = 1_700_000_000.0
USER = {"role": "user", "content": "List the files."}


def talk(session_id: str) -> Talk:
    """An agent's call, and a sub-agent's, which shares nothing with it."""
    made = Talk(session_id)
    made.call([USER], said("None."), role="main")
    made.call([{"role": "user", "content": "You are a helper."}], said("Yes."), role="subagent")
    return made


def session(session_id: str, index: int, **changes: Any) -> Session:
    known = Session(session_id, session_id.encode(), START + index, status="ended", ended_at=START + index + 5)
    return msgspec.structs.replace(known, **changes)


async def fill(path: Path, sessions: list[Session]) -> None:
    store = open_sqlite_store(path)
    try:
        for one in sessions:
            made = talk(one.session_id)
            roles = {made.name(0): "main", made.name(1): "subagent"}
            await store.create_session(msgspec.structs.replace(one, metadata={"roles": roles} | one.metadata))
            for exchange in made.exchanges:
                await store.append(exchange)
    finally:
        await store.close()
