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
    """OpenRLHF's SamplesGenerator, whose samples are sessions: each has its traces as `traces`."""

    class SessionSamplesGenerator(base):
        step = 0

        def __init__(self, **parts: Any) -> None:
            super().__init__(**parts)
            self._phase = "train"
            self._keys = (
                GroupKeys()
            )  # filtering, and data with two rows of a task, may ask for it more than once in a step

        def generate_eval_samples(self, **asked: Any) -> Any:
            self._phase = "eval"
            try:
                found = super().generate_eval_samples(**asked)
            finally:
                self._phase = "train"
            return drop_prompts_without_reward(
                found, asked.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
            )

        def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **asked: Any) -> Any:
            samples = asked.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
            trains = self._phase == "train"
            step = f"{self._phase}-{self.step}"
            tasks = [str(task) for task in labels]
            labels_with_keys = [
                agent.GroupLabel(task, self._keys.next_key(step, task), samples, self.step, trains) for task in tasks
            ]
            return super()._dispatch_prompts_to_vllm(prompts, labels_with_keys, **asked)

        def _process_response_into_experience(self, response: dict[str, Any], **asked: Any) -> Any:
            made = super()._process_response_into_experience
            longest = max((len(row["observation_tokens"]) for row in response["traces"]), default=0)
            if self._phase == "train" and longest > (limit := asked.get("max_len", 2048)):
                raise ConfigError(
                    f"A trace of task {response['label']} has {longest} tokens, and OpenRLHF would cut it after "
                    f"{limit}: set --data.max_len to {longest} at least."
                )
            session = made(response, **asked)
            session.traces = [made(row, **asked) for row in response["traces"]]
            return session

    return SessionSamplesGenerator


def drop_prompts_without_reward(found: Sequence[Any], samples: int) -> list[Any]:
    """Of an evaluation's samples, the prompts that have rewards: what failed by the platform is no reward of 0. Where
    only some sessions of a prompt have one, the others stand for their mean."""
    prompts = [found[start : start + samples] for start in range(0, len(found), samples)]
    kept = [prompt for prompt in prompts if any(one.traces for one in prompt)]
    if len(kept) < len(prompts):
        missing = len(prompts) - len(kept)
        log.warning(
            "%d of %d prompts of this evaluation have no session with a reward: they count for no mean.",
            missing,
            len(prompts),
        )
    return [one for prompt in kept for one in prompt]


def make_experience_maker(base: type[Any]) -> type[Any]:
    """OpenRLHF's RemoteExperienceMaker, over sessions: rows are their traces, and episodes they themselves."""

    class SessionExperienceMaker(base):
        _sessions: list[Any]
        _row_sessions: list[int]  # of each row, the session's number

        def split_rollout_samples(self, rollout_samples: list[Any]) -> Any:
            self._sessions = rollout_samples
            traces = [(number, row) for number, one in enumerate(rollout_samples) for row in one.traces]
            rows = fill_optimizer_step(traces, self.args.train.batch_size)
            self._row_sessions = [number for number, _ in rows]
            return super().split_rollout_samples([row for _, row in rows])

        def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
            places = {
                row: (experience, place) for experience in experiences for place, row in enumerate(experience.index)
            }
            rows: dict[int, list[tuple[Any, int]]] = {number: [] for number in range(len(self._sessions))}
            for row, number in enumerate(self._row_sessions):
                rows[number].append(places[row])
            episodes = [_build_episode(number, self._sessions[number], rows[number]) for number in rows]
            computed = {one.index[0]: one for one in self._compute_episodes(episodes)}
            for experience in experiences:
                _copy_episode_values(experience, [computed[self._row_sessions[row]] for row in experience.index])
            for number, own in rows.items():
                _copy_token_values(computed[number], own)
            return experiences

        def _compute_episodes(self, episodes: list[Any]) -> list[Any]:
            """OpenRLHF's own, where all sessions are there. Where some were left out, its estimators would take what
            stands for them for samples: so rewards are made into credits here, and nothing is left for it to take off
            but a mean of 0."""
            settings = self.args.algo.advantage
            there = [bool(one.traces) for one in self._sessions]
            if all(there):
                return list(super().compute_advantages_and_returns(episodes))
            estimator, earned = settings.estimator, [one.rewards for one in episodes]
            rewards = [float(one) for one in earned]
            given, deviations = neutralize_missing_sessions(
                there, rewards, self.args.rollout.n_samples_per_prompt, estimator
            )
            for one, credit in zip(episodes, given, strict=True):
                one.rewards = one.rewards.new_tensor([credit]).float()
            try:
                settings.estimator = "dr_grpo" if estimator in ("rloo", "group_norm") else estimator
                computed = list(super().compute_advantages_and_returns(episodes))
            finally:
                settings.estimator = estimator
            for one in computed:
                one.rewards = earned[one.index[0]]
                if "group_reward_std" in one.info:
                    one.info["group_reward_std"] = one.rewards.new_tensor([deviations[one.index[0]]]).float()
            return computed

    return SessionExperienceMaker


