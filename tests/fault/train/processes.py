"""`polar train` as a process, and those that it starts: the rollout service, and the engine below that."""

import asyncio
import os
import signal
import sys
from pathlib import Path

_PROGRAM = "from polar.cli.main import main; main()"


def below(pid: int) -> list[int]:
    """All that a process has started, and those have, and so on."""
    try:
        children = [
            int(child)
            for thread in os.listdir(f"/proc/{pid}/task")
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [one for child in children for one in (child, *below(child))]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


class Training:
    """Use as an async context manager: at its end there is nothing left of it."""

    def __init__(self, config: Path, log: Path) -> None:
        self._config = config
        self._log = log
        self._process: asyncio.subprocess.Process
        self._started: set[int] = set()

    async def __aenter__(self) -> "Training":
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", _PROGRAM, "train", str(self._config), "--json"),
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._started.update(below(self._process.pid))
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        for _ in range(600):  # type: ignore[assignment]
            if not self.left():
                return
            await asyncio.sleep(0.1)
        left = {pid: command_of(pid) for pid in self.left()}
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        raise AssertionError(f"these outlived the trainer: {left}")

    def left(self) -> list[int]:
        return [pid for pid in self._started if "polar" in command_of(pid)]

    def pid(self, who: str) -> int | None:
        """Of the trainer, the server or the engine, where it runs."""
        self._started.update(found := below(self._process.pid))
        if who == "trainer":
            return self._process.pid
        mark = {"server": " up --json", "engine": "-m polar.engines.embedded"}[who]
        return next((pid for pid in found if mark in command_of(pid)), None)

    def kill(self, who: str) -> bool:
        pid = self.pid(who)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    async def ended(self, seconds: float) -> int | None:
        """The exit status; None where it still runs after so long."""
        try:
            return await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            self.pid("engine")  # remembers who is there
            return None
