"""polar run: tasks in, trajectories with rewards out; no server, nothing left behind."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.cli import run_tally
from polar.cli.common import (
    describe_default_engine,
    engine_options,
    format_show_command,
    log_options,
    private_settings,
    run_async,
    settings_options,
    start_logging,
)
from polar.cli.interrupts import Interrupts
from polar.cli.run_progress import RunProgress, poll_load, show_progress
from polar.cli.run_tally import RunTally, format_count
from polar.cli.tasks import SOURCES_KEY, task_options
from polar.config import PriceSettings, Settings
from polar.data.collection import Budget, Collection, SourceStats, lock_collection
from polar.gateway.process import tune_process
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.node.task_plan import TaskPlan
from polar.records.sample import with_task_key
from polar.records.task import TaskRequest
from polar.telemetry.logs import LogFormat, LogLevel


@click.command("run")
@settings_options
@task_options
@click.option("--workers", type=click.IntRange(1), help="harnesses that run at the same time")
@click.option("--resume", is_flag=True, help="go on where an earlier run on the same data stopped, however it did")
@click.option("--accept", type=float, metavar="R", help="no more samples of a task once one earned R or more")
@click.option("--attempts", type=click.IntRange(1), default=1, show_default=True, help="where the platform fails")
@click.option("--budget-tokens", type=click.IntRange(1), help="of prompts, and sampled: no session begins beyond")
@click.option("--budget-cost", type=click.FloatRange(0, min_open=True), help="likewise, by --price or [engine.price]")
@click.option("--budget-seconds", type=click.FloatRange(0, min_open=True), help="likewise, of this run")
@click.option("--price", type=(float, float), metavar="PROMPT SAMPLED", help="of a million tokens each")
@engine_options
@log_options
@click.option("--json", "as_json", is_flag=True, help="a line of JSON for each session as it ends")
def command(
    tasks: list[TaskRequest],
    config_path: Path | None,
    data: Path,
    workers: int | None,
    resume: bool,
    accept: float | None,
    attempts: int,
    budget_tokens: int | None,
    budget_cost: float | None,
    budget_seconds: float | None,
    price: tuple[float, float] | None,
    engine_url: str | None,
    kind: str | None,
    log_format: LogFormat | None,
    log_level: LogLevel | None,
    as_json: bool,
) -> int:
    """Run every TASK (a file, or a folder of them): an agent in a sandbox, then its evaluation. Nothing runs before all
    tasks are found to be in order."""
    node = {} if workers is None else {"run_workers": workers}
    settings = private_settings(config_path, engine_url, kind, node=node)
    start_logging(settings, log_format, log_level)
    prices = settings.engine.price if price is None else PriceSettings(prompt=price[0], sampled=price[1])
    wish = _CollectionOptions(resume, accept, attempts, Budget(budget_tokens, budget_cost, budget_seconds, prices))
    sources: dict[str, str] = click.get_current_context().meta[SOURCES_KEY]
    return run_async(
        _RunCommand(settings, data, [with_task_key(task, sources[task.task_id]) for task in tasks], wish, as_json).run()
    )


class _CollectionOptions(msgspec.Struct, frozen=True):
    """Which of the samples are wanted."""

    resume: bool
    accept: float | None
    attempts: int
    budget: Budget


class _RunCommand:
    def __init__(
        self, settings: Settings, data: Path, tasks: list[TaskRequest], wish: _CollectionOptions, as_json: bool
    ) -> None:
        self._settings = settings
        self._data = data
        self._tasks = tasks
        self._options = wish
        self._as_json = as_json
        self._error_console = Console(stderr=True)
        self._total = sum(task.num_samples for task in tasks)
        self._tally = RunTally()
        self._tally_by_task = {task.task_id: RunTally() for task in tasks}
        self._output_lock = asyncio.Lock()
        self._collection: Collection | None = None

    async def run(self) -> int:
        """The exit status."""
        tune_process()
        began = time.monotonic()
        with (
            show_progress(self._error_console, self._total, silent=self._as_json) as shown,
            Interrupts(lambda: shown.print_message(_INTERRUPTED_MESSAGE), shown.stop) as interrupts,
        ):
            try:
                await self._run_collection(shown, interrupts)
            except asyncio.CancelledError:
                if interrupts.received_signal is None:
                    raise
        self._print_summary(time.monotonic() - began)
        if interrupts.exit_status is not None:
            rest = self._total - self._tally.sessions
            click.echo(f"polar: Interrupted: {rest} of {self._total} sessions were cancelled.{_RESUME_HINT}", err=True)
            return interrupts.exit_status
        if complaint := run_tally.describe_failures(self._tally, self._data, self._settings.engine):
            click.echo(f"polar: {complaint}", err=True)
            return 1
        if self._collection is not None and (what := self._collection.exhausted_limit) is not None:
            most = format_count(self._collection.num_unsettled, "session")
            click.echo(f"polar: The budget of {what} is used up; {most} at most would be left.{_BUDGET_HINT}", err=True)
            return 1
        return 0

    async def _run_collection(self, shown: RunProgress, interrupts: Interrupts) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if self._options.resume:  # two would run the same samples
                stack.enter_context(lock_collection(self._data))
            rollout = await stack.enter_async_context(LocalRollout(self._settings, self._data))
            plans = {plan.task.task_id: plan for plan in await rollout.plan(self._tasks)}
            wanted = await self._make_collection(rollout, list(plans.values()))
            shown.total = self._total = wanted.num_left
            if wanted.num_resumed and not self._as_json:
                shown.print_message(
                    f"{format_count(wanted.num_resumed, 'session')} of these tasks "
                    f"{_ARE_OR_IS[wanted.num_resumed == 1]} there already."
                )
            async with (
                poll_load(shown, rollout.get_load, self._tally),
                _unwrap_error_group(),
                asyncio.TaskGroup() as telling,
            ):
                async for finished in rollout.run(wanted):
                    self._tally.add(finished)
                    if self._options.accept is not None:  # who knows how many tries it takes?
                        shown.total = self._total = self._tally.sessions + wanted.num_left + rollout.num_running
                    self._tally_by_task[finished.task_id].add(finished)
                    shown.on_session_ended(finished, self._tally)
                    if self._as_json:  # beside the run: who reads on here is who starts the next session
                        telling.create_task(self._print_result(rollout, plans[finished.task_id], finished))
            interrupts.cancels_task = False  # what is left now is to be closed in order

    async def _make_collection(self, rollout: LocalRollout, plans: list[TaskPlan]) -> Collection:
        wish = self._options
        wanted = Collection(
            plans,
            rollout.get_usage,
            min_reward=wish.accept,
            max_attempts=wish.attempts,
            budget=wish.budget,
            max_running=self._settings.node.run_workers,
        )
        if wish.resume:
            await wanted.resume(rollout.plane.store)
        self._collection = wanted
        return wanted

    async def _print_result(self, rollout: LocalRollout, plan: TaskPlan, finished: FinishedSession) -> None:
        async with self._output_lock:
            line = msgspec.json.encode(await rollout.build_result(plan, finished)) + b"\n"
            await asyncio.to_thread(_write_line, line)

    def _print_summary(self, seconds: float) -> None:
        if self._as_json and not self._error_console.is_terminal:
            return
        console = run_tally.with_file_width(self._error_console if self._as_json else Console())
        if self._tally.sessions:
            self._print_sessions(console, seconds)
        self._print_collection(console)

    def _print_sessions(self, console: Console, seconds: float) -> None:
        run_tally.print_summary(console, self._tally_by_task, self._tally, seconds)
        if (note := describe_default_engine(self._settings)) is not None:
            console.print(note, highlight=False, soft_wrap=True)
        if self._tally.exited_cleanly and not self._tally.turns:
            console.print(_NO_CALLS_HINT, highlight=False, soft_wrap=True)
        console.print(
            f"What each session left is in {self._data / 'sessions'}. Look at one with: "
            + format_show_command(self._tally.last_session_id, self._data),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _print_collection(self, console: Console) -> None:
        collection, wish = self._collection, self._options
        if collection is None:
            return
        if wish.accept is not None or wish.resume:
            accepted = "a reward above 0" if wish.accept is None else f"a reward of {wish.accept:g} or more"
            print_sources(console, collection.stats_by_source, accepted)
        if (cost := collection.spending.cost) is not None:
            used = collection.spending.used
            tokens = f"{used.prompt:,} prompt tokens ({used.cached:,} of them cached), {used.sampled:,} sampled"
            console.print(f"All sessions so far: {tokens}, a cost of {cost:.4g}.", highlight=False, soft_wrap=True)


_RESUME_HINT = " The same command with --resume goes on."
_BUDGET_HINT = " With --resume, the same command and a larger budget go on: tokens and money of all runs count."
_ARE_OR_IS = ("are", "is")
_INTERRUPTED_MESSAGE = (
    "Interrupted: sessions are cancelled and torn down. Once more leaves at once, and what is left is tidied up by the "
    "next run on this data folder."
)
_NO_CALLS_HINT = "No agent asked the gateway anything: does it read OPENAI_BASE_URL, or another provider's?"


def _write_line(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


@contextlib.asynccontextmanager
async def _unwrap_error_group() -> AsyncIterator[None]:
    """What went wrong in a group of tasks, as if there were no group: the first is why the others were cancelled."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


# Acceptance rates by source


def print_sources(console: Console, rates: Mapping[str, SourceStats], criterion: str) -> None:
    table = Table(title=f"Accepted sessions by source ({criterion})", title_justify="left")
    table.add_column("source", overflow="fold")
    for name in ("tasks", "solved", "sessions", "accepted", "rate"):
        table.add_column(name, justify="right")
    for source, found in sorted(rates.items()):
        table.add_row(
            Text(source),
            str(len(found.tasks)),
            str(len(found.solved)),
            str(found.sessions),
            str(found.accepted),
            f"{found.accepted / found.sessions:.1%}",
        )
    console.print(table)
