"""The soak's engine: `python -m benchmarks.soak.engine TURNS WORDS` prints its address and plays random turns.

It is a process of its own, so that its memory is not the service's.
"""

import sys

from benchmarks.process import print_message, run_async, wait_for_input_end
from polar.engines.scripted import Play, ScriptedServer

SEED = 1


async def serve(turns: int, words: int) -> None:
    async with ScriptedServer(Play.random(SEED, turns, words)) as server:
        print_message(server.url)
        await wait_for_input_end()


if __name__ == "__main__":
    run_async(serve(int(sys.argv[1]), int(sys.argv[2])))
