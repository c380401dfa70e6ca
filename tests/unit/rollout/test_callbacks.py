"""Callbacks: every finished task is told until somebody acknowledges it, and only where the operator allows it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polar.config import ServerSettings
from polar.records.result import TaskResult
from polar.rollout import callbacks
from polar.rollout.callbacks import AllowedHosts
from tests.conditions import wait_until
from tests.unit.rollout.served import Served, served, task

Told = tuple[str, dict[str, str], dict[str, Any]]


class Receiver:
    """Answers as `says` has it, by path and attempt; 200 where it says nothing."""

    def __init__(self, says: Callable[[str, int], Awaitable[int | str]] | None = None) -> None:
        self.says = says
        self.told: list[Told] = []
        self.came = asyncio.Condition()
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.told.append((request.path, dict(request.headers), await request.json()))
        async with self.came:
            self.came.notify_all()
        attempt = sum(path == request.path for path, _, _ in self.told)
        status = await self.says(request.path, attempt) if self.says else 200
        if isinstance(status, str):
            raise web.HTTPTemporaryRedirect(status)
        return web.Response(status=status)

    async def got(self, count: int, path: str | None = None) -> list[Told]:
        def enough() -> bool:
            return len(self._of(path)) >= count

        async with asyncio.timeout(120), self.came:
            await self.came.wait_for(enough)
        return self._of(path)

    def _of(self, path: str | None) -> list[Told]:
        return [told for told in self.told if path is None or told[0] == path]


@asynccontextmanager
async def receiving(says: Callable[[str, int], Awaitable[int | str]] | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver(says)
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert runner.addresses
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "_FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(callbacks, "_MAX_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(callbacks, "_REFUSED_RETRY_SECONDS", 0.05)


async def settled(it: Served) -> None:
    async with asyncio.timeout(120):
        while await it.rollout.list_tasks_awaiting_callback(1):  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.01)


async def test_a_finished_task_is_posted_whole(tmp_path: Path) -> None:
    async with receiving() as receiver, served(tmp_path) as it:
        await it.submit(task("a/b", num_samples=2, callback_url=f"{receiver.url}/done?x=1"), task("quiet"))
        ids = await it.run_all()
        ((path, headers, body),) = await receiver.got(1)
        result = TaskResult.model_validate(body)
        assert (path, result.task_id, result.status) == ("/done", "a/b", "completed")
        assert sorted(one.session_id for one in result.results) == sorted(ids)[:2]
        assert headers["X-Polar-Attempt"] == "1"
        assert headers["Idempotency-Key"]
        assert "Authorization" not in headers
        await settled(it)
    assert len(receiver.told) == 1


async def test_hosts_that_were_told_are_forgotten(tmp_path: Path) -> None:
    async with receiving() as one, receiving() as other, served(tmp_path) as it:
        await it.submit(task("a", callback_url=one.url), task("b", callback_url=other.url))
        await it.run_all()
        await settled(it)
        await wait_until(lambda: not it.callbacks.count_pending())
        assert len(it.callbacks._host_limits) == 0


async def test_it_is_told_again_until_it_is_acknowledged(tmp_path: Path) -> None:
    answers = [500, 404, 302, 422, 503, 204]

    async def says(_: str, attempt: int) -> int:
        return answers[attempt - 1]

    async with receiving(says) as receiver, served(tmp_path) as it:
        await it.submit(task(callback_url=receiver.url))
        await it.run_all()
        told = await receiver.got(len(answers))
        await settled(it)
    assert len({headers["Idempotency-Key"] for _, headers, _ in told}) == 1
    assert [headers["X-Polar-Attempt"] for _, headers, _ in told] == ["1", "2", "3", "4", "5", "6"]
    assert len(receiver.told) == len(answers)


async def test_it_outlives_a_restart(tmp_path: Path) -> None:
    async with receiving() as receiver:
        receiver.says = _always(500)
        async with served(tmp_path) as it:
            await it.submit(task(callback_url=receiver.url))
            await it.run_all()
            ((_, first, _), *_) = await receiver.got(1)
        receiver.says = None
        before = len(receiver.told)
        async with served(tmp_path) as it:
            *_, (_, last, body) = await receiver.got(before + 1)
            await settled(it)
        assert last["Idempotency-Key"] == first["Idempotency-Key"]
        assert body["status"] == "completed"
        async with served(tmp_path) as it:
            await asyncio.sleep(0.05)
        assert len(receiver.told) == before + 1


def _always(status: int) -> Callable[[str, int], Awaitable[int]]:
    async def says(_: str, __: int) -> int:
        return status

    return says


async def test_a_host_that_hangs_holds_no_other_up(tmp_path: Path) -> None:
    released = asyncio.Event()

    async def hangs(_: str, __: int) -> int:
        await released.wait()
        return 200

    async with receiving(hangs) as stuck, receiving() as quick, served(tmp_path) as it:
        tasks = [task(f"s{number}", callback_url=stuck.url) for number in range(20)]
        await it.submit(*tasks, *(task(f"q{number}", callback_url=quick.url) for number in range(5)))
        await it.run_all()
        await quick.got(5)
        assert len(stuck.told) <= callbacks.MAX_POSTS_PER_HOST
        released.set()
        await stuck.got(20)
        await settled(it)


async def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    async def says(path: str, attempt: int) -> int | str:
        return "/elsewhere" if attempt == 1 else 200

    async with receiving(says) as receiver, served(tmp_path) as it:
        await it.submit(task(callback_url=f"{receiver.url}/here"))
        await it.run_all()
        await receiver.got(2, "/here")
        await settled(it)
    assert [path for path, _, _ in receiver.told] == ["/here", "/here"]


async def test_it_is_given_up_after_a_long_time_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving(_always(410)) as receiver, served(tmp_path, callback_hours=0.1 / 3600) as it:
        listener = it.rollout.events.subscribe()
        await it.submit(task(callback_url=receiver.url))
        await it.run_all()
        async with asyncio.timeout(120):
            async for event in listener:
                if event.kind == "callback.failed":
                    break
        assert event.fields["task_id"] == "t"
        assert "410" in event.fields["error"]
        await settled(it)
        row = await it.rollout.get_task("default", "t")
        assert row is not None
        assert row.callback == "given_up"
    assert "" in caplog.text


async def test_a_host_that_is_allowed_no_more_is_not_asked(tmp_path: Path) -> None:
    async with receiving(_always(500)) as receiver:
        async with served(tmp_path) as it:
            await it.submit(task(callback_url=receiver.url))
            await it.run_all()
            await receiver.got(1)
        before = len(receiver.told)
        async with served(tmp_path, callback_hosts=["example.org"]) as it:
            await asyncio.sleep(0.2)
            assert await it.rollout.list_tasks_awaiting_callback(1)
        assert len(receiver.told) == before


@pytest.mark.parametrize(
    ("settings", "url", "fine"),
    [
        ({}, "http://127.0.0.1:9/x", True),
        ({}, "http://localhost/x", True),
        ({}, "http://[::1]:9/x", True),
        ({}, "https://127.0.0.1/", True),
        ({}, "http://127.0.0.1.example.org/", False),
        ({}, "http://example.org/", False),
        ({}, "http://169.254.169.254/latest", False),
        ({}, "http://0.0.0.0/", False),
        ({}, "http://2130706433/", False),
        ({}, "http://127.1/", False),
        ({}, "http://example.org@127.0.0.1/", False),
        ({}, "http://user:password@127.0.0.1/", False),
        ({}, "http://127.0.0.1\\@example.org/", False),
        ({}, "http://127.0.0.1#@example.org/", True),
        ({}, "http://127.0.0.1\n.example.org/", False),
        ({}, "http://127.0.0.1:99999/", False),
        ({}, "http://127.0.0.1:x/", False),
        ({}, "http://", False),
        ({}, "", False),
        ({}, "file:///etc/passwd", False),
        ({}, "ftp://127.0.0.1/", False),
        ({}, "//127.0.0.1/", False),
        ({"host": "0.0.0.0", "token": "t"}, "http://127.0.0.1:9/x", False),
        ({"callback_hosts": ["example.org"]}, "http://127.0.0.1:9/x", False),
        ({"callback_hosts": ["example.org"]}, "http://example.org:1234/x", True),
        ({"callback_hosts": ["Example.org"]}, "https://EXAMPLE.ORG/x", True),
        ({"callback_hosts": ["example.org:443"]}, "https://example.org/x", True),
        ({"callback_hosts": ["example.org:443"]}, "http://example.org/x", False),
        ({"callback_hosts": ["example.org:8000"]}, "http://example.org:8000/x", True),
        ({"callback_hosts": ["example.org:8000"]}, "http://example.org/x", False),
        ({"callback_hosts": ["example.org"]}, "http://a.example.org/x", False),
        ({"callback_hosts": ["[fd00::1]:80"]}, "http://[fd00::1]/x", True),
        ({"host": "0.0.0.0", "token": "t", "callback_hosts": ["127.0.0.1"]}, "http://127.0.0.1/", True),
    ],
)
def test_which_addresses_are_allowed(settings: dict[str, Any], url: str, fine: bool) -> None:
    problem = AllowedHosts(ServerSettings.model_validate(settings)).find_problem(url)
    assert (problem is None) == fine, problem


async def test_an_address_that_is_not_allowed_is_refused_at_once(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        answer = await it.http.post("/rollout/task/submit", json=task(callback_url="http://example.org/x"))
        assert answer.status_code == 422
        assert "[server] callback_hosts" in answer.json()["detail"]
        assert it.rollout.count_sessions()["default"]["tasks"] == 0
