"""polar run: tasks in, trajectories with rewards out; no server, nothing left behind."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import click
import msgspec
from rich.console import Console

from polar.cli import run_summary
from polar.cli.common import (
    engine_options,
    log_options,
    private_settings,
    run,
    scripted_note,
    settings_options,
    show_command,
    start_log,
)
from polar.cli.interrupts import Interrupts
from polar.cli.run_progress import Progress, followed, progress
from polar.cli.run_tally import Tally
from polar.cli.tasks import task_options
from polar.config import Settings
from polar.data_plane import settle_process
from polar.node.finished import Finished
from polar.node.local import LocalRollout
from polar.node.plan import Plan
from polar.rollout.models import TaskRequest
from polar.telemetry.logs import Format, Level


@click.command("run")
@settings_options
@task_options
@click.option("--workers", type=click.IntRange(1), help="harnesses that run at the same time")
@engine_options
@log_options
@click.option("--json", "as_json", is_flag=True, help="a line of JSON for each session as it ends")
def command(
    tasks: list[TaskRequest],
    config_path: Path | None,
    data: Path,
    workers: int | None,
    engine_url: str | None,
    kind: str | None,
    log_format: Format | None,
    log_level: Level | None,
    as_json: bool,
) -> int:
    """Run every TASK (a file, or a folder of them): an agent in a sandbox, then its evaluation. Nothing runs before all
    tasks are found to be in order."""
    node = {} if workers is None else {"run_workers": workers}
    settings = private_settings(config_path, engine_url, kind, node=node)
    start_log(settings, log_format, log_level)
    return run(_Run(settings, data, tasks, as_json=as_json).to_its_end())


class _Run:
    def __init__(self, settings: Settings, data: Path, tasks: list[TaskRequest], *, as_json: bool) -> None:
        self._settings = settings
        self._data = data
        self._tasks = tasks
        self._as_json = as_json
        self._errors = Console(stderr=True)
        self._total = sum(task.num_samples for task in tasks)
        self._tally = Tally()
        self._by_task = {task.task_id: Tally() for task in tasks}
        self._telling = asyncio.Lock()

    async def to_its_end(self) -> int:
        """The exit status."""
        settle_process()
        began = time.monotonic()
        with (
            progress(self._errors, self._total, silent=self._as_json) as shown,
            Interrupts(lambda: shown.say(_INTERRUPTED), shown.stop) as interrupts,
        ):
            try:
                await self._run(shown, interrupts)
            except asyncio.CancelledError:
                if interrupts.received is None:
                    raise
        self._sum_up(time.monotonic() - began)
        if interrupts.status is not None:
            rest = self._total - self._tally.sessions
            click.echo(f"polar: Interrupted: {rest} of {self._total} sessions were cancelled.", err=True)
            return interrupts.status
        if complaint := run_summary.complaint(self._tally, self._data, self._settings.engine):
            click.echo(f"polar: {complaint}", err=True)
            return 1
        return 0

    async def _run(self, shown: Progress, interrupts: Interrupts) -> None:
        async with LocalRollout(self._settings, self._data) as rollout:
            plans = {plan.task.task_id: plan for plan in await rollout.plan(self._tasks)}
            async with (
                followed(shown, rollout.load, self._tally),
                _one_error(),
                asyncio.TaskGroup() as telling,
            ):
                async for finished in rollout.run(list(plans.values())):
                    self._tally.add(finished)
                    self._by_task[finished.task_id].add(finished)
                    shown.ended(finished, self._tally)
                    if self._as_json:  # beside the run: who reads on here is who starts the next session
                        telling.create_task(self._tell(rollout, plans[finished.task_id], finished))
            interrupts.cancels = False  # what is left now is to be closed in order

    async def _tell(self, rollout: LocalRollout, plan: Plan, finished: Finished) -> None:
        async with self._telling:
            line = msgspec.json.encode(await rollout.result(plan, finished)) + b"\n"
            await asyncio.to_thread(_write, line)

    def _sum_up(self, seconds: float) -> None:
        if not self._tally.sessions or (self._as_json and not self._errors.is_terminal):
            return
        console = run_summary.console_of_width(self._errors if self._as_json else Console())
        run_summary.show(console, self._by_task, self._tally, seconds)
        if (note := scripted_note(self._settings)) is not None:
            console.print(note, highlight=False, soft_wrap=True)
        if self._tally.ended_well and not self._tally.turns:
            console.print(_SILENT, highlight=False, soft_wrap=True)
        console.print(
            f"What each session left is in {self._data / 'sessions'}. Look at one with: "
            + show_command(self._tally.last, self._data),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


_INTERRUPTED = (
    "Interrupted: sessions are cancelled and torn down. Once more leaves at once, and what is left is tidied up by the "
    "next run on this data folder."
)
_SILENT = "No agent asked the gateway anything: does it read OPENAI_BASE_URL, or another provider's?"


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


@contextlib.asynccontextmanager
async def _one_error() -> AsyncIterator[None]:
    """What went wrong in a group of tasks, as if there were no group: the first is why the others were cancelled."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
