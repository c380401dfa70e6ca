"""The whole service in one process: data plane, control plane, and perhaps a node that runs sessions."""

import asyncio
import contextlib
import logging
import socket
from functools import partial
from pathlib import Path
from types import TracebackType

from polar.config import Settings
from polar.engines.fleet import EngineFleet
from polar.engines.pool import EnginePool
from polar.errors import ConfigError
from polar.gateway.data_plane import DataPlane
from polar.gateway.http import format_url, is_loopback
from polar.gateway.session_registry import SessionRegistry
from polar.node.node import Node
from polar.node.node_service import make_node, make_worker
from polar.records.task import TaskRequest
from polar.rollout.callbacks import Callbacks
from polar.rollout.result_pages import ResultPages
from polar.rollout.routes.app import create_app
from polar.rollout.routes.service import encode_health
from polar.rollout.routes.service_parts import ServiceParts
from polar.rollout.service import RolloutService
from polar.service.control_plane import ControlPlane
from polar.store.base import Store
from polar.telemetry.service_metrics import ServiceMetrics, VerifyMetrics
from polar.trajectory.checker import SessionChecker

log = logging.getLogger(__name__)


class Service:
    """Use as an async context manager. With `node`, tasks are run in this process too; others may join in any case."""

    data_plane: DataPlane
    rollout: RolloutService
    control_url: str

    def __init__(self, settings: Settings, data: Path, *, node: bool = False) -> None:
        self._settings = settings
        self._data = data
        self._with_node = node
        self._node: Node | None = None
        self._stop_requested = asyncio.Event()
        self._drain_requested = asyncio.Event()
        self._worker_task: asyncio.Task[None]
        self._callbacks: Callbacks
        self._control: ControlPlane
        self._stack = contextlib.AsyncExitStack()

    @property
    def store(self) -> Store:
        return self.data_plane.store

    @property
    def pools(self) -> EngineFleet:
        return self.data_plane.pools

    @property
    def pool(self) -> EnginePool:
        return self.data_plane.pool

    @property
    def sessions(self) -> SessionRegistry:
        return self.data_plane.sessions

    @property
    def gateway_url(self) -> str:
        return self.data_plane.gateway_url

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
        plane = self.data_plane = await stack.enter_async_context(DataPlane(settings, self._data, hold_calls=True))
        store_id = await plane.store.ensure_store_id()
        rollout = self.rollout = RolloutService(
            plane.store,
            settings.server,
            store_id=store_id,
            replicas=[replica.url for replica in plane.pool.replicas],
            versions=plane.load_policy_versions,
            check=self._check_task,
        )
        await stack.enter_async_context(rollout)
        if self._with_node:
            self._node = await stack.enter_async_context(make_node(plane))
        name = socket.gethostname()
        worker = await make_worker(
            rollout.lease_manager, plane, self._node, name=name, store_id=store_id, stays_when_drained=True
        )
        rollout.lease_manager.sleep_node_id = worker.node_id
        self._worker_task = asyncio.create_task(worker.run(self._stop_requested, self._drain_requested))
        stack.push_async_callback(self._stop_worker)
        checker = SessionChecker(settings.verify.share, VerifyMetrics(plane.metrics.registry))
        pages = ResultPages(rollout, plane.store, checker)
        callbacks = self._callbacks = await stack.enter_async_context(Callbacks(rollout, pages, settings.server))
        metrics = ServiceMetrics(
            plane.metrics.registry,
            queue=rollout.count_sessions,
            nodes=rollout.list_nodes,
            callbacks=callbacks.count_pending,
        )
        rollout.ledger.metrics = metrics
        callbacks.on_given_up = metrics.count_failed_callback
        parts = ServiceParts(
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
        self.control_url = format_url(settings.server.host, listener.getsockname()[1])
        health = partial(encode_health, parts)
        self._control = await stack.enter_async_context(ControlPlane(create_app(parts), health, listener))
        stack.callback(rollout.close)  # before the listener ends: nobody is left waiting

    async def _check_task(self, task: TaskRequest) -> None:
        """Refuses a task that this process's node can't run, where it is the only one: other nodes may have other
        harnesses and runtimes."""
        if self._node is not None and len(self.rollout.lease_manager.members) == 1:
            await self._node.plan(task)

    async def _stop_worker(self) -> None:
        self._stop_requested.set()
        await self._worker_task

    async def drain(self, until: asyncio.Event) -> None:
        """Lets sessions of this process's node end, for `drain_seconds` or until the event; none begins any more. All
        else goes on meanwhile."""
        self._drain_requested.set()
        cut_short = asyncio.ensure_future(until.wait())
        await asyncio.wait({self._worker_task, cut_short}, return_when=asyncio.FIRST_COMPLETED)
        cut_short.cancel()

    async def wait_for_failure(self) -> str:
        """Waits until the service can't go on by itself, and returns why."""
        ends = {
            asyncio.ensure_future(self.rollout.superseded.wait()): "Another server was started on the same database.",
            asyncio.ensure_future(self.rollout.failed.wait()): "What looks after the queue has failed: see the log.",
            asyncio.ensure_future(
                asyncio.wait({self._worker_task})
            ): "The node of this process has failed: see the log.",
            asyncio.ensure_future(self._callbacks.wait_until_failed()): "What sends callbacks has failed: see the log.",
            asyncio.ensure_future(self._control.wait_until_ended()): "The control plane has failed: see the log.",
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in ends:
                waiting.cancel()
        if self._worker_task.done() and (error := self._worker_task.exception()) is not None:
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
