"""`[cluster] engine = "ray"`: the server's side of its nodes on a Ray cluster.

The work is done by a process of its own (driver.py), which this one starts, gives its orders, and starts again when it
ends before its time: without Ray there are no new nodes, but the server and the nodes that run go on.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
from types import TracebackType

import msgspec

from polar.cluster.driver_protocol import (
    DEFAULT_SERVE,
    DRAIN_LINE,
    DriverConfig,
    DriverFailed,
    DriverMessage,
    LogMessage,
    NodeSpec,
    NodesPlaced,
    node_settings,
)
from polar.config import Settings
from polar.distribution import install_hint
from polar.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_NODE_FOLDER = "~/.local/state/polar"
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 30.0  # seconds before the process is started again
_DRAIN_SECONDS = 120.0  # for all nodes; the process gives each of them less


class RayCluster:
    """Use as an async context manager, inside that of the server: nodes that are drained hand their work back to it."""

    def __init__(
        self,
        settings: Settings,
        server_url: str,
        *,
        namespace: str = "polar",
        serve: str = DEFAULT_SERVE,
    ) -> None:
        """`server_url`: as the nodes reach it. `serve`: what is run at a node, with the signature of
        `polar.node.node_service.serve_node`."""
        cluster, token = settings.cluster, settings.server.node_token or settings.server.token
        task = NodeSpec(server_url, token, node_settings(settings), cluster.data or DEFAULT_NODE_FOLDER, serve)
        self._orders = DriverConfig(cluster.address, namespace, cluster.nodes, cluster.resources, task)
        self._process: asyncio.subprocess.Process | None = None
        self._placed: asyncio.Future[None]
        self._watching: asyncio.Task[None]
        self._closing = False

    async def __aenter__(self) -> "RayCluster":
        """Returns when nodes have been asked for; each joins the server by itself."""
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f'[cluster] engine = "ray" needs the package ray: {install_hint("ray")}.')
        self._placed = asyncio.get_running_loop().create_future()
        self._watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({self._placed, self._watching}, return_when=asyncio.FIRST_COMPLETED)
            if not self._placed.done():
                await self._watching  # it failed
            await self._placed
        except BaseException:
            await self._stop_watching()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drains all nodes, and leaves none."""
        self._closing = True
        if self._process is None and not self._watching.done():
            log.warning("The nodes are left as they are: Ray, which would drain them, can't be reached.")
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it is ending
                self._process.stdin.write(DRAIN_LINE)
                await self._process.stdin.drain()
            await asyncio.wait({self._watching}, timeout=_DRAIN_SECONDS)
        await self._stop_watching()

    async def _stop_watching(self) -> None:
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching

    async def _watch(self) -> None:
        wait = _FIRST_RETRY_SECONDS
        while True:
            refused, placed = await self._run()
            if self._closing:
                return
            if not self._placed.done():
                self._placed.set_exception(ConfigError(refused.error))
                return
            if refused.final:
                log.error("%s", refused.error)
                return
            wait = _FIRST_RETRY_SECONDS if placed else min(2 * wait, _MAX_RETRY_SECONDS)
            log.warning("%s The nodes are looked after again in %g seconds.", refused.error, wait)
            await asyncio.sleep(wait)

    async def _run(self) -> tuple[DriverFailed, bool]:
        """Runs the process to its end: why it ended, and whether it had placed nodes."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "polar.cluster.driver"),
            stdin=pipe,
            stdout=pipe,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            cwd="/",  # nothing depends on ours, here or at the nodes
            start_new_session=True,  # an interrupt is for the server alone, which then drains
        )
        assert process.stdin is not None
        assert process.stdout is not None
        refused: DriverFailed | None = None
        placed = False
        try:
            process.stdin.write(msgspec.json.encode(self._orders) + b"\n")
            self._process = process
            async for text in process.stdout:
                line: DriverMessage = msgspec.json.decode(text, type=DriverMessage)
                match line:
                    case LogMessage(level, said):
                        log.log(_LEVELS[level], "%s", said)
                    case NodesPlaced():
                        placed = True
                        if not self._placed.done():
                            self._placed.set_result(None)
                    case DriverFailed():
                        refused = line
            status = await process.wait()
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
                await process.wait()
        if refused is None:
            why = f"its client ended with exit status {status}"
            refused = DriverFailed(f"Ray was lost: {why}." if placed else self._orders.unreachable_message(why))
        return refused, placed
