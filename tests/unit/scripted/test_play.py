"""What is said: turns, the tools of real harnesses, and plays from files."""

import json
from pathlib import Path
from typing import Any

import pytest

from polar.engines.scripted.adapt import Call, OfferedTool, any_call, offered_tools, shell_call, write_call
from polar.engines.scripted.play import File, Play, Plays, Scene, Turn, raw_output
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
    return offered_tools(found)


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
        ("codex", 0, Call("exec_command", {"cmd": "ls"})),
        ("claude", 0, Call("Bash", {"command": "ls"})),
        ("gemini", 0, Call("run_shell_command", {"command": "ls"})),
        ("qwen", 0, Call("run_shell_command", {"command": "ls"})),
        ("opencode", 1, Call("bash", {"command": "ls"})),
        ("pi", 0, Call("bash", {"command": "ls"})),
        ("mswe", 0, Call("bash", {"command": "ls"})),
        ("agents_chat", 0, Call("bash", {"command": "ls"})),
    ],
)
def test_a_command_fits_the_tools_of_real_harnesses(capture: str, number: int, call: Call) -> None:
    assert shell_call(captured_tools(capture, number), "ls") == call


@pytest.mark.parametrize(
    ("capture", "number", "call"),
    [
        ("claude", 0, Call("Write", {"file_path": "a", "content": "it's"})),
        ("gemini", 0, Call("write_file", {"file_path": "a", "content": "it's"})),
        ("qwen", 0, Call("write_file", {"file_path": "a", "content": "it's"})),
        ("opencode", 1, Call("write", {"filePath": "a", "content": "it's"})),
        ("pi", 0, Call("write", {"path": "a", "content": "it's"})),
        ("codex", 0, Call("exec_command", {"cmd": "printf %s 'it'\"'\"'s' > a"})),
        ("mswe", 0, Call("bash", {"command": "printf %s 'it'\"'\"'s' > a"})),
    ],
)
def test_a_file_fits_the_tools_of_real_harnesses(capture: str, number: int, call: Call) -> None:
    found = write_call(captured_tools(capture, number), "a", "it's")
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
    assert shell_call([shell], "ls") == Call(
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
    assert shell_call([editor, task], "ls") is None
    assert shell_call([editor, task, monitor, tool("Bash", command={"type": "string"})], "ls") == Call(
        "Bash", {"command": "ls"}
    )
    assert shell_call([monitor], "ls") == Call("watch_it", {"command": "ls"})
    assert offered_tools([{"type": "function"}, "no", {"type": "web_search"}]) == []
    assert any_call(OfferedTool("f", {"required": "x", "properties": 3})) == Call("f", {})


BASH = tool("bash", command={"type": "string"})
TURNS = Play([Turn(text="one", shell="ls"), Turn(text="two"), Turn(reasoning="hm")])


def test_turns_follow_from_the_number_of_assistant_messages() -> None:
    said = [TURNS.next(Scene(turn, tools=[BASH])) for turn in range(5)]
    assert said[:3] == TURNS.turns
    assert said[3:] == [Turn(text="Done."), Turn(text="Done.")]
    assert Play([Turn(text="only")]).next(Scene(7)).text == "only"


def test_requests_without_tools_get_an_aside() -> None:
    assert TURNS.next(Scene(0)).text == TURNS.aside
    assert Play(TURNS.turns, aside="").next(Scene(0)) is TURNS.turns[0]
    assert Play([Turn(text="talk")]).next(Scene(0)).text == "talk", "a play that needs no tools is played anywhere"


def test_raw_output() -> None:
    scene = Scene(tools=[BASH])
    turn = Turn(reasoning="hm", text="é", calls=[Call("f", {"x": "é"})], shell="ls")
    assert raw_output(turn, scene) == (
        '<think>hm</think>é<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>'
        '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    )
    assert raw_output(Turn(text="t", reasoning="r"), Scene(thinking="begun")) == "r</think>t"
    assert raw_output(Turn(text="t"), Scene(thinking="begun")) == "</think>t"
    assert raw_output(Turn(text="t", reasoning="r"), Scene(thinking="over")) == "t"
    assert raw_output(Turn(text="t", shell="ls"), Scene()) == "t\n```bash\nls\n```"
    assert raw_output(Turn(raw="<tool_call>{", text="x"), scene) == "<tool_call>{"
    assert raw_output(Turn(write=File("p", "c")), scene).startswith('<tool_call>{"name": "bash"')


def test_a_forced_tool_is_called() -> None:
    other = tool("other", n={"type": "integer"})
    assert raw_output(Turn(text="t"), Scene(tools=[BASH, other], forced="other")) == (
        't<tool_call>{"name": "other", "arguments": {"n": 1}}</tool_call>'
    )
    assert "bash" in raw_output(Turn(shell="ls"), Scene(tools=[other, BASH], forced=""))
    assert "other" in raw_output(Turn(), Scene(tools=[other, BASH], forced=""))


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
    plays = Plays.load(toml)
    assert plays.next(Scene()).text == "A title"
    assert plays.next(Scene(0, tools=[BASH])) == Turn(text="one", shell="ls", fail=503, fail_times=1)
    assert plays.next(Scene(1, tools=[BASH])).write == File("p", "c")
    assert plays.next(Scene(2, tools=[BASH])).calls == [Call("f", {"x": 1})]
    assert plays.next(Scene(0, "child")).text == "child"
    assert "child" in plays
    assert "nobody" not in plays
    assert plays.matching("Please sort it.") == "child"
    assert plays.matching("Please keep it.") is None
    (tmp_path / "play.json").write_text(json.dumps({"turns": [{"text": "from JSON"}]}))
    assert Plays.load(tmp_path / "play.json").next(Scene()).text == "from JSON"


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
        Plays.load(path)


def test_a_play_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        Plays.load(tmp_path / "none.toml")
