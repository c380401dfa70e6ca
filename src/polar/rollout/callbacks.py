"""Callbacks: posts each finished task to its callback URL until the receiver acknowledges it.

Delivery is at least once: a receiver recognizes a repetition by its `Idempotency-Key`. The queue remembers which tasks
are not acknowledged, so a restart resumes where the last server stopped. Whoever submits a task chooses the URL, so the
operator restricts the hosts by name, and requests follow no redirects, use no proxies and carry no token of ours.
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

from polar.backoff import add_jitter, backoff_delays
from polar.config import ServerSettings
from polar.errors import StoreError
from polar.gateway.http import is_loopback
from polar.rollout.events import EventBus
from polar.rollout.queue.records import TaskRow, parse_callback_url
from polar.rollout.result_pages import ResultPages

log = logging.getLogger(__name__)

MAX_POSTS_PER_HOST = 4
"""Concurrent posts to one host, so that a host that hangs delays only its own callbacks."""
_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS, _REFUSED_RETRY_SECONDS = 1.0, 300.0, 60.0
"""Delays before a retry: the first, the largest, and the smallest one after a status in _REFUSAL_STATUSES."""
_REFUSAL_STATUSES = frozenset((404, 410, 422))
_RESPONSE_SECONDS = 60.0  # for a receiver to answer
_TASKS_PER_READ = 500


class CallbackSource(Protocol):
    """What callbacks need of the rollout service."""

    @property
    def events(self) -> EventBus: ...

    async def get_task(self, run: str, task_id: str) -> TaskRow | None: ...

    async def list_tasks_awaiting_callback(self, limit: int, after: int = 0) -> list[TaskRow]: ...

    async def finish_callback(self, run: str, task_id: str, *, acknowledged: bool = True) -> None: ...


class AllowedHosts:
    """The hosts that callbacks may be posted to."""

    def __init__(self, settings: ServerSettings) -> None:
        self._hosts = {host.lower() for host in settings.callback_hosts}
        self._loopback = not settings.callback_hosts and is_loopback(settings.host)

    def find_problem(self, url: str) -> str | None:
        """Why this URL is not allowed; None where it is."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
            parsed = URL(url)  # what is checked must be what is connected to
            parsed_address = (parsed.host or "").lower(), parsed.explicit_port
        except ValueError:
            return f"callback_url {url!r} is not a URL"
        if parts.scheme not in ("http", "https") or not host or not url.isprintable():
            return f"callback_url {url!r} must begin with http:// or https:// and name a host"
        if "@" in parts.netloc or "\\" in url:
            return "callback_url must not contain a user name or password"
        if parsed_address != (host, port):
            return f"callback_url {url!r} is ambiguous: parsers disagree about its host"
        default = 443 if parts.scheme == "https" else 80
        bracketed = f"[{host}]" if ":" in host else host
        if self._loopback and is_loopback(host):
            return None
        if not self._hosts.isdisjoint({host, bracketed, f"{bracketed}:{port or default}"}):
            return None
        return f"callback_url names the host {host}, which is not allowed: set [server] callback_hosts"


