"""Who is believed what at the rollout service: nodes that lie, forged sessions, names that are more than names, callers
that never end, and secrets that stand where somebody might tell them."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from polar.cli import status as status_command
from polar.cli.submit import _report_refused
from polar.client.async_client import AsyncClient, SubmitAnswer
from polar.config import ServerSettings
from polar.evaluators.base import GraderError
from polar.node.finished_session import check_verdict
from polar.records.result import TaskStatus
from polar.records.session import Session, Verdict
from polar.rollout.callbacks import AllowedHosts
from polar.rollout.protocol import Lease, SessionOutcome
from polar.store import session_copy
from polar.store.rows import ExchangeRow, SessionRow
from polar.store.session_copy import SessionCopy
from polar.store.sqlite import open_sqlite_store
from polar.testing.conversations import ConversationBuilder, make_text_parts
from tests.attack.parts import Wire, comes_true
from tests.integration.stack import running
from tests.unit.rollout.listening import listening
from tests.unit.rollout.served import NODE, Served, page_of, served, task

TOKEN = "admin-token-5e1f"
NODE_TOKEN = "node-token-77aa"
JSON = {"Content-Type": "application/json"}
PATIENT = {"beat_seconds": 0.05, "lease_seconds": 600}  # with nodes that a test plays, which never beat
replace = msgspec.structs.replace


# Keys


async def test_a_sessions_key_opens_nothing_wherever_it_stands(tmp_path: Path) -> None:
    """All slots that the gateway takes it in, and those that others do. The same with the node token, but for what is
    nodes' own."""
    async with running(tmp_path, server={"token": TOKEN, "node_token": NODE_TOKEN}) as it:
        url, key = it.service.control_url, it.key
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                paths = (await answer.json())["paths"]
            calls = [(method, path) for path, methods in paths.items() for method in methods if path != "/health"]
            assert len(calls) > 30
            for secret in (key, NODE_TOKEN):
                slots: list[tuple[str, str, dict[str, str]]] = [
                    ("", "", {"Authorization": f"Bearer {secret}"}),
                    ("", "", {"Authorization": f"Basic {secret}"}),
                    ("", "", {"Proxy-Authorization": f"Bearer {secret}"}),
                    ("", "", {"X-Forwarded-Authorization": f"Bearer {secret}"}),
                    ("", "", {"x-api-key": secret}),
                    ("", "", {"x-goog-api-key": secret}),
                    ("", "", {"api-key": secret}),
                    ("", "", {"Cookie": f"token={secret}; session={secret}"}),
                    ("", f"?key={secret}&token={secret}&api_key={secret}&access_token={secret}", {}),
                    (f"/s/{secret}", "", {}),
                ]
                for method, path in calls:
                    of_nodes = "node protocol" in paths[path][method]["tags"]
                    place = path.replace("{", "").replace("}", "")
                    for prefix, query, headers in slots[of_nodes and secret == NODE_TOKEN :]:
                        body = None if method in ("get", "delete") else {}
                        async with http.request(
                            method, f"{url}{prefix}{place}{query}", headers=headers, json=body
                        ) as answer:
                            assert answer.status == (404 if prefix else 401), (method, path, headers)


# Nodes that lie of what has ended


def ended(lease: Lease, **fields: Any) -> dict[str, Any]:
    return {"work_id": lease.work_id, "fence": lease.fence, "session_id": None} | fields


@asynccontextmanager
async def leased(data: Path, samples: int = 3) -> AsyncIterator[tuple[Served, list[Lease]]]:
    async with served(data, lease_seconds=600) as it:
        await it.submit(task(num_samples=samples))
        await it.join()
        yield it, await it.work()


FORGED: dict[str, dict[str, Any]] = {
    "a reward and a reason": {"reward": 1.0, "reason": "x"},
    "fewer turns than none": {"reward": 1.0, "turns": -1},
    "fewer tokens than none": {"reward": 1.0, "tokens": -(2**40)},
    "a version that never was": {"reward": 1.0, "oldest_version": -(2**63)},
    "a reason without end": {"reason": "x" * 1_000_000},
    "a reason of two lines": {"reason": "x\n2026-01-01 ERROR all is lost"},
    "a session that steers terminals": {"reward": 1.0, "session_id": "\x1b]0;x\x07"},
    "a stage without end": {"reward": 1.0, "seconds": {"x" * 2000: 1.0}},
    "a stage of two lines": {"reward": 1.0, "seconds": {"x\ny": 1.0}},
    "deep detail": {"reward": 1.0, "detail": {"a": json.loads("[" * 500 + "]" * 500)}},
    "deep outcome": {"reward": 1.0, "outcome": json.loads("[" * 800 + "]" * 800)},
}


