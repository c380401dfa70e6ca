"""Stores as earlier versions of Polar left them, with what those versions made of them.

    python -m tests.recorded_stores tests/data/stores/NAME

records one with the version that is checked out: a SQLite file, the dump of a PostgreSQL database, and for each of
them what every exporter writes, what `polar verify` says and what the control plane shows. A later version must open
both and give the same bytes (tests/unit/store/test_recorded_stores.py).
"""

import asyncio
import io
import json
import lzma
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psycopg
from click.testing import CliRunner

from polar.cli.main import cli
from polar.engines.scripted import TOKENIZER_FOLDER, PlaySet, ScriptedServer, ScriptedTurn
from polar.engines.scripted.play import TurnContext
from polar.gateway.data_plane import DataPlane
from polar.plugins import list_names
from polar.records.exchange import Exchange, StartedCall
from polar.records.session import Evidence, Session, Verdict
from polar.store import open_store
from polar.store.base import Store
from polar.testing.conversations import ConversationBuilder, make_text_parts
from tests import captures
from tests.integration.stack import settings
from tests.unit.rollout.served import Served, served, task
from tests.unit.store.places import Place
from tests.unit.store.samples import exchange, wire
from tests.unit.store.servers import postgres_server

FOLDER = Path(__file__).parent / "data" / "stores"

REPLAYED = (
    *("agents", "codex_compact", "lang_stream", "mswe_text"),
    *("opencode_sub", "pi_anthropic", "pi_google", "pi_openai"),
)
"""Captures of harnesses whose requests are sent again: four dialects, a sub-agent, a compaction."""

DAMAGED = "s-grpo-3"
"""A session of the finished group, one of whose rows says what can't be true: it is held back."""

BUILDERS = ("prefix_merging", "per_request")
DEFAULT_FORMAT_OPTIONS: dict[str, list[str]] = {"sft-tokens": ["--tokenizer", str(TOKENIZER_FOLDER)]}


def databases(recording: Path) -> tuple[Path, Path]:
    """The SQLite file and the SQL of the PostgreSQL database, both compressed."""
    return recording / "polar.db.xz", recording / "postgresql.sql.xz"


def expected_documents(recording: Path, kind: str) -> dict[str, bytes]:
    """What the version that recorded it made of it, by name."""
    with tarfile.open(recording / f"{kind}.tar.xz") as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


# What is made of a store


def exports_and_verdicts(store_url: str, work: Path) -> dict[str, bytes]:
    """What every exporter and `polar verify` make of it, by name. `work` is an empty folder."""
    made = {"verify.json": run_cli(store_url, "verify", "--json")}
    for name in list_names("exporters"):
        builders = BUILDERS if name == "polar" else BUILDERS[:1]
        for builder in builders:
            output = work / f"{name}.{builder}"
            options = [] if name == "tree" else ["--builder", builder]
            options += DEFAULT_FORMAT_OPTIONS.get(name, [])
            said = run_cli(store_url, "export", "--format", name, *options, "-o", str(output), "--json")
            made[f"export/{output.name}.json"] = said.replace(str(output).encode(), b"OUTPUT")
            for path in [output] if output.is_file() else sorted(path for path in output.rglob("*") if path.is_file()):
                made[f"export/{path.relative_to(work)}"] = path.read_bytes()
    return made


def run_cli(store_url: str, *arguments: str) -> bytes:
    """Standard output of a command whose store is there."""
    ended = CliRunner().invoke(cli, arguments, env={"POLAR_STORE__URL": store_url})
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.stdout_bytes


SHOWN = {
    "results": "/rollout/results",
    "groups": "/rollout/results?unit=group&builder=per_request",
    "task-grpo": "/rollout/task/grpo",
    "task-mixed": "/rollout/task/mixed?run=other",
    "task-waiting": "/rollout/task/waiting",
    "tree": "/rollout/task/grpo/trajectory",
    "sessions": "/sessions",
}


async def shown_documents(store_url: str, data: Path) -> dict[str, bytes]:
    """What the control plane answers, by name."""
    made = {}
    async with served(data, store_url=store_url) as it:
        for name, path in SHOWN.items():
            answer = await it.http.get(path)
            assert answer.status_code == 200, answer.text
            made[f"shown/{name}.json"] = answer.content
        for session in await it.store.list_sessions():
            answer = await it.http.get(f"/sessions/{session.session_id}/exchanges")
            made[f"shown/exchanges/{session.session_id}.json"] = answer.content
    return made


