"""Calls of this program, captured: a private gateway in a thread of its own, and one session on it.

with polar.capture(engine="http://127.0.0.1:8000") as session:
    client = openai.OpenAI(base_url=session.base_urls["openai"], api_key=session.api_key)
    ...  # the agent, in this process or in another one that gets session.env
    session.reward = 1.0
session.trajectory().traces

    program ─► base URL ─► PrivateGateway (DataPlane) ─► engine
       │ with                    │ store
       └─► CaptureSession ─► BackgroundLoop ─► end, read ─► SessionResult

The gateway is closed at the end of the block; what was recorded stays in the data folder, and in the session object.
"""

import asyncio
import contextlib
import math
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polar import config
from polar.client.sync_client import BackgroundLoop
from polar.config import Settings
from polar.errors import PolarError
from polar.export.polar import build_session_result
from polar.gateway.data_plane import DataPlane
from polar.harnesses import build_base_urls, build_environment
from polar.records.exchange import Exchange
from polar.records.result import SessionResult, TrajectoryResult
from polar.records.session import Session, Verdict
from polar.trajectory.checker import SessionChecker
from polar.trajectory.session import TRACE_BUILDER

Recording = tuple[Session, list[Exchange]]


def capture(
    engine: str | None = None,
    *,
    data: str | os.PathLike[str] = ".polar",
    model: str = "polar",
    metadata: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
) -> "CaptureSession":
    """A session for this program: use it in a `with` or an `async with`, also where an event loop runs already.

    `engine` is the address of an inference engine [default: the configured one]; `data` is the folder where everything
    is kept; `model` is the name that agents are told to ask for; `metadata` are kept with the session; `settings` are
    those of polar.toml unless they are given.

    Entering raises PolarError where no engine answers, or where the data folder or the store can't be used."""
    private = config.with_private_gateway(settings or config.load(), engine)
    return CaptureSession(private, Path(data), {"model": model} | dict(metadata or {}), model)


class CaptureSession:
    """What `polar.capture` gives. The session begins and ends with the block; it can be read in it and afterwards.

    A program that leaves the block by an exception gets no reward, whatever `reward` says."""

    def __init__(self, settings: Settings, data: Path, metadata: dict[str, Any], model: str) -> None:
        self.model = model
        self._gateway = PrivateGateway(settings, data, metadata)
        self._checker = SessionChecker(settings.verify.share)
        self._reward: float | None = None
        self._loop: BackgroundLoop | None = None
        self._recording: Recording | None = None  # as it was at the end

    def __repr__(self) -> str:
        state = "not begun" if self._loop is None else "open" if self._recording is None else "ended"
        return f"<CaptureSession {self._gateway.session_id or ''} {state}>".replace("  ", " ")

    @property
    def session_id(self) -> str:
        return self._get_started_gateway().session_id

    @property
    def api_key(self) -> str:
        """Works until the block ends."""
        return self._get_started_gateway().api_key

    @property
    def base_urls(self) -> dict[str, str]:
        """What each provider's clients take as their base URL: openai, anthropic, google."""
        return build_base_urls(self._get_started_gateway().url)

    @property
    def env(self) -> dict[str, str]:
        """The variables that point providers' client libraries at the gateway, for an agent in another process."""
        return self._get_started_gateway().build_environment(self.model)

    @property
    def reward(self) -> float | None:
        """What the session earned. It can be set until the block ends."""
        return self._reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        if self._recording is not None:
            raise PolarError(f"Session {self.session_id} has ended: its reward can't be changed any more.")
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"A reward is a finite number, not {reward!r}.")
        self._reward = None if reward is None else float(reward)

    def trajectory(self, builder: str = TRACE_BUILDER) -> TrajectoryResult:
        """What a builder makes of the calls that were recorded so far, checked. A session that fails the check has the
        status ERROR, no traces, and the reason in `error`."""
        return self.result(builder).trajectory

    def result(self, builder: str = TRACE_BUILDER) -> SessionResult:
        """The same with reward and metadata, as `polar.run` returns it."""
        session, exchanges = self._read()
        document = build_session_result(session, exchanges, builder, self._checker)
        return SessionResult.model_validate(document)

    def _read(self) -> Recording:
        if self._recording is not None:
            return self._recording
        gateway = self._get_started_gateway()
        assert self._loop is not None
        return self._loop.run(gateway.read())

    def _get_started_gateway(self) -> "PrivateGateway":
        if not self._gateway.session_id:
            raise PolarError("The capture has not begun: use `with polar.capture(...) as session:`.")
        return self._gateway

    # `with` and `async with`. The data plane has an event loop of its own, so that the caller's may be blocked.

    def __enter__(self) -> Self:
        loop = self._start_loop()
        try:
            loop.run(self._gateway.open())
        except BaseException:
            loop.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        try:
            self._recording = self._loop.run(self._gateway.finish(self._make_verdict(error)))
        finally:
            self._loop.close()

    async def __aenter__(self) -> Self:
        loop = self._start_loop()
        try:
            await asyncio.wrap_future(loop.submit(self._gateway.open()))
        except BaseException:
            await asyncio.to_thread(loop.close)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        try:
            ended = self._loop.submit(self._gateway.finish(self._make_verdict(error)))
            self._recording = await asyncio.wrap_future(ended)
        finally:
            await asyncio.to_thread(self._loop.close)

    def _start_loop(self) -> BackgroundLoop:
        if self._loop is not None:
            raise PolarError("A capture is one session: call polar.capture again for another one.")
        self._loop = BackgroundLoop(self._gateway.close, owner="capture")
        weakref.finalize(self, self._loop.close)  # of one that was entered by hand and is never left
        return self._loop

    def _make_verdict(self, error: BaseException | None) -> Verdict:
        return Verdict(self._reward) if error is None else Verdict(reason="program_failed")


class PrivateGateway:
    """A gateway for one session, in one event loop: `open` or `async with` starts both.

    `end` ends the session, whose calls can still be read; `close` stops the gateway."""

    def __init__(self, settings: Settings, data: Path, metadata: dict[str, Any]) -> None:
        """`settings` name a gateway on a free port (config.with_private_gateway)."""
        self.session_id = ""
        self.api_key = ""
        self.url = ""
        self._plane = DataPlane(settings, data)
        self._metadata = metadata
        self._stack = contextlib.AsyncExitStack()

    async def open(self) -> None:
        """Raises PolarError where it can't start, or where no engine answers."""
        async with contextlib.AsyncExitStack() as stack:
            plane = await stack.enter_async_context(self._plane)
            plane.check_engine()
            session, self.api_key = await plane.sessions.create(self._metadata)
            self.session_id, self.url = session.session_id, plane.gateway_url
            self._stack = stack.pop_all()

    async def close(self) -> None:
        await self._stack.aclose()

    def build_environment(self, model: str) -> dict[str, str]:
        """What the providers' own client libraries read; `model` is the name that they ask for."""
        return build_environment(self.url, self.api_key, model)

    async def end(self, verdict: Verdict) -> None:
        """The key stops working, and calls that run are given up."""
        await self._plane.sessions.end(self.session_id, verdict)

    async def read(self) -> Recording:
        """The session, and every call that was recorded so far."""
        session = await self._plane.store.session(self.session_id)
        assert session is not None
        return session, [exchange async for exchange in self._plane.store.exchanges(self.session_id)]

    async def finish(self, verdict: Verdict) -> Recording:
        """Ends the session and reads it."""
        await self.end(verdict)
        return await self.read()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
