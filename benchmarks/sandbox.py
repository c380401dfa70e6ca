"""`make bench-sandbox`: how long a sandbox takes from launch until its first command has ended, and a ready one.

    cold    32 sandboxes wanted, 4 launching at a time, all alive together: created, started, `true` run in each
    ready   one that stands ready: `true` run in it
    docker  `docker run` of the same command with the same limits, as many at a time, in the same run

What runtimes of an image share is prepared before, on both sides: the layers below, and the image in the engine.
"""

import asyncio
import io
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import click
import msgspec
from msgspec import Struct, field
from rich.console import Console
from rich.table import Table

from benchmarks.client import BenchmarkError
from benchmarks.command_line import Progress, json_option, make_console, make_progress_printer
from benchmarks.process import run_async
from benchmarks.report import LatencySummary, Promise, describe_machine, make_promise_table
from polar.runtimes.base import Limits, Runtime, RuntimeSpec
from polar.runtimes.bubblewrap import Bubblewrap

_LIMITS = Limits(cpus=1.0, memory_mb=512, processes=256)
_COMMAND = ["/usr/bin/true"]
_IMAGE = "polar-bench-sandbox"
_COMMAND_TIMEOUT_SECONDS = 120.0  # seconds for one `docker run`


class SandboxPlan(Struct, frozen=True):
    """How much is measured."""

    wanted: int = 32
    launching: int = 4
    rounds: int = 5
    docker_runs: int = 16


QUICK = SandboxPlan(rounds=1, docker_runs=4)


class SandboxReport(Struct):
    plan: SandboxPlan
    cold: LatencySummary
    ready: LatencySummary
    removed: LatencySummary
    docker: LatencySummary | None = None
    absent: dict[str, str] = field(default_factory=dict)  # what was not measured, and why


async def run(plan: SandboxPlan, progress: Progress) -> SandboxReport:
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as folder:
        kind = Bubblewrap(Path(folder), "http://127.0.0.1:9")
        if (why := await kind.check_availability()) is not None:
            raise BenchmarkError(f"No sandbox can be measured here: {why}")
        try:
            progress("bubblewrap")
            await kind.prepare(None)
            cold, ready, removed = await _measure_bubblewrap(kind, plan)
        finally:
            await kind.close()
    report = SandboxReport(
        plan,
        LatencySummary.from_seconds(cold),
        LatencySummary.from_seconds(ready),
        LatencySummary.from_seconds(removed),
    )
    progress("docker")
    docker, why_not = await _measure_docker(plan)
    if why_not is not None:
        report.absent["docker"] = why_not
    else:
        report.docker = LatencySummary.from_seconds(docker)
    return report


async def _measure_bubblewrap(kind: Bubblewrap, plan: SandboxPlan) -> tuple[list[float], list[float], list[float]]:
    cold: list[float] = []
    ready: list[float] = []
    removed: list[float] = []
    run = secrets.token_hex(4)  # another may be under way
    for turn in range(plan.rounds + 1):
        runtimes: list[Runtime] = []

        async def launch(index: int, turn: int = turn, runtimes: list[Runtime] = runtimes) -> None:
            runtime = await kind.create(f"bench-{run}-{turn}-{index}", RuntimeSpec(limits=_LIMITS))
            runtimes.append(runtime)
            await runtime.start()
            await _run_command(runtime)

        launched = await _time_each(launch, plan.wanted, plan.launching)
        taken = await _time_each(lambda index, runtimes=runtimes: _run_command(runtimes[index]), plan.wanted, 1)  # type: ignore[misc]
        gone = await _time_each(lambda index, runtimes=runtimes: runtimes[index].remove(), plan.wanted, plan.launching)  # type: ignore[misc]
        if turn > 0:  # the first warms the machine's caches, as with the other side's image
            cold, ready, removed = cold + launched, ready + taken, removed + gone
    return cold, ready, removed


async def _run_command(runtime: Runtime) -> None:
    completed = await runtime.run(_COMMAND)
    if completed.exit_code != 0:
        raise BenchmarkError(f"{_COMMAND[0]} ended with {completed.exit_code} in {runtime.id}.")


async def _time_each(work: Callable[[int], Awaitable[None]], count: int, at_once: int) -> list[float]:
    """Seconds of each, from when its turn came."""
    slots = asyncio.Semaphore(at_once)

    async def one(index: int) -> float:
        async with slots:
            started_at = time.perf_counter()
            await work(index)
            return time.perf_counter() - started_at

    return await asyncio.gather(*(one(index) for index in range(count)))


