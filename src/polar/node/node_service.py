"""Connects a data plane to a rollout server: with a node of its own, or only to follow the engines."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Any

import msgspec

from polar.config import Settings
from polar.gateway.data_plane import DataPlane
from polar.node.node import Node
from polar.node.remote_server import KeepAlive, RemoteServer
from polar.node.runtime_pool import RuntimeBackends
from polar.node.worker import Worker, WorkerContext
from polar.rollout.protocol import RolloutServer


def make_node(plane: DataPlane, runtime_backends: RuntimeBackends | None = None) -> Node:
    """`runtime_backends` replaces the installed ones."""
    return Node(
        plane.settings,
        plane.data_folder,
        store=plane.store,
        sessions=plane.sessions,
        pools=plane.pools,
        gateway_url=plane.gateway_url,
        runtime_backends=runtime_backends,
    )


async def make_worker(
    server: RolloutServer,
    plane: DataPlane,
    node: Node | None,
    *,
    name: str,
    store_id: str,
    stays_when_drained: bool = False,
    keep_alive: KeepAlive | None = None,
) -> Worker:
    """Makes the worker of a data plane; without a `node`, it only follows the engines (see WorkerContext)."""

    def get_load() -> dict[str, Any]:
        return {} if node is None else msgspec.to_builtins(node.get_load())

    context = WorkerContext(
        node_id=f"gateway-{secrets.token_hex(4)}" if node is None else node.node_id,
        name=name,
        backends=[] if node is None else await node.available_backends(),
        slots=0 if node is None else plane.settings.node.run_workers,
        store=store_id,
        replaces=[] if node is None else node.replaced,
        stopped=[] if node is None else node.stopped,
        get_load=get_load,
        apply_engines=plane.pools.apply,
        export_session=plane.store.export_session,
        disown_session=plane.store.revoke_session_reward,
        mark_ending=None if node is None else node.mark_ending,
        drain_seconds=plane.settings.node.drain_seconds,
        stays_when_drained=stays_when_drained,
    )
    return Worker(server, node, context, keep_alive)


async def serve_node(
    settings: Settings,
    data: Path,
    server_url: str,
    token: str | None,
    *,
    name: str,
    stop: asyncio.Event,
    drain: asyncio.Event | None = None,
) -> None:
    """Runs a gateway node for a remote rollout server until `stop`, or until it has drained (Worker.run). The server
    names its engines."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(RemoteServer(server_url, token))
        plane = await stack.enter_async_context(DataPlane(settings, data, engines=False))
        node = await stack.enter_async_context(make_node(plane))
        keep_alive = stack.enter_context(KeepAlive(lambda: RemoteServer(server_url, token)))
        store_id = await plane.store.ensure_store_id()
        worker = await make_worker(server, plane, node, name=name, store_id=store_id, keep_alive=keep_alive)
        await worker.run(stop, drain)
