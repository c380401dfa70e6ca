"""Which calls of a session go on from which: conversations, found by what the messages say.

    Exchange -> Call -> Turn(before) -> Talk

A harness sends its history with every call. A turn goes on from the exchange that its history names (ids and seals of
ours that it echoes), else from the longest earlier request that it extends, else from the one whose reply it quotes.
What a harness does to its copy on the way (content shape, `cache_control`, thinking dropped, white space at the edges)
makes no difference.

This is about who speaks to whom, for roles. Nothing here decides what trains in which context: tokens alone do that.
Every call stands in exactly one talk, whatever order the calls are given in.
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
    """What there is to know of an exchange to see its part in the session."""

    exchange_id: str
    seq: int
    status: ExchangeStatus
    num_sampled: int  # tokens
    num_delivered: int
    parent: str | None  # the exchange that this one's prompt continues, where that is known already
    hints: dict[str, str]
    request: Request
    reply: Reply | None

    @property
    def request_digest(self) -> bytes:
        """Of what was asked: equal for a request and its repetition. It is made anew each time."""
        # Fields that the provider merely repeats may be spelled anew by each attempt.
        asked = json.encode(structs.replace(self.request, echo={}, stream=False, stream_usage=True))
        return hashlib.blake2b(asked, digest_size=16).digest()

    @property
    def is_fully_delivered(self) -> bool:
        """The harness got all of it."""
        return self.status == "complete" and self.num_delivered >= self.num_sampled

    @property
    def reply_text(self) -> str:
        """The reply's text, without its thinking."""
        return "" if self.reply is None else _join_text(self.reply.parts)

    @property
    def calls_tools(self) -> bool:
        """The reply calls tools."""
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
    """A conversation: turns that go on from one another, forks included, in order of `seq`."""

    hint: str | None  # the agent that the harness says it is
    turns: list["Turn"] = field(default_factory=list)

    def absorb(self, other: "Conversation") -> None:
        """The other one turned out to be part of this one."""
        if other is not self:
            self.turns = sorted(self.turns + other.turns, key=lambda turn: turn.call.seq)
            for turn in other.turns:
                turn.conversation = self


class Turn(Struct, eq=False):
    """A call and its place."""

    call: ModelCall
    messages: list[Message]  # without those that hold nothing but thinking, which a harness may drop or merge at will
    keys: list[Hashable]  # what each of them says
    system_prompt: str  # the prompt that it begins with, before anybody speaks
    conversation: Conversation
    previous: "Turn | None" = None  # the turn that it goes on from
    next_turns: list["Turn"] = field(default_factory=list)  # the turns that go on from it

    def work_keys(self) -> list[Hashable]:
        """What stands in its history of turns of the model and results of tools."""
        return [key for message, key in zip(self.messages, self.keys, strict=True) if message.role in _WORK_ROLES]

    def drops_work_of(self, other: "Turn") -> bool:
        """At least half of the work in the other's history is gone here."""
        here, work = set(self.keys), other.work_keys()
        return 2 * sum(key in here for key in work) <= len(work)

    def extends_history_of(self, other: "Turn") -> bool:
        """Its history begins with the other's, system prompts aside, and goes on with a turn of the model."""
        old = [
            key for message, key in zip(other.messages, other.keys, strict=True) if message.role not in _SYSTEM_ROLES
        ]
        here = [pair for pair in zip(self.messages, self.keys, strict=True) if pair[0].role not in _SYSTEM_ROLES]
        if len(here) <= len(old) or [key for _, key in here[: len(old)]] != old:
            return False
        return here[len(old)][0].role in _WORK_ROLES

    def new_messages(self) -> list[Message]:
        """Its messages that the turn before did not have."""
        old = set() if self.previous is None else set(self.previous.keys)
        return [message for message, key in zip(self.messages, self.keys, strict=True) if key not in old]


_WORK_ROLES = frozenset(("assistant", "tool"))
_SYSTEM_ROLES = frozenset(("system", "developer"))


def message_text(message: Message) -> str:
    """All that it says, results of tools included."""
    return "\n".join(
        _join_text(part.parts) if isinstance(part, ToolResult) else part.text
        for part in message.parts
        if isinstance(part, Text | ToolResult)
    ).strip()


def link_turns(calls: Iterable[tuple[ModelCall, str | None]]) -> list[Turn]:
    """Every call's place, in order of `seq`. Each comes with the agent that the harness names, if any. Calls of
    different agents never meet, even where one began with the whole history of the other."""
    linkers: dict[str | None, _TurnLinker] = {}
    turns = []
    for call, hint in sorted(calls, key=lambda hinted: hinted[0].seq):
        turns.append(linkers.setdefault(hint, _TurnLinker(hint)).add(call))
    return turns


class _MessageInfo(NamedTuple):
    """What there is to know of a message."""

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
    """A request's messages, as far as they say something."""

    messages: list[Message]
    infos: list[_MessageInfo]
    content_messages: list[Message]
    keys: list[Hashable]
    trie_path: list[int]  # through the trie


_EMPTY_HISTORY = _History([], [], [], [], [0])


