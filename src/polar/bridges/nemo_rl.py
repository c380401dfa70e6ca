"""NeMo RL: sessions of Polar as its batches, all traces of each; by the contract of its sources, which no package has.

Two ways. Without this module, NeMo RL's own loop asks the agent server of `polar.bridges.nemo_gym`, and takes one
trace of each session. With it, a launch script has these lines before NeMo RL's own, and every trace trains:

    from nemo_rl.algorithms import grpo
    from polar.bridges.bridge import BlockingBridge
    from polar.bridges.nemo_rl import NemoRl

    bridge = BlockingBridge("polar.toml")
    polar = NemoRl.from_config(bridge, master_config, step=grpo_state["total_steps"])
    grpo.run_nemo_gym_rollout_sync = polar.rollout  # run_async_nemo_gym_rollout, where that is not a generator yet
    grpo.refit_policy_generation = polar.wrap_refit(grpo.refit_policy_generation)
    grpo.validate = polar.wrap_validate(grpo.validate)
    grpo.GRPOAdvantageEstimator = polar.wrap_advantage_estimator(grpo.GRPOAdvantageEstimator)

A row's `extra_env_info` is that of NeMo Gym, with a `task_id`. All rows of one task are one group.

Who divides: NeMo RL. With `loss_fn.token_level_loss: true` tokens count, not rows, and splitting a session changes
nothing: every row has `loss_multiplier` 1. Without it rows count, each with its mean over tokens: then a row's
`loss_multiplier` is its `weight`, and a session is one row's worth however it was split. `NemoRl.from_config` reads
which, and refuses what goes by rows in other ways: ratios over sequences, dynamic sampling, advantages other than
GRPO's.

NeMo RL makes one optimizer step of `train_global_batch_size` rows: so there are always that many, the last of them
empty and without loss. Set it to more than sessions give traces.

Engines are not probed: NeMo RL's HTTP server takes no token ids. Its metric `token_mult_prob_error` tells the same.

What is left out: policy versions, which NeMo RL has no field for. Sessions without a reward are missing in their group,
and counted in the metrics.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from msgspec import Struct

from polar.bridges.bridge import BlockingBridge, TrainerBridge
from polar.bridges.nemo_gym import Row, build_sampling_overrides, build_verify_response, get_task_id, split_traces
from polar.bridges.rollouts import GroupKeys, SessionGroup, check_temperature, gather_or_cancel
from polar.errors import ConfigError, PolarError

P = ParamSpec("P")
T = TypeVar("T")

SESSION_FIELD, GROUP_FIELD = "polar_session", "polar_group"
"""The row's session index, and the group index of that session. An empty row has -1."""


_REQUIRED_SETTINGS = {
    "grpo.adv_estimator.name": "grpo",
    "grpo.use_dynamic_sampling": False,
    "loss_fn.sequence_level_importance_ratios": False,
}


class NothingToTrainError(PolarError):
    """No session of a step can be trained on."""


class RolloutResult(Struct):
    """The fields that NeMo RL reads from a rollout."""

    input_ids: Any
    final_batch: Any
    rollout_metrics: dict[str, Any]


