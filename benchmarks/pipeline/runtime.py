"""A kind of runtime for `make bench-pipeline`, in which time passes instead of work.

It takes long to start. Files are real. A command with TURNS in its environment is an agent: it calls the gateway with
its session's key, turn by turn, and spends its tools' time in between; one with SECONDS is an evaluation. What each
session went through is noted, by its number.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from benchmarks.client import Connection, encode_post
from benchmarks.pipeline.workload import WorkloadTurn
from polar.node.runtime_pool import RuntimeBackends
from polar.runtimes import files
from polar.runtimes.base import CommandResult, FileState, RuntimeBackend, RuntimeSpec, SandboxError
from polar.runtimes.state_folder import remove_tree

NAME = "simulated"
NUMBER, TURNS, SECONDS = "SIMULATED_SESSION", "SIMULATED_TURNS", "SIMULATED_SECONDS"
_START_SIGMA = 0.3


class SessionTimeline(Struct):
    """What a session went through; seconds of the monotonic clock."""

    called_at: float = 0.0  # its first model call
    ended_at: float = 0.0  # its run
    taken_at: float = 0.0  # the first of its files, afterwards: the evaluation begins
    fresh_at: float = 0.0  # its evaluator's runtime was created


class SimulatedRuntime:
    def __init__(
        self, id: str, spec: RuntimeSpec, backend: "SimulatedBackend", folder: Path, start_seconds: float
    ) -> None:
        self.id = id
        self.spec = spec
        self._backend = backend
        self._folder = folder
        self._start_seconds = start_seconds
        self._created_at = time.monotonic()
        self._root: int | None = None
        self._transfers = files.FileTransfers()
        self._agent: SessionTimeline | None = None  # whose agent ran here

    async def start(self) -> None:
        await asyncio.sleep(self._start_seconds)
        for inside in (self.spec.workdir, self.spec.home):
            os.makedirs(self.path(inside))
        self._root = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._backend.starts.release()

    def gateway_url(self) -> str:
        return self._backend.gateway_url

    def path(self, inside: str) -> str:
        return f"{self._folder}/{inside.lstrip('/')}"

    async def run(
        self,
        argv: list[str],  # noqa: ARG002  what is done stands in the environment
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,  # noqa: ARG002
        stdin: bytes = b"",  # noqa: ARG002
        timeout: float | None = None,  # noqa: ARG002
        output: Path | None = None,  # noqa: ARG002  nothing is printed
        max_output: int = 64 * 1024 * 1024,  # noqa: ARG002
    ) -> CommandResult:
        started_at = time.monotonic()
        variables = env or {}
        lived = self._backend.lives.setdefault(int(variables[NUMBER]), SessionTimeline())
        if TURNS in variables:
            self._agent = lived
            await self._run_agent(variables, lived)
        else:
            lived.fresh_at = self._created_at
            await asyncio.sleep(float(variables[SECONDS]))
        return CommandResult(0, time.monotonic() - started_at)

    async def _run_agent(self, variables: dict[str, str], lived: SessionTimeline) -> None:
        base = urlsplit(variables["OPENAI_BASE_URL"])
        assert base.port is not None
        messages = [{"role": "user", "content": "Do what takes its time."}]
        connection = await Connection.open(base.port)
        try:
            lived.called_at = time.monotonic()
            for turn in msgspec.json.decode(variables[TURNS], type=list[WorkloadTurn]):
                asked = {"model": NAME, "messages": messages, "max_tokens": turn.tokens}
                request = encode_post(
                    f"{base.path}/chat/completions", msgspec.json.encode(asked), variables["OPENAI_API_KEY"]
                )
                said = msgspec.json.decode((await connection.call(request)).read_content(), type=_Reply)
                await asyncio.sleep(turn.tool_seconds)
                messages += [
                    {"role": "assistant", "content": said.choices[0].message.content},
                    {"role": "user", "content": f"That took {turn.tool_seconds:.3f} seconds."},
                ]
        finally:
            connection.close()
            lived.ended_at = time.monotonic()

    async def put(self, source: Path | bytes, path: str) -> None:
        await self._transfers.put(self._require_root(), source, path)

    async def get(self, path: str, destination: Path, *, max_bytes: int = 1 << 30, all_links: bool = False) -> None:
        if self._agent is not None:
            self._agent.taken_at = self._agent.taken_at or time.monotonic()
        await self._transfers.get(self._require_root(), path, destination, max_bytes, all_links)

    async def delete(self, paths: list[str]) -> None:
        await self._transfers.delete(self._require_root(), paths)

    async def list_entries(self, path: str, *, exclude: Collection[str] = ()) -> dict[str, FileState]:
        return await self._transfers.list_entries(self._require_root(), path, exclude)

    def _require_root(self) -> int:
        if self._root is None:
            raise SandboxError(f"Runtime {self.id} is not there.")
        return self._root

    async def stop(self) -> None:
        return None

    async def restart(self) -> None:
        return None

    async def remove(self) -> None:
        if self._backend.runtimes.pop(self.id, None) is None:
            return
        await self._transfers.wait_until_idle()
        if self._root is not None:
            os.close(self._root)
            self._root = None
        await asyncio.to_thread(remove_tree, self._folder)


class SimulatedBackend:
    name = NAME

    def __init__(self, state: Path, gateway_url: str, *, start_seconds: float, seed: int) -> None:
        """`start_seconds` are the median's."""
        self.gateway_url = gateway_url
        self.lives: dict[int, SessionTimeline] = {}
        self.runtimes: dict[str, SimulatedRuntime] = {}
        self.most = 0  # at once
        self.starts = asyncio.Semaphore(0)  # of runtimes, that nobody has waited for yet
        self._state = state
        self._start_seconds = start_seconds
        self._rng = random.Random(seed)

    async def wait_until_started(self, count: int) -> None:
        """Until so many more runtimes have started."""
        for _ in range(count):
            await self.starts.acquire()

    async def check_availability(self) -> str | None:
        return None

    def check_image(self, image: str | None) -> str | None:  # noqa: ARG002
        return None

    async def prepare(self, image: str | None) -> None:  # noqa: ARG002
        return None

    async def create(self, id: str, spec: RuntimeSpec) -> SimulatedRuntime:
        folder = self._state / id
        folder.mkdir(parents=True)
        seconds = self._start_seconds * self._rng.lognormvariate(0, _START_SIGMA)
        runtime = self.runtimes[id] = SimulatedRuntime(id, spec, self, folder, seconds)
        self.most = max(self.most, len(self.runtimes))
        return runtime

    def trial_image(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def list_isolation_gaps(self) -> list[str]:
        return []

    async def sweep(self) -> list[str]:
        return []

    async def close(self) -> None:
        for runtime in list(self.runtimes.values()):
            await runtime.remove()


class SimulatedBackends(RuntimeBackends):
    """What a node is given in place of the kinds that are installed."""

    def __init__(self, kind: SimulatedBackend) -> None:
        self._simulated = kind

    async def get(self, backend: str) -> RuntimeBackend:  # noqa: ARG002
        return self._simulated

    async def list_available(self) -> list[str]:
        return [NAME]

    async def sweep(self) -> list[str]:
        return []

    async def close(self) -> None:
        await self._simulated.close()


class _Message(Struct):
    content: str


class _Choice(Struct):
    message: _Message


class _Reply(Struct):
    choices: list[_Choice]
