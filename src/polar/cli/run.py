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
    load_private_settings,
    log_options,
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
from polar.records.sample import add_task_key
from polar.records.task import TaskRequest
from polar.telemetry.logs import LogFormat, LogLevel


@click.command("run")
@settings_options
@task_options
@click.option("--workers", type=click.IntRange(1), help="Run at most this many harnesses at a time.")
@click.option("--resume", is_flag=True, help="Resume an interrupted run from its data directory.")
@click.option("--accept", type=float, metavar="R", help="Stop sampling a task once a session earned R or more.")
@click.option(
    "--attempts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Try a sample this often when the platform fails.",
)
@click.option(
    "--budget-tokens", type=click.IntRange(1), help="Begin no session after this many prompt and sampled tokens."
)
@click.option(
    "--budget-cost",
    type=click.FloatRange(0, min_open=True),
    help="Begin no session after this cost, computed from --price or [engine.price].",
)
@click.option(
    "--budget-seconds", type=click.FloatRange(0, min_open=True), help="Begin no session after this many seconds."
)
@click.option(
    "--price", type=(float, float), metavar="PROMPT SAMPLED", help="Set the cost of a million tokens of each kind."
)
@engine_options
@log_options
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each session as it ends.")
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
    """Run every TASK (a file, or a folder of files): the agent in a sandbox, then its evaluation. All tasks are
    validated before the first one runs."""
    node = {} if workers is None else {"run_workers": workers}
    settings = load_private_settings(config_path, engine_url, kind, node=node)
    start_logging(settings, log_format, log_level)
    prices = settings.engine.price if price is None else PriceSettings(prompt=price[0], sampled=price[1])
    options = _CollectionOptions(resume, accept, attempts, Budget(budget_tokens, budget_cost, budget_seconds, prices))
    sources: dict[str, str] = click.get_current_context().meta[SOURCES_KEY]
    keyed_tasks = [add_task_key(task, sources[task.task_id]) for task in tasks]
    return run_async(_RunCommand(settings, data, keyed_tasks, options, as_json).run())


class _CollectionOptions(msgspec.Struct, frozen=True):
    """Which samples are run, and how often."""

    resume: bool
    accept: float | None
    attempts: int
    budget: Budget


