"""Real harnesses over scripted turns, recorded by a real gateway.

Every turn runs a command in the shell, and thinking is on. The scripted engine spells a share of the words in another
way than its tokenizer would, as models do, so that text which is tokenised again has other ids than were sampled.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from polar.bench.breaking_relay import relay_breaking_call
from polar.bench.client import BenchError
from polar.config import Settings
from polar.data_plane import DataPlane
from polar.engines.scripted.play import Play, ScriptedTurn
from polar.engines.scripted.server import ScriptedServer
from polar.harnesses import build_environment, filter_environment, load_harness
from polar.harnesses.base import Harness, SetupRequest
from polar.harnesses.files import write_setup
from polar.plugins import load_all
from polar.store.base import Exchange, Session

BUILT_IN = "built-in"
TASK = "Work through the steps one by one."
DRIFT = 0.1
_LIMIT = 300.0  # seconds for a harness
_DROPPED_RATE = 2000.0  # tokens a second where a connection is cut: it must still be sampling then
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent is told the end; to others it is a command

Mode = Literal["engine", "off", "auto", "sampled"]
"""Who renders prompts: the engine, as behind a gateway that only speaks chat; else our gateway, in this mode of
continuation."""
MODES: tuple[Mode, ...] = ("engine", "off", "auto", "sampled")


class Agent(Struct, frozen=True):
    """A harness that is installed here."""

    name: str
    argv: tuple[str, ...]
    folder: str  # of its executable
    preset: Harness | None  # None for the built-in one, which reads the environment that client libraries read


class RecordedSession(Struct):
    session: Session
    exchanges: list[Exchange]


def find_installed_agents(wanted: Sequence[str] = (), folders: Sequence[Path] = ()) -> list[Agent]:
    """The built-in agent, and harnesses on PATH or in one of the folders: those with these names (default: all)."""
    search = os.pathsep.join([*(str(folder.absolute()) for folder in folders), os.environ.get("PATH", os.defpath)])
    found = {BUILT_IN: Agent(BUILT_IN, (sys.executable, "-m", "polar.bench.agent", TASK), "", None)}
    for name, harness in load_all("harnesses").items():
        preset: Harness = harness()
        if preset.package is None:  # no agent of its own
            continue
        command, *rest = preset.build_command(TASK, {})
        # One that is a library has no command to be told by.
        if command in preset.executables and (path := shutil.which(command, path=search)) is not None:
            found[name] = Agent(name, (path, *rest), str(Path(path).parent), preset)
    proper = [name if name == BUILT_IN else load_harness(name).name for name in wanted]
    if absent := [name for name in proper if name not in found]:
        raise BenchError(f"Not installed: {', '.join(absent)}. Found: {', '.join(found)}.")
    return [found[name] for name in proper or found]


def make_play(turns: int) -> Play:
    """So many turns: commands, then the one that submits, then the end."""
    written = Play.random(0, turns - 1).turns
    written[-1].shell = _SUBMIT
    return Play([*written, ScriptedTurn(reasoning="All steps are done.", text="Everything is written.")])


def make_engine(turns: int, tokenizer: str, *, drops: bool) -> ScriptedServer:
    """One for many recordings, since what it says follows from the request alone. Where connections are cut, it takes
    its time."""
    return ScriptedServer(make_play(turns), tokenizer=tokenizer, drift=DRIFT, rate=_DROPPED_RATE if drops else 0.0)


async def record(
    agent: Agent, mode: Mode, engine_url: str, *, drops: bool, turns: int, tokenizer: str, folder: Path
) -> RecordedSession:
    """Runs a harness to its end. With `drops`, the connection is cut when a reply begins, once, after a third of the
    turns; and a retry is a call of its own, where it would else be served from the call that still runs."""
    workspace, home = folder / "workspace", folder / "home"
    workspace.mkdir()
    home.mkdir()
    settings = _settings(mode, engine_url, tokenizer, drops=drops)
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(DataPlane(settings, folder / "data"))
        model = agent.preset.default_model if agent.preset else "polar"
        session, key = await service.sessions.create({"harness": agent.name, "model": model})
        url = service.gateway_url
        if drops:
            url = await stack.enter_async_context(relay_breaking_call(url, call=max(turns // 3, 1)))
        variables = filter_environment(os.environ) | build_environment(url, key, model)
        variables |= {"HOME": str(home), "PWD": str(workspace)}
        variables["PATH"] = os.pathsep.join(filter(None, (agent.folder, variables.get("PATH"))))
        if agent.preset is not None:
            setup = agent.preset.setup(SetupRequest(str(home), str(workspace), url, key, model))
            write_setup(setup, home)
            variables |= setup.env
        try:
            await _run(agent, variables, workspace, folder / "output.log")
        finally:
            ended = await service.sessions.end(session.session_id)
        assert ended is not None
        exchanges = [exchange async for exchange in service.store.exchanges(session.session_id)]
    _check(agent, exchanges, turns)
    return RecordedSession(ended, exchanges)


def _settings(mode: Mode, engine_url: str, tokenizer: str, *, drops: bool) -> Settings:
    rendering = {"render": "engine"} if mode == "engine" else {"continuation": mode}
    engine = {"kind": "scripted", "urls": [engine_url], "tokenizer": tokenizer, **rendering}
    gateway = {"port": 0, "grace": 0} if drops else {"port": 0}
    return Settings.model_validate({"engine": engine, "gateway": gateway})


async def _run(agent: Agent, variables: dict[str, str], folder: Path, output: Path) -> None:
    with output.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *agent.argv, env=variables, cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            async with asyncio.timeout(_LIMIT):
                status = await process.wait()
        except TimeoutError:
            raise BenchError(f"it was not done after {_LIMIT:.0f} seconds") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if status:
        raise BenchError(f"it ended with status {status}: {_last_line(output)}")


def _last_line(output: Path) -> str:
    return "".join(output.read_text(errors="replace").strip().splitlines()[-1:])[:200]


def _check(agent: Agent, exchanges: Sequence[Exchange], turns: int) -> None:
    """All turns were played: else the figures would be those of another session."""
    whole = sum(exchange.status == "complete" and exchange.reply is not None for exchange in exchanges)
    if whole < turns - 1:
        raise BenchError(f"{agent.name} made {whole} whole calls of {turns}")
