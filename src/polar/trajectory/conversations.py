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
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from msgspec import Struct, field, json, structs

from polar import ids, plugins
from polar.store.base import Exchange, ExchangeStatus
from polar.types import Media, Message, Reasoning, Reply, Request, Text, ToolCall, ToolResult


class Call(Struct, frozen=True):
    """What there is to know of an exchange to see its part in the session."""

    exchange_id: str
    seq: int
    status: ExchangeStatus
    sampled: int  # tokens
    delivered: int
    parent: str | None  # the exchange that this one's prompt continues, where that is known already
    hints: dict[str, str]
    request: Request
    reply: Reply | None

    @property
    def digest(self) -> bytes:
        """Of what was asked: equal for a request and its repetition. It is made anew each time."""
        # Fields that the provider merely repeats may be spelled anew by each attempt.
        asked = json.encode(structs.replace(self.request, echo={}, stream=False, stream_usage=True))
        return hashlib.blake2b(asked, digest_size=16).digest()

    @property
    def whole(self) -> bool:
        """The harness got all of it."""
        return self.status == "complete" and self.delivered >= self.sampled

    @property
    def said(self) -> str:
        """The reply's text, without its thinking."""
        return "" if self.reply is None else _text(self.reply.parts)

    @property
    def acts(self) -> bool:
        """The reply calls tools."""
        return self.reply is not None and any(isinstance(part, ToolCall) for part in self.reply.parts)


def call_of(exchange: Exchange) -> Call:
    return Call(
        exchange_id=exchange.exchange_id,
        seq=exchange.seq,
        status=exchange.status,
        sampled=0 if exchange.sampled_ids is None else len(exchange.sampled_ids),
        delivered=exchange.delivered,
        parent=exchange.parent,
        hints=exchange.hints,
        request=_request_of(exchange),
        reply=exchange.reply,
    )


def _request_of(exchange: Exchange) -> Request:
    if exchange.status == "interrupted":  # of its request only a digest was kept
        return Request("", [])
    request: Request = plugins.load("dialects", exchange.dialect)().decode_request(exchange.wire, exchange.params)
    return request


class Talk(Struct, eq=False):
    """A conversation: turns that go on from one another, forks included, in order of `seq`."""

    hint: str | None  # the agent that the harness says it is
    turns: list["Turn"] = field(default_factory=list)

    def absorb(self, other: "Talk") -> None:
        """The other one turned out to be part of this one."""
        if other is not self:
            self.turns = sorted(self.turns + other.turns, key=lambda turn: turn.call.seq)
            for turn in other.turns:
                turn.talk = self


class Turn(Struct, eq=False):
    """A call and its place."""

    call: Call
    messages: list[Message]  # without those that hold nothing but thinking, which a harness may drop or merge at will
    keys: list[Hashable]  # what each of them says
    system: str  # the prompt that it begins with, before anybody speaks
    talk: Talk
    before: "Turn | None" = None  # the turn that it goes on from
    next: list["Turn"] = field(default_factory=list)  # the turns that go on from it

    def work(self) -> list[Hashable]:
        """What stands in its history of turns of the model and results of tools."""
        return [key for message, key in zip(self.messages, self.keys, strict=True) if message.role in _WORK]

    def drops(self, other: "Turn") -> bool:
        """At least half of the work in the other's history is gone here."""
        here, work = set(self.keys), other.work()
        return 2 * sum(key in here for key in work) <= len(work)

    def keeps(self, other: "Turn") -> bool:
        """Its history begins with the other's, system prompts aside, and goes on with a turn of the model."""
        old = [key for message, key in zip(other.messages, other.keys, strict=True) if message.role not in _SYSTEM]
        here = [pair for pair in zip(self.messages, self.keys, strict=True) if pair[0].role not in _SYSTEM]
        if len(here) <= len(old) or [key for _, key in here[: len(old)]] != old:
            return False
        return here[len(old)][0].role in _WORK

    def fresh(self) -> list[Message]:
        """Its messages that the turn before did not have."""
        old = set() if self.before is None else set(self.before.keys)
        return [message for message, key in zip(self.messages, self.keys, strict=True) if key not in old]


_WORK = frozenset(("assistant", "tool"))
_SYSTEM = frozenset(("system", "developer"))


def text_of(message: Message) -> str:
    """All that it says, results of tools included."""
    return "\n".join(
        _text(part.parts) if isinstance(part, ToolResult) else part.text
        for part in message.parts
        if isinstance(part, Text | ToolResult)
    ).strip()


def find(calls: Sequence[Call], hint_of: Callable[[Call], str | None]) -> list[Turn]:
    """Every call's place, in order of `seq`. Calls that the harness says are of different agents never meet, even where
    one began with the whole history of the other."""
    linkers: dict[str | None, _Linker] = {}
    turns = []
    for call in sorted(calls, key=lambda call: call.seq):
        hint = hint_of(call)
        turns.append(linkers.setdefault(hint, _Linker(hint)).add(call))
    return turns


class _Said(NamedTuple):
    """What there is to know of a message."""

    message: Message
    speaks: bool
    key: Hashable
    issued: list[str]  # ids and seals in it, the last one first


class _Place(NamedTuple):
    """Where in a request's messages the reply of an earlier turn should stand."""

    position: int
    turn: Turn | None


