"""polar.run: tasks run to their end in this process, without a server.

import polar

for result in polar.run("tasks/", engine="http://127.0.0.1:8000", samples=4):
    print(result.task_id, result.status, result.trajectory)
"""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
import uvloop

from polar import config
from polar.client.submission import TaskLike, load_tasks
from polar.config import Settings
from polar.node.local import LocalRollout
from polar.records.result import SessionResult
from polar.records.task import TaskRequest
from polar.tasks.overrides import Overrides


def run(
    tasks: TaskLike | Iterable[TaskLike],
    engine: str | None = None,
    harness: str | None = None,
    samples: int | None = None,
    data: str | os.PathLike[str] = ".polar",
    settings: Settings | None = None,
    *,
    backend: str | None = None,
    image: str | None = None,
    timeout: float | None = None,
    model: str | None = None,
) -> list[SessionResult]:
    """Runs every sample of every task to its end: the results, in the order of the tasks and their samples.

    `engine` is the address of an inference engine; `data` is the folder where everything is kept; `settings` are those
    of polar.toml unless they are given. The others are as on the command line of `polar run`, and take the place of
    what the tasks say:

    harness   NAME or NAME@VERSION
    samples   sessions of each task
    backend   where they run: bubblewrap, docker, podman or local
    image     that their runtimes are made from
    timeout   seconds of each session's run
    model     the name that harnesses are told to ask for

    Raises PolarError where something can't be run; what goes wrong in a session is in its result."""
    _check_no_running_loop()
    overrides = Overrides(harness, samples, model, timeout, image, backend)
    wanted = [overrides.apply(task) for task in load_tasks(tasks, backend=backend)]
    return uvloop.run(_run(wanted, config.with_private_gateway(settings or config.load(), engine), Path(data)))


def _check_no_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "polar.run can't be called inside a running event loop: use polar.node.local.LocalRollout there."
    )


async def _run(tasks: list[TaskRequest], settings: Settings, data: Path) -> list[SessionResult]:
    async with LocalRollout(settings, data) as rollout:
        plans = {plan.task.task_id: plan for plan in await rollout.plan(tasks)}
        order = {task_id: number for number, task_id in enumerate(plans)}
        ended = [finished async for finished in rollout.run(list(plans.values()))]
        ended.sort(key=lambda finished: (order[finished.task_id], finished.sample))
        results = [await rollout.build_result(plans[finished.task_id], finished) for finished in ended]
    return [SessionResult.model_validate_json(msgspec.json.encode(result)) for result in results]
