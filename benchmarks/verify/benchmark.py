"""`make bench-verify`: what the automatic check of sessions costs, as a share of their CPU time, in one run.

The service runs in a process of its own, with a node, as `polar up` runs it; a scripted engine runs in this one. Tasks
are run to their end: a coding agent's conversation of 1 to 200 turns (agent.py), each turn of which calls a tool
and is told its result. Then the task's results are read once, in one page, with `prefix_merging`.

    session   CPU of the service's process for a session, from its submission until its result was read
    node      of that, for a session that makes no call: queue, lease, stages, a local runtime, evaluation, result
    handing   of that, while results are read, built, checked and written as JSON
    check     of that, the checking thread, as `polar_verify_cpu_seconds_total` counts it

The promise is about check / session. The share without the node's part (gateway, store and handing out alone) is
printed beside it. Processes of a sandbox, and streaming, are not counted, and would make both shares smaller.
"""

import asyncio
import re
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from benchmarks.calls import make_filler
from benchmarks.client import BenchmarkError, Connection, encode_get, encode_post, get_port
from benchmarks.command_line import json_option, tokenizer_option
from benchmarks.process import Address, ServerProcess, run_async
from benchmarks.verify import agent
from polar.engines.scripted import Play, ScriptedServer
from polar.engines.scripted.server import TOKENIZER_FOLDER

PROMISED_SHARE = 0.02
_SECONDS = re.compile(rb"^polar_verify_cpu_seconds_total (\S+)", re.MULTILINE)
_PASSED = re.compile(rb'^polar_verified_sessions_total\{result="passed"\} (\S+)', re.MULTILINE)
_LOOK_SECONDS = 0.25


class ConversationSize(Struct, frozen=True):
    turns: int
    samples: int  # sessions of a task


SIZES = (
    ConversationSize(1, 16),
    ConversationSize(5, 8),
    ConversationSize(20, 4),
    ConversationSize(50, 2),
    ConversationSize(100, 1),
    ConversationSize(200, 1),
)
_IDLE = ConversationSize(0, 16)


class CheckCost(Struct):
    """Of one session, in CPU milliseconds; medians over the rounds."""

    turns: int
    tokens: int  # of its trace
    session: float
    handing: float
    check: float
    node: float = 0.0

    @property
    def share(self) -> float:
        """Of all that Polar spends on the session."""
        return self.check / self.session

    @property
    def share_without_node(self) -> float:
        return self.check / (self.session - self.node)


async def measure(tokenizer: str, rounds: int) -> list[CheckCost]:
    found: dict[ConversationSize, list[CheckCost]] = {size: [] for size in (_IDLE, *SIZES)}
    play = Play.random(0, max(size.turns for size in SIZES) + 1, 60)
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        request = Path(name) / "request.json"
        request.write_bytes(
            msgspec.json.encode({"body": _make_first_request(), "result": make_filler("result", 1_600)})
        )
        async with ScriptedServer(play, tokenizer=tokenizer, max_model_len=1 << 20, drift=0) as engine:
            argv = [sys.executable, "-m", "benchmarks.verify.server", engine.url, tokenizer, f"{name}/data"]
            async with ServerProcess(argv, None, Path(name) / "server.log", speaks=True) as server:
                control = get_port((await server.read_message(Address)).control)
                await server.wait_until_healthy(control, "/health", 60)
                bench = _Bench(server, control, request)
                await bench.run_task(ConversationSize(2, 2))  # whatever is imported and compiled on first use
                for _ in range(rounds):
                    for size, costs in found.items():
                        costs.append(await bench.run_task(size))
    node = statistics.median(cost.session for cost in found.pop(_IDLE))
    return [_compute_medians(costs, node) for costs in found.values()]


