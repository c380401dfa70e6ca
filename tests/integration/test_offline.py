"""Data collected as its users collect it: real runs of the kind `local`, a scripted teacher, stops of every kind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar.engines.scripted.server import TOKENIZER_FOLDER
from tests.integration.test_cli import POLAR, polar

AGENT = """
import json, os, sys, time, urllib.request
schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tool = {"type": "function", "function": {"name": "bash", "parameters": schema}}
messages = [{"role": "user", "content": os.environ["POLAR_INSTRUCTION"]}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
for turn in range(3):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [tool]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        message = json.load(reply)["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls") or ():
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
time.sleep(float(sys.argv[1]))
"""


def task(name: str, after: str = "echo hello > out.txt", seconds: float = 0.0) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": f"Do {name}.",
        "runtime": {"backend": "local", "prepare": [{"type": "upload_file", "content": AGENT, "target": "agent.py"}]},
        "agent": {"custom_shell": {"command": f"{sys.executable} -S -E agent.py {seconds} && {after}"}},
        "evaluator": {"strategy": "command", "config": {"command": "grep -q hello out.txt"}},
    }


def write(folder: Path, *tasks: dict[str, Any]) -> None:
    (folder / "tasks.jsonl").write_text("\n".join(json.dumps(one) for one in tasks))


def collect(folder: Path, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return polar("run", "tasks.jsonl", "--resume", *options, folder=folder, **variables)


def rows(folder: Path, *options: str) -> list[dict[str, Any]]:
    done = polar("export", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def samples(folder: Path) -> list[tuple[str, int, float | None]]:
    found = [(row["metadata"], row["reward"]) for row in rows(folder, "--format", "polar")]
    return sorted((known["task_id"], known["sample"], reward) for known, reward in found)


def test_the_same_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    write(tmp_path, *(task(name, seconds=0.4) for name in ("a", "b")))
    command = [*POLAR, "run", "tasks.jsonl", "--samples", "4", "--workers", "2", "--resume"]
    with (tmp_path / "log").open("wb") as log:
        running = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, env=os.environ | {"COLUMNS": "80"})
        while not re.search(rb"[2-6]/8", (tmp_path / "log").read_bytes()):
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGKILL)
        running.wait()
    done = collect(tmp_path, "--samples", "4")
    assert done.returncode == 0, done.stderr
    assert "of these tasks are there already" in done.stderr
    whole = [(name, sample, 1.0) for name in "ab" for sample in range(4)]
    assert samples(tmp_path) == whole  # those that were killed are not among them
    again = collect(tmp_path, "--samples", "4")
    assert again.returncode == 0
    assert "8 sessions of these tasks are there already." in again.stderr
    assert samples(tmp_path) == whole
    (line,) = [line for line in again.stdout.splitlines() if "tasks.jsonl" in line]
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["tasks.jsonl", "2", "2", "8", "8", "100.0%"]


@pytest.mark.slow
def test_tries_end_with_the_first_that_is_good_enough(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    third = f"echo x >> {tries} && test $(wc -l < {tries}) -ge 3 && echo hello > out.txt; true"
    write(tmp_path, task("third", third), task("never", "true"))
    done = collect(tmp_path, "--samples", "5", "--accept", "1")
    assert done.returncode == 0, done.stderr
    assert samples(tmp_path) == [("never", n, 0.0) for n in range(5)] + [("third", n, float(n == 2)) for n in range(3)]
    assert [row["metadata"]["task_id"] for row in rows(tmp_path, "--format", "sft")] == ["third"]
    pairs = rows(tmp_path, "--format", "preference")
    assert [pair["metadata"]["task_id"] for pair in pairs] == ["third"]


@pytest.mark.slow
def test_a_budget_ends_a_run_and_a_larger_one_lets_it_go_on(tmp_path: Path) -> None:
    write(tmp_path, task("a"))
    first = collect(tmp_path, "--samples", "4", "--workers", "1", "--budget-tokens", "1")
    assert first.returncode == 1
    assert "The budget of 1 tokens is used up" in first.stderr
    begun = len(samples(tmp_path))
    assert 1 <= begun < 4
    poor = collect(tmp_path, "--samples", "4", "--budget-cost", "0.000001", "--price", "1", "2")
    assert poor.returncode == 1
    assert "a cost of 1e-06" in poor.stderr
    assert len(samples(tmp_path)) == begun
    unpriced = collect(tmp_path, "--samples", "4", "--budget-cost", "1")
    assert "--price" in unpriced.stderr
    done = collect(tmp_path, "--samples", "4", "--budget-cost", "1000", "--price", "1", "2", "--budget-seconds", "999")
    assert done.returncode == 0, done.stderr
    assert [sample for _, sample, _ in samples(tmp_path)] == [0, 1, 2, 3]
    assert "prompt tokens" in done.stdout


@pytest.mark.slow
def test_a_failure_of_the_engine_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "play.toml").write_text('[[turns]]\ntext = "Hello."\nfail = 500\nfail_times = 4\n')
    write(tmp_path, task("a"))
    options = json.dumps({"play": "play.toml"})
    done = collect(tmp_path, "--attempts", "9", POLAR_ENGINE__OPTIONS=options)
    assert done.returncode == 0, done.stderr
    assert "engine_failed" in done.stderr
    assert "It is tried again (2 of 9)" in done.stderr
    assert samples(tmp_path) == [("a", 0, 1.0)]


@contextlib.contextmanager
def teacher(*options: str) -> Iterator[str]:
    command = [sys.executable, "-m", "polar.engines.scripted", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


@pytest.mark.slow
def test_a_teacher_that_tells_no_tokens(tmp_path: Path) -> None:
    """Behind an `openai` engine: words, thinking and calls are kept, and rendered for whoever learns from them."""
    write(tmp_path, task("a"))
    with teacher() as url:
        done = collect(tmp_path, "--engine", url, "--kind", "openai", "--budget-tokens", "100000")
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path, "--format", "sft")
    assert [message["role"] for message in row["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row["messages"][1]["reasoning_content"] == "I will create the file first."
    assert row["messages"][1]["tool_calls"][0]["function"]["name"] == "bash"
    assert polar("export", "--format", "sft-tokens", folder=tmp_path).returncode == 1
    rendered = rows(tmp_path, "--format", "sft-tokens", "--tokenizer", str(TOKENIZER_FOLDER))
    assert [one["rendered"] for one in rendered] == [True]


@pytest.mark.slow
def test_rendered_tokens_are_those_that_the_model_itself_would_have_sampled(tmp_path: Path) -> None:
    """Where teacher and student are the same model, and it writes as its tokenizer does."""
    write(tmp_path, task("a"))
    done = collect(tmp_path, POLAR_ENGINE__OPTIONS='{"drift": 0.0}')
    assert done.returncode == 0, done.stderr
    recorded = rows(tmp_path, "--format", "sft-tokens")
    rendered = rows(tmp_path, "--format", "sft-tokens", "--tokenizer", str(TOKENIZER_FOLDER))
    assert [(row["input_ids"], row["labels"]) for row in rendered] == [
        (row["input_ids"], row["labels"]) for row in recorded
    ]
    assert [row["rendered"] for row in (*recorded, *rendered)] == [False, True]
