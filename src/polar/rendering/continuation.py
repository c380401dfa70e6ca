"""Continuation: extending recorded token ids instead of tokenising a conversation anew.

A request repeats the conversation so far as text. Where it goes on from a turn that was sampled here, the prompt is
that exchange's own ids, then the ids of what is new:

    prompt(k+1) = prompt(k) + sampled(k) + encode(tail)

Which exchange a turn came from is told by the ids that the gateway issued, else by what the turn says. That the request
really goes on from there is proved, never guessed:

- the context (all text but the model's turns) up to the turn is the one that was recorded;
- in mode `auto`, every turn still says what was sampled (in mode `sampled` the recorded turn counts, whatever the
  harness made of its copy);
- the tail doesn't depend on the turn's shape (seams.py).

Where the last turn can't be continued, the longest recorded prefix that can be proved is kept, and the rest is
rendered: behind an earlier turn, or behind the prompt of the exchange whose turn has changed. That is a branch, and
has a reason.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct, field

from polar import ids
from polar.rendering.encoder import BREAK, BROKEN, TURN, PromptEncoder
from polar.rendering.mark import ContextMark
from polar.rendering.messages import Context, Conversation, Turn
from polar.rendering.saying import NOTHING, Saying, chained, saying
from polar.rendering.seams import Seams
from polar.rendering.skeleton import Place, Renderer, Skeleton
from polar.rendering.template import TemplateError
from polar.rendering.tokenizer import Ids
from polar.types import Part, Reasoning, ToolCall

Mode = Literal["auto", "sampled", "off"]
BranchReason = Literal[
    "continuation_off",
    "context_changed",  # something before the turn: system prompt, tools, an earlier message
    "thinking_dropped_by_harness",
    "thinking_dropped_by_template",
    "text_dropped_by_template",
    "calls_dropped_by_template",
    "thinking_changed",
    "text_changed",
    "calls_changed",
    "turn_cut",  # only a part of the turn was delivered, and the harness kept another part of it
    "history_changed",  # turns before it stand there in another form than when it was sampled
    "unknown_turn",  # no turn of this session
    "not_proved",  # what the template writes around the turn can't be told apart from the turn
]


class Known(Struct):
    """A turn that was sampled in this session, as far as going on from it needs it."""

    exchange_id: str
    seq: int
    mark: ContextMark
    saying: Saying
    prompt: int  # tokens
    sampled: int
    delivered: int  # of the sampled tokens, those whose text the harness got
    ended: bool = True  # by itself, or at a limit; else it broke off

    @property
    def whole(self) -> bool:
        return self.ended and self.delivered == self.sampled


class History(Struct):
    """The turns of one session."""

    known: dict[str, Known] = field(default_factory=dict)
    unmarked: set[str] = field(default_factory=set)  # exchanges of whose prompts nothing is proved
    written_ids: dict[str, str] = field(default_factory=dict)  # ids of calls as the model wrote them, by ours
    _said: dict[tuple[bytes, bytes], list[Known]] = field(default_factory=dict)

    def add(self, known: Known, parts: Sequence[Part] = ()) -> None:
        """`parts` are what the turn said."""
        self.known[known.exchange_id] = known
        for part in parts:
            if isinstance(part, ToolCall) and part.written and (issued := ids.call_named(part.id)):
                self.written_ids[issued] = part.written
        self._said.setdefault((known.saying.text, known.saying.calls), []).append(known)

    def written(self, call_id: str) -> str | None:
        """The id that the model itself wrote for a call, where it did and the harness echoes ours."""
        issued = ids.call_named(call_id)
        return self.written_ids.get(issued) if issued else None

    def candidates(self, echo: "Echo") -> Sequence[Known]:
        """The exchanges that a turn may have come from, the likeliest first: the one that it names; else those that
        said the same, delivered ones first, the latest first."""
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

    @property
    def length(self) -> int:
        """In tokens."""
        return self.known.prompt - self.drop if self.sampled is None else self.known.prompt + self.sampled

    def extended(self, context: Ids, new: Ids) -> Ids:
        """The prompt's ids, given those of the exchange (its prompt and what was sampled) and those of the text behind
        it."""
        if self.sampled is None:
            return np.concatenate([context[: self.known.prompt - self.drop], new])
        kept = context[: self.known.prompt + self.sampled]
        if len(new) and kept[-1] == new[0]:
            new = new[1:]  # the turn's end token, or the opening that took its place, is there already
        return np.concatenate([kept, new])


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
        self._seams.forget()
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
            unmarked = reading.echoes[number].exchange_id in history.unmarked
            failure: BranchReason = "not_proved" if unmarked else "unknown_turn"
            behind_prompt: Plan | None = None
            for known in history.candidates(reading.echoes[number]):
                base, failure = self._check(reading, number, known, cut)
                if base is None:
                    continue
                # Behind the turn itself the rest is simply what follows; else the turn is part of what is rendered.
                if base.sampled is not None:
                    text = self._tail(conversation, reading, number + 1)
                    if text is not None:
                        return Plan(base, text, text[-_END:], mark, None if number == count - 1 else reason, count)
                    failure = "not_proved"
                elif behind_prompt is None and (found := self._behind_prompt(conversation, reading, number, known)):
                    base, text = found
                    behind_prompt = Plan(base, text, text[-_END:], mark, failure, count)
            if behind_prompt is not None:
                return behind_prompt
            reason = failure
        text = self._renderer.whole(conversation)
        return Plan(None, text, text[-_END:], mark, reason, count)

    def _check(self, reading: "_Reading", number: int, known: Known, cut: Cut) -> tuple[Base | None, BranchReason]:
        """Whether the conversation goes on from the exchange's turn, else from its prompt, else not at all; and why."""
        echo, place = reading.echoes[number], reading.skeleton.places[number]
        if not reading.proved(number):
            return None, "not_proved"
        if not reading.has_context(number, known.mark):
            return None, "context_changed"
        if self._mode == "auto" and reading.chains[number] != known.mark.turns:
            return None, "history_changed"
        failure: BranchReason = "not_proved"
        if place is None:
            failure = _difference(echo, known)
        elif reading.ends[number] is not None and not reading.opens(number, known.mark):
            failure = "context_changed"
        elif reading.ends[number] is not None:
            if self._mode == "sampled":
                return Base(known, known.delivered), failure
            if known.whole and echo.shown == known.saying:
                return Base(known, known.sampled), failure
            if not known.whole and (kept := cut(known, echo.shown)) is not None:
                return Base(known, kept), failure
            failure = _difference(echo, known)
        return Base(known, None), failure

    def _tail(self, conversation: Conversation, reading: "_Reading", turns: int) -> str | None:
        """The text behind so many turns."""
        if turns == len(reading.echoes):
            end = reading.ends[turns - 1]
            return None if end is None else reading.skeleton.text[end:]
        mixed = self._mixed(conversation, turns)
        return None if mixed is None else _unchanged(reading, mixed, mixed.ends[turns - 1])

    def _behind_prompt(
        self, conversation: Conversation, reading: "_Reading", turns: int, known: Known
    ) -> tuple[Base, str] | None:
        """As much of the exchange's prompt, with so many turns in it, as the conversation begins with; and the text
        behind it."""
        mixed = self._mixed(conversation, turns)
        start = None if mixed is None else mixed.position(known.mark.length)
        if mixed is None or start is None:
            return None
        # Cut at a control token that stands here too: ids before one and from there on don't depend on each other.
        opening = known.mark.opening
        controls = [found.span() for found in self._encoder.controls(opening)]
        text = mixed.skeleton.text
        seam = max((first for first, end in controls if text.startswith(opening[:end], start)), default=None)
        rest = None if seam is None else _unchanged(reading, mixed, start + seam)
        if rest is None:
            return None
        return Base(known, None, len(self._encoder.encode(opening[seam:], first=False))), rest

    def _mixed(self, conversation: Conversation, turns: int) -> "_Reading | None":
        """With marks for so many turns, and those that follow as they are now."""
        try:
            return _Reading(conversation, self._renderer.skeleton(conversation, turns), self._seams, turns)
        except TemplateError:
            return None