class _RunCommand:
    def __init__(
        self, settings: Settings, data: Path, tasks: list[TaskRequest], options: _CollectionOptions, as_json: bool
    ) -> None:
        self._settings = settings
        self._data = data
        self._tasks = tasks
        self._options = options
        self._as_json = as_json
        self._error_console = Console(stderr=True)
        self._total = sum(task.num_samples for task in tasks)
        self._tally = RunTally()
        self._tally_by_task = {task.task_id: RunTally() for task in tasks}
        self._output_lock = asyncio.Lock()
        self._collection: Collection | None = None

    async def run(self) -> int:
        """Returns the exit status."""
        tune_process()
        began = time.monotonic()
        with (
            show_progress(self._error_console, self._total, silent=self._as_json) as progress,
            Interrupts(lambda: progress.print_message(_INTERRUPTED_MESSAGE), progress.stop) as interrupts,
        ):
            try:
                await self._run_collection(progress, interrupts)
            except asyncio.CancelledError:
                if interrupts.received_signal is None:
                    raise
        self._print_summary(time.monotonic() - began)
        if interrupts.exit_status is not None:
            cancelled = self._total - self._tally.sessions
            message = f"Interrupted: {cancelled} of {self._total} sessions were cancelled.{_RESUME_HINT}"
            click.echo(f"polar: {message}", err=True)
            return interrupts.exit_status
        if complaint := run_tally.describe_failures(self._tally, self._data, self._settings.engine):
            click.echo(f"polar: {complaint}", err=True)
            return 1
        if self._collection is not None and (limit := self._collection.exhausted_limit) is not None:
            unsettled = format_count(self._collection.num_unsettled, "session")
            message = f"The budget of {limit} is used up; at most {unsettled} would be left.{_BUDGET_HINT}"
            click.echo(f"polar: {message}", err=True)
            return 1
        return 0

    async def _run_collection(self, progress: RunProgress, interrupts: Interrupts) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if self._options.resume:  # two processes would run the same samples
                stack.enter_context(lock_collection(self._data))
            rollout = await stack.enter_async_context(LocalRollout(self._settings, self._data))
            plans = {plan.task.task_id: plan for plan in await rollout.plan(self._tasks)}
            collection = await self._make_collection(rollout, list(plans.values()))
            progress.total = self._total = collection.num_left
            if collection.num_resumed and not self._as_json:
                progress.print_message(
                    f"{format_count(collection.num_resumed, 'session')} of these tasks "
                    f"{_ARE_OR_IS[collection.num_resumed == 1]} there already."
                )
            async with (
                poll_load(progress, rollout.get_load, self._tally),
                _unwrap_error_group(),
                asyncio.TaskGroup() as printing,
            ):
                async for finished in rollout.run(collection):
                    self._tally.add(finished)
                    if self._options.accept is not None:  # the total is unknown until a sample is accepted
                        progress.total = self._total = self._tally.sessions + collection.num_left + rollout.num_running
                    self._tally_by_task[finished.task_id].add(finished)
                    progress.on_session_ended(finished, self._tally)
                    if self._as_json:  # in a task of its own: this loop must not delay the next session
                        printing.create_task(self._print_result(rollout, plans[finished.task_id], finished))
            interrupts.cancels_task = False  # only an orderly shutdown is left

    async def _make_collection(self, rollout: LocalRollout, plans: list[TaskPlan]) -> Collection:
        options = self._options
        collection = Collection(
            plans,
            rollout.get_usage,
            min_reward=options.accept,
            max_attempts=options.attempts,
            budget=options.budget,
            max_running=self._settings.node.run_workers,
        )
        if options.resume:
            await collection.resume(rollout.plane.store)
        self._collection = collection
        return collection

    async def _print_result(self, rollout: LocalRollout, plan: TaskPlan, finished: FinishedSession) -> None:
        async with self._output_lock:
            line = msgspec.json.encode(await rollout.build_result(plan, finished)) + b"\n"
            await asyncio.to_thread(_write_line, line)

    def _print_summary(self, seconds: float) -> None:
        if self._as_json and not self._error_console.is_terminal:
            return
        console = run_tally.set_file_width(self._error_console if self._as_json else Console())
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
            f"Logs and diffs of the sessions are in {self._data / 'sessions'}. Show one with: "
            + format_show_command(self._tally.last_session_id, self._data),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )

    def _print_collection(self, console: Console) -> None:
        collection, options = self._collection, self._options
        if collection is None:
            return
        if options.accept is not None or options.resume:
            accepted = "a reward above 0" if options.accept is None else f"a reward of {options.accept:g} or more"
            print_sources(console, collection.stats_by_source, accepted)
        if (cost := collection.spending.cost) is not None:
            used = collection.spending.used
            tokens = f"{used.prompt:,} prompt tokens ({used.cached:,} of them cached), {used.sampled:,} sampled"
            console.print(f"All sessions so far: {tokens}, a cost of {cost:.4g}.", highlight=False, soft_wrap=True)


_RESUME_HINT = " Repeat the command with --resume to continue."
_BUDGET_HINT = " Repeat the command with --resume and a larger budget to continue; usage of earlier runs counts."
_ARE_OR_IS = ("are", "is")
_INTERRUPTED_MESSAGE = (
    "Interrupted: sessions are cancelled and torn down. Interrupt again to exit at once; the next run on this data "
    "folder then cleans up."
)
_NO_CALLS_HINT = "No agent called the gateway: does it read OPENAI_BASE_URL, or another provider's variable?"


def _write_line(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


@contextlib.asynccontextmanager
async def _unwrap_error_group() -> AsyncIterator[None]:
    """Raises a task group's first error by itself: it is why the other tasks were cancelled."""
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
    for source, stats in sorted(rates.items()):
        table.add_row(
            Text(source),
            str(len(stats.tasks)),
            str(len(stats.solved)),
            str(stats.sessions),
            str(stats.accepted),
            f"{stats.accepted / stats.sessions:.1%}",
        )
    console.print(table)
