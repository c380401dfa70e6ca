"""SkyRL: a line is a `GeneratorOutput`, one for each session, with a row for each of its traces.

Who divides: the trainer, as its loss reduction says. Rows of one session stand together and share a trajectory id, with
`is_last_step` at the last, which is what step-wise training asks for: the advantage of a session is computed once, from
its last row, and given to all of its rows. `weight` is in `env_metrics`, which no loss reads.

What is lost: nothing that trains. `to_generator_output` puts lines together; SkyRL wants log-probabilities for all rows
or for none, so where one session has none, none has.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from polar.export.base import (
    ExportNeed,
    SessionItem,
    SessionLines,
    compute_stable_number,
    list_logprobs,
    trace_metadata,
)


class SkyRlExporter(SessionLines):
    name: ClassVar[str] = "skyrl"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("traces", "reward"))

    def build_lines(self, item: SessionItem) -> list[dict[str, Any]]:
        return [build_session_output(item, item.group_id, compute_stable_number(item.session.session_id))]


def build_session_output(item: SessionItem, instance_id: str, repetition_id: int) -> dict[str, Any]:
    """A session as a `GeneratorOutput` of JSON's types; SkyRL compares sessions of the same `instance_id`."""
    traces = item.trajectory.traces
    recorded = [list_logprobs(trace) for trace in traces]
    identity = {"instance_id": instance_id, "repetition_id": repetition_id}
    return {
        "prompt_token_ids": [trace.prompt_ids.tolist() for trace in traces],
        "response_ids": [trace.response_ids.tolist() for trace in traces],
        "rewards": [trace.reward for trace in traces],
        "loss_masks": [trace.loss_mask.tolist() for trace in traces],
        "rollout_logprobs": None if None in recorded else recorded,
        "stop_reasons": [trace.finish_reason or "stop" for trace in traces],
        "trajectory_ids": [identity for _ in traces],
        "is_last_step": [False] * (len(traces) - 1) + [True],
        "rollout_metrics": None,
        "env_metrics": [trace_metadata(item, index, trace) for index, trace in enumerate(traces)],
    }


def to_generator_output(lines: Sequence[dict[str, Any]]) -> Any:
    """Lines as one checked `GeneratorOutput`."""
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.utils import concatenate_generator_outputs

    whole = all(line["rollout_logprobs"] is not None for line in lines)
    outputs = [
        line
        | {"trajectory_ids": [TrajectoryID(**name) for name in line["trajectory_ids"]]}
        | ({} if whole else {"rollout_logprobs": None})
        for line in lines
    ]
    return concatenate_generator_outputs(outputs, step_wise=True)
