"""Somebody who is told of tasks that have ended."""

import asyncio
from collections import defaultdict
from typing import Any

from aiohttp import web


class Receiver:
    """At one address, whether it is there or not. It answers each task's callback with so many failures first."""

    def __init__(self, failures: int) -> None:
        self.got: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.keys: defaultdict[str, set[str]] = defaultdict(set)
        self._failures = failures
        self._came = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/done"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/done", self._take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, tasks: set[str], seconds: float = 60) -> None:
        """Each of these was acknowledged."""
        async with asyncio.timeout(seconds), self._came:
            await self._came.wait_for(lambda: all(len(self.got[name]) > self._failures for name in tasks))

    async def _take(self, request: web.Request) -> web.Response:
        told = await request.json()
        name = told["task_id"]
        async with self._came:
            self.got[name].append(told)
            self.keys[name].add(request.headers["Idempotency-Key"])
            self._came.notify_all()
        return web.Response(status=200 if len(self.got[name]) > self._failures else 500)
