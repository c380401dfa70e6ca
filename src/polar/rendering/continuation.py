"""Continuation: extending recorded token ids instead of tokenising a conversation anew.

A request repeats the conversation so far as text. If it continues a turn that was sampled here, its prompt is that
exchange's recorded ids and then the ids of the new text:

    prompt(k+1) = prompt(k) + sampled(k) + encode(tail)

The ids that the gateway issued tell which exchange a turn came from; without them, its text and calls do. That the
request really continues the exchange is proved, never guessed:

- the context (all text but the model's turns) up to the turn is the one that was recorded;
- in mode `auto`, every turn still says what was sampled (in mode `sampled` the recorded turn counts, whatever the
  harness changed in its copy);
- the tail doesn't depend on the turn's shape (seams.py).

If the last turn can't be continued, the longest recorded prefix that can be proved is kept, and the text behind it is
rendered: behind an earlier turn, or behind the prompt of the exchange whose turn has changed. That is a branch, and has
a reason.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
from msgspec import Struct, field

from polar import ids
from polar.records.exchange import ContextMark, TokenIds
from polar.rendering.encoder import BREAK_PLACEHOLDER, SPELLING_BREAK, TURN_PLACEHOLDER, PromptEncoder
from polar.rendering.messages import ContextMessage, Conversation, ModelTurn
from polar.rendering.seams import SeamProver
from polar.rendering.skeleton import Renderer, Skeleton, TurnSpan
from polar.rendering.template import TemplateError
from polar.rendering.turn_digest import EMPTY_DIGEST, TurnDigest, chain_digest, digest_turn
from polar.types import Part, Reasoning, ToolCall

ContinuationMode = Literal["auto", "sampled", "off"]
BranchReason = Literal[
    "continuation_off",
    "context_changed",  # before the turn: the system prompt, the tools, an earlier message
    "thinking_dropped_by_harness",
    "thinking_dropped_by_template",
    "text_dropped_by_template",
    "calls_dropped_by_template",
    "thinking_changed",
    "text_changed",
    "calls_changed",
    "turn_cut",  # only a part of the turn was delivered, and the harness kept another part of it
    "history_changed",  # earlier turns have another form than when the turn was sampled
    "unknown_turn",  # no turn of this session
    "not_proved",  # the template's text around the turn can't be told apart from the turn
]


class RecordedTurn(Struct):
    """A turn that was sampled in this session: what is needed to continue from it."""

    exchange_id: str
    seq: int
    mark: ContextMark
    digest: TurnDigest
    prompt_tokens: int
    sampled_tokens: int
    delivered_tokens: int  # of the sampled tokens, those whose text the harness got
    ended: bool = True  # by itself or at a limit; False if it was broken off

    @property
    def is_fully_delivered(self) -> bool:
        return self.ended and self.delivered_tokens == self.sampled_tokens


class TurnHistory(Struct):
    """The turns of one session."""

    turns: dict[str, RecordedTurn] = field(default_factory=dict)
    unmarked: set[str] = field(default_factory=set)  # exchanges without a context mark
    written_ids: dict[str, str] = field(default_factory=dict)  # ids of calls as the model wrote them, by ours
    _turns_by_digest: dict[tuple[bytes, bytes], list[RecordedTurn]] = field(default_factory=dict)

    def add(self, turn: RecordedTurn, parts: Sequence[Part] = ()) -> None:
        """Adds a turn. `parts` are the parts of its reply."""
        self.turns[turn.exchange_id] = turn
        for part in parts:
            if isinstance(part, ToolCall) and part.written and (issued := ids.find_call_id(part.id)):
                self.written_ids[issued] = part.written
        self._turns_by_digest.setdefault((turn.digest.text, turn.digest.calls), []).append(turn)

    def find_written_id(self, call_id: str) -> str | None:
        """Returns the id that the model itself wrote for a call whose issued id the harness echoes, if it wrote one."""
        issued = ids.find_call_id(call_id)
        return self.written_ids.get(issued) if issued else None

    def find_candidates(self, echo: "EchoedTurn") -> Sequence[RecordedTurn]:
        """Returns the turns that an echoed turn may be, the likeliest first: the one that it names; otherwise those
        with the same text and calls, fully delivered ones first, then the latest first."""
        named = self.turns.get(echo.exchange_id) if echo.exchange_id else None
        if named is not None:
            return (named,)
        candidates = self._turns_by_digest.get((echo.digest.text, echo.digest.calls), [])
        return sorted(candidates, key=lambda turn: (turn.is_fully_delivered, turn.seq), reverse=True)


class EchoedTurn(NamedTuple):
    """One of the model's turns as a request repeats it."""

    exchange_id: str | None  # the exchange that its ids name
    digest: TurnDigest
    shown_digest: TurnDigest  # of the pieces that the rendered prompt shows


