"""The whole service in one process: data plane, control plane, and perhaps a node that runs sessions."""

import asyncio
import contextlib
import logging
import socket
from functools import partial
from pathlib import Path
from types import TracebackType

from polar.config import Settings
from polar.control_plane import ControlPlane
from polar.data_plane import DataPlane
from polar.engines.pool import Pool
from polar.engines.pools import Pools
from polar.errors import ConfigError
from polar.gateway.http import is_loopback, url_of
from polar.gateway.sessions import Sessions
from polar.node.node import Node
from polar.node.working import node_of, worker_of
from polar.rollout.callbacks import Callbacks
from polar.rollout.models import TaskRequest
from polar.rollout.pages import Pages
from polar.rollout.rollout import Rollout
from polar.rollout.routes.app import create_app
from polar.rollout.routes.parts import Parts
from polar.rollout.routes.service import current_health
from polar.store.base import Store
from polar.telemetry.service_metrics import ServiceMetrics
from polar.telemetry.verify_metrics import VerifyMetrics
from polar.trajectory.checker import SessionChecker

log = logging.getLogger(__name__)


class Service:
    """Use as an async context manager. With `node`, tasks are run in this process too; others may join in any case."""

    plane: DataPlane
    rollout: Rollout
    control_url: str

    def __init__(self, settings: Settings, data: Path, *, node: bool = False) -> None:
        self._settings = settings
        self._data = data
        self._with_node = node
        self._node: Node | None = None
        self._stop = asyncio.Event()
        self._drain = asyncio.Event()
        self._working: asyncio.Task[None]
        self._callbacks: Callbacks
        self._control: ControlPlane
        self._stack = contextlib.AsyncExitStack()

    @property
    def store(self) -> Store:
        return self.plane.store

    @property
    def pools(self) -> Pools:
        return self.plane.pools

    @property
    def pool(self) -> Pool:
        return self.plane.pool

    @property
    def sessions(self) -> Sessions:
        return self.plane.sessions

    @property
    def gateway_url(self) -> str:
        return self.plane.gateway_url

    async def __aenter__(self) -> "Service":
        server = self._settings.server
        if not server.token and not is_loopback(server.host):
            raise ConfigError(
                f"The control plane on {server.host} would be open to everyone: set [server] token, or use 127.0.0.1."
            )
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        # First of all: who can't be reached must not take the database from a server that can.
        listener = _listen(settings.server.host, settings.server.port)
        stack.callback(listener.close)
        plane = self.plane = await stack.enter_async_context(DataPlane(settings, self._data, steered=True))
        store_id = await plane.store.identity()
        rollout = self.rollout = Rollout(
            plane.store,
            settings.server,
            store_id=store_id,
            replicas=[replica.url for replica in plane.pool.replicas],
            versions=plane.versions,
            check=self._check,
        )
        await stack.enter_async_context(rollout)
        if self._with_node:
            self._node = await stack.enter_async_context(node_of(plane))
        name = socket.gethostname()
        worker = await worker_of(rollout.leasing, plane, self._node, name=name, store_id=store_id, stays=True)
        rollout.leasing.sleeper = worker.node_id
        self._working = asyncio.create_task(worker.run(self._stop, self._drain))
        stack.push_async_callback(self._stop_working)
        checker = SessionChecker(settings.verify.share, VerifyMetrics(plane.metrics.registry))
        pages = Pages(rollout, plane.store, checker)
        callbacks = self._callbacks = await stack.enter_async_context(Callbacks(rollout, pages, settings.server))
        metrics = ServiceMetrics(
            plane.metrics.registry, queue=rollout.status, nodes=rollout.nodes, callbacks=callbacks.pending
        )
        rollout.ledger.watcher = metrics
        callbacks.given_up = metrics.callback_failed
        parts = Parts(
            settings=settings.server,
            rollout=rollout,
            pages=pages,
            callbacks=callbacks,
            store=plane.store,
            sessions=plane.sessions,
            pools=plane.pools,
            metrics=plane.metrics,
            gateway_url=plane.gateway_url,
            node_id=worker.node_id,
        )
        self.control_url = url_of(settings.server.host, listener.getsockname()[1])
        health = partial(current_health, parts)
        self._control = await stack.enter_async_context(ControlPlane(create_app(parts), health, listener))
        stack.callback(rollout.close)  # before the listener ends: nobody is left waiting

    async def _check(self, task: TaskRequest) -> None:
        """What this process can tell of a task; other nodes may have other harnesses, and other runtimes."""
        if self._node is not None and len(self.rollout.leasing.members) == 1:
            await self._node.plan(task)

    async def _stop_working(self) -> None:
        self._stop.set()
        await self._working

    async def drain(self, until: asyncio.Event) -> None:
        """Lets sessions of this process's node end, for `drain_seconds` or until the event; none begins any more. All
        else goes on meanwhile."""
        self._drain.set()
        cut_short = asyncio.ensure_future(until.wait())
        await asyncio.wait({self._working, cut_short}, return_when=asyncio.FIRST_COMPLETED)
        cut_short.cancel()

    async def over(self) -> str:
        """Until the service can't go on by itself: why."""
        ends = {
            asyncio.ensure_future(self.rollout.superseded.wait()): "Another server was started on the same database.",
            asyncio.ensure_future(self.rollout.failed.wait()): "What looks after the queue has failed: see the log.",
            asyncio.ensure_future(asyncio.wait({self._working})): "The node of this process has failed: see the log.",
            asyncio.ensure_future(self._callbacks.over()): "What sends callbacks has failed: see the log.",
            asyncio.ensure_future(self._control.over()): "The control plane has failed: see the log.",
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in ends:
                waiting.cancel()
        if self._working.done() and (error := self._working.exception()) is not None:
            log.error("The node of this process has failed", exc_info=error)
        return ends[done.pop()]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # the protocol: else Nagle may wait
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)  # from here on callers wait for an answer, though uvicorn still has to start
    except OSError as error:
        listener.close()
        raise ConfigError(f"Can't listen on {host}:{port}: {error.strerror}. Set [server] port.") from error
    return listener
