"""The client against a server as users start it, which is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polar
from polar.client.async_client import ClientError, ServerEvent

POLAR = [sys.executable, "-c", "from polar.cli.main import main; main()"]
TOKEN = "an-admin-token"


class Server:
    """`polar up` on one port and one data folder, however often it is started."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        self._variables = variables
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def start(self) -> None:
        self._process = subprocess.Popen(
            [*POLAR, "up", "--json", "--port", "0", "--control-port", str(self._port)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env=os.environ | {"POLAR_SERVER__TOKEN": TOKEN} | self._variables,
        )
        assert self._process.stdout is not None
        self.url = json.loads(self._process.stdout.readline())["control"]
        self._port = int(self.url.rpartition(":")[2])

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(300)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[polar.Client]:
    with polar.Client(server.url, TOKEN, patience=600) as client:
        yield client


def task(name: str, command: str = "true", **fields: Any) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": "do it",
        "runtime": {"backend": "local"},
        "agent": {"harness": "shell", "custom_shell": {"command": command}},
        "evaluator": {"strategy": "session_completed"},
        **fields,
    }


ASKS = (
    """curl -fs "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" """
    """-H 'Content-Type: application/json' -d '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'"""
)


def test_every_result_comes_once_though_the_server_is_killed(server: Server, client: polar.Client) -> None:
    tasks = [task(f"t{number}", "sleep 0.2", num_samples=2) for number in range(12)]
    client.submit(tasks)
    got = []
    for result in client.results(consumer="trainer", limit=3, wait=5, count=24):
        got.append((result.task_id, result.sample, result.cursor, result.reward))
        if len(got) == 5:
            server.stop(signal.SIGKILL)
            server.start()
            client.submit(tasks)  # whoever isn't sure says it again
    assert sorted((name, sample) for name, sample, *_ in got) == sorted((f"t{n}", s) for n in range(12) for s in (0, 1))
    cursors = [cursor for *_, cursor, _ in got]
    assert cursors == sorted(set(cursors))
    assert {reward for *_, reward in got} == {1.0}
    assert list(client.results(consumer="trainer", follow=False)) == []
    assert [one.cursor for one in client.results(follow=False)] == cursors


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_who_waits_for_results_outlives_a_restart(server: Server, client: polar.Client, number: int) -> None:
    client.submit(task("before"))
    results = client.results()
    assert next(results).task_id == "before"
    got: list[str] = []
    waiting = threading.Thread(target=lambda: got.append(next(results).task_id))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    server.stop(number)
    server.start()
    client.submit(task("after"))
    waiting.join(300)
    assert got == ["after"]


def test_what_is_captured_comes_with_the_results(client: polar.Client) -> None:
    client.submit([task("asks", ASKS, num_samples=2), task("silent", run="default")])
    results = client.wait(["silent", "asks"], timeout=300)
    assert [result.task_id for result in results] == ["silent", "asks", "asks"]
    trajectory = results[1].trajectory
    assert trajectory is not None
    (trace,) = trajectory.traces
    assert sum(trace.loss_mask) == len(trace.response_ids) > 0
    assert client.task("asks", results=False).results == []
    tree = client.trajectory("asks")
    assert {term["session_id"] for term in tree["terms"]} == {result.session_id for result in results[1:]}
    groups = {group.task_id: group for group in client.results(unit="group", builder="per_request", count=2)}
    assert (groups["asks"].asked, groups["asks"].usable, len(groups["asks"].results)) == (2, 2, 2)
    (raw,) = client.results(raw=True, count=1)
    assert json.loads(raw.data)["cursor"] == raw.cursor
    with pytest.raises(ClientError, match="404"):
        client.task("nobody")


