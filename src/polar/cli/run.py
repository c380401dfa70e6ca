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

from polar.cli import run_sources, run_summary
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
from polar.cli.run_tally import Tally, count
from polar.cli.tasks import SOURCES, task_options
from polar.config import PriceSettings, Settings
from polar.data.alone import alone
from polar.data.budget import Budget
from polar.data.collecting import Collection
from polar.data_plane import settle_process
from polar.node.finished import Finished
from polar.node.local import LocalRollout
from polar.node.plan import Plan
from polar.rollout.models import TaskRequest
from polar.rollout.samples import keyed
from polar.telemetry.logs import Format, Level


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
    log_format: Format | None,
    log_level: Level | None,
    as_json: bool,
) -> int:
    """Run every TASK (a file, or a folder of them): an agent in a sandbox, then its evaluation. Nothing runs before all
    tasks are found to be in order."""
    node = {} if workers is None else {"run_workers": workers}
    settings = private_settings(config_path, engine_url, kind, node=node)
    start_log(settings, log_format, log_level)
    prices = settings.engine.price if price is None else PriceSettings(prompt=price[0], sampled=price[1])
    wish = _Wish(resume, accept, attempts, Budget(budget_tokens, budget_cost, budget_seconds, prices))
    sources: dict[str, str] = click.get_current_context().meta[SOURCES]
    return run(_Run(settings, data, [keyed(task, sources[task.task_id]) for task in tasks], wish, as_json).to_its_end())


class _Wish(msgspec.Struct, frozen=True):
    """Which of the samples are wanted."""

    resume: bool
    accept: float | None
    attempts: int
    budget: Budget


class _Run:
    def __init__(self, settings: Settings, data: Path, tasks: list[TaskRequest], wish: _Wish, as_json: bool) -> None:
        self._settings = settings
        self._data = data
        self._tasks = tasks
        self._wish = wish
        self._as_json = as_json
        self._errors = Console(stderr=True)
        self._total = sum(task.num_samples for task in tasks)
        self._tally = Tally()
        self._by_task = {task.task_id: Tally() for task in tasks}
        self._telling = asyncio.Lock()
        self._collection: Collection | None = None

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
            click.echo(f"polar: Interrupted: {rest} of {self._total} sessions were cancelled.{_GO_ON}", err=True)
            return interrupts.status
        if complaint := run_summary.complaint(self._tally, self._data, self._settings.engine):
            click.echo(f"polar: {complaint}", err=True)
            return 1
        if self._collection is not None and (what := self._collection.stopped) is not None:
            most = count(self._collection.not_run, "session")
            click.echo(f"polar: The budget of {what} is used up; {most} at most would be left.{_SPENT}", err=True)
            return 1
        return 0

    async def _run(self, shown: Progress, interrupts: Interrupts) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if self._wish.resume:  # two would run the same samples
                stack.enter_context(alone(self._data))
            rollout = await stack.enter_async_context(LocalRollout(self._settings, self._data))
            plans = {plan.task.task_id: plan for plan in await rollout.plan(self._tasks)}
            wanted = await self._wanted(rollout, list(plans.values()))
            shown.total = self._total = wanted.left
            if wanted.found and not self._as_json:
                shown.say(f"{count(wanted.found, 'session')} of these tasks {_IS[wanted.found == 1]} there already.")
            async with (
                followed(shown, rollout.load, self._tally),
                _one_error(),
                asyncio.TaskGroup() as telling,
            ):
                async for finished in rollout.run(wanted):
                    self._tally.add(finished)
                    if self._wish.accept is not None:  # who knows how many tries it takes?
                        shown.total = self._total = self._tally.sessions + wanted.left + rollout.running
                    self._by_task[finished.task_id].add(finished)
                    shown.ended(finished, self._tally)
                    if self._as_json:  # beside the run: who reads on here is who starts the next session
                        telling.create_task(self._tell(rollout, plans[finished.task_id], finished))
            interrupts.cancels = False  # what is left now is to be closed in order

    async def _wanted(self, rollout: LocalRollout, plans: list[Plan]) -> Collection:
        wish = self._wish
        wanted = Collection(
            plans,
            rollout.used,
            accept=wish.accept,
            attempts=wish.attempts,
            budget=wish.budget,
            at_once=self._settings.node.run_workers,
        )
        if wish.resume:
            await wanted.resume(rollout.plane.store)
        self._collection = wanted
        return wanted

    async def _tell(self, rollout: LocalRollout, plan: Plan, finished: Finished) -> None:
        async with self._telling:
            line = msgspec.json.encode(await rollout.result(plan, finished)) + b"\n"
            await asyncio.to_thread(_write, line)

    def _sum_up(self, seconds: float) -> None:
        if self._as_json and not self._errors.is_terminal:
            return
        console = run_summary.console_of_width(self._errors if self._as_json else Console())
        if self._tally.sessions:
            self._sum_up_sessions(console, seconds)
        self._sum_up_collection(console)

    def _sum_up_sessions(self, console: Console, seconds: float) -> None:
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

    def _sum_up_collection(self, console: Console) -> None:
        collection, wish = self._collection, self._wish
        if collection is None:
            return
        if wish.accept is not None or wish.resume:
            accepted = "a reward above 0" if wish.accept is None else f"a reward of {wish.accept:g} or more"
            run_sources.show(console, collection.rates, accepted)
        if (cost := collection.spending.cost) is not None:
            used = collection.spending.used
            tokens = f"{used.prompt:,} prompt tokens ({used.cached:,} of them cached), {used.sampled:,} sampled"
            console.print(f"All sessions so far: {tokens}, a cost of {cost:.4g}.", highlight=False, soft_wrap=True)


_GO_ON = " The same command with --resume goes on."
_SPENT = " With --resume, the same command and a larger budget go on: tokens and money of all runs count."
_IS = ("are", "is")
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
