"""What every harness preset keeps to, without running the harness."""

import json
import os
import subprocess
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from polar.errors import ConfigError
from polar.harnesses import build_environment, filter_environment, find_by_command, load_harness
from polar.harnesses.base import HarnessSetup, SetupRequest, toml_string, write_setup
from polar.plugins import names
from polar.records.task import McpServer

URL, KEY, HOME = "http://10.0.0.1:1234", "sk-polar-0123456789abcdefghijklmnop", "/somewhere/home"
STDIO = McpServer(name="my tools", command="/opt/serve", args=["--port", 'a "b"\n\x7f🙂'], env={"WORD": "te=al"})
REMOTE = McpServer(name="remote", url="http://10.0.0.2/mcp", headers={"x-word": "teal"})
TASK = "Mend it:\n- 'quoted' \"words\" and $HOME"
NEEDED: dict[str, dict[str, Any]] = {
    "shell": {"command": "agent {{INSTRUCTION}}"}
}  # settings without which it can't run
ALL = pytest.mark.parametrize("name", names("harnesses"))


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


def parsed(setup: HarnessSetup) -> dict[str, Any]:
    """Every file whose format has a parser; there are no others but scripts."""
    readers = {".json": json.loads, ".toml": tomllib.loads, ".yaml": yaml.safe_load}
    found = {}
    for path, content in setup.files.items():
        if path.endswith(".py"):
            compile(content, path, "exec")
        else:
            found[path] = readers[PurePosixPath(path).suffix](content)  # type: ignore[operator]
    return found


@ALL
def test_it_points_at_the_gateway(name: str) -> None:
    setup = set_up(name)
    variables = build_environment(URL, KEY, "a-model") | setup.env
    said = "\n".join([*variables.values(), *setup.files.values()])
    assert URL in said
    assert "a-model" in said
    assert KEY in variables.values()


@ALL
def test_it_writes_nothing_itself_and_is_always_the_same(name: str) -> None:
    first = set_up(name, *_taken(name))
    assert first == set_up(name, *_taken(name))
    assert not Path("/somewhere").exists()


@ALL
def test_files_can_be_read_and_lie_below_the_home(name: str) -> None:
    setup = set_up(name, *_taken(name))
    parsed(setup)
    for path in setup.files:
        assert not path.startswith("/")
        assert ".." not in PurePosixPath(path).parts
    preset = load_harness(name)
    for below in (*preset.log_paths, *filter(None, [preset.skills_folder])):
        assert not below.startswith("/")


@ALL
def test_the_key_is_in_no_file_and_nothing_is_of_this_machine(name: str) -> None:
    setup = set_up(name, *_taken(name))
    for content in setup.files.values():
        assert KEY not in content
        for place in (str(Path.home()) + "/", os.getcwd()):
            assert place not in content
    for variable, value in setup.env.items():
        if "/" in value and not value.startswith("http") and not value.startswith("openai/"):
            assert value.startswith(HOME), variable  # nothing leads to the user's own files


@ALL
def test_a_strange_model_name_breaks_no_file(name: str) -> None:
    setup = load_harness(name).setup(wanted(name, model='org/"quoted"\\ 🙂'))
    parsed(setup)


@ALL
def test_unknown_settings_are_refused(name: str) -> None:
    preset = load_harness(name)
    with pytest.raises(ConfigError, match=r"settings of .*`tempo`.*It takes: "):
        preset.setup(wanted(name, tempo=1))
    with pytest.raises(ConfigError, match="tempo"):
        preset.build_command(TASK, NEEDED.get(name, {}) | {"tempo": 1})


@ALL
def test_the_command_holds_the_instruction(name: str) -> None:
    preset = load_harness(name)
    argv = preset.build_command(TASK, NEEDED.get(name, {}))
    assert argv[0] == (preset.package.executable if preset.package else "sh")
    if name == "shell":
        return  # quoted there: below
    assert " ".join(argv).endswith(TASK)
    assert not any("tee" in word.split() or "||" in word for word in argv[:-1])


@pytest.mark.parametrize("name", sorted({*names("harnesses")} - {"shell", "openhands"}))
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


def _taken(name: str) -> tuple[McpServer, ...]:
    return (STDIO, REMOTE) if load_harness(name).supports_mcp else ()


def test_who_takes_mcp_servers() -> None:
    without = {name for name in names("harnesses") if not load_harness(name).supports_mcp}
    assert without == {"aider", "mini_swe_agent", "pi", "shell"}


@pytest.mark.parametrize(
    ("name", "path", "table", "stdio", "remote"),
    [
        (
            "codex",
            ".codex/config.toml",
            "mcp_servers",
            {"command": STDIO.command, "args": STDIO.args, "env": STDIO.env},
            {"url": REMOTE.url, "http_headers": REMOTE.headers},
        ),
        (
            "claude_code",
            ".claude/.claude.json",
            "mcpServers",
            {"type": "stdio", "command": STDIO.command, "args": STDIO.args, "env": STDIO.env},
            {"type": "http", "url": REMOTE.url, "headers": REMOTE.headers},
        ),
        (
            "qwen_code",
            ".qwen/settings.json",
            "mcpServers",
            {"command": STDIO.command, "args": STDIO.args, "env": STDIO.env},
            {"httpUrl": REMOTE.url, "headers": REMOTE.headers},
        ),
        (
            "gemini_cli",
            ".gemini/settings.json",
            "mcpServers",
            {"command": STDIO.command, "args": STDIO.args, "env": STDIO.env},
            {"httpUrl": REMOTE.url, "headers": REMOTE.headers},
        ),
        (
            "opencode",
            ".config/opencode/opencode.json",
            "mcp",
            {"type": "local", "command": [STDIO.command, *STDIO.args], "environment": STDIO.env},
            {"type": "remote", "url": REMOTE.url, "headers": REMOTE.headers},
        ),
        (
            "goose",
            ".goose/config/config.yaml",
            "extensions",
            {"type": "stdio", "cmd": STDIO.command, "args": STDIO.args, "envs": STDIO.env, "enabled": True},
            {"type": "streamable_http", "uri": REMOTE.url, "headers": REMOTE.headers, "enabled": True},
        ),
        (
            "openhands",
            ".openhands/polar.json",
            "mcp_servers",
            {"command": STDIO.command, "args": STDIO.args, "env": STDIO.env},
            {"transport": "http", "url": REMOTE.url, "headers": REMOTE.headers},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value else "",
)
def test_mcp_servers(name: str, path: str, table: str, stdio: dict[str, Any], remote: dict[str, Any]) -> None:
    written = parsed(set_up(name, STDIO, REMOTE))[path][table]
    assert written["my tools"].items() >= stdio.items()
    assert written["remote"].items() >= remote.items()
    assert not {"my tools", "remote"} & parsed(set_up(name))[path].get(table, {}).keys()


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
    argv = preset.build_command(TASK, {"command": command})
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout == f"<{TASK}><{TASK}>[{TASK}]"
    assert done.returncode == 3
    assert preset.setup(wanted("shell")) == HarnessSetup()
    assert preset.package is None


@pytest.mark.parametrize("settings", [{}, {"command": ""}])
def test_shell_without_a_command(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"custom_shell\.command"):
        load_harness("shell").build_command(TASK, settings)


@pytest.mark.parametrize("text", ["plain", 'a "b" \\ c', "tab\tnew\nline\x00\x1f\x7f", "größer 東京 🙂"])
def test_toml_string(text: str) -> None:
    assert tomllib.loads(f"x = {toml_string(text)}") == {"x": text}


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
