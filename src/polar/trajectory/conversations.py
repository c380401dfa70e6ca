"""Links the calls of a session into conversations by what their messages say.

    Exchange -> ModelCall -> Turn (with its previous turn) -> Conversation

A harness sends its history with every call. A turn continues the exchange that its history names (by issued ids and
seals that it echoes), else the longest earlier request that it extends, else the one whose reply it quotes. Changes
that a harness makes to its copy (content shape, `cache_control`, dropped thinking, white space at the edges) don't
matter.

Conversations are used for roles alone. They do not decide what trains in which context: only the tokens do that. Every
call is in exactly one conversation, whatever the order of the calls.
"""

import hashlib
from collections.abc import Hashable, Iterable
from itertools import takewhile
from typing import NamedTuple

from msgspec import Struct, field, json, structs

from polar import ids, plugins
from polar.records.exchange import Exchange, ExchangeStatus
from polar.types import Media, Message, Reasoning, Reply, Request, Text, ToolCall, ToolResult


class ModelCall(Struct, frozen=True):
    """The data of an exchange by which its role is found."""

    exchange_id: str
    seq: int
    status: ExchangeStatus
    num_sampled: int  # tokens
    num_delivered: int
    parent: str | None  # the exchange that this one's prompt continues, if that is known already
    hints: dict[str, str]
    request: Request
    reply: Reply | None

    @property
    def request_digest(self) -> bytes:
        """A digest that is equal for a request and its repetition. It is not cached."""
        # Fields that the provider only echoes may differ in each attempt.
        request = json.encode(structs.replace(self.request, echo={}, stream=False, stream_usage=True))
        return hashlib.blake2b(request, digest_size=16).digest()

    @property
    def is_fully_delivered(self) -> bool:
        """Whether the harness got the whole reply."""
        return self.status == "complete" and self.num_delivered >= self.num_sampled

    @property
    def reply_text(self) -> str:
        """The reply's text, without its thinking."""
        return "" if self.reply is None else _join_text(self.reply.parts)

    @property
    def calls_tools(self) -> bool:
        """Whether the reply calls tools."""
        return self.reply is not None and any(isinstance(part, ToolCall) for part in self.reply.parts)


def read_call(exchange: Exchange) -> ModelCall:
    return ModelCall(
        exchange_id=exchange.exchange_id,
        seq=exchange.seq,
        status=exchange.status,
        num_sampled=0 if exchange.sampled_ids is None else len(exchange.sampled_ids),
        num_delivered=exchange.delivered,
        parent=exchange.parent,
        hints=exchange.hints,
        request=_decode_request(exchange),
        reply=exchange.reply,
    )


def _decode_request(exchange: Exchange) -> Request:
    if exchange.status == "interrupted":  # of its request only a digest was kept
        return Request("", [])
    request: Request = plugins.load("dialects", exchange.dialect)().decode_request(
        exchange.raw_request, exchange.params
    )
    return request


class Conversation(Struct, eq=False):
    """Turns that continue one another, forks included, in order of `seq`."""

    hint: str | None  # the agent's name in the harness's headers
    turns: list["Turn"] = field(default_factory=list)

    def absorb(self, other: "Conversation") -> None:
        """Adds the turns of another conversation, which turned out to be part of this one."""
        if other is not self:
            self.turns = sorted(self.turns + other.turns, key=lambda turn: turn.call.seq)
            for turn in other.turns:
                turn.conversation = self


