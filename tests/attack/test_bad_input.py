"""Requests that are wrong in every way we could think of: always the provider's own error, never a crash or a hang."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from copy import deepcopy
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.attack.parts import (
    ANTHROPIC,
    CHAT,
    COMPLETIONS,
    DIALECTS,
    GOOGLE,
    RESPONSES,
    Answer,
    Bench,
    Dialect,
    Wire,
    ask,
    bench,
)
from tests.attack.replies import GOOD, chunked, encode, response, stream, whole

pytestmark = pytest.mark.asyncio(loop_scope="module")
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)

LIMIT = 200_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def it(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with bench(tmp_path_factory.mktemp("data"), control=True, gateway={"max_body": LIMIT, "grace": 0.1}) as made:

        async def script(call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
            writer.write(stream(*GOOD) if call.get("stream") else response(whole()))

        made.engine.script = script
        yield made
        # Whatever came in and was answered can be shown.
        async with aiohttp.ClientSession() as http:
            for session in await made.service.store.list_sessions(limit=1000):
                url = f"{made.service.control_url}/sessions/{session.session_id}/exchanges"
                async with http.get(url) as shown:
                    assert shown.status == 200
                    json.loads(await shown.read(), parse_int=str)


async def post(
    it: Bench, dialect: Dialect, body: bytes, headers: dict[str, str] | None = None, *, key: str | None = None
) -> Answer:
    async with Wire.open(it.url) as wire:
        auth = {"Authorization": f"Bearer {it.key if key is None else key}"}
        return await wire.request("POST", dialect.path, auth | (headers or {}), body)


def refused(dialect: Dialect, answer: Answer, status: int = 400) -> None:
    assert answer.status == status, answer
    assert answer.headers["content-type"].startswith("application/json")
    dialect.check_error(answer.body, status)


def good(dialect: Dialect) -> bytes:
    return encode(dialect.body)


# Bodies


def no_json(dialect: Dialect) -> dict[str, bytes]:
    text = good(dialect)
    return {
        "nothing": b"",
        "white space": b" \r\n\t",
        "half of it": text[: len(text) // 2],
        "all but the last byte": text[:-1],
        "a list": b"[" + text + b"]",
        "null": b"null",
        "a number": b"17",
        "a string": b'"hello"',
        "true": b"true",
        "two values": text + text,
        "something behind it": text + b"x",
        "a zero byte behind it": text + b"\0",
        "a byte order mark": b"\xef\xbb\xbf" + text,
        "UTF-16": text.decode().encode("utf-16"),
        "bytes that are no text": text.replace(b"hi", b"\xff\xfe"),
        "a cut character": text.replace(b"hi", "é".encode()[:1]),
        "such bytes where nobody looks": text[:-1] + b',"unknown":"\xff"}',
        "such bytes as a name": text[:-1] + b',"\xff":1}',
        "a bad escape": text.replace(b"hi", b"\\x41"),
        "a line end in a string": text.replace(b"hi", b"h\ni"),
        "NaN": text[:-1] + b',"temperature":NaN}',
        "Infinity": text[:-1] + b',"unknown":Infinity}',
        "a comma too many": text[:-1] + b",}",
        "a comment": b"/* hi */" + text,
        "single quotes": text.replace(b'"', b"'"),
        "a leading zero": text[:-1] + b',"unknown":01}',
        "depth": text[:-1] + b',"unknown":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        "depth of objects": text[:-1] + b',"unknown":' + b'{"a":' * 30_000 + b"1" + b"}" * 30_000 + b"}",
        "depth where it is read": b'{"model":"m","max_tokens":5,"%b":%b1%b}'
        % (dialect.text_field.encode(), b"[" * 90_000, b"]" * 90_000),
        "a form": b"model=m&prompt=hi",
        "binary": bytes(range(256)),
    }


@each_dialect
async def test_bodies_that_are_no_json(it: Bench, dialect: Dialect) -> None:
    for name, body in no_json(dialect).items():
        answer = await post(it, dialect, body)
        assert answer.status == 400, (name, answer)
        refused(dialect, answer)
    assert (await post(it, dialect, good(dialect))).status == 200


@each_dialect
async def test_bodies_that_are_odd_and_fine(it: Bench, dialect: Dialect) -> None:
    """What every JSON parser takes is taken."""
    text = good(dialect)
    fields = {
        "white space": b" \n\t" + text + b"\r\n ",
        "names given twice": text[:-1] + b",%b}" % encode({dialect.text_field: dialect.body[dialect.text_field]})[1:-1],
        "unknown fields": text[:-1] + b',"x_unknown":{"a":[1,2.5,null]},"\\u0000":1,"":2}',
        "half a character": text.replace(b"hi", b"x\\ud83d"),  # as JavaScript cuts strings
        "escapes": text.replace(b"hi", b"\\u0041\\ud83d\\ude42\\u0000\\/"),
        "long numbers where nobody looks": text[:-1] + b',"x_unknown":' + b"9" * 5000 + b"}",
        "some depth": text[:-1] + b',"x_unknown":' + b"[" * 200 + b"]" * 200 + b"}",
    }
    for name, body in fields.items():
        answer = await post(it, dialect, body)
        assert answer.status == 200, (name, answer)
    for header in ("", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "\\"):
        answer = await post(it, dialect, text, {"Content-Type": header} if header else {})
        assert answer.status == 200, (header, answer)


# Every field of a rich request, replaced by every kind of value

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
PNG = "iVBORw0KGgo="
RICH: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "stream_options": {"include_usage": True},
        "stop": ["x"],
        "temperature": 1,
        "max_completion_tokens": 5,
        "logit_bias": {"5": 1},
        "seed": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
    },
    "openai_completions": {"model": "m", "prompt": ["hi"], "max_tokens": 5, "stop": "x", "logprobs": 1, "seed": 5},
    "openai_responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA},
            {"type": "custom", "name": "g", "format": {"type": "text"}},
        ],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
    },
    "anthropic": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "hi"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "done"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
        "temperature": 1,
        "top_k": 5,
        "metadata": {"user_id": "u"},
    },
    "google": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": PNG}}]},
            {
                "role": "model",
                "parts": [{"functionCall": {"name": "f", "args": {"a": "b"}}, "thoughtSignature": "cw=="}],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "done"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": SCHEMA}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "temperature": 1,
            "maxOutputTokens": 5,
            "stopSequences": ["x"],
            "responseMimeType": "application/json",
            "responseSchema": SCHEMA,
            "thinkingConfig": {"thinkingBudget": 5, "includeThoughts": True},
        },
    },
}

VALUES: list[Any] = [
    None,
    True,
    -1,
    0.5,
    10**30,
    "",
    "\0",
    "data:;base64,!",
    [],
    [None],
    [[[]]],
    {},
    {"type": "nonsense"},
    {"": None},
    [{"type": 5, "text": 5}],
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        yield (*path, name)
        yield from places(part, (*path, name))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = deepcopy(value)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = new
    return changed


@each_dialect
async def test_wrong_types_everywhere(it: Bench, dialect: Dialect) -> None:
    """Understood or refused; nothing in between. (Rich requests themselves are fine.)"""
    rich = RICH[dialect.name]
    assert (await post(it, dialect, encode(rich))).status == 200
    bodies = [replaced(rich, path, new) for path in places(rich) for new in VALUES]

    async def sent(http: aiohttp.ClientSession, body: Any) -> None:
        streams = len(body) % 2 == 1 if dialect is GOOGLE else body.setdefault("stream", True)
        path = dialect.stream_path if streams else dialect.path
        async with http.post(it.url + path, data=encode(body)) as response:
            text = await response.read()
        assert response.status in (200, 400), (response.status, text, body)
        if response.status == 400:
            dialect.check_error(text, 400)

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {it.key}"}) as http:
        for start in range(0, len(bodies), 32):
            await asyncio.gather(*(sent(http, body) for body in bodies[start : start + 32]))


@each_dialect
async def test_numbers_that_are_too_large(it: Bench, dialect: Dialect) -> None:
    names = ("temperature", "max_tokens", "max_output_tokens", "top_k", "seed", "n", "logprobs", "top_logprobs")
    for name in names:
        for number in ("1e999", "-1e999", "9" * 400, "1e308", "-0", "0.1e-400"):
            field = f'"{name}":{number}'
            extra = f'"generationConfig":{{{field}}}' if dialect is GOOGLE else field
            answer = await post(it, dialect, good(dialect)[:-1] + b"," + extra.encode() + b"}")
            assert answer.status in (200, 400), (extra, answer)
            if answer.status == 400:
                refused(dialect, answer)


# How a body is sent


@each_dialect
async def test_packed_bodies(it: Bench, dialect: Dialect) -> None:
    text = good(dialect)
    packed = gzip.compress(text)
    for encoding, body, status in [
        ("gzip", packed, 200),
        ("GZIP", packed, 200),
        ("deflate", zlib.compress(text), 200),
        ("identity", text, 200),
        ("gzip", text, 400),
        ("gzip", packed[:-9], 400),
        ("gzip", packed[:5], 400),
        ("gzip", packed[:12] + b"\0\0\0\0" + packed[16:], 400),
        ("deflate", packed[10:], 400),
        ("br", text, 400),
        ("zstd", text, 400),
        ("gzip, gzip", gzip.compress(packed), 400),
        ("nonsense", text, 400),
        ("gzip", gzip.compress(b" " * 50_000_000), 413),
        ("deflate", zlib.compress(b"[" * 50_000_000), 413),
        ("gzip", gzip.compress(gzip.compress(b" " * 50_000_000)), 400),
    ]:
        answer = await post(it, dialect, body, {"Content-Encoding": encoding})
        assert answer.status == status, (encoding, answer)
        if status != 200:
            refused(dialect, answer, status)


@each_dialect
async def test_bodies_that_are_too_large(it: Bench, dialect: Dialect) -> None:
    """Refused by what they announce, and by what comes where they announce nothing."""
    auth = {"Authorization": f"Bearer {it.key}"}
    large = good(dialect)[:-1] + b" " * LIMIT + b"}"
    refused(dialect, await post(it, dialect, large), 413)
    async with Wire.open(it.url) as wire:
        await wire.send(wire.head("POST", dialect.path, auth, 10**18))
        refused(dialect, await wire.answer(), 413)
    async with Wire.open(it.url) as wire:
        pieces = [large[start : start + 9999] for start in range(0, len(large), 9999)]
        await wire.send(wire.head("POST", dialect.path, auth | {"Transfer-Encoding": "chunked"}) + chunked(*pieces))
        refused(dialect, await wire.answer(), 413)
    async with Wire.open(it.url) as wire:  # without end, and without waiting for it
        await wire.send(wire.head("POST", dialect.path, auth | {"Transfer-Encoding": "chunked"}))
        for _ in range(30):
            await wire.send(chunked(b"x" * 9999, end=False))
        refused(dialect, await wire.answer(), 413)
    exact = good(dialect)[:-1] + b" " * (LIMIT - len(good(dialect))) + b"}"
    assert len(exact) == LIMIT
    assert (await post(it, dialect, exact)).status == 200


@each_dialect
async def test_chunked_bodies(it: Bench, dialect: Dialect) -> None:
    """A broken chunk is refused at once, whenever it comes, and ends the connection."""
    auth = {"Authorization": f"Bearer {it.key}", "Transfer-Encoding": "chunked"}
    text = good(dialect)
    async with Wire.open(it.url) as wire:
        await wire.send(wire.head("POST", dialect.path, auth))
        for byte in text:
            await wire.send(chunked(bytes([byte]), end=False))
            await asyncio.sleep(0)
        await wire.send(b"0\r\nX-Trailer: 1\r\n\r\n")
        assert (await wire.answer()).status == 200
        await wire.send(wire.head("POST", dialect.path, auth) + b"3;name=value\r\n" + text[:3] + b"\r\n")
        await wire.send(chunked(text[3:]))
        assert (await wire.answer()).status == 200
    for broken in (b"zz\r\nabc\r\n0\r\n\r\n", b"-1\r\n\r\n", b"3\r\nabcdef\r\n0\r\n\r\n", b"fffffffffffffffffff\r\n"):
        async with Wire.open(it.url) as wire:
            await wire.send(wire.head("POST", dialect.path, auth | {"Expect": "100-continue"}))
            assert (await wire.answer()).status == 100  # the body is being read
            await wire.send(broken)
            answer = await wire.answer()
            refused(dialect, answer)
            assert "can't be read" in json.loads(answer.body)["error"]["message"]
            assert await wire.reader.read() == b""
        async with Wire.open(it.url) as wire:
            await wire.send(wire.head("POST", dialect.path, auth) + broken)
            refused(dialect, await wire.answer())
    assert (await post(it, dialect, text)).status == 200


@each_dialect
async def test_a_body_that_stops_midway(it: Bench, dialect: Dialect) -> None:
    """It holds up nobody else, leaves nothing behind, and is taken if the rest still comes."""
    text = good(dialect)
    auth = {"Authorization": f"Bearer {it.key}"}
    before = len(await it.exchanges())
    async with Wire.open(it.url) as stalled, Wire.open(it.url) as gone:
        for wire in (stalled, gone):
            await wire.send(wire.head("POST", dialect.path, auth, len(text)) + text[:-5])
        assert (await post(it, dialect, text)).status == 200
        gone.writer.close()
        await stalled.send(text[-5:])
        assert (await stalled.answer()).status == 200
    assert len(await it.exchanges()) == before + 2


async def test_a_body_that_waits_to_be_asked_for(it: Bench) -> None:
    auth = {"Authorization": f"Bearer {it.key}", "Expect": "100-continue"}
    async with Wire.open(it.url) as wire:
        await wire.send(wire.head("POST", CHAT.path, auth, len(good(CHAT))))
        assert (await wire.answer()).status == 100
        await wire.send(good(CHAT))
        assert (await wire.answer()).status == 200
        await wire.send(wire.head("POST", CHAT.path, auth, LIMIT + 1))
        refused(CHAT, await wire.answer(), 413)


# Keys


@each_dialect
async def test_keys_that_open_nothing(it: Bench, dialect: Dialect) -> None:
    ended, ended_key = await it.service.sessions.create({})
    await it.service.sessions.end(ended.session_id)
    keys = ["", "x", it.session_id, ended.session_id, ended_key, it.key[:-1], it.key + "x", it.key.upper(), "sk-polar-"]
    keys += ["\udcff", "' OR 1=1 --", "x" * 7000, "null", "%00"]
    before = len(await it.exchanges())
    for key in keys:
        for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}):
            async with Wire.open(it.url) as wire:
                refused(dialect, await wire.request("POST", dialect.path, headers, good(dialect)), 401)
        if key.isascii() and " " not in key:
            separator = "&" if "?" in dialect.path else "?"
            for path in (f"{dialect.path}{separator}key={key}", f"/s/{key}{dialect.path}"):
                async with Wire.open(it.url) as wire:
                    refused(dialect, await wire.request("POST", path, {}, good(dialect)), 401)
    for headers in (
        {},
        {"Authorization": it.key},
        {"Authorization": f"Basic {it.key}"},
        {"Cookie": f"key={it.key}"},
        {"X-Session": it.session_id},
    ):
        async with Wire.open(it.url) as wire:
            refused(dialect, await wire.request("POST", dialect.path, headers, good(dialect)), 401)
    assert len(await it.exchanges()) == before


@each_dialect
async def test_keys_in_every_place(it: Bench, dialect: Dialect) -> None:
    separator = "&" if "?" in dialect.path else "?"
    for path, headers in [
        (dialect.path, {"Authorization": f"Bearer {it.key}"}),
        (dialect.path, {"authorization": f"bearer   {it.key}  "}),
        (dialect.path, {"X-Api-Key": it.key}),
        (dialect.path, {"x-goog-api-key": it.key}),
        (f"{dialect.path}{separator}key={it.key}", {}),
        (f"/s/{it.key}{dialect.path}", {}),
        (f"/s/{it.key}{dialect.path}", {"Authorization": "Bearer dummy"}),
    ]:
        async with Wire.open(it.url) as wire:
            answer = await wire.request("POST", path, headers, good(dialect))
        assert answer.status == 200, (path, headers, answer)


async def test_a_key_opens_its_own_session_only(it: Bench) -> None:
    other, key = await it.service.sessions.create({})
    await ask(it.url, key)
    (exchange,) = [exchange async for exchange in it.service.store.read_exchanges(other.session_id)]
    assert exchange.session_id == other.session_id


# Routes, methods, paths, headers


@each_dialect
async def test_unknown_routes_and_wrong_methods(it: Bench, dialect: Dialect) -> None:
    auth = {"Authorization": f"Bearer {it.key}"}
    if dialect is ANTHROPIC:
        auth["anthropic-version"] = "2023-06-01"
    prefix = "/v1beta" if dialect is GOOGLE else dialect.path.rsplit("/", 1)[0]
    async with Wire.open(it.url) as wire:
        for path in (f"{prefix}/nonsense/at/all", f"{prefix}/", f"/s/{it.key}{prefix}/nonsense/x"):
            refused(dialect, await wire.request("POST", path, auth, good(dialect)), 404)
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
            answer = await wire.request(method, dialect.path, auth, None)
            if dialect is GOOGLE and method == "GET":
                continue  # a model of that name
            refused(dialect, answer, 405)
        assert (await wire.request("HEAD", dialect.path, auth, None)).status == 405
        assert (await wire.request("POST", dialect.path, auth, good(dialect))).status == 200


async def test_websockets_are_refused_at_once(it: Bench) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for auth in ({}, {"Authorization": f"Bearer {it.key}"}, {"Authorization": "Bearer wrong"}):
        async with Wire.open(it.url) as wire:
            refused(RESPONSES, await wire.request("GET", "/v1/responses", upgrade | auth, None), 426)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(f"{it.url}/v1/responses", headers={"Authorization": f"Bearer {it.key}"})
        assert caught.value.status == 426


PATHS = (
    "/%",
    "/%zz",
    "/%00",
    "/%ff%fe",
    "/v1/%ff",
    "/..",
    "//",
    "///etc/passwd",
    "/../../../etc/passwd",
    "/v1/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/v1/..%2f..%2fetc%2fpasswd",
    "/v1/chat/completions/",
    "/v1//chat/completions",
    "/V1/CHAT/COMPLETIONS",
    "/v1/chat/completions;x=1",
    "/v1/chat/completions%00",
    "/v1/chat/completions%0d%0aX:%201",
    "/v1/chat%2fcompletions/x",
    "/s",
    "/s/",
    "/s//",
    "/s/%2f/v1/x",
    "/s/a/s/b/v1/x",
    "/health",
    "/metrics",
    "/sessions",
    "/policy",
    "/docs",
    "/openapi.json",
    "/?key=%ff",
    "/" + "a" * 60_000,
    "/v1beta/models",
    "http://elsewhere.example/v1/nonsense",
)


async def test_odd_paths(it: Bench) -> None:
    for path in PATHS:
        for method, headers in (("GET", {}), ("POST", {"Authorization": f"Bearer {it.key}"})):
            async with Wire.open(it.url) as wire:
                answer = await wire.request(method, path, headers, b"{}")
            assert 400 <= answer.status < 500, (path, answer)
            assert json.loads(answer.body)["error"], (path, answer)


async def test_odd_models_in_paths(it: Bench) -> None:
    """A model's name is whatever stands there; it comes back as it went in."""
    for name in ("%ff", "a%20b", "%00", "..", "a%2fb", "%F0%9F%99%82", "x" * 5000, "a:b", "%25", "sk-polar-x"):
        answer = await post(it, GOOGLE._replace(path=f"/v1beta/models/{name}:generateContent"), good(GOOGLE))
        assert answer.status == 200, (name, answer)
        async with Wire.open(it.url) as wire:
            shown = await wire.request("GET", f"/v1/models/{name}", {"Authorization": f"Bearer {it.key}"}, None)
        assert shown.status == 200, (name, shown)