async def test_ends_that_can_not_be(tmp_path: Path, subtests: pytest.Subtests) -> None:
    async with leased(tmp_path) as (it, (lease, *_)):
        before = it.rollout.count_sessions()
        for name, fields in FORGED.items():
            with subtests.test(name):
                answer = await it.http.post(f"/nodes/{NODE}/finish", json=[ended(lease, **fields)])
                assert answer.status_code == 422, answer.text
                assert len(answer.text) < 500
                assert it.rollout.count_sessions() == before
                assert page_of(await it.http.get("/rollout/results"))[0] == []


async def test_rewards_that_are_no_numbers(tmp_path: Path, subtests: pytest.Subtests) -> None:
    async with leased(tmp_path) as (it, (lease, *_)):
        for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"NaN"', b"true"):
            with subtests.test(number.decode()):
                body = b'[{"work_id":%d,"fence":%d,"session_id":null,"reward":%b}]'
                told = body % (lease.work_id, lease.fence, number)
                answer = await it.http.post(f"/nodes/{NODE}/finish", content=told, headers=JSON)
                assert answer.status_code in (400, 422)


async def test_fences_that_were_never_given(tmp_path: Path) -> None:
    async with leased(tmp_path) as (it, (lease, *_)):
        for fence in (0, -1, lease.fence + 1, 2**62, -(2**63)):
            answer = await it.http.post(f"/nodes/{NODE}/finish", json=[ended(lease, fence=fence, reward=1.0)])
            assert answer.json() == ["lost"], fence
        assert it.rollout.count_sessions()["default"]["done"] == 0


async def test_no_node_ends_what_another_one_has(tmp_path: Path) -> None:
    """Work and fences are small numbers: whoever has the node token can guess them."""
    async with leased(tmp_path) as (it, leases):
        await it.join("other")
        await it.submit(task("mine"))
        (mine,) = await it.work("other")
        for node in ("other", "nobody"):
            ends = [ended(lease, reward=1.0) for lease in leases]
            answer = await it.http.post(f"/nodes/{node}/finish", json=ends)
            assert answer.json() == ["lost"] * 3
        both = [ended(leases[0], reward=9.0), ended(mine, reward=1.0)]
        assert (await it.http.post("/nodes/other/finish", json=both)).json() == ["lost", "taken"]
        assert it.rollout.count_sessions()["default"]["leased"] == 3
        ends = [ended(lease, reward=0.5) for lease in leases]
        assert (await it.http.post(f"/nodes/{NODE}/finish", json=ends)).json() == ["taken"] * 3
        results, _ = page_of(await it.http.get("/rollout/results"))
        assert [result["reward"] for result in results] == [1.0, 0.5, 0.5, 0.5]


async def test_an_end_that_is_told_many_times_at_once_counts_once(tmp_path: Path) -> None:
    async with leased(tmp_path) as (it, (lease, *_)):
        answer = await it.http.post(f"/nodes/{NODE}/finish", json=[ended(lease, reward=1.0)] * 3)
        assert answer.status_code == 422
        one = [ended(lease, reward=1.0)]
        answers = await asyncio.gather(*(it.http.post(f"/nodes/{NODE}/finish", json=one) for _ in range(5)))
        assert [answer.json() for answer in answers] == [["taken"]] * 5
        counts = it.rollout.count_sessions()["default"]
        assert (counts["leased"], counts["done"], counts["usable"]) == (2, 1, 1)


async def test_what_is_the_servers_to_say_is_not_heard(tmp_path: Path) -> None:
    """Nor are large numbers in what an evaluator tells a reason to send a node away."""
    async with leased(tmp_path, 1) as (it, (lease,)):
        said = ended(lease, reward=1.0, lag=-7, stale=True, builder="nonsense", node_id="another")
        said["detail"] = {"seen": 2**70, "note": "a\nb"}
        assert (await it.http.post(f"/nodes/{NODE}/finish", json=[said])).json() == ["taken"]
        ((result,), _) = page_of(await it.http.get("/rollout/results"))
        told = result["metadata"]
        assert (result["reward"], told["stale"], told["lag"], result["node_id"]) == (1.0, False, 0, NODE)
        assert told["verdict"] == {"seen": 2**70, "note": "a\nb"}


