"""A rollout server, its nodes, an engine without a model, and a trainer that reads all the while.

`check` is what all of these tests are about: of each sample that was submitted there is one result, and no more.
"""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from polar.client.async_client import AsyncClient
from polar.engines.scripted import ScriptedServer
from polar.engines.scripted.server import TOKENIZER_FOLDER
from polar.records.result import NumberedResult
from tests.fault.service.processes import Node, Server

PATIENCE = 120.0
ASK = (
    """curl -fs "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" """
    """-H 'Content-Type: application/json' -d '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'"""
)
"""An agent that asks the model once."""


def task(name: str, command: str = ASK, **fields: Any) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": "do it",
        "runtime": {"backend": "local"},
        "agent": {"harness": "shell", "custom_shell": {"command": command}},
        "evaluator": {"strategy": "session_completed"},
        **fields,
    }


def until_there(mark: Path | str) -> str:
    """A command that waits for a file; not for ever, lest it outlives a test that fails."""
    return f"i=0; until [ -e {mark} ] || [ $i -gt 1200 ]; do sleep 0.1; i=$((i+1)); done"


def quick(name: str, samples: int = 1, **fields: Any) -> dict[str, Any]:
    """A task that takes hardly any time, and calls the model."""
    return task(name, num_samples=samples, **fields)