class Turn(Struct, eq=False):
    """A call and its place in a conversation."""

    call: ModelCall
    messages: list[Message]  # without those of thinking only, which a harness may drop or merge at will
    keys: list[Hashable]  # for each message, equal for messages that say the same
    system_prompt: str  # of the system messages at the beginning
    conversation: Conversation
    previous: "Turn | None" = None  # the turn that this one continues
    next_turns: list["Turn"] = field(default_factory=list)  # the turns that continue this one

    def list_work_keys(self) -> list[Hashable]:
        """Lists the keys of the model's turns and tool results in its history."""
        return [key for message, key in zip(self.messages, self.keys, strict=True) if message.role in _WORK_ROLES]

    def drops_work_of(self, other: "Turn") -> bool:
        """Whether at least half of the work in the other's history is missing in this one's."""
        keys, work = set(self.keys), other.list_work_keys()
        return 2 * sum(key in keys for key in work) <= len(work)

    def extends_history_of(self, other: "Turn") -> bool:
        """Whether its history begins with the other's, apart from system prompts, and continues with the model's
        work."""
        other_keys = [
            key for message, key in zip(other.messages, other.keys, strict=True) if message.role not in _SYSTEM_ROLES
        ]
        history = [pair for pair in zip(self.messages, self.keys, strict=True) if pair[0].role not in _SYSTEM_ROLES]
        if len(history) <= len(other_keys) or [key for _, key in history[: len(other_keys)]] != other_keys:
            return False
        return history[len(other_keys)][0].role in _WORK_ROLES

    def list_new_messages(self) -> list[Message]:
        """Lists the messages that the previous turn did not have."""
        previous_keys = set() if self.previous is None else set(self.previous.keys)
        return [message for message, key in zip(self.messages, self.keys, strict=True) if key not in previous_keys]


_WORK_ROLES = frozenset(("assistant", "tool"))
_SYSTEM_ROLES = frozenset(("system", "developer"))


def extract_text(message: Message) -> str:
    """Returns a message's text, tool results included."""
    return "\n".join(
        _join_text(part.parts) if isinstance(part, ToolResult) else part.text
        for part in message.parts
        if isinstance(part, Text | ToolResult)
    ).strip()


def link_turns(calls: Iterable[tuple[ModelCall, str | None]]) -> list[Turn]:
    """Links calls, and returns their turns in order of `seq`. Each call comes with the agent that the harness names, if
    any. Calls of different agents are never linked, even if one begins with the whole history of the other."""
    linkers: dict[str | None, _TurnLinker] = {}
    turns = []
    for call, hint in sorted(calls, key=lambda hinted: hinted[0].seq):
        turns.append(linkers.setdefault(hint, _TurnLinker(hint)).add(call))
    return turns


class _MessageInfo(NamedTuple):
    """A message with what is needed to link it."""

    message: Message
    has_content: bool
    key: Hashable
    issued_ids: list[str]  # ids and seals in it, the last one first


class _ReplyMatch(NamedTuple):
    """Where in a request's messages the reply of an earlier turn should stand."""

    position: int
    turn: Turn | None


_NO_MATCH = _ReplyMatch(-1, None)


class _History(NamedTuple):
    """A request's messages, with what is needed to link them."""

    messages: list[Message]
    infos: list[_MessageInfo]
    content_messages: list[Message]
    keys: list[Hashable]
    trie_path: list[int]  # nodes from the root on


_EMPTY_HISTORY = _History([], [], [], [], [0])


