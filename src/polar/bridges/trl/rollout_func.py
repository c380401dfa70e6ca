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
"""Of each row, the place of its session among the prompts: what goes to PolarGRPOTrainer beside TRL's own keys."""


def grpo_trainer(source: SettingsSource = None, *, engine: Mapping[str, Any] | None = None, **given: Any) -> Any:
    """A GRPOTrainer over Polar's sessions; `source` are the bridge's settings, and the rest is GRPOTrainer's. `engine`
    is the [engine] section of the service: the run's engines get the weights of each step. Without it, something else
    must give them. Raises ConfigError."""
    from polar.bridges.trl.trainers import PolarGRPOTrainer

    return PolarGRPOTrainer(RolloutFunc(source), engine_settings(engine), **given)


def async_grpo_trainer(source: SettingsSource = None, *, engine: Mapping[str, Any], **given: Any) -> Any:
    """An AsyncGRPOTrainer over Polar's sessions, likewise: they run while it trains. Traces of a group share their
    beginnings in its rows."""
    from polar.bridges.trl.trainers import make_async_grpo_trainer

    settings = engine_settings(engine)
    assert settings is not None
    return make_async_grpo_trainer(BlockingBridge(source), settings, **given)


def recorded_reward(completions: Sequence[Any], reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """What the sessions earned, for `reward_funcs`."""
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
        """A data set of all tasks."""
        return [{"prompt": task} for task in self.rollouts.tasks]

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """A group's sessions may be wanted by several processes: each asks for the group by its place in the whole
        batch, and takes those that its own prompts stand for."""
        mode = "train" if trainer.model.training else "eval"
        size = trainer.num_generations if mode == "train" else trainer.num_generations_eval
        first = trainer.accelerator.process_index * len(prompts)
        places = [divmod(first + index, size) for index in range(len(prompts))]
        wanted = {place: get_task_id(prompt) for (place, _), prompt in zip(places, prompts, strict=True)}
        key = self._key(mode, trainer.state.global_step)
        groups = self.bridge.run(self._groups(wanted, key, size, trainer.temperature))
        sessions = [groups[place][sample] for place, sample in places]
        return self._build_rollout(sessions, trainer)

    def _key(self, mode: str, step: int) -> str:
        """Of a call: the same when a trainer that has crashed goes on from this step. Calls are counted and not tasks,
        since which groups a process asks for is not the same in each."""
        key = f"{mode}-{step}"
        self._calls[key] += 1
        return f"{key}.{self._calls[key]}"

    async def _groups(
        self, wanted: Mapping[int, str], key: str, size: int, temperature: float
    ) -> dict[int, list[SessionItem | None]]:
        sampling = SamplingOverrides(temperature=temperature)
        asked = (
            self.rollouts.run_group(task, f"{key}.{place}", samples=size, sampling=sampling)
            for place, task in wanted.items()
        )
        groups = dict(zip(wanted, await gather_or_cancel(asked), strict=True))
        for group in groups.values():
            check_temperature(group.items, temperature)
        left_out = sum((group.left_out for group in groups.values()), Counter[str]())
        if left_out:
            log.warning("%s: %d sessions can't be trained on: %s", key, left_out.total(), dict(left_out))
        return {place: [*group.items, *[None] * (size - len(group.items))] for place, group in groups.items()}

    def _build_rollout(self, sessions: Sequence[SessionItem | None], trainer: Any) -> dict[str, Any]:
        lines = [[] if session is None else build_rows(session) for session in sessions]
        like = next((row for rows in lines for row in rows), {})
        empty = make_filler_row(like, trainer.processing_class.pad_token_id, "left_out")
        made = [rows[0] if rows else empty for rows in lines]
        owners = list(range(len(made)))
        for place, rows in enumerate(lines):
            made += rows[1:]
            owners += [place] * len(rows[1:])
        if not hasattr(trainer, "round_up_rows"):
            if len(made) > len(sessions):
                raise ConfigError(
                    "A session has several traces, and TRL's GRPOTrainer takes one completion a prompt: make the "
                    "trainer with polar.bridges.trl.grpo_trainer."
                )
            return to_rollout_columns(made)
        missing = trainer.round_up_rows(len(made)) - len(made)
        return to_rollout_columns([*made, *[empty] * missing]) | {OWNER_KEY: [*owners, *[0] * missing]}


def engine_settings(table: Mapping[str, Any] | None) -> EngineSettings | None:
    return None if table is None else EngineSettings.model_validate(table)


def get_task_id(prompt: Any) -> str:
    """A prompt is a task_id, or a conversation whose last message is one."""
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def build_rows(session: SessionItem) -> list[dict[str, Any]]:
    return list(TrlExporter().build_lines(session))
