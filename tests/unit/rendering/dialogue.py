"""A conversation without HTTP: what is recorded, what a harness echoes, and the prompts that plans come to.

The oracle is a claim. A prompt claims to be the rendering of certain messages: those of the request, with the turns
that it continues as they were sampled. In mode `auto` that can be checked to the letter, for models that write their
turns as the template does: the ids decode to the whole rendering of the claim, its context is the request's, and its
turns say what the request's turns say. In any mode, the text behind the last sampled token has the ids that the
tokenizer gives it.
"""

import copy
import re
from collections.abc import Sequence
from itertools import groupby

from msgspec import Struct

from polar import ids
from polar.engines.scripted.sampler import DriftingEncoder
from polar.rendering.continuation import PromptPlan, RecordedTurn, TurnHistory
from polar.rendering.encoder import SPELLING_BREAK
from polar.rendering.model_codec import ModelCodec
from polar.rendering.turn_digest import TurnDigest, digest_turn
from polar.reply_parts import build_parts
from polar.types import Message, Part, Reasoning, Request, Text, Thinking, Tool, ToolCall, ToolResult
from tests.unit.rendering.families.models import TOOLS

_NO_THOUGHT = re.compile(r"<think>\s*</think>\s*")


class Prompt(Struct):
    request: Request
    plan: PromptPlan
    ids: list[int]
    claim: list[Message]
    own: int = 0  # tokens up to the last one that the model sampled


class Exchange(Struct):
    prompt: Prompt
    sampled: list[int]
    reply: Message


class Dialogue:
    """One session."""

    def __init__(self, model: ModelCodec, whole: ModelCodec) -> None:
        """`whole` is the same model in mode `off`."""
        self.model = model
        self._whole = whole
        self._encoder = DriftingEncoder(model.tokenizer, drift=0.4)
        self.history = TurnHistory()
        self.exchanges: dict[str, Exchange] = {}

    # Prompts

    def ask(self, messages: Sequence[Message], tools: Sequence[Tool] = TOOLS, thinking: bool | None = None) -> Prompt:
        request = Request("m", copy.deepcopy(list(messages)), list(tools), thinking=Thinking(enabled=thinking))
        plan = self.model.plan_prompt(request, self.history, lambda known, shown: self._cut(known, shown, request))
        new = self.model.encoder.encode(plan.text, first=plan.base is None).tolist()
        if plan.base is None:
            return Prompt(request, plan, new, request.messages)
        exchange = self.exchanges[plan.base.turn.exchange_id]
        before, turns = exchange.prompt, _turns(exchange.prompt.claim)
        at = [index for index, message in enumerate(request.messages) if message.role == "assistant"][len(turns)]
        if plan.base.sampled_tokens is None:
            kept = before.ids[: len(before.ids) - plan.base.dropped_tokens]
            # What was recorded behind its last turn may be only the beginning of what stands there now.
            asked = _unanswered(request.messages[:at])[len(_unanswered(before.claim)) :]
            return Prompt(request, plan, kept + new, [*before.claim, *asked, *request.messages[at:]], before.own)
        kept = before.ids + exchange.sampled[: plan.base.sampled_tokens]
        new = new[1:] if kept[-1] == new[0] else new
        claim = [*before.claim, exchange.reply, *request.messages[at + 1 :]]
        return Prompt(request, plan, kept + new, claim, len(kept))

    def _cut(self, known: RecordedTurn, shown: TurnDigest, request: Request) -> int | None:
        return self.model.count_matching_tokens(known, shown, self.exchanges[known.exchange_id].sampled, request)

    def whole(self, request: Request, messages: Sequence[Message] | None = None) -> str:
        """The rendering of a request, or of other messages in its place."""
        sent = Request("m", list(messages or request.messages), request.tools, thinking=request.thinking)
        return self._whole.plan_prompt(sent, TurnHistory(), lambda *_: None).text.replace(SPELLING_BREAK, "")

    def decode(self, prompt: Sequence[int]) -> str:
        return self.model.tokenizer.decode(prompt)

    # Replies

    def reply(self, prompt: Prompt, written: str | list[int], delivered: int | None = None) -> Message:
        """The model writes this; the harness gets the message (of a cut reply: what its first tokens say)."""
        sampled = self.sample(written) if isinstance(written, str) else written
        parser = self.model.make_parser(prompt.request, prompt.plan.prompt_end)
        events = parser.feed(sampled[:delivered])
        exchange_id = ids.new_exchange_id()
        parts = build_parts(events + (parser.finish() if delivered is None else []))
        message = Message("assistant", [_issued(part, exchange_id, at) for at, part in enumerate(parts)])
        self.exchanges[exchange_id] = Exchange(prompt, sampled, copy.deepcopy(message))
        if prompt.plan.mark is not None:
            got = len(sampled) if delivered is None else delivered
            seq = len(self.exchanges)
            known = RecordedTurn(
                exchange_id, seq, prompt.plan.mark, digest_turn(parts), len(prompt.ids), len(sampled), got
            )
            self.history.add(known)
        return message

    def sample(self, written: str) -> list[int]:
        """Ids of it, many of them not those that the tokenizer would give."""
        return self._encoder.encode(written, len(self.exchanges))

    # The oracle

    def check(self, prompt: Prompt, *, literal: bool = True) -> None:
        """For mode `auto`. Not `literal`: turns that no template would have written, such as those that were cut."""
        request, plan = prompt.request, prompt.plan
        assert _context(prompt.claim) == _context(request.messages)
        if literal:
            assert _plain(self.decode(prompt.ids)) == _plain(self.whole(request, prompt.claim))
        else:
            new = self.decode(prompt.ids[self._recorded(plan) :])
            assert self.whole(request).endswith(new)
        assert prompt.ids[prompt.own :] == self._anew(prompt.ids[prompt.own :])
        if plan.base is not None:
            before = self.exchanges[plan.base.turn.exchange_id]
            recorded = [*before.prompt.ids, *before.sampled][: self._recorded(plan)]
            assert prompt.ids[: len(recorded)] == recorded
        turns = _turns(request.messages)
        for said, sent in zip(_turns(prompt.claim), turns, strict=True):
            assert digest_turn(said.parts) == digest_turn(sent.parts) or not literal
        assert (plan.reason is None) == (not turns or self.continues(prompt))

    def continues(self, prompt: Prompt) -> bool:
        """Whether it goes on from the request's last turn."""
        base = prompt.plan.base
        if base is None or base.sampled_tokens is None:
            return False
        return len(_turns(self.exchanges[base.turn.exchange_id].prompt.claim)) == len(_turns(prompt.claim)) - 1

    def _anew(self, tokens: Sequence[int]) -> list[int]:
        """The same text encoded once more, control tokens apart."""
        encoder, control = self.model.encoder, set(self.model.encoder.control_tokens.values())
        anew: list[int] = []
        for is_control, run in groupby(tokens, control.__contains__):
            kept = list(run)
            plain = encoder.guard(self.decode(kept))
            anew += kept if is_control else encoder.encode(plain, first=False).tolist()
        return anew

    def _recorded(self, plan: PromptPlan) -> int:
        if plan.base is None:
            return 0
        known = plan.base.turn
        return (
            known.prompt_tokens - plan.base.dropped_tokens
            if plan.base.sampled_tokens is None
            else known.prompt_tokens + plan.base.sampled_tokens
        )


