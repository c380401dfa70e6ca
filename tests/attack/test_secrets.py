"""Keys and tokens: who gets in where, and that no secret is written down or told anybody."""

import logging
import re
from pathlib import Path

import aiohttp
import pytest

from polar.config import Settings
from polar.errors import ConfigError
from polar.service import Service
from tests.attack.parts import CHAT, DIALECTS, Bench, ByteEngine, Wire, ask, bench
from tests.attack.replies import encode, response, whole
from tests.integration.stack import settings

TOKEN = "admin-token-5e1f"
ENGINE_KEY = "engine-key-77aa"


async def calls_with_the_key_everywhere(it: Bench) -> list[bytes]:
    """Good calls and bad ones, with the key in every place where a client might put it; all that was answered."""
    answers = []
    body = encode(CHAT.body)
    slots: list[tuple[str, dict[str, str]]] = [
        (CHAT.path, {"Authorization": f"Bearer {it.key}"}),
        (CHAT.path, {"x-api-key": it.key}),
        (CHAT.path, {"x-goog-api-key": it.key}),
        (f"{CHAT.path}?key={it.key}", {}),
        (f"/s/{it.key}{CHAT.path}", {}),
        (f"/s/{it.key}/s/{it.key}{CHAT.path}", {}),
        (f"/v1/s/{it.key}/chat/completions", {}),
        (f"/{it.key}", {}),
        (f"/v1/models/{it.key}", {}),
        (CHAT.path, {"Authorization": f"Bearer {it.key}", "Referer": f"http://x/s/{it.key}/v1", "X-Key": it.key}),
        (CHAT.path, {"Authorization": f"Bearer {it.key}", "Cookie": f"k={it.key}", "Proxy-Authorization": it.key}),
        (CHAT.path, {"Authorization": f"Bearer {it.key}", "api-key": it.key, "X-Forwarded-Authorization": it.key}),
    ]
    for path, headers in slots:
        for method, sent in (("POST", body), ("POST", b"{"), ("DELETE", b""), ("GET", b"")):
            async with Wire.open(it.url) as wire:
                answer = await wire.request(method, path, headers, sent)
            assert answer.status < 500
            answers.append(answer.body + str(answer.headers).encode())
    for broken in (f"GET /s/{it.key}/\x7f HTTP/1.1", f"GET / HTTP/1.1\r\nAuthorization: Bearer {it.key}\x01"):
        async with Wire.open(it.url) as wire:
            await wire.send(broken.encode() + b"\r\n\r\n")
            await wire.answer()
    return answers


async def test_keys_are_written_down_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with bench(tmp_path, control=True, engine={"api_key": ENGINE_KEY}, server={"token": TOKEN}) as it:
        it.engine.replay(response(whole()))
        answers = await calls_with_the_key_everywhere(it)
        it.engine.replay(response(b'{"error":{"message":"no"}}', "500 No"))
        answers.append((await it.ask()).body)
        await it.engine.stop()
        answers.append((await it.ask()).body)
        assert len(await it.exchanges()) > 6
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
            for path in ("/health", "/metrics", "/sessions", "/policy", f"/sessions/{it.session_id}"):
                async with http.get(it.service.control_url + path) as shown:
                    assert shown.status == 200
                    answers.append(await shown.read())
            async with http.get(f"{it.service.control_url}/sessions/{it.session_id}/exchanges") as shown:
                answers.append(await shown.read())
        key = it.key.encode()
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]  # noqa: ASYNC240
    assert files
    for secret in (key, TOKEN.encode(), ENGINE_KEY.encode()):
        assert not [place for place in (*answers, *files) if secret in place]
        assert secret.decode() not in caplog.text


async def test_the_key_is_not_the_session_id_nor_told_again(tmp_path: Path) -> None:
    async with bench(tmp_path, control=True) as it, aiohttp.ClientSession() as http:
        keys = set()
        for _ in range(20):
            async with http.post(f"{it.service.control_url}/sessions", json={}) as made:
                answer = await made.json()
            assert answer["session_id"] not in answer["api_key"]
            keys.add(answer["api_key"])
            async with http.get(f"{it.service.control_url}/sessions/{answer['session_id']}") as shown:
                assert answer["api_key"] not in await shown.text()
        assert len(keys) == 20


PAGES = ("/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect")


async def control_routes(it: Bench) -> list[tuple[str, str]]:
    """Each with an id that nothing has."""
    async with aiohttp.ClientSession() as http, http.get(f"{it.service.control_url}/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    return [(method.upper(), re.sub(r"\{\w+\}", "x", path)) for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org", "127.0.0.1.example.org"])
