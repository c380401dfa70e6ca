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
"""Of each row, what it is a trace of, and what that is a sample of. An empty row has -1."""


_REQUIRED_SETTINGS = {
    "grpo.adv_estimator.name": "grpo",
    "grpo.use_dynamic_sampling": False,
    "loss_fn.sequence_level_importance_ratios": False,
}


class NothingToTrainError(PolarError):
    """No session of a step can be trained on."""


class RolloutResult(Struct):
    """What NeMo RL reads of a rollout."""

    input_ids: Any
    final_batch: Any
    rollout_metrics: dict[str, Any]


class NemoRl(TrainerBridge):
    """One for each training run."""

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
        """By NeMo RL's own configuration. Raises ConfigError for what would depend on how sessions are split."""
        for path, allowed in _REQUIRED_SETTINGS.items():
            found = _get_setting(config, path)
            if found not in (None, allowed):
                raise ConfigError(
                    f"{path} is {found!r}, which goes by rows and not by sessions: set it to {allowed!r}."
                )
        rows = _get_setting(config, "policy.train_global_batch_size")
        return cls(bridge, rows=rows, step=step, token_level=bool(_get_setting(config, "loss_fn.token_level_loss")))

    def attach(self, policy_generation: Any) -> None:
        """Its engines are Polar's from now on."""
        self.bridge.run(self.engines.attach(policy_generation.dp_openai_server_base_urls, self.version))

    def wrap_refit(self, refit: Callable[P, T]) -> Callable[P, T]:
        """Generation stands still while the weights change, and Polar learns that they did."""

        @wraps(refit)
        def refitted(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.bridge.updating(self.version + 1):
                done = refit(*args, **kwargs)
            self.version += 1
            return done

        return refitted

    def wrap_validate(self, validate: Callable[P, T]) -> Callable[P, T]:
        """Groups that run within have names of their own: training never gets a session of the validation, even where
        both have the same tasks."""

        @wraps(validate)
        def validated(*args: P.args, **kwargs: P.kwargs) -> T:
            self._is_validating = True
            try:
                return validate(*args, **kwargs)
            finally:
                self._is_validating = False

        return validated

    def rollout(
        self, *, input_batch: Mapping[str, Any], tokenizer: Any, generation_config: Mapping[str, Any], **_: Any
    ) -> RolloutResult:
        """In place of NeMo RL's rollouts with the Gym. Raises NothingToTrainError, ConfigError and ClientError."""
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        groups = self.run_groups(input_batch["extra_env_info"], generation_config)
        fields = self.build_batch(groups)
        prompts = [log[0]["token_ids"] for log in fields["message_log"]]
        return RolloutResult(
            pad_sequences(prompts, tokenizer.pad_token_id), BatchedDataDict(fields), compute_metrics(groups)
        )

    def run_groups(self, rows: Sequence[Row], generation: Mapping[str, Any]) -> list[SessionGroup]:
        """One for each task that the rows name, of as many sessions as there are rows of it. Raises ConfigError where
        they were sampled at another temperature than NeMo RL trains at."""
        names = {
            "temperature": generation.get("temperature"),
            "top_p": generation.get("top_p"),
            "max_output_tokens": generation.get("max_new_tokens"),
        }
        sampling = build_sampling_overrides(names)
        wanted = Counter(get_task_id(row) for row in rows)
        step = self._step_key(wanted)
        asked = (
            self.rollouts.run_group(task, self._keys.next_key(step, task), samples=count, sampling=sampling)
            for task, count in wanted.items()
        )
        groups = self.bridge.run(gather_or_cancel(asked))
        if sampling.temperature is not None and not self._is_validating:
            check_temperature((item for group in groups for item in group.items), sampling.temperature)
        return groups

    def _step_key(self, wanted: Mapping[str, int]) -> str:
        """A run that resumes from a checkpoint may leave out a validation that came first: so its tasks are counted by
        themselves."""
        digest = hashlib.sha256(json.dumps(sorted(wanted.items())).encode()).hexdigest()[:8]
        return f"{self.version}.validation-{digest}" if self._is_validating else f"{self.version}.{digest}"

    def build_batch(self, groups: Sequence[SessionGroup]) -> dict[str, Any]:
        """As `build_batch`, of `rows` rows."""
        runs = [
            build_verify_response(*pair) for group in groups for pair in zip(group.items, group.results, strict=True)
        ]
        if not runs:
            why = sum((group.left_out for group in groups), Counter[str]())
            raise NothingToTrainError(
                f"None of {why.total()} sessions can be trained on: {dict(why)}. See `polar status`."
            )
        return build_batch(runs, rows=self._rows, token_level=self._token_level)

    def wrap_advantage_estimator(self, estimator: Callable[P, Any]) -> Callable[P, "SessionAdvantageEstimator"]:
        """NeMo RL's class of GRPO's advantages, over sessions instead of rows."""

        @wraps(estimator)
        def made(*args: P.args, **kwargs: P.kwargs) -> SessionAdvantageEstimator:
            return SessionAdvantageEstimator(estimator(*args, **kwargs))

        return made


class SessionAdvantageEstimator:
    """GRPO's advantages, once for each session, and the same for all its rows. NeMo RL would compare rows by their
    prompts, which differ between the traces of one session."""

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def compute_advantage(
        self, prompt_ids: Any, rewards: Any, mask: Any, repeated_batch: Mapping[str, Any], **_: Any
    ) -> Any:
        """Raises ConfigError where the loop does not hand on what `build_batch` made."""
        import torch

        if SESSION_FIELD not in repeated_batch:
            raise ConfigError(f"This loop hands its advantages no {SESSION_FIELD}: use NeMo RL's `grpo_train`.")
        sessions, groups = repeated_batch[SESSION_FIELD].tolist(), repeated_batch[GROUP_FIELD]
        first = {session: row for row, session in reversed(list(enumerate(sessions))) if session >= 0}
        order = {session: place for place, session in enumerate(first)}
        chosen = torch.tensor(list(first.values()))
        names = groups[chosen].reshape(-1, *[1] * (prompt_ids.dim() - 1))
        alone = self._estimator.compute_advantage(prompt_ids=names, rewards=rewards[chosen], mask=mask[chosen, :1])
        each = torch.cat([alone[:, 0], alone.new_zeros(1)])  # the last is of empty rows
        return each[torch.tensor([order.get(session, -1) for session in sessions])].unsqueeze(-1).expand(mask.shape)


def build_batch(runs: Sequence[Row], *, rows: int, token_level: bool = True) -> dict[str, Any]:
    """NeMo RL's fields of a rollout batch, with a row for each trace, from verify responses of sessions. Raises
    ConfigError where there are more traces than rows."""
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
    """Of one verify response: what is new in each prompt, and what was sampled behind it."""
    import torch

    log: list[dict[str, Any]] = []
    seen = 0
    for item in row["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
        logprobs = torch.tensor(item["generation_log_probs"], dtype=torch.float32)
        log.append({"role": "user", "content": "", "token_ids": torch.tensor(prompt[seen:], dtype=torch.long)})
        spoken = {"role": "assistant", "content": "", "token_ids": torch.tensor(sampled)}
        log.append(spoken | {"generation_logprobs": logprobs})
        seen = len(prompt) + len(sampled)
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
    """Of different lengths, as one tensor."""
    import torch

    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def _get_setting(config: Any, path: str) -> Any:
    """Of tables or objects, whichever NeMo RL's version has."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def _make_empty_message_log() -> list[dict[str, Any]]:
    import torch

    token = torch.tensor([0])
    sampled = {"role": "assistant", "content": "", "token_ids": token, "generation_logprobs": torch.tensor([0.0])}
    return [{"role": "user", "content": "", "token_ids": token}, sampled]
