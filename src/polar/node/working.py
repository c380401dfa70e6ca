"""A data plane at work for a rollout server: with a node of its own, or only following what is said of engines."""

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Any

import msgspec

from polar.config import Settings
from polar.data_plane import DataPlane
from polar.node.keep_alive import KeepAlive
from polar.node.kinds import Kinds
from polar.node.node import Node
from polar.node.remote import RemoteServer
from polar.node.worker import Place, Worker
from polar.rollout.protocol import Server


def node_of(plane: DataPlane, kinds: Kinds | None = None) -> Node:
    """`kinds` of runtimes in place of those that are installed."""
    return Node(
        plane.settings,
        plane.data,
        store=plane.store,
        sessions=plane.sessions,
        pools=plane.pools,
        gateway_url=plane.gateway_url,
        kinds=kinds,
    )


async def worker_of(
    server: Server,
    plane: DataPlane,
    node: Node | None,
    *,
    name: str,
    store_id: str,
    stays: bool = False,
    keep_alive: KeepAlive | None = None,
) -> Worker:
    """`stays`: also when it is drained (worker.Place)."""

    def load() -> dict[str, Any]:
        return {} if node is None else msgspec.to_builtins(node.load())

    place = Place(
        node_id=f"gateway-{secrets.token_hex(4)}" if node is None else node.node_id,
        name=name,
        backends=[] if node is None else await node.backends(),
        slots=0 if node is None else plane.settings.node.run_workers,
        store=store_id,
        replaces=[] if node is None else node.replaced,
        stopped=[] if node is None else node.stopped,
        load=load,
        apply=plane.pools.apply,
        export=plane.store.export_session,
        disown=plane.store.disown_session,
        mark_ending=None if node is None else node.mark_ending,
        drain_seconds=plane.settings.node.drain_seconds,
        stays=stays,
    )
    return Worker(server, node, place, keep_alive)


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
    """A gateway node for a rollout server elsewhere, until `stop` or the end of what `drain` begins (Worker.run). Its
    engines are those that the server names."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(RemoteServer(server_url, token))
        plane = await stack.enter_async_context(DataPlane(settings, data, engines=False))
        node = await stack.enter_async_context(node_of(plane))
        keep_alive = stack.enter_context(KeepAlive(lambda: RemoteServer(server_url, token)))
        store_id = await plane.store.identity()
        worker = await worker_of(server, plane, node, name=name, store_id=store_id, keep_alive=keep_alive)
        await worker.run(stop, drain)