async def test_no_node_gets_another_tasks_session_told(tmp_path: Path) -> None:
    """A node says that its work ended as a session of somebody else's, in another run or in its own."""
    async with served(tmp_path) as it:
        await it.submit(task("secret", run="private"), task("own"), task("other"))
        await it.join()
        leases = {lease.task_id: lease for lease in await it.work()}
        theirs = await it.run(leases["secret"])
        for name in ("own", "other"):
            mine = ended(leases[name], session_id=theirs, reward=1.0)
            assert (await it.http.post(f"/nodes/{NODE}/finish", json=[mine])).json() == ["taken"]
        results, _ = page_of(await it.http.get("/rollout/results"))
        for result in results:
            assert (result["reward"], result["reason"]) == (None, "session_unreadable")
            assert "another task's" in result["error"]
            assert result["trajectory"]["traces"] == []
        tree = await it.http.get("/rollout/task/own/trajectory")
        assert (tree.status_code, tree.json()["sessions"]) == (200, [])
        ((own,), _) = page_of(await it.http.get("/rollout/results?run=private"))
        assert own["trajectory"]["traces"]


async def test_loads_that_are_no_numbers(tmp_path: Path, subtests: pytest.Subtests) -> None:
    async with served(tmp_path) as it:
        await it.join()
        loads: list[dict[str, Any]] = [{"held": "x"}, {"calls": [1]}, {"run": {"a": 1}}, {"held": None}, {"a\nb": 1}]
        for load in loads:
            with subtests.test(str(load)):
                answer = await it.http.post(f"/nodes/{NODE}/beat", json={"holding": [], "load": load})
                assert answer.status_code == 422, answer.text
                for path in ("/policy", "/engines", "/rollout/status", "/nodes", "/metrics"):
                    assert (await it.http.get(path)).status_code == 200, path


async def test_a_node_that_is_not_there_gets_and_ends_nothing(tmp_path: Path) -> None:
    async with leased(tmp_path) as (it, (lease, *_)):
        holding = [{"work_id": lease.work_id, "fence": lease.fence}]
        for node in ("nobody", "n", "N1", "n1 ", "%2e%2e", "n1%00", "*"):
            assert (await it.http.post(f"/nodes/{node}/lease", json={"holding": [], "room": 9})).status_code == 410
            assert (await it.http.post(f"/nodes/{node}/beat", json={"holding": holding})).status_code == 410
            assert (await it.http.put(f"/nodes/{node}/sessions", content=b"x")).status_code == 410
        counts = it.rollout.count_sessions()["default"]
        assert (counts["leased"], counts["done"]) == (3, 0)


def test_an_evaluators_reason_is_a_word() -> None:
    """The server takes no other; a node must not find that out when it is too late."""
    for reason in ("a\nb", "x" * 1000, "\x1b[31m"):
        with pytest.raises(GraderError, match="reason"):
            check_verdict(Verdict(None, reason), in_live_runtime=False)
    assert check_verdict(Verdict(None, "judge_failed"), in_live_runtime=False).reason == "judge_failed"


# Forged sessions


async def copied(data: Path, session_id: str, task_id: str) -> SessionCopy:
    """A good one."""
    talk = ConversationBuilder(session_id)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "List the files. " * 50}]
    context = np.arange(5, dtype=np.int32)
    for turn in range(3):
        talk.add_call(messages, make_text_parts(f"None {turn}."), prompt_ids=context)
        context = np.concatenate([context, np.arange(3, dtype=np.int32), np.array([7], np.int32)])
        messages += [{"role": "assistant", "content": f"None {turn}."}, {"role": "user", "content": "Again."}]
    store = open_sqlite_store(data / f"{session_id}.db")
    await store.create_session(Session(session_id, session_id.encode(), 1.0, metadata={"task_id": task_id}))
    for exchange in talk.exchanges:
        await store.append(exchange)
    made = session_copy.unpack(await store.export_session(session_id))
    await store.close()
    return made


def last(**fields: Any) -> Callable[[SessionCopy], None]:
    def change(copy: SessionCopy) -> None:
        copy.exchanges[-1] = replace(copy.exchanges[-1], **fields)

    return change


def session(**fields: Any) -> Callable[[SessionCopy], None]:
    def change(copy: SessionCopy) -> None:
        copy.session = replace(copy.session, **fields)

    return change