class _Bench:
    def __init__(self, server: ServerProcess, control: int, request: Path) -> None:
        self._server = server
        self._control = control
        self._request = request
        self._tasks = 0
        self._cursor = 0

    async def run_task(self, size: ConversationSize) -> CheckCost:
        self._tasks += 1
        command = shlex.join([sys.executable, agent.__file__, str(self._request), str(size.turns)])
        task = {
            "task_id": f"t{self._tasks}",
            "instruction": "Make the failing tests pass.",
            "num_samples": size.samples,
            "timeout_seconds": 600,
            "runtime": {"backend": "local"},
            "agent": {"harness": "shell", "custom_shell": {"command": command if size.turns else "true"}},
            "evaluator": {"strategy": "session_completed"},
        }
        started_at = self._server.read_cpu_seconds()
        await self._ask(encode_post("/rollout/task/submit", msgspec.json.encode(task)))
        while await self._is_running():  # noqa: ASYNC110 (it is told of nothing)
            await asyncio.sleep(_LOOK_SECONDS)
        checked, passed = await self._read_check_totals()
        handing = self._server.read_cpu_seconds()
        page = msgspec.json.decode(
            await self._ask(encode_get(f"/rollout/results?unit=group&after={self._cursor}&limit=1"))
        )
        ended = self._server.read_cpu_seconds()
        seconds, passed_now = await self._read_check_totals()
        self._cursor, (group,) = page["cursor"], page["results"]
        traces = [result["trajectory"]["traces"] for result in group["results"]]
        if passed_now - passed != size.samples or any(len(one) != min(size.turns, 1) for one in traces):
            raise BenchmarkError(f"Sessions failed, or are not one trace: {[one['error'] for one in group['results']]}")
        tokens = sum(len(one["prompt_ids"]) + len(one["response_ids"]) for one in traces[0])
        per_session = 1e3 / size.samples
        return CheckCost(
            turns=size.turns,
            tokens=tokens,
            session=per_session * (ended - started_at),
            handing=per_session * (ended - handing),
            check=per_session * (seconds - checked),
        )

    async def _is_running(self) -> bool:
        counts = msgspec.json.decode(await self._ask(encode_get("/rollout/status")))["runs"]["default"]
        return any(counts[state] for state in ("queued", "leased", "waiting"))

    async def _read_check_totals(self) -> tuple[float, float]:
        """CPU seconds of all checks so far, and sessions that passed."""
        text = await self._ask(encode_get("/metrics"))
        seconds, passed = _SECONDS.search(text), _PASSED.search(text)
        if seconds is None or passed is None:
            raise BenchmarkError("The service does not count its checks.")
        return float(seconds[1]), float(passed[1])

    async def _ask(self, request: bytes) -> bytes:
        """On a connection of its own: an idle one is closed while a session runs."""
        connection = await Connection.open(self._control)
        try:
            return (await connection.call(request)).read_content()
        finally:
            connection.close()


def _make_first_request() -> dict[str, Any]:
    """Some 8,500 tokens of system prompt and tools."""
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    names = ["bash", *(f"tool_{number}" for number in range(1, 12))]
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": make_filler(name, 1_300), "parameters": parameters},
        }
        for name in names
    ]
    messages = [
        {"role": "system", "content": make_filler("system", 18_000)},
        {"role": "user", "content": "Make the failing tests pass."},
    ]
    return {"model": "scripted", "messages": messages, "tools": tools}


def _compute_medians(costs: list[CheckCost], node: float) -> CheckCost:
    session, handing, check = (
        statistics.median(getattr(cost, name) for cost in costs) for name in ("session", "handing", "check")
    )
    return CheckCost(costs[0].turns, costs[0].tokens, session, handing, check, node)


def print_report(costs: list[CheckCost]) -> None:
    click.echo("turns   tokens  session ms  node ms  handing ms  check ms   share  without the node")
    for it in costs:
        click.echo(
            f"{it.turns:5} {it.tokens:8,} {it.session:11.1f} {it.node:8.1f} {it.handing:11.1f} {it.check:9.2f} "
            f"{it.share:7.2%} {it.share_without_node:17.2%}"
        )
    worst = max(it.share for it in costs)
    verdict = "reached" if worst <= PROMISED_SHARE else "not reached"
    click.echo(f"Promised: at most {PROMISED_SHARE:.0%} of a session's CPU. Largest share: {worst:.2%} ({verdict}).")


# The command


@click.command("verify")
@click.option(
    "--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Run so many tasks of each size."
)
@tokenizer_option
@json_option
def command(rounds: int, tokenizer: Path | None, as_json: bool) -> None:
    """Measure what the automatic check of sessions costs, as a share of their CPU."""
    costs = run_async(measure(str(tokenizer or TOKENIZER_FOLDER), rounds))
    if as_json:
        click.echo(msgspec.json.encode(costs))
    else:
        print_report(costs)
