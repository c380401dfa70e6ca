"""Token ids and labels for supervised fine-tuning: a line for each trace, `labels` -100 wherever the model itself did
not speak.

Without a tokenizer the tokens are the recorded ones, for a student with the teacher's own tokenizer. With one
(`--tokenizer DIR`), the session is rendered anew in that model's template: `rendered` says so. Either way each of the
model's turns is learnt once, after exactly what it would see; a conversation that forks, or whose earlier thinking the
template drops, is several traces.

Only accepted sessions: a reward above 0, or what `--min-reward` asks for.

Who divides: the trainer, by all tokens that train; `metadata.weight` is a trace's share of its session.

What is lost: log-probabilities, which imitation has no use for. Rendered: calls with pictures, and those that the
template can't show; replies that were cut off are context only.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
import numpy as np

from polar.engines.tools import flatten_parts, flatten_request
from polar.export.base import ExportNeed, SessionItem, SessionLines, trace_token_ids
from polar.export.messages import ConversationCall, index_conversation_calls
from polar.plugins import load
from polar.records.exchange import TokenIds
from polar.records.spans import ExcludedSpan
from polar.records.trajectory import SessionPaths, TokenPath, Trace, Trajectory
from polar.rendering.continuation import RecordedTurn, TurnHistory
from polar.rendering.model_codec import ModelCodec
from polar.rendering.template import TemplateError
from polar.rendering.turn_digest import digest_turn
from polar.types import Media, Part, Request, ToolCall, ToolResult

IGNORE_INDEX = -100
_NO_TOKENS_REASON = "session without recorded tokens (--tokenizer renders it)"
_CUT_OFF_REASONS = frozenset(("length", "abort", "content_filter"))
"""Replies that did not end by themselves: their turns have no end to learn."""


class SftTokensExporter(SessionLines):
    name: ClassVar[str] = "sft-tokens"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("messages", "accepted"))
    option_names: ClassVar[frozenset[str]] = frozenset(("tokenizer",))

    def __init__(self, tokenizer: str | None = None) -> None:
        super().__init__()
        self._model = None if tokenizer is None else ModelCodec.load(tokenizer)
        self.tokens = 0  # that train

    def build_lines(self, item: SessionItem) -> Iterable[dict[str, Any]]:
        trajectory = item.trajectory if self._model is None else self._render(item, self._model)
        if not trajectory.traces:
            self.left_out[_NO_TOKENS_REASON if self._model is None else "session without an answered call"] += 1
        for index, trace in enumerate(trajectory.traces):
            self.tokens += int(trace.loss_mask.sum())
            yield {
                "input_ids": trace_token_ids(trace).tolist(),
                "labels": make_labels(trace),
                "rendered": self._model is not None,
                "metadata": {
                    "session_id": item.session.session_id,
                    "task_id": item.group_id,
                    "reward": item.session_paths.reward,
                    "suspicious": item.session.suspicious,
                    "trace": index,
                    "traces": len(trajectory.traces),
                    "weight": trace.weight,
                    "role": trace.role,
                    "agent_id": trace.agent_id,
                    "exchange_ids": trace.exchange_ids,
                },
            }

    def _render(self, item: SessionItem, model: ModelCodec) -> Trajectory:
        build = load("builders", item.trajectory.builder)
        trajectory: Trajectory = build(replay_session(item, model, self.left_out))
        self.left_out += Counter()  # what is 0 is nothing that was left out
        return trajectory


def make_labels(trace: Trace) -> list[int]:
    own = np.where(trace.loss_mask == 1, trace.response_ids, IGNORE_INDEX)
    return [IGNORE_INDEX] * len(trace.prompt_ids) + [int(label) for label in own]


# A session as another model would have held it: the same words, in that model's template and tokens. Each call becomes
# a prompt and a turn, made as the gateway makes them: a prompt goes on from the ids of the turn before it where the
# template lets it, and the turn is what the template writes behind that prompt, up to its end token. So the same
# builders serve, and each turn trains once, after exactly what the student would see. Nobody sampled these tokens: they
# have no log-probabilities.


def replay_session(item: SessionItem, model: ModelCodec, left_out: Counter[str]) -> SessionPaths:
    """The calls that go out, as this model's; `left_out` counts those that can't be."""
    replay = _SessionReplay(model)
    paths = []
    for one in sorted(index_conversation_calls(item).values(), key=lambda one: one.exchange.seq):
        if one.role not in item.roles or one.exchange.status != "complete" or one.exchange.reply is None:
            continue
        if (why := _explain_unrenderable(one.call.request)) is not None:
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
        self._contexts: dict[str, TokenIds] = {}  # prompt and turn, by exchange

    def make_path(self, one: ConversationCall) -> TokenPath | None:
        model, exchange = self._model, one.exchange
        request = flatten_request(one.call.request)
        assert exchange.reply is not None
        parts = [_drop_written_id(part) for part in flatten_parts(exchange.reply.parts)]
        plan = model.plan_prompt(request, self._history, lambda *_: None)
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


def _drop_written_id(part: Part) -> Part:
    """Without the name that the teacher wrote for a call: each family has its own."""
    return msgspec.structs.replace(part, written=None) if isinstance(part, ToolCall) else part


def _explain_unrenderable(request: Request) -> str | None:
    if request.prompt is not None:
        return "call of the completions API"
    shown = [
        piece
        for message in request.messages
        for part in message.parts
        for piece in (part.parts if isinstance(part, ToolResult) else [part])
    ]
    return "call with a picture" if any(isinstance(piece, Media) for piece in shown) else None
