"""Starts the servers that are compared."""

import contextlib
import secrets
import socket
import sys
from pathlib import Path
from types import TracebackType

from polar.bench.load import Target
from polar.bench.peers import FASTAPI, LITELLM, LITELLM_VLLM, OTHER, POLAR, RELAY, litellm
from polar.bench.peers.gateway import GatewayAddresses
from polar.bench.process import ServerProcess
from polar.errors import ConfigError

_MODULE = (sys.executable, "-m")


class Servers:
    """Use as an async context manager: what was started ends with it. All of them run on `core`."""

    def __init__(self, engine_url: str, core: int, folder: Path) -> None:
        self._engine_url = engine_url
        self._core = core
        self._folder = folder
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> "Servers":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def start_all(self, litellm_environment: Path | None, against: Path | None = None) -> dict[str, Target]:
        """Starts every server. Without an environment LiteLLM is left out; `against` is another checkout of Polar."""
        targets = {}
        if against is not None:
            targets[OTHER] = await self._start_other(against)
        if litellm_environment is not None:
            targets[LITELLM] = await self._start_litellm(LITELLM, "openai", litellm_environment)
            targets[LITELLM_VLLM] = await self._start_litellm(LITELLM_VLLM, "hosted_vllm", litellm_environment)
        port, engine = _free_port(), self._engine_url
        database = str(self._folder / "fastapi.db")
        server = await self._start(
            "fastapi", [*_MODULE, "polar.bench.peers.fastapi_httpx", engine, str(port), database]
        )
        await server.answers(port, "/health", 30)
        targets[FASTAPI] = Target(FASTAPI, port, server)
        port = _free_port()
        server = await self._start("relay", [*_MODULE, "polar.bench.peers.aiohttp_relay", engine, str(port)])
        await server.answers(port, "/health", 30)
        targets[RELAY] = Target(RELAY, port, server)
        targets[POLAR] = await self.start_polar("polar")
        return targets

    async def start_polar(self, folder: str, name: str = POLAR, *, env: dict[str, str] | None = None) -> Target:
        argv = [*_MODULE, "polar.bench.peers.gateway", self._engine_url, str(self._folder / folder)]
        server = await self._start(folder, argv, speaks=True, env=env)
        addresses = await server.hear(GatewayAddresses)
        control = _port(addresses.control)
        await server.answers(control, "/health", 30)
        return Target(name, _port(addresses.gateway), server, control_port=control)

    async def _start_other(self, checkout: Path) -> Target:
        source = checkout / "src"
        if not (source / "polar").is_dir():
            raise ConfigError(f"{checkout} is not a checkout of Polar: it has no folder src/polar.")
        return await self.start_polar("other", OTHER, env={"PYTHONPATH": str(source.absolute())})

    async def _start_litellm(self, name: str, provider: str, environment: Path) -> Target:
        command = litellm.find_executable(environment)
        if command is None:
            raise ConfigError(f"There is no LiteLLM in {environment}: pip install 'litellm[proxy]=={litellm.VERSION}'.")
        port, key = _free_port(), f"sk-{secrets.token_urlsafe(24)}"
        config = self._folder / f"litellm-{provider}.yaml"
        argv = litellm.build_argv(command, provider, self._engine_url, port, key, config)
        server = await self._start(f"litellm-{provider}", argv, env=litellm.ENVIRONMENT)
        await server.answers(port, "/health/liveliness", 120)
        return Target(name, port, server, key=key)

    async def _start(
        self, name: str, argv: list[str], *, speaks: bool = False, env: dict[str, str] | None = None
    ) -> ServerProcess:
        log = self._folder / f"{name}.log"
        return await self._stack.enter_async_context(ServerProcess(argv, self._core, log, speaks=speaks, env=env))


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
