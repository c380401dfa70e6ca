"""What was said, beside the tokens: a session's calls as OpenAI chat messages, whatever dialect they came in.

Messages are the harness's own words and the model's replies as they were parsed. They are for reading, and for training
by imitation; the invariant is about tokens, and nothing here takes part in it.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from polar.dialects.openai_chat import OpenAIChat
from polar.export.base import SessionItem
from polar.records.exchange import Exchange
from polar.records.spans import ExchangeRole
from polar.records.trajectory import Trace
from polar.records.wire import NO_TRACE_MESSAGES, TraceMessages
from polar.trajectory.conversations import ModelCall, link_turns
from polar.trajectory.session import read_session_calls
from polar.types import Message, Part, Reasoning, Request, Tool, ToolCall, ToolResult

_CHAT_DIALECT = OpenAIChat()
_GATEWAY_CALL_ID = re.compile(r"x[0-9a-z]{24}_\d+")
"""A tool call's id as the gateway made it, before a dialect put its prefix in front."""


class ConversationCall(Struct):
    """One model call of a conversation."""

    exchange: Exchange
    call: ModelCall
    role: ExchangeRole
    agent_id: str

    @property
    def request_messages(self) -> list[Message]:
        """What the model was shown."""
        return [_use_gateway_ids(message) for message in self.call.request.messages]

    @property
    def new_messages(self) -> list[Message]:
        """What came since the model spoke last."""
        messages = self.request_messages
        last = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=-1)
        return messages[last + 1 :]

    @property
    def reply_message(self) -> Message:
        """What it said."""
        return _use_gateway_ids(
            Message("assistant", [] if self.exchange.reply is None else list(self.exchange.reply.parts))
        )

    @property
    def transcript(self) -> list[Message]:
        return [*self.request_messages, self.reply_message]

    @property
    def tools(self) -> list[Tool]:
        return self.call.request.tools

    @property
    def is_raw_completion(self) -> bool:
        """It went on from a bare prompt: there are no messages."""
        return self.call.request.prompt is not None


class ConversationBranch(Struct):
    """Calls that go on from one another. A fork begins another one, which repeats what came before it."""

    calls: list[ConversationCall]
    is_fork: bool


def index_conversation_calls(item: SessionItem) -> dict[str, ConversationCall]:
    """A session's calls, by exchange id: those without token ids as well."""
    parts = read_session_calls(item.session, item.exchanges) if item.calls is None else item.calls
    return {call.exchange_id: ConversationCall(exchange, call, *label) for exchange, call, label in parts}


def collect_branches(item: SessionItem) -> list[ConversationBranch]:
    """Each call that was answered whole, in one conversation, in order; of the roles that go out."""
    said = index_conversation_calls(item)
    turns = link_turns((one.call, one.agent_id) for one in said.values())
    made: list[ConversationBranch] = []
    placed: dict[str, ConversationBranch] = {}
    for turn in turns:
        one = said[turn.call.exchange_id]
        if one.role not in item.roles or one.exchange.status != "complete" or one.exchange.reply is None:
            continue
        before = turn.previous
        while before is not None and before.call.exchange_id not in placed:
            before = before.previous
        conversation = None if before is None else placed[before.call.exchange_id]
        if before is None or conversation is None or conversation.calls[-1].call is not before.call:
            conversation = ConversationBranch([], is_fork=before is not None)
            made.append(conversation)
        conversation.calls.append(one)
        placed[turn.call.exchange_id] = conversation
    return made


def digest_conversations(item: SessionItem) -> bytes:
    """A digest of all that a session's calls said and were told, tools included: equal for sessions that say the same,
    whatever the names that calls were given."""
    digest = hashlib.blake2b(digest_size=16)
    for conversation in collect_branches(item):
        last = conversation.calls[-1]
        messages = normalize_call_ids(last.transcript)
        digest.update(msgspec.json.encode([last.role, last.call.request.prompt, messages, last.tools]))
    return digest.digest()


def normalize_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages in which calls are numbered, and nothing is sealed."""
    numbers: dict[str, str] = {}

    def number(call_id: str) -> str:
        return numbers.setdefault(call_id, str(len(numbers)))

    def normalize(part: Part) -> Part:
        match part:
            case ToolCall():
                return msgspec.structs.replace(part, id=number(part.id), seal=None, written=None)
            case ToolResult():
                return msgspec.structs.replace(part, call_id=number(part.call_id))
            case Reasoning():
                return msgspec.structs.replace(part, seal=None)
            case _:
                return part

    return [msgspec.structs.replace(one, parts=[normalize(part) for part in one.parts]) for one in messages]


def trace_messages(trace: Trace, calls: dict[str, ConversationCall]) -> TraceMessages:
    """What a trace's tokens say: the messages that it begins with, and those from its first reply on. Where the harness
    rewrote its history in between, all but the last reply is the prompt."""
    first, last = calls.get(trace.exchange_ids[0]), calls.get(trace.exchange_ids[-1])
    if first is None or last is None or first.is_raw_completion or last.is_raw_completion:
        return NO_TRACE_MESSAGES
    opening = build_chat_messages(first.request_messages)
    whole = build_chat_messages(last.transcript)
    split = len(opening) if whole[: len(opening)] == opening else len(whole) - 1
    return TraceMessages(whole[:split], whole[split:], build_chat_tools(last.tools))


def rename_developer_role(messages: Sequence[Message]) -> list[Message]:
    """As chat templates know them: what developers say, the system does."""
    return [msgspec.structs.replace(one, role="system") if one.role == "developer" else one for one in messages]


def build_chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As OpenAI's chat API spells them, with `reasoning_content`."""
    spelled: list[dict[str, Any]] = _encode_as_chat(Request("", list(messages)))["messages"]
    for message in spelled:
        message.pop("reasoning", None)  # the same again, for engines that read it under that name
    return spelled


def build_chat_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    spelled: list[dict[str, Any]] = _encode_as_chat(Request("", [], tools=list(tools))).get("tools", [])
    return spelled


def _encode_as_chat(request: Request) -> dict[str, Any]:
    decoded: dict[str, Any] = msgspec.json.decode(_CHAT_DIALECT.encode_request(request))
    return decoded


def _use_gateway_ids(message: Message) -> Message:
    return msgspec.structs.replace(message, parts=[_use_gateway_id(part) for part in message.parts])


def _use_gateway_id(part: Part) -> Part:
    """A call and its result name each other, whatever prefix the harness's dialect wears."""
    match part:
        case ToolCall():
            return msgspec.structs.replace(part, id=_find_gateway_call_id(part.id))
        case ToolResult():
            return msgspec.structs.replace(part, call_id=_find_gateway_call_id(part.call_id))
        case _:
            return part


def _find_gateway_call_id(issued: str) -> str:
    own = _GATEWAY_CALL_ID.search(issued)
    return own.group() if own else issued
