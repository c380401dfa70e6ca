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
from polar.records.exchange import ContextMark
from polar.rendering.encoder import BREAK_PLACEHOLDER, SPELLING_BREAK, TURN_PLACEHOLDER, PromptEncoder
from polar.rendering.messages import ContextMessage, Conversation, ModelTurn
from polar.rendering.seams import SeamProver
from polar.rendering.skeleton import Renderer, Skeleton, TurnSpan
from polar.rendering.template import TemplateError
from polar.rendering.tokenizer import TokenIds
from polar.rendering.turn_digest import EMPTY_DIGEST, TurnDigest, chain_digest, digest_turn
from polar.types import Part, Reasoning, ToolCall

ContinuationMode = Literal["auto", "sampled", "off"]
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


class RecordedTurn(Struct):
    """A turn that was sampled in this session, as far as going on from it needs it."""

    exchange_id: str
    seq: int
    mark: ContextMark
    digest: TurnDigest
    prompt_tokens: int  # tokens
    sampled_tokens: int
    delivered_tokens: int  # of the sampled tokens, those whose text the harness got
    ended: bool = True  # by itself, or at a limit; else it broke off

    @property
    def is_fully_delivered(self) -> bool:
        return self.ended and self.delivered_tokens == self.sampled_tokens


class TurnHistory(Struct):
    """The turns of one session."""

    turns: dict[str, RecordedTurn] = field(default_factory=dict)
    unmarked: set[str] = field(default_factory=set)  # exchanges of whose prompts nothing is proved
    written_ids: dict[str, str] = field(default_factory=dict)  # ids of calls as the model wrote them, by ours
    _turns_by_digest: dict[tuple[bytes, bytes], list[RecordedTurn]] = field(default_factory=dict)

    def add(self, known: RecordedTurn, parts: Sequence[Part] = ()) -> None:
        """`parts` are what the turn said."""
        self.turns[known.exchange_id] = known
        for part in parts:
            if isinstance(part, ToolCall) and part.written and (issued := ids.find_call_id(part.id)):
                self.written_ids[issued] = part.written
        self._turns_by_digest.setdefault((known.digest.text, known.digest.calls), []).append(known)

    def find_written_id(self, call_id: str) -> str | None:
        """The id that the model itself wrote for a call, where it did and the harness echoes ours."""
        issued = ids.find_call_id(call_id)
        return self.written_ids.get(issued) if issued else None

    def find_candidates(self, echo: "EchoedTurn") -> Sequence[RecordedTurn]:
        """The exchanges that a turn may have come from, the likeliest first: the one that it names; else those that
        said the same, delivered ones first, the latest first."""
        named = self.turns.get(echo.exchange_id) if echo.exchange_id else None
        if named is not None:
            return (named,)
        found = self._turns_by_digest.get((echo.digest.text, echo.digest.calls), [])
        return sorted(found, key=lambda known: (known.is_fully_delivered, known.seq), reverse=True)


class EchoedTurn(NamedTuple):
    """One of the model's turns as a request has it."""

    exchange_id: str | None  # that it names
    digest: TurnDigest
    shown_digest: TurnDigest  # what is left of it in the rendered prompt


class RecordedPrefix(NamedTuple):
    """The recorded ids that a prompt begins with: an exchange's prompt, and so many of its sampled tokens; or, with
    `sampled` None, its prompt without the last `drop` tokens."""

    turn: RecordedTurn
    sampled_tokens: int | None
    dropped_tokens: int = 0

    @property
    def length(self) -> int:
        """In tokens."""
        return (
            self.turn.prompt_tokens - self.dropped_tokens
            if self.sampled_tokens is None
            else self.turn.prompt_tokens + self.sampled_tokens
        )

    def extend(self, context: TokenIds, new: TokenIds) -> TokenIds:
        """The prompt's ids, given those of the exchange (its prompt and what was sampled) and those of the text behind
        it."""
        if self.sampled_tokens is None:
            return np.concatenate([context[: self.turn.prompt_tokens - self.dropped_tokens], new])
        kept = context[: self.turn.prompt_tokens + self.sampled_tokens]
        if len(new) and kept[-1] == new[0]:
            new = new[1:]  # the turn's end token, or the opening that took its place, is there already
        return np.concatenate([kept, new])


class PromptPlan(NamedTuple):
    """How a prompt comes about: recorded ids, then the ids of `text`."""

    base: RecordedPrefix | None
    text: str
    prompt_end: str  # of the whole prompt: what a parser takes its first state from
    mark: ContextMark | None
    reason: BranchReason | None
    turn_count: int


MatchDelivered = Callable[[RecordedTurn, TurnDigest], int | None]
"""How many of a partly delivered turn's tokens say this, or None."""