def piece(copy: SessionCopy) -> None:
    """Ends what it stands in, and goes on as it likes."""
    data = b'"x"}],"api_key":'
    copy.pieces[session_copy.compute_digest(data)] = data  # type: ignore[attr-defined]
    copy.exchanges[-1] = replace(copy.exchanges[-1], items=session_copy.compute_digest(data))  # type: ignore[attr-defined]


def inline(copy: SessionCopy) -> None:
    fields = msgspec.msgpack.encode({"model": (False, b'"m"},{"x":')})
    copy.exchanges[-1] = replace(copy.exchanges[-1], fields=fields)


NAN = float("nan")
FORGERIES: dict[str, Callable[[SessionCopy], None]] = {
    "born never": session(created_at=NAN),
    "ended never": session(ended_at=float("inf"), status="ended"),
    "a reward that is no number": session(reward=NAN),
    "a run that steers terminals": session(run="a\x1b[2J"),
    "a reason that no store keeps": session(reason="a\0"),
    "metadata that are none": session(metadata="[1]"),
    "rewards that are none": session(turn_rewards='{"a":1e999}'),
    "detail": last(detail="garbage"),
    "reply": last(reply="garbage"),
    "log-probabilities of a reply": last(reply_logprobs=b"\xc1"),
    "half a token of the prompt": last(prompt=b"\1"),
    "half a sampled token": last(sampled=b"\1\2\3"),
    "half a log-probability": last(logprobs=b"\1"),
    "more items than there are": last(shared_items=10**12),
    "fewer items than none": last(shared_items=-1),
    "more tokens than there are": last(shared_tokens=10**12),
    "fewer tokens than none": last(shared_tokens=-1),
    "before the first": last(seq=-1),
    "behind the last": last(seq=2**64 - 1),
    "delivered": last(delivered=2**63),
    "half an item": last(items=b"123"),
    "fields": last(fields=b"garbage"),
    "no request at all": last(fields=None, base=None, shared_items=0, shared_tokens=0),
    "a time that is none": last(started_at=NAN),
    "an id that no store keeps": last(exchange_id="a\0"),
    "a replica of two lines": last(replica="a\nb"),
    "a piece that is no JSON": piece,
    "a field that is no JSON": inline,
}


async def test_forged_sessions_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """With checksums that are right: whoever sends it made it so. Not 503: it would be sent again for ever."""
    async with served(tmp_path) as it:
        await it.join()
        original = session_copy.pack(await copied(tmp_path, "s", "t"))
        for name, forge in FORGERIES.items():
            with subtests.test(name):
                copy = session_copy.unpack(original)
                forge(copy)
                answer = await it.http.put(f"/nodes/{NODE}/sessions", content=session_copy.pack(copy))
                assert answer.status_code == 422, answer.text
                assert (await it.http.get("/sessions")).json() == []


async def test_a_session_takes_nothing_from_another_one(tmp_path: Path) -> None:
    """Its key is its own, and so are its calls."""
    async with served(tmp_path) as it:
        await it.join()
        theirs, mine = await copied(tmp_path, "theirs", "t"), await copied(tmp_path, "mine", "t")
        assert (await it.http.put(f"/nodes/{NODE}/sessions", content=session_copy.pack(theirs))).status_code == 200
        before = (await it.http.get("/sessions/theirs/exchanges")).content
        forged = [
            SessionCopy(replace(mine.session, key_hash=theirs.session.key_hash), mine.exchanges, mine.pieces),
            SessionCopy(
                mine.session,
                [replace(mine.exchanges[0], exchange_id=theirs.exchanges[0].exchange_id), *mine.exchanges[1:]],
                mine.pieces,
            ),
            SessionCopy(theirs.session, [replace(row, session_id="theirs") for row in mine.exchanges], mine.pieces),
            SessionCopy(replace(theirs.session, run="another"), theirs.exchanges, theirs.pieces),
        ]
        for copy in forged:
            answer = await it.http.put(f"/nodes/{NODE}/sessions", content=session_copy.pack(copy))
            assert answer.status_code == 422, answer.text
        assert (await it.http.get("/sessions/theirs/exchanges")).content == before
        assert (await it.http.get("/sessions/mine")).status_code == 404