class RecordedPrefix(NamedTuple):
    """The recorded ids that a prompt begins with: an exchange's prompt and its first `sampled_tokens` sampled tokens;
    or, if that is None, its prompt without the last `dropped_tokens` tokens."""

    turn: RecordedTurn
    sampled_tokens: int | None
    dropped_tokens: int = 0

    @property
    def length(self) -> int:
        """The prefix's length in tokens."""
        return (
            self.turn.prompt_tokens - self.dropped_tokens
            if self.sampled_tokens is None
            else self.turn.prompt_tokens + self.sampled_tokens
        )

    def extend(self, exchange_ids: TokenIds, tail: TokenIds) -> TokenIds:
        """Builds the prompt's ids from the exchange's (prompt and sampled) and those of the text behind the prefix."""
        if self.sampled_tokens is None:
            return np.concatenate([exchange_ids[: self.turn.prompt_tokens - self.dropped_tokens], tail])
        prefix = exchange_ids[: self.turn.prompt_tokens + self.sampled_tokens]
        if len(tail) and prefix[-1] == tail[0]:
            tail = tail[1:]  # the prefix ends with the turn's end token already, or with the opening in its place
        return np.concatenate([prefix, tail])


class PromptPlan(NamedTuple):
    """How a prompt is made: recorded ids, then the ids of `text`."""

    base: RecordedPrefix | None
    text: str
    prompt_end: str  # the last characters of the whole prompt, from which a parser takes its first state
    mark: ContextMark | None
    reason: BranchReason | None
    turn_count: int


MatchDelivered = Callable[[RecordedTurn, TurnDigest], int | None]
"""Returns how many of a partly delivered turn's tokens say the same as this digest, or None if no number does."""


class PromptPlanner:
    def __init__(self, renderer: Renderer, seams: SeamProver, encoder: PromptEncoder, mode: ContinuationMode) -> None:
        self._renderer = renderer
        self._seams = seams
        self._encoder = encoder
        self._mode = mode

    def plan_prompt(
        self, conversation: Conversation, history: TurnHistory, match_delivered: MatchDelivered
    ) -> PromptPlan:
        """Plans a conversation's prompt. Raises TemplateError if the template refuses the conversation."""
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
            for recorded in history.find_candidates(reading.echoes[number]):
                base, failure = self._match_turn(reading, number, recorded, match_delivered)
                if base is None:
                    continue
                # A prefix with the turn needs only the tail; one without it has the turn itself rendered.
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
                elif behind_prompt is None and (
                    continued := self._continue_prompt(conversation, reading, number, recorded)
                ):
                    base, text = continued
                    behind_prompt = PromptPlan(base, text, text[-_PROMPT_END_CHARACTERS:], mark, failure, count)
            if behind_prompt is not None:
                return behind_prompt
            reason = failure
        text = self._renderer.render(conversation)
        return PromptPlan(None, text, text[-_PROMPT_END_CHARACTERS:], mark, reason, count)

    def _match_turn(
        self, reading: "_MarkedConversation", number: int, recorded: RecordedTurn, match_delivered: MatchDelivered
    ) -> tuple[RecordedPrefix | None, BranchReason]:
        """Returns the prefix that the conversation continues: with the exchange's turn, or with its prompt alone, or
        None. The reason says why the turn is not in it."""
        echo, turn_span = reading.echoes[number], reading.skeleton.turn_spans[number]
        if not reading.is_proved(number):
            return None, "not_proved"
        if not reading.has_context(number, recorded.mark):
            return None, "context_changed"
        if self._mode == "auto" and reading.digest_chains[number] != recorded.mark.turns:
            return None, "history_changed"
        failure: BranchReason = "not_proved"
        if turn_span is None:
            failure = _explain_difference(echo, recorded)
        elif reading.tail_starts[number] is not None and not reading.has_opening(number, recorded.mark):
            failure = "context_changed"
        elif reading.tail_starts[number] is not None:
            if self._mode == "sampled":
                return RecordedPrefix(recorded, recorded.delivered_tokens), failure
            if recorded.is_fully_delivered and echo.shown_digest == recorded.digest:
                return RecordedPrefix(recorded, recorded.sampled_tokens), failure
            if not recorded.is_fully_delivered:
                matching_tokens = match_delivered(recorded, echo.shown_digest)
                if matching_tokens is not None:
                    return RecordedPrefix(recorded, matching_tokens), failure
            failure = _explain_difference(echo, recorded)
        return RecordedPrefix(recorded, None), failure

    def _find_tail(self, conversation: Conversation, reading: "_MarkedConversation", turns: int) -> str | None:
        """Returns the text behind the first `turns` turns, or None if it can't be proved."""
        if turns == len(reading.echoes):
            end = reading.tail_starts[turns - 1]
            return None if end is None else reading.skeleton.text[end:]
        partial = self._read_partly_marked(conversation, turns)
        return None if partial is None else _cut_unchanged_text(reading, partial, partial.tail_starts[turns - 1])

    def _continue_prompt(
        self, conversation: Conversation, reading: "_MarkedConversation", turns: int, recorded: RecordedTurn
    ) -> tuple[RecordedPrefix, str] | None:
        """Returns as much of the exchange's prompt (which has `turns` turns) as the conversation begins with, and the
        text behind it."""
        partial = self._read_partly_marked(conversation, turns)
        start = None if partial is None else partial.find_position(recorded.mark.length)
        if partial is None or start is None:
            return None
        # Cut at a control token that both prompts have: ids before it don't depend on the text from there on.
        opening = recorded.mark.opening
        controls = [match.span() for match in self._encoder.find_controls(opening)]
        text = partial.skeleton.text
        seam = max((first for first, end in controls if text.startswith(opening[:end], start)), default=None)
        tail = None if seam is None else _cut_unchanged_text(reading, partial, start + seam)
        if tail is None:
            return None
        return RecordedPrefix(recorded, None, len(self._encoder.encode(opening[seam:], first=False))), tail

    def _read_partly_marked(self, conversation: Conversation, turns: int) -> "_MarkedConversation | None":
        """Renders the conversation with marks for the first `turns` turns and the others as they are. Returns None if
        the template refuses it."""
        try:
            return _MarkedConversation(
                conversation, self._renderer.render_skeleton(conversation, turns), self._seams, turns
            )
        except TemplateError:
            return None


