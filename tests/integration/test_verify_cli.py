"""polar verify and polar show, run as their users run them, on what a small agent really asked."""

import functools
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.test_cli import polar

slow = functools.partial(pytest.param, marks=pytest.mark.slow)

AGENT = """
import json, os, urllib.request

def ask(messages, **more):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
        return {"role": "assistant", "content": json.load(reply)["choices"][0]["message"]["content"]}

history = [{"role": "user", "content": "hi"}]
for turn in range(4):
    history += [ask(history), {"role": "user", "content": f"go on {turn}"}]
    if turn == 1:
        ask(history + [{"role": "user", "content": "or otherwise"}])
ask(history, response_format={"type": "json_object"})
"""


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two sessions."""
    folder = tmp_path_factory.mktemp("captured")
    (folder / "agent.py").write_text(AGENT)
    for _ in range(2):
        done = polar("capture", "--json", "--", sys.executable, "agent.py", folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def spoil(captured: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the folder, with something changed in its database."""

    def change(statement: str) -> Path:
        shutil.copytree(captured / ".polar", tmp_path / ".polar")
        with closing(sqlite3.connect(tmp_path / ".polar" / "polar.db", isolation_level=None)) as db:
            db.create_function("flip", 1, lambda data: bytes([data[0] ^ 1]) + data[1:])  # one bit
            assert db.execute(statement).rowcount > 0
        return tmp_path

    return change


def verify(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return polar("verify", *arguments, folder=folder)


def test_what_was_captured_is_in_order(captured: Path) -> None:
    done = verify(captured)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none" in done.stdout
    found = json.loads(verify(captured, "--json").stdout)
    assert found["ok"] is True
    assert (found["sessions"], found["exchanges"], found["problems"]) == (2, 12, [])
    assert found["sampled"] == found["trainable"] + sum(found["excluded"].values())
    assert found["excluded"]["structured_output"] > 0
    assert found["traces"]["per_request"] == 10
    computed = found["computed"]
    assert computed["prefix_tree"] <= computed["prefix_merging"] <= computed["per_request"]


def test_one_session_alone(captured: Path) -> None:
    shown = json.loads(polar("show", "--json", folder=captured).stdout)
    found = json.loads(verify(captured, "--json", shown["session"]["session_id"]).stdout)
    assert (found["sessions"], found["exchanges"]) == (1, 6)


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        # One bit of one log-probability, one token, one version: the smallest things that can go wrong.
        ("UPDATE exchanges SET logprobs = flip(logprobs) WHERE seq = 2", "checksum"),
        slow("UPDATE exchanges SET sampled = flip(sampled) WHERE seq = 0", "checksum"),
        slow("UPDATE exchanges SET detail = replace(detail, '[[0,', '[[1,') WHERE seq = 3", "checksum"),
        slow("UPDATE exchanges SET delivered = 99 WHERE seq = 1", "delivered"),
        slow("UPDATE exchanges SET sampled = substr(sampled, 2) WHERE seq = 1", "unreadable"),
        ("UPDATE exchanges SET detail = 'nonsense' WHERE seq = 1", "unreadable"),
    ],
)
def test_what_has_changed_is_found(spoil: Callable[[str], Path], statement: str, kind: str) -> None:
    folder = spoil(f"{statement} AND session_id = (SELECT max(session_id) FROM sessions)")
    done = verify(folder, "--json")
    assert done.returncode == 1
    assert "in 1 of 2 sessions; the first is in session s" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert kind in found["problem_kinds"]
    assert found["sessions"] == 2  # the other one was looked at as well
    assert "Problems" in verify(folder).stdout


def test_rows_of_an_older_store_are_noted(spoil: Callable[[str], Path]) -> None:
    done = verify(spoil("UPDATE exchanges SET checksum = NULL"))
    assert done.returncode == 0
    assert "12 exchanges of an older version" in " ".join(done.stdout.split())


def test_mistakes_get_one_clear_sentence(captured: Path, tmp_path: Path) -> None:
    for folder, arguments, said in (
        (tmp_path, (), "Nothing has been captured"),
        (captured, ("nobody",), "There is no session nobody"),
        (captured, ("--model", "nowhere"), "nowhere"),
        (captured, (__file__,), "with --from slime|verl|trl"),
    ):
        done = verify(folder, *arguments)
        assert done.returncode != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_show_draws_the_session_with_its_tokens(captured: Path) -> None:
    shown = polar("show", "--tokens", folder=captured, COLUMNS="200").stdout
    assert "untrainable: structured_output" in shown
    assert "user: or otherwise" in shown
    assert "go on 2<|im_end|>" in shown
    assert "<|im_end|>⟨" in polar("show", "--ids", "--limit", "0", folder=captured, COLUMNS="200").stdout
