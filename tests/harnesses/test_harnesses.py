"""Real harnesses as users run them: installed from npm and PyPI, with real tools, through `polar capture`.

Each is run as its preset's docstring says, with no flags beyond those.
"""

from pathlib import Path

import pytest

from polar.types import ToolCall
from tests.harnesses.run import (
    LAST,
    NODE,
    PYTHON,
    Turn,
    asked,
    check,
    check_tokens,
    refused,
    run,
    three_turns,
    workspace,
)

TASK = "Write the two files."
SUBMIT: Turn = LAST | {"shell": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}  # how mini-swe-agent ends

pytestmark = pytest.mark.harnesses


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for binary in (NODE / "codex", PYTHON / "mini"):
        if not binary.exists():
            pytest.fail(f"There is no {binary}: run `make test-harnesses`, which installs it.")


@pytest.mark.parametrize(
    ("command", "dialect"),
    [
        (["codex", "exec", "--skip-git-repo-check", TASK], "openai_responses"),
        (["claude", "-p", TASK], "anthropic"),
        (["qwen", "-p", TASK], "openai_chat"),
        (["gemini", "-p", TASK], "google"),
    ],
    ids=["codex", "claude", "qwen", "gemini"],
)
async def test_three_turns(tmp_path: Path, command: list[str], dialect: str) -> None:
    done = await run(tmp_path, command, NODE)
    check(done, tmp_path, dialect=dialect)
    assert not refused(done)


@pytest.mark.parametrize(
    ("flags", "dialect"),
    [
        ([], "openai_chat"),
        (["-m", "polar-responses/polar"], "openai_responses"),
        (["-m", "polar-anthropic/polar"], "anthropic"),
    ],
    ids=["chat", "responses", "anthropic"],
)
async def test_opencode(tmp_path: Path, flags: list[str], dialect: str) -> None:
    done = await run(tmp_path, ["opencode", "run", *flags, TASK], NODE)
    check(done, tmp_path, dialect=dialect, asides=["openai_chat"])  # the title is always asked of the small model
    assert not refused(done)


async def test_mini_swe_agent(tmp_path: Path) -> None:
    command = ["mini", "--yolo", "--exit-immediately", "-t", TASK]
    done = await run(tmp_path, command, PYTHON, turns=three_turns(tmp_path, SUBMIT))
    check(done, tmp_path, dialect="openai_chat")
    assert not refused(done)


async def test_codex_knows_its_default_model(tmp_path: Path) -> None:
    """It warns about a name that it doesn't know, and works with guesses."""
    done = await run(tmp_path, ["codex", "exec", "--skip-git-repo-check", TASK], NODE)
    assert done.summary["exit_code"] == 0
    assert "Model metadata" not in done.errors
    assert {asked(exchange).model for exchange in done.exchanges} == {"gpt-5.5"}


async def test_codex_gives_up_its_websocket_at_once(tmp_path: Path) -> None:
    """With its built-in provider it tries a WebSocket first; one refusal must be enough."""
    script = (
        "CODEX_API_KEY=$POLAR_API_KEY exec codex exec --skip-git-repo-check -c model_provider=openai"
        f' -c openai_base_url="$POLAR_BASE_URL/v1" "{TASK}"'
    )
    done = await run(tmp_path, ["sh", "-c", script], NODE, options=("--harness", "codex"))
    check(done, tmp_path, dialect="openai_responses")
    assert len(refused(done)) == 1
    assert "WebSocket" in refused(done)[0]


@pytest.mark.parametrize(
    ("model", "tool", "text"),
    [
        ("gpt-5.5", "apply_patch", "*** Begin Patch\n*** Add File: turn1.txt\n+42\n*** End Patch"),
        ("gpt-5.6-sol", "functions__exec", "text(await tools.exec_command({cmd: \"expr 6 '*' 7 > turn1.txt\"}))"),
    ],
)
async def test_codex_custom_tools(tmp_path: Path, model: str, tool: str, text: str) -> None:
    """The name of the model decides which tools it offers: free text instead of JSON, also in a namespace."""
    patch: Turn = {"text": "Writing it.", "calls": [{"name": tool, "arguments": {"input": text}}]}
    command = ["codex", "exec", "--skip-git-repo-check", TASK]
    done = await run(tmp_path, command, NODE, options=("--model", model), turns=[patch, LAST])
    assert (workspace(tmp_path) / "turn1.txt").read_text() == "42\n"
    assert len(done.exchanges) == 2
    for exchange in done.exchanges:
        check_tokens(exchange)
    echoed = [part for message in asked(done.exchanges[1]).messages for part in message.parts]
    assert [part.arguments for part in echoed if isinstance(part, ToolCall)] == [text]
    assert not refused(done)
