"""Continuation: extending recorded token ids instead of tokenising a conversation anew.

A request repeats the conversation so far as text. Where it goes on from a turn that was sampled here, the prompt is that
exchange's own ids, then the ids of what is new:

    prompt(k+1) = prompt(k) + sampled(k) + encode(tail)

Which exchange a turn came from is told by the ids that the gateway issued, else by what the turn says. That the request
really goes on from there is proved, never guessed:

- the context (all text but the model's turns) up to the turn is the one that was recorded;
- in mode `auto`, every turn still says what was sampled (in mode `sampled` the recorded turn counts, whatever the
  harness made of its copy);
- the tail doesn't depend on the turn's shape (seams.py).

Where the last turn can't be continued, the longest recorded prefix that can be proved is kept, and the rest is rendered:
behind an earlier turn, or behind the prompt of the exchange whose turn has changed. That is a branch, and has a reason.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

from msgspec import Struct, field

from polar import ids
from polar.rendering.encoder import BREAK, PromptEncoder
from polar.rendering.mark import ContextMark
from polar.rendering.messages import Context, Conversation, Turn
from polar.rendering.saying import NOTHING, Saying, chained, saying
from polar.rendering.seams import Seams
from polar.rendering.skeleton import Place, Renderer, Skeleton
from polar.rendering.template import TemplateError
from polar.types import Part, Reasoning, ToolCall

Mode = Literal["auto", "sampled", "off"]
BranchReason = Literal[
    "continuation_off",
    "context_changed",  # something before the turn: system prompt, tools, an earlier message
    "thinking_dropped_by_harness",
    "thinking_dropped_by_template",
    "thinking_changed",
    "text_changed",
    "calls_changed",
    "turn_cut",  # only a part of the turn was delivered, and the harness kept another part of it
    "history_changed",  # turns before it stand there in another form than when it was sampled
    "unknown_turn",  # no turn of this session
    "not_proved",  # what the template writes around the turn can't be told apart from the turn
]

_TURN = "\x01"  # where a turn was, in the text that is digested
_BROKEN = "\x00"


class Known(Struct):
    """A turn that was sampled in this session, as far as going on from it needs it."""

    exchange_id: str
    seq: int
    mark: ContextMark
    saying: Saying
    prompt: int  # tokens
    sampled: int
    delivered: int  # of the sampled tokens, those whose text the harness got

    @property
    def whole(self) -> bool:
        return self.delivered == self.sampled


class History(Struct):
    """The turns of one session."""

    known: dict[str, Known] = field(default_factory=dict)
    _said: dict[tuple[bytes, bytes], list[Known]] = field(default_factory=dict)

    def add(self, known: Known) -> None:
        self.known[known.exchange_id] = known
        self._said.setdefault((known.saying.text, known.saying.calls), []).append(known)

    def candidates(self, echo: "Echo") -> Sequence[Known]:
        """The exchanges that a turn may have come from, the likeliest first: the one that it names; else those that said
        the same, delivered ones first, the latest first."""
        named = self.known.get(echo.exchange_id) if echo.exchange_id else None
        if named is not None:
            return (named,)
        found = self._said.get((echo.says.text, echo.says.calls), [])
        return sorted(found, key=lambda known: (known.whole, known.seq), reverse=True)


class Echo(NamedTuple):
    """One of the model's turns as a request has it."""

    exchange_id: str | None  # that it names
    says: Saying
    shown: Saying  # what is left of it in the rendered prompt


class Base(NamedTuple):
    """The recorded ids that a prompt begins with: an exchange's prompt, and so many of its sampled tokens; or, with
    `sampled` None, its prompt without the last `drop` tokens."""

    known: Known
    sampled: int | None
    drop: int = 0


class Plan(NamedTuple):
    """How a prompt comes about: recorded ids, then the ids of `text`."""

    base: Base | None
    text: str
    end: str  # of the whole prompt: what a parser takes its first state from
    mark: ContextMark | None
    reason: BranchReason | None
    turns: int


Cut = Callable[[Known, Saying], int | None]
"""How many of a partly delivered turn's tokens say this, or None."""


