"""A plain HTTP client for the scripted engine, and the check that every reply must pass."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np

from polar.engines.scripted import ScriptedServer
from polar.engines.scripted.sampler import expected_logprobs
from tests.conditions import wait_until

BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
HELLO: list[Any] = [{"role": "user", "content": "Say hello, please."}]
CAPTURE: dict[str, Any] = {"logprobs": True, "return_token_ids": True}


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def post(self, path: str, status: int = 200, **body: Any) -> Any:
        async with self.session.post(self.url + path, json=body) as response:
            text = await response.text()
            assert response.status == status, text
            return json.loads(text) if text else None

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
            assert response.status == 200
            text = await response.text()
            return json.loads(text) if text else None

    async def chat(self, **body: Any) -> Any:
        return await self.post("/v1/chat/completions", **{"messages": HELLO, **body})

    async def stream(self, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
        if path == "/v1/chat/completions":
            body = {"messages": HELLO, **body}
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return events(await response.read())

    async def log(self) -> dict[str, int]:
        return await self.get("/scripted/log")  # type: ignore[no-any-return]

    async def running(self, count: int) -> None:
        """Waits until so many generations run."""

        async def are_running() -> bool:
            return (await self.log())["running"] == count

        await wait_until(are_running)


@asynccontextmanager
async def serving(*args: Any, **kwargs: Any) -> AsyncIterator[Client]:
    async with ScriptedServer(*args, **kwargs) as server, aiohttp.ClientSession() as session:
        yield Client(server.url, session)


def events(stream: bytes) -> list[Any]:
    """A whole stream's events; it must have ended as it should."""
    *found, done, end = stream.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


def merged(chunks: list[Any]) -> dict[str, Any]:
    """A chat stream put together: what a client and a trainer would know of it."""
    whole: dict[str, Any] = {"text": "", "reasoning": "", "calls": [], "ids": [], "logprobs": [], "finish": None}
    whole["prompt"] = chunks[0].get("prompt_token_ids")
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            whole["text"] += delta.get("content", "")
            whole["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(whole["calls"]):
                    assert call["id"]
                    whole["calls"].append([call["function"]["name"], ""])
                whole["calls"][call["index"]][1] += call["function"].get("arguments", "")
            whole["ids"] += choice.get("token_ids") or []
            whole["logprobs"] += [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content", [])]
            whole["finish"] = choice["finish_reason"] or whole["finish"]
    return whole


def whole(reply: Any) -> dict[str, Any]:
    """The same of a reply that came at once."""
    (choice,) = reply["choices"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    return {
        "text": message["content"] or "",
        "reasoning": message["reasoning"] or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])],
        "ids": choice["token_ids"],
        "logprobs": [entry["logprob"] for entry in choice["logprobs"]["content"]],
        "finish": choice["finish_reason"],
        "prompt": reply["prompt_token_ids"],
    }


def expected(prompt: list[int], ids: list[int], spans: list[tuple[int, int, int]]) -> list[float]:
    """The log-probabilities that these tokens must have, from their contexts and (version, start, stop) spans."""
    context, values = np.array(prompt + ids, dtype=np.int32), list[float]()
    for version, start, stop in spans:
        begin = len(prompt) + start
        values += expected_logprobs(version, context[:begin], context[begin : len(prompt) + stop]).tolist()
    return values
