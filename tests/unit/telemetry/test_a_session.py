"""A session in a real node, watched: its log at debug level, its spans, and its engine's gauges."""

import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from polar.config import Settings
from polar.engines.scripted import ScriptedServer
from polar.node.finished_session import FinishedSession
from polar.node.local import LocalRollout
from polar.service import Service
from polar.telemetry import logs, tracing
from polar.telemetry.redaction import collect_secrets
from tests.integration.agents import task
from tests.integration.test_cli import polar
from tests.unit.store.servers import postgres_server
from tests.unit.telemetry.collector import attributes, collector

ADMIN, NODE, ENGINE, JUDGE, PASSWORD = "admin-token-1", "node-token-2", "engine-key-3", "judge-key-4", "pass word@5"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers = handlers
    root.setLevel(level)


def settings(engine: str, **sections: dict[str, Any]) -> Settings:
    known: dict[str, dict[str, Any]] = {
        "engine": {"kind": "scripted", "urls": [engine], "api_key": ENGINE},
        "gateway": {"port": 0},
        "server": {"port": 0, "token": ADMIN, "node_token": NODE},
        "judges": {"one": {"url": "http://127.0.0.1:9", "model": "m", "api_key": JUDGE}},
    }
    return Settings.model_validate(known | sections)


@asynccontextmanager
async def engine() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(None) as server:
        yield server


async def run(config: Settings, data: Path, code: str) -> FinishedSession:
    async with LocalRollout(config, data) as rollout:
        plans = await rollout.plan([task(code, evaluator={"strategy": "session_completed"}, run="watched")])
        (finished,) = [finished async for finished in rollout.run(plans)]
        return finished


CALLS = "ask(); print(os.environ['OPENAI_API_KEY'])"
BAD_CALL = """
try: ask(temperature="hot")
except urllib.error.HTTPError: pass
"""


@pytest.mark.parametrize("form", ["text", "json"])
async def test_no_secret_is_logged(tmp_path: Path, form: logs.LogFormat, capfd: pytest.CaptureFixture[str]) -> None:
    """In a process that hides nothing: what is not logged need not be hidden."""
    with postgres_server() as postgres:  # it takes any password
        url = postgres.url.replace("postgresql://postgres:", f"postgresql://postgres:{quote(PASSWORD)}")
        assert quote(PASSWORD) in url
        async with engine() as server:
            config = settings(server.url, store={"url": url})
            logs.configure(form, "debug")
            finished = await run(config, tmp_path / "data", CALLS + BAD_CALL)
            key = _key(finished)
            async with Service(config, tmp_path / "served") as service, aiohttp.ClientSession() as http:
                for token in (ADMIN, NODE, "wrong"):
                    headers = {"Authorization": f"Bearer {token}"}
                    async with http.get(f"{service.control_url}/sessions", headers=headers) as answer:
                        assert answer.status == (200 if token == ADMIN else 401)
                async with http.get(f"{service.gateway_url}/s/{key}/v1/nothing?key={key}") as answer:
                    assert answer.status == 404
    assert finished.verdict.reward == 1
    told = capfd.readouterr().err
    assert f"session {finished.session_id} is in run" in told  # at debug level
    for secret in (ADMIN, NODE, ENGINE, JUDGE, PASSWORD, quote(PASSWORD), key):
        assert secret not in told


def _key(finished: FinishedSession) -> str:
    (line,) = [
        line for line in (finished.folder / "agent.log").read_text().splitlines() if line.startswith("sk-polar-")
    ]
    return line


async def test_lines_of_a_session_and_its_calls_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async with engine() as server:
        config = settings(server.url)
        logs.configure("json", "debug", collect_secrets(config))
        finished = await run(config, tmp_path, "ask()")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert finished.turns == 1
    own = [line for line in lines if line.get("session_id") == finished.session_id]
    assert {(line["task_id"], line["run"]) for line in own} == {("a-task", "watched")}
    calls = [line for line in own if "exchange_id" in line]
    assert [line["message"].split()[0] for line in calls] == ["exchange"]
    stages = [line for line in own if "node_id" in line]
    told = [line["message"].rpartition(" ")[2] for line in stages if line["level"] == "debug"]
    assert told == ["init", "ready", "run", "postrun"]
    assert [line["message"] for line in stages if line["level"] == "info"] == [
        f"session {finished.session_id} has ended: 1.0"
    ]


async def test_a_session_and_its_calls_are_spans(tmp_path: Path) -> None:
    async with engine() as server, collector() as it:
        config = settings(server.url)
        async with tracing.export_traces(it.url, provider=config.engine.kind):
            finished = await run(config, tmp_path / "good", "ask('words that nobody else is to read'); ask()")
            failed = await run(config, tmp_path / "bad", "sys.exit(3)")
        calls = [span for span in it.spans if span.name == "chat m"]
        first, second = [span for span in it.spans if span.name == "invoke_agent shell"]
        assert attributes(first)["gen_ai.conversation.id"] == finished.session_id
        assert attributes(first)["polar.reward"] == 1
        assert [(span.trace_id, span.parent_span_id) for span in calls] == 2 * [(first.trace_id, first.span_id)]
        stages = [span.name for span in it.spans if span.parent_span_id == first.span_id and span.name.isupper()]
        assert stages == ["INIT", "READY", "RUN", "POSTRUN"]
        run_span = next(span for span in it.spans if span.parent_span_id == first.span_id and span.name == "RUN")
        for span in calls:
            told = attributes(span)
            assert told["gen_ai.usage.output_tokens"] > 0
            assert told["gen_ai.response.finish_reasons"] == ["stop"]
            assert told["server.port"] == int(server.url.rpartition(":")[2])
            assert run_span.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= run_span.end_time_unix_nano
        assert failed.verdict.reason == attributes(second)["error.type"] == "harness_failed"
        assert "words that nobody" not in str(it.spans)
        assert not [secret for secret in (ADMIN, ENGINE, "sk-polar-") if secret in str(it.spans)]


def test_the_command_line_says_how_the_log_is_written(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(task(BAD_CALL).model_dump_json(exclude_defaults=True))
    done = polar("run", "one.json", "--json", "--log-format", "json", "--log-level", "info", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task_id"] == "a-task"
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert {"info", "warning"} == {line["level"] for line in lines}
    assert [line for line in lines if "got an error (invalid_request)" in line["message"]]
