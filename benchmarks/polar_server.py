"""Polar's gateway as `polar up` runs it, with a watch on its event loop when one is asked for.

    python -m benchmarks.polar_server ENGINE_URL DATA_DIR [TOKENIZER_DIR]

It prints its addresses. A line on its standard input begins a watch, and the next one ends it and has its report
printed; the process ends with its input.

The watch sees how late a timer of one millisecond comes. Lateness has three causes: the loop's own thread worked (its
CPU time grew), another thread of the process held the interpreter (the process's CPU time grew), or the machine gave
the core to somebody else (neither did).
"""

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.process import print_message, read_input_lines, run_async
from polar.config import EngineSettings, GatewaySettings, ServerSettings, Settings
from polar.gateway.process import tune_process
from polar.service import Service

TICK_SECONDS = 0.001
STALL_SECONDS = 0.010


class LoopStall(Struct):
    """Milliseconds: how late the loop was, and what its thread and its process worked meanwhile."""

    late: float
    thread_cpu: float
    process_cpu: float


class LoopReport(Struct):
    """All in milliseconds, but for the time that was watched."""

    seconds: float
    late_p50: float
    late_p99: float
    late_max: float
    stalls: list[LoopStall]
    collections: int
    gc_total: float
    gc_max: float


class LoopMonitor:
    """Watches the running loop from when it is made until it is asked for its report."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._late: list[float] = []
        self._stalls: list[LoopStall] = []
        self._pauses: list[float] = []
        self._collecting_since = 0.0
        self._begun = self._due = time.monotonic()
        self._thread_cpu, self._process_cpu = time.thread_time(), time.process_time()
        gc.callbacks.append(self._collected)
        self._tick()

    def make_report(self) -> LoopReport:
        self._timer.cancel()
        gc.callbacks.remove(self._collected)
        late = sorted(self._late)
        return LoopReport(
            seconds=time.monotonic() - self._begun,
            late_p50=late[len(late) // 2] * 1e3,
            late_p99=late[len(late) * 99 // 100] * 1e3,
            late_max=late[-1] * 1e3,
            stalls=self._stalls,
            collections=len(self._pauses),
            gc_total=sum(self._pauses) * 1e3,
            gc_max=max(self._pauses, default=0.0) * 1e3,
        )

    def _tick(self) -> None:
        now = time.monotonic()
        thread_cpu, process_cpu = time.thread_time(), time.process_time()
        late = now - self._due
        self._late.append(late)
        if late > STALL_SECONDS:
            worked = thread_cpu - self._thread_cpu
            self._stalls.append(LoopStall(late * 1e3, worked * 1e3, (process_cpu - self._process_cpu) * 1e3))
        self._thread_cpu, self._process_cpu = thread_cpu, process_cpu
        self._due = now + TICK_SECONDS
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _collected(self, phase: str, info: dict[str, Any]) -> None:  # noqa: ARG002
        if phase == "start":
            self._collecting_since = time.monotonic()
        else:
            self._pauses.append(time.monotonic() - self._collecting_since)


class GatewayAddresses(Struct):
    gateway: str
    control: str


async def serve(engine_url: str, data: Path, tokenizer: str | None = None) -> None:
    settings = Settings(
        engine=EngineSettings(kind="vllm", urls=[engine_url], tokenizer=tokenizer),
        gateway=GatewaySettings(port=0),
        server=ServerSettings(port=0),
    )
    tune_process()
    async with Service(settings, data) as service:
        print_message(GatewayAddresses(service.gateway_url, service.control_url))
        watch: LoopMonitor | None = None
        async for _ in read_input_lines():
            if watch is None:
                watch = LoopMonitor()
            else:
                print_message(watch.make_report())
                watch = None


if __name__ == "__main__":
    run_async(serve(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
