"""Every preset as a task runs it: its own command and files, in a bare environment."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.harnesses import load_harness
from polar.records.exchange import Exchange
from polar.records.task import McpServer
from polar.types import Text
from tests.harnesses.bare import TASK, Bare, run_bare
from tests.harnesses.run import FIRST, LAST, Turn, asked, check, check_tokens, results, three_turns, workspace

SUBMIT: Turn = LAST | {"shell": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}  # how mini-swe-agent ends
SERVER = Path(__file__).with_name("mcp_server.py")
SKILL = "---\nname: folding\ndescription: How paper cranes are folded.\n---\nFold it.\n"

pytestmark = pytest.mark.harnesses


def roles(done: Bare) -> list[str]:
    return [path.role for path in done.run.session.paths]


def said(exchange: Exchange) -> str:
    """Everything that a request says to the model."""
    request = asked(exchange)
    return "\n".join(part.text for message in request.messages for part in message.parts if isinstance(part, Text))


def events(done: Bare) -> list[dict[str, Any]]:
    """The lines of its output that are JSON objects."""
    return [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]


def git(folder: Path, *arguments: str) -> str:
    """What it prints; nothing where it fails, as outside a repository."""
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(
    ("name", "settings", "dialect", "asides"),
    [
        ("codex", {}, "openai_responses", []),
        ("claude_code", {}, "anthropic", []),
        ("qwen_code", {}, "openai_chat", []),
        ("gemini_cli", {}, "google", []),
        ("opencode", {}, "openai_chat", ["openai_chat"]),
        ("opencode", {"api": "anthropic"}, "anthropic", ["openai_chat"]),
        ("pi", {}, "openai_chat", []),
        ("pi", {"api": "google"}, "google", []),
        ("openhands", {}, "openai_chat", []),
        ("openhands", {"api": "responses"}, "openai_responses", []),
        ("openhands", {"api": "anthropic"}, "anthropic", []),
    ],
)
async def test_three_turns(
    tmp_path: Path, name: str, settings: dict[str, Any], dialect: str, asides: list[str]
) -> None:
    done = await run_bare(tmp_path, name, settings=settings)
    check(done.run, tmp_path, dialect=dialect, asides=asides)
    assert sorted(roles(done)) == sorted([*["main"] * 3, *["auxiliary"] * len(asides)])
    assert events(done)
    for path in load_harness(name).log_paths:
        assert (done.home / path).exists(), path


async def test_mini_swe_agent(tmp_path: Path) -> None:
    done = await run_bare(tmp_path, "mini_swe_agent", turns=three_turns(tmp_path, SUBMIT))
    check(done.run, tmp_path, dialect="openai_chat")
    assert (done.home / load_harness("mini_swe_agent").log_paths[0]).exists()


@pytest.mark.parametrize(("api", "dialect"), [("chat", "openai_chat"), ("anthropic", "anthropic")])
async def test_goose(tmp_path: Path, api: str, dialect: str) -> None:
    """It makes two messages of a turn that speaks and acts, so these turns only act."""
    shell = [{"shell": FIRST["shell"]}, {"shell": "sed 's/^/read: /' turn1.txt"}]
    done = await run_bare(tmp_path, "goose", turns=[*shell, LAST], settings={"api": api})
    assert done.status == 0
    assert (workspace(tmp_path) / "turn1.txt").read_text() == "42\n"
    assert sorted(roles(done)) == ["auxiliary", "main", "main", "main"]
    assert {exchange.dialect for exchange in done.run.exchanges} == {dialect}
    for exchange in done.run.exchanges:
        check_tokens(exchange)
    assert any("read: 42" in result for exchange in done.run.exchanges for result in results(asked(exchange)))
    assert events(done)[-1]["type"] == "complete"


@pytest.mark.parametrize("repository", [False, True])
async def test_aider(tmp_path: Path, repository: bool) -> None:
    folder = workspace(tmp_path)
    folder.mkdir()
    if repository:
        await asyncio.to_thread(git, folder, "init", "-q")
    text = "Here it is.\n\nhello.txt\n```\nhello 42\n```\n"
    done = await run_bare(tmp_path, "aider", turns=[{"text": text}])
    assert done.status == 0
    assert (folder / "hello.txt").read_text() == "hello 42\n"
    assert roles(done) == (["main", "auxiliary"] if repository else ["main"])
    assert ".gitignore" not in [path.name for path in folder.iterdir()]
    commits = await asyncio.to_thread(git, folder, "log", "--oneline")
    assert len(commits.splitlines()) == int(repository)


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("codex", "mcp__numbers__multiply"),
        ("claude_code", "mcp__numbers__multiply"),
        ("qwen_code", "mcp__numbers__multiply"),
        ("gemini_cli", "mcp_numbers_multiply"),
        ("opencode", "numbers_multiply"),
        ("goose", "numbers__multiply"),
        ("openhands", "multiply"),
    ],
)
async def test_tools_of_an_mcp_server(tmp_path: Path, name: str, tool: str) -> None:
    turns: list[Turn] = [{"calls": [{"name": tool, "arguments": {"a": 6, "b": 7}}]}, LAST]
    server = McpServer(name="numbers", command=sys.executable, args=[str(SERVER)], env={"WORD": "teal"})
    model = "gpt-5-codex" if name == "codex" else None  # codex has models that it knows search for such tools first
    done = await run_bare(tmp_path, name, turns=turns, mcp_servers=(server,), model=model)
    assert done.status == 0
    assert any("teal 42" in result for exchange in done.run.exchanges for result in results(asked(exchange)))


@pytest.mark.parametrize(
    "name", ["codex", "claude_code", "qwen_code", "gemini_cli", "opencode", "goose", "openhands", "pi"]
)
async def test_skills(tmp_path: Path, name: str) -> None:
    folder = load_harness(name).skills_folder
    done = await run_bare(tmp_path, name, turns=[LAST], files={f"{folder}/folding/SKILL.md": SKILL})
    tools = [tool.description or "" for exchange in done.run.exchanges for tool in asked(exchange).tools or ()]
    assert any("paper cranes" in text for text in [*tools, *map(said, done.run.exchanges)])


@pytest.mark.parametrize("task", ["- mend it,\n--all of it", "/app.py is broken", "@app.py is broken", "!important"])
@pytest.mark.parametrize("name", ["codex", "claude_code", "gemini_cli", "opencode", "goose", "pi", "aider"])
async def test_instructions_that_look_like_something_else(tmp_path: Path, name: str, task: str) -> None:
    """Flags, commands of the harness's own, files: they reach the model as they are, but for white space."""
    done = await run_bare(tmp_path, name, turns=[LAST], task=task)
    asked_for = task.replace(" --", "\t--") if name == "opencode" else task
    assert any(asked_for in said(exchange) for exchange in done.run.exchanges)


async def test_a_harness_that_is_told_to_write_text_does(tmp_path: Path) -> None:
    done = await run_bare(tmp_path, "pi", turns=[LAST], settings={"json": False}, task=TASK)
    assert done.output.strip() == LAST["text"]
