"""What a request asks for: read from its messages, or from a prompt's token ids.

An id prompt must tell as much as the messages it was rendered from, or a gateway that renders prompts itself would
hear another play. So the ids are read back: turns are told by ChatML's control *tokens* (text that merely spells them
doesn't count), tools by the JSON lines of the system turn.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from polar.engines.scripted.adapt import OfferedTool, offered_tools
from polar.engines.scripted.play import Plays, Scene
from polar.rendering.template import ChatMessage
from polar.rendering.tokenizer import Ids, Tokenizer

_SELECTS = re.compile(r"\bPLAY:([\w.-]+)")
_TOOLS = re.compile(r"<tools>\n")
_RESULT = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
_ASSISTANT = "assistant"
_TURNS_REMEMBERED = 8192


def content_text(content: Any) -> str:
    """A message's text; parts that are no text don't matter here."""
    if isinstance(content, list):
        return "\n".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""


class Scenes:
    """Reads requests, with the names of the plays that there are and the tokenizer that wrote the prompts."""

    def __init__(self, plays: Plays, tokenizer: Tokenizer) -> None:
        self._plays = plays
        self._tokenizer = tokenizer
        self._open = tokenizer.added.get("<|im_start|>")
        self._close = tokenizer.added.get("<|im_end|>")
        self._read_turn = lru_cache(maxsize=_TURNS_REMEMBERED)(self._decode_turn)

    def of_messages(self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, prompt: Ids) -> Scene:
        turns = ((str(message.get("role")), content_text(message.get("content"))) for message in messages)
        scene = self._scene(turns, prompt)
        scene.tools = offered_tools(tools)
        return scene

    def of_ids(self, prompt: Ids) -> Scene:
        turns = list(self._turns(prompt))
        if turns and turns[-1][0] == _ASSISTANT:
            turns.pop()  # the one to be written
        scene = self._scene(turns, prompt)
        if turns and turns[0][0] == "system":
            scene.tools = _listed_tools(turns[0][1])
        return scene

    def _scene(self, turns: Sequence[tuple[str, str]] | Iterator[tuple[str, str]], prompt: Ids) -> Scene:
        scene = Scene(thinking=self._thinking(prompt))
        for role, text in turns:
            if role == _ASSISTANT:
                scene.turn += 1
            elif role == "user":
                text = _RESULT.sub("", text)
                named = [name for name in _SELECTS.findall(text) if name in self._plays]
                if named:
                    # Counted from here on: a sub-agent may begin with its parent's whole conversation.
                    scene.play, scene.turn = named[-1], 0
                elif (found := self._plays.matching(text)) is not None and found != scene.play:
                    scene.play, scene.turn = found, 0  # once: harnesses say the task again, as a reminder
        return scene

    def _turns(self, prompt: Ids) -> Iterator[tuple[str, str]]:
        if self._open is None:
            return
        starts = np.flatnonzero(prompt == self._open).tolist()
        for start, stop in pairwise([*starts, len(prompt)]):
            yield self._read_turn(prompt[start + 1 : stop].tobytes())

    def _decode_turn(self, ids: bytes) -> tuple[str, str]:
        """The turn's role and text."""
        turn = np.frombuffer(ids, dtype=np.int32).tolist()
        if self._close in turn:
            turn = turn[: turn.index(self._close)]
        role, _, text = self._tokenizer.decode(turn).partition("\n")
        return role, text

    def _thinking(self, prompt: Ids) -> Any:
        tail = self._tokenizer.decode(prompt[-8:].tolist()).rstrip()
        if tail.endswith("<think>"):
            return "begun"
        return "over" if tail.endswith("</think>") else "possible"


def _listed_tools(system: str) -> list[OfferedTool]:
    """The last list there is: a system prompt may have such an element of its own before it."""
    for before in reversed(list(_TOOLS.finditer(system))):
        listed, end, _ = system[before.end() :].partition("</tools>")
        try:
            if end and (found := offered_tools([json.loads(line) for line in listed.splitlines()])):
                return found
        except ValueError:
            continue
    return []
