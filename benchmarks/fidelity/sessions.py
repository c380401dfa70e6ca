"""Real harnesses over scripted turns, recorded by a real gateway.

Every turn runs a command in the shell, and thinking is on. The scripted engine spells a share of the words in another
way than its tokenizer would, as models do, so that text which is tokenised again has other ids than were sampled.
"""

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from benchmarks.client import BenchmarkError
from polar.config import Settings
from polar.engines.scripted.play import Play, ScriptedTurn
from polar.engines.scripted.server import ScriptedServer
from polar.gateway.data_plane import DataPlane
from polar.harnesses import build_environment, filter_environment, load_harness
from polar.harnesses.base import Harness, SetupRequest, write_setup
from polar.plugins import load_all
from polar.records.exchange import Exchange
from polar.records.session import Session

BUILT_IN = "built-in"
TASK = "Work through the steps one by one."
DRIFT = 0.1
HARNESS_FOLDERS = (
    Path(".cache/node/node_modules/.bin"),
    Path(".cache/harnesses/node_modules/.bin"),
    Path(".cache/harnesses-venv/bin"),
)
"""Where `make` installs harnesses."""
_AGENT = Path(__file__).with_name("agent.py")
_AGENT_TIMEOUT_SECONDS = 300.0  # seconds for a harness
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
    found = {BUILT_IN: Agent(BUILT_IN, (sys.executable, str(_AGENT), TASK), "", None)}
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
        raise BenchmarkError(f"Not installed: {', '.join(absent)}. Found: {', '.join(found)}.")
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
    settings = _make_settings(mode, engine_url, tokenizer, drops=drops)
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
        exchanges = [exchange async for exchange in service.store.read_exchanges(session.session_id)]
    _check_turns(agent, exchanges, turns)
    return RecordedSession(ended, exchanges)


def _make_settings(mode: Mode, engine_url: str, tokenizer: str, *, drops: bool) -> Settings:
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
            async with asyncio.timeout(_AGENT_TIMEOUT_SECONDS):
                status = await process.wait()
        except TimeoutError:
            raise BenchmarkError(f"it was not done after {_AGENT_TIMEOUT_SECONDS:.0f} seconds") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if status:
        raise BenchmarkError(f"it ended with status {status}: {_read_last_line(output)}")


def _read_last_line(output: Path) -> str:
    return "".join(output.read_text(errors="replace").strip().splitlines()[-1:])[:200]


def _check_turns(agent: Agent, exchanges: Sequence[Exchange], turns: int) -> None:
    """All turns were played: else the figures would be those of another session."""
    whole = sum(exchange.status == "complete" and exchange.reply is not None for exchange in exchanges)
    if whole < turns - 1:
        raise BenchmarkError(f"{agent.name} made {whole} whole calls of {turns}")


# A relay that breaks one connection


@contextlib.asynccontextmanager
async def relay_breaking_call(url: str, call: int) -> AsyncIterator[str]:
    """The URL of a relay to `url` that breaks the connection of call number `call`, from 0, when its reply begins."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    relay = _Relay(host, int(port), call)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await _cancel_all(relay.connections)


class _Relay:
    def __init__(self, host: str, port: int, call: int) -> None:
        self._host = host
        self._port = port
        self._call = call
        self._calls = 0
        self.connections: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)
        to_reader, to_writer = await asyncio.open_connection(self._host, self._port)
        cut = asyncio.Event()
        ways = {
            asyncio.create_task(self._relay_requests(reader, to_writer, cut)),
            asyncio.create_task(self._relay_replies(to_reader, writer, cut)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)  # where one side goes, the other goes
        finally:
            await _cancel_all(ways)
            for side in (writer, to_writer):
                if cut.is_set():
                    side.transport.abort()
                else:
                    side.close()

    async def _relay_requests(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, cut: asyncio.Event
    ) -> None:
        while data := await source.read(1 << 16):
            if data.startswith(b"POST "):
                if self._calls == self._call:
                    cut.set()
                self._calls += 1
            sink.write(data)
            await sink.drain()

    async def _relay_replies(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, cut: asyncio.Event
    ) -> None:
        while (data := await source.read(1 << 16)) and not cut.is_set():
            sink.write(data)
            await sink.drain()


async def _cancel_all(tasks: set[asyncio.Task[None]]) -> None:
    """What they raised is how their connections ended, which is of no interest."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