class _TurnLinker:
    """The turns of one agent (or of all those without a name), each linked as it comes. Where several asked or said the
    same, the latest counts that was delivered whole."""

    def __init__(self, hint: str | None) -> None:
        self._hint = hint
        self._turn_by_exchange: dict[str, Turn] = {}
        # A trie over messages: from a node, by what is said, to the next.
        self._trie: dict[tuple[int, Hashable], int] = {}
        self._turn_by_node: dict[int, Turn] = {}  # by node: the turn whose request ends there
        self._turn_by_reply_text: dict[str, Turn] = {}  # by text: the turn that said so
        self._info_by_identity: dict[int, _MessageInfo] = {}  # by the message's identity: requests repeat them
        self._last_history = _EMPTY_HISTORY
        self._system_prompts: dict[tuple[int, ...], str] = {}  # by those of the messages that it stands in

    def add(self, call: ModelCall) -> Turn:
        read = self._read_history(_request_messages(call.request))
        path = read.trie_path
        turn = Turn(
            call, read.content_messages, read.keys, self._system_prompt(read.content_messages), Conversation(self._hint)
        )
        same = self._turn_by_node.get(path[-1])
        if same is not None:  # the same request once more: another sample, or another attempt
            found, turn.conversation = same.previous, same.conversation
        else:
            named, extended = (
                self._match_by_id(read.infos, len(read.content_messages)),
                self._match_by_prefix(path[:-1]),
            )
            # Whichever stands later in the history: a turn that only spoke has no ids.
            found = max(named, extended, key=lambda place: place.position).turn
            found = found or self._turn_by_exchange.get(call.parent or "") or self._match_by_quote(turn)
        if found is not None:
            turn.previous, turn.conversation = found, found.conversation
            found.next_turns.append(turn)
        turn.conversation.turns.append(turn)
        self._turn_by_exchange[call.exchange_id] = turn
        if call.is_fully_delivered or same is None:
            self._turn_by_node[path[-1]] = turn
        replied = call.reply_text.strip()
        if replied and (call.is_fully_delivered or replied not in self._turn_by_reply_text):
            self._turn_by_reply_text[replied] = turn
        return turn

    def _read_history(self, messages: list[Message]) -> _History:
        """Most requests begin with all of the one before: then only what is new is looked at."""
        last = self._last_history
        known = len(last.messages)
        if messages[:known] != last.messages:
            last, known = _EMPTY_HISTORY, 0
        new = [
            self._info_by_identity.get(id(message)) or self._inspect_message(message) for message in messages[known:]
        ]
        spoken = [one for one in new if one.has_content]
        path = [*last.trie_path]
        for one in spoken:
            path.append(self._trie.setdefault((path[-1], one.key), len(self._trie) + 1))
        self._last_history = _History(
            messages,
            [*last.infos, *new],
            [*last.content_messages, *(one.message for one in spoken)],
            [*last.keys, *(one.key for one in spoken)],
            path,
        )
        return self._last_history

    def _inspect_message(self, message: Message) -> _MessageInfo:
        issued = [
            part.id if isinstance(part, ToolCall) else part.seal
            for part in reversed(message.parts)
            if isinstance(part, ToolCall | Reasoning)
        ]
        said = _MessageInfo(message, _has_content(message), _message_key(message), [name for name in issued if name])
        self._info_by_identity[id(message)] = said  # with the message, so that no other one gets its id
        return said

    def _system_prompt(self, messages: list[Message]) -> str:
        """The same object for the same messages."""
        instructing = list(takewhile(lambda said: said.role in _SYSTEM_ROLES, messages))
        key = tuple(id(message) for message in instructing)
        found = self._system_prompts.get(key)
        if found is None:
            found = self._system_prompts[key] = "\n".join(message_text(message) for message in instructing)
        return found

    def _match_by_id(self, said: list[_MessageInfo], speaking: int) -> _ReplyMatch:
        after = speaking
        for one in reversed(said):
            after -= one.has_content
            for issued in one.issued_ids:
                named = self._turn_by_exchange.get(ids.find_exchange_id(issued) or "")
                if named is not None:
                    return _ReplyMatch(after, named)
        return _NO_MATCH

    def _match_by_prefix(self, path: list[int]) -> _ReplyMatch:
        known = (
            _ReplyMatch(length, self._turn_by_node[path[length]])
            for length in range(len(path) - 1, 0, -1)
            if path[length] in self._turn_by_node
        )
        return next(known, _NO_MATCH)

    def _match_by_quote(self, turn: Turn) -> Turn | None:
        for message in reversed(turn.messages):
            if message.role == "assistant":
                said = self._turn_by_reply_text.get(_join_text(message.parts).strip())
                if said is not None and not (said.work_keys() and turn.drops_work_of(said)):
                    return said
        return None


def _request_messages(request: Request) -> list[Message]:
    if request.prompt is not None:
        return [Message("user", [Text(str(request.prompt))])]
    return request.messages


def _has_content(message: Message) -> bool:
    return any(not isinstance(part, Reasoning) for part in message.parts)


def _join_text(parts: Iterable[object]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def _message_key(message: Message) -> Hashable:
    """Equal for messages that say the same. Ids and seals say nothing."""
    role = "system" if message.role in _SYSTEM_ROLES else message.role
    rest: list[Hashable] = []
    for part in message.parts:
        if isinstance(part, ToolCall):
            rest.append((part.name, part.arguments))
        elif isinstance(part, ToolResult):
            rest.append(_join_text(part.parts).strip())
        elif isinstance(part, Media):
            rest.append((part.kind, part.data or part.url or part.file_id))
    return (role, _join_text(message.parts).strip(), *rest)
