"""The Ray actor that is a gateway node: one process, which Ray starts again when it dies.

It starts to serve as soon as it is made, so that one that Ray restarts needs nobody: not the process that made it, nor
a server that is up. Nothing but the actor's arguments says what it is to do: no folder, no variable of the environment.
"""

import asyncio
import contextlib
import importlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct

from polar.cluster.driver_protocol import NodeSpec
from polar.config import Settings
from polar.gateway.process import tune_process
from polar.telemetry import logs
from polar.telemetry.redaction import collect_secrets

log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0  # seconds before a node that failed is tried again

Serve = Callable[..., Awaitable[None]]


class ActorStatus(Struct, frozen=True):
    """What an actor says of itself."""

    client: int  # the latest of Ray's clients that asked for it or found it: it belongs to that one's server
    digest: str  # of its task
    pid: int
    ended: bool = False  # it was drained, by whomever
    problem: str | None = None  # why it does not serve at the moment


class NodeActor:
    def __init__(self, name: str, client: int, task: NodeSpec) -> None:
        self._client = client
        self._name = name
        self._task = task
        self._settings = Settings.model_validate_json(task.settings)
        log_settings, token = self._settings.log, {task.token} if task.token else set()
        logs.configure(log_settings.format, log_settings.level, collect_secrets(self._settings) | token)
        self._serve = _load_serve(task.serve)
        self._data = Path(task.folder).expanduser() / name
        self._stop = asyncio.Event()
        self._problem: str | None = None
        tune_process()
        self._serve_task = asyncio.create_task(self._serve_until_stopped())

    async def about(self, client: int) -> ActorStatus:
        """Said to its server, which it belongs to from then on."""
        self._client = max(self._client, client)
        return ActorStatus(self._client, self._task.digest, os.getpid(), self._serve_task.done(), self._problem)

    async def drain(self, client: int) -> bool:
        """Answers when the node has handed back its work and holds nothing on the machine any more. False: it belongs
        to another server by now, and goes on."""
        if client < self._client:
            return False
        self._stop.set()
        await self._serve_task
        return True

    async def _serve_until_stopped(self) -> None:
        clock = asyncio.get_running_loop().time
        wait = _FIRST_RETRY_SECONDS
        while not self._stop.is_set():
            began, self._problem = clock(), None
            try:
                await self._serve(
                    self._settings,
                    self._data,
                    self._task.server_url,
                    self._task.token,
                    name=self._name,
                    stop=self._stop,
                )
                return
            except Exception as error:  # whatever it is: a node that is of no use yet is tried again, and says so
                wait = (
                    min(2 * wait, _MAX_RETRY_SECONDS) if clock() - began < _MAX_RETRY_SECONDS else _FIRST_RETRY_SECONDS
                )
                log.exception("The node failed; it is started again in %g seconds.", wait)
                self._problem = f"{type(error).__name__}: {error}"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stop.wait()


def _load_serve(path: str) -> Serve:
    module, _, name = path.partition(":")
    serve: Serve = getattr(importlib.import_module(module), name)
    return serve
