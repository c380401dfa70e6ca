"""Who gets in where at the control plane, and that nothing that is sent there breaks it."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.routing import BaseRoute, Route
from yarl import URL

from polar.rollout.routes import bodies
from tests.unit.rollout.listening import listening
from tests.unit.rollout.served import Served, beating, served, task

TOKEN = "admin-token-5e1f"
NODE_TOKEN = "node-token-77aa"
OPEN = {("GET", "/health")}
OF_NODES = {
    ("POST", "/nodes/join"),
    ("POST", "/nodes/{node_id}/lease"),
    ("POST", "/nodes/{node_id}/beat"),
    ("POST", "/nodes/{node_id}/finish"),
    ("POST", "/nodes/{node_id}/leave"),
    ("PUT", "/nodes/{node_id}/sessions"),
}


def routes(it: Served) -> set[tuple[str, str]]:
    return {(method, route.path) for route in flat(it.app.routes) for method in (route.methods or set()) - {"HEAD"}}


def flat(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from flat(included.routes)
        else:
            assert isinstance(route, Route)  # nothing else is mounted
            yield route


def path_of(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "x", path)


async def tried(it: Served, method: str, path: str, headers: dict[str, str]) -> int:
    answer = await it.http.request(method, path_of(path), headers=headers, json={})
    return answer.status_code


async def test_every_route_needs_its_token(tmp_path: Path) -> None:
    async with served(tmp_path, token=TOKEN, node_token=NODE_TOKEN) as it:
        _, key = await it.sessions.create({})
        nobody: list[dict[str, str]] = [
            {},
            {"Authorization": TOKEN},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer "},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Bearer {TOKEN[:-1]}"},
            {"Authorization": f"Bearer {NODE_TOKEN[:-1]}"},
            {"Authorization": f"Bearer {key}"},  # a session's key opens nothing here
            {"x-api-key": key},
            {"x-api-key": TOKEN},
            {"Cookie": f"token={TOKEN}"},
        ]
        node = {"Authorization": f"Bearer {NODE_TOKEN}"}
        known = routes(it)
        assert known >= OPEN | OF_NODES
        for method, path in known - OPEN:
            for headers in nobody:
                assert await tried(it, method, path, headers) == 401, (method, path, headers)
            expected_out = (method, path) not in OF_NODES
            assert (await tried(it, method, path, node) == 401) == expected_out, (method, path)
        for _, path in OPEN:
            assert await tried(it, "GET", path, {}) == 200
        for page in ("/docs", "/redoc", "/docs/oauth2-redirect", "/openapi.json"):
            assert await tried(it, "GET", page, {}) in (401, 404), page
        admin = {"Authorization": f"bearer  {TOKEN}"}
        for method, path in known:
            if path not in ("/events", "/policy/pause", "/policy/resume"):
                assert await tried(it, method, path, admin) not in (401, 500), (method, path)


async def test_the_admin_token_opens_nodes_routes_where_they_have_none_of_their_own(tmp_path: Path) -> None:
    async with served(tmp_path, token=TOKEN) as it:
        for method, path in OF_NODES:
            assert await tried(it, method, path, {"Authorization": f"Bearer {TOKEN}"}) != 401
            assert await tried(it, method, path, {"Authorization": "Bearer "}) == 401
            assert await tried(it, method, path, {"Authorization": "Bearer None"}) == 401


async def test_without_a_token_no_page_of_a_browser_gets_in(tmp_path: Path) -> None:
    """A page may have its own name lead to loopback, or send what a browser sends without asking."""
    async with served(tmp_path) as it:
        for host in ("127.0.0.1", "127.0.0.1:8080", "localhost:8080", "[::1]:8080", "LOCALHOST"):
            assert (await it.http.get("/nodes", headers={"Host": host})).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080", "", "[", "10.0.0.1"):
            for method, path in routes(it) - OPEN - {(method, path) for method, path in routes(it) if is_page(path)}:
                assert await tried(it, method, path, {"Host": host}) == 403, (host, method, path)
        for origin in ("http://evil.example", "null", "file://", "http://["):
            assert (await it.http.post("/policy/resume", headers={"Origin": origin})).status_code == 403, origin
        assert (await it.http.get("/nodes", headers={"Origin": "http://localhost:3000"})).status_code == 200
    async with served(tmp_path, token=TOKEN) as it:
        named = {"Host": "polar.example", "Origin": "http://x.example", "Authorization": f"Bearer {TOKEN}"}
        assert (await it.http.get("/nodes", headers=named)).status_code == 200


def is_page(path: str) -> bool:
    return path.startswith(("/docs", "/redoc", "/openapi.json"))


JSON = {"Content-Type": "application/json"}
DEEP = b"[" * 50_000
BODIES: list[bytes] = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"null",
    b'"\\ud800"',
    b"\xff\xfe",
    b'{"a":NaN}',
    b'{"a":1e999}',
    DEEP,
    b'{"a":' + DEEP,
    b'{"tasks":' + DEEP,
]


async def test_what_is_no_json_is_refused_everywhere(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        sent = [(method, path) for method, path in routes(it) if method in ("POST", "PUT") and "/policy/" not in path]
        for method, path in sent:
            for body in BODIES:
                answer = await it.http.request(method, path_of(path), content=body, headers=JSON)
                assert answer.status_code < 500, (method, path, body[:20], answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["detail"]
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "nonsense"):
                answer = await it.http.request(method, path_of(path), content=b"{}", headers={"Content-Type": kind})
                assert answer.status_code < 500, (method, path, kind, answer.text)


def nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


BAD_TASKS: dict[str, dict[str, Any]] = {
    "no samples": {"num_samples": 0},
    "many samples": {"num_samples": 10**30},
    "priority": {"dispatch_priority": 2**70},
    "deep": {"metadata": {"a": nested(500)}},
    "a name that can't be written": {"task_id": "a\u0000b"},
    "no name": {"task_id": ""},
    "a long name": {"task_id": "x" * 201},
    "a run that can't be written": {"run": "a\nb"},
    "an empty run": {"run": ""},
    "unknown": {"nonsense": 1},
    "enough": {"early_stop_min_usable_sessions": 10**30},
    "version": {"oldest_version": -1},
    "seconds": {"timeout_seconds": -1},
    "callback elsewhere": {"callback_url": "http://example.org/x"},
}


@pytest.mark.parametrize("name", BAD_TASKS)
async def test_bad_tasks(tmp_path: Path, name: str) -> None:
    async with served(tmp_path) as it:
        bad = task() | BAD_TASKS[name]
        answer = await it.http.post("/rollout/task/submit", json=bad)
        assert answer.status_code == 422, answer.text
        assert answer.json()["detail"]
        many = await it.http.post("/rollout/tasks", json={"tasks": [bad, task("fine")]})
        assert [one.get("code") for one in many.json()["tasks"]] == [422, None]


ODD_NAMES = ["%00", "%ff", "%ed%a0%80", "..", "%2e%2e%2f", "x" * 5000, "%0a", "a%20b", "%F0%9F%98%80", "'; DROP"]


async def test_names_that_nothing_has(tmp_path: Path) -> None:
    async with served(tmp_path) as it, listening(it.app) as url, aiohttp.ClientSession() as http:
        for name in ODD_NAMES:
            for method, path in (
                ("GET", "/rollout/task/{}"),
                ("DELETE", "/rollout/task/{}"),
                ("GET", "/rollout/task/{}/trajectory"),
                ("GET", "/sessions/{}"),
                ("POST", "/sessions/{}/end"),
                ("GET", "/sessions/{}/trajectory"),
                ("GET", "/rollout/task/x?run={}"),
                ("GET", "/sessions?before={}"),
                ("POST", "/nodes/{}/drain"),
                ("POST", "/nodes/{}/leave"),
                ("PUT", "/runs/{}"),
                ("GET", "/rollout/results?run={}&consumer={}&after=1"),
                ("GET", "/policy?run={}"),
                ("DELETE", "/engines?url={}"),
            ):
                address = url + path.replace("{}", name)
                async with http.request(
                    method, URL(address, encoded=True), json={} if method != "GET" else None
                ) as answer:
                    assert answer.status < 500, (method, address, await answer.text())


async def test_bounds_of_the_feed(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        for query in (
            "limit=0",
            "limit=100000",
            "limit=x",
            f"after={2**63}",
            "after=-1",
            "wait=61",
            "wait=nan",
            "wait=inf",
            "wait=-1",
            "unit=x",
            "builder=%00",
            "run=",
            "consumer=",
            f"consumer={'x' * 300}",
        ):
            answer = await it.http.get(f"/rollout/results?{query}")
            assert answer.status_code == 422, query
            assert answer.json()["detail"]


async def test_bodies_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 10_000)
    monkeypatch.setattr(bodies, "MAX_SESSION_COPY_BYTES", 20_000)

    async def chunked(size: int) -> Any:
        for _ in range(size // 1000):
            yield b" " * 1000

    async with served(tmp_path) as it, listening(it.app) as url, aiohttp.ClientSession() as http:
        for method, path, limit in (
            ("POST", "/rollout/task/submit", 10_000),
            ("POST", "/rollout/tasks", 10_000),
            ("POST", "/nodes/join", 10_000),
            ("PUT", "/nodes/x/sessions", 20_000),
        ):
            async with http.request(method, url + path, data=b" " * (limit + 1), headers=JSON) as answer:
                assert answer.status == 413, path
                assert str(limit) in (await answer.json())["detail"]
            async with http.request(method, url + path, data=chunked(limit + 1000), headers=JSON) as answer:
                assert answer.status == 413, path
            async with http.request(method, url + path, data=b" " * limit, headers=JSON) as answer:
                assert answer.status in (400, 410), path


async def test_what_nodes_send_is_checked(tmp_path: Path) -> None:
    joining = {"node_id": "n", "name": "n", "backends": ["local"], "slots": 1, "store": "s"}
    ended = {"work_id": 1, "fence": 1, "session_id": "s"}
    async with served(tmp_path) as it, beating(it, "n"):
        bad: list[tuple[str, Any]] = [
            ("/nodes/join", joining | {"slots": "many"}),
            ("/nodes/join", joining | {"slots": 2**80}),
            ("/nodes/join", joining | {"node_id": "a\u0000"}),
            ("/nodes/join", {}),
            ("/nodes/n/lease", {"holding": [{"work_id": 2**64, "fence": 1}], "room": 1}),
            ("/nodes/n/lease", {"holding": [], "room": -(2**70)}),
            ("/nodes/n/lease", {"holding": 5, "room": 1}),
            ("/nodes/n/finish", [ended | {"work_id": 2**63}]),
            ("/nodes/n/finish", [ended | {"session_id": "a\u0000"}]),
            ("/nodes/n/finish", [ended | {"tokens": 2**90}]),
            ("/nodes/n/finish", [ended | {"detail": 7}]),
            ("/nodes/n/beat", {"holding": None}),
        ]
        for path, body in bad:
            answer = await it.http.post(path, content=json.dumps(body).encode(), headers=JSON)
            assert answer.status_code == 422, (path, body, answer.text)
        lost = await it.http.post("/nodes/n/finish", json=[ended])
        assert lost.json() == ["lost"]
        for path in ("/nodes/other/lease", "/nodes/other/beat"):
            body = {"holding": [], "room": 1} if path.endswith("lease") else {"holding": []}
            assert (await it.http.post(path, json=body)).status_code == 410
        garbage = await it.http.put("/nodes/n/sessions", content=b"\x00garbage")
        assert 400 <= garbage.status_code < 500, garbage.text


async def test_the_document_describes_every_route(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        document = (await it.http.get("/openapi.json")).json()
        described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        own = {route for route in routes(it) if not is_page(route[1])}
        assert described == {(method, path.replace(":path", "")) for method, path in own}
        text = json.dumps(document)
        for name in set(re.findall(r"#/components/schemas/([\w.\-\[\]]+)", text)):
            assert name in document["components"]["schemas"], name
        for path, methods in document["paths"].items():
            for method, told in methods.items():
                assert {"200"} <= told["responses"].keys(), (method, path)
                assert path == "/health" or "401" in told["responses"]


async def test_a_result_is_never_told_to_be_something_else(tmp_path: Path) -> None:
    """What an agent says can't get out of its place in the JSON that is put together here."""
    async with served(tmp_path) as it:
        await it.submit(task('a"],"cursor":9}'))
        await it.run_all(reason='x"},{', reward=None, error="]}\u2028\u0000")
        for path in ("/rollout/results", "/rollout/results?unit=group"):
            msgspec.json.decode((await it.http.get(path)).content)
        page = (await it.http.get("/rollout/results")).json()
        assert (page["results"][0]["task_id"], page["results"][0]["reason"]) == ('a"],"cursor":9}', 'x"},{')
