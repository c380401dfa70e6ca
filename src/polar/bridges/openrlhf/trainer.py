"""The trainer's side of OpenRLHF's bridge: its sample generator, experience maker and trainer, over sessions.

OpenRLHF's executor gives one row a session, and its trainer takes baselines by position and steps after a fixed number
of rows. So the generator keeps a session's traces together until all are there, the experience maker has OpenRLHF
compute advantages with each session as one episode, and a rollout is one optimizer step. Where it has fewer rows than
that takes, a short one is given twice with half of its tokens each time, which changes no gradient
(`fill_optimizer_step`). `make_polar_trainer` puts all of this together, and tells Polar of the weights.
"""

import asyncio
import logging
import os
import runpy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from polar.bridges.advantages import compute_session_advantages
from polar.bridges.bridge import BlockingBridge, TrainerBridge
from polar.bridges.openrlhf import agent
from polar.bridges.rollouts import GroupKeys
from polar.bridges.settings import SettingsSource, load_settings
from polar.errors import ConfigError

log = logging.getLogger(__name__)


def make_samples_generator(base: type[Any]) -> type[Any]:
    """Creates OpenRLHF's SamplesGenerator with sessions as samples. A sample has its session's traces as `traces`."""

    class SessionSamplesGenerator(base):
        step = 0

        def __init__(self, **components: Any) -> None:
            super().__init__(**components)
            self._phase = "train"
            self._keys = (
                GroupKeys()
            )  # filtering, and data with two rows of a task, may ask for it more than once in a step

        def generate_eval_samples(self, **options: Any) -> Any:
            self._phase = "eval"
            try:
                samples_with_rewards = super().generate_eval_samples(**options)
            finally:
                self._phase = "train"
            return drop_prompts_without_reward(
                samples_with_rewards, options.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
            )

        def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **options: Any) -> Any:
            samples = options.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
            trains = self._phase == "train"
            step = f"{self._phase}-{self.step}"
            tasks = [str(task) for task in labels]
            labels_with_keys = [
                agent.GroupLabel(task, self._keys.make_key(step, task), samples, self.step, trains) for task in tasks
            ]
            return super()._dispatch_prompts_to_vllm(prompts, labels_with_keys, **options)

        def _process_response_into_experience(self, response: dict[str, Any], **options: Any) -> Any:
            build_experience = super()._process_response_into_experience
            longest = max((len(row["observation_tokens"]) for row in response["traces"]), default=0)
            if self._phase == "train" and longest > (limit := options.get("max_len", 2048)):
                raise ConfigError(
                    f"A trace of task {response['label']} has {longest} tokens, and OpenRLHF would cut it after "
                    f"{limit}: set --data.max_len to {longest} at least."
                )
            session = build_experience(response, **options)
            session.traces = [build_experience(row, **options) for row in response["traces"]]
            return session

    return SessionSamplesGenerator


def drop_prompts_without_reward(all_samples: Sequence[Any], samples: int) -> list[Any]:
    """Drops an evaluation's prompts without any reward, since a platform failure is not a reward of 0. If only some
    sessions of a prompt have one, the others were given their mean."""
    prompts = [all_samples[start : start + samples] for start in range(0, len(all_samples), samples)]
    kept = [prompt for prompt in prompts if any(sample.traces for sample in prompt)]
    if len(kept) < len(prompts):
        missing = len(prompts) - len(kept)
        log.warning(
            "%d of %d prompts of this evaluation have no session with a reward: they count for no mean.",
            missing,
            len(prompts),
        )
    return [sample for prompt in kept for sample in prompt]


