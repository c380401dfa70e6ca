"""Runs the rollout service as a child process of the trainer: starts it, restarts it when it dies, and stops it at the
end."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from polar import backoff, config
from polar.config import EngineSettings, Settings
from polar.errors import ConfigError, PolarError
from polar.runtimes.linux import die_with_parent
from polar.train.settings import TrainSettings

log = logging.getLogger(__name__)

_FIRST_RESTART_SECONDS, _MAX_RESTART_SECONDS = 0.5, 30.0  # seconds before it is started again
_MAX_START_ATTEMPTS = 8  # starts in a row that fail, before it is given up
_START_SECONDS = 1800.0  # an embedded engine loads its model first, an older store is migrated
_STOP_SECONDS = 60.0
_SHOWN_LOG_LINES = 5  # last lines of its log
_PROGRAM = "from polar.cli.main import main; main()"


def build_service_settings(settings: TrainSettings, model: Path) -> tuple[Settings, dict[str, str]]:
    """What the service will make of its settings, and the variables that say so. Where they name no engine, it is the
    embedded one with the model that is trained. An embedded one that the service launches begins, when it is started
    again, with the weights that it had last."""
    sections: dict[str, dict[str, Any]] = {name: dict(values) for name, values in settings.polar.items()}
    engine = sections.setdefault("engine", {})
    if settings.rollout.config is None:
        engine.setdefault("kind", "embedded")
    found = _load_settings(settings, sections)
    if _is_launched(found.engine):
        engine["model"] = found.engine.model or str(model)
        engine["options"] = {"state": str(settings.output_folder / "engine.json")} | found.engine.options
    return _load_settings(settings, sections), _to_environment(sections)


def get_engine_state_file(settings: TrainSettings, engine: EngineSettings) -> Path | None:
    """The file in which the engine of these settings remembers its weights; None if it doesn't."""
    return settings.resolve_path(str(engine.options["state"])) if _is_launched(engine) else None


def _is_launched(engine: EngineSettings) -> bool:
    return engine.kind == "embedded" and not engine.urls


def _load_settings(settings: TrainSettings, sections: dict[str, dict[str, Any]]) -> Settings:
    return config.load(_find_config_file(settings), os.environ | _to_environment(sections))


def _to_environment(sections: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {
        f"{config.ENVIRONMENT_PREFIX}{section}__{key}".upper(): value if isinstance(value, str) else json.dumps(value)
        for section, values in sections.items()
        for key, value in values.items()
    }


def _find_config_file(settings: TrainSettings) -> Path:
    """The service's config file. Without a configured one, a file that does not exist, so that no other polar.toml is
    read."""
    return Path(os.devnull) if settings.rollout.config is None else settings.resolve_path(settings.rollout.config)


class ServiceProcess:
    """`polar up` on free ports, with its data in the output folder. Use as an async context manager."""

    def __init__(self, settings: TrainSettings, variables: dict[str, str], output: Path) -> None:
        self.restarted = asyncio.Event()  # set when it has been started again; cleared by whoever handles that
        self.url = f"http://127.0.0.1:{_find_free_port()}"
        self._data = output / "service"
        self._log = output / "service.log"
        self._has_served = (output / "metrics.jsonl").exists()
        self._variables = variables
        self._folder = settings.folder
        self._config = _find_config_file(settings)
        self._process: asyncio.subprocess.Process | None = None
        self._watch_task: asyncio.Task[None]
        self._closing = False

    async def __aenter__(self) -> "ServiceProcess":
        """Starts the service and returns once it serves."""
        try:
            await self._start_with_retries(has_served=self._has_served)
        except BaseException:
            await self._stop()
            raise
        self._watch_task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._watch_task.cancel()
        with contextlib.suppress(asyncio.CancelledError, PolarError):
            await self._watch_task
        await self._stop()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def wait_until_failed(self) -> None:
        """Waits until the service can't be restarted, and raises PolarError then."""
        await asyncio.shield(self._watch_task)

    async def _watch(self) -> None:
        while True:
            assert self._process is not None
            status = await self._process.wait()
            log.warning("The rollout service ended with %s, and is started again: see %s", status, self._log)
            await self._start_with_retries(has_served=True)
            self.restarted.set()

    async def _start_with_retries(self, *, has_served: bool) -> None:
        """Starts the service, with retries. A service that exits by itself at its first start is misconfigured and is
        not retried; one that was killed, or that has served before, is."""
        for attempt, delay in enumerate(backoff.backoff_delays(_FIRST_RESTART_SECONDS, _MAX_RESTART_SECONDS), 1):
            status = await self._start()
            if status is None:
                return
            if attempt == _MAX_START_ATTEMPTS or (status >= 0 and not has_served):
                raise ConfigError(
                    f"The rollout service did not start (exit status {status}): {self._read_last_log_lines()}"
                )
            await asyncio.sleep(delay)

    def _read_last_log_lines(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_SHOWN_LOG_LINES:]
        return " / ".join(lines) or "it wrote nothing"

    async def _start(self) -> int | None:
        """Starts the process. Returns None once it serves, or its exit status if it ends before."""
        self._data.mkdir(parents=True, exist_ok=True)
        port = self.url.rpartition(":")[2]
        words = ["-P", "-c", _PROGRAM, "up", "--json", "--config", str(self._config), "--data", str(self._data)]
        words += ["--port", "0", "--control-port", port]
        parent = os.getpid()
        with self._log.open("ab") as file:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                env=os.environ | self._variables,
                cwd=self._folder,
                start_new_session=True,  # an interrupt is for the trainer, which then ends it
                preexec_fn=lambda: _die_with_trainer(parent),
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_START_SECONDS):
                return None if await self._process.stdout.readline() else await self._process.wait()
        except TimeoutError as error:
            await self._stop()
            raise ConfigError(
                f"The rollout service did not start within {_START_SECONDS:g} s: {self._read_last_log_lines()}"
            ) from error

    async def _stop(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _die_with_trainer(parent: int) -> None:
    """Runs in the child: lets the kernel kill it when the trainer ends."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
