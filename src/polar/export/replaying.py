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

from polar.engines.tools import flatten, flatten_parts
from polar.export.base import Item
from polar.export.messages import Said, said_of
from polar.rendering.continuation import History, Known
from polar.rendering.model import Model
from polar.rendering.saying import saying
from polar.rendering.template import TemplateError
from polar.trajectory.types import Excluded, Ids, Path, Sampled
from polar.types import Media, Part, Request, ToolCall, ToolResult

_CUT = frozenset(("length", "abort", "content_filter"))
"""Replies that did not end by themselves: their turns have no end to learn."""


def replayed(item: Item, model: Model, left_out: Counter[str]) -> Sampled:
    """The calls that go out, as this model's; `left_out` counts those that can't be."""
    replay = _Replay(model)
    paths = []
    for one in sorted(said_of(item).values(), key=lambda one: one.exchange.seq):
        if one.role not in item.roles or one.exchange.status != "complete" or one.exchange.reply is None:
            continue
        if (why := _unrenderable(one.call.request)) is not None:
            left_out[why] += 1
            continue
        try:
            path = replay.path(one)
        except TemplateError:
            left_out["call that the template refuses"] += 1
            continue
        if path is None:
            left_out["call whose reply the template does not write behind its prompt"] += 1
            continue
        left_out["reply that was cut off"] += not path.trainable
        paths.append(path)
    return Sampled(item.session.session_id, paths, item.sampled.reward, item.sampled.reason)


class _Replay:
    """The calls of a session, one after the other."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._history = History()
        self._contexts: dict[str, Ids] = {}  # prompt and turn, by exchange

    def path(self, one: Said) -> Path | None:
        model, exchange = self._model, one.exchange
        request = flatten(one.call.request)
        assert exchange.reply is not None
        parts = [_own(part) for part in flatten_parts(exchange.reply.parts)]
        plan = model.plan(request, self._history, lambda *_: None)
        turn = model.turn(request, parts, self._history)
        if turn is None:
            return None
        prompt = model.encoder.encode(plan.text, first=plan.base is None)
        if plan.base is not None:
            prompt = plan.base.extended(self._contexts[plan.base.known.exchange_id], prompt)
        self._contexts[exchange.exchange_id] = np.concatenate([prompt, turn])
        if plan.mark is None:
            self._history.unmarked.add(exchange.exchange_id)
        else:
            counts = len(prompt), len(turn), len(turn)
            known = Known(exchange.exchange_id, exchange.seq, plan.mark, saying(parts), *counts)
            self._history.add(known, parts)
        cut = exchange.finish_reason in _CUT
        return Path(
            session_id=exchange.session_id,
            exchange_id=exchange.exchange_id,
            seq=exchange.seq,
            prompt=prompt,
            sampled=turn,
            logprobs=None,
            versions=None,
            trainable=0 if cut else len(turn),
            excluded=[Excluded(exchange.exchange_id, 0, len(turn), "cut_off")] if cut else [],
            role=one.role,
            agent_id=one.agent_id,
            branch_reason=plan.reason,
            finish_reason=exchange.finish_reason,
        )


def _own(part: Part) -> Part:
    """Without the name that the teacher wrote for a call: each family has its own."""
    return msgspec.structs.replace(part, written=None) if isinstance(part, ToolCall) else part


def _unrenderable(request: Request) -> str | None:
    if request.prompt is not None:
        return "call of the completions API"
    shown = [
        piece
        for message in request.messages
        for part in message.parts
        for piece in (part.parts if isinstance(part, ToolResult) else [part])
    ]
    return "call with a picture" if any(isinstance(piece, Media) for piece in shown) else None
