"""The client without an event loop of the caller's."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import polar
from polar.client.async_client import ClientError
from tests.unit.client.plane import Plane, Serving


@pytest.fixture
def serving() -> Iterator[Serving]:
    serving = Serving()
    yield serving
    serving.close()


@pytest.fixture
def plane(serving: Serving) -> Plane:
    return serving.plane


@pytest.fixture
def client(plane: Plane) -> Iterator[polar.Client]:
    with polar.Client(plane.url, "token", "r", patience=120) as client:
        yield client


TASK = {"task_id": "a", "instruction": "do it"}


def test_it_does_what_the_other_one_does(serving: Serving, plane: Plane, client: polar.Client) -> None:
    assert repr(client) == f"Client('{plane.url}', run='r')"
    seen: list[object] = []
    assert client.submit(TASK, on_answer=seen.append) == seen
    assert client.task("a").status == "running"
    serving.run(plane.end, "a")
    assert [result.task_id for result in client.wait("a")] == ["a"]
    assert [task.status for task in client.as_completed(["a"])] == ["completed"]
    assert client.cancel("a").cancelled_sessions == 1
    paths = ("/policy", "/policy/pause", "/policy/resume", "/engines", "/runs/r", "/rollout/status", "/health")
    paths += ("/rollout/task/a/trajectory", "/sessions", "/sessions/s1/end")  # type: ignore[assignment]
    plane.answers = {path: {"of": path} for path in paths} | {"/nodes": []}
    assert client.policy() == {"of": "/policy"}
    assert client.set_policy(3, "http://e") == {"of": "/policy"}
    assert client.pause("hold") == {"of": "/policy/pause"}
    assert client.resume() == {"of": "/policy/resume"}
    assert client.engines() == client.add_engine("http://e") == client.remove_engine("http://e") == {"of": "/engines"}
    assert client.set_quotas(batch=4) == {"of": "/runs/r"}
    assert client.status() == {"of": "/rollout/status"}
    assert client.health() == {"of": "/health"}
    assert client.trajectory("a") == {"of": "/rollout/task/a/trajectory"}
    assert client.nodes() == []
    assert client.new_session({"purpose": "test"}) == {"of": "/sessions"}
    assert client.end_session("s1", reward=1.0) == {"of": "/sessions/s1/end"}
    plane.events = [b'{"n": 1}', b'{"n": 2}']
    events = client.events()
    assert [next(events).fields["n"] for _ in range(2)] == [1, 2]
    with pytest.raises(ClientError, match="There is no /rollout/task/b"):
        client.task("b")


def test_results_are_a_plain_iterator(serving: Serving, plane: Plane, client: polar.Client) -> None:
    for number in range(5):
        serving.run(plane.end, f"t{number}")
    results = client.results(consumer="c", limit=2)
    assert [next(results).cursor for _ in range(3)] == [1, 2, 3]
    assert plane.consumers == {"c": 2}
    results.acknowledge()
    assert (plane.consumers, results.cursor) == ({"c": 3}, 3)
    assert [group.task_id for group in client.results(unit="group", count=2)] == ["t0", "t1"]
    assert [result.cursor for result in client.results(3, raw=True, follow=False)] == [4, 5]


async def test_it_works_inside_a_running_loop(plane: Plane, client: polar.Client) -> None:
    assert [answer.status for answer in client.submit(TASK)] == ["running"]
    assert client.task("a").status == "running"


def test_threads_share_it(serving: Serving, plane: Plane, client: polar.Client) -> None:
    for number in range(40):
        serving.run(plane.end, f"t{number}")
    results = client.results(limit=3, count=40)
    got: list[int] = []

    def read() -> None:
        got.extend(result.cursor for result in results)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(got) == list(range(1, 41))


def test_closing_results_ends_a_thread_that_waits(client: polar.Client) -> None:
    results = client.results()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(list(results)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    results.close()
    thread.join(120)
    assert got == [[]]
    assert list(results) == []


def test_closing_the_client_lets_go_of_a_thread_that_waits(plane: Plane) -> None:
    client = polar.Client(plane.url)
    said: list[str] = []

    def read() -> None:
        try:
            next(client.results())
        except ClientError as error:
            said.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.2)
    client.close()
    thread.join(120)
    assert said == ["The client is closed."]
    client.close()
    with pytest.raises(ClientError, match="The client is closed"):
        client.policy()


def test_one_that_nobody_holds_any_more_leaves_no_thread(serving: Serving, plane: Plane) -> None:
    serving.run(plane.end, "a")
    before = set(threading.enumerate())
    results = polar.Client(plane.url).results()
    assert next(results).task_id == "a"  # the iterator holds it
    assert len(set(threading.enumerate()) - before) == 1
    del results
    gc.collect()
    assert not set(threading.enumerate()) - before


def test_a_forked_process_is_told_to_make_its_own(client: polar.Client) -> None:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, that there are threads
        child = os.fork()
    if not child:
        try:
            client.policy()
        except ClientError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "The client was made before this process was forked off: make one here."


def test_a_program_that_leaves_it_open_ends_quietly(serving: Serving, plane: Plane) -> None:
    serving.run(plane.end, "a")
    program = f"import polar; results = polar.Client({plane.url!r}).results(); print(next(results).task_id)"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    said = [line for line in done.stderr.splitlines() if "took" not in line]  # asyncio, of a machine that is busy
    assert (done.stdout, said) == ("a\n", [])
