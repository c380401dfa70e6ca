"""An engine that is started again on its address: what it samples has no known version until it was given one."""

from pathlib import Path

import aiohttp

from polar.engines.scripted import ScriptedServer
from polar.records.exchange import Exchange
from tests.conditions import wait_until
from tests.integration.stack import Stack, running


async def call(stack: Stack) -> Exchange:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {stack.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{stack.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
    return (await stack.exchanges())[-1]


def versions(exchange: Exchange) -> list[int]:
    return [span.version for span in exchange.versions]


async def restart(server: ScriptedServer) -> ScriptedServer:
    await server.stop()
    again = ScriptedServer(port=int(server.url.rpartition(":")[2]))
    await again.start()
    return again


async def test_tokens_of_a_restarted_engine_have_no_known_version(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        again = await restart(stack.engine)
        try:
            exchange = await call(stack)
            assert versions(exchange) == [0]  # those that it is started with
            assert exchange.untrainable is None
            replica = stack.service.pool.replicas[0]
            await stack.service.rollout.engine_controller.set_version("default", 3, None, 60)
            await wait_until(lambda: replica._process_start_time is not None)
            exchange = await call(stack)
            assert (versions(exchange), exchange.untrainable) == ([3], None)
            await again.stop()
            again = await restart(again)
            for _ in range(2):
                exchange = await call(stack)
                assert (versions(exchange), exchange.untrainable) == ([], "version_unknown")
            await stack.service.rollout.engine_controller.set_version("default", 4, None, 60)
            exchange = await call(stack)
            assert (versions(exchange), exchange.untrainable) == ([4], None)
        finally:
            await again.stop()
