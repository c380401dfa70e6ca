"""What the control plane answers, read with the models of NVIDIA's Polar; and what its bridges send."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

from polar import plugins
from polar.errors import ConfigError
from polar.records.task import NVIDIA, POLAR, TaskRequest
from polar.rollout import models
from tests import nvidia
from tests.unit.rollout.listening import listening
from tests.unit.rollout.served import NODE, Served, served, task

STAGES = {"queued": 0.25, "init": 0.5, "ready": 3.0, "run": 2.0, "waiting": 1.0, "postrun": 0.125}


async def read(it: Served, task_id: str = "t") -> nvidia.TaskStatus:
    answer = await it.http.get(f"/rollout/task/{task_id}")
    assert answer.status_code == 200, answer.text
    models.TaskStatus.model_validate(answer.json())  # a trainer's machine may have either package
    return nvidia.TaskStatus.model_validate(answer.json())


async def test_a_completed_task(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2, metadata={"group_id": 3, "policy_version": 5}))
        await it.run_all(turns=2, seconds=STAGES)
        status = await read(it)
        assert (status.status, status.total_sessions, status.completed_sessions) == ("completed", 2, 2)
        assert status.result_paths == []
        for result in status.results:
            assert (result.status, result.error) == ("COMPLETED", None)
            assert (result.trajectory.status, result.trajectory.error) == ("COMPLETED", None)
            assert result.timing.model_dump() == {
                "register_to_init_queue_ms": 250.0,
                "init_ms": 500.0,
                "run_ms": 2000.0,
                "postrun_ms": 125.0,
            }
            assert result.metadata["timing"]["stages"] == STAGES
            (trace,) = result.trajectory.traces
            assert trace.prompt_ids
            assert any(trace.loss_mask)
            assert trace.response_logprobs is not None
            assert trace.reward == 1.0
            assert trace.response_messages[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("reason", "status"), [("timeout", "TIMEOUT"), ("sandbox_gone", "ERROR"), ("cancelled", "ERROR")]
)
async def test_a_session_without_a_reward(tmp_path: Path, reason: str, status: str) -> None:
    async with served(tmp_path) as it:
        await it.submit(task())
        await it.run_all(reward=None, reason=reason, error="in words")
        (result,) = (await read(it)).results
        assert (result.status, result.error) == (status, "in words")
        assert (result.trajectory.status, result.trajectory.error) == (status, "in words")
        assert [trace.reward for trace in result.trajectory.traces] == [None]


async def test_sessions_that_never_began_have_an_empty_trajectory(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=2))
        answer = await it.http.delete("/rollout/task/t")
        for status in (nvidia.TaskStatus.model_validate(answer.json()), await read(it)):
            assert (status.total_sessions, status.completed_sessions) == (2, 2)
            for result in status.results:
                assert (result.status, result.trajectory.status, result.trajectory.traces) == ("ERROR", "ERROR", [])
                assert result.error == result.trajectory.error == "cancelled"


async def test_a_session_without_calls_is_complete_and_empty(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task())
        await it.run_all(turns=0, reward=0.0)
        (result,) = (await read(it)).results
        assert (result.status, result.error, result.trajectory.traces) == ("COMPLETED", None, [])


async def test_a_running_task_has_the_results_that_there_are(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task(num_samples=3))
        assert (await read(it)).results == []
        await it.join()
        first, second, _ = await it.work()
        await it.run(second)
        status = await read(it)
        assert (status.status, status.completed_sessions, len(status.results)) == ("running", 1, 1)
        await it.run(first)
        results = (await read(it)).results
        assert [result.metadata["sample"] for result in results] == [0, 1]  # a bridge goes by their order
        answer = nvidia.TaskStatus.model_validate((await it.http.delete("/rollout/task/t")).json())
        assert (answer.status, answer.completed_sessions, len(answer.results)) == ("running", 2, 2)


async def test_a_prompt_that_is_no_chat_has_lists_of_messages(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task())
        await it.run_all(dialect="openai_completions")
        (result,) = (await read(it)).results
        (trace,) = result.trajectory.traces
        assert trace.prompt_messages == []


NULLS: dict[str, Any] = {
    "runtime": None,
    "builder": None,
    "evaluator": None,
    "callback_url": None,
    "metadata": None,
    "num_samples": None,
    "timeout_seconds": None,
    "dispatch_priority": None,
    "early_stop_min_usable_sessions": None,
}


def test_null_is_the_default_of_every_optional_field() -> None:
    bare = models.TaskRequest(task_id="t", instruction="x")
    assert models.TaskRequest.model_validate({"task_id": "t", "instruction": "x", **NULLS}) == bare
    filled = models.TaskRequest.model_validate(
        {
            "task_id": "t",
            "instruction": "x",
            "runtime": {
                **{"backend": None, "image": None, "prepare": None, "eval_prepare": None, "env": None, "network": None},
                **{"workdir": None, "cpus": None, "memory_mb": None, "gpus": None, "allow_internet": None},
            },
            "agent": {"harness": "shell", "settings": None, "env": None, "mcp_servers": None, "skills_path": None},
            "builder": {"strategy": None, "config": None},
        }
    )
    assert filled == bare
    assert filled.runtime.workdir == "/workspace"
    step = {"type": "exec", "command": "true", "cwd": None, "env": None}
    (prepared,) = models.RuntimeRequest.model_validate({"prepare": [step]}).prepare
    assert isinstance(prepared, models.Exec)
    assert prepared.env == {}


def test_null_is_no_value_of_a_required_field() -> None:
    with pytest.raises(ValueError, match="instruction"):
        models.TaskRequest.model_validate({"task_id": "t", "instruction": None})
    assert (
        models.RuntimeRequest.model_validate({"processes": None}).processes is None
    )  # no limit, where null has a meaning


@pytest.mark.parametrize("priority", [-1, 101])
async def test_a_priority_is_0_to_100(tmp_path: Path, priority: int) -> None:
    async with served(tmp_path) as it:
        answer = await it.http.post("/rollout/task/submit", json=task(dispatch_priority=priority))
        assert answer.status_code == 422
        assert (await it.http.post("/rollout/task/submit", json=task(dispatch_priority=100))).status_code == 200


# The same task again


async def submit(it: Served, **fields: Any) -> int:
    return (await it.http.post("/rollout/task/submit", json=task(**fields))).status_code


async def test_an_ended_task_is_run_again(tmp_path: Path) -> None:
    async with served(tmp_path, compat="nvidia") as it:
        assert await submit(it, num_samples=2) == 200
        await it.run_all(reward=0.0)
        assert it.rollout.count_sessions()["default"] == {
            "tasks": 1,
            "queued": 0,
            "leased": 0,
            "waiting": 0,
            "done": 2,
            "usable": 2,
        }
        assert await submit(it, num_samples=3) == 200  # other content does not matter, either
        status = await read(it)
        assert (status.status, status.total_sessions, status.results) == ("running", 3, [])
        assert it.rollout.count_sessions()["default"] == {
            "tasks": 1,
            "queued": 3,
            "leased": 0,
            "waiting": 0,
            "done": 0,
            "usable": 0,
        }
        for lease in await it.work():
            await it.run(lease, name="again")
        status = await read(it)
        assert [result.trajectory.traces[0].reward for result in status.results] == [1.0] * 3


async def test_an_ended_task_that_is_there_twice_is_run_again_once(tmp_path: Path) -> None:
    async with served(tmp_path, compat="nvidia") as it:
        await it.submit(task())
        await it.run_all()
        answer = await it.http.post("/rollout/tasks", json={"tasks": [task(), task(), task(num_samples=2)]})
        assert [one.get("code", one.get("status")) for one in answer.json()["tasks"]] == ["running", "running", 409]
        assert it.rollout.count_sessions()["default"]["queued"] == 1


async def test_a_running_task_is_neither_run_twice_nor_changed(tmp_path: Path) -> None:
    async with served(tmp_path, compat="nvidia") as it:
        assert await submit(it) == 200
        assert await submit(it) == 200
        assert await submit(it, num_samples=2) == 409
        assert it.rollout.count_sessions()["default"]["queued"] == 1


async def test_by_default_an_ended_task_is_the_same_task(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task())
        await it.run_all()
        assert await submit(it) == 200
        assert (await read(it)).status == "completed"
        assert await submit(it, num_samples=2) == 409


@pytest.mark.parametrize("ended", [False, True])
async def test_a_trainer_that_comes_back_on_another_port_is_called_there(tmp_path: Path, ended: bool) -> None:
    heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    app = FastAPI()

    @app.post("/done")
    async def done(request: Request) -> None:
        heard.put_nowait(await request.json())

    async with served(tmp_path) as it, listening(app) as url:
        assert await submit(it, callback_url="http://127.0.0.1:9/gone") == 200
        if ended:
            await it.run_all()
        assert await submit(it, callback_url=f"{url}/done") == 200
        if not ended:
            await it.run_all()
        told = nvidia.TaskResult.model_validate(await asyncio.wait_for(heard.get(), 120))
        assert (told.task_id, told.status, len(told.results)) == ("t", "completed", 1)


# Whose meaning a task has


async def test_a_run_may_have_another_meaning_than_the_server(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        answer = await it.http.put("/runs/bridge", json={"compat": "nvidia", "max_running": 4})
        assert answer.json()["compat"] == "nvidia"
        await it.http.put("/runs/bridge", json={"max_running": 8})  # quotas alone
        for run in ("bridge", "default"):
            assert await submit(it, run=run, task_id=run) == 200
        assert await submit(it, run="bridge", task_id="own", semantics="polar", on_timeout="zero") == 200
        await it.join()
        asked = {lease.task_id: TaskRequest.model_validate_json(bytes(lease.request)) for lease in await it.work()}
        assert {name: one.semantics for name, one in asked.items()} == {
            "bridge": NVIDIA,
            "default": POLAR,
            "own": POLAR,
        }
        assert {name: (one.on_timeout, one.builder.strategy) for name, one in asked.items()} == {
            "bridge": ("mask", "per_request"),
            "default": ("grade", "prefix_merging"),
            "own": ("zero", "prefix_merging"),
        }
    async with served(tmp_path) as it:  # it survives a restart
        assert (await it.http.get("/runs")).json()["runs"]["bridge"]["compat"] == "nvidia"


def test_what_a_task_sets_itself_stays() -> None:
    own = TaskRequest(task_id="t", instruction="x", on_timeout="grade", builder={"strategy": "prefix_merging"})
    adopted = own.with_semantics(NVIDIA)
    assert (adopted.on_timeout, adopted.builder.strategy, adopted.semantics) == ("grade", "prefix_merging", NVIDIA)
    named = TaskRequest.model_validate({"task_id": "t", "instruction": "x", "semantics": {"clock": "init"}})
    assert (named.semantics.clock, named.on_timeout) == ("init", "grade")


@pytest.mark.parametrize(("reason", "name"), [("timeout", "session_timeout"), ("nonzero_exit", "session_error")])
async def test_what_failed_is_masked(tmp_path: Path, reason: str, name: str) -> None:
    async with served(tmp_path, compat="nvidia") as it:
        await it.submit(task())
        await it.run_all(turns=2, reward=None, reason=reason, error="in words")
        status = await read(it)
        assert status.status == "completed"  # a bridge drops the group by itself, having looked at it
        (result,) = status.results
        assert len(result.trajectory.traces) == 2  # one for each request
        for trace in result.trajectory.traces:
            assert trace.response_ids
            assert trace.loss_mask == [0] * len(trace.response_ids)
            assert trace.reward == 0.0
            assert trace.metadata["training_filter"] == {"masked": True, "reason": name, "detail": "in words"}


async def test_an_evaluation_says_whether_it_is_resolved(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(*(task(name) for name in ("own", "whole", "half", "none")))
        await it.join()
        ends: dict[str, dict[str, Any]] = {
            "own": {"reward": 1.0, "detail": {"resolved": False, "dropped": []}},
            "whole": {"reward": 1.0},
            "half": {"reward": 0.5},
            "none": {"reward": None, "reason": "timeout"},
        }
        for lease in await it.work():
            await it.run(lease, **ends[lease.task_id])
        found = {name: (await read(it, name)).results[0].trajectory.metadata.get("evaluation") for name in ends}
        assert found["own"] == {
            "outcome_reward": 1.0,
            "trace_rewards": None,
            "report": {"resolved": False, "dropped": []},
        }
        assert [found[name] and found[name]["report"] for name in ("whole", "half", "none")] == [
            {"resolved": True},
            {"resolved": False},
            None,
        ]


# Other routes


async def test_tasks_and_their_sessions_are_listed(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.submit(task("a/b", num_samples=2, agent={"harness": "pi", "model_name": "m"}))
        await it.join()
        first, _ = await it.work()
        await it.run(first, reward=None, reason="timeout", seconds={"run": 1.0})
        await it.submit(task("later"))
        tasks = (await it.http.get("/tasks")).json()["tasks"]
        assert [one["task_id"] for one in tasks] == ["later", "a/b"]
        assert tasks[1] | {"created_at": 0, "updated_at": 0} == {
            "task_id": "a/b",
            "status": "running",
            "harness": "pi",
            "model": "m",
            "num_samples": 2,
            "completed_sessions": 1,
            "errored_sessions": 1,
            "created_at": 0,
            "updated_at": 0,
        }
        for query, names in (({"limit": 1}, ["later"]), ({"harness": "pi"}, ["a/b"]), ({"status": "completed"}, [])):
            found = (await it.http.get("/tasks", params=query)).json()["tasks"]
            assert [one["task_id"] for one in found] == names
        listed = (await it.http.get("/tasks/a/b/sessions")).json()
        assert listed["task_id"] == "a/b"
        ended, running = listed["sessions"]
        assert (ended["session_id"], ended["status"], ended["error"]) == ("s-a/b-0", "TIMEOUT", "timeout")
        assert nvidia.SessionTiming.model_validate(ended["timing"]).run_ms == 1000.0
        assert (running["session_id"], running["status"], running["node_id"]) == (None, "RUNNING", NODE)
        assert (await it.http.get("/tasks/nobody/sessions")).status_code == 404


async def test_one_node_is_shown(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.join()
        assert (await it.http.get(f"/nodes/{NODE}")).json()["node_id"] == NODE
        assert (await it.http.get("/nodes/nobody")).status_code == 404


async def test_a_token_may_come_in_the_control_header(tmp_path: Path) -> None:
    async with served(tmp_path, token="secret") as it:
        for headers, status in (
            ({"x-polar-control-token": "secret"}, 200),
            ({"x-polar-control-token": "secret", "Authorization": "Bearer other"}, 200),
            ({"x-polar-control-token": "other"}, 401),
            ({"x-polar-control-token": ""}, 401),
            ({}, 401),
        ):
            assert (await it.http.get("/tasks", headers=headers)).status_code == status, headers


# Fields that there are no equals of


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"runtime": {"kwargs": {"shm_size": "1g"}}}, "cpus, memory_mb"),
        ({"runtime": {"import_path": "my.runtimes:Mine"}}, "polar.runtimes"),
        ({"runtime": {"internet_volumes": ["/run/proxy"]}}, "upload_dir"),
        ({"runtime": {"direct_exec_init_command": "start"}}, "exec"),
        ({"runtime": {"network": "my-network"}}, "gateway"),
        ({"agent": {"harness": None, "import_path": "my.agents:Mine"}}, "polar.harnesses"),
        ({"runtime": {"prepare": [{"type": "upload_file", "source": "a", "target": "b", "max_attempts": 3}]}}, "1"),
    ],
)
async def test_what_is_refused_says_what_to_use(tmp_path: Path, fields: dict[str, Any], instead: str) -> None:
    async with served(tmp_path) as it:
        answer = await it.http.post("/rollout/task/submit", json=task(**fields))
        assert answer.status_code == 422
        assert instead in answer.text


def test_fields_that_have_an_equal_are_taken() -> None:
    step = {"type": "upload_dir", "source": "a", "target": "b", "command": None, "cwd": None, "env": None}
    runtime = models.RuntimeRequest.model_validate(
        {
            **{"kwargs": {}, "import_path": None, "internet_volumes": [], "direct_exec_init_command": None},
            **{"network": "host", "allow_internet": False, "storage_mb": 512},
            "prepare": [step | {"max_attempts": 1, "retry_backoff_seconds": 0.0}],
        }
    )
    assert (runtime.effective_network, runtime.disk_mb) == ("gateway", 512)  # never the machine's own network
    server = models.McpServer.model_validate({"name": "a", "transport": "streamable-http", "url": "http://x"})
    assert server.transport == "http"


@pytest.mark.parametrize("kind", ["builders", "evaluators", "runtimes"])
def test_a_plug_in_is_never_an_import_path(kind: plugins.PluginKind) -> None:
    with pytest.raises(ConfigError, match=rf"entry point of polar\.{kind}"):
        plugins.load(kind, "my.package:Mine")