class PromptPlanner:
    def __init__(self, renderer: Renderer, seams: SeamProver, encoder: PromptEncoder, mode: ContinuationMode) -> None:
        self._renderer = renderer
        self._seams = seams
        self._encoder = encoder
        self._mode = mode

    def plan(self, conversation: Conversation, history: TurnHistory, match_delivered: MatchDelivered) -> PromptPlan:
        """Raises TemplateError where the template refuses the conversation."""
        self._seams.trim_caches()
        turns = conversation.turns
        if not turns:
            text = self._renderer.render(conversation)
            skeleton = Skeleton(text, [], is_ordered=True)
        else:
            try:
                skeleton = self._renderer.render_skeleton(conversation)
            except TemplateError:
                text = self._renderer.render(conversation)
                return PromptPlan(None, text, text[-_PROMPT_END_CHARACTERS:], None, "not_proved", len(turns))
        reading = _MarkedConversation(conversation, skeleton, self._seams)
        mark = reading.make_mark()
        if not turns:
            return PromptPlan(None, text, text[-_PROMPT_END_CHARACTERS:], mark, None, 0)
        if self._mode == "off":
            text = self._renderer.render(conversation)
            return PromptPlan(None, text, text[-_PROMPT_END_CHARACTERS:], mark, "continuation_off", len(turns))
        return self._plan_longest_prefix(conversation, reading, history, match_delivered, mark)

    def _plan_longest_prefix(
        self,
        conversation: Conversation,
        reading: "_MarkedConversation",
        history: TurnHistory,
        match_delivered: MatchDelivered,
        mark: ContextMark | None,
    ) -> PromptPlan:
        count = len(reading.echoes)
        reason: BranchReason | None = None
        for number in range(count - 1, -1, -1):
            unmarked = reading.echoes[number].exchange_id in history.unmarked
            failure: BranchReason = "not_proved" if unmarked else "unknown_turn"
            behind_prompt: PromptPlan | None = None
            for known in history.find_candidates(reading.echoes[number]):
                base, failure = self._match_turn(reading, number, known, match_delivered)
                if base is None:
                    continue
                # Behind the turn itself the rest is simply what follows; else the turn is part of what is rendered.
                if base.sampled_tokens is not None:
                    text = self._find_tail(conversation, reading, number + 1)
                    if text is not None:
                        return PromptPlan(
                            base,
                            text,
                            text[-_PROMPT_END_CHARACTERS:],
                            mark,
                            None if number == count - 1 else reason,
                            count,
                        )
                    failure = "not_proved"
                elif behind_prompt is None and (found := self._continue_prompt(conversation, reading, number, known)):
                    base, text = found
                    behind_prompt = PromptPlan(base, text, text[-_PROMPT_END_CHARACTERS:], mark, failure, count)
            if behind_prompt is not None:
                return behind_prompt
            reason = failure
        text = self._renderer.render(conversation)
        return PromptPlan(None, text, text[-_PROMPT_END_CHARACTERS:], mark, reason, count)

    def _match_turn(
        self, reading: "_MarkedConversation", number: int, known: RecordedTurn, match_delivered: MatchDelivered
    ) -> tuple[RecordedPrefix | None, BranchReason]:
        """Whether the conversation goes on from the exchange's turn, else from its prompt, else not at all; and why."""
        echo, place = reading.echoes[number], reading.skeleton.turn_spans[number]
        if not reading.is_proved(number):
            return None, "not_proved"
        if not reading.has_context(number, known.mark):
            return None, "context_changed"
        if self._mode == "auto" and reading.digest_chains[number] != known.mark.turns:
            return None, "history_changed"
        failure: BranchReason = "not_proved"
        if place is None:
            failure = _explain_difference(echo, known)
        elif reading.tail_starts[number] is not None and not reading.has_opening(number, known.mark):
            failure = "context_changed"
        elif reading.tail_starts[number] is not None:
            if self._mode == "sampled":
                return RecordedPrefix(known, known.delivered_tokens), failure
            if known.is_fully_delivered and echo.shown_digest == known.digest:
                return RecordedPrefix(known, known.sampled_tokens), failure
            if not known.is_fully_delivered and (kept := match_delivered(known, echo.shown_digest)) is not None:
                return RecordedPrefix(known, kept), failure
            failure = _explain_difference(echo, known)
        return RecordedPrefix(known, None), failure

    def _find_tail(self, conversation: Conversation, reading: "_MarkedConversation", turns: int) -> str | None:
        """The text behind so many turns."""
        if turns == len(reading.echoes):
            end = reading.tail_starts[turns - 1]
            return None if end is None else reading.skeleton.text[end:]
        mixed = self._read_partly_marked(conversation, turns)
        return None if mixed is None else _cut_unchanged_text(reading, mixed, mixed.tail_starts[turns - 1])

    def _continue_prompt(
        self, conversation: Conversation, reading: "_MarkedConversation", turns: int, known: RecordedTurn
    ) -> tuple[RecordedPrefix, str] | None:
        """As much of the exchange's prompt, with so many turns in it, as the conversation begins with; and the text
        behind it."""
        mixed = self._read_partly_marked(conversation, turns)
        start = None if mixed is None else mixed.find_position(known.mark.length)
        if mixed is None or start is None:
            return None
        # Cut at a control token that stands here too: ids before one and from there on don't depend on each other.
        opening = known.mark.opening
        controls = [found.span() for found in self._encoder.find_controls(opening)]
        text = mixed.skeleton.text
        seam = max((first for first, end in controls if text.startswith(opening[:end], start)), default=None)
        rest = None if seam is None else _cut_unchanged_text(reading, mixed, start + seam)
        if rest is None:
            return None
        return RecordedPrefix(known, None, len(self._encoder.encode(opening[seam:], first=False))), rest

    def _read_partly_marked(self, conversation: Conversation, turns: int) -> "_MarkedConversation | None":
        """With marks for so many turns, and those that follow as they are now."""
        try:
            return _MarkedConversation(
                conversation, self._renderer.render_skeleton(conversation, turns), self._seams, turns
            )
        except TemplateError:
            return None


