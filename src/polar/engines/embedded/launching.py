"""The embedded engine as a child process: started, watched, and started again when it dies.

It dies with us, whatever becomes of us. Its address stays the same, and the weights that it was given last are the
ones that it begins with when it comes back.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from polar.backoff import delays
from polar.engines.embedded.options import Options
from polar.errors import ConfigError

log = logging.getLogger(__name__)

_START_LIMIT = 300.0  # seconds: large models take their time to load
_LOOK = 0.2
_SAY = 10.0  # seconds between two words on what is waited for
_STOP_LIMIT = 5.0
_LAST_LINES = 15
_STEADY = 60.0  # who has run for so long is not starting in vain


class EngineProcess:
    """A `polar.engines.base.Launched`."""

    def __init__(self, folder: Path, options: Options) -> None:
        self._folder = folder
        self._scratch = tempfile.TemporaryDirectory(prefix="polar-engine-")
        self._errors = Path(self._scratch.name) / "stderr"
        self._options = options.model_copy(
            update={
                "port": options.port or _free_port(options.host),
                "state": options.state or str(Path(self._scratch.name) / "weights.json"),
            }
        )
        self.url = f"http://{self._options.host}:{self._options.port}"
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when it answers. Raises ConfigError, with its own last words, where it can't start."""
        try:
            await self._spawn()
            await self._ready()
        except BaseException:
            await self.stop()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_LIMIT)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._scratch.cleanup()

    async def _spawn(self) -> None:
        with open(self._errors, "wb") as errors:  # noqa: ASYNC230  # a moment
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "polar.engines.embedded"),
                *("--model", str(self._folder.resolve()), "--options", self._options.model_dump_json()),
                *("--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                env=_environment(self._options),
                start_new_session=True,  # an interrupt is for us alone, and we end it
            )

    async def _ready(self) -> None:
        assert self._process is not None
        begun = said = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while self._process.returncode is None:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            log.info(
                                "The embedded engine is ready after %.0f s: %s", time.monotonic() - begun, self.url
                            )
                            return
                now = time.monotonic()
                if now - begun > _START_LIMIT:
                    raise ConfigError(f"The embedded engine did not start in {_START_LIMIT:g} s. {self._last_words()}")
                if now - said > _SAY:
                    said = now
                    log.info("The embedded engine loads %s (%.0f s)", self._folder, now - begun)
                await asyncio.sleep(_LOOK)
        raise ConfigError(
            f"The embedded engine ended with exit status {self._process.returncode}. {self._last_words()}"
        )

    async def _watch(self) -> None:
        waits = delays(0.5, 30)
        while True:
            assert self._process is not None
            begun = time.monotonic()
            await self._process.wait()
            log.error(
                "The embedded engine died (exit status %s) and is started again. %s",
                self._process.returncode,
                self._last_words(),
            )
            if time.monotonic() - begun > _STEADY:
                waits = delays(0.5, 30)
            await asyncio.sleep(next(waits))
            try:
                await self._spawn()
                await self._ready()
            except (ConfigError, OSError) as error:
                log.error("%s", error)
                if self._process.returncode is None:
                    self._process.kill()

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").splitlines() if self._errors.exists() else []
        last = [line for line in lines if line.strip()][-_LAST_LINES:]
        return "Its last words:\n" + "\n".join(last) if last else "It said nothing."


def _environment(options: Options) -> dict[str, str]:
    """Set before torch is imported, where it must be."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    return environment


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