class Planner:
    def __init__(self, renderer: Renderer, seams: Seams, encoder: PromptEncoder, mode: Mode) -> None:
        self._renderer = renderer
        self._seams = seams
        self._encoder = encoder
        self._mode = mode

    def plan(self, conversation: Conversation, history: History, cut: Cut) -> Plan:
        """Raises TemplateError where the template refuses the conversation."""
        turns = conversation.turns
        if not turns:
            text = self._renderer.whole(conversation)
            skeleton = Skeleton(text, [], ordered=True)
        else:
            try:
                skeleton = self._renderer.skeleton(conversation)
            except TemplateError:
                text = self._renderer.whole(conversation)
                return Plan(None, text, text[-_END:], None, "not_proved", len(turns))
        reading = _Reading(conversation, skeleton, self._seams)
        mark = reading.mark()
        if not turns:
            return Plan(None, text, text[-_END:], mark, None, 0)
        if self._mode == "off":
            text = self._renderer.whole(conversation)
            return Plan(None, text, text[-_END:], mark, "continuation_off", len(turns))
        return self._longest(conversation, reading, history, cut, mark)

    def _longest(
        self, conversation: Conversation, reading: "_Reading", history: History, cut: Cut, mark: ContextMark | None
    ) -> Plan:
        count = len(reading.echoes)
        reason: BranchReason | None = None
        for number in range(count - 1, -1, -1):
            failure: BranchReason = "unknown_turn"
            for known in history.candidates(reading.echoes[number]):
                base, failure = self._check(reading, number, known, cut)
                if base is None:
                    continue
                # Behind the turn itself the rest is simply what follows; else the turn is part of what is rendered.
                through = base.sampled is not None
                text = self._tail(conversation, reading, number + through, base)
                if text is None:
                    failure = "not_proved"
                    continue
                if through and number == count - 1:
                    reason = None
                elif not through:
                    reason = failure
                return Plan(base, text, text[-_END:], mark, reason, count)
            reason = failure
        text = self._renderer.whole(conversation)
        return Plan(None, text, text[-_END:], mark, reason, count)

    def _check(self, reading: "_Reading", number: int, known: Known, cut: Cut) -> tuple[Base | None, BranchReason]:
        """Whether the conversation goes on from this exchange's turn; else from its prompt; else not at all, and why."""
        echo, place = reading.echoes[number], reading.skeleton.places[number]
        if not reading.proved(number):
            return None, "not_proved"
        if not reading.has_context(number, known.mark):
            return None, "context_changed"
        if self._mode == "auto" and reading.chains[number] != known.mark.turns:
            return None, "history_changed"
        failure: BranchReason = "not_proved"
        if not reading.opens(number, known.mark):
            failure = "context_changed"
        elif place is not None and reading.ends[number] is not None:
            if self._mode == "sampled":
                return Base(known, known.delivered), failure
            if known.whole and echo.shown == known.saying:
                return Base(known, known.sampled), failure
            if not known.whole and (kept := cut(known, echo.shown)) is not None:
                return Base(known, kept), failure
            failure = _difference(echo, known)
        drop = self._after_control(known.mark.opening)
        return (None, failure) if drop is None else (Base(known, None, drop), failure)

    def _after_control(self, opening: str) -> int | None:
        """How many tokens of a generation prompt stand behind its last control token; None where it has none."""
        last = None
        for last in self._encoder.controls(opening):
            pass
        return None if last is None else len(self._encoder.encode(opening[last.end() :], first=False))

    def _tail(self, conversation: Conversation, reading: "_Reading", marked: int, base: Base) -> str | None:
        """The text behind the recorded ids."""
        if base.sampled is not None and marked == len(reading.echoes):
            end = reading.ends[marked - 1]
            return None if end is None else reading.skeleton.text[end:]
        mixed = _Reading(conversation, self._renderer.skeleton(conversation, marked), self._seams, marked)
        text = mixed.skeleton.text
        if base.sampled is not None:
            start = mixed.ends[marked - 1]
        else:
            start = mixed.position(base.known.mark.length)
            head = self._head(base.known.mark.opening)
            if start is None or not text.startswith(head, start):
                return None
            start += len(head)
        # The turns that follow are shown as they are now, and that must not have changed anything before them.
        return text[start:] if start is not None and reading.skeleton.text.startswith(text[:start]) else None

    def _head(self, opening: str) -> str:
        """Up to and with the last control token."""
        return opening[: max((found.end() for found in self._encoder.controls(opening)), default=0)]


_END = 256  # characters