def make_experience_maker(base: type[Any]) -> type[Any]:
    """Creates OpenRLHF's RemoteExperienceMaker over sessions: rows are traces, and episodes are sessions."""

    class SessionExperienceMaker(base):
        _sessions: list[Any]
        _row_sessions: list[int]  # of each row, the session's number

        def split_rollout_samples(self, rollout_samples: list[Any]) -> Any:
            self._sessions = rollout_samples
            traces = [
                (session_index, row) for session_index, session in enumerate(rollout_samples) for row in session.traces
            ]
            rows = fill_optimizer_step(traces, self.args.train.batch_size)
            self._row_sessions = [session_index for session_index, _ in rows]
            return super().split_rollout_samples([row for _, row in rows])

        def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
            row_locations = {
                row: (experience, position)
                for experience in experiences
                for position, row in enumerate(experience.index)
            }
            rows: dict[int, list[tuple[Any, int]]] = {session_index: [] for session_index in range(len(self._sessions))}
            for row, session_index in enumerate(self._row_sessions):
                rows[session_index].append(row_locations[row])
            episodes = [
                _build_episode(session_index, self._sessions[session_index], rows[session_index])
                for session_index in rows
            ]
            computed_episodes = {session.index[0]: session for session in self._compute_episodes(episodes)}
            for experience in experiences:
                _copy_episode_values(
                    experience, [computed_episodes[self._row_sessions[row]] for row in experience.index]
                )
            for session_index, session_rows in rows.items():
                _copy_token_values(computed_episodes[session_index], session_rows)
            return experiences

        def _compute_episodes(self, episodes: list[Any]) -> list[Any]:
            """Computes OpenRLHF's advantages of episodes. If some sessions were left out, its estimators would count
            their placeholders as samples. Then rewards are replaced so that the estimator subtracts only a mean of
            0."""
            settings = self.args.algo.advantage
            is_present = [bool(session.traces) for session in self._sessions]
            if all(is_present):
                return list(super().compute_advantages_and_returns(episodes))
            estimator, session_rewards = settings.estimator, [session.rewards for session in episodes]
            rewards = [float(session) for session in session_rewards]
            neutral_rewards, deviations = neutralize_missing_sessions(
                is_present, rewards, self.args.rollout.n_samples_per_prompt, estimator
            )
            for session, credit in zip(episodes, neutral_rewards, strict=True):
                session.rewards = session.rewards.new_tensor([credit]).float()
            try:
                settings.estimator = "dr_grpo" if estimator in ("rloo", "group_norm") else estimator
                computed_episodes = list(super().compute_advantages_and_returns(episodes))
            finally:
                settings.estimator = estimator
            for session in computed_episodes:
                session.rewards = session_rewards[session.index[0]]
                if "group_reward_std" in session.info:
                    session.info["group_reward_std"] = session.rewards.new_tensor(
                        [deviations[session.index[0]]]
                    ).float()
            return computed_episodes

    return SessionExperienceMaker


def neutralize_missing_sessions(
    present: Sequence[bool], rewards: Sequence[float], samples: int, estimator: str
) -> tuple[list[float], list[float]]:
    """Rewards for OpenRLHF's estimator under which sessions that are not `present` do not affect the others, and the
    standard deviation of each session's group. For `rloo` and `group_norm` these are the final advantages; for others
    the rewards, with the mean that the estimator subtracts in place of missing ones."""
    neutral_rewards, deviations = list(rewards), [0.0] * len(rewards)
    all_present = [reward for reward, is_present in zip(rewards, present, strict=True) if is_present]
    for start in range(0, len(rewards), samples):
        group = range(start, start + samples)
        present_indices = [index for index in group if present[index]]
        present_rewards = [rewards[index] for index in present_indices]
        credits = compute_session_advantages(present_rewards, scale=estimator == "group_norm", epsilon=1e-9)
        if estimator in ("rloo", "group_norm"):
            factor = (
                len(present_rewards) / (len(present_rewards) - 1)
                if estimator == "rloo" and len(present_rewards) > 1
                else 1.0
            )
            missing_value, present_values = 0.0, [credit * factor for credit in credits]
        else:
            missing_value, present_values = (
                statistics.fmean(all_present if estimator == "flash_reinforce" else present_rewards or [0.0]),
                present_rewards,
            )
        for index in group:
            neutral_rewards[index] = missing_value
            deviations[index] = statistics.stdev(present_rewards) if len(present_rewards) > 1 else 0.0
        for index, credit in zip(present_indices, present_values, strict=True):
            neutral_rewards[index] = credit
    return neutral_rewards, deviations


