"""verl's data and its agent loop: a row names a task, and each of its sessions becomes a list of outputs."""

from collections.abc import Iterable, Mapping
from typing import Any

from polar.bridges.rollouts import (
    SessionGroup,
    build_sampling_overrides,
    get_logit_scales,
    get_shared_groups,
    require_experts,
)
from polar.bridges.settings import BridgeSettings, load_settings
from polar.config import SamplingOverrides
from polar.errors import ConfigError, PolarError
from polar.export.base import SessionItem
from polar.export.verl import VerlExporter
from polar.records.task import TaskRequest

AGENT_LOOP_NAME = "polar"
"""The agent loop's `name` in verl's list."""
KEY_FIELD, SAMPLES_FIELD = "polar_key", "polar_samples"
"""Fields that the trainer mode adds to a row: the group's key, and the number of sessions that verl will request."""
VALIDATION_PREFIX = "val-"
"""The prefix of keys of groups that are not trained on."""
SCALES_FIELD = "polar_scales"
"""Among a row's `extra_fields`: of which temperature its log-probabilities are, as
`polar.bridges.rollouts.check_logit_scales` has it."""


def build_rows(tasks: Iterable[TaskRequest]) -> list[dict[str, Any]]:
    """verl's data: one row a task, as its RLHFDataset reads them. Write them with pyarrow or pandas."""
    return [
        {
            "task_id": task.task_id,
            "agent_name": AGENT_LOOP_NAME,
            "data_source": AGENT_LOOP_NAME,
            "prompt": [{"role": "user", "content": task.instruction}],  # for display only
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, task in enumerate(tasks)
    ]


class AgentLoop:
    """The class that verl instantiates for each session, by its `_target_`."""

    def __init__(self, settings: str | Mapping[str, Any], trainer_config: Any, **_: Any) -> None:
        """`settings` as `polar.bridges.settings` reads them; the others are what verl gives to every agent loop."""
        self._settings = parse_loop_settings(settings)
        rollout = trainer_config.config.actor_rollout_ref.rollout
        self._wants_logprobs = bool(rollout.calculate_log_probs)
        self._wants_experts = bool(getattr(rollout, "enable_rollout_routing_replay", False))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        """Runs one session of the row's task and returns its `AgentLoopOutput`s. Empty if the session was left out."""
        if KEY_FIELD not in row or "session_id" not in row:
            raise ConfigError(
                "Polar's agent loop takes verl's V1 trainer in one of its own modes: set trainer.v1.trainer_mode to "
                "polar_sync, say, and VERL_USE_EXTERNAL_MODULES to polar.bridges.verl.trainer."
            )
        from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

        task, key, samples = str(row["task_id"]), str(row[KEY_FIELD]), int(row[SAMPLES_FIELD])
        group, _ = await get_shared_groups(self._settings).claim_session(
            task, key, samples, build_sampling(sampling_params)
        )
        check_usable(group, key)
        session_index = int(row["session_id"])  # verl numbers the sessions itself
        if session_index >= len(group.items):
            return []
        outputs = build_outputs(group.items[session_index], logprobs=self._wants_logprobs, experts=self._wants_experts)
        return [AgentLoopOutput(**fields) for fields in outputs]


def check_usable(group: SessionGroup, key: str) -> None:
    """Raises PolarError if no session of the group can be trained on, or only one, which can't be compared."""
    required_sessions = 1 if group.requested_samples == 1 or key.startswith(VALIDATION_PREFIX) else 2
    if len(group.items) < required_sessions:
        reasons = ", ".join(f"{reason} x {count}" for reason, count in group.left_out.most_common())
        amount = "A single session" if group.items else "Nothing"
        raise PolarError(f"{amount} of {group.name} can be trained on: {reasons}.")


def build_outputs(item: SessionItem, *, logprobs: bool = True, experts: bool = False) -> list[dict[str, Any]]:
    """A session as fields of `AgentLoopOutput`s, with or without the recorded log-probabilities, and the experts."""
    outputs: list[dict[str, Any]] = [*VerlExporter().build_lines(item)]
    for output, trace in zip(outputs, item.trajectory.traces, strict=True):
        output["extra_fields"][SCALES_FIELD] = get_logit_scales(trace)
        if experts:
            output["routed_experts"] = require_experts(trace)
    if not logprobs:
        return [output | {"response_logprobs": None} for output in outputs]
    if any(output["response_logprobs"] is None for output in outputs):
        raise ConfigError(
            f"Session {item.session.session_id} has no log-probabilities, and verl's rollout.calculate_log_probs asks "
            "for them: use an engine that gives them, or set that to False."
        )
    return outputs


def build_sampling(params: Mapping[str, Any]) -> SamplingOverrides:
    """The overrides from verl's sampling parameters that change probabilities."""
    return build_sampling_overrides(
        **{name: params.get(name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    )


def parse_loop_settings(configured: str | Mapping[str, Any]) -> BridgeSettings:
    """Parses the settings from verl's list of agent loops."""
    if isinstance(configured, str):
        return load_settings(configured)
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(configured, resolve=True) if OmegaConf.is_config(configured) else configured
    return load_settings(plain)
