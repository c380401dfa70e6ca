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

from polar.engines.scripted.play import PlaySet, TurnContext
from polar.engines.scripted.tool_adapter import OfferedTool, read_offered_tools
from polar.rendering.template import ChatMessage
from polar.rendering.tokenizer import TokenIds, Tokenizer

_PLAY_SELECTOR = re.compile(r"\bPLAY:([\w.-]+)")
_TOOLS_OPENING = re.compile(r"<tools>\n")
_TOOL_RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
_ASSISTANT = "assistant"
_TURNS_REMEMBERED = 8192


def join_content_text(content: Any) -> str:
    """A message's text; parts that are no text don't matter here."""
    if isinstance(content, list):
        return "\n".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""


class TurnContextReader:
    """Reads requests, with the names of the plays that there are and the tokenizer that wrote the prompts."""

    def __init__(self, plays: PlaySet, tokenizer: Tokenizer) -> None:
        self._plays = plays
        self._tokenizer = tokenizer
        self._turn_start_id = tokenizer.added_tokens.get("<|im_start|>")
        self._turn_end_id = tokenizer.added_tokens.get("<|im_end|>")
        self._read_turn = lru_cache(maxsize=_TURNS_REMEMBERED)(self._decode_turn)

    def read_messages(
        self, messages: Sequence[ChatMessage], tools: Sequence[Any] | None, prompt: TokenIds
    ) -> TurnContext:
        turns = ((str(message.get("role")), join_content_text(message.get("content"))) for message in messages)
        scene = self._read_context(turns, prompt)
        scene.tools = read_offered_tools(tools)
        return scene

    def read_ids(self, prompt: TokenIds) -> TurnContext:
        turns = list(self._split_turns(prompt))
        if turns and turns[-1][0] == _ASSISTANT:
            turns.pop()  # the one to be written
        scene = self._read_context(turns, prompt)
        if turns and turns[0][0] == "system":
            scene.tools = _read_listed_tools(turns[0][1])
        return scene

    def _read_context(
        self, turns: Sequence[tuple[str, str]] | Iterator[tuple[str, str]], prompt: TokenIds
    ) -> TurnContext:
        scene = TurnContext(thinking=self._detect_thinking(prompt))
        for role, text in turns:
            if role == _ASSISTANT:
                scene.turn_index += 1
            elif role == "user":
                text = _TOOL_RESPONSE.sub("", text)
                named = [name for name in _PLAY_SELECTOR.findall(text) if name in self._plays]
                if named:
                    # Counted from here on: a sub-agent may begin with its parent's whole conversation.
                    scene.play, scene.turn_index = named[-1], 0
                elif (found := self._plays.find_matching(text)) is not None and found != scene.play:
                    scene.play, scene.turn_index = found, 0  # once: harnesses say the task again, as a reminder
        return scene

    def _split_turns(self, prompt: TokenIds) -> Iterator[tuple[str, str]]:
        if self._turn_start_id is None:
            return
        starts = np.flatnonzero(prompt == self._turn_start_id).tolist()
        for start, stop in pairwise([*starts, len(prompt)]):
            yield self._read_turn(prompt[start + 1 : stop].tobytes())

    def _decode_turn(self, ids: bytes) -> tuple[str, str]:
        """The turn's role and text."""
        turn = np.frombuffer(ids, dtype=np.int32).tolist()
        if self._turn_end_id in turn:
            turn = turn[: turn.index(self._turn_end_id)]
        role, _, text = self._tokenizer.decode(turn).partition("\n")
        return role, text

    def _detect_thinking(self, prompt: TokenIds) -> Any:
        tail = self._tokenizer.decode(prompt[-8:].tolist()).rstrip()
        if tail.endswith("<think>"):
            return "begun"
        return "over" if tail.endswith("</think>") else "possible"


def _read_listed_tools(system: str) -> list[OfferedTool]:
    """The last list there is: a system prompt may have such an element of its own before it."""
    for before in reversed(list(_TOOLS_OPENING.finditer(system))):
        listed, end, _ = system[before.end() :].partition("</tools>")
        try:
            if end and (found := read_offered_tools([json.loads(line) for line in listed.splitlines()])):
                return found
        except ValueError:
            continue
    return []