def fill_optimizer_step(rows: list[tuple[int, Any]], size: int) -> list[tuple[int, Any]]:
    """Splits rows until there are as many as an optimizer step takes: a row becomes two, each training half of its
    tokens."""
    if len(rows) > size:
        raise ConfigError(
            f"The sessions of this rollout have {len(rows)} traces, more than an optimizer step takes: set "
            f"--train.batch_size to {len(rows)} at least, or run fewer sessions in a rollout."
        )
    rows = list(rows)
    while len(rows) < size:
        divisible = [index for index, (_, row) in enumerate(rows) if row.action_mask.sum() > 1]
        if not divisible:
            raise ConfigError(f"This rollout has {len(rows)} tokens that train, fewer than --train.batch_size {size}.")
        index = min(divisible, key=lambda candidate: rows[candidate][1].sequences.shape[1])
        session_index, row = rows[index]
        trained_positions = row.action_mask.nonzero()[:, 1]
        halves = [row.action_mask.clone(), row.action_mask.clone()]
        halves[0][:, trained_positions[len(trained_positions) // 2 :]] = 0
        halves[1][:, trained_positions[: len(trained_positions) // 2]] = 0
        rows[index : index + 1] = [
            (session_index, replace(row, action_mask=half, info=dict(row.info))) for half in halves
        ]
    return rows


def _build_episode(session_index: int, session: Any, rows: Sequence[tuple[Any, int]]) -> Any:
    """A session as one row, with its traces concatenated, for OpenRLHF's episode computations."""
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience

    mask = [experience.action_mask[position] for experience, position in rows] or [torch.zeros(1)]
    kl = [experience.kl[position] for experience, position in rows] or [torch.zeros(1)]
    return Experience(
        action_mask=torch.cat(mask)[None],
        kl=torch.cat(kl)[None],
        rewards=session.rewards,
        response_length=session.response_length,
        truncated=session.truncated,
        index=[session_index],
        info={"reward": session.rewards},
    )


def _copy_episode_values(experience: Any, episodes: Sequence[Any]) -> None:
    """Copies values that an episode has once to each of its rows."""
    import torch

    experience.rewards = torch.cat([episode.rewards for episode in episodes])
    for name in episodes[0].info:
        experience.info[name] = torch.cat([episode.info[name].reshape(1) for episode in episodes])
    experience.advantages = torch.zeros_like(experience.kl)
    experience.returns = torch.zeros_like(experience.kl)
    experience.kl = None


def _copy_token_values(episode: Any, rows: Sequence[tuple[Any, int]]) -> None:
    """Copies an episode's token values back to its rows."""
    start = 0
    for experience, position in rows:
        stop = start + experience.action_mask.shape[1]
        experience.advantages[position] = episode.advantages[0, start:stop]
        experience.returns[position] = episode.returns[0, start:stop]
        start = stop


class OpenRlhfBridge(TrainerBridge):
    """Passes weight updates of OpenRLHF's trainer on to Polar."""

    def begin_training(self, *, replaces_engines: bool) -> None:
        """Resumes generation if an earlier trainer left it paused. With `replaces_engines` the earlier trainer's
        engines are removed from the run; executors add theirs on their first request."""
        self.bridge.run(self._begin_training(replaces_engines))

    async def _begin_training(self, replaces_engines: bool) -> None:
        if replaces_engines:
            for url in await self.engines.list_urls():
                await self.rollouts.client.remove_engine(url)
        await self.engines.resume_if_paused()

    def broadcast(self, send: Callable[[], None], version: int) -> None:
        """Pauses generation while OpenRLHF sends its engines the weights of `version`."""
        self.bridge.run(self._broadcast(send, version))

    async def _broadcast(self, send: Callable[[], None], version: int) -> None:
        if not await self.engines.list_urls():  # after a restart no executor has added its engine yet
            await asyncio.to_thread(send)
            return
        # OpenRLHF's engines can't be frozen from outside, so calls that run are waited for.
        async with self.engines.updating(version, "drain"):
            await asyncio.to_thread(send)


def make_polar_trainer(base: type[Any], source: SettingsSource = None, *, serves_engines: bool = True) -> type[Any]:
    """Creates OpenRLHF's PPOTrainer class (the class within the Ray actor) over sessions, with weight updates passed to
    Polar. With `serves_engines` its executors give their engines to Polar, and the run has no others."""

    class PolarTrainer(base):
        def __init__(self, pretrain: str, strategy: Any, *args: Any, **options: Any) -> None:
            from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
            from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

            check_arguments(strategy.args)
            super().__init__(pretrain, strategy, *args, **options)
            self.samples_generator = make_samples_generator(SamplesGenerator)(
                strategy=strategy,
                prompts_dataloader=self.prompts_dataloader,
                eval_dataloader=self.eval_dataloader,
                tokenizer=self.tokenizer,
                vllm_engines=self.vllm_engines,
            )
            self.experience_maker = make_experience_maker(RemoteExperienceMaker)(
                self.actor_model_group,
                self.critic_model_group,
                self.reward_model_group,
                self.reference_model_group,
                self.kl_ctl,
                strategy,
                self.tokenizer,
            )
            rollouts = len(self.prompts_dataloader) // self.args.rollout.batch_size
            self.max_steps = max(rollouts, 1) * self.args.train.num_episodes * self.args.train.max_epochs
            self.polar = OpenRlhfBridge(BlockingBridge(source))
            self.polar.begin_training(replaces_engines=serves_engines)
            self._version = 0

        def fit(self, global_step: int = 0) -> None:
            with self.polar:
                super().fit(global_step)

        def init_checkpoint_states(self) -> Any:
            states = super().init_checkpoint_states()
            self._version = self.samples_generator.step = states["global_step"]
            return states

        def train_step(self, rollout_samples: Any, global_step: int) -> Any:
            self._version = self.samples_generator.step = global_step + 1
            return super().train_step(rollout_samples, global_step)

        def broadcast_to_vllm(self) -> None:
            self.polar.broadcast(super().broadcast_to_vllm, self._version)

    return PolarTrainer


def check_arguments(args: Any) -> None:
    """Raises ConfigError for a setting under which splitting a session changes the gradient, or which is not
    supported."""
    row_reason = "goes by rows, so that sessions of several traces would count more"
    sessions_of_a_rollout = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    requirements = {
        "--actor.loss_agg_mode token-mean": (args.actor.loss_agg_mode != "token-mean", row_reason),
        "--actor.policy_loss_type ppo": (args.actor.policy_loss_type != "ppo", row_reason),
        "--algo.advantage.is_correction_level token": (args.algo.advantage.is_correction_level == "seq", row_reason),
        "--algo.advantage.estimator group_norm": (
            args.algo.advantage.estimator == "gae",
            "gae has values of each trace alone",
        ),
        "no --train.dynamic_batch_enable": (args.train.dynamic_batch_enable, "it leaves out rows"),
        "no --reward.overlong_buffer_len": (
            getattr(args.reward, "overlong_buffer_len", None) is not None,
            "long replies are the task's `on_length` with Polar",
        ),
        "no --reward.stop_properly_penalty_coef": (
            getattr(args.reward, "stop_properly_penalty_coef", None) is not None,
            "cut replies are the task's `on_length` with Polar",
        ),
        f"--train.batch_size to {sessions_of_a_rollout} at least": (
            args.train.batch_size < sessions_of_a_rollout,
            "a rollout is one optimizer step, with a row for each trace",
        ),
    }
    for setting, (is_wrong, why) in requirements.items():
        if is_wrong:
            raise ConfigError(f"Set {setting}: {why}.")


def main() -> None:
    """Runs OpenRLHF's command with Polar's trainer and agent. Raises ConfigError."""
    import ray
    from openrlhf.trainer import ppo_trainer

    if "--train.async_enable" in sys.argv:
        raise ConfigError("Leave --train.async_enable out: Polar's sessions train in OpenRLHF's synchronous loop only.")
    if "--train.agent_func_path" not in sys.argv:
        sys.argv += ["--train.agent_func_path", os.path.abspath(agent.__file__)]
    trainer_class = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
    ppo_trainer.PPOTrainer = ray.remote(make_polar_trainer(trainer_class, load_settings()))
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
