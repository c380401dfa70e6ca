"""polar.capture, as programs use it: a real gateway and store, the scripted engine, the official OpenAI client."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import polar
from polar.api.capture import CaptureSession
from polar.config import Settings
from polar.errors import ConfigError, PolarError, StoreError
from polar.store import open_store
from polar.testing.fixtures import scripted_engine
from polar.testing.gateway import ScriptedEngineServer

__all__ = ["scripted_engine"]

AGENT = """
import openai, os
client = openai.OpenAI(max_retries=0)
reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=[{"role": "user", "content": "Hi."}])
print(reply.choices[0].message.content)
"""


def ask(session: CaptureSession, *messages: str) -> str:
    with openai.OpenAI(api_key=session.api_key, base_url=session.base_urls["openai"], max_retries=0) as client:
        turns = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(messages)]
        reply = client.chat.completions.create(model=session.model, messages=turns)  # type: ignore[call-overload]
    return str(reply.choices[0].message.content)


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    yield
    assert [one.name for one in threading.enumerate() if one.name == "polar-capture"] == []


def test_calls_become_a_trajectory(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    scripted_engine.play("One.", "Two.")
    with polar.capture(scripted_engine.url, data=tmp_path, metadata={"purpose": "test"}) as session:
        assert ask(session, "Count.") == "One."
        first = session.trajectory()
        assert len(first.traces) == 1
        assert ask(session, "Count.", "One.", "Go on.") == "Two."
        inside = session.result()
        assert (inside.reward, inside.reason, session.reward) == (None, None, None)
        session.reward = 0.5
    result = session.result()
    assert isinstance(result, polar.SessionResult)
    assert (result.session_id, result.status, result.reward) == (session.session_id, "COMPLETED", 0.5)
    assert result.metadata["purpose"] == "test"
    (trace,) = session.trajectory().traces
    assert isinstance(trace, polar.Trace)
    assert (sum(trace.loss_mask), trace.reward) == (session.trajectory().tokens.trainable, 0.5)
    assert trace.prompt_messages == [{"role": "user", "content": "Count."}]
    assert [message["content"] for message in trace.response_messages] == ["One.", "Go on.", "Two."]
    assert len(session.trajectory("per_request").traces) == 2
    assert session.trajectory("prefix_merging") == result.trajectory


def test_the_key_dies_with_the_block(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    with polar.capture(scripted_engine.url, data=tmp_path) as session:
        ask(session, "Hello.")
        assert session.api_key not in repr(session)
    with pytest.raises(openai.APIConnectionError):
        ask(session, "Hello.")
    with pytest.raises(PolarError, match="has ended: its reward can't be changed"):
        session.reward = 1.0


async def test_the_store_keeps_what_the_session_says(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    with polar.capture(scripted_engine.url, data=tmp_path, model="mine") as session:
        await asyncio.to_thread(ask, session, "Hello.")
        session.reward = 1
    store = open_store(f"sqlite:{tmp_path / 'polar.db'}")
    try:
        kept = await store.session(session.session_id)
    finally:
        await store.close()
    assert kept is not None
    assert (kept.status, kept.reward, kept.reason, kept.metadata["model"]) == ("ended", 1.0, None, "mine")


def test_an_exception_ends_the_session_without_its_reward(
    scripted_engine: ScriptedEngineServer, tmp_path: Path
) -> None:
    session = polar.capture(scripted_engine.url, data=tmp_path)

    def run() -> None:
        with session:
            ask(session, "Hello.")
            session.reward = 1.0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    result = session.result()
    assert (result.status, result.reward, result.reason) == ("ERROR", None, "program_failed")
    assert len(result.trajectory.traces) == 1


def test_two_sessions_at_once(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    """On one data folder, each with its gateway."""
    with (
        polar.capture(scripted_engine.url, data=tmp_path) as one,
        polar.capture(scripted_engine.url, data=tmp_path) as two,
    ):
        ask(one, "Hello.")
        ask(two, "Hello.")
        ask(two, "And you?")
        one.reward, two.reward = 0.0, 1.0
    assert [len(session.trajectory("per_request").traces) for session in (one, two)] == [1, 2]
    assert [session.result().reward for session in (one, two)] == [0.0, 1.0]


async def test_within_a_running_loop(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    """As in a notebook: the program blocks its own loop while the gateway answers."""
    with polar.capture(scripted_engine.url, data=tmp_path) as session:
        ask(session, "Hello.")
        assert len(session.trajectory().traces) == 1
    assert len(session.trajectory().traces) == 1


async def test_async_with(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    async with polar.capture(scripted_engine.url, data=tmp_path) as session:
        client = openai.AsyncOpenAI(api_key=session.api_key, base_url=session.base_urls["openai"], max_retries=0)
        async with client:
            question: Any = [{"role": "user", "content": "Hello."}]
            await asyncio.gather(
                *(client.chat.completions.create(model="any", messages=question) for _ in range(3)),
            )
        session.reward = 1.0
    assert (session.result().reward, len(session.trajectory("per_request").traces)) == (1.0, 3)
    with pytest.raises(KeyError):
        async with polar.capture(scripted_engine.url, data=tmp_path) as failed:
            raise KeyError
    assert failed.result().reason == "program_failed"


async def test_a_cancelled_start_leaves_nothing(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    async def run() -> None:
        async with polar.capture(scripted_engine.url, data=tmp_path):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(run())
    await asyncio.sleep(0)  # it has begun, and waits for its gateway
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_an_agent_in_another_process(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    scripted_engine.play("Hello to you.")
    with polar.capture(scripted_engine.url, data=tmp_path, model="asked-for") as session:
        assert session.env["OPENAI_MODEL"] == "asked-for"
        assert session.env["ANTHROPIC_BASE_URL"] == session.base_urls["anthropic"]
        command = [sys.executable, "-c", AGENT]
        done = subprocess.run(command, env=os.environ | session.env, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "Hello to you.", done.stderr
    assert len(session.trajectory().traces) == 1


def test_the_configured_engine_is_launched(tmp_path: Path) -> None:
    settings = Settings.model_validate({"engine": {"kind": "scripted"}, "gateway": {"port": 1}})
    with polar.capture(data=tmp_path, settings=settings) as session:
        assert ask(session, "Hello.")
        assert not session.base_urls["openai"].endswith(":1/v1")  # the gateway's port is one of its own
    assert session.trajectory().tokens.trainable > 0


def test_what_can_not_start_is_an_error_at_once(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    store = Settings.model_validate({"store": {"url": "mysql://x"}})
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"engine": "http://127.0.0.1:1"}, ConfigError, "No engine answers at http://127.0.0.1:1"),
        ({"engine": "127.0.0.1"}, ConfigError, "is no address"),
        ({"engine": scripted_engine.url, "data": file}, StoreError, "it can't be opened"),
        ({"engine": scripted_engine.url, "settings": store}, StoreError, "names no store"),
        ({"engine": scripted_engine.url, "metadata": {"roles": {"a": "nobody"}}}, ConfigError, "nobody"),
    ]
    for arguments, kind, said in cases:
        with pytest.raises(kind, match=said), polar.capture(**{"data": tmp_path / "polar", **arguments}):
            raise AssertionError("it began")


def test_a_session_is_read_in_and_after_its_block_alone(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    session = polar.capture(scripted_engine.url, data=tmp_path)
    for read in (lambda: session.session_id, lambda: session.env, session.result):
        with pytest.raises(PolarError, match="has not begun"):
            read()
    with session:
        with pytest.raises(ConfigError, match="no 'nothing'; known: per_request"):
            session.trajectory("nothing")
        with pytest.raises(ValueError, match="a finite number, not nan"):
            session.reward = float("nan")
    with pytest.raises(PolarError, match="is one session"), session:
        raise AssertionError("it began again")
    assert session.trajectory().traces == []


def test_a_damaged_session_is_held_back(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    with polar.capture(scripted_engine.url, data=tmp_path) as session:
        ask(session, "Hello.")
        session.reward = 1.0
    assert session._recording is not None
    (exchange,) = session._recording[1]
    assert exchange.logprobs is not None
    exchange.logprobs = -exchange.logprobs
    result = session.result()
    assert (result.status, result.reward, result.reason, result.trajectory.traces) == (
        "ERROR",
        None,
        "verify_failed",
        [],
    )


def test_a_session_that_is_never_left_is_closed(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    session = polar.capture(scripted_engine.url, data=tmp_path).__enter__()
    url = session.base_urls["openai"]
    del session
    gc.collect()
    with openai.OpenAI(api_key="x", base_url=url, max_retries=0) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_the_command_line_captures_the_same(scripted_engine: ScriptedEngineServer, tmp_path: Path) -> None:
    scripted_engine.play("Hello to you.")
    command = ["polar", "capture", "--engine", scripted_engine.url, "--data", str(tmp_path), "--json"]
    start = [sys.executable, "-c", "from polar.cli.main import main; main()", *command[1:], "--reward", "1", "--"]
    agent = [*start, sys.executable, "-c", AGENT]
    done = subprocess.run(agent, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().rpartition("\n")[2])
    with polar.capture(scripted_engine.url, data=tmp_path) as session:
        ask(session, "Hi.")
    assert told["tokens"] == session.trajectory().tokens.trainable
    refused = subprocess.run(
        [*start[:4], "--engine", "http://127.0.0.1:1", "--", "true"],
        capture_output=True, text=True, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert "No engine answers at http://127.0.0.1:1" in refused.stderr