# How one is recorded


async def fill(store_url: str, data: Path) -> None:
    await replay_captures(store_url, data)
    store = open_store(store_url)
    await store_by_hand(store)
    await store.close()
    async with served(data, store_url=store_url) as it:
        await run_tasks(it)
    Place(store_url).execute(f"UPDATE exchanges SET delivered = 99 WHERE session_id = '{DAMAGED}' AND seq = 1")


class _Turns(PlaySet):
    """A turn for each call, in whatever session it is."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def next_turn(self, context: TurnContext) -> ScriptedTurn:
        self._count += 1
        text = f"Turn {self._count}: Ünïcode \U0001f600 and 'quotes'."
        return ScriptedTurn(reasoning=f"Thought {self._count}." if self._count % 3 else "", text=text)


async def replay_captures(store_url: str, data: Path) -> None:
    async with ScriptedServer(_Turns()) as engine:
        chosen = settings([engine.url], store={"url": store_url}, engine={"render": "gateway"})
        async with DataPlane(chosen, data) as plane, aiohttp.ClientSession() as http:
            for number, name in enumerate(REPLAYED):
                session, key = await plane.sessions.create({"task_id": f"replay-{number % 3}", "sample": number // 3})
                for record in {record["n"]: record for record in captures.load(name)}.values():
                    agent = {key: value for key, value in record["headers"] if key.lower() == "user-agent"}
                    url = f"{plane.gateway_url}{record['path']}?{record['query']}"
                    await _call(http, url, record["body"], agent | {"x-api-key": key})
                verdicts = (Verdict(1.0), Verdict(0.25), Verdict(reason="timeout"), Verdict(0.0))
                await plane.sessions.end(session.session_id, verdicts[number % len(verdicts)])
            session, key = await plane.sessions.create({"task_id": "conversation"})
            messages: list[Any] = [{"role": "user", "content": "Begin."}]
            for _ in range(4):
                body = {"model": "m", "messages": messages}
                answer = await _call(http, f"{plane.gateway_url}/v1/chat/completions", body, {"x-api-key": key})
                messages += [json.loads(answer)["choices"][0]["message"], {"role": "user", "content": "Go on."}]
            await plane.sessions.end(session.session_id, Verdict(0.75))


async def _call(http: aiohttp.ClientSession, url: str, body: Any, headers: dict[str, str]) -> bytes:
    async with http.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


async def store_by_hand(store: Store) -> None:
    """What captures don't show: roles by name, rewards of turns, evidence, calls that were cut or never ended."""
    talk = ConversationBuilder("team")
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Lead."}, {"role": "user", "content": "Do it all."}]
    talk.add_call(messages, make_text_parts("I delegate."))
    talk.add_call([{"role": "user", "content": "Look it up."}], make_text_parts("Found."), role="subagent")
    talk.add_call(
        [*messages, {"role": "assistant", "content": "I delegate."}],
        make_text_parts("Done."),
        delivered=2,
        status="partial",
    )
    talk.add_call(
        [{"role": "user", "content": "Name this."}],
        make_text_parts("A name."),
        role="auxiliary",
        untrainable="structured_output",
    )
    await store.create_session(
        Session("team", b"team", 1_700_000_000.0, metadata={"task_id": "by-hand", "sample": 0, "roles": talk.roles})
    )
    for one in talk.exchanges:
        await store.append(one)
    rewards = {one.exchange_id: 0.5 + index for index, one in enumerate(talk.exchanges[:2])}
    evidence = [Evidence("test_edited", "tests/test_a.py", True, "changed"), Evidence("grader_path", "/tests", count=3)]
    await store.end_session(
        "team", ended_at=1_700_000_050.0, verdict=Verdict(0.5, turn_rewards=rewards, evidence=evidence)
    )

    await store.create_session(Session("every-field", b"every-field", 1_700_000_100.0, metadata={"task": [1]}))
    for seq, words in enumerate((["one"], ["one", "two"], ["three"])):
        await store.append(_every_field("every-field", seq, words))
    await store.record_interrupted(
        [StartedCall("cut-off", "every-field", 3, "openai_chat", "messages", "m", 1_700_000_110.0, 1234)]
    )
    await store.end_session("every-field", ended_at=1_700_000_150.0, verdict=Verdict(reason="node_lost"))
    await store.create_session(Session("still-open", b"still-open", 1_700_000_200.0))
    await store.append(_every_field("still-open", 0, ["hello"]))
    await store.set_policy_versions({"http://127.0.0.1:1": 7})