class Reader:
    """A trainer that follows the feed from beginning to end, whatever happens to the server."""

    def __init__(self, client: AsyncClient, after: "Reader | None" = None) -> None:
        """`after`: goes on where that one stopped."""
        self.got: list[NumberedResult] = [] if after is None else after.got
        self._came = asyncio.Condition()
        self._task = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        cursor = self.got[-1].cursor if self.got else None
        async for result in client.results(cursor, consumer="trainer", limit=7, wait=1):
            async with self._came:
                self.got.append(result)
                self._came.notify_all()

    async def until(self, true: Callable[[], bool], seconds: float = PATIENCE) -> None:
        async def wait() -> None:
            async with self._came:
                await self._came.wait_for(true)

        waiting = asyncio.create_task(wait())
        done, _ = await asyncio.wait({waiting, self._task}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task in done:
            self._task.result()  # it failed
        assert waiting in done, f"{len(self.got)} results after {seconds:g} s"

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class Cluster:
    """Use as an async context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        store: str | None = None,
        server_store: str | None = None,
        data: Path | None = None,
        lease_seconds: float = 6,
        beat_seconds: float = 0.5,
        **environment: str,
    ) -> None:
        """`store`: the URL of a database that nodes share; else each has its own. `server_store`: another way to it, of
        the server alone. `data`: the server's folder."""
        self.folder = folder
        self._data = data
        self._own = {"POLAR_SERVER__LEASE_SECONDS": str(lease_seconds), "POLAR_SERVER__BEAT_SECONDS": str(beat_seconds)}
        self._environment = {
            "POLAR_ENGINE__KIND": "vllm",
            "POLAR_ENGINE__TOKENIZER": str(TOKENIZER_FOLDER),
            **environment,
        }
        if store is not None:
            self._environment["POLAR_STORE__URL"] = store
        if server_store is not None:
            self._own["POLAR_STORE__URL"] = server_store
        self._stack = contextlib.AsyncExitStack()
        self.engine = ScriptedServer()
        self.server: Server
        self.client: AsyncClient
        self.reader: Reader
        self.expected: Counter[tuple[str, int]] = Counter()

    async def __aenter__(self) -> "Cluster":
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.engine)
            self._environment["POLAR_ENGINE__URLS"] = json.dumps([self.engine.url])
            self.server = self.new_server("server", self._data)
            stack.push_async_callback(self.server.close)
            await self.server.start()
            self.client = await stack.enter_async_context(AsyncClient(self.server.url, patience=PATIENCE))
            self.reader = Reader(self.client)
            stack.push_async_callback(self.reader.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for log in sorted(self.folder.glob("*/log")):
                print(f"--- {log.parent.name}\n{log.read_text()[-6000:]}")
        await self._stack.aclose()

    def new_server(self, name: str, data: Path | None = None) -> Server:
        """Another one, or the same again; to be started and closed by whoever made it."""
        return Server(self.folder / name, self._environment | self._own, data)

    async def node(
        self,
        name: str,
        *,
        url: str | None = None,
        data: Path | None = None,
        **settings: object,
    ) -> Node:
        """Starts one; `settings` are those of [node]."""
        variables = dict(self._environment)
        for key, value in ({"runtimes": ["local"]} | settings).items():
            variables[f"POLAR_NODE__{key.upper()}"] = json.dumps(value)
        node = Node(self.folder / name, url or self.server.url, variables, data)
        self._stack.push_async_callback(node.close)
        await node.start()
        return node

    async def submit(self, *tasks: dict[str, Any]) -> None:
        for one in tasks:
            for sample in range(one.get("num_samples", 1)):
                self.expected[one["task_id"], sample] = 1
        await self.client.submit(tasks)

    async def seen(self, name: str) -> dict[str, Any] | None:
        """A node, as the server knows it."""
        return next((node for node in await self.client.nodes() if node["name"] == name), None)

    async def until(self, true: Callable[["Cluster"], Any], seconds: float = PATIENCE) -> Any:
        """Asks until the (awaited) answer is true, and gives it."""
        async with asyncio.timeout(seconds):
            while not (answer := await true(self)):  # noqa: ASYNC110 (what is asked has no event)
                await asyncio.sleep(0.02)
        return answer

    async def joined(self, *names: str) -> None:
        async def all_there(_: Cluster) -> bool:
            return {node["name"] for node in await self.client.nodes()} >= set(names)

        await self.until(all_there)

    async def in_stage(self, name: str, stage: str, sessions: int = 1) -> dict[str, Any]:
        """Waits until a node has so many there."""

        async def there(_: Cluster) -> dict[str, Any] | None:
            node = await self.seen(name)
            return node if node is not None and node["load"].get(stage, 0) >= sessions else None

        found: dict[str, Any] = await self.until(there)
        return found

    # What all of it is about

    async def check(self, seconds: float = PATIENCE, *, usable: bool = True) -> dict[tuple[str, int], NumberedResult]:
        """Waits for all results. Of each sample there is one: as it was read all the while, and as it is read now."""
        await self.reader.until(lambda: len(self.reader.got) >= len(self.expected), seconds)
        await self.until(_nothing_left, seconds)
        again = [result async for result in self.client.results(after=0, follow=False)]
        assert Counter((result.task_id, result.sample) for result in again) == self.expected
        got = self.reader.got
        assert [(one.cursor, one.session_id) for one in got] == [(one.cursor, one.session_id) for one in again]
        sessions = [result.session_id for result in got]
        assert len(set(sessions)) == len(sessions)
        status = await self.client.status()
        counts = {
            key: sum(run[key] for run in status["runs"].values()) for key in ("queued", "leased", "waiting", "done")
        }
        assert counts == {"queued": 0, "leased": 0, "waiting": 0, "done": len(self.expected)}
        for result in got:
            if usable:
                assert result.reason is None, (result.reason, result.error)
                assert result.trajectory is not None
                assert result.trajectory.traces
        return {(result.task_id, result.sample): result for result in got}


async def _nothing_left(cluster: Cluster) -> bool:
    runs = (await cluster.client.status())["runs"].values()
    return not any(run[state] for run in runs for state in ("queued", "leased", "waiting"))


@contextlib.asynccontextmanager
async def load(cluster: Cluster, each: float = 0.05, **fields: Any) -> AsyncIterator[None]:
    """Submits task after task meanwhile."""
    over = asyncio.Event()

    async def go_on() -> None:
        number = 0
        while not over.is_set():
            await cluster.submit(quick(f"load-{number}", 1 + number % 3, **fields))
            number += 1
            await asyncio.sleep(each)

    loading = asyncio.create_task(go_on())
    try:
        yield
    except BaseException:
        loading.cancel()
        raise
    over.set()
    await loading
