"""What a generation says, decided in full before its first token: the turn that a request asks for, as token ids.

A turn is found by the request's messages, or by its prompt's ids, which must tell as much: else a gateway that renders
prompts itself would hear another play. So the ids are read back: turns are told by ChatML's control *tokens* (text that
merely spells them doesn't count), tools by the JSON lines of the system turn.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from polar.engines.api_server import wire
from polar.engines.api_server.backend import FinishReason, GenerationRequest, OutputTracker
from polar.engines.api_server.request_reader import join_content_text
from polar.engines.scripted.play import (
    OfferedTool,
    PlaySet,
    ScriptedTurn,
    TurnContext,
    read_offered_tools,
    render_output,
)
from polar.engines.scripted.sampler import DriftingEncoder, context_states
from polar.records.exchange import TokenIds
from polar.rendering.tokenizer import Tokenizer

BLOCK_TOKENS = 16

_PLAY_SELECTOR = re.compile(r"\bPLAY:([\w.-]+)")
_TOOLS_OPENING = re.compile(r"<tools>\n")
_TOOL_RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
_ASSISTANT = "assistant"
_TURNS_REMEMBERED = 8192


class Script(Struct):
    """All that is settled before the first token."""

    turn: ScriptedTurn
    context: TurnContext
    state: int  # of the prompt, under version 0
    blocks: list[int]  # the states at each full block of the prompt
    ids: list[int]
    texts: list[str]  # what each id adds to the visible output
    finish_reason: FinishReason
    stop_reason: int | str | None


class ScriptWriter:
    def __init__(self, tokenizer: Tokenizer, plays: PlaySet, encoder: DriftingEncoder) -> None:
        self._tokenizer = tokenizer
        self._plays = plays
        self._encoder = encoder
        self._context_reader = TurnContextReader(plays, tokenizer)
        self._end_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)

    def write(self, request: GenerationRequest) -> Script:
        context = self._context_reader.read(request)
        turn = self._plays.next_turn(context)
        states = context_states(0, request.prompt)
        state = int(states[-1])
        end = self._tokenizer.special_tokens.get("eos_token", "") if turn.finish_reason == "stop" else ""
        sampled = self._encoder.encode(render_output(turn, context) + end, state, request.sampling.seed or 0)
        tracker = OutputTracker(request, self._end_ids, self._tokenizer)
        ids: list[int] = []
        texts: list[str] = []
        for id in sampled:
            ids.append(id)
            texts.append(tracker.add(id))
            if tracker.finish_reason is not None:
                break
        else:
            if texts:
                texts[-1] += tracker.flush()
        return Script(
            turn,
            context,
            state=state,
            blocks=states[BLOCK_TOKENS::BLOCK_TOKENS].tolist(),
            ids=ids,
            texts=texts if tracker.shown_length is None else _cut_texts(texts, tracker.shown_length),
            finish_reason=tracker.finish_reason or turn.finish_reason,
            stop_reason=tracker.stop_reason,
        )


def _cut_texts(texts: list[str], length: int) -> list[str]:
    """Nothing of a stop string is shown, also where it began some tokens before its end."""
    cut, seen = [], 0
    for text in texts:
        cut.append(text[: max(length - seen, 0)])
        seen += len(text)
    return cut


class TurnContextReader:
    """Reads requests, with the names of the plays that there are and the tokenizer that wrote the prompts."""

    def __init__(self, plays: PlaySet, tokenizer: Tokenizer) -> None:
        self._plays = plays
        self._tokenizer = tokenizer
        self._turn_start_id = tokenizer.added_tokens.get("<|im_start|>")
        self._turn_end_id = tokenizer.added_tokens.get("<|im_end|>")
        self._read_turn = lru_cache(maxsize=_TURNS_REMEMBERED)(self._decode_turn)

    def read(self, request: GenerationRequest) -> TurnContext:
        return self._read_ids(request.prompt) if request.chat is None else self._read_chat(request.chat, request.prompt)

    def _read_chat(self, chat: wire.ChatRequest, prompt: TokenIds) -> TurnContext:
        turns = ((str(message.get("role")), join_content_text(message.get("content"))) for message in chat.messages)
        context = self._read_context(turns, prompt)
        context.tools = read_offered_tools(chat.callable_tools)
        context.forced_tool = _find_forced_tool(chat.tool_choice)
        return context

    def _read_ids(self, prompt: TokenIds) -> TurnContext:
        turns = list(self._split_turns(prompt))
        if turns and turns[-1][0] == _ASSISTANT:
            turns.pop()  # the one to be written
        context = self._read_context(turns, prompt)
        if turns and turns[0][0] == "system":
            context.tools = _read_listed_tools(turns[0][1])
        return context

    def _read_context(
        self, turns: Sequence[tuple[str, str]] | Iterator[tuple[str, str]], prompt: TokenIds
    ) -> TurnContext:
        context = TurnContext(thinking=self._detect_thinking(prompt))
        for role, text in turns:
            if role == _ASSISTANT:
                context.turn_index += 1
            elif role == "user":
                text = _TOOL_RESPONSE.sub("", text)
                named = [name for name in _PLAY_SELECTOR.findall(text) if name in self._plays]
                if named:
                    # Counted from here on: a sub-agent may begin with its parent's whole conversation.
                    context.play, context.turn_index = named[-1], 0
                elif (found := self._plays.find_matching(text)) is not None and found != context.play:
                    context.play, context.turn_index = found, 0  # once: harnesses say the task again, as a reminder
        return context

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


def _find_forced_tool(choice: str | dict[str, Any] | None) -> str | None:
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) else None
    return function.get("name") if isinstance(function, dict) else None
