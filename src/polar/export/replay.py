"""A session as another model would have held it: the same words, in that model's template and tokens.

For whoever learns from a teacher with another template. Each call becomes a prompt and a turn, made as the gateway
makes them: a prompt goes on from the ids of the turn before it where the template lets it, and the turn is what the
template writes behind that prompt, up to its end token. So the same builders serve, and each turn trains once, after
exactly what the student would see.

Nobody sampled these tokens: they have no log-probabilities, and whatever is made of them says that it was rendered.
"""

from collections import Counter

import msgspec
import numpy as np

from polar.engines.tools import flatten_parts, flatten_request
from polar.export.base import SessionItem
from polar.export.messages import ConversationCall, conversation_calls
from polar.records.spans import ExcludedSpan
from polar.records.trajectory import Ids, SessionPaths, TokenPath
from polar.rendering.continuation import RecordedTurn, TurnHistory
from polar.rendering.model_codec import ModelCodec
from polar.rendering.template import TemplateError
from polar.rendering.turn_digest import digest_turn
from polar.types import Media, Part, Request, ToolCall, ToolResult

_CUT_OFF_REASONS = frozenset(("length", "abort", "content_filter"))
"""Replies that did not end by themselves: their turns have no end to learn."""


def replay_session(item: SessionItem, model: ModelCodec, left_out: Counter[str]) -> SessionPaths:
    """The calls that go out, as this model's; `left_out` counts those that can't be."""
    replay = _SessionReplay(model)
    paths = []
    for one in sorted(conversation_calls(item).values(), key=lambda one: one.exchange.seq):
        if one.role not in item.roles or one.exchange.status != "complete" or one.exchange.reply is None:
            continue
        if (why := _unrenderable_reason(one.call.request)) is not None:
            left_out[why] += 1
            continue
        try:
            path = replay.make_path(one)
        except TemplateError:
            left_out["call that the template refuses"] += 1
            continue
        if path is None:
            left_out["call whose reply the template does not write behind its prompt"] += 1
            continue
        left_out["reply that was cut off"] += not path.num_trainable
        paths.append(path)
    return SessionPaths(item.session.session_id, paths, item.session_paths.reward, item.session_paths.reason)


class _SessionReplay:
    """The calls of a session, one after the other."""

    def __init__(self, model: ModelCodec) -> None:
        self._model = model
        self._history = TurnHistory()
        self._contexts: dict[str, Ids] = {}  # prompt and turn, by exchange

    def make_path(self, one: ConversationCall) -> TokenPath | None:
        model, exchange = self._model, one.exchange
        request = flatten_request(one.call.request)
        assert exchange.reply is not None
        parts = [_without_written_id(part) for part in flatten_parts(exchange.reply.parts)]
        plan = model.plan(request, self._history, lambda *_: None)
        turn = model.encode_turn(request, parts, self._history)
        if turn is None:
            return None
        prompt = model.encoder.encode(plan.text, first=plan.base is None)
        if plan.base is not None:
            prompt = plan.base.extend(self._contexts[plan.base.turn.exchange_id], prompt)
        self._contexts[exchange.exchange_id] = np.concatenate([prompt, turn])
        if plan.mark is None:
            self._history.unmarked.add(exchange.exchange_id)
        else:
            counts = len(prompt), len(turn), len(turn)
            known = RecordedTurn(exchange.exchange_id, exchange.seq, plan.mark, digest_turn(parts), *counts)
            self._history.add(known, parts)
        cut = exchange.finish_reason in _CUT_OFF_REASONS
        return TokenPath(
            session_id=exchange.session_id,
            exchange_id=exchange.exchange_id,
            seq=exchange.seq,
            prompt=prompt,
            sampled=turn,
            logprobs=None,
            versions=None,
            num_trainable=0 if cut else len(turn),
            excluded=[ExcludedSpan(exchange.exchange_id, 0, len(turn), "cut_off")] if cut else [],
            role=one.role,
            agent_id=one.agent_id,
            branch_reason=plan.reason,
            finish_reason=exchange.finish_reason,
        )


def _without_written_id(part: Part) -> Part:
    """Without the name that the teacher wrote for a call: each family has its own."""
    return msgspec.structs.replace(part, written=None) if isinstance(part, ToolCall) else part


def _unrenderable_reason(request: Request) -> str | None:
    if request.prompt is not None:
        return "call of the completions API"
    shown = [
        piece
        for message in request.messages
        for part in message.parts
        for piece in (part.parts if isinstance(part, ToolResult) else [part])
    ]
    return "call with a picture" if any(isinstance(piece, Media) for piece in shown) else None