async def test_one_damaged_session_hides_no_other_result(tmp_path: Path) -> None:
    """Not even one that was damaged in the store itself."""
    async with served(tmp_path) as it:
        await it.submit(*(task(f"t{number}") for number in range(4)))
        first, second, third, _ = await it.run_all()
        store: Any = it.store
        await store.transact(
            lambda db: [
                db.execute("UPDATE exchanges SET detail = 'garbage' WHERE session_id = :id", {"id": second}),
                db.execute("UPDATE sessions SET metadata = '[' WHERE session_id = :id", {"id": third}),
            ]
        )
        results, cursor = page_of(await it.http.get("/rollout/results"))
        assert [result["reason"] for result in results] == [None, "session_unreadable", "session_unreadable", None]
        assert "damaged" in results[1]["error"] or "malformed" in results[1]["error"]
        assert [result["cursor"] for result in results][-1] == cursor
        groups, _ = page_of(await it.http.get("/rollout/results?unit=group"))
        assert [len(group["results"]) for group in groups] == [1, 1, 1, 1]
        assert (await it.http.get(f"/sessions/{first}/exchanges")).status_code == 200
        assert (await it.http.get(f"/sessions/{second}/exchanges")).status_code == 503


async def test_metadata_that_go_deep(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.join()
        for depth, status in ((90, 200), (200, 422), (900, 422)):
            body = b'{"metadata":{"a":%b}}' % (b"[" * depth + b"]" * depth)
            assert (await it.http.post("/sessions", content=body, headers=JSON)).status_code == status
        copy = await copied(tmp_path, "s", "t")
        session(metadata='{"task_id":"t","a":%s}' % ("[" * 800 + "]" * 800))(copy)
        await it.http.put(f"/nodes/{NODE}/sessions", content=session_copy.pack(copy))
        for path in ("/sessions", "/sessions/s"):
            assert (await it.http.get(path)).status_code == 200, path


# Callers without end


async def test_strangers_are_sent_away_before_they_have_sent_anything(tmp_path: Path) -> None:
    """Whoever has no token gets no memory: what was announced is never waited for."""
    async with served(tmp_path, token=TOKEN, node_token=NODE_TOKEN) as it, listening(it.app) as url:
        _, key = await it.sessions.create({})
        for path in ("/rollout/task/submit", "/rollout/tasks", "/sessions", "/policy", "/engines", "/nodes/join"):
            for headers in ({}, {"Authorization": f"Bearer {key}"}, {"x-api-key": TOKEN}):
                async with Wire.open(url) as wire:
                    await wire.send(wire.head("POST", path, JSON | headers, 60_000_000) + b"{")
                    assert (await wire.answer()).status == 401, path
                async with Wire.open(url) as wire:
                    endless = JSON | headers | {"Transfer-Encoding": "chunked"}
                    await wire.send(wire.head("POST", path, endless) + b"1\r\n{\r\n")
                    assert (await wire.answer()).status == 401, path


async def test_lengths_that_can_be_read_in_two_ways(tmp_path: Path) -> None:
    """A request must not hide another one behind its end."""
    hidden = b"GET /nodes HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    heads = [
        {"Content-Length": "5", "Transfer-Encoding": "chunked"},
        {"Transfer-Encoding": "chunked, identity"},
        {"Transfer-Encoding": "xchunked"},
        {"Content-Length": "+5"},
        {"Content-Length": "5, 5"},
        {"Content-Length": "-1"},
        {"Content-Length": "0x5"},
        {"Content-Length": "9" * 400},
    ]
    async with served(tmp_path) as it, listening(it.app) as url:
        for headers in heads:
            async with Wire.open(url) as wire:
                await wire.send(wire.head("POST", "/sessions", JSON | headers) + b"0\r\n\r\n" + hidden)
                answer = await wire.answer()
                assert 400 <= answer.status < 500, (headers, answer)
                rest = await asyncio.wait_for(wire.reader.read(1000), 120)
                assert b" 200 " not in rest, headers


MANY = 150


async def test_many_who_wait_keep_nobody_else_waiting(tmp_path: Path) -> None:
    """Streams of events that are not read, long polls, bodies that never end, and heads that don't either."""
    async with served(tmp_path) as it, listening(it.app) as url, AsyncExitStack() as stack:
        for number in range(MANY):
            for start in (
                f"GET /events?run=r{number} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
                "GET /rollout/results?wait=60&after=99 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
                "POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{",
                "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow",
            ):
                wire = await stack.enter_async_context(Wire.open(url))
                await wire.send(start.encode())
        await comes_true(lambda: len(it.rollout.events._listeners) >= MANY)
        async with aiohttp.ClientSession() as http:
            for path in ("/health", "/rollout/status", "/rollout/results", "/metrics"):
                async with http.get(url + path) as answer:
                    assert answer.status == 200, path
        for number in range(2000):  # more than a listener may leave unread
            it.rollout.events.publish("task.submitted", run=f"r{number % MANY}", task_id="x" * 200)
        async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as answer:
            assert answer.status == 200
        await stack.aclose()
        await comes_true(lambda: len(it.rollout.events._listeners) < 5)  # what is ours listens on


