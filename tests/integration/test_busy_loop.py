"""What goes on while a prompt is being made, or while the event loop is busy: other calls, /health, signs of life."""

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from polar.node.remote_server import KeepAlive, RemoteServer
from polar.rollout.protocol import Heartbeat, LeaseId
from tests.integration.stack import Stack, running

LONG = "word " * 30_000


async def ask(stack: Stack, key: str, text: str) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{stack.url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


def health(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/health", timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


@pytest.mark.asyncio
async def test_others_go_on_while_a_long_prompt_is_made(tmp_path: Path) -> None:
    """The process that makes it is stopped: nothing here waits for it but the call itself."""
    server = {"beat_seconds": 0.05, "lease_seconds": 600}
    async with running(tmp_path, server=server) as stack:
        await ask(stack, stack.key, LONG + "once")  # from here on there is a process
        (workers,) = stack.service.data_plane.gateway.prompt_renderer.models.worker_pools
        (pid,) = workers.process_ids
        os.kill(pid, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(ask(stack, stack.key, LONG + "twice"))
            _, key = await stack.service.sessions.create({})
            node = next(iter(stack.service.rollout.lease_manager.members.values()))
            for number in range(5):
                await ask(stack, key, f"hello {number}")
                assert (await asyncio.to_thread(health, stack.service.control_url))["status"] == "ok"
                await heard(node)
            assert not waiting.done()
        finally:
            os.kill(pid, signal.SIGCONT)
        await waiting
        assert [one.node_id for one in stack.service.rollout.lease_manager.members.values()] == [node.node_id]
        first, second = [exchange async for exchange in stack.service.store.read_exchanges(stack.session_id)]
        assert first.prompt_ids is not None
        assert second.prompt_ids is not None
        assert min(len(first.prompt_ids), len(second.prompt_ids)) > 30_000


async def heard(node: Any) -> None:
    """Until a node was heard of again."""
    before = node.last_seen
    async with asyncio.timeout(120):
        while node.last_seen == before:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_health_is_answered_while_the_event_loop_is_busy(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        url = stack.service.control_url
        answers: list[dict[str, Any]] = []

        def look() -> None:
            answers.extend(health(url) for _ in range(3))

        block_until(look)
        assert [answer["status"] for answer in answers] == ["ok"] * 3
        assert answers[0]["sessions"] == 1
        async with aiohttp.ClientSession() as http, http.get(f"{url}/rollout/status") as answer:
            assert answer.status == 200  # what needs the loop has it again


def block_until(work: Callable[[], None]) -> None:
    """Keeps this thread, and with it the event loop, busy until another one is done."""
    other = threading.Thread(target=work)
    other.start()
    other.join(timeout=120)
    assert not other.is_alive()


class Server:
    """The rollout server's side of beats, on an event loop of its own."""

    def __init__(self) -> None:
        self.beats: list[dict[str, Any]] = []
        self.url = ""
        self._came = threading.Condition()
        self._ready = threading.Event()
        self._stop: Callable[[], object]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> "Server":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.join()

    def wait(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.beats) >= count, timeout=120)

    async def _run(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._stop = partial(loop.call_soon_threadsafe, stop.set)
        app = web.Application()
        app.router.add_post("/nodes/{node_id}/beat", self._beat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await stop.wait()
        await runner.cleanup()

    async def _beat(self, request: web.Request) -> web.Response:
        with self._came:
            self.beats.append({"node_id": request.match_info["node_id"]} | await request.json())
            self._came.notify_all()
        return web.json_response({})


@pytest.mark.asyncio
async def test_a_node_shows_that_it_lives_while_its_loop_is_busy() -> None:
    with Server() as server, KeepAlive(lambda: RemoteServer(server.url, None)) as keep_alive:
        keep_alive.record("n1", Heartbeat([LeaseId(3, 4)], {"running": 1}), 0.05)
        block_until(lambda: server.wait(3))
        assert server.beats[0]["node_id"] == "n1"
        assert server.beats[0]["holding"] == [{"work_id": 3, "fence": 4}]
        keep_alive.forget()


@pytest.mark.asyncio
async def test_a_node_whose_loop_hangs_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.node.remote_server.HANG_SECONDS", 0.0)
    with Server() as server, KeepAlive(lambda: RemoteServer(server.url, None)) as keep_alive:
        keep_alive.record("n1", Heartbeat([]), 0.01)
        await asyncio.sleep(0.3)
        assert not server.beats