def neutralize_missing_sessions(
    present: Sequence[bool], rewards: Sequence[float], samples: int, estimator: str
) -> tuple[list[float], list[float]]:
    """What to give an estimator of OpenRLHF's for each session, such that those that are not `present` change nothing
    for the others, and the standard deviation of each one's group. For `rloo` and `group_norm` it is what these make of
    rewards; for others it is the rewards, with the mean that they take off in the empty places."""
    given, deviations = list(rewards), [0.0] * len(rewards)
    every = [reward for reward, real in zip(rewards, present, strict=True) if real]
    for start in range(0, len(rewards), samples):
        group = range(start, start + samples)
        places = [place for place in group if present[place]]
        own = [rewards[place] for place in places]
        credits = compute_session_advantages(own, scale=estimator == "group_norm", epsilon=1e-9)
        if estimator in ("rloo", "group_norm"):
            larger = len(own) / (len(own) - 1) if estimator == "rloo" and len(own) > 1 else 1.0
            empty, made = 0.0, [credit * larger for credit in credits]
        else:
            empty, made = statistics.fmean(every if estimator == "flash_reinforce" else own or [0.0]), own
        for place in group:
            given[place] = empty
            deviations[place] = statistics.stdev(own) if len(own) > 1 else 0.0
        for place, credit in zip(places, made, strict=True):
            given[place] = credit
    return given, deviations