# Addresses

ELSEWHERE = [
    "http://localhost.evil.example/",
    "http://127.0.0.1.evil.example/",
    "http://evil.example#@127.0.0.1/",
    "http://evil.example\\@127.0.0.1/",
    "http://127.0.0.1\\@evil.example/",
    "http://127.0.0.1:80@evil.example/",
    "http://user:password@127.0.0.1/",
    "http://@127.0.0.1/",
    "http://169.254.169.254/latest/meta-data",
    "http://[::ffff:169.254.169.254]/",
    "http://[fe80::1%25eth0]/",
    "http://0.0.0.0/",
    "http://0/",
    "http://[::]/",
    "http://2852039166/",  # 169.254.169.254
    "http://0xa9fea9fe/",
    "http://0251.0376.0251.0376/",
    "http://10.1/",
    "http://xn--/",
    "http://ⓔvil.example/",
    "http://127。0。0。1.evil.example/",
    "http://evil.example:80/",
    "//evil.example/",
    "file:///etc/passwd",
    "gopher://127.0.0.1/",
    "http+unix://127.0.0.1/",
    "HTTP://EVIL.EXAMPLE/",
    "http:/evil.example",
    "http:evil.example",
    "http:///evil.example",
    "http://[127.0.0.1",
    "http://127.0.0.1:99999/",
    "http://127.0.0.1:x/",
    "http://127.0.0.1\n.evil.example/",
    "http://127.0.0.1/\r\nX-Header: 1",
    "",
]


