"""Runs a preset's own command in a bare environment, as a runtime has it: a home with nothing but the preset's files,
no terminal, and no variable of ours but those that point at the gateway. The harness is the one that `make harnesses`
installed.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polar.config import Settings
from polar.gateway.data_plane import DataPlane
from polar.harnesses import build_environment, load_harness
from polar.harnesses.base import HarnessSetup, SetupRequest, write_setup
from polar.harnesses.cache import find_installation
from polar.records.task import McpServer
from polar.trajectory import session as sessions
from tests.harnesses.run import ROOT, Run, Turn, three_turns, workspace

CACHE = ROOT / ".cache" / "polar-harnesses"
TASK = "Write the two files."
_LIMIT = 240.0  # seconds


class Bare(NamedTuple):
    run: Run
    status: int
    output: str  # what the harness wrote
    home: Path


async def run_bare(
    tmp_path: Path,
    name: str,
    *,
    turns: list[Turn] | None = None,
    task: str = TASK,
    settings: Mapping[str, Any] | None = None,
    mcp_servers: tuple[McpServer, ...] = (),
    files: Mapping[str, str] | None = None,
    model: str | None = None,
) -> Bare:
    """`files` are put into the home besides the preset's."""
    preset, chosen = load_harness(name), dict(settings or {})
    program = find_program(name)
    folder, home, data, play = workspace(tmp_path), tmp_path / "home", tmp_path / "data", tmp_path / "play.json"
    folder.mkdir(exist_ok=True)
    home.mkdir()
    turns = turns or three_turns(tmp_path)
    play.write_text(json.dumps({"turns": turns}))
    engine = {"kind": "scripted", "options": {"play": str(play)}}
    configured = Settings.model_validate({"engine": engine, "gateway": {"port": 0}})
    async with DataPlane(configured, data) as service:
        model, url = model or preset.default_model, service.gateway_url
        session, key = await service.sessions.create({"harness": name, "model": model})
        setup = preset.setup(SetupRequest(str(home), str(folder), url, key, model, mcp_servers, chosen))
        write_setup(setup, home)
        write_setup(HarnessSetup(dict(files or {})), home)
        bare = {"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        argv = [str(program), *preset.build_command(task, chosen)[1:]]
        variables = bare | build_environment(url, key, model) | setup.env
        status, output = await _execute(argv, folder, variables, tmp_path / "output.log")
        await service.sessions.end(session.session_id)
        exchanges = [exchange async for exchange in service.store.read_exchanges(session.session_id)]
        sampled = await sessions.load_session_paths(service.store, session.session_id)
    summary = {"exit_code": status, "exchanges": len(exchanges)}
    return Bare(Run(turns, exchanges, summary, output, sampled, data), status, output, home)


def find_program(name: str) -> Path:
    """Of the harness that `make harnesses` installed."""
    installed = find_installation(CACHE, load_harness(name))
    if installed is None:
        if name == "openhands":
            pytest.skip("openhands is not installed: it takes Python 3.12 or later (make harnesses PYTHON312=PATH).")
        pytest.fail(f"{name} is not installed: run `make harnesses`.")
    return installed.folder / "bin" / installed.executable


async def _execute(argv: list[str], folder: Path, variables: dict[str, str], log: Path) -> tuple[int, str]:
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=variables,
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(_LIMIT):
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return status, await asyncio.to_thread(log.read_text, encoding="utf-8", errors="replace")