def fill_optimizer_step(rows: list[tuple[int, Any]], size: int) -> list[tuple[int, Any]]:
    """As many rows as an optimizer step takes: a row, and its copy, each train one half of its tokens."""
    if len(rows) > size:
        raise ConfigError(
            f"The sessions of this rollout have {len(rows)} traces, more than an optimizer step takes: set "
            f"--train.batch_size to {len(rows)} at least, or run fewer sessions in a rollout."
        )
    rows = list(rows)
    while len(rows) < size:
        divisible = [place for place, (_, row) in enumerate(rows) if row.action_mask.sum() > 1]
        if not divisible:
            raise ConfigError(f"This rollout has {len(rows)} tokens that train, fewer than --train.batch_size {size}.")
        place = min(divisible, key=lambda one: rows[one][1].sequences.shape[1])
        number, row = rows[place]
        trains = row.action_mask.nonzero()[:, 1]
        halves = [row.action_mask.clone(), row.action_mask.clone()]
        halves[0][:, trains[len(trains) // 2 :]] = 0
        halves[1][:, trains[: len(trains) // 2]] = 0
        rows[place : place + 1] = [(number, replace(row, action_mask=half, info=dict(row.info))) for half in halves]
    return rows


def _build_episode(number: int, session: Any, rows: Sequence[tuple[Any, int]]) -> Any:
    """A session as one row, its traces one behind another, for what OpenRLHF computes of an episode."""
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience

    mask = [experience.action_mask[place] for experience, place in rows] or [torch.zeros(1)]
    kl = [experience.kl[place] for experience, place in rows] or [torch.zeros(1)]
    return Experience(
        action_mask=torch.cat(mask)[None],
        kl=torch.cat(kl)[None],
        rewards=session.rewards,
        response_length=session.response_length,
        truncated=session.truncated,
        index=[number],
        info={"reward": session.rewards},
    )


def _copy_episode_values(experience: Any, episodes: Sequence[Any]) -> None:
    """What an episode has one of, at each of its rows."""
    import torch

    experience.rewards = torch.cat([one.rewards for one in episodes])
    for name in episodes[0].info:
        experience.info[name] = torch.cat([one.info[name].reshape(1) for one in episodes])
    experience.advantages = torch.zeros_like(experience.kl)
    experience.returns = torch.zeros_like(experience.kl)
    experience.kl = None


def _copy_token_values(episode: Any, rows: Sequence[tuple[Any, int]]) -> None:
    """What an episode has for each token, back at its rows."""
    start = 0
    for experience, place in rows:
        stop = start + experience.action_mask.shape[1]
        experience.advantages[place] = episode.advantages[0, start:stop]
        experience.returns[place] = episode.returns[0, start:stop]
        start = stop


class OpenRlhfBridge(TrainerBridge):
    """What OpenRLHF's trainer tells Polar of its engines."""

    def begin_training(self, *, replaces_engines: bool) -> None:
        """Generation goes on, wherever an earlier trainer left it. With `replaces_engines` those of an earlier trainer
        are out of the run: executors hand theirs over when they are first asked."""
        self.bridge.run(self._begin_training(replaces_engines))

    async def _begin_training(self, replaces_engines: bool) -> None:
        if replaces_engines:
            for url in await self.engines.list_urls():
                await self.rollouts.client.remove_engine(url)
        await self.engines.resume_if_paused()

    def broadcast(self, send: Callable[[], None], version: int) -> None:
        """Has OpenRLHF send its engines the weights of `version`."""
        self.bridge.run(self._broadcast(send, version))

    async def _broadcast(self, send: Callable[[], None], version: int) -> None:
        if not await self.engines.list_urls():  # after a restart: no executor has handed its engine over yet
            await asyncio.to_thread(send)
            return
        # OpenRLHF's engines can't be frozen from outside, so calls that run are waited for.
        async with self.engines.updating(version, "drain"):
            await asyncio.to_thread(send)


def make_polar_trainer(base: type[Any], source: SettingsSource = None, *, serves_engines: bool = True) -> type[Any]:
    """OpenRLHF's PPOTrainer (the class within the Ray actor), over sessions, whose weights Polar follows.
    `serves_engines`: its executors hand their engines to Polar, and the run has no others."""

    class PolarTrainer(base):
        def __init__(self, pretrain: str, strategy: Any, *parts: Any, **asked: Any) -> None:
            from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
            from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

            check_arguments(strategy.args)
            super().__init__(pretrain, strategy, *parts, **asked)
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
    """Raises ConfigError where a setting of OpenRLHF's gives a session that is split into traces another gradient, or
    can't be had here."""
    rows = "goes by rows, so that sessions of several traces would count more"
    sessions_of_a_rollout = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    wrong = {
        "--actor.loss_agg_mode token-mean": (args.actor.loss_agg_mode != "token-mean", rows),
        "--actor.policy_loss_type ppo": (args.actor.policy_loss_type != "ppo", rows),
        "--algo.advantage.is_correction_level token": (args.algo.advantage.is_correction_level == "seq", rows),
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
    for setting, (is_wrong, why) in wrong.items():
        if is_wrong:
            raise ConfigError(f"Set {setting}: {why}.")


def main() -> None:
    """OpenRLHF's own command, with its trainer and agent replaced. Raises ConfigError."""
    import ray
    from openrlhf.trainer import ppo_trainer

    if "--train.async_enable" in sys.argv:
        raise ConfigError("Leave --train.async_enable out: Polar's sessions train in OpenRLHF's synchronous loop only.")
    if "--train.agent_func_path" not in sys.argv:
        sys.argv += ["--train.agent_func_path", os.path.abspath(agent.__file__)]
    own = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class
    ppo_trainer.PPOTrainer = ray.remote(make_polar_trainer(own, load_settings()))
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
