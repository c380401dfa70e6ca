"""A node that a test kills: `python -m polar.testing.killed_node ACTIVITY PLUGIN STATE IMAGE MARK ID...`. PLUGIN is
module:class, and IMAGE is - for none. ACTIVITY is what the node does until it is killed:

    run    runs commands in all runtimes but the last, which is never started
    churn  creates, uses, stops, restarts and removes runtimes for each id, over and over
"""

import asyncio
import importlib
import itertools
import sys
from pathlib import Path

from polar.runtimes.base import Limits, RuntimeBackend, RuntimeSpec

DAEMONS = "(setsid sh -c 'trap \"\" TERM; sleep 300' &); (setsid sh -c 'sleep 300 & sleep 300' &); "


async def run_until_killed(backend: RuntimeBackend, spec: RuntimeSpec, ids: list[str]) -> None:
    runtimes = [await backend.create(id, spec) for id in ids]
    for runtime in runtimes[:-1]:
        await runtime.start()
    running = [asyncio.create_task(runtime.run(["sh", "-c", DAEMONS + "sleep 300"])) for runtime in runtimes[:-1]]
    await asyncio.sleep(0.5)
    _report_running()
    await asyncio.gather(*running)


async def churn_runtimes(backend: RuntimeBackend, spec: RuntimeSpec, id: str) -> None:
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


async def main(activity: str, plugin_path: str, state: str, image: str, mark: str, *ids: str) -> None:
    module, _, class_name = plugin_path.partition(":")
    backend: RuntimeBackend = getattr(importlib.import_module(module), class_name)(Path(state), "http://127.0.0.1:9")
    spec = RuntimeSpec(
        image=None if image == "-" else image, env={"MARK": mark}, limits=Limits(memory_mb=128, processes=64)
    )
    if activity == "run":
        await run_until_killed(backend, spec, list(ids))
    else:
        small = RuntimeSpec(image=spec.image, env=spec.env, limits=Limits(memory_mb=128, processes=64, disk_mb=16))
        await asyncio.gather(*(churn_runtimes(backend, (spec, small)[number % 2], id) for number, id in enumerate(ids)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