class _TurnLinker:
    """Links the turns of one agent (or of all agents without a name), one after another. Of several turns with the same
    request or reply, the latest fully delivered one counts."""

    def __init__(self, hint: str | None) -> None:
        self._hint = hint
        self._turn_by_exchange: dict[str, Turn] = {}
        # A trie over messages: from a node and a message's key to the next node.
        self._trie: dict[tuple[int, Hashable], int] = {}
        self._turn_by_node: dict[int, Turn] = {}  # the turn whose request ends at the node
        self._turn_by_reply_text: dict[str, Turn] = {}
        self._info_by_identity: dict[int, _MessageInfo] = {}  # by the message's id(): requests repeat messages
        self._last_history = _EMPTY_HISTORY
        self._system_prompts: dict[tuple[int, ...], str] = {}  # by the id() of their messages

    def add(self, call: ModelCall) -> Turn:
        history = self._read_history(_list_messages(call.request))
        path = history.trie_path
        turn = Turn(
            call,
            history.content_messages,
            history.keys,
            self._join_system_prompt(history.content_messages),
            Conversation(self._hint),
        )
        repeated = self._turn_by_node.get(path[-1])
        if repeated is not None:  # the same request again: another sample, or another attempt
            previous, turn.conversation = repeated.previous, repeated.conversation
        else:
            named, extended = (
                self._match_by_id(history.infos, len(history.content_messages)),
                self._match_by_prefix(path[:-1]),
            )
            # The later one in the history counts: a turn without calls has no ids.
            previous = max(named, extended, key=lambda match: match.position).turn
            previous = previous or self._turn_by_exchange.get(call.parent or "") or self._match_by_quote(turn)
        if previous is not None:
            turn.previous, turn.conversation = previous, previous.conversation
            previous.next_turns.append(turn)
        turn.conversation.turns.append(turn)
        self._turn_by_exchange[call.exchange_id] = turn
        if call.is_fully_delivered or repeated is None:
            self._turn_by_node[path[-1]] = turn
        reply_text = call.reply_text.strip()
        if reply_text and (call.is_fully_delivered or reply_text not in self._turn_by_reply_text):
            self._turn_by_reply_text[reply_text] = turn
        return turn

    def _read_history(self, messages: list[Message]) -> _History:
        """Reads a request's messages. Most requests begin with all messages of the previous one; then only the new ones
        are inspected."""
        base = self._last_history
        shared = len(base.messages)
        if messages[:shared] != base.messages:
            base, shared = _EMPTY_HISTORY, 0
        infos = [
            self._info_by_identity.get(id(message)) or self._inspect_message(message) for message in messages[shared:]
        ]
        with_content = [info for info in infos if info.has_content]
        path = [*base.trie_path]
        for info in with_content:
            path.append(self._trie.setdefault((path[-1], info.key), len(self._trie) + 1))
        self._last_history = _History(
            messages,
            [*base.infos, *infos],
            [*base.content_messages, *(info.message for info in with_content)],
            [*base.keys, *(info.key for info in with_content)],
            path,
        )
        return self._last_history

    def _inspect_message(self, message: Message) -> _MessageInfo:
        issued = [
            part.id if isinstance(part, ToolCall) else part.seal
            for part in reversed(message.parts)
            if isinstance(part, ToolCall | Reasoning)
        ]
        said = _MessageInfo(
            message, _has_content(message), _make_message_key(message), [name for name in issued if name]
        )
        self._info_by_identity[id(message)] = said  # with the message, so that no other one gets its id
        return said

    def _join_system_prompt(self, messages: list[Message]) -> str:
        """Joins the system messages at the beginning. Returns the same object for the same messages."""
        system_messages = list(takewhile(lambda message: message.role in _SYSTEM_ROLES, messages))
        key = tuple(id(message) for message in system_messages)
        prompt = self._system_prompts.get(key)
        if prompt is None:
            prompt = self._system_prompts[key] = "\n".join(extract_text(message) for message in system_messages)
        return prompt

    def _match_by_id(self, infos: list[_MessageInfo], content_count: int) -> _ReplyMatch:
        """Finds the last turn that an issued id in the messages names."""
        position = content_count
        for info in reversed(infos):
            position -= info.has_content
            for issued in info.issued_ids:
                named = self._turn_by_exchange.get(ids.find_exchange_id(issued) or "")
                if named is not None:
                    return _ReplyMatch(position, named)
        return _NO_MATCH

    def _match_by_prefix(self, path: list[int]) -> _ReplyMatch:
        """Finds the turn with the longest request that the messages extend."""
        matches = (
            _ReplyMatch(length, self._turn_by_node[path[length]])
            for length in range(len(path) - 1, 0, -1)
            if path[length] in self._turn_by_node
        )
        return next(matches, _NO_MATCH)

    def _match_by_quote(self, turn: Turn) -> Turn | None:
        for message in reversed(turn.messages):
            if message.role == "assistant":
                quoted = self._turn_by_reply_text.get(_join_text(message.parts).strip())
                if quoted is not None and not (quoted.list_work_keys() and turn.drops_work_of(quoted)):
                    return quoted
        return None


def _list_messages(request: Request) -> list[Message]:
    if request.prompt is not None:
        return [Message("user", [Text(str(request.prompt))])]
    return request.messages


def _has_content(message: Message) -> bool:
    return any(not isinstance(part, Reasoning) for part in message.parts)


def _join_text(parts: Iterable[object]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def _make_message_key(message: Message) -> Hashable:
    """Makes a key that is equal for messages that say the same. Ids and seals don't count."""
    role = "system" if message.role in _SYSTEM_ROLES else message.role
    content: list[Hashable] = []
    for part in message.parts:
        if isinstance(part, ToolCall):
            content.append((part.name, part.arguments))
        elif isinstance(part, ToolResult):
            content.append(_join_text(part.parts).strip())
        elif isinstance(part, Media):
            content.append((part.kind, part.data or part.url or part.file_id))
    return (role, _join_text(message.parts).strip(), *content)