BROKEN_HTTP = (
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/messages HTTP/9.9\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nNo colon here\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n Folded: y\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nX-\0: y\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /v1/messages HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"\r\n" * 50 + b"nonsense\r\n\r\n",
)


async def test_what_is_no_http(it: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Refused in the shape of the provider whose path stands in the request line, or OpenAI's where none does. No key
    is logged or repeated, wherever it stood."""
    for data in (*BROKEN_HTTP, f"POST / HTTP/1.1\r\nAuthorization: Bearer {it.key}\0\r\n\r\n".encode()):
        async with Wire.open(it.url) as wire:
            await wire.send(data)
            answer = await wire.answer()
            refused(ANTHROPIC if b" /v1/messages" in data else CHAT, answer)
            assert it.key.encode() not in answer.body
            assert await wire.reader.read() == b""
    assert it.key not in caplog.text
    assert (await post(it, CHAT, good(CHAT))).status == 200


BROKEN_HEADS = (
    (b"HTTP/9.9\r\n\r\n", "Invalid HTTP version"),
    (b"HTTP/1.1\r\n\r\n", "Missing 'Host' header"),
    (b"HTTP/1.1\r\nHost: x\r\nNo colon here\r\n\r\n", "Invalid header token"),
    (b"HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "more than 65536 bytes"),
    (b"HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 1000 + b"\r\n", "Too many headers"),
    (b"HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", "Content-Length"),
)


@each_dialect
@pytest.mark.parametrize("prefix", ["", "/s/sk-polar-x"])
async def test_broken_heads_get_the_providers_error(it: Bench, dialect: Dialect, prefix: str) -> None:
    for rest, reason in BROKEN_HEADS:
        async with Wire.open(it.url) as wire:
            await wire.send(f"POST {prefix}{dialect.path} ".encode() + rest)
            answer = await wire.answer()
        refused(dialect, answer)
        assert reason in json.loads(answer.body)["error"]["message"], answer


def head_with(it: Bench, dialect: Dialect, lines: list[str], length: int) -> bytes:
    own = [f"POST {dialect.path} HTTP/1.1", "Host: x", f"Authorization: Bearer {it.key}", f"Content-Length: {length}"]
    return "\r\n".join([*own, *lines, "", ""]).encode()


@each_dialect
async def test_harmless_headers_given_twice(it: Bench, dialect: Dialect) -> None:
    """As google-genai's clients send `User-Agent`. What they say is merged."""
    lines = ["user-agent: first/1", "Content-Type: application/json", "User-Agent:second/2 ", "content-type: x"]
    text = good(dialect)
    request = head_with(it, dialect, lines, len(text)) + text
    before = len(await it.exchanges())
    async with Wire.open(it.url) as wire:
        for _ in range(2):  # on one connection
            await wire.send(request)
            assert (await wire.answer()).status == 200
        for place in range(0, len(request), 7):  # however the bytes are cut
            await wire.send(request[place : place + 7])
            await asyncio.sleep(0)
        assert (await wire.answer()).status == 200
        await wire.send(wire.head("POST", dialect.path, {"Authorization": f"Bearer {it.key}"}, len(text)) + text)
        assert (await wire.answer()).status == 200
    exchanges = (await it.exchanges())[before:]
    assert [exchange.hints.get("user-agent") for exchange in exchanges] == ["first/1, second/2"] * 3 + [None]


@each_dialect
async def test_a_repeated_header_never_moves_a_request(it: Bench, dialect: Dialect) -> None:
    """Where a head began in the bytes of the request before, its rest is no request of its own; after a body that came
    alone, whole or chunked, the next request may repeat its headers."""
    text = good(dialect)
    agents = ["User-Agent: a", "User-Agent: b"]
    auth = {"Authorization": f"Bearer {it.key}"}
    async with Wire.open(it.url) as wire:
        hidden = f"POST {dialect.path} HTTP/1.1\r\nHost: x\r\nX: "
        await wire.send(wire.head("POST", dialect.path, auth, len(text)) + text + hidden.encode())
        assert (await wire.answer()).status == 200
        smuggled = [f"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer {it.key}", *agents, "", ""]
        await wire.send("\r\n".join(smuggled).encode())
        assert (await wire.answer()).status in (400, 401)
    async with Wire.open(it.url) as wire:
        head = wire.head("POST", dialect.path, auth | {"Transfer-Encoding": "chunked"})
        for first in (head + chunked(text), wire.head("POST", dialect.path, auth, len(text)) + text):
            for place in range(0, len(first), 50):
                await wire.send(first[place : place + 50])
                await asyncio.sleep(0)
            assert (await wire.answer()).status == 200
            await wire.send(head_with(it, dialect, agents, len(text)) + text)
            assert (await wire.answer()).status == 200


@each_dialect
async def test_headers_that_must_stand_once(it: Bench, dialect: Dialect) -> None:
    """Those that say where a request goes and where it ends, alone and beside harmless ones."""
    text = good(dialect)
    before = len(await it.exchanges())
    for lines in (
        ["Host: y"],
        [f"Content-Length: {len(text)}"],
        ["Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        ["User-Agent: a", "User-Agent: b", "Host: y"],
        ["User-Agent: a", "User-Agent: b", f"content-length: {len(text)}"],
        ["User-Agent: a"] * 200,
        ["User-Agent: " + "a" * 40_000] * 2,
    ):
        async with Wire.open(it.url) as wire:
            await wire.send(head_with(it, dialect, lines, len(text)) + text)
            refused(dialect, await wire.answer())
    async with Wire.open(it.url) as wire:  # a head that never ends, line by line
        await wire.send(head_with(it, dialect, [], len(text))[:-2])
        while not wire.reader.at_eof() and wire.reader.exception() is None:
            await wire.send(b"User-Agent: a\r\nX: y\r\n")
            await asyncio.sleep(0)
    assert (await post(it, dialect, text)).status == 200
    assert len(await it.exchanges()) == before + 1


async def test_odd_headers(it: Bench) -> None:
    odd: list[dict[str, str]] = [
        {"User-Agent": "caf\udce9"},
        {"X-Bytes": "\udcff\udcfe\udc80"},
        {"X-Json": json.dumps({"a": "b" * 30_000})},
        {"X-Empty": ""},
        {"Accept": "nonsense"},
        {"Accept-Encoding": "gzip, br, zstd"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Connection": "Upgrade", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"},
        {"X-Forwarded-For": "1.2.3.4", "Forwarded": "for=1.2.3.4"},
        {"X-HTTP-Method-Override": "DELETE"},
        {"Range": "bytes=0-5"},
        {"If-None-Match": "*"},
        {"Cookie": "a=b; c"},
        {"Expect": "nonsense"},
        {"Origin": "http://elsewhere.example"},
    ]
    for headers in odd:
        answer = await post(it, CHAT, good(CHAT), headers)
        assert answer.status == 200, (headers, answer)
    for exchange in await it.exchanges():
        assert "cookie" not in exchange.hints


# Connections


@each_dialect
async def test_a_connection_goes_on_after_errors(it: Bench, dialect: Dialect) -> None:
    """One after the other, and all at once."""
    auth = {"Authorization": f"Bearer {it.key}"}
    text = good(dialect)
    async with Wire.open(it.url) as wire:
        requests = [
            (dialect.path, auth, b"{", 400),
            (dialect.path, {}, text, 401),
            ("/nonsense", auth, text, 404),
            (dialect.path, auth, text, 200),
            (dialect.path, auth | {"Content-Encoding": "gzip"}, text, 400),
            (dialect.path, auth, text, 200),
        ]
        for path, headers, body, status in requests:
            assert (await wire.request("POST", path, headers, body)).status == status
        await wire.send(b"".join(wire.head("POST", p, h, len(b)) + b for p, h, b, _ in requests))
        assert [(await wire.answer()).status for _ in requests] == [status for *_, status in requests]


async def test_clients_that_say_nothing_or_leave_at_once(it: Bench) -> None:
    for data in (b"", b"P", b"POST /v1/messages HTTP/1.1\r\n", b"POST /v1/messages HTTP/1.1\r\nHost: x\r\n"):
        async with Wire.open(it.url) as wire:
            await wire.send(data)
    async with Wire.open(it.url) as wire:
        await wire.send(wire.head("POST", CHAT.path, {"Authorization": f"Bearer {it.key}"}, 5))
        wire.writer.transport.abort()
    assert (await post(it, CHAT, good(CHAT))).status == 200


async def test_a_session_that_ends_while_its_request_is_being_read(it: Bench) -> None:
    """The key was good when the request began, and is not when the call would."""
    session, key = await it.service.sessions.create({})
    async with Wire.open(it.url) as wire:
        await wire.send(wire.head("POST", CHAT.path, {"Authorization": f"Bearer {key}"}, len(good(CHAT))))
        await wire.send(good(CHAT)[:-1])
        await asyncio.sleep(0.05)
        await it.service.sessions.end(session.session_id)
        await wire.send(good(CHAT)[-1:])
        refused(CHAT, await wire.answer(), 401)
    assert [exchange async for exchange in it.service.store.read_exchanges(session.session_id)] == []


async def test_counting_is_no_worse(it: Bench) -> None:
    count = ANTHROPIC._replace(path="/v1/messages/count_tokens")
    for body in (b"", b"{", b"[]", b"\xff", b'{"model":5}', b'{"model":"m"}', b'{"model":"m","messages":{}}'):
        refused(ANTHROPIC, await post(it, count, body))
        refused(GOOGLE, await post(it, GOOGLE._replace(path="/v1beta/models/m:countTokens"), body))
    for dialect in (count, GOOGLE._replace(path="/v1beta/models/m:countTokens")):
        refused(dialect, await post(it, dialect, b"{}", key="wrong"), 401)
    assert COMPLETIONS in DIALECTS
