"""Processes of a benchmark: a server under measurement, with its CPU time and memory, and the process's own side.

The benchmark writes lines to the process's standard input and reads lines of JSON from its standard output. The process
ends when its input does, so that nothing outlives a benchmark that was killed.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import uvloop
from msgspec import Struct

from benchmarks.client import BenchmarkError, Connection, encode_get
from polar.telemetry import logs

T = TypeVar("T")


class ServerProcess:
    """An async context manager. Output goes to `log`, but for the standard output of a server that `speaks` as above.
    Without a core the process runs on any."""

    def __init__(
        self,
        argv: Sequence[str],
        core: int | None,
        log: Path,
        *,
        speaks: bool = False,
        env: dict[str, str] | None = None,
    ) -> None:
        self._argv = argv
        self._core = core
        self._log = log
        self._speaks = speaks
        self._env = env
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "ServerProcess":
        pipe = asyncio.subprocess.PIPE
        variables = os.environ | (self._env or {})
        variables.pop("DATABASE_URL", None)  # a benchmark must not write to somebody's database
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=pipe if self._speaks else asyncio.subprocess.DEVNULL,
                stdout=pipe if self._speaks else log,
                stderr=log,
                env=variables,
                preexec_fn=self._prepare_child,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._get_process()
        if process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    @property
    def pid(self) -> int:
        return self._get_process().pid

    def read_cpu_seconds(self) -> float:
        """Seconds of user and system time so far, of all threads: the process's CPU clock, to the nanosecond."""
        return time.clock_gettime(~self.pid << 3 | 2)  # CLOCK_PROCESS_CPUTIME_ID of another process

    def read_memory_bytes(self) -> int:
        """Resident bytes."""
        resident = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(resident) * os.sysconf("SC_PAGE_SIZE")

    async def read_message(self, type: type[T], timeout: float = 60) -> T:
        """The next line that the server prints."""
        process = self._get_process()
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await process.stdout.readline()
            return msgspec.json.decode(line, type=type)
        except (TimeoutError, msgspec.DecodeError) as error:
            raise self.make_error("did not say what it was asked") from error

    async def wait(self) -> None:
        """Waits until the process has ended."""
        await self._get_process().wait()

    def send_line(self, line: str) -> None:
        process = self._get_process()
        assert process.stdin is not None
        process.stdin.write(line.encode() + b"\n")

    async def wait_until_healthy(self, port: int, path: str, timeout: float) -> None:
        """Returns once the server answers 200 there."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._get_process().returncode is None:
            try:
                connection = await Connection.open(port)
                await connection.call(encode_get(path))
                connection.close()
                return
            except (OSError, BenchmarkError):
                await asyncio.sleep(0.2)
        raise self.make_error("did not start")

    def make_error(self, what: str) -> BenchmarkError:
        tail = self._log.read_text(errors="replace").strip().splitlines()[-5:]
        return BenchmarkError(f"{self._argv[0]} {what}: {' / '.join(tail) or 'it printed nothing'}")

    def _get_process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    def _prepare_child(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the bench, which ends its servers


# The process's own side


class Address(Struct):
    """What a server with a control plane prints when it is ready."""

    control: str


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine as Polar's own commands do: on uvloop, and with their log."""
    logs.configure()
    return uvloop.run(coroutine)


def print_message(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


async def read_input_lines() -> AsyncIterator[bytes]:
    """Without their ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.rstrip(b"\n")


async def wait_for_input_end() -> None:
    async for _ in read_input_lines():
        pass