def test_evidence_of_tampering_comes_with_the_results(server: Server, client: polar.Client) -> None:
    hidden = [{"type": "upload_file", "content": "1", "target": ".grader/expected.txt"}]
    runtime = {"backend": "local", "eval_prepare": hidden}
    client.submit([task("curious", "ln -s .grader/expected.txt out.txt", runtime=runtime), task("plain")])
    curious, plain = client.wait(["curious", "plain"], timeout=300)
    assert [(one.kind, one.subject, one.proven) for one in curious.evidence] == [
        ("grader_path", ".grader/expected.txt", False),
        ("grader_path", ".grader", False),
    ]
    assert (curious.reward, curious.metadata["suspicious"]) == (1.0, False)
    assert (plain.evidence, plain.metadata["suspicious"]) == ([], False)
    assert [one.session_id for one in client.results(suspicious="only", follow=False)] == []
    assert len(list(client.results(suspicious="exclude", follow=False))) == 2
    request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request) as answer:
        told = answer.read().decode()
    assert 'polar_tampering_evidence_total{kind="grader_path",proven="false",run="default"} 2.0' in told


def test_tasks_that_are_cancelled_or_refused(client: polar.Client) -> None:
    client.submit(task("long", "sleep 600", num_samples=2))
    assert client.cancel("long").cancelled_sessions == 2
    assert {result.reason for result in client.wait("long", timeout=300)} == {"cancelled"}
    with pytest.raises(ClientError, match="A different task with the id long already exists"):
        client.submit(task("long", "sleep 1", num_samples=2))
    client.set_quotas(max_queued=0)
    with pytest.raises(ClientError, match="The task was refused: more: The task has 1 samples"):
        client.submit(task("more"), timeout=0.2)
    client.set_quotas()
    assert client.submit(task("more"))[0].error is None


def test_the_policy_and_its_engines(client: polar.Client) -> None:
    (engine,) = client.policy()["replicas"]
    assert client.set_policy(3)["replicas"][0]["version"] == 3
    assert client.pause("hold")["paused"] is True
    assert client.resume()["paused"] is False
    urls = [replica["url"] for replica in client.add_engine("http://127.0.0.1:9", 4)["replicas"]]
    assert urls == [engine["url"], "http://127.0.0.1:9"]
    assert [replica["url"] for replica in client.remove_engine("http://127.0.0.1:9")["replicas"]] == [engine["url"]]
    assert client.engines()["run"] == "default"
    assert [node["leases"] for node in client.nodes()] == [0]
    assert "default" in client.status()["runs"]


def test_engines_may_come_later(tmp_path: Path) -> None:
    """Those of a trainer: what is run before they are there is run again."""
    server = Server(tmp_path, POLAR_ENGINE__KIND="vllm", POLAR_ENGINE__URLS="[]", POLAR_SERVER__ATTEMPTS="100")
    server.start()
    with (
        polar.Client(server.url, TOKEN, patience=600) as client,
        subprocess.Popen([sys.executable, "-m", "polar.engines.scripted"], stdout=subprocess.PIPE, text=True) as engine,
    ):
        try:
            assert engine.stdout is not None
            url = engine.stdout.readline().split()[-1]
            assert client.engines()["replicas"] == []
            client.submit(task("asks", ASKS))
            assert [replica["version"] for replica in client.add_engine(url, 3)["replicas"]] == [3]
            (result,) = client.wait(["asks"], timeout=300)
            assert result.trajectory is not None
            assert {version for trace in result.trajectory.traces for version in trace.policy_versions} == {3}
        finally:
            engine.terminate()
            server.stop()


def test_events_are_heard(client: polar.Client) -> None:
    heard: list[ServerEvent] = []

    def listen() -> None:
        heard.append(next(event for event in client.events() if event.kind == "policy.changed"))

    listening = threading.Thread(target=listen)
    listening.start()
    version = 0
    while listening.is_alive():  # whenever it begins to listen
        version += 1
        client.set_policy(version)
        listening.join(0.05)
    assert 1 <= heard[0].fields["version"] <= version


def test_another_token_opens_nothing(server: Server) -> None:
    with polar.Client(server.url, "another") as client, pytest.raises(ClientError, match="admin token") as caught:
        client.status()
    assert caught.value.status == 401