class _Reading:
    """A skeleton, cut into contexts and turns. The contexts, joined, are one text; a turn's context is its beginning."""

    def __init__(self, conversation: Conversation, skeleton: Skeleton, seams: Seams, marked: int | None = None) -> None:
        self.skeleton = skeleton
        self._conversation = conversation
        self._seams = seams
        self.echoes: list[Echo] = []
        self.chains: list[str] = []  # for each turn, the digest of what those before it say
        self.ends: list[int | None] = []  # where each turn's tail begins
        self._openings: list[frozenset[str]] = []
        self._lengths: list[int | None] = []  # of each turn's context; None where it isn't known
        chain = NOTHING
        segments: list[str] = []
        start, length, known = 0, 0, skeleton.ordered
        turns = conversation.turns[:marked]
        for turn, place, role in zip(turns, skeleton.places, _following(conversation), strict=False):
            says = saying(turn.parts)
            echo = Echo(named(turn.parts), says, _shown(says, place))
            self.echoes.append(echo)
            self.chains.append(chain.hex())
            chain = chained(chain, echo.shown.digest)
            end, openings = None, frozenset[str]()
            if known and place is not None:
                segments.append(_stable(skeleton.text[start : place.start]))
                length += len(segments[-1])
                end, openings = self._end(turn, place, role)
            self._lengths.append(length if known and place is not None else None)
            self.ends.append(end)
            self._openings.append(openings)
            known = known and end is not None
            start, length = end or 0, length + len(_TURN)
        self._chain = chain.hex()
        self._known = known
        segments.append(_stable(skeleton.text[start:]))
        self._context = _TURN.join(segments)

    def proved(self, number: int) -> bool:
        """Whether it is known where the turns before this one end, and where it begins."""
        return self._lengths[number] is not None

    def mark(self) -> ContextMark | None:
        """None where later requests can't go on from here, since it isn't known which text is whose."""
        opening = self._seams.opening(self._conversation)
        if not self._known or opening is None or not self._context.endswith(opening):
            return None
        base = self._context[: len(self._context) - len(opening)]
        return ContextMark(_digest(base), len(base), self._chain, opening)

    def has_context(self, number: int, mark: ContextMark) -> bool:
        length = self._lengths[number]
        return length is not None and length >= mark.length and _digest(self._context[: mark.length]) == mark.context

    def opens(self, number: int, mark: ContextMark) -> bool:
        """Whether what stands between the context and the turn is just how turns of this template begin."""
        between = self._context[mark.length : self._lengths[number]]
        return between == mark.opening or between in self._openings[number]

    def position(self, length: int) -> int | None:
        """Where in the text so many characters of context end."""
        start = 0
        stops = [place.start if place is not None else 0 for place in self.skeleton.places]
        for stop, end in zip([*stops, len(self.skeleton.text)], [*self.ends, None], strict=True):
            segment = self.skeleton.text[start:stop]
            stable = len(_stable(segment))
            if stable >= length:
                return start + _unstable(segment, length)
            length -= stable + len(_TURN)
            if end is None:
                return None
            start = end
        return None

    def _end(self, turn: Turn, place: Place, following: str | None) -> tuple[int | None, frozenset[str]]:
        if following is None:
            return None, frozenset()
        seam = self._seams.seam(place.last, bool(turn.calls), following, self._conversation)
        if seam is None:
            return None, frozenset()
        closing = next((each for each in seam.closings if self.skeleton.text.startswith(each, place.stop)), None)
        return (None, frozenset()) if closing is None else (place.stop + len(closing), seam.openings)


def named(parts: Sequence[Part]) -> str | None:
    """The exchange that a turn's ids and seals name."""
    for part in parts:
        if isinstance(part, ToolCall) and (found := ids.exchange_named(part.id) or ids.exchange_named(part.seal)):
            return found
        if isinstance(part, Reasoning) and (found := ids.exchange_named(part.seal)):
            return found
    return None


def _shown(says: Saying, place: Place | None) -> Saying:
    if place is None:
        return Saying()
    return Saying(
        says.thinking if place.thinking else NOTHING,
        says.text if place.text else NOTHING,
        says.calls if place.calls else NOTHING,
    )


def _difference(echo: Echo, known: Known) -> BranchReason:
    if not known.whole:
        return "turn_cut"
    if echo.says.text != known.saying.text:
        return "text_changed"
    if echo.says.calls != known.saying.calls:
        return "calls_changed"
    if echo.says.thinking == NOTHING != known.saying.thinking:
        return "thinking_dropped_by_harness"
    if echo.says.thinking != known.saying.thinking:
        return "thinking_changed"
    return "thinking_dropped_by_template"


def _following(conversation: Conversation) -> list[str | None]:
    """For each turn, the role of the message behind it."""
    items = conversation.items
    roles: list[str | None] = []
    for index, item in enumerate(items):
        if isinstance(item, Turn):
            after = items[index + 1] if index + 1 < len(items) else None
            roles.append(
                after.message["role"] if isinstance(after, Context) else None if after is None else "assistant"
            )
    return roles


def _stable(text: str) -> str:
    """The mark within broken spellings is random; digests must outlive the process."""
    return text.replace(BREAK, _BROKEN)


def _unstable(text: str, length: int) -> int:
    """Where `length` characters of the stable text end in the text itself."""
    at = 0
    while length > 0:
        broken = text.find(BREAK, at)
        if broken < 0 or broken - at >= length:
            return at + length
        length -= broken - at + len(_BROKEN)
        at = broken + len(BREAK)
    return at


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
