"""A session with a call whose gateway was killed: the others train as if it had not been, and it is listed."""

from pathlib import Path
from typing import Any

import aiohttp

from polar.records.exchange import StartedCall
from tests.integration.stack import Stack, running


async def call(stack: Stack, messages: list[dict[str, Any]]) -> str:
    headers = {"Authorization": f"Bearer {stack.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{stack.url}/v1/chat/completions", json={"model": "m", "messages": messages}) as response,
    ):
        assert response.status == 200, await response.text()
        text: str = (await response.json())["choices"][0]["message"]["content"]
        return text


async def test_a_session_with_an_interrupted_call(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        store, session_id = stack.service.data_plane.store, stack.session_id
        messages = [{"role": "user", "content": "hi"}]
        said = await call(stack, messages)
        (session,) = stack.service.sessions._sessions_by_key_hash.values()
        lost_call = StartedCall("x-lost", session_id, session.take_seq(), "openai_chat", "messages", "m", 17.0, 2)
        assert await store.record_interrupted([lost_call]) == ["x-lost"]
        await call(stack, [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "go on"}])
        async with aiohttp.ClientSession(stack.service.control_url) as http:
            async with http.get(f"/sessions/{session_id}/exchanges") as response:
                exchanges = await response.json()
            async with http.get(f"/sessions/{session_id}/trajectory") as response:
                trajectory = await response.json()
        first, lost, second = exchanges
        assert (lost["status"], lost["untrainable"], lost["request"]["model"]) == ("interrupted", "no_reply", "m")
        assert lost["started_at"] == 17.0
        assert second["parent"] == first["exchange_id"]
        assert [trace["exchange_ids"] for trace in trajectory["traces"]] == [
            [first["exchange_id"], second["exchange_id"]]
        ]
        assert trajectory["metadata"]["excluded"] == []
