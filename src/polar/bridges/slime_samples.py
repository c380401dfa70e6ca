"""Sessions as slime's and Miles' `Sample`s: what the exporter writes, in the places that the trainer gave."""

import copy
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from polar.bridges.checks import require_experts
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.export.slime import SlimeExporter


def build_samples(args: Any, templates: Sequence[Any], items: Sequence[SessionItem]) -> list[list[Any]]:
    """By session; `given` are the trainer's samples, one for each session that was asked for. Where there are fewer
    sessions than that, samples that train nothing stand in: trainers count rollouts."""
    made = [_build_session_samples(args, place, item) for place, item in zip(templates, items, strict=False)]
    shortest = min((one for session in made for one in session), key=lambda one: len(one.tokens))
    mean = fmean(session[0].metadata["reward"] for session in made)  # what is logged of the group stays as it is
    for place in templates[len(items) :]:
        absent = _copy_without_loss(shortest)
        absent.index = absent.rollout_id = place.index
        absent.reward = _format_reward(args, mean)
        absent.status = type(absent).Status("failed")
        absent.metadata = {**(place.metadata or {}), "session_id": f"absent-{place.index}", "reward": mean}
        made.append([absent])
    return made


def _build_session_samples(args: Any, template: Any, item: SessionItem) -> list[Any]:
    made = [_build_sample(args, template, row) for row in SlimeExporter().lines(item)]
    if getattr(args, "use_rollout_routing_replay", False):
        for sample, trace in zip(made, item.trajectory.traces, strict=True):
            sample.rollout_routed_experts = require_experts(trace).astype(np.int32)
    return made


def pad_to_ranks(args: Any, groups: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """Trainers that don't know of rollouts cut off what does not divide among their ranks: rows that train nothing are
    added so that nothing is."""
    rows = [sample for group in groups for session in group for sample in session]
    if divides_by_rollout(rows[0]):
        return groups
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
    shortest = min(rows, key=lambda one: len(one.tokens))
    groups[-1][-1] += [_copy_without_loss(shortest) for _ in range(-len(rows) % ranks)]
    return groups


def divides_by_rollout(sample: Any) -> bool:
    """Whether the trainer divides by the mask sum of whole rollouts: then samples have a field that says of which."""
    return "rollout_id" in type(sample).__dataclass_fields__


def get_session_id(sample: Any) -> str:
    return str(sample.metadata["session_id"])


def compute_session_shares(args: Any, samples: Sequence[Any]) -> list[float]:
    """What makes a session count once where the trainer takes the mean over samples: a sample's part of its session's
    tokens, times samples a session. 1 where the trainer does it by itself, or counts tokens."""
    if divides_by_rollout(samples[0]) or args.calculate_per_token_loss:
        return [1.0] * len(samples)
    totals: dict[str, int] = {}
    for sample in samples:
        totals[get_session_id(sample)] = totals.get(get_session_id(sample), 0) + _count_trained_tokens(sample)
    if len(totals) == len(samples):
        return [1.0] * len(samples)
    if not getattr(args, "use_dynamic_global_batch_size", False):
        raise ConfigError(
            "Sessions have several samples, and this trainer would cut some of them off: set "
            "--use-dynamic-global-batch-size."
        )
    many = len(samples) / len(totals)
    return [many * _count_trained_tokens(sample) / max(totals[get_session_id(sample)], 1) for sample in samples]


def _count_trained_tokens(sample: Any) -> int:
    return 0 if sample.remove_sample else sum(sample.loss_mask)


def _build_sample(args: Any, template: Any, row: dict[str, Any]) -> Any:
    kind = type(template)
    index = row["rollout_id"] if template.index is None else template.index
    fields = {
        **row,
        "group_index": template.group_index,
        "index": index,
        "rollout_id": index,
        "prompt": template.prompt,
        "label": template.label,
        "reward": _format_reward(args, row["reward"]),
        "metadata": {**(template.metadata or {}), **row["metadata"]},
    }
    if str(kind.__dataclass_fields__["weight_versions"].type).removeprefix("typing.") not in ("list[str]", "List[str]"):
        del fields["weight_versions"]  # they are of another kind there; those of each token are in the metadata
    return kind.from_dict(fields)


def _format_reward(args: Any, value: float) -> float | dict[str, float]:
    return {args.reward_key: value} if args.reward_key else value


def _copy_without_loss(sample: Any) -> Any:
    absent = copy.copy(sample)
    absent.loss_mask = [0] * sample.response_length
    absent.remove_sample = True
    return absent