_END = 256  # characters


class _Reading:
    """A skeleton, cut into contexts and turns. The contexts, joined, are one text; a turn's context begins it."""

    def __init__(self, conversation: Conversation, skeleton: Skeleton, seams: Seams, marked: int | None = None) -> None:
        self.skeleton = skeleton
        self._conversation = conversation
        self._seams = seams
        self.echoes: list[Echo] = []
        self.chains: list[str] = []  # for each turn, the digest of what those before it say
        self.ends: list[int | None] = []  # where each turn's tail begins
        self._openings: list[str | None] = []  # what stands between each turn's context and its first piece
        self._lengths: list[int | None] = []  # of each turn's context; None where it isn't known
        self._lasts: list[int] = []  # and of that, how much stands before the turn before it
        self._starts: list[int] = []  # where each context begins in the text
        chain = NOTHING
        contexts: list[str] = []
        start: int | None = 0 if skeleton.ordered else None  # of the context that is open
        length = 0  # of the contexts before it
        turns = conversation.turns[:marked]
        for turn, place, (preceding, following) in zip(turns, skeleton.places, _around(conversation), strict=False):
            says = saying(turn.parts)
            echo = Echo(named(turn.parts), says, _shown(says, place))
            self.echoes.append(echo)
            self.chains.append(chain.hex())
            chain = chained(chain, echo.shown.digest)
            end = opening = None
            self._lasts.append(length)
            if start is not None and place is not None:
                end, openings = self._around(turn, place, preceding, following)
                context = skeleton.text[start : place.start]
                opening = max((each for each in openings if context.endswith(each)), key=len, default=None)
                contexts.append(_stable(context.removesuffix(opening or "")))
                self._starts.append(start)
                self._lengths.append(length + len(contexts[-1]))
                length += len(contexts[-1]) + len(TURN)
                start = end
            else:
                # Nothing of the turn is shown: it stands somewhere in the context that is open.
                self._lengths.append(None if start is None else length + len(_stable(skeleton.text[start:])))
            self.ends.append(end)
            self._openings.append(opening)
        self._chain = chain.hex()
        self._known = start is not None
        self._starts.append(start or 0)
        contexts.append(_stable(skeleton.text[start or 0 :]))
        self._contexts = contexts
        self._context = TURN.join(contexts)

    def _digest(self, text: str) -> str:
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=self._seams.tokenizer).hexdigest()

    def proved(self, number: int) -> bool:
        """Whether it is known where the turns before this one end, and where it begins."""
        return self._lengths[number] is not None

    def mark(self) -> ContextMark | None:
        """None where later requests can't go on from here, since it isn't known which text is whose."""
        opening = self._seams.opening(self._conversation)
        if not self._known or opening is None or not self._context.endswith(opening):
            return None
        base = self._context[: len(self._context) - len(opening)]
        return ContextMark(self._digest(base), len(base), self._chain, opening)

    def has_context(self, number: int, mark: ContextMark) -> bool:
        """Whether the mark's context is this turn's, or its beginning up to somewhere behind the turn before it."""
        length = self._lengths[number]
        if length is None or not self._lasts[number] <= mark.length <= length:
            return False
        return self._digest(self._context[: mark.length]) == mark.context

    def opens(self, number: int, mark: ContextMark) -> bool:
        """Whether what stands between the context and the turn is the generation prompt that it was sampled behind: in
        full, or as the template writes it before a turn of another shape (without an empty think block, say)."""
        opening = self._openings[number]
        if opening is None or self._lengths[number] != mark.length:
            return False
        return opening.startswith(mark.opening) or mark.opening.startswith(opening)

    def position(self, length: int) -> int | None:
        """Where in the text so many characters of context end."""
        for start, context in zip(self._starts, self._contexts, strict=True):
            if length <= len(context):
                return start + _unstable(self.skeleton.text[start:], length)
            length -= len(context) + len(TURN)
        return None

    def _around(
        self, turn: Turn, place: Place, preceding: str | None, following: str | None
    ) -> tuple[int | None, set[str]]:
        """Where the turn's tail begins, and what may stand before its first piece."""
        asked = self._seams.opening_after(preceding, self._conversation) if preceding else None
        openings = set() if asked is None else {asked}
        seam = self._seams.seam(place.last, bool(turn.calls), following, self._conversation)
        if seam is None:
            return None, openings
        end = self._seams.end(seam, turn, self.skeleton.text, place.stop)
        return end, openings | self._seams.openings(seam, turn)


