"""Tasks to a control plane, and what becomes of them, over connections that break."""

import asyncio
import math
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polar.client import submission
from polar.client.async_client import AsyncClient, ClientError, TasksRefused
from polar.errors import ConfigError
from polar.records.task import TaskRequest
from tests.unit.client.plane import Plane


@pytest.fixture
async def client(plane: Plane) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(plane.url, patience=120) as client:
        yield client


def named(*names: str) -> list[dict[str, Any]]:
    return [{"task_id": name, "instruction": "do it"} for name in names]


# submitting


async def test_tasks_come_as_tables_requests_and_files(plane: Plane, client: AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('instruction = "do it"\nagent.harness = "shell"\n')
    answers = await client.submit([*named("a"), TaskRequest(task_id="b", instruction="x"), tmp_path / "c.toml"])
    assert [(answer.task_id, answer.status) for answer in answers] == [(name, "running") for name in "abc"]
    assert plane.tasks["a"] == {"task_id": "a", "instruction": "do it", "run": "default"}  # and no defaults of ours
    assert plane.tasks["c"]["agent"] == {"harness": "shell"}
    assert [answer.task_id for answer in await client.submit(str(tmp_path))] == ["c"]
    assert [answer.task_id for answer in await client.submit(named("d")[0])] == ["d"]


async def test_tasks_are_of_the_clients_run(plane: Plane) -> None:
    async with AsyncClient(plane.url, run="other") as client:
        await client.submit([*named("a"), named("b")[0] | {"run": "other"}])
        assert {task["run"] for task in plane.tasks.values()} == {"other"}
        with pytest.raises(ConfigError, match="'c' belongs to the run 'third', but is submitted to 'other'"):
            await client.submit(named("c")[0] | {"run": "third"})


async def test_a_mistake_is_told_before_anything_is_sent(plane: Plane, client: AsyncClient) -> None:
    with pytest.raises(ConfigError, match=r"Task b: runtime\.cpus: input should be greater than 0"):
        await client.submit([*named("a"), named("b")[0] | {"runtime": {"cpus": -1}}])
    with pytest.raises(ConfigError, match="two tasks 'a'"):
        await client.submit(named("a", "a"))
    assert plane.seen == []


async def test_many_go_in_batches(plane: Plane, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = named(*(f"t{number}" for number in range(450)))
    assert [answer.task_id for answer in await client.submit(tasks)] == [task["task_id"] for task in tasks]
    assert [len(body["tasks"]) for *_, body in plane.asked("/rollout/tasks")] == [200, 200, 50]
    monkeypatch.setattr(submission, "_MAX_BATCH_BYTES", 200)
    plane.seen.clear()
    await client.submit(tasks[:10])
    assert [len(body["tasks"]) for *_, body in plane.asked("/rollout/tasks")] == [3, 3, 3, 1]


@pytest.mark.parametrize("fault", ["drop", "lose", "truncate", "cut", 503, 502, 500])
async def test_a_lost_answer_is_asked_for_again(plane: Plane, client: AsyncClient, fault: Any) -> None:
    plane.faults.extend([fault, fault])
    assert [answer.status for answer in await client.submit(named("a", "b"))] == ["running", "running"]
    assert len(plane.asked("/rollout/tasks")) == 3
    assert list(plane.tasks) == ["a", "b"]


async def test_it_waits_for_a_server_that_is_away(plane: Plane, client: AsyncClient) -> None:
    await plane.stop()
    submitting = asyncio.create_task(client.submit(named("a")))
    await asyncio.sleep(0.3)
    assert not submitting.done()
    await plane.start()
    assert [answer.status for answer in await submitting] == ["running"]


async def test_refused_ones_are_named_when_all_are_told(plane: Plane, client: AsyncClient) -> None:
    plane.refuses = {"b": (409, "it has other content"), "c": (422, "its callback goes nowhere")}
    with pytest.raises(TasksRefused) as caught:
        await client.submit(named("a", "b", "c", "d"))
    assert str(caught.value) == "2 of 4 tasks were refused: b: it has other content; c: its callback goes nowhere"
    assert [answer.status for answer in caught.value.answers] == ["running", None, None, "running"]
    assert list(plane.tasks) == ["a", "d"]
    answers = await client.submit(named("a", "b"), raise_refused=False)
    assert [(answer.code, answer.error) for answer in answers] == [(None, None), (409, "it has other content")]


async def test_it_waits_for_room_and_keeps_the_order(plane: Plane, client: AsyncClient) -> None:
    plane.room = 2
    names = [f"t{number}" for number in range(9)]

    seen: list[submission.SubmitAnswer] = []

    def make_room(answer: submission.SubmitAnswer) -> None:
        """For one more, whenever there was none."""
        seen.append(answer)
        if answer.code == 429:
            plane.room = 1

    answers = await client.submit(named(*names), on_answer=make_room)
    assert {answer.status for answer in answers} == {"running"}
    assert [(answer.task_id, answer.code) for answer in seen[:9]] == [
        (name, None if number < 2 else 429) for number, name in enumerate(names)
    ]
    assert [answer.task_id for answer in seen if answer.code is None] == names
    assert list(plane.tasks) == names
    assert [len(body["tasks"]) for *_, body in plane.asked("/rollout/tasks")][:2] == [
        9,
        2,
    ]  # no more than there is room


async def test_there_is_an_end_to_waiting_for_room(plane: Plane, client: AsyncClient) -> None:
    plane.room = 1
    answers = await client.submit(named("a", "b", "c"), timeout=0.2, raise_refused=False)
    assert [answer.code for answer in answers] == [None, 429, 429]
    with pytest.raises(TasksRefused, match="b: the queue is full") as caught:
        await client.submit(named("a", "b"), timeout=0.1)
    assert caught.value.status == 429


async def test_a_whole_batch_that_is_turned_away_is_sent_again(plane: Plane, client: AsyncClient) -> None:
    plane.faults.append(web.json_response({"detail": "slowly"}, status=429, headers={"Retry-After": "0.01"}))
    assert [answer.status for answer in await client.submit(named("a"))] == ["running"]


# asking


async def test_waiting_for_tasks_gives_their_results_in_order(plane: Plane, client: AsyncClient) -> None:
    await client.submit([*named("a"), named("b")[0] | {"num_samples": 2}])
    waiting = asyncio.create_task(client.wait(["b", "a"]))
    plane.end("a")
    plane.end("b", 0)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    plane.faults.extend(["drop", "truncate"])
    plane.end("b", 1, reward=None, reason="timeout", status="TIMEOUT")
    results = await waiting
    assert [(one.task_id, one.status, one.reward) for one in results] == [
        ("b", "COMPLETED", 1.0),
        ("b", "TIMEOUT", None),
        ("a", "COMPLETED", 1.0),
    ]
    assert await client.wait("a") == results[2:]
    plane.tasks["c"] = {}
    with pytest.raises(ClientError, match=r"1 of 2 tasks still run after 1 s, 'c' among them"):
        await client.wait(["a", "c"], timeout=1)
    with pytest.raises(ClientError, match=r"There is no /rollout/task/nobody\."):
        await client.wait("nobody")


async def test_each_call_asks_what_is_documented(plane: Plane) -> None:
    names = ("/policy", "/policy/pause", "/policy/resume", "/engines", "/runs/r 1", "/rollout/status", "/health")
    paths = (*names, "/rollout/task/a/trajectory", "/sessions", "/sessions/s1/end")
    plane.answers = {path: {"of": path} for path in paths} | {"/nodes": [{"node": 1}]}
    plane.tasks = {"a": {}, "b": {}}
    async with AsyncClient(plane.url + "/", run="r 1") as client:
        assert (await client.task("a")).status == "running"
        cancelled = await client.cancel("a")
        assert (cancelled.task_id, cancelled.status, cancelled.cancelled_sessions) == ("a", "failed", 1)
        assert await client.trajectory("a") == {"of": "/rollout/task/a/trajectory"}
        assert await client.status() == {"of": "/rollout/status"}
        assert await client.health() == {"of": "/health"}
        assert await client.nodes() == [{"node": 1}]
        assert await client.policy() == {"of": "/policy"}
        await client.set_policy(7)
        await client.set_policy(8, "http://e")
        await client.pause("drain", timeout=5)
        await client.resume()
        await client.engines()
        await client.add_engine("http://e", 3)
        await client.remove_engine("http://e?x=1&y")
        await client.set_quotas(max_running=4)
        assert await client.new_session() == {"of": "/sessions"}
        await client.new_session({"purpose": "test"})
        assert await client.end_session("s1", reward=0.5) == {"of": "/sessions/s1/end"}
        await client.end_session("s1", reason="broken")
        with pytest.raises(ClientError, match="404"):
            await client.task("x/y?z")
    quotas = {"max_running": 4, "max_queued": None, "batch": None, "max_lag": None}
    of_run = {"run": "r 1"}
    assert plane.seen == [
        ("GET", "/rollout/task/a", of_run, None),
        ("DELETE", "/rollout/task/a", {**of_run, "results": "false"}, None),
        ("GET", "/rollout/task/a/trajectory", of_run, None),
        ("GET", "/rollout/status", {}, None),
        ("GET", "/health", {}, None),
        ("GET", "/nodes", {}, None),
        ("GET", "/policy", of_run, None),
        ("POST", "/policy", of_run, {"version": 7}),
        ("POST", "/policy", of_run, {"version": 8, "replica": "http://e"}),
        ("POST", "/policy/pause", of_run, {"mode": "drain", "timeout": 5}),
        ("POST", "/policy/resume", of_run, None),
        ("GET", "/engines", of_run, None),
        ("POST", "/engines", of_run, {"url": "http://e", "version": 3}),
        ("DELETE", "/engines", {**of_run, "url": "http://e?x=1&y"}, None),
        ("PUT", "/runs/r%201", {}, quotas),
        ("POST", "/sessions", {}, {"metadata": {}, **of_run}),
        ("POST", "/sessions", {}, {"metadata": {"purpose": "test"}, **of_run}),
        ("POST", "/sessions/s1/end", {}, {"reward": 0.5, "reason": None}),
        ("POST", "/sessions/s1/end", {}, {"reward": None, "reason": "broken"}),
        ("GET", "/rollout/task/x%2Fy%3Fz", of_run, None),
    ]


@pytest.mark.parametrize("fault", ["drop", "lose", "truncate", "cut", 500, 502, 503])
async def test_a_session_that_may_have_been_opened_is_not_opened_again(
    plane: Plane, client: AsyncClient, fault: Any
) -> None:
    plane.answers = {"/sessions": {"session_id": "s1"}}
    plane.faults.append(fault)
    with pytest.raises(ClientError):
        await client.new_session()
    assert len(plane.seen) == 1


async def test_a_session_is_opened_as_soon_as_a_server_can(plane: Plane, client: AsyncClient) -> None:
    plane.answers = {"/sessions": {"session_id": "s1"}}
    plane.faults.append(429)
    assert await client.new_session() == {"session_id": "s1"}
    await plane.stop()
    opening = asyncio.create_task(client.new_session())
    await asyncio.sleep(0.3)
    assert not opening.done()
    await plane.start()
    assert await opening == {"session_id": "s1"}
    assert len(plane.seen) == 3


async def test_the_end_of_a_session_is_told_again(plane: Plane, client: AsyncClient) -> None:
    plane.answers = {"/sessions/s1/end": {"reward": 1.0}}
    plane.faults.extend(["lose", "truncate"])
    assert await client.end_session("s1", reward=1.0) == {"reward": 1.0}
    assert len(plane.seen) == 3


async def test_what_json_has_no_word_for_is_not_sent_as_nothing(plane: Plane, client: AsyncClient) -> None:
    with pytest.raises(ClientError, match="can't be sent as JSON"):
        await client.end_session("s1", reward=math.nan)
    with pytest.raises(ClientError, match="can't be sent as JSON"):
        await client.new_session({"at": Path()})
    assert plane.seen == []


async def test_events_go_on_where_a_connection_ended(plane: Plane, client: AsyncClient) -> None:
    plane.events = [b'{"task_id": "a"}', b'{"task_id": "b"}', b'{"task_id": "c"}']
    plane.faults.extend([None, "drop", 503])
    heard = []
    async for event in client.events():
        heard.append((event.kind, event.id, event.fields["task_id"]))
        if len(heard) == 3:
            break
    assert heard == [("task.ended", "1", "a"), ("task.ended", "2", "b"), ("task.ended", "3", "c")]
    assert plane.listened[:3] == [None, "1", "2"]


# what goes wrong


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"detail": "There is no such run."}, "answered 422: There is no such run."),
        ({"detail": [{"loc": ["body", "tasks", 3, "runtime"], "msg": "no"}]}, r"answered 422: tasks\[3\].runtime: no"),
        (
            {"detail": [{"type": "missing", "loc": ["body", "run"], "msg": "Field required"}]},
            "answered 422: run: it is missing",
        ),
        ({"detail": [{"type": "x", "loc": ["body"], "msg": "Not\nso."}]}, r"answered 422: the request: not\\nso"),
        ({"detail": ["odd"]}, r'answered 422: {"detail": \["odd"\]}'),
        ("<html>", "answered 422: <html>"),
        ("", "answered 422: nothing more"),
    ],
)
async def test_errors_say_what_the_server_says(plane: Plane, client: AsyncClient, answer: Any, said: str) -> None:
    response = (
        web.Response(text=answer, status=422) if isinstance(answer, str) else web.json_response(answer, status=422)
    )
    plane.faults.append(response)
    with pytest.raises(ClientError, match=said) as caught:
        await client.policy()
    assert caught.value.status == 422
    assert len(plane.seen) == 1  # what is wrong stays wrong


