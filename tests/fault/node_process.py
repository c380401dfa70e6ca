"""A node in a process of its own, to be killed: `python -m tests.fault.node_process DATA TASK SESSIONS NODE`,
with TASK and NODE as JSON. Says how many sessions are in each stage, a line each time that changes."""

import asyncio
import json
import sys
from pathlib import Path

import msgspec

from polar.config import load
from polar.node.local import LocalRollout
from polar.records.task import TaskRequest


async def main(data: str, task: str, sessions: str, node: str) -> None:
    settings = load(None, {"POLAR_ENGINE__KIND": "scripted"}, {"gateway": {"port": 0}, "node": json.loads(node)})
    async with LocalRollout(settings, Path(data)) as rollout:
        plans = await rollout.plan([TaskRequest.model_validate_json(task)])
        running = [await rollout.node.submit(plans[0], sample) for sample in range(int(sessions))]
        last = b""
        while any(not one.finished.done() for one in running):
            now = msgspec.json.encode(rollout.get_load())
            if now != last:
                print(now.decode(), flush=True)
            last = now
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