async def _measure_docker(plan: SandboxPlan) -> tuple[list[float], str | None]:
    program = shutil.which("docker")
    if program is None or plan.docker_runs == 0:
        return [], "docker is not installed" if program is None else "not asked for"
    imported = await _run_client([program, "import", "-", _IMAGE], await asyncio.to_thread(_build_image))
    if imported is not None:
        return [], f"docker can't be used: {imported}"
    limits = [f"--cpus={_LIMITS.cpus}", f"--memory={_LIMITS.memory_mb}m", f"--pids-limit={_LIMITS.processes}"]

    async def one(_: int) -> None:
        argv = [program, "run", "--rm", "--network", "none", *limits, _IMAGE, *_COMMAND]
        if (error := await _run_client(argv)) is not None:
            raise BenchmarkError(f"docker run failed: {error}")

    try:
        await one(0)
        return await _time_each(one, plan.docker_runs, plan.launching), None
    except BenchmarkError as error:
        return [], str(error)
    finally:
        await _run_client([program, "rmi", "-f", _IMAGE])


async def _run_client(argv: list[str], stdin: bytes = b"") -> str | None:
    """Runs a client to its end; what it complained of, or None."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=asyncio.subprocess.DEVNULL, stderr=pipe)
    try:
        async with asyncio.timeout(_COMMAND_TIMEOUT_SECONDS):
            _, errors = await process.communicate(stdin)
    except TimeoutError:
        process.kill()
        await process.wait()
        return f"no end after {_COMMAND_TIMEOUT_SECONDS:.0f} seconds"
    if process.returncode == 0:
        return None
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[0] if lines else f"exit code {process.returncode}"


def _build_image() -> bytes:
    """A root with one program and what it is linked against, so that no registry is asked."""
    program = Path(_COMMAND[0])
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    needed = [program, *(Path(word) for line in listed.splitlines() for word in line.split() if word.startswith("/"))]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        for path in needed:
            tar.add(path, str(path).lstrip("/"))
    return archive.getvalue()


# Promises and tables


def list_promises(report: SandboxReport) -> list[Promise]:
    return list(_iterate_promises(report))


def _iterate_promises(report: SandboxReport) -> Iterator[Promise]:
    cold, ready = report.cold, report.ready
    how = f"{report.plan.wanted} wanted, {report.plan.launching} at a time"
    yield Promise(f"cold start, p50, {how}", "at most 30 ms", f"{cold.p50:.1f} ms", cold.p50 <= 30)
    yield Promise(f"cold start, p99, {how}", "at most 150 ms", f"{cold.p99:.1f} ms", cold.p99 <= 150)
    yield Promise("a ready one, p50", "at most 5 ms", f"{ready.p50:.1f} ms", ready.p50 <= 5)
    if report.docker is not None:
        ratio = report.docker.p50 / cold.p50
        yield Promise("cold start against `docker run`, p50", "at most 1/10", f"1/{ratio:.1f}", ratio >= 10)


def to_json(report: SandboxReport) -> bytes:
    return msgspec.json.encode(
        {"machine": describe_machine(), **msgspec.structs.asdict(report), "promises": list_promises(report)},
    )


def print_report(report: SandboxReport, console: Console) -> None:
    table = Table(title="From launch until the first command has ended (ms)", title_justify="left")
    for column in ("", "p50", "p99", "longest", "measured"):
        table.add_column(column, justify="left" if not column else "right")
    for name, times in _iterate_rows(report):
        figures = (f"{figure:.1f}" for figure in (times.p50, times.p99, times.longest))
        table.add_row(name, *figures, str(times.count))
    console.print(table)
    for name, why in report.absent.items():
        console.print(f"{name} was not measured: {why}", highlight=False, markup=False)
    console.print(make_promise_table(list_promises(report)))


def _iterate_rows(report: SandboxReport) -> Iterator[tuple[str, LatencySummary]]:
    yield "bubblewrap, cold", report.cold
    yield "bubblewrap, ready", report.ready
    if report.docker is not None:
        yield "docker run", report.docker
    yield "bubblewrap, removed", report.removed


# The command


@click.command("sandbox")
@click.option("--quick", is_flag=True, help="Run one round.")
@json_option
def command(quick: bool, as_json: bool) -> None:
    """Measure the cold start of a sandbox, and a ready one, against docker run."""
    measured = run_async(run(QUICK if quick else SandboxPlan(), make_progress_printer()))
    if as_json:
        click.echo(to_json(measured))
    else:
        print_report(measured, make_console())