_PROMPT_END_CHARACTERS = 256


class _MarkedConversation:
    """A skeleton, cut into contexts and turns. A turn's context is the text of all contexts before it, joined."""

    def __init__(
        self, conversation: Conversation, skeleton: Skeleton, seams: SeamProver, marked: int | None = None
    ) -> None:
        self.skeleton = skeleton
        self._conversation = conversation
        self._seams = seams
        self.echoes: list[EchoedTurn] = []
        self.digest_chains: list[str] = []  # for each turn, the digest of what those before it say
        self.tail_starts: list[int | None] = []  # where each turn's tail begins
        self._openings: list[str | None] = []  # the text between each turn's context and its first piece
        self._context_lengths: list[int | None] = []  # of each turn's context; None if unknown
        self._previous_context_lengths: list[int] = []  # of the context up to the previous turn, for each turn
        self._context_starts: list[int] = []  # where each context begins in the text
        chain = EMPTY_DIGEST
        contexts: list[str] = []
        start: int | None = 0 if skeleton.is_ordered else None  # of the context that is open
        length = 0  # of the contexts before it
        turns = conversation.turns[:marked]
        for turn, turn_span, (preceding, following) in zip(
            turns, skeleton.turn_spans, _list_neighbor_roles(conversation), strict=False
        ):
            digest = digest_turn(turn.parts)
            echo = EchoedTurn(find_named_exchange(turn.parts), digest, _keep_shown(digest, turn_span))
            self.echoes.append(echo)
            self.digest_chains.append(chain.hex())
            chain = chain_digest(chain, echo.shown_digest.combined)
            end = opening = None
            self._previous_context_lengths.append(length)
            if start is not None and turn_span is not None:
                end, openings = self._find_boundaries(turn, turn_span, preceding, following)
                context = skeleton.text[start : turn_span.start]
                opening = max((text for text in openings if context.endswith(text)), key=len, default=None)
                contexts.append(_replace_breaks(context.removesuffix(opening or "")))
                self._context_starts.append(start)
                self._context_lengths.append(length + len(contexts[-1]))
                length += len(contexts[-1]) + len(TURN_PLACEHOLDER)
                start = end
            else:
                # The turn is not shown: it is somewhere in the context that is open.
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
        """Whether the ends of the turns before this one, and its own beginning, are known."""
        return self._context_lengths[number] is not None

    def make_mark(self) -> ContextMark | None:
        """Returns the mark by which later requests can continue from here, or None if the text can't be cut into
        contexts and turns."""
        opening = self._seams.find_opening(self._conversation)
        if not self._is_complete or opening is None or not self._context.endswith(opening):
            return None
        base = self._context[: len(self._context) - len(opening)]
        return ContextMark(self._digest(base), len(base), self._last_digest_chain, opening)

    def has_context(self, number: int, mark: ContextMark) -> bool:
        """Whether the mark's context is this turn's context, or a beginning of it that includes the previous turn."""
        length = self._context_lengths[number]
        if length is None or not self._previous_context_lengths[number] <= mark.length <= length:
            return False
        return self._digest(self._context[: mark.length]) == mark.context

    def has_opening(self, number: int, mark: ContextMark) -> bool:
        """Whether the text between the context and the turn is the generation prompt that the turn was sampled behind:
        in full, or as the template writes it before a turn of another shape (without an empty think block, say)."""
        opening = self._openings[number]
        if opening is None or self._context_lengths[number] != mark.length:
            return False
        return opening.startswith(mark.opening) or mark.opening.startswith(opening)

    def find_position(self, length: int) -> int | None:
        """Returns where in the text the first `length` characters of context end."""
        for start, context in zip(self._context_starts, self._contexts, strict=True):
            if length <= len(context):
                return start + _find_unstable_offset(self.skeleton.text[start:], length)
            length -= len(context) + len(TURN_PLACEHOLDER)
        return None

    def _find_boundaries(
        self, turn: ModelTurn, turn_span: TurnSpan, preceding: str | None, following: str | None
    ) -> tuple[int | None, set[str]]:
        """Returns where the turn's tail begins, and the texts that may stand before its first piece. `preceding` and
        `following` are the roles of the neighboring messages."""
        generation_prompt = self._seams.find_opening_after(preceding, self._conversation) if preceding else None
        openings = set() if generation_prompt is None else {generation_prompt}
        seam = self._seams.prove_seam(turn_span.last_piece, bool(turn.calls), following, self._conversation)
        if seam is None:
            return None, openings
        end = self._seams.find_tail(seam, turn, self.skeleton.text, turn_span.stop)
        return end, openings | self._seams.list_openings(seam, turn)


