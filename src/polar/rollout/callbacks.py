"""Finished tasks, posted to the address that each of them names until somebody there acknowledges it.

At least once: a receiver tells a repetition by its `Idempotency-Key`. Which tasks still have to be told is in the
queue, so a restart begins where the last server stopped. An address is taken from whoever submits a task, and so is
asked for nothing but what the operator allows: hosts by name, no redirects, no proxies, no token of ours.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Protocol
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import aiohttp
from yarl import URL

from polar.backoff import delays, jittered
from polar.config import ServerSettings
from polar.errors import StoreError
from polar.gateway.http import is_loopback
from polar.rollout.events import Events
from polar.rollout.pages import Pages
from polar.rollout.records import TaskRow
from polar.rollout.rows import callback_url_of

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Posts to one host at the same time: one that hangs keeps nobody waiting but its own."""
_FIRST, _LONGEST, _REFUSED = 1.0, 300.0, 60.0
"""Seconds before the next try: at first, at most, and at least where the receiver knows of no such task."""
_REFUSALS = frozenset((404, 410, 422))
_ANSWER = 60.0  # seconds that a receiver may take to say anything
_READ = 500  # tasks at once


class Waiting(Protocol):
    """What is asked of the rollout server."""

    @property
    def events(self) -> Events: ...

    async def task(self, run: str, task_id: str) -> TaskRow | None: ...

    async def callbacks_waiting(self, limit: int, after: int = 0) -> list[TaskRow]: ...

    async def callback_done(self, run: str, task_id: str, *, acknowledged: bool = True) -> None: ...


class Allowed:
    """The addresses that may be posted to."""

    def __init__(self, settings: ServerSettings) -> None:
        self._hosts = {host.lower() for host in settings.callback_hosts}
        self._loopback = not settings.callback_hosts and is_loopback(settings.host)

    def problem(self, url: str) -> str | None:
        """Why not this one."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
            same = URL(url)  # what is checked must be what is connected to
            connected = (same.host or "").lower(), same.explicit_port
        except ValueError:
            return f"callback_url is no address: {url!r}"
        if parts.scheme not in ("http", "https") or not host or not url.isprintable():
            return "callback_url must begin with http:// or https:// and name a host"
        if "@" in parts.netloc or "\\" in url:
            return "callback_url must not hold a name or a password"
        if connected != (host, port):
            return "callback_url can't be read in one way only"
        default = 443 if parts.scheme == "https" else 80
        bracketed = f"[{host}]" if ":" in host else host
        if self._loopback and is_loopback(host):
            return None
        if not self._hosts.isdisjoint({host, bracketed, f"{bracketed}:{port or default}"}):
            return None
        return f"callback_url names the host {host}, which is not allowed: set [server] callback_hosts"


class Callbacks:
    """Use as an async context manager."""

    def __init__(self, rollout: Waiting, pages: Pages, settings: ServerSettings) -> None:
        self.allowed = Allowed(settings)
        self._rollout = rollout
        self._pages = pages
        self._patience = settings.callback_hours * 3600
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by host, while it is called
        self._telling: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None]
        self._http: aiohttp.ClientSession
        self.given_up: Callable[[], None] = lambda: None  # is told of each that nobody acknowledged

    async def __aenter__(self) -> "Callbacks":
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_ANSWER),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [self._watching, *self._telling.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()

    async def over(self) -> None:
        """Until it has ended before its time."""
        await asyncio.wait({self._watching})
        if not self._watching.cancelled() and (error := self._watching.exception()) is not None:
            log.error("Callbacks are not sent any more", exc_info=error)

    def pending(self) -> int:
        """Tasks whose callbacks nobody has acknowledged yet."""
        return len(self._telling)

    async def _watch(self) -> None:
        """All that waits now; then whatever ends. Where this listened too slowly, it looks through everything again."""
        while not self._rollout.events.closed:
            ended = self._rollout.events.subscribe()
            await self._begin_all()
            async for event in ended:
                if event.kind == "task.ended" and event.run is not None and event.fields["callback"]:
                    self._begin(event.run, event.fields["task_id"])
                if event.kind == "task.redirected" and event.run is not None:
                    self._begin_anew(event.run, event.fields["task_id"])

    async def _begin_all(self) -> None:
        after = 0
        pauses = delays(_FIRST, _LONGEST)
        while True:
            try:
                rows = await self._rollout.callbacks_waiting(_READ, after)
            except StoreError as error:
                log.warning("Callbacks wait for the store: %s", error)
                await asyncio.sleep(next(pauses))
                continue
            if not rows:
                return
            for row in rows:
                self._begin(row.run, row.task_id)
            after = rows[-1].cursor or 0

    def _begin(self, run: str, task_id: str) -> None:
        key = run, task_id
        if key not in self._telling:
            self._telling[key] = telling = asyncio.create_task(self._tell(run, task_id))
            telling.add_done_callback(lambda _: self._forget(key, telling))

    def _forget(self, key: tuple[str, str], telling: "asyncio.Task[None]") -> None:
        if self._telling.get(key) is telling:  # and not one that was begun anew
            del self._telling[key]

    def _begin_anew(self, run: str, task_id: str) -> None:
        """At the address that the task names now, without waiting for the next try at the old one."""
        telling = self._telling.pop((run, task_id), None)
        if telling is not None:
            telling.cancel()
        self._begin(run, task_id)

    async def _tell(self, run: str, task_id: str) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + self._patience
        pauses = delays(_FIRST, _LONGEST)
        for attempt in count(1):
            try:
                task = await self._rollout.task(run, task_id)
                if task is None or task.callback != "waiting" or task.state == "running":  # it may be run again
                    return
                problem, slowly = await self._post(task, attempt)
                if problem is None:
                    await self._rollout.callback_done(run, task_id)
                    return
                if now() >= deadline:
                    log.error("Nobody acknowledged the end of task %s; it is told no more: %s", task_id, problem)
                    self._rollout.events.publish("callback.failed", run=run, task_id=task_id, error=problem)
                    await self._rollout.callback_done(run, task_id, acknowledged=False)
                    self.given_up()
                    return
                log.info("The end of task %s is told again later: %s", task_id, problem)
            except StoreError as error:
                log.warning("The end of task %s is told when the store is back: %s", task_id, error)
                slowly = False
            pause = next(pauses)
            await asyncio.sleep(min(max(pause, jittered(_REFUSED)) if slowly else pause, self._patience))

    async def _post(self, task: TaskRow, attempt: int) -> tuple[str | None, bool]:
        """What went wrong, and whether it is of little use to ask again soon."""
        url = callback_url_of(task.request) or ""
        problem = self.allowed.problem(url)  # the settings may be others than when it was submitted
        if problem is not None:
            return problem, True
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": key_of(task),
            "X-Polar-Attempt": str(attempt),
        }
        shown = urlsplit(url)._replace(query="", fragment="").geturl()  # a secret of the receiver's may stand there
        async with self._turns.setdefault(urlsplit(url).netloc, asyncio.Semaphore(AT_ONCE)):
            try:
                async with self._http.post(
                    url, data=self._pages.status(task, results=True), headers=headers, allow_redirects=False
                ) as response:
                    status = response.status
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
                return f"{shown} can't be reached: {why}", False
        return (None if 200 <= status < 300 else f"{shown} answered {status}"), status in _REFUSALS


def key_of(task: TaskRow) -> str:
    """The same whenever this task's end is told."""
    return hashlib.blake2b(f"{task.run}\0{task.task_id}\0{task.cursor}".encode(), digest_size=16).hexdigest()
