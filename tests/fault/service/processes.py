"""The programs as users start them, to be killed, frozen and started anew: `polar up` and `polar node`."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POLAR = [sys.executable, "-c", "from polar.cli.main import main; main()"]
STARTING, ENDING = 180.0, 180.0  # seconds, at most


class Program:
    """One command, however often it is started. What it says goes to a file beside its data."""

    def __init__(self, folder: Path, arguments: list[str], environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log"
        self._arguments = arguments
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> dict[str, Any]:
        """What it tells first, as JSON."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *POLAR,
                *self._arguments,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                cwd=self.folder,
                env=os.environ | dict(self._environment),
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(STARTING):
            line = await self._process.stdout.readline()
        assert line, f"it did not start: {self.said()}"
        told: dict[str, Any] = json.loads(line)
        return told

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code, once it is gone."""
        if self.running:
            self.signal(number)
        async with asyncio.timeout(ENDING):
            return await self.process.wait()

    async def kill(self) -> None:
        await self.end(signal.SIGKILL)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    async def close(self) -> None:
        """Whatever state it is in."""
        if self.running:
            self.signal(signal.SIGCONT)
            try:
                await self.end()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    await self.kill()
                raise


class Server(Program):
    """A rollout server without a node, always on the same port."""

    def __init__(self, folder: Path, environment: Mapping[str, str], data: Path | None = None) -> None:
        super().__init__(folder, [], environment)
        self._data = data or folder / "data"
        self._port = 0
        self.url = ""

    async def start(self) -> dict[str, Any]:
        self._arguments = ["up", "--no-node", "--json", "--data", str(self._data)]
        self._arguments += ["--port", "0", "--control-port", str(self._port)]
        told = await super().start()
        self.url = told["control"]
        self._port = int(self.url.rpartition(":")[2])
        return told


class Node(Program):
    def __init__(self, folder: Path, server_url: str, environment: Mapping[str, str], data: Path | None = None) -> None:
        arguments = [
            "node",
            "--join",
            server_url,
            "--name",
            folder.name,
            "--json",
            "--data",
            str(data or folder / "data"),
        ]
        super().__init__(folder, arguments, {"POLAR_GATEWAY__PORT": "0", **environment})
        self.name = folder.name
