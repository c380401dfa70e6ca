"""A scripted engine and a gateway on loopback, for tests that are plain functions or run programs of their own.

    test ─► agent ─► LoopbackGateway (real data plane, temporary store) ─► ScriptedEngineServer (written turns)

Both run in a thread with an event loop, so a test may block while they answer.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polar.api.capture import PrivateGateway
from polar.client.sync_client import BackgroundLoop
from polar.config import Settings
from polar.engines.scripted import Play, PlaySet, ScriptedServer, ScriptedTurn
from polar.harnesses import build_base_urls
from polar.records.exchange import Exchange
from polar.records.session import Verdict
from polar.records.trajectory import Trajectory
from polar.trajectory.checker import SessionChecker
from polar.trajectory.session import build_trajectory


class ScriptedEngineServer:
    """An inference engine at `url` that speaks vLLM's API and plays turns instead of a model."""

    def __init__(self, server: ScriptedServer, play: Play) -> None:
        self._server = server
        self._play = play
        self.url = server.url

    @classmethod
    @contextlib.contextmanager
    def open(cls, *turns: ScriptedTurn | str, **options: Any) -> Iterator["ScriptedEngineServer"]:
        """Options are those of ScriptedServer. Without turns it writes a file and reads it back."""
        play = Play.default()
        server = ScriptedServer(PlaySet(play), **options)
        with contextlib.closing(BackgroundLoop(server.stop)) as loop:
            loop.run(server.start())
            engine = cls(server, play)
            if turns:
                engine.play(*turns)
            yield engine

    def play(self, *turns: ScriptedTurn | str) -> None:
        """What the model says from now on, turn by turn: the number of its own turns in a request says which is next.
        A text is a turn that calls no tool. After the last one it repeats that one's text."""
        self._play.turns = [ScriptedTurn(text=turn) if isinstance(turn, str) else turn for turn in turns]


class LoopbackGateway:
    """A gateway at `url`, and one session on it: `key` is its key."""

    def __init__(self, loop: BackgroundLoop, gateway: PrivateGateway) -> None:
        self._loop = loop
        self._gateway = gateway
        self.url = gateway.url
        self.key = gateway.api_key
        self.session_id = gateway.session_id

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        folder: Path,
        *turns: ScriptedTurn | str,
        engine_url: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Iterator["LoopbackGateway"]:
        """Keeps its store in `folder`. Without `engine_url` it has an engine of its own, which plays `turns`."""
        if engine_url is None:
            with (
                ScriptedEngineServer.open(*turns) as engine,
                cls.open(folder, engine_url=engine.url, metadata=metadata) as gateway,
            ):
                yield gateway
            return
        settings = Settings.model_validate(
            {"engine": {"kind": "scripted", "urls": [engine_url]}, "gateway": {"port": 0, "grace": 0}}
        )
        private = PrivateGateway(settings, folder, dict(metadata or {}))
        with contextlib.closing(BackgroundLoop(private.close)) as loop:
            loop.run(private.open())
            yield cls(loop, private)

    @property
    def base_urls(self) -> dict[str, str]:
        """Where each provider's client libraries are pointed."""
        return build_base_urls(self.url)

    def environment(self, model: str = "scripted") -> dict[str, str]:
        """The variables that point the providers' client libraries at this gateway."""
        return self._gateway.build_environment(model)

    def exchanges(self) -> list[Exchange]:
        """Every captured model call so far."""
        return self._loop.run(self._gateway.read())[1]

    def end(self, reward: float | None = None, reason: str | None = None) -> None:
        """Ends the session; its key is refused from now on."""
        self._loop.run(self._gateway.end(Verdict(reward, reason)))

    def trajectory(self, builder: str = "prefix_merging") -> Trajectory:
        """What a builder makes of the captured calls, checked. Raises HeldBackError where the check fails."""
        session, exchanges = self._loop.run(self._gateway.read())
        return build_trajectory(session, exchanges, builder, SessionChecker()).trajectory