@pytest.mark.parametrize("status", [502, 504])
async def test_what_the_server_itself_could_not_do_is_not_asked_again(
    plane: Plane, client: AsyncClient, status: int
) -> None:
    plane.faults.append(web.json_response({"detail": "Calls are still running."}, status=status))
    with pytest.raises(ClientError, match="Calls are still running"):
        await client.pause("drain")
    assert len(plane.seen) == 1


async def test_a_call_that_breaks_the_server_is_not_made_for_ever(plane: Plane, client: AsyncClient) -> None:
    plane.faults.extend([500] * 100)
    with pytest.raises(ClientError, match="answered 500"):
        await client.policy()
    assert len(plane.seen) == 4


async def test_patience_ends(plane: Plane) -> None:
    async with AsyncClient(plane.url, patience=1) as client:
        plane.faults.extend(["drop"] * 100)
        with pytest.raises(ClientError, match=f"{plane.url} broke the connection off"):
            await client.policy()
        assert 2 <= len(plane.seen) < 20
        plane.faults.clear()
        full = {"detail": "the disk is full"}
        plane.faults.extend(web.json_response(full, status=503) for _ in range(100))
        with pytest.raises(ClientError, match="answered 503: the disk is full"):
            await client.policy()
        await plane.stop()
        with pytest.raises(ClientError, match=r"No control plane answers at .*: start one with `polar up`"):
            await client.policy()
        with pytest.raises(ClientError, match="No control plane answers"):
            await client.health()


