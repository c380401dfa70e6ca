"""What the automatic check costs: its CPU time over that of the sessions which it checks, in one run.

    make bench-verify            python -m polar.bench.verify [--tokenizer DIR] [--rounds N] [--json]

The service runs in a process of its own, with a node, as `polar up` runs it; a scripted engine runs in this one. Tasks
are run to their end: a coding agent's conversation of 1 to 200 turns (verify_agent.py), each turn of which calls a tool
and is told its result. Then the task's results are read once, in one page, with `prefix_merging`.

    session   CPU of the service's process for a session, from its submission until its result was read
    node      of that, for a session that makes no call: queue, lease, stages, a local runtime, evaluation, result
    handing   of that, while results are read, built, checked and written as JSON
    check     of that, the checking thread, as `polar_verify_cpu_seconds_total` counts it

The promise is about check / session. The share without the node's part (gateway, store and handing out alone) is
printed beside it. Processes of a sandbox, and streaming, are not counted, and would make both shares smaller.
"""

import argparse
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

from polar.bench import verify_agent
from polar.bench.calls import make_filler
from polar.bench.client import BenchError, Connection, encode_get, encode_post
from polar.bench.process import ServerProcess
from polar.cli.common import run_async
from polar.config import EngineSettings, GatewaySettings, ServerSettings, Settings
from polar.engines.scripted import Play, ScriptedServer
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.gateway.process import tune_process
from polar.service import Service

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


class ServiceAddresses(Struct):
    control: str


async def serve(engine_url: str, tokenizer: str, data: Path) -> None:
    """Until standard input ends."""
    engine = EngineSettings.model_validate({"kind": "scripted", "urls": [engine_url], "tokenizer": tokenizer})
    settings = Settings(engine=engine, gateway=GatewaySettings(port=0), server=ServerSettings(port=0))
    tune_process()
    async with Service(settings, data, node=True) as service:
        sys.stdout.buffer.write(msgspec.json.encode(ServiceAddresses(service.control_url)) + b"\n")
        sys.stdout.buffer.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)


async def measure(tokenizer: str, rounds: int) -> list[CheckCost]:
    found: dict[ConversationSize, list[CheckCost]] = {size: [] for size in (_IDLE, *SIZES)}
    play = Play.random(0, max(size.turns for size in SIZES) + 1, 60)
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as name:
        request = Path(name) / "request.json"
        request.write_bytes(msgspec.json.encode({"body": _first_request(), "result": make_filler("result", 1_600)}))
        async with ScriptedServer(play, tokenizer=tokenizer, max_model_len=1 << 20, drift=0) as engine:
            argv = [sys.executable, "-m", "polar.bench.verify", "--serve", engine.url, tokenizer, f"{name}/data"]
            async with ServerProcess(argv, None, Path(name) / "server.log", speaks=True) as server:
                control = int((await server.hear(ServiceAddresses)).control.rpartition(":")[2])
                await server.answers(control, "/health", 60)
                bench = _Bench(server, control, request)
                await bench.run_task(ConversationSize(2, 2))  # whatever is imported and compiled on first use
                for _ in range(rounds):
                    for size, costs in found.items():
                        costs.append(await bench.run_task(size))
    node = statistics.median(cost.session for cost in found.pop(_IDLE))
    return [_median(costs, node) for costs in found.values()]


class _Bench:
    def __init__(self, server: ServerProcess, control: int, request: Path) -> None:
        self._server = server
        self._control = control
        self._request = request
        self._tasks = 0
        self._cursor = 0

    async def run_task(self, size: ConversationSize) -> CheckCost:
        self._tasks += 1
        command = shlex.join([sys.executable, verify_agent.__file__, str(self._request), str(size.turns)])
        task = {
            "task_id": f"t{self._tasks}",
            "instruction": "Make the failing tests pass.",
            "num_samples": size.samples,
            "timeout_seconds": 600,
            "runtime": {"backend": "local"},
            "agent": {"harness": "shell", "custom_shell": {"command": command if size.turns else "true"}},
            "evaluator": {"strategy": "session_completed"},
        }
        began = self._server.cpu()
        await self._ask(encode_post("/rollout/task/submit", msgspec.json.encode(task)))
        while await self._is_running():  # noqa: ASYNC110 (it is told of nothing)
            await asyncio.sleep(_LOOK_SECONDS)
        checked, passed = await self._read_check_totals()
        handing = self._server.cpu()
        page = msgspec.json.decode(
            await self._ask(encode_get(f"/rollout/results?unit=group&after={self._cursor}&limit=1"))
        )
        ended = self._server.cpu()
        seconds, passed_now = await self._read_check_totals()
        self._cursor, (group,) = page["cursor"], page["results"]
        traces = [result["trajectory"]["traces"] for result in group["results"]]
        if passed_now - passed != size.samples or any(len(one) != min(size.turns, 1) for one in traces):
            raise BenchError(f"Sessions failed, or are not one trace: {[one['error'] for one in group['results']]}")
        tokens = sum(len(one["prompt_ids"]) + len(one["response_ids"]) for one in traces[0])
        per_session = 1e3 / size.samples
        return CheckCost(
            turns=size.turns,
            tokens=tokens,
            session=per_session * (ended - began),
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
            raise BenchError("The service does not count its checks.")
        return float(seconds[1]), float(passed[1])

    async def _ask(self, request: bytes) -> bytes:
        """On a connection of its own: an idle one is closed while a session runs."""
        connection = await Connection.open(self._control)
        try:
            return (await connection.call(request)).content()
        finally:
            connection.close()


def _first_request() -> dict[str, Any]:
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


def _median(costs: list[CheckCost], node: float) -> CheckCost:
    session, handing, check = (
        statistics.median(getattr(cost, name) for cost in costs) for name in ("session", "handing", "check")
    )
    return CheckCost(costs[0].turns, costs[0].tokens, session, handing, check, node)


def show(costs: list[CheckCost]) -> None:
    click.echo("turns   tokens  session ms  node ms  handing ms  check ms   share  without the node")
    for it in costs:
        click.echo(
            f"{it.turns:5} {it.tokens:8,} {it.session:11.1f} {it.node:8.1f} {it.handing:11.1f} {it.check:9.2f} "
            f"{it.share:7.2%} {it.share_without_node:17.2%}"
        )
    worst = max(it.share for it in costs)
    verdict = "reached" if worst <= PROMISED_SHARE else "not reached"
    click.echo(f"Promised: at most {PROMISED_SHARE:.0%} of a session's CPU. Largest share: {worst:.2%} ({verdict}).")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the automatic check of sessions costs.")
    parser.add_argument(
        "--tokenizer", default=str(TOKENIZER_FOLDER), help="folder of a model's tokenizer and chat template"
    )
    parser.add_argument("--rounds", type=int, default=5, help="tasks of each size")
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.add_argument("--serve", nargs=3, metavar=("ENGINE", "TOKENIZER", "DATA"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        engine, tokenizer, data = asked.serve
        run_async(serve(engine, tokenizer, Path(data)))
        return
    costs = run_async(measure(asked.tokenizer, asked.rounds))
    if asked.json:
        sys.stdout.buffer.write(msgspec.json.encode(costs) + b"\n")
    else:
        show(costs)


if __name__ == "__main__":
    main()