def user(text: str) -> Message:
    return Message("user", [Text(text)])


def system(text: str) -> Message:
    return Message("system", [Text(text)])


def results(turn: Message, text: str = "done") -> list[Message]:
    """One for each call of the turn."""
    calls = [part for part in turn.parts if isinstance(part, ToolCall)]
    return [
        Message("tool", [ToolResult(call.id, [Text(f"{text} {number}")], name=call.name)])
        for number, call in enumerate(calls)
    ]


def _turns(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.role == "assistant"]


def _unanswered(messages: Sequence[Message]) -> Sequence[Message]:
    """Those behind the last turn."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return messages[turns[-1] + 1 :] if turns else messages


def _context(messages: Sequence[Message]) -> list[Message]:
    """Without the ids that say which call a result belongs to, which harnesses may change, without white space at the
    edges, which templates may trim, and without empty messages, of which nothing is left where messages are joined."""
    context = copy.deepcopy([message for message in messages if message.role != "assistant"])
    for message in context:
        for part in message.parts:
            if isinstance(part, ToolResult):
                part.call_id = ""
            elif isinstance(part, Text):
                part.text = part.text.strip()
    return [message for message in context if message.parts != [Text("")]]


def _plain(text: str) -> str:
    """Without empty think blocks: where the generation prompt had one, it stays, whatever the template shows later."""
    return _NO_THOUGHT.sub("", text)


def _issued(part: Part, exchange_id: str, number: int) -> Part:
    """With the ids that the gateway gives."""
    match part:
        case ToolCall():
            return ToolCall(ids.make_call_id(exchange_id, number), part.name, part.arguments)
        case Reasoning():
            return Reasoning(part.text, ids.make_seal(exchange_id, number))
        case _:
            return part
