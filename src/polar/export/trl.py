"""TRL: a line is one completion of what a `rollout_func` returns; `rollout` puts lines together.

Who divides: the trainer, as `loss_type` says; by default it divides by all tokens that train, so tokens count and not
rows. `weight` comes along, but no loss of TRL's reads it. Rewards come from the trainer's reward functions, which get
every further key as an argument: `reward_func(completions, reward, **kwargs)` returns the recorded ones.

What is lost: nothing that trains. A completion counts as cut off unless its last token is the tokenizer's end token, so
leave `mask_truncated_completions` off. All rows have log-probabilities or none has: TRL takes them for all.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from polar.export.base import Item, Need, TraceLines, facts, logprobs
from polar.trajectory.types import Trace


class Trl(TraceLines):
    name: ClassVar[str] = "trl"
    needs: ClassVar[frozenset[Need]] = frozenset(("traces",))

    def row(self, item: Item, index: int, trace: Trace) -> dict[str, Any]:
        return {
            "prompt_ids": trace.prompt_ids.tolist(),
            "completion_ids": trace.response_ids.tolist(),
            "logprobs": logprobs(trace),
            "env_mask": trace.loss_mask.tolist(),
            **facts(item, index, trace),
        }


def rollout(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a `rollout_func` returns: a dict of lists. Log-probabilities are None, for all, where one row has none."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    if any(values is None for values in columns["logprobs"]):
        columns["logprobs"] = None
    return columns
