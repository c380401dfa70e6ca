"""A trainer's bridge, written against the fields of the task API alone: it submits, polls and listens; it knows nothing
else of the service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.records.result import TaskResult, TaskStatus
from polar.service import Service
from tests.integration.agents import command
from tests.integration.stack import settings

TOKEN = "an-admin-token"


class Bridge:
    """What slime's and Miles' bridges do."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http
        self.called_back: dict[str, dict[str, Any]] = {}
        self.callback_url = ""

    async def submit(self, task: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(f"{self._url}/rollout/task/submit", json=task) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer

    async def get(self, path: str) -> Any:
        async with self._http.get(self._url + path) as response:
            response.raise_for_status()
            return await response.json()

    async def cancel(self, task_id: str) -> None:
        async with self._http.delete(f"{self._url}/rollout/task/{task_id}") as response:
            response.raise_for_status()

    async def finished(self, task_id: str) -> dict[str, Any]:
        async with asyncio.timeout(120):
            while True:
                status: dict[str, Any] = await self.get(f"/rollout/task/{task_id}")
                if status["status"] != "running":
                    return status
                await asyncio.sleep(0.05)

    async def callback(self, request: web.Request) -> web.Response:
        told = await request.json()
        self.called_back[told["task_id"]] = told
        return web.Response()


@asynccontextmanager
async def bridge(data: Path, **play: Any) -> AsyncIterator[Bridge]:
    sections: dict[str, Any] = {"server": {"port": 0, "token": TOKEN}, "node": {"run_workers": 4}}
    async with (
        ScriptedServer(Play([ScriptedTurn(text="all done", **play)])) as engine,
        Service(settings([engine.url], **sections), data, node=True) as service,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
    ):
        made = Bridge(service.control_url, http)
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/callback", made.callback)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.callback_url = f"http://127.0.0.1:{runner.addresses[0][1]}/callback"
        try:
            yield made
        finally:
            await runner.cleanup()


def task(task_id: str, code: str = "print(ask())", **fields: Any) -> dict[str, Any]:
    return {
        "task_id": task_id,
        "instruction": "do it",
        "num_samples": 2,
        "timeout_seconds": 600,
        "runtime": {"backend": "local", "prepare": [{"type": "exec", "command": "true"}], "env": {}},
        "agent": {"harness": "shell", "model_name": "m", "custom_shell": {"command": command(code)}},
        "builder": {"strategy": "prefix_merging", "config": {}},
        "evaluator": {"strategy": "session_completed", "config": {}},
        "metadata": {"index": 7},
        **fields,
    }


def is_sample(trace: dict[str, Any]) -> bool:
    """What a trainer makes of a trace: tokens, mask and log-probabilities that fit together."""
    length = len(trace["response_ids"])
    assert length > 0
    assert trace["prompt_ids"]
    assert len(trace["loss_mask"]) == length
    assert set(trace["loss_mask"]) <= {0, 1}
    assert len(trace["response_logprobs"]) == length
    assert trace["response_messages"][-1]["role"] == "assistant"
    return sum(trace["loss_mask"]) > 0


async def test_a_bridge_submits_polls_and_is_called_back(tmp_path: Path) -> None:
    async with bridge(tmp_path) as it:
        assert await it.get("/health")
        answer = await it.submit(task("group-1", callback_url=it.callback_url))
        assert answer == {"task_id": "group-1", "status": "running"}
        status = await it.finished("group-1")
        (node,) = await it.get("/nodes")
        checked = TaskStatus.model_validate(status)
        assert (checked.status, checked.total_sessions, checked.completed_sessions) == ("completed", 2, 2)
        for result in status["results"]:
            assert result["task_id"] == "group-1"
            assert (result["status"], result["reward"], result["error"]) == ("COMPLETED", 1.0, None)
            assert result["node_id"] == node["node_id"]
            assert result["metadata"]["index"] == 7
            assert result["timing"]["run_ms"] > 0
            assert result["trajectory"]["status"] == "COMPLETED"
            assert [is_sample(trace) for trace in result["trajectory"]["traces"]] == [True]
        async with asyncio.timeout(120):
            while "group-1" not in it.called_back:  # noqa: ASYNC110 (it comes over HTTP)
                await asyncio.sleep(0.05)
        TaskResult.model_validate(it.called_back["group-1"])
        assert it.called_back["group-1"]["results"] == status["results"]
        assert await it.get("/rollout/status")


async def test_what_fails_is_told_and_what_is_cancelled_ends(tmp_path: Path) -> None:
    async with bridge(tmp_path) as it:
        await it.submit(task("slow", "ask(); time.sleep(600)", num_samples=3))
        await it.submit(task("late", "ask(); time.sleep(600)", timeout_seconds=0.5, on_timeout="mask", num_samples=1))
        late = await it.finished("late")
        assert (late["status"], [result["status"] for result in late["results"]]) == ("failed", ["TIMEOUT"])
        assert late["results"][0]["reward"] is None
        await it.cancel("slow")
        slow = await it.finished("slow")
        assert [result["status"] for result in slow["results"]] == ["ERROR"] * 3
        assert {result["reason"] for result in slow["results"]} == {"cancelled"}
