"""A task's steps in a runtime: files put into it, commands run in it."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from polar.errors import PolarError
from polar.records.task import Exec, Step, UploadDir, UploadFile
from polar.runtimes.base import Runtime

_MAX_BACKOFF_SECONDS = 5.0
_MAX_LOG_TAIL_CHARS = 2000  # characters of a failed command's output that are told


class PrepareError(PolarError):
    """A step of the task's own failed before any agent was there: the task's fault, or the platform's."""


async def run_prepare_steps(runtime: Runtime, steps: Iterable[Step], *, log: Path) -> None:
    """What commands print goes to `log`, each time anew."""
    for number, step in enumerate(steps):
        if isinstance(step, UploadFile):
            content = Path(step.source) if step.source is not None else (step.content or "").encode()
            await _put(runtime, content, step.target, number)
        elif isinstance(step, UploadDir):
            await _put(runtime, Path(step.source), step.target, number)
        else:
            await _run(runtime, step, log, number)


async def _put(runtime: Runtime, source: Path | bytes, target: str, number: int) -> None:
    try:
        await runtime.put(source, _to_absolute(runtime, target))
    except OSError as error:
        what = source if isinstance(source, Path) else "its content"
        raise PrepareError(f"Step {number} can't upload {what} to {target}: {error}.") from error


async def _run(runtime: Runtime, step: Exec, log: Path, number: int) -> None:
    argv = ["sh", "-c", step.command] if isinstance(step.command, str) else step.command
    cwd = None if step.cwd is None else _to_absolute(runtime, step.cwd)
    for attempt in range(step.max_attempts):
        done = await runtime.run(argv, env=step.env, cwd=cwd, timeout=step.timeout_seconds, output=log)
        if done.exit_code == 0:
            return
        if attempt + 1 < step.max_attempts:
            await asyncio.sleep(min(step.retry_backoff_seconds * 2**attempt, _MAX_BACKOFF_SECONDS))
    how = "took too long" if done.timed_out else f"ended with {done.exit_code}"
    raise PrepareError(f"Step {number} ({' '.join(argv)[:200]}) {how}: {_read_log_tail(log) or 'it printed nothing'}")


def _read_log_tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_MAX_LOG_TAIL_CHARS:].strip() if log.is_file() else ""


def _to_absolute(runtime: Runtime, path: str) -> str:
    """Relative paths are the workspace's."""
    return path if path.startswith("/") else f"{runtime.spec.workdir}/{path}"
