"""The embedded engine as an engine: vLLM's API, on a process of its own that is launched where none is configured.

The process is watched, and started again when it dies. It dies with us, whatever becomes of us. Its address stays the
same, and the weights that it was given last are the ones that it begins with when it comes back.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from polar.backoff import backoff_delays
from polar.config import EngineSettings
from polar.distribution import install_hint
from polar.engines.base import Capabilities
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError
from polar.models import ensure_default_model, show_progress

log = logging.getLogger(__name__)

_START_TIMEOUT_SECONDS = 300.0  # seconds: large models take their time to load
_ANSWER_TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.2
_LOG_INTERVAL_SECONDS = 10.0  # seconds between two words on what is waited for
_STOP_TIMEOUT_SECONDS = 5.0
_STDERR_TAIL_LINES = 15
_STABLE_RUN_SECONDS = 60.0  # who has run for so long is not starting in vain
_LISTENING_PREFIX = "listening on "


class _WeightVersionReply(Struct):
    version: int


class EngineProcess:
    """A `polar.engines.base.LaunchedEngine`."""

    def __init__(self, folder: Path, options: EmbeddedOptions) -> None:
        self._folder = folder
        self._scratch = tempfile.TemporaryDirectory(prefix="polar-engine-")
        self._stdout_path = Path(self._scratch.name) / "stdout"
        self._stderr_path = Path(self._scratch.name) / "stderr"
        self._options = options.model_copy(
            update={"state": options.state or str(Path(self._scratch.name) / "weights.json")}
        )
        self.url = ""  # until it has started
        self.version = 0
        self._process: asyncio.subprocess.Process | None = None
        self._watch_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when it answers. Raises ConfigError, with its own last words, where it can't start."""
        try:
            await self._spawn()
            await self._wait_until_ready()
        except BaseException:
            await self.stop()
            raise
        self._watch_task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch_task
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._scratch.cleanup()

    async def _spawn(self) -> None:
        with open(self._stdout_path, "wb") as output, open(self._stderr_path, "wb") as errors:  # noqa: ASYNC230  # a moment
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "polar.engines.embedded"),
                *("--model", str(self._folder.resolve()), "--options", self._options.model_dump_json()),
                *("--parent", str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env=_build_environment(self._options),
                start_new_session=True,  # an interrupt is for us alone, and we end it
            )

    async def _wait_until_ready(self) -> None:
        """Waits for its own word that it listens: at its address another process might answer."""
        assert self._process is not None
        begun = said = time.monotonic()
        while (url := self._read_url()) is None:
            if self._process.returncode is not None:
                raise ConfigError(
                    f"The embedded engine ended with exit status {self._process.returncode}. {self._read_stderr_tail()}"
                )
            now = time.monotonic()
            if now - begun > _START_TIMEOUT_SECONDS:
                raise ConfigError(
                    f"The embedded engine did not start in {_START_TIMEOUT_SECONDS:g} s. {self._read_stderr_tail()}"
                )
            if now - said > _LOG_INTERVAL_SECONDS:
                said = now
                log.info("The embedded engine loads %s (%.0f s)", self._folder, now - begun)
            await asyncio.sleep(_POLL_SECONDS)
        self.url = url
        port = int(url.rpartition(":")[2])
        self._options = self._options.model_copy(update={"port": port})  # it comes back there
        self.version = await self._fetch_weight_version()
        took = time.monotonic() - begun
        log.info("The embedded engine is ready after %.0f s: %s, version %d", took, url, self.version)

    def _read_url(self) -> str | None:
        """Where, as it has said itself (`polar engine`)."""
        lines = self._stdout_path.read_text(errors="replace").splitlines(keepends=True)
        said = (line for line in lines if line.startswith(_LISTENING_PREFIX) and line.endswith("\n"))
        return next((line.removeprefix(_LISTENING_PREFIX).strip() for line in said), None)

    async def _fetch_weight_version(self) -> int:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_TIMEOUT_SECONDS)) as http,
                http.get(f"{self.url}/weight_version", raise_for_status=True) as answer,
            ):
                return msgspec.json.decode(await answer.read(), type=_WeightVersionReply).version
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"The embedded engine at {self.url} does not say which weights it has: {error!r}. "
                f"{self._read_stderr_tail()}"
            ) from error

    async def _watch(self) -> None:
        waits = backoff_delays(0.5, 30)
        while True:
            assert self._process is not None
            begun = time.monotonic()
            await self._process.wait()
            log.error(
                "The embedded engine died (exit status %s) and is started again. %s",
                self._process.returncode,
                self._read_stderr_tail(),
            )
            if time.monotonic() - begun > _STABLE_RUN_SECONDS:
                waits = backoff_delays(0.5, 30)
            await asyncio.sleep(next(waits))
            try:
                await self._spawn()
                await self._wait_until_ready()
            except (ConfigError, OSError) as error:
                log.error("%s", error)
                if self._process.returncode is None:
                    self._process.kill()

    def _read_stderr_tail(self) -> str:
        lines = self._stderr_path.read_text(errors="replace").splitlines() if self._stderr_path.exists() else []
        last = [line for line in lines if line.strip()][-_STDERR_TAIL_LINES:]
        return "Its last words:\n" + "\n".join(last) if last else "It said nothing."


def _build_environment(options: EmbeddedOptions) -> dict[str, str]:
    """Set before torch is imported, where it must be."""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if options.threads is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    return environment


class EmbeddedEngine(VllmEngine):
    capabilities = Capabilities(logprobs="processed", accepts_token_ids=True, reports_weight_version=True)

    def __init__(self, url: str, settings: EngineSettings) -> None:
        super().__init__(url, settings)
        self.model = None  # `[engine] model` is a folder here; what it is called, the server says

    @staticmethod
    async def launch(settings: EngineSettings) -> EngineProcess:
        """`[engine] model` is a folder, or none for the default model; `[engine.options]` are those of options.py."""
        if missing := [name for name in ("torch", "transformers", "safetensors") if not importlib.util.find_spec(name)]:
            raise ConfigError(f"The embedded engine needs {', '.join(missing)}: {install_hint('train')}.")
        options = settings.parse_options(EmbeddedOptions)
        process = EngineProcess(await asyncio.to_thread(_resolve_model_folder, settings.model), options)
        await process.start()
        return process


def _resolve_model_folder(named: str | None) -> Path:
    if named is not None:
        return Path(named).expanduser()
    with show_progress() as progress:
        return ensure_default_model(progress)
