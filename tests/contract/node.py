"""A node that makes runtimes and runs commands in them until it is killed: `python -m tests.contract.node KIND STATE
IMAGE MARK ID...`, with KIND as module:class and - for no image."""

import asyncio
import importlib
import sys
from pathlib import Path

from polar.runtimes.base import Kind, Limits, Spec

DAEMONS = "(setsid sh -c 'trap \"\" TERM; sleep 300' &); (setsid sh -c 'sleep 300 & sleep 300' &); sleep 300"


async def main(kind_path: str, state: str, image: str, mark: str, *ids: str) -> None:
    module, _, name = kind_path.partition(":")
    kind: Kind = getattr(importlib.import_module(module), name)(Path(state), "http://127.0.0.1:9")
    spec = Spec(image=None if image == "-" else image, env={"MARK": mark}, limits=Limits(memory_mb=128, processes=64))
    runtimes = [await kind.create(id, spec) for id in ids]
    for runtime in runtimes[:-1]:  # the last is created and never started
        await runtime.start()
    running = [asyncio.create_task(runtime.run(["sh", "-c", DAEMONS])) for runtime in runtimes[:-1]]
    await asyncio.sleep(0.5)
    print("running", flush=True)
    await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
