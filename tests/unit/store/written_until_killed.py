"""Run by test_kill: appends without end, and names each exchange on stdout once `append` has returned."""

import asyncio
import sys

from polar.store import open_store
from polar.store.base import Store
from tests.unit.store.samples import conversation, session


async def talk(store: Store, session_id: str) -> None:
    await store.create_session(session(session_id))
    for turn in conversation(session_id, 10_000):
        await store.append(turn)
        print(session_id, turn.seq, flush=True)


async def main(url: str, life: str) -> None:
    store = open_store(url)
    await asyncio.gather(*(talk(store, f"s{life}-{n}") for n in range(4)))


asyncio.run(main(*sys.argv[1:]))
