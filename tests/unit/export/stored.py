"""Sessions in a store, as a gateway would have left them."""

from pathlib import Path
from typing import Any

import msgspec

from polar.records.session import Session
from polar.store.sqlite import open_sqlite_store
from polar.testing.conversations import ConversationBuilder, make_text_parts

START = 1_700_000_000.0
USER = {"role": "user", "content": "List the files."}


def talk(session_id: str) -> ConversationBuilder:
    """An agent's call, and a sub-agent's, which shares nothing with it."""
    made = ConversationBuilder(session_id)
    made.add_call([USER], make_text_parts("None."), role="main")
    made.add_call([{"role": "user", "content": "You are a helper."}], make_text_parts("Yes."), role="subagent")
    return made


def session(session_id: str, index: int, **changes: Any) -> Session:
    known = Session(session_id, session_id.encode(), START + index, status="ended", ended_at=START + index + 5)
    return msgspec.structs.replace(known, **changes)


async def fill(path: Path, sessions: list[Session]) -> None:
    store = open_sqlite_store(path)
    try:
        for one in sessions:
            made = talk(one.session_id)
            roles = {made.make_exchange_id(0): "main", made.make_exchange_id(1): "subagent"}
            await store.create_session(msgspec.structs.replace(one, metadata={"roles": roles} | one.metadata))
            for exchange in made.exchanges:
                await store.append(exchange)
    finally:
        await store.close()
