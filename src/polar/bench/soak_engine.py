"""The soak's engine: `python -m polar.bench.soak_engine TURNS WORDS` prints its address and plays random turns.

A process of its own, so that its memory is not the service's.
"""

import asyncio
import sys

from polar.engines.scripted import Play, ScriptedServer

SEED = 1


async def serve(turns: int, words: int) -> None:
    async with ScriptedServer(Play.random(SEED, turns, words)) as server:
        sys.stdout.write(f'"{server.url}"\n')
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