class NemoRl(TrainerBridge):
    """The bridge of one NeMo RL training run."""

    def __init__(self, bridge: BlockingBridge, *, rows: int, step: int = 0, token_level: bool = True) -> None:
        """`rows` is `train_global_batch_size`, `step` where training starts: a run that resumes from a checkpoint gets
        the sessions that had run when it broke off."""
        super().__init__(bridge)
        self.version = step
        self._rows = rows
        self._token_level = token_level
        self._is_validating = False
        self._keys = GroupKeys()

    @classmethod
    def from_config(cls, bridge: BlockingBridge, config: Any, *, step: int = 0) -> "NemoRl":
        """Creates the bridge from NeMo RL's configuration. Raises ConfigError for settings under which the gradient
        would depend on how sessions are split."""
        for path, required in _REQUIRED_SETTINGS.items():
            configured = _get_setting(config, path)
            if configured not in (None, required):
                raise ConfigError(
                    f"{path} is {configured!r}, which goes by rows and not by sessions: set it to {required!r}."
                )
        rows = _get_setting(config, "policy.train_global_batch_size")
        return cls(bridge, rows=rows, step=step, token_level=bool(_get_setting(config, "loss_fn.token_level_loss")))

    def attach(self, policy_generation: Any) -> None:
        """Attaches the policy's engines to Polar."""
        self.bridge.run(self.engines.attach(policy_generation.dp_openai_server_base_urls, self.version))

    def wrap_refit(self, refit: Callable[P, T]) -> Callable[P, T]:
        """Wraps the weight update: generation is paused meanwhile, and Polar gets the new version."""

        @wraps(refit)
        def refit_while_paused(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.bridge.updating(self.version + 1):
                result = refit(*args, **kwargs)
            self.version += 1
            return result

        return refit_while_paused

    def wrap_validate(self, validate: Callable[P, T]) -> Callable[P, T]:
        """Wraps validation so that its groups have separate keys. Training never gets a validation session, even for
        the same task."""

        @wraps(validate)
        def validate_separately(*args: P.args, **kwargs: P.kwargs) -> T:
            self._is_validating = True
            try:
                return validate(*args, **kwargs)
            finally:
                self._is_validating = False

        return validate_separately

    def rollout(
        self, *, input_batch: Mapping[str, Any], tokenizer: Any, generation_config: Mapping[str, Any], **_: Any
    ) -> RolloutResult:
        """Replaces NeMo RL's Gym rollout. Raises NothingToTrainError, ConfigError and ClientError."""
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        groups = self.run_groups(input_batch["extra_env_info"], generation_config)
        fields = self.build_batch(groups)
        prompts = [log[0]["token_ids"] for log in fields["message_log"]]
        return RolloutResult(
            pad_sequences(prompts, tokenizer.pad_token_id), BatchedDataDict(fields), compute_metrics(groups)
        )

    def run_groups(self, rows: Sequence[Row], generation: Mapping[str, Any]) -> list[SessionGroup]:
        """Runs a group for each task of the rows, with as many sessions as the task has rows. Raises ConfigError if
        they were sampled at another temperature than NeMo RL trains at."""
        sampling_params = {
            "temperature": generation.get("temperature"),
            "top_p": generation.get("top_p"),
            "max_output_tokens": generation.get("max_new_tokens"),
        }
        sampling = build_sampling_overrides(sampling_params)
        task_counts = Counter(get_task_id(row) for row in rows)
        step = self._make_step_key(task_counts)
        group_runs = (
            self.rollouts.run_group(task, self._keys.make_key(step, task), samples=count, sampling=sampling)
            for task, count in task_counts.items()
        )
        groups = self.bridge.run(gather_or_cancel(group_runs))
        if sampling.temperature is not None and not self._is_validating:
            check_temperature((item for group in groups for item in group.items), sampling.temperature)
        return groups

    def _make_step_key(self, task_counts: Mapping[str, int]) -> str:
        """The key of a step and its tasks. Validations have separate keys, since a resumed run may skip one."""
        digest = hashlib.sha256(json.dumps(sorted(task_counts.items())).encode()).hexdigest()[:8]
        return f"{self.version}.validation-{digest}" if self._is_validating else f"{self.version}.{digest}"

    def build_batch(self, groups: Sequence[SessionGroup]) -> dict[str, Any]:
        """Builds a batch with the configured number of rows."""
        runs = [
            build_verify_response(*item_and_result)
            for group in groups
            for item_and_result in zip(group.items, group.results, strict=True)
        ]
        if not runs:
            left_out = sum((group.left_out for group in groups), Counter[str]())
            raise NothingToTrainError(
                f"None of {left_out.total()} sessions can be trained on: {dict(left_out)}. See `polar status`."
            )
        return build_batch(runs, rows=self._rows, token_level=self._token_level)

    def wrap_advantage_estimator(self, estimator: Callable[P, Any]) -> Callable[P, "SessionAdvantageEstimator"]:
        """Wraps NeMo RL's GRPO estimator class so that it works on sessions instead of rows."""

        @wraps(estimator)
        def make_estimator(*args: P.args, **kwargs: P.kwargs) -> SessionAdvantageEstimator:
            return SessionAdvantageEstimator(estimator(*args, **kwargs))

        return make_estimator


class SessionAdvantageEstimator:
    """Computes GRPO's advantages per session and gives them to all its rows. NeMo RL would group rows by their prompts,
    which differ between the traces of one session."""

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def compute_advantage(
        self, prompt_ids: Any, rewards: Any, mask: Any, repeated_batch: Mapping[str, Any], **_: Any
    ) -> Any:
        """Raises ConfigError if the loop does not pass on the fields of `build_batch`."""
        import torch

        if SESSION_FIELD not in repeated_batch:
            raise ConfigError(f"This loop hands its advantages no {SESSION_FIELD}: use NeMo RL's `grpo_train`.")
        sessions, groups = repeated_batch[SESSION_FIELD].tolist(), repeated_batch[GROUP_FIELD]
        first_rows = {session: row for row, session in reversed(list(enumerate(sessions))) if session >= 0}
        session_indices = {session: index for index, session in enumerate(first_rows)}
        selected_rows = torch.tensor(list(first_rows.values()))
        group_ids = groups[selected_rows].reshape(-1, *[1] * (prompt_ids.dim() - 1))
        selected_advantages = self._estimator.compute_advantage(
            prompt_ids=group_ids, rewards=rewards[selected_rows], mask=mask[selected_rows, :1]
        )
        session_advantages = torch.cat(
            [selected_advantages[:, 0], selected_advantages.new_zeros(1)]
        )  # the last is of empty rows
        return (
            session_advantages[torch.tensor([session_indices.get(session, -1) for session in sessions])]
            .unsqueeze(-1)
            .expand(mask.shape)
        )


def build_batch(runs: Sequence[Row], *, rows: int, token_level: bool = True) -> dict[str, Any]:
    """Builds NeMo RL's rollout batch from verify responses, with a row for each trace. Raises ConfigError if there are
    more traces than rows."""
    import torch

    traces = [(index, row) for index, run in enumerate(runs) for row in split_traces(run)]
    if len(traces) > rows:
        raise ConfigError(
            f"{len(runs)} sessions have {len(traces)} traces, which don't fit into policy.train_global_batch_size "
            f"({rows}): raise it, so that they are one optimizer step."
        )
    tasks = list(dict.fromkeys(row["polar"]["task"] for _, row in traces))
    empty = rows - len(traces)
    logs = [build_message_log(row) for _, row in traces] + [_make_empty_message_log() for _ in range(empty)]
    weights = [1.0 if token_level else row["polar"]["weight"] for _, row in traces]
    return {
        "message_log": logs,
        "length": torch.tensor([len(log[0]["token_ids"]) for log in logs]),
        "loss_multiplier": torch.tensor(weights + [0.0] * empty),
        "total_reward": torch.tensor([float(row["reward"]) for _, row in traces] + [0.0] * empty),
        "truncated": torch.tensor([row["response"]["status"] == "incomplete" for _, row in traces] + [False] * empty),
        SESSION_FIELD: torch.tensor([index for index, _ in traces] + [-1] * empty),
        GROUP_FIELD: torch.tensor([tasks.index(row["polar"]["task"]) for _, row in traces] + [-1] * empty),
    }


def build_message_log(row: Row) -> list[dict[str, Any]]:
    """The message log of a verify response: the new tokens of each prompt, and the tokens sampled after it."""
    import torch

    log: list[dict[str, Any]] = []
    covered = 0
    for item in row["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
        logprobs = torch.tensor(item["generation_log_probs"], dtype=torch.float32)
        log.append({"role": "user", "content": "", "token_ids": torch.tensor(prompt[covered:], dtype=torch.long)})
        reply = {"role": "assistant", "content": "", "token_ids": torch.tensor(sampled)}
        log.append(reply | {"generation_logprobs": logprobs})
        covered = len(prompt) + len(sampled)
    return log


def compute_metrics(groups: Sequence[SessionGroup]) -> dict[str, Any]:
    items = [item for group in groups for item in group.items]
    sampled = sum(item.trajectory.tokens.trainable for item in items)
    left_out = sum((group.left_out for group in groups), Counter[str]())
    return {
        "mean_gen_tokens_per_sample": sampled / max(len(items), 1),
        "polar/sessions": len(items),
        "polar/traces": sum(len(item.trajectory.traces) for item in items),
        **{f"polar/left_out/{reason}": count for reason, count in left_out.items()},
    }


def pad_sequences(rows: Sequence[Any], value: int) -> Any:
    """Pads rows of different lengths into one tensor."""
    import torch

    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def _get_setting(config: Any, path: str) -> Any:
    """Reads a dotted path from nested tables or objects."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def _make_empty_message_log() -> list[dict[str, Any]]:
    import torch

    token = torch.tensor([0])
    sampled = {"role": "assistant", "content": "", "token_ids": token, "generation_logprobs": torch.tensor([0.0])}
    return [{"role": "user", "content": "", "token_ids": token}, sampled]
