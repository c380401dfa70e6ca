"""Sessions as the rows of TRL's trainers: the rollout function, and the functions that make trainers with it."""

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from polar.bridges.bridge import BlockingBridge, TrainerBridge
from polar.bridges.rollouts import check_temperature, gather_or_cancel
from polar.bridges.settings import SettingsSource
from polar.config import EngineSettings, SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.export.trl import TrlExporter, make_filler_row, to_rollout_columns

log = logging.getLogger(__name__)

OWNER_KEY = "owner"
"""The index of the row's session among the prompts: an extra key for PolarGRPOTrainer."""


def grpo_trainer(source: SettingsSource = None, *, engine: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """A GRPOTrainer over Polar's sessions; `source` are the bridge's settings, and the rest is GRPOTrainer's. `engine`
    is the [engine] section of the service: the run's engines get the weights of each step. Without it, something else
    must give them. Raises ConfigError."""
    from polar.bridges.trl.trainers import PolarGRPOTrainer

    return PolarGRPOTrainer(RolloutFunc(source), parse_engine_settings(engine), **options)


def async_grpo_trainer(source: SettingsSource = None, *, engine: Mapping[str, Any], **options: Any) -> Any:
    """An AsyncGRPOTrainer over Polar's sessions, likewise: they run while it trains. Traces of a group share their
    beginnings in its rows."""
    from polar.bridges.trl.trainers import make_async_grpo_trainer

    settings = parse_engine_settings(engine)
    assert settings is not None
    return make_async_grpo_trainer(BlockingBridge(source), settings, **options)


def recorded_reward(completions: Sequence[Any], reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """The sessions' recorded rewards, for `reward_funcs`."""
    assert len(completions) == len(reward)
    return list(reward)


class RolloutFunc(TrainerBridge):
    """A `rollout_func`. In a GRPOTrainer that is not Polar's own, every session must be one trace."""

    def __init__(self, source: SettingsSource = None) -> None:
        """`source` as `polar.bridges.settings.load_settings` takes it. Raises ConfigError."""
        super().__init__(BlockingBridge(source))
        weakref.finalize(self, self.bridge.close)  # not when training ends: some evaluate after it
        self._calls: Counter[str] = Counter()

    def build_dataset_rows(self) -> list[dict[str, str]]:
        """A dataset with a row for each task."""
        return [{"prompt": task} for task in self.rollouts.tasks]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Several processes may need sessions of one group. Each requests the group by its index in the global batch
        and takes the sessions of its own prompts."""
        mode = "train" if trainer.model.training else "eval"
        size = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        group_positions = [divmod(first + index, size) for index in range(len(prompts))]
        tasks_by_group = {
            group_index: get_task_id(prompt) for (group_index, _), prompt in zip(group_positions, prompts, strict=True)
        }
        key = self._make_call_key(mode, trainer.state.global_step)
        groups = self.bridge.run(self._run_groups(tasks_by_group, key, size, trainer.temperature))
        sessions = [groups[group_index][sample] for group_index, sample in group_positions]
        return self._build_rollout(sessions, trainer)

    def _make_call_key(self, mode: str, step: int) -> str:
        """The key of a call, the same when a trainer resumes from this step. It counts calls instead of tasks, since
        processes request different groups."""
        key = f"{mode}-{step}"
        self._calls[key] += 1
        return f"{key}.{self._calls[key]}"

    async def _run_groups(
        self, tasks_by_group: Mapping[int, str], key: str, size: int, temperature: float
    ) -> dict[int, list[SessionItem | None]]:
        sampling = SamplingOverrides(temperature=temperature)
        group_runs = (
            self.rollouts.run_group(task, f"{key}.{group_index}", samples=size, sampling=sampling)
            for group_index, task in tasks_by_group.items()
        )
        groups = dict(zip(tasks_by_group, await gather_or_cancel(group_runs), strict=True))
        for group in groups.values():
            check_temperature(group.items, temperature)
        left_out = sum((group.left_out for group in groups.values()), Counter[str]())
        if left_out:
            log.warning("%s: %d sessions can't be trained on: %s", key, left_out.total(), dict(left_out))
        return {
            group_index: [*group.items, *[None] * (size - len(group.items))] for group_index, group in groups.items()
        }

    def _build_rollout(self, sessions: Sequence[SessionItem | None], trainer: Any) -> dict[str, Any]:
        rows_by_session = [[] if session is None else build_rows(session) for session in sessions]
        first_row = next((row for rows in rows_by_session for row in rows), {})
        empty = make_filler_row(first_row, trainer.processing_class.pad_token_id, "left_out")
        all_rows = [rows[0] if rows else empty for rows in rows_by_session]
        owners = list(range(len(all_rows)))
        for owner, rows in enumerate(rows_by_session):
            all_rows += rows[1:]
            owners += [owner] * len(rows[1:])
        if not hasattr(trainer, "round_up_rows"):
            if len(all_rows) > len(sessions):
                raise ConfigError(
                    "A session has several traces, and TRL's GRPOTrainer takes one completion a prompt: make the "
                    "trainer with polar.bridges.trl.grpo_trainer."
                )
            return to_rollout_columns(all_rows)
        missing = trainer.round_up_rows(len(all_rows)) - len(all_rows)
        return to_rollout_columns([*all_rows, *[empty] * missing]) | {OWNER_KEY: [*owners, *[0] * missing]}


def parse_engine_settings(table: Mapping[str, Any] | None) -> EngineSettings | None:
    return None if table is None else EngineSettings.model_validate(table)


def get_task_id(prompt: Any) -> str:
    """A prompt is a task_id, or a conversation whose last message is one."""
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def build_rows(session: SessionItem) -> list[dict[str, Any]]:
    return list(TrlExporter().build_lines(session))
