"""What every harness preset keeps to, without running the harness."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from polar.harnesses import environment, inherited, known_by_command, load_harness
from polar.plugins import names

URL, KEY = "http://127.0.0.1:1234", "sk-polar-0123456789abcdefghijklmnop"


@pytest.mark.parametrize("name", names("harnesses"))
def test_preset(name: str, tmp_path: Path) -> None:
    preset = load_harness(name)
    assert preset.name == name
    home = tmp_path / "home"
    home.mkdir()
    variables = environment(URL, KEY, "a-model") | preset.configure(home, URL, KEY, "a-model")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in written:
        assert path.is_relative_to(home)
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".toml":
            tomllib.loads(path.read_text())
    said = "\n".join([*variables.values(), *(path.read_text() for path in written)])
    assert URL in said
    assert "a-model" in said
    assert KEY in variables.values()
    for variable, value in variables.items():  # none leads to the user's own home
        if variable.endswith(("_HOME", "_DIR")):
            assert Path(value).is_relative_to(home)


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
        ("python agent.py pi", None),
        ("echo pi", None),
    ],
)
def test_known_by_command(command: str, name: str | None) -> None:
    assert known_by_command(command.split()) == name


def test_a_harness_sees_neither_our_keys_nor_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_SERVER__TOKEN", "secret")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    monkeypatch.setenv("EDITOR", "vi")
    left = inherited(os.environ)
    assert "POLAR_SERVER__TOKEN" not in left
    assert "ANTHROPIC_AUTH_TOKEN" not in left
    assert left["EDITOR"] == "vi"
