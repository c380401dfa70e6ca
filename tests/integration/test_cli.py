"""The command line, run as its users run it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

POLAR = [sys.executable, "-c", "from polar.cli.main import main; main()"]

AGENT = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"], end="")
"""


def polar(*arguments: str, folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | variables
    return subprocess.run(
        [*POLAR, *arguments], capture_output=True, text=True, cwd=folder, env=environment, timeout=300, check=False
    )


def test_capture_keeps_what_an_agent_asks_and_show_shows_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    done = polar("capture", "--json", "--", sys.executable, "agent.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said, _, summary = done.stdout.strip().rpartition("\n")
    captured = json.loads(summary)
    assert said.strip() == "A short note on the task."
    assert (captured["exchanges"], captured["traces"], captured["exit_code"]) == (1, 1, 0)
    assert captured["tokens"] > 0
    shown = polar("show", folder=tmp_path)
    assert captured["session_id"] in shown.stdout
    assert "A short note on the task." in shown.stdout
    whole = json.loads(polar("show", "--json", captured["session_id"], folder=tmp_path).stdout)
    assert whole["exchanges"][0]["sampled_ids"]


def test_capture_counts_calls_that_do_not_train(tmp_path: Path) -> None:
    """By reason: a forced tool is the user's own choice, and costs them the call."""
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "ab"]
    choices = ["auto", "required", {"type": "function", "function": {"name": "a"}}]
    calls = [AGENT.split("with ")[0]]
    for choice in choices:
        calls.append(f"body |= {{'tools': {tools!r}, 'tool_choice': {choice!r}}}")
        calls.append("urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()")
    (tmp_path / "agent.py").write_text("\n".join(calls))
    done = polar("capture", "--json", "--", sys.executable, "agent.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    captured = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert (captured["exchanges"], captured["untrained_calls"]) == (3, {"forced_tool": 2})
    shown = polar("capture", "--", sys.executable, "agent.py", folder=tmp_path).stderr
    assert "Calls that don't train: forced_tool: 2." in shown
    assert "tool_choice" in shown


def test_the_commands_own_exit_status_is_kept(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT + "raise SystemExit(7)")
    assert polar("capture", "--", sys.executable, "agent.py", folder=tmp_path).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("capture", "--", "no-such-command"), "The command 'no-such-command' was not found"),
        (("capture", "--", "true"), "made no model call"),
        (("capture", "--bogus", "--", "true"), "No such option"),
        (("capture", "--harness", "nobody", "--", "true"), "known: aider, claude_code"),
        (("capture", "--engine", "foo", "--", "true"), "is no address"),
        (("capture", "--data", "/proc/x", "--", "true"), "--data"),
        (("show",), "Nothing has been captured"),
        (("session", "new", "--server", "foo"), "is no address"),
        (("session", "new", "--server", "http://127.0.0.1:1"), "polar up"),
        (("session", "end"), "No session was named"),
        (("up", "--port", "99999"), "gateway.port"),
        (("doctor", "--kind", "nothing"), "known: embedded, openai"),
        (("nonsense",), "No such command"),
    ],
)
def test_mistakes_get_one_clear_sentence(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = polar(*arguments, folder=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_finds_the_scripted_engine_in_order(tmp_path: Path) -> None:
    done = polar("doctor", "--json", folder=tmp_path, POLAR_NODE__RUNTIMES='["local"]')
    assert done.returncode == 0, done.stdout
    (rows,) = json.loads(done.stdout)["engines"].values()
    assert {row["check"]: row["ok"] for row in rows}["token ids"] is True
    assert all(row["ok"] for row in rows), rows


@pytest.fixture
def control(tmp_path: Path) -> Iterator[str]:
    command = [*POLAR, "up", "--json", "--port", "0", "--control-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["control"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(300) == 0


def test_a_session_by_hand(tmp_path: Path, control: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    lines = polar("session", "new", "--server", control, folder=tmp_path).stdout.splitlines()
    exported = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    agent = [sys.executable, "agent.py"]
    subprocess.run(agent, cwd=tmp_path, env=os.environ | exported, check=True, capture_output=True)
    ended = polar("session", "end", "--reward", "0.5", "--server", control, folder=tmp_path, **exported)
    assert ended.stdout.strip().endswith("has ended, reward 0.5")
    again = polar("session", "end", "--reward", "1", "--server", control, folder=tmp_path, **exported)
    assert again.returncode != 0
    assert "has the reward 0.5 already" in again.stderr
    refused = subprocess.run(agent, cwd=tmp_path, env=os.environ | exported, check=False, capture_output=True)
    assert b"401" in refused.stderr
