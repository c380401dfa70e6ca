"""The pool of processes that render long prompts (worker.py).

A process is started for its first job, and again if it was killed; a job whose process died is tried once more. There
are two lanes, so that long texts don't wait behind very long ones. A session has one job at a time, so that none takes
all processes. If a caller is cancelled, its job still runs to its end, since a new process would have to load the model
again.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import sys
from weakref import WeakValueDictionary

import msgspec

from polar.errors import PolarError
from polar.rendering.prompt_job import ContextExceeded, PromptJob, RenderedPrompt
from polar.rendering.template import TemplateError
from polar.rendering.worker import FRAME_LENGTH_BYTES, PromptResult, WorkerSetup

log = logging.getLogger(__name__)

VERY_LONG_BYTES = 1024 * 1024
"""Jobs from this size on have a lane of their own."""

JOB_SECONDS = 120.0
"""A job that takes longer is given up, and its process is killed."""

_MAX_TRIES = 2
_PIPE_LIMIT_BYTES = 1024 * 1024  # bytes of a reply that are buffered before reading goes on
_MAX_LANE_PROCESSES = 4  # of each lane


class WorkerDied(PolarError):
    """The process of a job ended before the job was done, in every try."""


class RenderTimeout(PolarError):
    """A job took longer than JOB_SECONDS."""


class WorkerPool:
    def __init__(self, setup: WorkerSetup) -> None:
        count = max(1, min(_MAX_LANE_PROCESSES, (os.cpu_count() or 1) // 4))
        self._long = [_Worker(setup) for _ in range(count)]
        self._very_long = [_Worker(setup) for _ in range(count)]
        self._session_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._jobs: set[asyncio.Task[PromptResult]] = set()

    @property
    def process_ids(self) -> list[int]:
        """The ids of the running processes."""
        return [worker.pid for worker in (*self._long, *self._very_long) if worker.pid is not None]

    async def make_prompt(self, session_id: str, job: PromptJob) -> RenderedPrompt:
        """Renders a prompt. Raises the errors of prompt_job.make_prompt, and WorkerDied or RenderTimeout."""
        frame = await asyncio.to_thread(pickle.dumps, job, pickle.HIGHEST_PROTOCOL)
        task = asyncio.get_running_loop().create_task(self._run(session_id, frame))
        self._jobs.add(task)
        task.add_done_callback(self._discard_job)
        result = await asyncio.shield(task)
        match result.failure:
            case None:
                return result.to_prompt()
            case "template":
                raise TemplateError(result.message)
            case "context_exceeded":
                assert job.context_length is not None
                raise ContextExceeded(job.context_length)
            case "too_deep":
                raise RecursionError
            case "failed":
                raise RuntimeError(f"A prompt could not be result: {result.message}")

    async def close(self) -> None:
        for task in self._jobs:
            task.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        for worker in (*self._long, *self._very_long):
            await worker.stop()

    def _discard_job(self, task: "asyncio.Task[PromptResult]") -> None:
        self._jobs.discard(task)
        if not task.cancelled():
            task.exception()  # the caller got it, or was cancelled

    async def _run(self, session_id: str, frame: bytes) -> PromptResult:
        lock = self._session_locks.get(session_id)
        if lock is None:
            lock = self._session_locks[session_id] = asyncio.Lock()
        async with lock:
            lane = self._very_long if len(frame) > VERY_LONG_BYTES else self._long
            for remaining_tries in reversed(range(_MAX_TRIES)):
                worker = min(lane, key=lambda worker: worker.pending_jobs)
                try:
                    return await worker.run(frame)
                except WorkerDied:
                    if not remaining_tries:
                        raise
        raise AssertionError


class _Worker:
    """One process, started when it gets its first job."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._job_lock = asyncio.Lock()
        self.pending_jobs = 0  # jobs, the running one included

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def run(self, frame: bytes) -> PromptResult:
        self.pending_jobs += 1
        try:
            async with self._job_lock:
                return await self._run(frame)
        finally:
            self.pending_jobs -= 1

    async def _run(self, frame: bytes) -> PromptResult:
        try:
            async with asyncio.timeout(JOB_SECONDS):
                if self.pid is None:
                    await self._start()
                await self._send(frame)
                return msgspec.msgpack.decode(await self._receive(), type=PromptResult)
        except BaseException as error:
            await self.stop()  # a late answer would be taken for that of the next job
            if isinstance(error, (ConnectionError, asyncio.IncompleteReadError)):
                log.warning("A process that renders prompts died; another one takes over.")
                raise WorkerDied("A process that renders prompts died.") from error
            if isinstance(error, TimeoutError):
                raise RenderTimeout(f"Rendering the prompt took more than {JOB_SECONDS:g} s.") from error
            raise

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "polar.rendering.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # an interrupt is for us alone, and our end is the end of its input
            limit=_PIPE_LIMIT_BYTES,
        )
        await self._send(msgspec.json.encode(self._setup))

    async def _send(self, frame: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(frame).to_bytes(FRAME_LENGTH_BYTES, "little"))
        self._process.stdin.write(frame)
        await self._process.stdin.drain()

    async def _receive(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        size = int.from_bytes(await self._process.stdout.readexactly(FRAME_LENGTH_BYTES), "little")
        return await self._process.stdout.readexactly(size)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
