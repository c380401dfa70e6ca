"""What the model says: a play is a list of turns, and the turn that comes next follows from the request alone.

The server keeps no state of a conversation. The number of assistant messages says which turn it is, so retries and
sub-agents that send the same messages hear the same words.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from polar.errors import ConfigError

Fault = Literal["midstream", "close", "garbage", "hang"]
MAIN_PLAY = "main"
Schema = Mapping[str, Any]


class OfferedTool(Struct, frozen=True):
    name: str
    parameters: Schema

    @property
    def properties(self) -> Mapping[str, Schema]:
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping):
            return {}
        return {name: schema if isinstance(schema, Mapping) else {} for name, schema in properties.items()}

    @property
    def required(self) -> Sequence[str]:
        required = self.parameters.get("required")
        return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


class ScriptedCall(Struct):
    name: str
    arguments: dict[str, Any] = {}


class ScriptedFile(Struct, forbid_unknown_fields=True):
    path: str
    content: str


class ScriptedTurn(Struct, forbid_unknown_fields=True):
    """One reply. What it says:"""

    reasoning: str = ""
    text: str = ""
    calls: list[ScriptedCall] = field(default_factory=list)
    shell: str | None = None  # a command, for whatever tool of the request runs one
    write: ScriptedFile | None = None  # likewise a file to write
    raw: str | None = None  # the model's whole output up to its end token, instead of all of the above
    finish_reason: Literal["stop", "length", "abort"] = "stop"  # the last two: the end token is never sampled

    # How it is said:
    delay: float = 0.0  # seconds before the first token
    token_delay: float | None = None  # seconds between tokens, at least, instead of the server's rate

    # What goes wrong. A number is an HTTP status; `midstream`: an error event; `close`: the connection breaks;
    # `garbage`: bytes that are no reply; `hang`: nothing more ever comes.
    fail: int | Fault | None = None
    fail_after: int = 3  # tokens that come through before it goes wrong; 0 for none (a status has none)
    fail_times: int | None = None  # only the first so many times that this turn is asked for
    # Spoiled log-probabilities: of one token in the middle (nan: null on the wire, as vLLM writes it; sentinel: -9999),
    # of the last one, which has none (short), or of all (missing).
    logprobs: Literal["nan", "sentinel", "short", "missing"] | None = None

    @property
    def uses_tools(self) -> bool:
        return bool(self.calls) or self.shell is not None or self.write is not None


class TurnContext(Struct):
    """What a request asks for, as far as a play needs to know."""

    turn_index: int = 0
    play: str | None = None
    tools: list[OfferedTool] = field(default_factory=list)
    forced_tool: str | None = None  # the tool that must be called; "" for any
    thinking: Literal["possible", "begun", "over"] = "possible"  # what the prompt ends in


class Play(Struct, forbid_unknown_fields=True):
    turns: list[ScriptedTurn] = field(default_factory=list)
    aside: str = "A short note on the task."
    """The answer to a request without tools, such as for a title or a summary, in a play whose turns use tools. Empty:
    the turns are played there, too."""
    match: str = ""
    """A regular expression: a user message that it is found in begins this play, where no play is named."""

    @classmethod
    def default(cls) -> "Play":
        return cls(
            [
                ScriptedTurn(
                    reasoning="I will create the file first.",
                    text="Creating the file.",
                    shell="echo 'hello from polar' > polar.txt",
                ),
                ScriptedTurn(
                    reasoning="Now I read it back to be sure.", text="Reading it back.", shell="cat polar.txt"
                ),
                ScriptedTurn(
                    reasoning="The file has the right content.", text="Done: polar.txt says hello from polar."
                ),
            ]
        )

    @classmethod
    def random(cls, seed: int, turns: int = 4, words: int = 40) -> "Play":
        """Random words and commands; turn number i is the same for the same seed, however many turns there are."""
        played = []
        for index in range(turns):
            random = Random(f"{seed}:{index}")
            turn = ScriptedTurn(reasoning=_write_prose(random, words // 2), text=_write_prose(random, words))
            if index < turns - 1:
                turn.shell = f"echo {' '.join(random.choices(_PLAIN_WORDS, k=4))} | tee note-{index}.txt"
            played.append(turn)
        return cls(played)

    def next_turn(self, context: TurnContext) -> ScriptedTurn:
        uses_tools = any(turn.uses_tools for turn in self.turns)
        if not context.tools and uses_tools and self.aside:
            return ScriptedTurn(text=self.aside)
        if context.turn_index < len(self.turns):
            return self.turns[context.turn_index]
        return ScriptedTurn(text=(self.turns[-1].text if self.turns else "") or "Done.")


class PlaySet:
    """A main play, and others that a user message selects: by saying `PLAY:name`, or by what their `match` is found
    in, so that one engine plays many tasks whose texts know nothing of it."""

    def __init__(self, main: Play | None = None, named: Mapping[str, Play] | None = None) -> None:
        self._plays = {**(named or {}), MAIN_PLAY: main or Play.default()}
        self._matches: list[tuple[re.Pattern[str], str]] = []
        for name, play in self._plays.items():
            if play.match:
                try:
                    self._matches.append((re.compile(play.match), name))
                except re.error as error:
                    raise ConfigError(f"{name}: `match` is no pattern: {error}.") from error

    @classmethod
    def load(cls, path: str | Path) -> "PlaySet":
        """A TOML or JSON file: the main play's fields at the top, named ones under `plays`."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
            written = msgspec.convert(data, _PlayFile)
            return cls(Play(written.turns, written.aside, written.match), written.plays)
        except (OSError, ValueError, ConfigError) as error:  # both parsers' and msgspec's errors are ValueErrors
            raise ConfigError(f"The play {path} can't be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._plays

    def find_matching(self, text: str) -> str | None:
        """The first play whose `match` is found in a user's text."""
        return next((name for pattern, name in self._matches if pattern.search(text)), None)

    def next_turn(self, context: TurnContext) -> ScriptedTurn:
        return self._plays[context.play or MAIN_PLAY].next_turn(context)


class _PlayFile(Play):
    plays: dict[str, Play] = field(default_factory=dict)


def render_output(turn: ScriptedTurn, context: TurnContext) -> str:
    """The text that the model writes, markup included, without the end token."""
    if turn.raw is not None:
        return turn.raw
    calls = _make_calls(turn, context)
    text = turn.text
    if not calls and turn.shell is not None:
        text += f"\n```bash\n{turn.shell}\n```"  # nothing runs commands here: say it
    out = ""
    if turn.reasoning and context.thinking != "over":
        out = ("" if context.thinking == "begun" else "<think>") + turn.reasoning + "</think>"
    elif context.thinking == "begun":
        out = "</think>"
    return out + text + "".join(_call_text(call) for call in calls)


def _make_calls(turn: ScriptedTurn, context: TurnContext) -> Sequence[ScriptedCall]:
    calls = list(turn.calls)
    if turn.shell is not None and (call := make_shell_call(context.tools, turn.shell)):
        calls.append(call)
    if turn.write is not None and (call := make_write_call(context.tools, turn.write.path, turn.write.content)):
        calls.append(call)
    if context.forced_tool is None or (calls and context.forced_tool in ("", calls[0].name)):
        return calls
    forced = [tool for tool in context.tools if context.forced_tool in ("", tool.name)]
    return [make_any_call(forced[0])] if forced else calls


def _call_text(call: ScriptedCall) -> str:
    body = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>{json.dumps(body, ensure_ascii=False)}</tool_call>"


def read_offered_tools(tools: Iterable[Any] | None) -> list[OfferedTool]:
    """The function tools of a chat request."""
    offered = []
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters")
            offered.append(OfferedTool(name, parameters if isinstance(parameters, Mapping) else {}))
    return offered


# "Run this" and "write that file" are fitted to whatever tools a harness offers, as their JSON schemas describe them. A
# schema is a document of the harness's making, so it is plain data here; nothing in it is taken for granted.

_COMMAND_NAMES = ("command", "cmd")
_PATH_NAMES = ("file_path", "path", "filePath", "absolute_path", "filename")
_CONTENT_NAMES = ("content", "contents", "file_text", "text")
_SHELL_NAMES = ("bash", "shell", "exec", "terminal", "run")


def make_shell_call(tools: Sequence[OfferedTool], command: str) -> ScriptedCall | None:
    """A call that runs `command` in a shell, or None where no tool does that."""
    candidates = []
    for tool in tools:
        key = next((name for name in _COMMAND_NAMES if name in tool.properties), None)
        # A `command` with fixed values is an editor's verb; one that may be left out is some other tool's extra.
        if key is not None and key in tool.required and "enum" not in tool.properties[key]:
            shell_like = any(word in tool.name.lower() for word in _SHELL_NAMES)
            candidates.append((not shell_like, tool, key))
    if not candidates:
        return None
    _, tool, key = min(candidates, key=lambda candidate: candidate[0])
    words = _find_json_type(tool.properties[key]) == "array"
    return _fill_required(tool, {key: ["bash", "-lc", command] if words else command})


def make_write_call(tools: Sequence[OfferedTool], path: str, content: str) -> ScriptedCall | None:
    """A call that writes a file: with a tool made for it, else in a shell."""
    for tool in tools:
        path_key = next((name for name in _PATH_NAMES if name in tool.required), None)
        content_key = next((name for name in _CONTENT_NAMES if name in tool.required), None)
        if path_key is not None and content_key is not None:
            return _fill_required(tool, {path_key: path, content_key: content})
    command = f"printf %s {shlex.quote(content)} > {shlex.quote(path)}"
    return make_shell_call(tools, command)


def make_any_call(tool: OfferedTool) -> ScriptedCall:
    """A call of that tool with plausible arguments, for requests that force one."""
    return _fill_required(tool, {})


def _fill_required(tool: OfferedTool, arguments: dict[str, Any]) -> ScriptedCall:
    for name in tool.required:
        if name not in arguments:
            arguments[name] = _make_plausible_value(name, tool.properties.get(name, {}))
    return ScriptedCall(tool.name, arguments)


def _find_json_type(schema: Schema) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((one for one in kind if one != "null"), None)
    if isinstance(kind, str):
        return kind.lower()  # Google's schemas say STRING
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            return _find_json_type(choices[0])
    return "string"


def _make_plausible_value(name: str, schema: Schema) -> Any:
    if "default" in schema:
        return schema["default"]
    if "const" in schema:
        return schema["const"]
    if isinstance(values := schema.get("enum"), list) and values:
        return values[0]
    kind = _find_json_type(schema)
    if kind == "boolean":
        return False
    if kind in ("integer", "number"):
        seconds = 60 if "time" in name.lower() else 1
        return seconds * 1000 if name.lower().endswith("ms") else seconds
    if kind == "array":
        return []
    if kind == "object":
        return _fill_required(OfferedTool(name, schema), {}).arguments
    if any(word in name.lower() for word in ("path", "dir", "cwd")):
        return "."
    return "run it"


# fmt: off
_PLAIN_WORDS = (
    "amber", "answer", "bridge", "button", "canyon", "circle", "copper", "custom", "desert", "driver", "engine",
    "fabric", "figure", "forest", "garden", "golden", "harbor", "hollow", "island", "jacket", "kernel", "ladder",
    "legend", "market", "meadow", "mirror", "number", "object", "orange", "packet", "parser", "pebble", "planet",
    "pocket", "puzzle", "rabbit", "record", "rocket", "sample", "shadow", "signal", "silver", "socket", "spirit",
    "stream", "string", "summer", "system", "target", "thread", "ticket", "timber", "tunnel", "valley", "vector",
    "velvet", "vessel", "violet", "window", "winter",
)
_WORDS = (
    *_PLAIN_WORDS, "having", "the", "of", "and", "with", "naïve", "Größe", "東京", "—", "🙂", "café", "x_2", "3.14",
)
# fmt: on


def _write_prose(random: Random, words: int) -> str:
    """Sentences, some of them with characters that take several bytes."""
    sentences = []
    while words > 0:
        length = min(words, random.randint(5, 12))
        sentences.append(" ".join(random.choices(_WORDS, k=length)).capitalize() + ".")
        words -= length
    return " ".join(sentences)