class Callbacks:
    """Use as an async context manager."""

    def __init__(self, rollout: CallbackSource, pages: ResultPages, settings: ServerSettings) -> None:
        self.allowed_hosts = AllowedHosts(settings)
        self._rollout = rollout
        self._pages = pages
        self._patience = settings.callback_hours * 3600
        self._host_limits: WeakValueDictionary[str, asyncio.Semaphore] = (
            WeakValueDictionary()
        )  # by host, while it is called
        self._deliveries: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None]
        self._http: aiohttp.ClientSession
        self.on_given_up: Callable[[], None] = lambda: None  # called for each callback that is given up

    async def __aenter__(self) -> "Callbacks":
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_RESPONSE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [self._watching, *self._deliveries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()

    async def wait_until_failed(self) -> None:
        """Returns when delivery has failed; runs until then."""
        await asyncio.wait({self._watching})
        if not self._watching.cancelled() and (error := self._watching.exception()) is not None:
            log.error("Callbacks are not sent any more", exc_info=error)

    def count_pending(self) -> int:
        """Tasks whose callbacks are not acknowledged yet."""
        return len(self._deliveries)

    async def _watch(self) -> None:
        """Delivers pending callbacks, then those of tasks as they end. Starts over where events were missed."""
        while not self._rollout.events.closed:
            ended = self._rollout.events.subscribe()
            await self._start_pending()
            async for event in ended:
                if event.kind == "task.ended" and event.run is not None and event.fields["callback"]:
                    self._start_delivery(event.run, event.fields["task_id"])
                if event.kind == "task.redirected" and event.run is not None:
                    self._restart_delivery(event.run, event.fields["task_id"])

    async def _start_pending(self) -> None:
        after = 0
        pauses = backoff_delays(_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS)
        while True:
            try:
                rows = await self._rollout.list_tasks_awaiting_callback(_TASKS_PER_READ, after)
            except StoreError as error:
                log.warning("Callbacks wait for the store: %s", error)
                await asyncio.sleep(next(pauses))
                continue
            if not rows:
                return
            for row in rows:
                self._start_delivery(row.run, row.task_id)
            after = rows[-1].cursor or 0

    def _start_delivery(self, run: str, task_id: str) -> None:
        key = run, task_id
        if key not in self._deliveries:
            self._deliveries[key] = delivery = asyncio.create_task(self._deliver(run, task_id))
            delivery.add_done_callback(lambda _: self._forget(key, delivery))

    def _forget(self, key: tuple[str, str], delivery: "asyncio.Task[None]") -> None:
        if self._deliveries.get(key) is delivery:  # not a restarted one
            del self._deliveries[key]

    def _restart_delivery(self, run: str, task_id: str) -> None:
        """Delivers to the task's new URL at once."""
        delivery = self._deliveries.pop((run, task_id), None)
        if delivery is not None:
            delivery.cancel()
        self._start_delivery(run, task_id)

    async def _deliver(self, run: str, task_id: str) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + self._patience
        pauses = backoff_delays(_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS)
        for attempt in count(1):
            try:
                task = await self._rollout.get_task(run, task_id)
                if task is None or task.callback != "waiting" or task.state == "running":  # it may be run again
                    return
                problem, retry_slowly = await self._post(task, attempt)
                if problem is None:
                    await self._rollout.finish_callback(run, task_id)
                    return
                if now() >= deadline:
                    log.error("The callback of task %s is given up: %s", task_id, problem)
                    self._rollout.events.publish("callback.failed", run=run, task_id=task_id, error=problem)
                    await self._rollout.finish_callback(run, task_id, acknowledged=False)
                    self.on_given_up()
                    return
                log.info("The callback of task %s is retried later: %s", task_id, problem)
            except StoreError as error:
                log.warning("The callback of task %s waits for the store: %s", task_id, error)
                retry_slowly = False
            pause = next(pauses)
            await asyncio.sleep(
                min(max(pause, add_jitter(_REFUSED_RETRY_SECONDS)) if retry_slowly else pause, self._patience)
            )

    async def _post(self, task: TaskRow, attempt: int) -> tuple[str | None, bool]:
        """The problem, if any, and whether to retry slowly."""
        url = parse_callback_url(task.request) or ""
        problem = self.allowed_hosts.find_problem(url)  # settings may have changed since the task was submitted
        if problem is not None:
            return problem, True
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": make_idempotency_key(task),
            "X-Polar-Attempt": str(attempt),
        }
        public_url = (
            urlsplit(url)._replace(query="", fragment="").geturl()
        )  # a secret of the receiver's may stand there
        async with self._host_limits.setdefault(urlsplit(url).netloc, asyncio.Semaphore(MAX_POSTS_PER_HOST)):
            try:
                async with self._http.post(
                    url, data=self._pages.stream_status(task, results=True), headers=headers, allow_redirects=False
                ) as response:
                    status = response.status
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = (isinstance(error, OSError) and error.strerror) or type(error).__name__
                return f"{public_url} can't be reached: {why}", False
        return (None if 200 <= status < 300 else f"{public_url} answered {status}"), status in _REFUSAL_STATUSES


def make_idempotency_key(task: TaskRow) -> str:
    """The same key for every delivery of this task's end."""
    return hashlib.blake2b(f"{task.run}\0{task.task_id}\0{task.cursor}".encode(), digest_size=16).hexdigest()
