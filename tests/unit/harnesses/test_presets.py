"""What single harness presets set up, without running the harness. What all keep: tests/contract/test_harnesses.py."""

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.harnesses import build_environment, filter_environment, find_by_command, load_harness
from polar.harnesses.base import HarnessSetup, SetupRequest, quote_toml_string, write_setup
from polar.plugins import list_names
from polar.records.task import McpServer
from polar.testing.harnesses import HOME, INSTRUCTION, KEY, REMOTE_SERVER, STDIO_SERVER, URL, parse_config_files

NEEDED: dict[str, dict[str, Any]] = {
    "shell": {"command": "agent {{INSTRUCTION}}"}
}  # settings without which it can't run
ALL = pytest.mark.parametrize("name", list_names("harnesses"))


def wanted(name: str, servers: tuple[McpServer, ...] = (), model: str = "a-model", **settings: Any) -> SetupRequest:
    return SetupRequest(HOME, "/somewhere/work", URL, KEY, model, servers, NEEDED.get(name, {}) | settings)


@pytest.mark.parametrize(("own", "given"), [(None, "1"), ("0", "0"), ("", "")])
def test_openai_agents_upload_no_traces(monkeypatch: pytest.MonkeyPatch, own: str | None, given: str) -> None:
    """They would go to OpenAI, with a session's key. What the user has set stands."""
    monkeypatch.delenv("OPENAI_AGENTS_DISABLE_TRACING", raising=False)
    if own is not None:
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", own)
    variables = filter_environment(os.environ) | build_environment(URL, KEY, "a-model")
    assert variables["OPENAI_AGENTS_DISABLE_TRACING"] == given


def set_up(name: str, *servers: McpServer) -> HarnessSetup:
    return load_harness(name).setup(wanted(name, servers))


@ALL
def test_unknown_settings_are_refused(name: str) -> None:
    preset = load_harness(name)
    with pytest.raises(ConfigError, match=r"settings of .*`tempo`.*It takes: "):
        preset.setup(wanted(name, tempo=1))
    with pytest.raises(ConfigError, match="tempo"):
        preset.build_command(INSTRUCTION, NEEDED.get(name, {}) | {"tempo": 1})


@pytest.mark.parametrize("name", sorted({*list_names("harnesses")} - {"shell", "openhands"}))
def test_further_words_come_before_the_instruction(name: str) -> None:
    argv = load_harness(name).build_command("Go", {"args": ["--so", "much"]})
    assert argv[argv.index("--so") + 1] == "much"
    assert "Go" in argv[-1]


@pytest.mark.parametrize("name", ["claude_code", "codex", "gemini_cli", "goose", "opencode", "pi", "qwen_code"])
def test_events_can_be_turned_off(name: str) -> None:
    preset = load_harness(name)
    events = [word for word in preset.build_command("Go", {}) if "json" in word]
    assert events
    assert not [word for word in preset.build_command("Go", {"json": False}) if "json" in word]


def test_who_takes_mcp_servers() -> None:
    without = {name for name in list_names("harnesses") if not load_harness(name).supports_mcp}
    assert without == {"aider", "mini_swe_agent", "pi", "shell"}


