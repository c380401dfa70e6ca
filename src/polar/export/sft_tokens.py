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

import numpy as np

from polar.export.base import ExportNeed, SessionItem, SessionLines, trace_token_ids
from polar.export.replay import replay_session
from polar.plugins import load
from polar.records.trajectory import Trace, Trajectory
from polar.rendering.model_codec import ModelCodec

IGNORE_INDEX = -100
_NO_TOKENS_REASON = "session without recorded tokens (--tokenizer renders it)"


class SftTokensExporter(SessionLines):
    name: ClassVar[str] = "sft-tokens"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("messages", "accepted"))
    option_names: ClassVar[frozenset[str]] = frozenset(("tokenizer",))

    def __init__(self, tokenizer: str | None = None) -> None:
        super().__init__()
        self._model = None if tokenizer is None else ModelCodec.load(tokenizer)
        self.tokens = 0  # that train

    def lines(self, item: SessionItem) -> Iterable[dict[str, Any]]:
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
