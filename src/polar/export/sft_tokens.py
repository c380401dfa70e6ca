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

from polar.export.base import Item, Need, SessionLines, tokens
from polar.export.replaying import replayed
from polar.plugins import load
from polar.rendering.model import Model
from polar.trajectory.types import Trace, Trajectory

UNTRAINED = -100
_NO_TOKENS = "session without recorded tokens (--tokenizer renders it)"


class SftTokens(SessionLines):
    name: ClassVar[str] = "sft-tokens"
    needs: ClassVar[frozenset[Need]] = frozenset(("messages", "accepted"))
    takes: ClassVar[frozenset[str]] = frozenset(("tokenizer",))

    def __init__(self, tokenizer: str | None = None) -> None:
        super().__init__()
        self._model = None if tokenizer is None else Model.load(tokenizer)
        self.tokens = 0  # that train

    def lines(self, item: Item) -> Iterable[dict[str, Any]]:
        trajectory = item.trajectory if self._model is None else self._rendered(item, self._model)
        if not trajectory.traces:
            self.left_out[_NO_TOKENS if self._model is None else "session without an answered call"] += 1
        for index, trace in enumerate(trajectory.traces):
            self.tokens += int(trace.loss_mask.sum())
            yield {
                "input_ids": tokens(trace).tolist(),
                "labels": labels(trace),
                "rendered": self._model is not None,
                "metadata": {
                    "session_id": item.session.session_id,
                    "task_id": item.group,
                    "reward": item.sampled.reward,
                    "suspicious": item.session.suspicious,
                    "trace": index,
                    "traces": len(trajectory.traces),
                    "weight": trace.weight,
                    "role": trace.role,
                    "agent_id": trace.agent_id,
                    "exchange_ids": trace.exchange_ids,
                },
            }

    def _rendered(self, item: Item, model: Model) -> Trajectory:
        build = load("builders", item.trajectory.builder)
        trajectory: Trajectory = build(replayed(item, model, self.left_out))
        self.left_out += Counter()  # what is 0 is nothing that was left out
        return trajectory


def labels(trace: Trace) -> list[int]:
    own = np.where(trace.loss_mask == 1, trace.response_ids, UNTRAINED)
    return [UNTRAINED] * len(trace.prompt_ids) + [int(label) for label in own]