def _cut_unchanged_text(reading: _MarkedConversation, partial: _MarkedConversation, start: int | None) -> str | None:
    """Returns the partly marked text from `start` on, or None if the text before it differs from the marked one."""
    text = partial.skeleton.text
    return text[start:] if start is not None and reading.skeleton.text.startswith(text[:start]) else None


def find_named_exchange(parts: Sequence[Part]) -> str | None:
    """Returns the exchange that a turn's issued ids and seals name."""
    for part in parts:
        exchange_id = ids.find_exchange_id(part.id) if isinstance(part, ToolCall) else None
        if exchange_id is None and isinstance(part, ToolCall | Reasoning):
            exchange_id = ids.find_exchange_id(part.seal)
        if exchange_id:
            return exchange_id
    return None


def _keep_shown(digest: TurnDigest, turn_span: TurnSpan | None) -> TurnDigest:
    """Keeps the digests of the pieces that the rendered prompt shows."""
    if turn_span is None:
        return TurnDigest()
    return TurnDigest(
        digest.thinking if turn_span.shows_thinking else EMPTY_DIGEST,
        digest.text if turn_span.shows_text else EMPTY_DIGEST,
        digest.calls if turn_span.shows_calls else EMPTY_DIGEST,
    )


def _explain_difference(echo: EchoedTurn, recorded: RecordedTurn) -> BranchReason:
    if not recorded.is_fully_delivered:
        return "turn_cut"
    if echo.digest.text != recorded.digest.text:
        return "text_changed"
    if echo.digest.calls != recorded.digest.calls:
        return "calls_changed"
    if echo.digest.thinking == EMPTY_DIGEST != recorded.digest.thinking:
        return "thinking_dropped_by_harness"
    if echo.digest.thinking != recorded.digest.thinking:
        return "thinking_changed"
    if echo.shown_digest.thinking != recorded.digest.thinking:
        return "thinking_dropped_by_template"
    if echo.shown_digest.text != recorded.digest.text:
        return "text_dropped_by_template"
    if echo.shown_digest.calls != recorded.digest.calls:
        return "calls_dropped_by_template"
    return "not_proved"


def _list_neighbor_roles(conversation: Conversation) -> list[tuple[str | None, str | None]]:
    """Lists for each turn the roles of the messages before and behind it."""
    roles = [item.message["role"] if isinstance(item, ContextMessage) else "assistant" for item in conversation.items]
    neighbors = zip([None, *roles], [*roles[1:], None], strict=False)
    return [pair for pair, item in zip(neighbors, conversation.items, strict=False) if isinstance(item, ModelTurn)]


def _replace_breaks(text: str) -> str:
    """Replaces the random spelling breaks: digests must outlive the process."""
    return text.replace(SPELLING_BREAK, BREAK_PLACEHOLDER)


def _find_unstable_offset(text: str, length: int) -> int:
    """Returns where the first `length` characters of the text with replaced breaks end in the text itself."""
    at = 0
    while length > 0:
        broken = text.find(SPELLING_BREAK, at)
        if broken < 0 or broken - at >= length:
            return at + length
        length -= broken - at + len(BREAK_PLACEHOLDER)
        at = broken + len(SPELLING_BREAK)
    return at
