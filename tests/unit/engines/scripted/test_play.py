"""What is said: turns, the tools of real harnesses, and plays from files."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar.engines.scripted.play import (
    OfferedTool,
    Play,
    PlaySet,
    ScriptedCall,
    ScriptedFile,
    ScriptedTurn,
    TurnContext,
    make_any_call,
    make_shell_call,
    make_write_call,
    read_offered_tools,
    render_output,
)
from polar.errors import ConfigError
from tests.captures import load


def captured_tools(name: str, number: int = 0) -> list[OfferedTool]:
    """The tools that a real harness offered, in chat form whatever its dialect."""
    found = []
    for tool in load(name)[number]["body"]["tools"]:
        for one in tool.get("functionDeclarations", [tool]):
            function = one.get("function", one)
            keys = [key for key in ("parameters", "input_schema", "parametersJsonSchema") if key in function]
            schema = function[keys[0]] if keys else {}
            if "name" in function:
                found.append({"type": "function", "function": {"name": function["name"], "parameters": schema}})
    return read_offered_tools(found)


def tool(name: str, required: list[str] | None = None, **properties: Any) -> OfferedTool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
    }
    return OfferedTool(name, parameters)


@pytest.mark.parametrize(
    ("capture", "number", "call"),
    [
        ("codex", 0, ScriptedCall("exec_command", {"cmd": "ls"})),
        ("claude", 0, ScriptedCall("Bash", {"command": "ls"})),
        ("gemini", 0, ScriptedCall("run_shell_command", {"command": "ls"})),
        ("qwen", 0, ScriptedCall("run_shell_command", {"command": "ls"})),
        ("opencode", 1, ScriptedCall("bash", {"command": "ls"})),
        ("pi", 0, ScriptedCall("bash", {"command": "ls"})),
        ("mswe", 0, ScriptedCall("bash", {"command": "ls"})),
        ("agents_chat", 0, ScriptedCall("bash", {"command": "ls"})),
    ],
)
def test_a_command_fits_the_tools_of_real_harnesses(capture: str, number: int, call: ScriptedCall) -> None:
    assert make_shell_call(captured_tools(capture, number), "ls") == call


@pytest.mark.parametrize(
    ("capture", "number", "call"),
    [
        ("claude", 0, ScriptedCall("Write", {"file_path": "a", "content": "it's"})),
        ("gemini", 0, ScriptedCall("write_file", {"file_path": "a", "content": "it's"})),
        ("qwen", 0, ScriptedCall("write_file", {"file_path": "a", "content": "it's"})),
        ("opencode", 1, ScriptedCall("write", {"filePath": "a", "content": "it's"})),
        ("pi", 0, ScriptedCall("write", {"path": "a", "content": "it's"})),
        ("codex", 0, ScriptedCall("exec_command", {"cmd": "printf %s 'it'\"'\"'s' > a"})),
        ("mswe", 0, ScriptedCall("bash", {"command": "printf %s 'it'\"'\"'s' > a"})),
    ],
)
def test_a_file_fits_the_tools_of_real_harnesses(capture: str, number: int, call: ScriptedCall) -> None:
    found = make_write_call(captured_tools(capture, number), "a", "it's")
    assert found is not None
    assert found.name == call.name
    assert found.arguments == call.arguments


def test_required_arguments_get_plausible_values() -> None:
    shell = tool(
        "run",
        command={"type": "array", "items": {"type": "string"}},
        description={"type": "string"},
        is_background={"type": "boolean"},
        timeout={"type": "integer"},
        timeout_ms={"type": ["number", "null"]},
        mode={"enum": ["fast", "slow"]},
        workdir={"type": "STRING"},
        shell={"type": "string", "default": "sh"},
        options={"type": "object", "properties": {"deep": {"anyOf": [{"type": "boolean"}]}}, "required": ["deep"]},
        tags={"type": "array"},
    )
    assert make_shell_call([shell], "ls") == ScriptedCall(
        "run",
        {
            "command": ["bash", "-lc", "ls"],
            "description": "run it",
            "is_background": False,
            "timeout": 60,
            "timeout_ms": 60000,
            "mode": "fast",
            "workdir": ".",
            "shell": "sh",
            "options": {"deep": False},
            "tags": [],
        },
    )


def test_what_is_no_shell_is_not_taken_for_one() -> None:
    editor = tool("edit", command={"type": "string", "enum": ["view", "create"]}, path={"type": "string"})
    task = tool("task", ["prompt"], prompt={"type": "string"}, command={"type": "string"})
    monitor = tool("watch_it", command={"type": "string"})
    assert make_shell_call([editor, task], "ls") is None
    assert make_shell_call([editor, task, monitor, tool("Bash", command={"type": "string"})], "ls") == ScriptedCall(
        "Bash", {"command": "ls"}
    )
    assert make_shell_call([monitor], "ls") == ScriptedCall("watch_it", {"command": "ls"})
    assert read_offered_tools([{"type": "function"}, "no", {"type": "web_search"}]) == []
    assert make_any_call(OfferedTool("f", {"required": "x", "properties": 3})) == ScriptedCall("f", {})


BASH = tool("bash", command={"type": "string"})
TURNS = Play([ScriptedTurn(text="one", shell="ls"), ScriptedTurn(text="two"), ScriptedTurn(reasoning="hm")])


def test_turns_follow_from_the_number_of_assistant_messages() -> None:
    said = [TURNS.next_turn(TurnContext(turn, tools=[BASH])) for turn in range(5)]
    assert said[:3] == TURNS.turns
    assert said[3:] == [ScriptedTurn(text="Done."), ScriptedTurn(text="Done.")]
    assert Play([ScriptedTurn(text="only")]).next_turn(TurnContext(7)).text == "only"


def test_requests_without_tools_get_an_aside() -> None:
    assert TURNS.next_turn(TurnContext(0)).text == TURNS.aside
    assert Play(TURNS.turns, aside="").next_turn(TurnContext(0)) is TURNS.turns[0]
    assert Play([ScriptedTurn(text="talk")]).next_turn(TurnContext(0)).text == "talk", (
        "a play that needs no tools is played anywhere"
    )


def test_raw_output() -> None:
    scene = TurnContext(tools=[BASH])
    turn = ScriptedTurn(reasoning="hm", text="é", calls=[ScriptedCall("f", {"x": "é"})], shell="ls")
    assert render_output(turn, scene) == (
        '<think>hm</think>é<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    )
    assert render_output(ScriptedTurn(text="t", reasoning="r"), TurnContext(thinking="begun")) == "r</think>t"
    assert render_output(ScriptedTurn(text="t"), TurnContext(thinking="begun")) == "</think>t"
    assert render_output(ScriptedTurn(text="t", reasoning="r"), TurnContext(thinking="over")) == "t"
    assert render_output(ScriptedTurn(text="t", shell="ls"), TurnContext()) == "t\n```bash\nls\n```"
    assert render_output(ScriptedTurn(raw="<tool_call>{", text="x"), scene) == "<tool_call>{"
    assert render_output(ScriptedTurn(write=ScriptedFile("p", "c")), scene).startswith('<tool_call>{"name": "bash"')


def test_a_forced_tool_is_called() -> None:
    other = tool("other", n={"type": "integer"})
    assert render_output(ScriptedTurn(text="t"), TurnContext(tools=[BASH, other], forced_tool="other")) == (
        't<tool_call>{"name": "other", "arguments": {"n": 1}}</tool_call>'
    )
    assert "bash" in render_output(ScriptedTurn(shell="ls"), TurnContext(tools=[other, BASH], forced_tool=""))
    assert "other" in render_output(ScriptedTurn(), TurnContext(tools=[other, BASH], forced_tool=""))


def test_random_plays_repeat() -> None:
    assert Play.random(1, 4, 30) == Play.random(1, 4, 30) != Play.random(2, 4, 30)
    assert Play.random(1, 6, 30).turns[:3] == Play.random(1, 4, 30).turns[:3]
    play = Play.random(5, 3, 30)
    assert [turn.shell is not None for turn in play.turns] == [True, True, False]
    assert all(turn.reasoning and turn.text for turn in play.turns)


def test_plays_from_files(tmp_path: Path) -> None:
    toml = tmp_path / "play.toml"
    toml.write_text(
        'aside = "A title"\n[[turns]]\ntext = "one"\nshell = "ls"\nfail = 503\nfail_times = 1\n'
        '[[turns]]\nwrite = {path = "p", content = "c"}\n[[turns]]\ncalls = [{name = "f", arguments = {x = 1}}]\n'
        '[plays.child]\nmatch = "sort|order"\n[[plays.child.turns]]\ntext = "child"\ndelay = 1\n'
    )
    plays = PlaySet.load(toml)
    assert plays.next_turn(TurnContext()).text == "A title"
    assert plays.next_turn(TurnContext(0, tools=[BASH])) == ScriptedTurn(text="one", shell="ls", fail=503, fail_times=1)
    assert plays.next_turn(TurnContext(1, tools=[BASH])).write == ScriptedFile("p", "c")
    assert plays.next_turn(TurnContext(2, tools=[BASH])).calls == [ScriptedCall("f", {"x": 1})]
    assert plays.next_turn(TurnContext(0, "child")).text == "child"
    assert "child" in plays
    assert "nobody" not in plays
    assert plays.find_matching("Please sort it.") == "child"
    assert plays.find_matching("Please keep it.") is None
    (tmp_path / "play.json").write_text(json.dumps({"turns": [{"text": "from JSON"}]}))
    assert PlaySet.load(tmp_path / "play.json").next_turn(TurnContext()).text == "from JSON"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"turns": [{"txt": "misspelt"}]}',
        '{"turns": [{"fail": "loudly"}]}',
        '{"plays": {"child": {"match": "("}}}',
    ],
)
def test_a_play_with_a_mistake_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "play.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"play\.json"):
        PlaySet.load(path)


def test_a_play_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        PlaySet.load(tmp_path / "none.toml")
