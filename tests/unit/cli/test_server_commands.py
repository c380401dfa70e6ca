"""polar submit, status, results, cancel and session, against a small control plane."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polar.cli.main import main
from tests.unit.client.plane import Plane, Serving

Polar = Callable[..., tuple[int, str, str]]


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    serving.plane.answers["/health"] = {"status": "ok"}
    yield serving
    serving.close()


@pytest.fixture
def plane(serving: Serving) -> Plane:
    return serving.plane


@pytest.fixture
def polar(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Polar:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: str, url: str = plane.url) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--server", url])
        out, err = capfdbinary.readouterr()
        return int(ended.value.code or 0), out.decode(), err.decode()

    return call


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "a.toml").write_text('instruction = "do it"\nnum_samples = 2\n')
    return "a.toml"


def test_tasks_are_sent_as_the_command_line_wants_them(polar: Polar, plane: Plane, task: str) -> None:
    code, out, _ = polar("submit", task, "--samples", "5", "--harness", "pi", "--run", "r")
    assert code == 0
    assert out == "1 task with 5 sessions. See: polar status, polar results --follow\n"
    sent = plane.tasks["a"]
    assert (sent["num_samples"], sent["agent"]["harness"], sent["run"]) == (5, "pi", "r")
    code, out, _ = polar("submit", task, "--samples", "5", "--harness", "pi", "--run", "r", "--json")
    assert (code, json.loads(out)) == (0, {"task_id": "a", "status": "running"})


def test_a_refused_task_is_named(polar: Polar, plane: Plane, task: str) -> None:
    plane.refuses["a"] = (422, "its callback goes nowhere")
    code, out, err = polar("submit", task, "--wait")
    assert (code, out, err) == (1, "", "polar: The task a was refused: its callback goes nowhere\n")
    code, out, _ = polar("submit", task, "--json")
    assert (code, json.loads(out)["code"]) == (1, 422)


def test_it_is_said_once_that_it_waits_for_room(polar: Polar, serving: Serving, plane: Plane, tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(4)]
    (tmp_path / "many.json").write_text(json.dumps([{"task_id": name, "instruction": "do it"} for name in names]))
    plane.room = 1

    def make_room() -> None:
        while len(plane.asked("/rollout/tasks")) < 3:  # it has heard twice that there is none
            time.sleep(0.01)
        serving.run(setattr, plane, "room", 3)

    making = threading.Thread(target=make_room)
    making.start()
    code, out, err = polar("submit", "many.json")
    making.join()
    assert (code, list(plane.tasks)) == (0, names)
    assert out == "4 tasks with 4 sessions. See: polar status, polar results --follow\n"
    assert err.startswith("The run's queue is full: waiting.")
    assert err.count("\n") == 1


def test_waiting_shows_what_came_of_them(polar: Polar, serving: Serving, plane: Plane, task: str) -> None:
    def end() -> None:
        while not plane.asked("/rollout/task/a"):  # it waits
            time.sleep(0.01)
        serving.run(plane.end, "a", 0)
        serving.run(plane.end, "a", 1)

    ending = threading.Thread(target=end)
    ending.start()
    code, out, _ = polar("submit", task, "--wait")
    ending.join()
    assert code == 0
    assert "s1" in out
    assert "2 sessions: mean reward 1." in out
    code, out, _ = polar("submit", task, "--wait", "--json")
    assert [json.loads(line)["session_id"] for line in out.splitlines()] == ["s1", "s2"]


@pytest.mark.parametrize(("reason", "status"), [("timeout", 0), ("early_stop", 0), ("sandbox_failed", 1)])
def test_the_status_says_whether_sessions_failed(
    polar: Polar, serving: Serving, plane: Plane, task: str, reason: str, status: int
) -> None:
    serving.run(plane.end, "a", 0)
    serving.run(lambda: plane.end("a", 1, reward=None, reason=reason, status="ERROR", error="no room"))
    code, _, err = polar("submit", task, "--wait")
    assert code == status
    assert err == (f"polar: 1 of 2 sessions ended without a reward: {reason} 1.\n  a (s2): no room\n" if status else "")


def test_the_status_of_the_service(polar: Polar, plane: Plane) -> None:
    node = {"node_id": "n", "name": "left", "backends": ["local"], "slots": 16, "leases": 3, "seen": 0.4, "load": {}}
    replicas = [{"url": "http://e", "version": 7, "down": True}]
    status: dict[str, Any] = {
        "runs": {"default": {"queued": 1200, "done": 4}},
        "nodes": [node | {"load": {"init": 1, "run": 2, "calls": 5}}],
        "policy": {"default": {"paused": True, "mode": "hold", "replicas": replicas}},
    }
    plane.answers["/rollout/status"] = status
    code, out, _ = polar("status")
    assert code == 0
    assert "1,200" in out
    assert "3 of 16" in out
    assert "default: http://e version 7 (down); paused (hold)" in out
    code, out, _ = polar("status", "--json")
    assert (code, json.loads(out)) == (0, status)
    plane.answers["/rollout/status"] = status | {"nodes": []}
    assert "polar node --join" in polar("status")[1]


def test_the_status_of_a_task(polar: Polar, serving: Serving, plane: Plane, task: str) -> None:
    polar("submit", task)
    serving.run(plane.end, "a", 0)
    assert polar("status", "a") == (0, "a: running, 1 of 2 sessions ended\n", "")
    serving.run(plane.end, "a", 1)
    code, out, _ = polar("status", "a")
    assert out.startswith("a: completed, 2 of 2 sessions ended\n")
    assert "s2" in out
    plane.answers["/rollout/task/b"] = {
        "task_id": "b",
        "status": "running",
        "total_sessions": 1,
        "sessions": [{"sample": 0, "state": "waiting", "attempt": 2, "node": "left", "id": None}],
    }
    code, out, _ = polar("status", "b")
    assert [cell in out for cell in ("waiting", "2", "left")] == [True, True, True]
    assert json.loads(polar("status", "b", "--json")[1])["sessions"][0]["attempt"] == 2
    code, _, err = polar("status", "nobody")
    assert (code, err) == (1, f"polar: {plane.url} answered 404: There is no /rollout/task/nobody.\n")


def test_results_as_tables_and_lines(polar: Polar, serving: Serving, plane: Plane) -> None:
    assert polar("results")[:2] == (0, "No results.\n")
    serving.run(plane.end, "a")
    serving.run(lambda: plane.end("b", 3, reward=None, reason="timeout", status="TIMEOUT"))
    code, out, _ = polar("results", "--after", "1")
    assert code == 0
    assert "timeout" in out
    assert "s1" not in out
    assert out.endswith("Later ones: --after 2\n")
    assert "completed" in polar("results", "--unit", "group")[1]
    code, out, _ = polar("results", "--json", "--builder", "per_request")
    assert [json.loads(line) for line in out.splitlines()] == plane.sessions
    assert plane.seen[-1][2]["builder"] == "per_request"


def test_suspicious_sessions_are_shown_and_filtered(polar: Polar, serving: Serving, plane: Plane, task: str) -> None:
    polar("submit", task)
    serving.run(plane.end, "a", 0)
    assert "suspicious" not in polar("results")[1]
    evidence = [{"kind": "canary_passed", "subject": "t", "proven": True}, {"kind": "grader_path", "subject": "/tests"}]
    told = {"evidence": evidence, "metadata": {"suspicious": True}, "reward": 0.0}
    serving.run(lambda: plane.end("a", 1, **told))
    for arguments in (("results",), ("status", "a")):
        out = polar(*arguments)[1]
        assert "suspicious" in out
        assert "canary_passed" in out
        assert "grader_path" not in out
    assert "suspicious" in polar("results", "--unit", "group")[1]
    assert "suspicious" not in plane.seen[-1][2]
    polar("results", "--suspicious", "exclude")
    assert plane.seen[-1][2]["suspicious"] == "exclude"


def test_results_into_a_file(polar: Polar, serving: Serving, plane: Plane, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    for number in range(3):
        serving.run(plane.end, f"t{number}")
    code, out, err = polar("results", "-o", str(file))
    assert (code, out, err) == (0, "", f"3 results to {file}. Later ones: --after 3\n")
    for _ in range(2):  # anew
        polar("results", "-o", str(file))
    assert [json.loads(line) for line in file.read_text().splitlines()] == plane.sessions
    file.unlink()
    polar("results", "--consumer", "c", "-o", str(file))
    assert plane.consumers == {"c": 3}
    serving.run(plane.end, "late")
    assert polar("results", "--consumer", "c", "-o", str(file))[2] == f"1 result to {file}.\n"  # behind the others
    assert [json.loads(line) for line in file.read_text().splitlines()] == plane.sessions
    code, _, err = polar("results", "-o", str(tmp_path / "no" / "where"))
    assert code == 1
    assert "No such file or directory" in err


def test_cancelling(polar: Polar, plane: Plane) -> None:
    plane.tasks = {"a": {}, "b": {}}
    code, out, err = polar("cancel", "a", "nobody", "b")
    assert (code, out) == (1, "a: 1 session cancelled\nb: 1 session cancelled\n")
    assert "There is no /rollout/task/nobody." in err
    code, out, _ = polar("cancel", "a", "--json")
    assert (code, json.loads(out)["cancelled_sessions"]) == (0, 1)


def test_a_session_for_a_harness_that_is_run_by_hand(polar: Polar, plane: Plane) -> None:
    plane.token = "s3cret"
    created = {"session_id": "s1", "api_key": "sk 1", "base_urls": {"anthropic": "http://g"}}
    plane.answers |= {"/sessions": created, "/sessions/s1/end": {"session_id": "s1", "reward": 0.5}}
    options = ("--token", "s3cret", "--run", "r", "--metadata", '{"purpose": "test"}', "--model", "m")
    code, out, _ = polar("session", "new", *options)
    assert code == 0
    exported = dict(line.removeprefix("export ").split("=", 1) for line in out.splitlines())
    assert (exported["POLAR_SESSION"], exported["OPENAI_API_KEY"], exported["OPENAI_MODEL"]) == ("s1", "'sk 1'", "m")
    assert plane.seen[-1][3] == {"metadata": {"model": "m", "purpose": "test"}, "run": "r"}
    assert json.loads(polar("session", "new", "--json", "--token", "s3cret")[1]) == created
    told = polar("session", "end", "s1", "--reward", "0.5", "--token", "s3cret")
    assert told == (0, "s1 has ended, reward 0.5\n", "")
    assert plane.seen[-1][3] == {"reward": 0.5, "reason": None}
    code, _, err = polar("session", "new")
    assert (code, "This needs the admin token" in err) == (1, True)


@pytest.mark.parametrize("arguments", [("status",), ("results", "--follow"), ("cancel", "a"), ("submit", "a.toml")])
def test_a_server_that_is_not_there_is_told_at_once(polar: Polar, task: str, arguments: tuple[str, ...]) -> None:
    code, out, err = polar(*arguments, url="http://127.0.0.1:1")
    assert (code, out) == (1, "")
    said = "No control plane answers at http://127.0.0.1:1 (Connection refused): start one with `polar up`."
    assert err == f"polar: {said}\n"


def test_the_settings_say_where_and_with_which_token(
    polar: Polar, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.token = "s3cret"
    plane.answers["/rollout/status"] = {"runs": {}, "nodes": [], "policy": {}}
    monkeypatch.setenv("POLAR_SERVER__PORT", str(plane.port))
    monkeypatch.setenv("POLAR_SERVER__TOKEN", "s3cret")
    with pytest.raises(SystemExit) as ended:
        main(["status", "--json"])
    assert (ended.value.code or 0) == 0
    code, _, err = polar("status", "--token", "another")
    assert code == 1
    assert "This needs the admin token" in err