def _unchanged(reading: _Reading, mixed: _Reading, start: int | None) -> str | None:
    """The text from there on, where showing the turns in it has not changed anything before."""
    text = mixed.skeleton.text
    return text[start:] if start is not None and reading.skeleton.text.startswith(text[:start]) else None


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
    if echo.shown.thinking != known.saying.thinking:
        return "thinking_dropped_by_template"
    if echo.shown.text != known.saying.text:
        return "text_dropped_by_template"
    if echo.shown.calls != known.saying.calls:
        return "calls_dropped_by_template"
    return "not_proved"


def _around(conversation: Conversation) -> list[tuple[str | None, str | None]]:
    """For each turn, the roles of the messages before and behind it."""
    roles = [item.message["role"] if isinstance(item, Context) else "assistant" for item in conversation.items]
    around = zip([None, *roles], [*roles[1:], None], strict=False)
    return [pair for pair, item in zip(around, conversation.items, strict=False) if isinstance(item, Turn)]


def _stable(text: str) -> str:
    """The mark within broken spellings is random; digests must outlive the process."""
    return text.replace(BREAK, BROKEN)


def _unstable(text: str, length: int) -> int:
    """Where `length` characters of the stable text end in the text itself."""
    at = 0
    while length > 0:
        broken = text.find(BREAK, at)
        if broken < 0 or broken - at >= length:
            return at + length
        length -= broken - at + len(BROKEN)
        at = broken + len(BREAK)
    return at