_PROMPT_END_CHARACTERS = 256  # characters


class _MarkedConversation:
    """A skeleton, cut into contexts and turns. The contexts, joined, are one text; a turn's context begins it."""

    def __init__(
        self, conversation: Conversation, skeleton: Skeleton, seams: SeamProver, marked: int | None = None
    ) -> None:
        self.skeleton = skeleton
        self._conversation = conversation
        self._seams = seams
        self.echoes: list[EchoedTurn] = []
        self.digest_chains: list[str] = []  # for each turn, the digest of what those before it say
        self.tail_starts: list[int | None] = []  # where each turn's tail begins
        self._openings: list[str | None] = []  # what stands between each turn's context and its first piece
        self._context_lengths: list[int | None] = []  # of each turn's context; None where it isn't known
        self._previous_context_lengths: list[int] = []  # and of that, how much stands before the turn before it
        self._context_starts: list[int] = []  # where each context begins in the text
        chain = EMPTY_DIGEST
        contexts: list[str] = []
        start: int | None = 0 if skeleton.is_ordered else None  # of the context that is open
        length = 0  # of the contexts before it
        turns = conversation.turns[:marked]
        for turn, place, (preceding, following) in zip(
            turns, skeleton.turn_spans, _list_neighbor_roles(conversation), strict=False
        ):
            says = digest_turn(turn.parts)
            echo = EchoedTurn(find_named_exchange(turn.parts), says, _keep_shown(says, place))
            self.echoes.append(echo)
            self.digest_chains.append(chain.hex())
            chain = chain_digest(chain, echo.shown_digest.combined)
            end = opening = None
            self._previous_context_lengths.append(length)
            if start is not None and place is not None:
                end, openings = self._find_boundaries(turn, place, preceding, following)
                context = skeleton.text[start : place.start]
                opening = max((each for each in openings if context.endswith(each)), key=len, default=None)
                contexts.append(_replace_breaks(context.removesuffix(opening or "")))
                self._context_starts.append(start)
                self._context_lengths.append(length + len(contexts[-1]))
                length += len(contexts[-1]) + len(TURN_PLACEHOLDER)
                start = end
            else:
                # Nothing of the turn is shown: it stands somewhere in the context that is open.
                self._context_lengths.append(
                    None if start is None else length + len(_replace_breaks(skeleton.text[start:]))
                )
            self.tail_starts.append(end)
            self._openings.append(opening)
        self._last_digest_chain = chain.hex()
        self._is_complete = start is not None
        self._context_starts.append(start or 0)
        contexts.append(_replace_breaks(skeleton.text[start or 0 :]))
        self._contexts = contexts
        self._context = TURN_PLACEHOLDER.join(contexts)

    def _digest(self, text: str) -> str:
        return blake2b(
            text.encode("utf-8", "surrogatepass"), digest_size=16, key=self._seams.tokenizer_fingerprint
        ).hexdigest()

    def is_proved(self, number: int) -> bool:
        """Whether it is known where the turns before this one end, and where it begins."""
        return self._context_lengths[number] is not None

    def make_mark(self) -> ContextMark | None:
        """None where later requests can't go on from here, since it isn't known which text is whose."""
        opening = self._seams.find_opening(self._conversation)
        if not self._is_complete or opening is None or not self._context.endswith(opening):
            return None
        base = self._context[: len(self._context) - len(opening)]
        return ContextMark(self._digest(base), len(base), self._last_digest_chain, opening)

    def has_context(self, number: int, mark: ContextMark) -> bool:
        """Whether the mark's context is this turn's, or its beginning up to somewhere behind the turn before it."""
        length = self._context_lengths[number]
        if length is None or not self._previous_context_lengths[number] <= mark.length <= length:
            return False
        return self._digest(self._context[: mark.length]) == mark.context

    def has_opening(self, number: int, mark: ContextMark) -> bool:
        """Whether what stands between the context and the turn is the generation prompt that it was sampled behind: in
        full, or as the template writes it before a turn of another shape (without an empty think block, say)."""
        opening = self._openings[number]
        if opening is None or self._context_lengths[number] != mark.length:
            return False
        return opening.startswith(mark.opening) or mark.opening.startswith(opening)

    def find_position(self, length: int) -> int | None:
        """Where in the text so many characters of context end."""
        for start, context in zip(self._context_starts, self._contexts, strict=True):
            if length <= len(context):
                return start + _find_unstable_offset(self.skeleton.text[start:], length)
            length -= len(context) + len(TURN_PLACEHOLDER)
        return None

    def _find_boundaries(
        self, turn: ModelTurn, place: TurnSpan, preceding: str | None, following: str | None
    ) -> tuple[int | None, set[str]]:
        """Where the turn's tail begins, and what may stand before its first piece."""
        asked = self._seams.find_opening_after(preceding, self._conversation) if preceding else None
        openings = set() if asked is None else {asked}
        seam = self._seams.prove_seam(place.last_piece, bool(turn.calls), following, self._conversation)
        if seam is None:
            return None, openings
        end = self._seams.find_tail(seam, turn, self.skeleton.text, place.stop)
        return end, openings | self._seams.list_openings(seam, turn)


