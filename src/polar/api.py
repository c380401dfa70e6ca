"""What Python programs call.

import polar

for result in polar.run("tasks/", engine="http://127.0.0.1:8000", samples=4):
    print(result.task_id, result.status, result.trajectory)
"""

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from pydantic import ValidationError

from polar import config, validation_errors
from polar.client.submission import TaskLike, load_tasks
from polar.config import EngineSettings, Settings
from polar.errors import ConfigError
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
    """Runs every sample of every task and returns the results, in the order of the tasks and their samples.

    `engine` is the address of an inference engine, `data` the folder for all state. `settings` default to polar.toml.
    The others are as on the command line of `polar run` and override the tasks:

    harness   NAME or NAME@VERSION
    samples   sessions of each task
    backend   where they run: bubblewrap, docker, podman or local
    image     that their runtimes are made from
    timeout   seconds of each session's run
    model     the name that harnesses are told to ask for

    Raises PolarError if a task can't be run. Failures of a session are in its result."""
    _check_no_running_loop()
    overrides = Overrides(harness, samples, model, timeout, image, backend)
    requests = [overrides.apply(task) for task in load_tasks(tasks, backend=backend)]
    return uvloop.run(_run(requests, _use_private_gateway(settings or config.load(), engine), Path(data)))


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
        sessions = [session async for session in rollout.run(list(plans.values()))]
        sessions.sort(key=lambda session: (order[session.task_id], session.sample))
        results = [await rollout.build_result(plans[session.task_id], session) for session in sessions]
    return [SessionResult.model_validate_json(msgspec.json.encode(result)) for result in results]


def _use_private_gateway(settings: Settings, engine: str | None) -> Settings:
    """The settings with a private gateway and the given engine."""
    update: dict[str, Any] = {"gateway": settings.gateway.model_copy(update=config.PRIVATE_GATEWAY)}
    if engine is not None:
        fields = settings.engine.model_dump() | config.build_engine_settings_at(engine, settings.engine)
        try:
            update["engine"] = EngineSettings.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{validation_errors.format_validation_errors(error, 'engine.')}.") from error
    return settings.model_copy(update=update)
