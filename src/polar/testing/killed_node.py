"""A node that is killed: `python -m polar.testing.killed_node WHAT PLUGIN STATE IMAGE MARK ID...`, with PLUGIN as
module:class, - for no image, and WHAT it does until then:

    run    commands run in all runtimes but the last, which was never started
    churn  for each id, runtimes are made, used, stopped, started again and removed, over and over
"""

import asyncio
import importlib
import itertools
import sys
from pathlib import Path

from polar.runtimes.base import Limits, RuntimeBackend, RuntimeSpec

DAEMONS = "(setsid sh -c 'trap \"\" TERM; sleep 300' &); (setsid sh -c 'sleep 300 & sleep 300' &); "


async def run(backend: RuntimeBackend, spec: RuntimeSpec, ids: list[str]) -> None:
    runtimes = [await backend.create(id, spec) for id in ids]
    for runtime in runtimes[:-1]:
        await runtime.start()
    running = [asyncio.create_task(runtime.run(["sh", "-c", DAEMONS + "sleep 300"])) for runtime in runtimes[:-1]]
    await asyncio.sleep(0.5)
    _report_running()
    await asyncio.gather(*running)


async def churn(backend: RuntimeBackend, spec: RuntimeSpec, id: str) -> None:
    for number in itertools.count():
        runtime = await backend.create(f"{id}n{number}", spec)
        await runtime.start()
        await runtime.run(["sh", "-c", DAEMONS + "true"])
        await runtime.stop()
        await runtime.restart()
        await runtime.run(["sh", "-c", "trap '' TERM; sleep 300"], timeout=0.1)
        await runtime.remove()
        if number == 0:
            _report_running()


def _report_running() -> None:
    sys.stdout.write("running\n")
    sys.stdout.flush()


async def main(what: str, plugin_path: str, state: str, image: str, mark: str, *ids: str) -> None:
    module, _, name = plugin_path.partition(":")
    backend: RuntimeBackend = getattr(importlib.import_module(module), name)(Path(state), "http://127.0.0.1:9")
    spec = RuntimeSpec(
        image=None if image == "-" else image, env={"MARK": mark}, limits=Limits(memory_mb=128, processes=64)
    )
    if what == "run":
        await run(backend, spec, list(ids))
    else:
        small = RuntimeSpec(image=spec.image, env=spec.env, limits=Limits(memory_mb=128, processes=64, disk_mb=16))
        await asyncio.gather(*(churn(backend, (spec, small)[number % 2], id) for number, id in enumerate(ids)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
