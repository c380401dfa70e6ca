"""The servers that `make bench-gateway` compares: Polar, another checkout of it, and its peers."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import TracebackType

from benchmarks.client import get_port
from benchmarks.gateway.load import FASTAPI, LITELLM, LITELLM_VLLM, OTHER, POLAR, RELAY, Target
from benchmarks.polar_server import GatewayAddresses
from benchmarks.process import ServerProcess
from polar.errors import ConfigError

_MODULE = (sys.executable, "-m")
_POLAR_UP = (sys.executable, "-c", "from polar.cli.main import main; main()", "up")


class Servers:
    """An async context manager: the servers that it starts end with it. All of them run on `core`."""

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
        port, engine = _find_free_port(), self._engine_url
        database = str(self._folder / "fastapi.db")
        server = await self._start(
            "fastapi", [*_MODULE, "benchmarks.gateway.fastapi_httpx", engine, str(port), database]
        )
        await server.wait_until_healthy(port, "/health", 30)
        targets[FASTAPI] = Target(FASTAPI, port, server)
        port = _find_free_port()
        server = await self._start("relay", [*_MODULE, "benchmarks.gateway.aiohttp_relay", engine, str(port)])
        await server.wait_until_healthy(port, "/health", 30)
        targets[RELAY] = Target(RELAY, port, server)
        targets[POLAR] = await self.start_polar("polar")
        return targets

    async def start_polar(self, folder: str) -> Target:
        argv = [*_MODULE, "benchmarks.polar_server", self._engine_url, str(self._folder / folder)]
        return await self._wait_for_polar(POLAR, await self._start(folder, argv, speaks=True))

    async def _start_other(self, checkout: Path) -> Target:
        """By the other checkout's own `polar up`, whatever its modules are called; dependencies are this one's."""
        source = checkout / "src"
        if not (source / "polar").is_dir():
            raise ConfigError(f"{checkout} is not a checkout of Polar: it has no folder src/polar.")
        folder = self._folder / "other"
        plugins = write_metadata(checkout, folder / "plug-ins")
        config = folder / "polar.toml"
        config.write_text(f'[engine]\nkind = "vllm"\nurls = ["{self._engine_url}"]\n', encoding="utf-8")
        options = ["--no-node", "--json", "--port", "0", "--control-port", "0"]
        argv = [*_POLAR_UP, *options, "--config", str(config), "--data", str(folder / "data")]
        env = {"PYTHONPATH": os.pathsep.join([str(source.absolute()), str(plugins)])}
        return await self._wait_for_polar(OTHER, await self._start("other", argv, speaks=True, env=env))

    async def _wait_for_polar(self, name: str, server: ServerProcess) -> Target:
        addresses = await server.read_message(GatewayAddresses)
        control = get_port(addresses.control)
        await server.wait_until_healthy(control, "/health", 30)
        return Target(name, get_port(addresses.gateway), server, control_port=control)

    async def _start_litellm(self, name: str, provider: str, environment: Path) -> Target:
        command = find_litellm(environment)
        if command is None:
            raise ConfigError(f"There is no LiteLLM in {environment}: pip install 'litellm[proxy]=={LITELLM_VERSION}'.")
        port, key = _find_free_port(), f"sk-{secrets.token_urlsafe(24)}"
        config = self._folder / f"litellm-{provider}.yaml"
        argv = _build_litellm_argv(command, provider, self._engine_url, port, key, config)
        server = await self._start(f"litellm-{provider}", argv, env=_LITELLM_VARIABLES)
        await server.wait_until_healthy(port, "/health/liveliness", 120)
        return Target(name, port, server, key=key)

    async def _start(
        self, name: str, argv: list[str], *, speaks: bool = False, env: dict[str, str] | None = None
    ) -> ServerProcess:
        log = self._folder / f"{name}.log"
        return await self._stack.enter_async_context(ServerProcess(argv, self._core, log, speaks=speaks, env=env))


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def write_metadata(checkout: Path, folder: Path) -> Path:
    """Writes a folder for PYTHONPATH that names the plug-ins of another checkout instead of this one's."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project.get("entry-points", {}).items()
    )
    plugins = metadata.entry_points(group="polar.dialects")
    own = {it.dist.name for it in plugins if it.dist is not None and it.value.startswith("polar.")}
    for name in own | {project["name"]}:  # plug-ins of this checkout would count as well, had it another name
        info = folder / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.3\nName: {name}\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(groups if name == project["name"] else "", encoding="utf-8")
    return folder


# LiteLLM

LITELLM_VERSION = "1.106.2"

_LITELLM_VARIABLES = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the network for prices
    "DISABLE_ADMIN_UI": "True",
}


def find_litellm(environment: Path) -> Path | None:
    found = environment / "bin" / "litellm"
    return found if found.exists() else None


def install_litellm(environment: Path) -> None:
    """Makes the environment; takes a minute or two."""
    _run([sys.executable, "-m", "venv", str(environment)])
    _run([str(environment / "bin" / "python"), "-m", "pip", "install", "-q", f"litellm[proxy]=={LITELLM_VERSION}"])


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"Can't install LiteLLM ({reason}): name an environment that has it with --litellm DIR.")


def _build_litellm_argv(command: Path, provider: str, engine_url: str, port: int, key: str, config: Path) -> list[str]:
    parameters = {"model": f"{provider}/bench", "api_base": f"{engine_url}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "bench", "litellm_params": parameters}],
        "litellm_settings": {"telemetry": False},
        "general_settings": {"master_key": key, "disable_spend_logs": True},  # it does not start without a key
    }
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    return [str(command), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
