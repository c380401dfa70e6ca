"""A capturing proxy as most people would write it: FastAPI, httpx, stdlib json, a row per call in SQLite.

    python -m benchmarks.gateway.fastapi_httpx ENGINE_URL PORT DATABASE

It keeps what training needs (messages, ids, log-probabilities) and commits before the reply's last byte leaves, as
Polar does. Where the idiom leaves a choice it takes the faster one: one client for all calls, uvloop and httptools
under uvicorn, `JSONResponse` instead of FastAPI's own encoder, a write-ahead log without a sync per commit.
"""

import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


def create_app(engine_url: str, database: str) -> FastAPI:
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("CREATE TABLE calls (messages TEXT, reply TEXT, prompt_ids TEXT, ids TEXT, logprobs TEXT)")
    client = httpx.AsyncClient(base_url=engine_url, timeout=600, limits=httpx.Limits(max_connections=None))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await client.aclose()
        connection.close()

    app = FastAPI(lifespan=lifespan)

    def record(body: Any, message: Any, prompt_ids: Any, ids: Any, logprobs: Any) -> None:
        row = (body["messages"], message, prompt_ids, ids, logprobs)
        with connection:
            connection.execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", tuple(map(json.dumps, row)))

    async def stream(body: Any) -> AsyncIterator[str]:
        text, prompt_ids = "", None
        ids: list[int] = []
        logprobs: list[float] = []
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    record(body, {"content": text}, prompt_ids, ids, logprobs)
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    prompt_ids = chunk.get("prompt_token_ids") or prompt_ids
                    for choice in chunk["choices"]:
                        text += choice["delta"].get("content") or ""
                        ids += choice["token_ids"] or []
                        logprobs += [token["logprob"] for token in (choice["logprobs"] or {}).get("content", ())]
                yield line + "\n"

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        body["logprobs"] = True
        body["return_token_ids"] = True
        if body.get("stream"):
            return StreamingResponse(stream(body), media_type="text/event-stream")
        response = await client.post("/v1/chat/completions", json=body)
        reply = response.json()
        choice = reply["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        record(body, choice["message"], reply["prompt_token_ids"], choice["token_ids"], logprobs)
        return JSONResponse(reply, response.status_code)

    return app


if __name__ == "__main__":
    app = create_app(sys.argv[1], sys.argv[3])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error", access_log=False)