async def test_something_else_that_answers_is_told_at_once(plane: Plane, client: AsyncClient) -> None:
    plane.answers = {"/policy": ["something", "else"]}
    with pytest.raises(ClientError, match="does not answer like a Polar control plane"):
        await client.policy()
    assert len(plane.seen) == 1


TOKEN = "s3cr3t-t0ken"


async def test_the_token_is_sent_and_never_shown() -> None:
    async with Plane(TOKEN) as plane, Plane() as elsewhere:
        async with AsyncClient(plane.url, TOKEN, patience=0) as client:
            plane.answers = {"/policy": {}}
            assert await client.policy() == {}
            assert TOKEN not in repr(client)
            plane.faults.extend(
                [
                    web.json_response({"detail": f"Bearer {TOKEN} is odd"}, status=422),
                    web.Response(status=307, headers={"Location": elsewhere.url + "/policy"}),
                    "drop",
                    "drop",  # aiohttp itself tries a kept connection twice
                ]
            )
            for _ in range(3):
                with pytest.raises(ClientError) as caught:
                    await client.policy()
                error: BaseException | None = caught.value
                assert TOKEN not in "".join(traceback.format_exception(caught.value))
                while error is not None:
                    assert TOKEN not in repr(error) + repr(vars(error))
                    error = error.__context__
            assert elsewhere.seen == []
        async with AsyncClient(plane.url, "another") as client:
            with pytest.raises(ClientError, match="This needs the admin token") as caught:
                await client.policy()
            assert caught.value.status == 401


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("127.0.0.1:80", None),
        ("ftp://host", None),
        ("http://user:" + TOKEN + "@host", None),
        ("http://h", TOKEN + "\n"),
    ],
)
def test_what_can_not_be_an_address_or_a_token(url: str, token: str | None) -> None:
    with pytest.raises(ClientError) as caught:
        AsyncClient(url, token)
    assert TOKEN not in str(caught.value)


async def test_a_closed_client_says_so(plane: Plane, client: AsyncClient) -> None:
    await client.close()
    with pytest.raises(ClientError, match="The client is closed"):
        await client.policy()