_NOWHERE = _Place(-1, None)


class _History(NamedTuple):
    """A request's messages, as far as they say something."""

    messages: list[Message]
    said: list[_Said]
    spoken: list[Message]
    keys: list[Hashable]
    path: list[int]  # through the trie


_NOTHING = _History([], [], [], [], [0])


class _Linker:
    """The turns of one agent (or of all those without a name), each linked as it comes. Where several asked or said the
    same, the latest counts that was delivered whole."""

    def __init__(self, hint: str | None) -> None:
        self._hint = hint
        self._by_id: dict[str, Turn] = {}
        # A trie over messages: from a node, by what is said, to the next.
        self._steps: dict[tuple[int, Hashable], int] = {}
        self._asked: dict[int, Turn] = {}  # by node: the turn whose request ends there
        self._replied: dict[str, Turn] = {}  # by text: the turn that said so
        self._known: dict[int, _Said] = {}  # by the message's identity: requests repeat them
        self._last = _NOTHING
        self._systems: dict[tuple[int, ...], str] = {}  # by those of the messages that it stands in

    def add(self, call: Call) -> Turn:
        read = self._read(_messages(call.request))
        path = read.path
        turn = Turn(call, read.spoken, read.keys, self._system(read.spoken), Talk(self._hint))
        same = self._asked.get(path[-1])
        if same is not None:  # the same request once more: another sample, or another attempt
            found, turn.talk = same.before, same.talk
        else:
            named, extended = self._named(read.said, len(read.spoken)), self._extended(path[:-1])
            # Whichever stands later in the history: a turn that only spoke has no ids.
            found = max(named, extended, key=lambda place: place.position).turn
            found = found or self._by_id.get(call.parent or "") or self._quoted(turn)
        if found is not None:
            turn.before, turn.talk = found, found.talk
            found.next.append(turn)
        turn.talk.turns.append(turn)
        self._by_id[call.exchange_id] = turn
        if call.whole or same is None:
            self._asked[path[-1]] = turn
        replied = call.said.strip()
        if replied and (call.whole or replied not in self._replied):
            self._replied[replied] = turn
        return turn

    def _read(self, messages: list[Message]) -> _History:
        """Most requests begin with all of the one before: then only what is new is looked at."""
        last = self._last
        known = len(last.messages)
        if messages[:known] != last.messages:
            last, known = _NOTHING, 0
        new = [self._known.get(id(message)) or self._look(message) for message in messages[known:]]
        spoken = [one for one in new if one.speaks]
        path = [*last.path]
        for one in spoken:
            path.append(self._steps.setdefault((path[-1], one.key), len(self._steps) + 1))
        self._last = _History(
            messages,
            [*last.said, *new],
            [*last.spoken, *(one.message for one in spoken)],
            [*last.keys, *(one.key for one in spoken)],
            path,
        )
        return self._last

    def _look(self, message: Message) -> _Said:
        issued = [
            part.id if isinstance(part, ToolCall) else part.seal
            for part in reversed(message.parts)
            if isinstance(part, ToolCall | Reasoning)
        ]
        said = _Said(message, _speaks(message), _key(message), [name for name in issued if name])
        self._known[id(message)] = said  # with the message, so that no other one gets its id
        return said

    def _system(self, messages: list[Message]) -> str:
        """The same object for the same messages."""
        instructing = list(takewhile(lambda said: said.role in _SYSTEM, messages))
        key = tuple(id(message) for message in instructing)
        found = self._systems.get(key)
        if found is None:
            found = self._systems[key] = "\n".join(text_of(message) for message in instructing)
        return found

    def _named(self, said: list[_Said], speaking: int) -> _Place:
        after = speaking
        for one in reversed(said):
            after -= one.speaks
            for issued in one.issued:
                named = self._by_id.get(ids.exchange_named(issued) or "")
                if named is not None:
                    return _Place(after, named)
        return _NOWHERE

    def _extended(self, path: list[int]) -> _Place:
        known = (
            _Place(length, self._asked[path[length]])
            for length in range(len(path) - 1, 0, -1)
            if path[length] in self._asked
        )
        return next(known, _NOWHERE)

    def _quoted(self, turn: Turn) -> Turn | None:
        for message in reversed(turn.messages):
            if message.role == "assistant":
                said = self._replied.get(_text(message.parts).strip())
                if said is not None and not (said.work() and turn.drops(said)):
                    return said
        return None


def _messages(request: Request) -> list[Message]:
    if request.prompt is not None:
        return [Message("user", [Text(str(request.prompt))])]
    return request.messages


def _speaks(message: Message) -> bool:
    return any(not isinstance(part, Reasoning) for part in message.parts)


def _text(parts: Iterable[object]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def _key(message: Message) -> Hashable:
    """Equal for messages that say the same. Ids and seals say nothing."""
    role = "system" if message.role in _SYSTEM else message.role
    rest: list[Hashable] = []
    for part in message.parts:
        if isinstance(part, ToolCall):
            rest.append((part.name, part.arguments))
        elif isinstance(part, ToolResult):
            rest.append(_text(part.parts).strip())
        elif isinstance(part, Media):
            rest.append((part.kind, part.data or part.url or part.file_id))
    return (role, _text(message.parts).strip(), *rest)