def _cut_unchanged_text(reading: _MarkedConversation, mixed: _MarkedConversation, start: int | None) -> str | None:
    """The text from there on, where showing the turns in it has not changed anything before."""
    text = mixed.skeleton.text
    return text[start:] if start is not None and reading.skeleton.text.startswith(text[:start]) else None


def find_named_exchange(parts: Sequence[Part]) -> str | None:
    """The exchange that a turn's ids and seals name."""
    for part in parts:
        if isinstance(part, ToolCall) and (found := ids.find_exchange_id(part.id) or ids.find_exchange_id(part.seal)):
            return found
        if isinstance(part, Reasoning) and (found := ids.find_exchange_id(part.seal)):
            return found
    return None


def _keep_shown(says: TurnDigest, place: TurnSpan | None) -> TurnDigest:
    if place is None:
        return TurnDigest()
    return TurnDigest(
        says.thinking if place.shows_thinking else EMPTY_DIGEST,
        says.text if place.shows_text else EMPTY_DIGEST,
        says.calls if place.shows_calls else EMPTY_DIGEST,
    )


def _explain_difference(echo: EchoedTurn, known: RecordedTurn) -> BranchReason:
    if not known.is_fully_delivered:
        return "turn_cut"
    if echo.digest.text != known.digest.text:
        return "text_changed"
    if echo.digest.calls != known.digest.calls:
        return "calls_changed"
    if echo.digest.thinking == EMPTY_DIGEST != known.digest.thinking:
        return "thinking_dropped_by_harness"
    if echo.digest.thinking != known.digest.thinking:
        return "thinking_changed"
    if echo.shown_digest.thinking != known.digest.thinking:
        return "thinking_dropped_by_template"
    if echo.shown_digest.text != known.digest.text:
        return "text_dropped_by_template"
    if echo.shown_digest.calls != known.digest.calls:
        return "calls_dropped_by_template"
    return "not_proved"


def _list_neighbor_roles(conversation: Conversation) -> list[tuple[str | None, str | None]]:
    """For each turn, the roles of the messages before and behind it."""
    roles = [item.message["role"] if isinstance(item, ContextMessage) else "assistant" for item in conversation.items]
    around = zip([None, *roles], [*roles[1:], None], strict=False)
    return [pair for pair, item in zip(around, conversation.items, strict=False) if isinstance(item, ModelTurn)]


def _replace_breaks(text: str) -> str:
    """The mark within broken spellings is random; digests must outlive the process."""
    return text.replace(SPELLING_BREAK, BREAK_PLACEHOLDER)


def _find_unstable_offset(text: str, length: int) -> int:
    """Where `length` characters of the stable text end in the text itself."""
    at = 0
    while length > 0:
        broken = text.find(SPELLING_BREAK, at)
        if broken < 0 or broken - at >= length:
            return at + length
        length -= broken - at + len(BREAK_PLACEHOLDER)
        at = broken + len(SPELLING_BREAK)
    return at
