"""A small control plane: the documented surface over a dictionary, with every misbehaviour of networks and servers."""

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from aiohttp import web

Fault = Literal["drop", "lose", "truncate", "cut"] | int | web.Response | None


class Plane:
    """`faults` befall the next requests, one each; `seen` are all that came, as (method, path, query, body)."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.tasks: dict[str, dict[str, Any]] = {}
        self.sessions: list[dict[str, Any]] = []  # ended ones; the place is the cursor, counted from 1
        self.consumers: dict[str, int] = {}
        self.room = 10**6  # tasks that may be taken
        self.refuses: dict[str, tuple[int, str]] = {}  # by task
        self.faults: deque[Fault] = deque()
        self.answers: dict[str, Any] = {}  # by path, of what is only looked up
        self.events: list[bytes] = []
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        self.listened: list[str | None] = []
        self.port = 0
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "Plane":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def end(self, task_id: str, sample: int = 0, **fields: Any) -> None:
        """A session has ended."""
        cursor = len(self.sessions) + 1
        result: dict[str, Any] = {"session_id": f"s{cursor}", "task_id": task_id, "status": "COMPLETED", "reward": 1.0}
        result["trajectory"] = {"status": "COMPLETED"}
        self.sessions.append({**result, "cursor": cursor, "sample": sample, **fields})
        self._changed.set()

    def asked(self, path: str) -> list[tuple[str, str, dict[str, str], Any]]:
        return [one for one in self.seen if one[1] == path]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        text = await request.read()
        body = json.loads(text) if text else None
        self.seen.append((request.method, request.raw_path.partition("?")[0], dict(request.query), body))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"detail": "This needs the admin token: Authorization: Bearer ..."}, status=401)
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            return web.Response(status=fault)
        if isinstance(fault, web.Response):
            return fault
        if fault == "drop":  # before anything is done
            return _hang_up(request)
        if request.path == "/events":
            return await self._events(request)
        answer = await self._act(request, body)
        if fault == "lose":  # it is done, and nobody hears of it
            return _hang_up(request)
        if fault == "truncate":
            return await _half(request, answer)
        if fault == "cut":  # half of it, as if it were all
            return web.Response(body=answer.body[: len(answer.body) // 2], content_type="application/json")
        return answer

    async def _act(self, request: web.Request, body: Any) -> web.Response:
        path = request.path
        if path == "/rollout/tasks":
            return web.json_response({"tasks": [self._submit(task) for task in body["tasks"]]})
        if path == "/rollout/results":
            return await self._results(request.query)
        if path in self.answers:
            return web.json_response(self.answers[path])
        if path.startswith("/rollout/task/") and (task_id := path.split("/")[3]) in self.tasks:
            return self._task(request, task_id)
        return web.json_response({"detail": f"There is no {path}."}, status=404)

    def _submit(self, task: dict[str, Any]) -> dict[str, Any]:
        task_id = task["task_id"]
        if task_id in self.refuses:
            code, error = self.refuses[task_id]
            return {"task_id": task_id, "error": error, "code": code}
        if task_id not in self.tasks:
            if not self.room:
                return {"task_id": task_id, "error": "the queue is full", "code": 429, "retry_after": 0.01}
            self.room -= 1
            self.tasks[task_id] = task
        if self.tasks[task_id] != task:
            return {"task_id": task_id, "error": "it has other content", "code": 409}
        return {"task_id": task_id, "status": "running"}

    def _task(self, request: web.Request, task_id: str) -> web.Response:
        if request.method == "DELETE":
            return web.json_response({"task_id": task_id, "status": "failed", "cancelled_sessions": 1})
        ended = [one for one in self.sessions if one["task_id"] == task_id]
        total = self.tasks[task_id].get("num_samples", 1)
        status = {
            "task_id": task_id,
            "status": "completed" if len(ended) >= total else "running",
            "total_sessions": total,
            "completed_sessions": len(ended),
            "results": ended if len(ended) >= total and request.query.get("results") != "false" else [],
        }
        return web.json_response(status)

    async def _results(self, query: Any) -> web.Response:
        consumer = query.get("consumer")
        if "after" in query:
            after = int(query["after"])
            if consumer:
                self.consumers[consumer] = after
        else:
            after = self.consumers.get(consumer, 0) if consumer else 0
        found = self._after(query, after)
        if not found and float(query["wait"]):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), float(query["wait"]))
            found = self._after(query, after)
        return web.json_response({"results": found, "cursor": found[-1]["cursor"] if found else after})

    def _after(self, query: Any, after: int) -> list[dict[str, Any]]:
        found = self.sessions[after:]
        if query["unit"] == "group":
            found = [
                {"status": "completed", "asked": 1, "usable": 1, "cancelled": 0, "results": [one]}
                | {name: one[name] for name in ("task_id", "cursor")}
                for one in found
            ]
        return found[: int(query["limit"])]

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Those behind the one that was heard last, and then the stream ends."""
        last = request.headers.get("Last-Event-ID")
        self.listened.append(last)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": keep-alive\n\n")
        for number, data in enumerate(self.events, 1):
            if number > int(last or 0):
                await response.write(b"id: %d\nevent: task.ended\ndata: %s\n\n" % (number, data))
                break
        return response


class Serving:
    """A plane in a thread of its own: for tests whose thread has no loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.plane = self.run(_plane)

    def run(self, what: Callable[..., Any], *arguments: Any) -> Any:
        async def called() -> Any:
            result = what(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(10)

    def close(self) -> None:
        self.run(self.plane.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _plane() -> Plane:
    plane = Plane()
    await plane.start()
    return plane


def _hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _half(request: web.Request, answer: web.Response) -> web.StreamResponse:
    assert isinstance(answer.body, bytes)
    response = web.StreamResponse(headers={"Content-Length": str(len(answer.body)), "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(answer.body[: len(answer.body) // 2])
    assert request.transport is not None
    request.transport.close()
    return response