def _every_field(session_id: str, seq: int, words: list[str]) -> Exchange:
    """With a value in every column, and log-probabilities that are none where `seq` is odd."""
    items = [json.dumps({"role": "user", "content": word}).encode() for word in words]
    nan = seq % 2 == 1
    return exchange(
        session_id,
        seq,
        items,
        raw_request=wire(items, tools=ConversationBuilder.TOOLS.encode()),
        logprobs=np.array([-0.1, np.nan if nan else -0.5, -2.0], np.float32),
        untrainable="logprobs_nan" if nan else None,
    )


async def run_tasks(it: Served) -> None:
    """A finished group, one of mixed ends in another run, one that is under way and one that nobody began."""
    await it.join()
    await it.submit(task("grpo", num_samples=4, metadata={"split": "train"}))
    for lease, reward in zip(await it.work(), (1.0, 0.0, 0.5, 1.0), strict=True):
        await it.run(lease, turns=3, reward=reward)
    await it.submit(task("mixed", num_samples=3, run="other", semantics="nvidia"))
    first, second, third = await it.work()
    forged = [Evidence("results_forged", "report.xml", True, "written by the agent")]
    await it.run(first, reward=0.0, evidence=forged, dialect="openai_chat")
    await it.run(second, reward=None, reason="timeout")
    await it.run(third, reward=1.0, dialect="openai_completions")
    await it.submit(task("under-way", num_samples=2))
    await it.work(room=1)
    await it.submit(task("waiting", num_samples=2, dispatch_priority=7))


def record(recording: Path) -> None:
    recording.mkdir(parents=True)
    file, dump = databases(recording)
    with tempfile.TemporaryDirectory() as name, postgres_server() as server:
        work = Path(name)
        asyncio.run(fill(f"sqlite:{work}/polar.db", work / "sqlite"))
        with closing(sqlite3.connect(work / "polar.db")) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("VACUUM")
        file.write_bytes(lzma.compress((work / "polar.db").read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        _save_documents(recording, "sqlite", f"sqlite:{work}/polar.db", work / "documents-sqlite")

        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE recorded")
        url = server.url.replace("/postgres?", "/recorded?")
        asyncio.run(fill(url, work / "postgresql"))
        dump.write_bytes(lzma.compress(_run_tool("pg_dump", "--no-owner", "--no-privileges", url)))
        _save_documents(recording, "postgresql", url, work / "documents-postgresql")


def _save_documents(recording: Path, kind: str, store_url: str, work: Path) -> None:
    work.mkdir()
    made = exports_and_verdicts(store_url, work) | asyncio.run(shown_documents(store_url, work / "data"))
    with tarfile.open(recording / f"{kind}.tar.xz", "w:xz", preset=9) as archive:
        for name, data in sorted(made.items(), key=lambda one: (one[1][:64], one[0])):  # alike ones beside each other
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def restore(recording: Path, folder: Path, server_url: str | None = None) -> str:
    """The URL of a copy: a SQLite file in `folder`, or a new database of the server."""
    file, dump = databases(recording)
    if server_url is None:
        copy = folder / "polar.db"
        copy.write_bytes(lzma.decompress(file.read_bytes()))
        return f"sqlite:{copy}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE restored")
    url = server_url.replace("/postgres?", "/restored?")
    _run_tool("psql", "--quiet", "--set", "ON_ERROR_STOP=1", url, text=lzma.decompress(dump.read_bytes()))
    return url


def _run_tool(name: str, *arguments: str, text: bytes | None = None) -> bytes:
    """A program of PostgreSQL's, of the version that the tests' server has."""
    from pgserver._commands import POSTGRES_BIN_PATH

    ended = subprocess.run([POSTGRES_BIN_PATH / name, *arguments], input=text, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


if __name__ == "__main__":
    record(Path(sys.argv[1]))
