"""The embedded engine: an API server over the model of a folder, and `POST /update_weights`."""

import asyncio
import os
from pathlib import Path
from time import time
from types import TracebackType

import click
from aiohttp import web

from polar.distribution import installed_version
from polar.engines.api_server import wire
from polar.engines.api_server.backend import RequestError
from polar.engines.api_server.replies import encode_json
from polar.engines.api_server.request_reader import decode_body
from polar.engines.api_server.server import ApiServer, bind_listener, json_response, make_stop_event
from polar.engines.embedded.core import EngineCore
from polar.engines.embedded.generation import Generation
from polar.engines.embedded.options import EmbeddedOptions
from polar.engines.embedded.weights import WeightUpdate, load_model
from polar.errors import ConfigError
from polar.models import ensure_default_model, show_progress
from polar.rendering.tokenizer import Tokenizer


class EmbeddedServer:
    """Serves the model of a folder. Use it as an async context manager, or call `start` and `stop`."""

    def __init__(self, folder: Path, options: EmbeddedOptions | None = None, *, name: str | None = None) -> None:
        """`name`: of the model, as clients call it [default: the folder's]."""
        self.folder = folder.resolve()
        self.options = options or EmbeddedOptions()
        self.url = ""
        self.core: EngineCore
        self._name = name or self.folder.name
        self._server: ApiServer[Generation] | None = None

    async def start(self) -> str:
        """Raises ConfigError where it can't listen, or can't serve the model."""
        listener = bind_listener(self.options.host, self.options.port)  # first: large models take their time to load
        try:
            tokenizer = Tokenizer.load(self.folder)
            model = await asyncio.to_thread(load_model, self.folder, self.options)
            self.core = EngineCore(model, tokenizer, self.options)
            card = wire.ModelCard(self._name, int(time()), str(self.folder), self.core.context_length, owned_by="polar")
            self._server = ApiServer(
                self.core,
                card,
                f"embedded-{installed_version()}",
                [web.post("/update_weights", self._update_weights), web.get("/weight_version", self._weight_version)],
            )
            await self.core.restore_weights()
            self.url = await self._server.start(listener)
        except BaseException:
            listener.close()
            await self.stop()
            raise
        return self.url

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
            await self.core.stop()

    async def __aenter__(self) -> "EmbeddedServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _update_weights(self, request: web.Request) -> web.Response:
        update = decode_body(await request.read(), WeightUpdate)
        try:
            # To its end, also where the client goes away: half an update would be no weights at all.
            await asyncio.shield(self.core.update_weights(update))
        except ConfigError as error:
            raise RequestError(str(error), "path") from error
        return await self._weight_version(request)

    async def _weight_version(self, _: web.Request) -> web.Response:
        return json_response(encode_json({"version": self.core.version}))


async def serve(folder: Path | None, options: EmbeddedOptions, *, name: str | None = None) -> None:
    """Serves a model (default: the default model) until the process is told to stop; prints `listening on URL`. Where
    the model breaks, the process ends."""
    stop = make_stop_event()
    if folder is None:
        with show_progress() as progress:
            folder = await asyncio.to_thread(ensure_default_model, progress)
    async with EmbeddedServer(folder, options, name=name) as server:
        click.echo(f"listening on {server.url}")
        waits = [asyncio.create_task(event.wait()) for event in (stop, server.core.model_failed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if server.core.model_failed.is_set():
            os._exit(1)  # its thread may never end; whoever started this starts it anew