@pytest.mark.parametrize("token", [None, ""])
async def test_the_control_plane_is_open_on_loopback_only(tmp_path: Path, host: str, token: str | None) -> None:
    config = Settings.model_validate({"gateway": {"port": 0}, "server": {"host": host, "port": 0, "token": token}})
    with pytest.raises(ConfigError, match="token"):
        async with Service(config, tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_an_empty_token_is_none(tmp_path: Path) -> None:
    async with bench(tmp_path, control=True, server={"token": ""}) as it, aiohttp.ClientSession() as http:
        async with http.get(f"{it.service.control_url}/policy") as answer:
            assert answer.status == 200
        async with http.get(f"{it.service.control_url}/docs") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
async def test_both_planes_listen_where_they_say(tmp_path: Path, host: str) -> None:
    async with ByteEngine() as engine:
        sections: dict[str, dict[str, object]] = {
            "engine": {"kind": "vllm"},
            "server": {"host": host, "port": 0},
            "gateway": {"host": host, "port": 0},
        }
        async with Service(settings([engine.url], **sections), tmp_path) as service, aiohttp.ClientSession() as http:
            async with http.get(f"{service.control_url}/health") as answer:
                assert answer.status == 200
            async with http.get(f"{service.gateway_url}/v1/models") as answer:
                assert answer.status == 401


async def test_each_plane_has_its_own_routes_only(tmp_path: Path) -> None:
    async with (
        bench(tmp_path, control=True) as it,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {it.key}"}) as http,
    ):
        it.engine.replay(response(whole()))
        for method, path in (*await control_routes(it), *(("GET", page) for page in PAGES)):
            async with http.request(method, it.url + path, json={}) as answer:
                assert answer.status == 404, path
            async with http.request(method, f"{it.url}/s/{it.key}{path}", json={}) as answer:
                assert answer.status == 404, path
        for dialect in DIALECTS:
            async with http.post(it.service.control_url + dialect.path, json=dialect.body) as answer:
                assert answer.status == 404
        async with http.get(f"{it.service.control_url}/v1/models") as answer:
            assert answer.status == 404
        assert await it.exchanges() == []


async def test_bad_input_to_the_control_plane(tmp_path: Path) -> None:
    """Operators get a clear refusal, too, and nothing they send breaks calls."""
    async with bench(tmp_path, control=True) as it, aiohttp.ClientSession() as http:
        it.engine.replay(response(whole()))
        end = f"/sessions/{it.session_id}/end"
        cases: list[tuple[str, bytes]] = [
            ("/sessions", b"{"),
            ("/sessions", b"[]"),
            ("/sessions", b'{"metadata":5}'),
            ("/sessions", b'{"run":5}'),
            ("/sessions", b'{"run":"\\ud800"}'),
            ("/sessions", b'{"metadata":"\xff"}'),
            ("/sessions", b'{"metadata":' + b"[" * 50_000),
            ("/policy", b"{}"),
            ("/policy", b'{"version":-1}'),
            ("/policy", b'{"version":1.5}'),
            ("/policy", b'{"version":"x"}'),
            ("/policy", b'{"version":NaN}'),
            ("/policy", b'{"version":"\\ud800"}'),
            ("/policy", b'{"version":%d}' % 2**63),
            ("/policy", b'{"version":1,"replica":"http://elsewhere"}'),
            ("/policy/pause", b'{"mode":"nonsense"}'),
            ("/policy/pause", b'{"timeout":-1}'),
            (end, b'{"reward":NaN}'),
            (end, b'{"reward":Infinity}'),
            (end, b'{"reward":1e999}'),
            (end, b'{"reward":"x"}'),
            ("/sessions/nonsense/end", b"{}"),
        ]
        for path, body in cases:
            headers = {"Content-Type": "application/json"}
            async with http.post(it.service.control_url + path, data=body, headers=headers) as answer:
                assert 400 <= answer.status < 500, (path, body, answer.status, await answer.text())
                assert (await answer.json())["detail"]
        for path in ("/sessions?limit=0", "/sessions?limit=x", "/sessions?before=nonsense", "/sessions/nonsense"):
            async with http.get(it.service.control_url + path) as answer:
                assert 400 <= answer.status < 500, (path, answer.status, await answer.text())
        for metadata in (b'{"a":"\\ud800"}', b'{"a":%d}' % 10**400, b'{"a":NaN}', b'{"a":"\\u0000"}'):
            headers = {"Content-Type": "application/json"}
            body = b'{"metadata":' + metadata + b"}"
            async with http.post(f"{it.service.control_url}/sessions", data=body, headers=headers) as answer:
                assert answer.status in (200, 400, 422), (metadata, answer.status, await answer.text())
        async with http.get(f"{it.service.control_url}/sessions") as answer:
            assert answer.status == 200
            await answer.read()
        assert (await ask(it.url, it.key)).status == 200
        (exchange,) = await it.exchanges()
        assert exchange.untrainable is None