@pytest.mark.parametrize(
    ("name", "path", "table", "stdio", "remote"),
    [
        (
            "codex",
            ".codex/config.toml",
            "mcp_servers",
            {"command": STDIO_SERVER.command, "args": STDIO_SERVER.args, "env": STDIO_SERVER.env},
            {"url": REMOTE_SERVER.url, "http_headers": REMOTE_SERVER.headers},
        ),
        (
            "claude_code",
            ".claude/.claude.json",
            "mcpServers",
            {"type": "stdio", "command": STDIO_SERVER.command, "args": STDIO_SERVER.args, "env": STDIO_SERVER.env},
            {"type": "http", "url": REMOTE_SERVER.url, "headers": REMOTE_SERVER.headers},
        ),
        (
            "qwen_code",
            ".qwen/settings.json",
            "mcpServers",
            {"command": STDIO_SERVER.command, "args": STDIO_SERVER.args, "env": STDIO_SERVER.env},
            {"httpUrl": REMOTE_SERVER.url, "headers": REMOTE_SERVER.headers},
        ),
        (
            "gemini_cli",
            ".gemini/settings.json",
            "mcpServers",
            {"command": STDIO_SERVER.command, "args": STDIO_SERVER.args, "env": STDIO_SERVER.env},
            {"httpUrl": REMOTE_SERVER.url, "headers": REMOTE_SERVER.headers},
        ),
        (
            "opencode",
            ".config/opencode/opencode.json",
            "mcp",
            {"type": "local", "command": [STDIO_SERVER.command, *STDIO_SERVER.args], "environment": STDIO_SERVER.env},
            {"type": "remote", "url": REMOTE_SERVER.url, "headers": REMOTE_SERVER.headers},
        ),
        (
            "goose",
            ".goose/config/config.yaml",
            "extensions",
            {
                "type": "stdio",
                "cmd": STDIO_SERVER.command,
                "args": STDIO_SERVER.args,
                "envs": STDIO_SERVER.env,
                "enabled": True,
            },
            {"type": "streamable_http", "uri": REMOTE_SERVER.url, "headers": REMOTE_SERVER.headers, "enabled": True},
        ),
        (
            "openhands",
            ".openhands/polar.json",
            "mcp_servers",
            {"command": STDIO_SERVER.command, "args": STDIO_SERVER.args, "env": STDIO_SERVER.env},
            {"transport": "http", "url": REMOTE_SERVER.url, "headers": REMOTE_SERVER.headers},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value else "",
)
def test_mcp_servers(name: str, path: str, table: str, stdio: dict[str, Any], remote: dict[str, Any]) -> None:
    written = parse_config_files(set_up(name, STDIO_SERVER, REMOTE_SERVER))[path][table]
    assert written["my tools"].items() >= stdio.items()
    assert written["remote"].items() >= remote.items()
    assert not {"my tools", "remote"} & parse_config_files(set_up(name))[path].get(table, {}).keys()


@pytest.mark.parametrize("name", ["codex", "goose"])
def test_a_transport_that_it_does_not_have(name: str) -> None:
    server = McpServer(name="old", url="http://10.0.0.2/sse", transport="sse")
    with pytest.raises(ConfigError, match="over sse: 'old'"):
        set_up(name, server)


@pytest.mark.parametrize(
    ("name", "api", "path", "said"),
    [
        ("pi", "responses", ".pi/agent/settings.json", '"defaultProvider": "polar-responses"'),
        ("pi", "google", ".pi/agent/settings.json", '"defaultProvider": "polar-google"'),
        ("opencode", "anthropic", ".config/opencode/opencode.json", '"model": "polar-anthropic/a-model"'),
        ("goose", "anthropic", ".goose/config/config.yaml", "GOOSE_PROVIDER: anthropic"),
        ("openhands", "responses", ".openhands/polar.json", '"api_mode": "responses"'),
        ("openhands", "anthropic", ".openhands/polar.json", '"model": "anthropic/a-model"'),
    ],
)
def test_another_api(name: str, api: str, path: str, said: str) -> None:
    preset = load_harness(name)
    assert said in preset.setup(wanted(name, api=api)).files[path]
    assert said not in preset.setup(wanted(name)).files[path]
    with pytest.raises(ConfigError, match="morse"):
        preset.setup(wanted(name, api="morse"))


def test_opencode_is_given_words_that_it_joins_to_the_instruction() -> None:
    def joined(instruction: str) -> str:
        words = load_harness("opencode").build_command(instruction, {"json": False})[2:]
        assert not any(word.startswith("-") or " " in word for word in words)
        return " ".join(words)

    assert joined("two  spaces, 007,\n- and a list\n") == "two  spaces, 007,\n- and a list\n"
    assert joined("- with a --flag") == "\n- with a\t--flag"


@pytest.mark.parametrize(("name", "instruction"), [("pi", "@file"), ("aider", "/help"), ("aider", "!ls")])
def test_an_instruction_is_no_command_of_the_harness(name: str, instruction: str) -> None:
    assert load_harness(name).build_command(instruction, {})[-1].endswith(f"\n{instruction}")


def test_shell() -> None:
    preset = load_harness("shell")
    command = 'printf "<%s>" {{INSTRUCTION}} "$POLAR_INSTRUCTION"; printf "[%s]" {{INSTRUCTION}}; exit 3'
    argv = preset.build_command(INSTRUCTION, {"command": command})
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout == f"<{INSTRUCTION}><{INSTRUCTION}>[{INSTRUCTION}]"
    assert done.returncode == 3
    assert preset.setup(wanted("shell")) == HarnessSetup()
    assert preset.package is None


@pytest.mark.parametrize("settings", [{}, {"command": ""}])
def test_shell_without_a_command(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"custom_shell\.command"):
        load_harness("shell").build_command(INSTRUCTION, settings)


@pytest.mark.parametrize("text", ["plain", 'a "b" \\ c', "tab\tnew\nline\x00\x1f\x7f", "größer 東京 🙂"])
def test_toml_string(text: str) -> None:
    assert tomllib.loads(f"x = {quote_toml_string(text)}") == {"x": text}


def test_write_setup(tmp_path: Path) -> None:
    write_setup(HarnessSetup({"a/b.txt": "größer\n", "c": ""}), tmp_path)
    assert (tmp_path / "a" / "b.txt").read_text(encoding="utf-8") == "größer\n"
    assert (tmp_path / "c").read_text() == ""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("pi -p x", "pi"),
        ("/opt/bin/codex exec x", "codex"),
        ("npx -y @anthropic-ai/claude-code@2.1 -p x", "claude_code"),
        ("npx @google/gemini-cli -p x", "gemini_cli"),
        ("qwen x", "qwen_code"),
        ("opencode run x", "opencode"),
        ("uvx mini-swe-agent -t x", "mini_swe_agent"),
        ("uvx aider-chat --message x", "aider"),
        ("goose run -t x", "goose"),
        ("python agent.py pi", None),
        ("sh -c x", None),
        ("echo pi", None),
    ],
)
def test_known_by_command(command: str, name: str | None) -> None:
    assert find_by_command(command.split()) == name


def test_a_harness_sees_neither_our_keys_nor_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_SERVER__TOKEN", "secret")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    monkeypatch.setenv("EDITOR", "vi")
    left = filter_environment(os.environ)
    assert "POLAR_SERVER__TOKEN" not in left
    assert "ANTHROPIC_AUTH_TOKEN" not in left
    assert left["EDITOR"] == "vi"
