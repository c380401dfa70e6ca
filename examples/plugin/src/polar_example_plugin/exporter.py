"""`advantages`: JSON lines for policy-gradient training, with advantages over each group of samples.

input_ids     prompt and response
labels        the same where a token trains, -100 elsewhere
logprobs      of the tokens that train, 0 elsewhere; null where the engine told none
advantage     (reward - mean of the group) / standard deviation of the group
weight        of the trace: those of a session add up to 1
"""

from collections.abc import Iterable
from statistics import fmean, pstdev
from typing import Any, ClassVar

from polar.export.base import ExportNeed, JsonLines, SessionItem, list_logprobs, trace_token_ids
from polar.records.trajectory import Trace

IGNORED_LABEL = -100


class AdvantageExporter(JsonLines):
    name: ClassVar[str] = "advantages"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces", "reward", "group"))

    def __init__(self) -> None:
        super().__init__()
        self._group: list[SessionItem] = []

    def feed(self, item: SessionItem) -> bytes:
        """Sessions of one group come one after another: its rows are written when the next group begins."""
        written = b""
        if self._group and self._group[0].group_id != item.group_id:
            written = self._write_group()
        self._group.append(item)
        return written

    def finish(self) -> bytes:
        return self._write_group()

    def _write_group(self) -> bytes:
        group, self._group = self._group, []
        return self.encode_rows(make_rows(group))


def make_rows(group: list[SessionItem]) -> Iterable[dict[str, Any]]:
    rewards = [item.session.reward or 0.0 for item in group]
    mean, deviation = (fmean(rewards), pstdev(rewards)) if rewards else (0.0, 0.0)
    for item, reward in zip(group, rewards, strict=True):
        advantage = (reward - mean) / deviation if deviation else 0.0
        for trace in item.trajectory.traces:
            yield make_row(trace, reward, advantage)


def make_row(trace: Trace, reward: float, advantage: float) -> dict[str, Any]:
    prompt = len(trace.prompt_ids)
    trains = zip(trace.response_ids.tolist(), trace.loss_mask.tolist(), strict=True)
    logprobs = list_logprobs(trace)
    return {
        "input_ids": trace_token_ids(trace).tolist(),
        "labels": [IGNORED_LABEL] * prompt + [token if trained else IGNORED_LABEL for token, trained in trains],
        "logprobs": None if logprobs is None else [0.0] * prompt + logprobs,
        "reward": reward,
        "advantage": advantage,
        "weight": trace.weight,
        "session_id": trace.session_id,
    }