@pytest.mark.parametrize("url", ELSEWHERE)
@pytest.mark.parametrize("hosts", [[], ["trainer.internal", "10.0.0.7:9000"]])
def test_callbacks_go_nowhere_else(url: str, hosts: list[str]) -> None:
    allowed = AllowedHosts(ServerSettings.model_validate({"callback_hosts": hosts}))
    assert allowed.find_problem(url) is not None
    assert allowed.find_problem("http://trainer.internal.evil.example/") is not None
    assert allowed.find_problem("http://10.0.0.7:9001/") is not None
    assert (allowed.find_problem("http://Trainer.Internal:1234/x?y=z") is None) == bool(hosts)
    assert (allowed.find_problem("http://127.0.0.1:5/x") is None) == (not hosts)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_callbacks_follow_nobody(tmp_path: Path, code: int) -> None:
    """Not even to where they might have been sent at first; and nobody is told a token."""
    heard: list[tuple[str, str]] = []
    ways: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.append((head.split(" ")[1], head))
        writer.write(f"HTTP/1.1 {code} X\r\nLocation: {ways[0]}/private\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    receiver = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with receiver, served(tmp_path, token=TOKEN, callback_hours=1e-9) as it:
        ways.append(f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}")
        await it.submit(task(callback_url=f"{ways[0]}/told?secret=of-the-receiver"))
        await it.run_all()
        await comes_true(lambda: any(event.kind == "callback.failed" for event in it.rollout.events._remembered))
        failed = next(event for event in it.rollout.events._remembered if event.kind == "callback.failed")
        assert {path for path, _ in heard} == {"/told?secret=of-the-receiver"}
        assert not [head for _, head in heard if TOKEN in head or "authorization" in head.lower()]
        assert f"{ways[0]}/told answered {code}" in failed.fields["error"]
        assert "of-the-receiver" not in failed.fields["error"]


BAD_ENGINES = [
    "http://user:password@engine/",
    "http://@engine",
    "http://engine?key=secret",
    "http://engine/#x",
    "http://[::1",
    "http://engine:99999",
    "http://engine:x",
    "http://engine:0",
    "http://?",
    "http:///v1",
    "file:///etc/passwd",
    "engine",
    "http://en gine",
    "http://engine\n",
    "http://ⓔngine",
    "http://" + "x" * 3000,
]


async def test_engines_addresses_are_plain(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """They are shown, logged and sent to every node."""
    async with served(tmp_path) as it:
        for url in BAD_ENGINES:
            with subtests.test(url):
                answer = await it.http.post("/engines", json={"url": url, "run": "r"})
                assert answer.status_code == 422, answer.text
                assert "password" not in answer.text.replace("a name or a password", "")
                assert "secret" not in answer.text
                assert (await it.http.get("/engines?run=r")).json()["replicas"][0]["url"] == "http://127.0.0.1:1"


# Names

NAMES = [
    "a\nb",
    "a\r\ndata: {}\r\n\r\n",
    "\x1b[31mred",
    "a\0b",
    "\u202etxt.exe",
    "\u2028",
    "",
    "x" * 201,
]
ODD_NAMES = [
    '"}\\n polar_work 7',
    'a",run="b',
    "[red]x[/red]",
    "[/]",
    "[link=http://evil.example]x[/link]",
    "=cmd|' /C calc'!A0",
    "...",
    "%2e%2e%2f",
    "?x=1#y",
    "a//b",
    "/a",
    "a/",
    "a b+c&d=e",
    "{}",
    "%s %d {0}",
    "submit",
    "😀" * 50,
    "<script>alert(1)</script>",
]


async def test_names_that_are_none(tmp_path: Path, subtests: pytest.Subtests) -> None:
    async with served(tmp_path) as it:
        for name in NAMES:
            calls: list[tuple[str, dict[str, Any]]] = [
                ("/rollout/task/submit", task(name)),
                ("/rollout/task/submit", task(run=name)),
                ("/sessions", {"run": name}),
                ("/engines", {"url": "http://127.0.0.1:1", "run": name}),
            ]
            if name and len(name) < 200:
                joining = {"node_id": name, "name": name, "backends": [name], "slots": 1, "store": "s"}
                calls.append(("/nodes/join", joining))
            with subtests.test(repr(name)):
                for path, body in calls:
                    assert (await it.http.post(path, json=body)).status_code == 422, path
                assert (await it.http.get("/rollout/results", params={"consumer": name})).status_code == 422


async def test_tasks_that_could_not_be_asked_for(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Clients make another path of such a one: it could be another task's."""
    async with served(tmp_path) as it:
        for name in ("..", ".", "../../etc/passwd", "a/../b", "a/.", "./a"):
            with subtests.test(name):
                answer = await it.http.post("/rollout/task/submit", json=task(name))
                assert answer.status_code == 422
                assert "clients shorten" in answer.json()["detail"]


async def test_odd_names_stay_what_they_are(tmp_path: Path) -> None:
    """In the feed, in events, in metrics, in paths, in tables."""
    async with running(tmp_path, server=PATIENT) as it, aiohttp.ClientSession() as http:
        url, rollout = it.service.control_url, it.service.rollout
        events = await http.get(f"{url}/events")
        for number, name in enumerate(ODD_NAMES):
            joining = {"node_id": f"n{number}", "name": name, "backends": ["local"], "slots": 1, "store": "s"}
            async with http.post(f"{url}/nodes/join", json=joining) as answer:
                assert answer.status == 200, name
        async with AsyncClient(url) as client:
            for name in ODD_NAMES:
                async with http.post(f"{url}/rollout/task/submit", json=task(name, run=name)) as answer:
                    assert answer.status == 200, (name, await answer.text())
            leases = [await rollout.lease_manager.lease(f"n{number}", [], 1) for number in range(len(ODD_NAMES))]
            assert {lease.task_id for (lease,) in leases} == set(ODD_NAMES)
            for number, (lease,) in enumerate(leases):
                end = SessionOutcome(lease.work_id, lease.fence, None, reason=lease.task_id)
                assert await rollout.lease_manager.finish(f"n{number}", [end]) == ["taken"]
            for name in ODD_NAMES:
                async with AsyncClient(url, run=name) as own:
                    assert (await own.task(name)).task_id == name
                async with http.get(f"{url}/rollout/results", params={"run": name}) as answer:
                    (result,) = (await answer.json())["results"]
                assert (result["task_id"], result["reason"], result["metadata"]["run"]) == (name, name, name)
            status = await client.status()
        heard = b""
        while heard.count(b"event: task.ended") < len(ODD_NAMES):
            heard += await asyncio.wait_for(events.content.readany(), 120)
        events.close()
        kinds = {"task.submitted", "task.ended", "session.leased", "session.ended", "node.joined", "policy.changed"}
        ended_tasks = []
        for event in heard.removeprefix(b": listening\n\n").strip().split(b"\n\n"):
            _, kind, data = event.split(b"\n")
            told = json.loads(data.removeprefix(b"data: "))
            assert kind.decode().removeprefix("event: ") in kinds
            ended_tasks += [told["task_id"]] if kind == b"event: task.ended" else []
        assert set(ended_tasks) == set(ODD_NAMES)
        async with http.get(f"{url}/metrics") as answer:
            families = {one.name: one for one in text_string_to_metric_families(await answer.text())}
        assert {row.labels["node"] for row in families["polar_node_slots"].samples} == set(ODD_NAMES)
        assert {row.value for row in families["polar_node_slots"].samples} == {1.0}
        check_tables(status)


def check_tables(status: dict[str, Any]) -> None:
    """As `polar status` shows it: every name as it is, and nothing that a terminal would do."""
    output = io.StringIO()
    console = Console(file=output, width=400, force_terminal=True, color_system=None)
    for node in status["nodes"]:
        node["load"] = {"run": "[/]\x1b[31m"}
    console.print(status_command._make_run_table(status["runs"]))
    console.print(status_command._make_node_table(status["nodes"]))
    rows = [{"sample": 0, "state": "leased", "attempt": 1, "node": name} for name in ["\x1b]0;x\x07", *ODD_NAMES]]
    shown = TaskStatus.model_validate({"task_id": "t", "status": "running", "sessions": rows})
    console.print(status_command._make_session_table(shown.sessions))
    assert "\x1b" not in output.getvalue()
    for name in ODD_NAMES:
        assert output.getvalue().count(name) >= 3, name


def test_a_refusal_does_not_steer_the_terminal(tmp_path: Path) -> None:
    runner = CliRunner()
    with runner.isolation() as (_, errors, _):
        assert _report_refused([SubmitAnswer(task_id="t", error="\x1b[2J", code=422)]) == 1
        assert b"\x1b" not in errors.getvalue()
        assert b"was refused" in errors.getvalue()


# Secrets


async def test_tokens_and_keys_are_told_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is asked, rightly and wrongly, with the secrets in every place where somebody might put them."""
    caplog.set_level(logging.DEBUG)
    async with running(
        tmp_path, engine={}, server={"token": TOKEN, "node_token": NODE_TOKEN, "beat_seconds": 0.05}
    ) as it:
        url, secrets = it.service.control_url, (TOKEN, NODE_TOKEN, it.key)
        told: list[bytes] = []
        admin = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession() as http:
            async with http.get(f"{url}/openapi.json", headers=admin) as answer:
                document = await answer.json()
                told.append(await answer.read())
            joining = {"node_id": "n", "name": "n", "backends": ["local"], "slots": 1, "store": "s"}
            bodies: list[Any] = [{}, [], joining, task(), {"version": 1}, {"holding": [], "room": 0}]
            for path, methods in document["paths"].items():
                if path in ("/events", "/policy/pause"):
                    continue
                for method in methods:
                    for secret in (*secrets, "wrong"):
                        headers = [{"Authorization": f"Bearer {secret}"}, {"x-api-key": secret}, {"Cookie": secret}]
                        for header in headers:
                            body = bodies[len(told) % len(bodies)] if method in ("post", "put") else None
                            place = path.replace("{", "").replace("}", "")
                            async with http.request(method, url + place, headers=header, json=body) as answer:
                                assert answer.status < 500, (method, path)
                                told.append(str(answer.headers).encode() + await answer.read())
        for secret in secrets:
            assert not [one for one in told if secret.encode() in one]
            assert secret not in caplog.text
    for file in filter(Path.is_file, tmp_path.rglob("*")):  # noqa: ASYNC240
        for secret in secrets:
            assert secret.encode() not in file.read_bytes(), file


async def test_what_is_open_to_all_says_little(tmp_path: Path) -> None:
    async with running(tmp_path, server={"token": TOKEN}) as it, aiohttp.ClientSession() as http:
        async with http.get(f"{it.service.control_url}/health") as answer:
            health = await answer.json()
        assert health.keys() == {"status", "reason", "paused", "sessions", "engines"}
        assert health["reason"] is None
        assert all(engine.keys() == {"down", "running"} for engine in health["engines"])


def test_rows_are_all_checked() -> None:
    """A column that is new is to be looked at in store.session_copy, too."""
    assert len(SessionRow.__struct_fields__) == 11
    assert len(ExchangeRow.__struct_fields__) == 30
