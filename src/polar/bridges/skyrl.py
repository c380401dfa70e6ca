"""SkyRL: a generator whose trajectories are Polar's sessions, and the trainer's side of it.

    POLAR_BRIDGE=bridge.toml python -m skyrl.train.entrypoints.main_base \\
        trainer.override_entrypoint=polar.bridges.skyrl \\
        data.train_data="['rows.jsonl']" \\
        generator.step_wise_trajectories=true \\
        generator.n_samples_per_prompt=8 \\
        trainer.algorithm.loss_reduction=token_mean \\
        trainer.algorithm.use_kl_loss=false \\
        trainer.policy.model.path=...

A row of the data has `task_id` beside its `prompt`, which SkyRL wants and only logs. A program of your own uses
`Generator` and `make_polar_trainer` instead of the entry point.

Who divides: SkyRL, over a mini-batch. A session is a step-wise trajectory with a row for each trace; its advantage is
computed once, among the sessions of its prompt. `token_mean` and `prompt_mean` count tokens, so splitting a session
changes nothing. `sequence_mean` and `seq_mean_token_sum_norm` count rows: `make_polar_trainer` makes them count
sessions, with each trace's `weight`. What goes by rows in other ways is refused (`check_config`), with the setting to
change.

What is left out: sessions without a reward (a reason instead), and groups in which only one of several sessions has
one, since nothing can be compared there: a row of such a group has no token that trains, and so the step goes on. In an
evaluation, a prompt of which nothing is left has no row: it counts for no mean, and the log says how many there were.
Policy versions are in `env_metrics` only: no loss of SkyRL's reads them.
"""

import logging
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from polar.bridges.bridge import AsyncBridge
from polar.bridges.rollouts import (
    GroupKeys,
    SessionGroup,
    build_sampling_overrides,
    check_temperature,
    gather_or_cancel,
)
from polar.bridges.settings import BridgeSettings, SettingsSource, load_settings
from polar.config import EngineSettings, SamplingOverrides
from polar.errors import ConfigError
from polar.export.skyrl import build_session_output, to_generator_output
from polar.weight_sync.probe import Scorer
from polar.weight_sync.updater import WeightUpdater

log = logging.getLogger(__name__)

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Generator(AsyncBridge):
    """SkyRL's `GeneratorInterface`: it has the one method. It belongs to the event loop that it is first used in."""

    def __init__(self, source: SettingsSource = None) -> None:
        super().__init__(source)
        self._keys = GroupKeys()  # dynamic sampling, and data with two rows of a task, may ask for it again in a step

    async def generate(self, input_batch: Mapping[str, Any]) -> Any:
        """A `GeneratorOutput`: the sessions of each prompt, in the prompts' order. Raises ConfigError (also where what
        is trained on was sampled at another temperature than asked for) and ClientError."""
        known = input_batch["batch_metadata"]
        step = f"{known.training_phase}-{known.global_step}"
        sampling = _build_sampling(input_batch["sampling_params"] or {})
        prompts = list(_read_prompts(input_batch))
        groups = await gather_or_cancel(
            self.rollouts.run_group(task, self._keys.make_key(step, task), samples=samples, sampling=sampling)
            for _, task, samples in prompts
        )
        ran = [(uid, group) for (uid, _, _), group in zip(prompts, groups, strict=True)]
        if known.training_phase == "eval":
            ran = drop_prompts_without_reward(ran)
        elif sampling.temperature is not None:
            check_temperature((item for group in groups for item in group.items), sampling.temperature)
        output = to_generator_output([line for uid, group in ran for line in build_lines(uid, group)])
        output["rollout_metrics"].update(_compute_metrics(groups))
        return output


def _read_prompts(batch: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """The uid of each prompt, its task, and how many samples are asked for. SkyRL repeats the row for each sample."""
    rows = zip(batch["trajectory_ids"], batch["env_extras"], strict=True)
    for uid, samples in groupby(rows, key=lambda row: str(row[0].instance_id)):
        same = list(samples)
        try:
            task = str(same[0][1]["task_id"])
        except KeyError:
            raise ConfigError(f"Row {uid} of SkyRL's data has no `task_id`, which names the task to run.") from None
        yield uid, task, len(same)


def _build_sampling(params: Mapping[str, Any]) -> SamplingOverrides:
    """The trainer computes log-probabilities at its own temperature, so that is what has to be sampled with. How long
    a reply may be is for the harness and its task to say."""
    return build_sampling_overrides(**{name: params.get(name) for name in _SAMPLING_FIELDS})


def drop_prompts_without_reward(groups: list[tuple[str, SessionGroup]]) -> list[tuple[str, SessionGroup]]:
    """Those that an evaluation has rewards of: what failed by the platform is no reward of 0. SkyRL takes no batch
    without a row, so the first stays where nothing is left of any."""
    groups_with_reward = [(uid, group) for uid, group in groups if group.items]
    if len(groups_with_reward) < len(groups):
        left_out: Counter[str] = sum((group.left_out for _, group in groups if not group.items), Counter())
        log.warning(
            "%d of %d prompts of this evaluation have no session with a reward (%s) and %s.",
            len(groups) - len(groups_with_reward),
            len(groups),
            ", ".join(f"{reason}: {count}" for reason, count in left_out.items()),
            "count for no mean" if groups_with_reward else "SkyRL must have one of them, which counts as 0",
        )
    return groups_with_reward or groups[:1]


def build_lines(uid: str, group: SessionGroup) -> list[dict[str, Any]]:
    """A line for each session. A prompt must have a row whatever became of it: SkyRL counts prompts."""
    lines = [build_session_output(item, uid, number) for number, item in enumerate(group.items)]
    if not lines:
        return [_build_empty_line(uid)]
    if len(lines) == 1 and group.requested_samples > 1:
        (alone,) = lines
        return [alone | {"loss_masks": [[0] * len(mask) for mask in alone["loss_masks"]]}]
    return lines


def _build_empty_line(uid: str) -> dict[str, Any]:
    return {
        "prompt_token_ids": [[0]],
        "response_ids": [[0]],
        "rewards": [0.0],
        "loss_masks": [[0]],
        "rollout_logprobs": [[0.0]],
        "stop_reasons": ["abort"],
        "trajectory_ids": [{"instance_id": uid, "repetition_id": 0}],
        "is_last_step": [True],
        "rollout_metrics": None,
        "env_metrics": [{}],
    }


def _compute_metrics(groups: Sequence[SessionGroup]) -> dict[str, float]:
    left_out: Counter[str] = sum((group.left_out for group in groups), Counter())
    return {
        "polar/sessions": sum(len(group.items) for group in groups),
        "polar/traces": sum(len(item.trajectory.traces) for group in groups for item in group.items),
        "polar/groups_without_baseline": sum(group.requested_samples > 1 and len(group.items) < 2 for group in groups),
        **{f"polar/left_out/{reason}": count for reason, count in left_out.items()},
    }


# The trainer's side


def make_polar_trainer(base: type[Any]) -> type[Any]:
    """SkyRL's trainer (`RayPPOTrainer` or `FullyAsyncRayPPOTrainer`), whose engines Polar follows. Its generator is a
    `Generator`."""

    class PolarTrainer(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_config(self.cfg)

        async def train(self) -> None:
            try:
                await super().train()
            finally:
                await self.generator.close()

        def init_weight_sync_state(self) -> None:
            super().init_weight_sync_state()
            # Wherever SkyRL gives its engines weights, it does so with this call.
            self.dispatch.save_weights_for_sampler = partial(
                _WeightSaveHook(self), self.dispatch.save_weights_for_sampler
            )

        def compute_advantages_and_returns(self, data: Any) -> Any:
            return weight_advantages_by_session(
                super().compute_advantages_and_returns(data), self.cfg.trainer.algorithm.loss_reduction
            )

    return PolarTrainer


class _WeightSaveHook:
    """Tells Polar of new weights. A step's number is their version."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._attached = False

    async def __call__(self, save: Callable[..., Awaitable[None]], *args: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        engines: WeightUpdater = trainer.generator.engines
        if self._attached:
            # SkyRL lets its engines go on before it is back here, so no call may be on its way then.
            async with engines.updating(trainer.global_step, "drain"):
                await save(*args, **kwargs)
        else:
            await save(*args, **kwargs)  # first: engines that share the trainer's devices sleep until then
            await engines.attach(trainer.inference_engine_client.server_urls, trainer.global_step)
            self._attached = True
        if _can_score(trainer.cfg):
            known = EngineSettings(kind="vllm", model=trainer.inference_engine_client.model_name)
            dtypes = (
                str(trainer.cfg.generator.inference_engine.model_dtype),
                "bfloat16" if trainer.cfg.trainer.bf16 else "float32",
            )
            await engines.probe(_make_scorer(trainer.dispatch), len(trainer.tokenizer), known, *dtypes)


def _can_score(cfg: Any) -> bool:
    """The probe samples at temperature 1, and SkyRL computes at its own. Where engine and trainer share devices, there
    is no room for both at once; SkyRL's `policy/rollout_train_logprobs_abs_diff_mean` says the same of every step."""
    return cfg.trainer.algorithm.temperature in (None, 1.0) and not cfg.trainer.placement.colocate_all


def _make_scorer(dispatch: Any) -> Scorer:
    """With SkyRL's own forward pass."""

    def score(prompt: list[int], sampled: list[int]) -> list[float]:
        import torch
        from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

        ids = torch.tensor([prompt + sampled] * dispatch.dp_size("policy"))  # a row for each rank
        batch = TrainingInputBatch({"sequences": ids, "attention_mask": torch.ones_like(ids)})
        batch.metadata = {"response_length": len(sampled)}
        logprobs: list[float] = dispatch.forward("policy", batch).loss_fn_outputs[0]["logprobs"]
        return logprobs[-len(sampled) :]

    return score


def weight_advantages_by_session(data: Any, reduction: str) -> Any:
    """Where a reduction counts rows, advantages such that it counts sessions: with a session's traces as one sequence,
    each of its tokens counts as in a session of one trace."""
    import torch

    if reduction not in ("sequence_mean", "seq_mean_token_sum_norm"):
        return data
    last = torch.tensor(data.metadata["is_last_step"])
    session = torch.cat([torch.zeros(1, dtype=torch.long), last[:-1].long().cumsum(0)])
    tokens = data["loss_mask"].sum(-1)
    if reduction == "sequence_mean":
        scale = tokens / torch.zeros_like(tokens).index_add_(0, session, tokens)[session].clamp(min=1)
    else:
        scale = torch.ones_like(tokens)
    for start, stop in data.metadata["policy_mini_batch_boundaries"]:
        scale[start:stop] *= (stop - start) / last[start:stop].sum()
    data["advantages"] = data["advantages"] * scale.unsqueeze(-1)
    return data


def check_config(cfg: Any) -> None:
    """Raises ConfigError where a setting of SkyRL's gives a session that is split into traces another gradient, or has
    no effect here."""
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    correction = algorithm.off_policy_correction
    rows = "goes by rows, so that sessions of several traces would count more"
    sampled_at = generator.sampling_params.temperature
    requirements = {
        "generator.step_wise_trajectories=true": (
            not generator.step_wise_trajectories,
            "lets a session have several traces",
        ),
        f"trainer.algorithm.temperature={sampled_at:g}": (
            algorithm.temperature not in (None, sampled_at),
            "is not generator.sampling_params.temperature, so log-probabilities would be of two kinds",
        ),
        "trainer.algorithm.use_kl_loss=false": (algorithm.use_kl_loss and algorithm.kl_loss_coef != 0, rows),
        "trainer.algorithm.use_kl_in_reward=false": (algorithm.use_kl_in_reward, "sees a session's last trace alone"),
        "trainer.algorithm.use_entropy_loss=false": (algorithm.use_entropy_loss, rows),
        "trainer.algorithm.advantage_batch_normalize=false": (algorithm.advantage_batch_normalize, rows),
        "trainer.algorithm.policy_loss_type=regular": (
            algorithm.policy_loss_type in ("gspo", "clip_cov", "kl_cov"),
            rows,
        ),
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token": (correction.tis_ratio_type == "sequence", rows),
        "trainer.algorithm.off_policy_correction.sequence_mask_metric=null": (
            correction.sequence_mask_metric is not None,
            rows,
        ),
        "generator.apply_overlong_filtering=false": (
            generator.apply_overlong_filtering,
            "is the task's `on_length` with Polar",
        ),
        "generator.zero_reward_on_non_stop=false": (
            generator.zero_reward_on_non_stop,
            "is the task's `on_length` with Polar",
        ),
    }
    for setting, (is_wrong, why) in requirements.items():
        if is_wrong:
            raise ConfigError(f"Set {setting}: {setting.partition('=')[0]} {why}.")


# SkyRL's entry point

_ENTRYPOINT_OPTION = "trainer.override_entrypoint="  # SkyRL's command reads it, and its configuration does not know it


def make_experiment(source: BridgeSettings) -> type[Any]:
    """SkyRL's experiment (`BasePPOExp`) with Polar's generator and a trainer that Polar follows."""
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
    from skyrl.train.trainer import RayPPOTrainer

    class Experiment(BasePPOExp):
        def get_generator(self, *_: Any) -> Generator:
            return Generator(source)

        def get_trainer(self, cfg: Any, **parts: Any) -> Any:
            base = FullyAsyncRayPPOTrainer if cfg.trainer.fully_async.enabled else RayPPOTrainer
            return make_polar_trainer(base)(cfg=cfg, **parts)

    return Experiment


def _run_experiment(cfg: Any, source: BridgeSettings) -> None:
    make_experiment(source)(cfg).run()


def main() -> None:
    """What `trainer.override_entrypoint=polar.bridges.skyrl` calls. Raises ConfigError before anything is started."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import initialize_ray, validate_cfg

    cfg = SkyRLTrainConfig.from_cli_overrides([arg for arg in sys.argv[1:] if not arg.startswith(_ENTRYPOINT_OPTION)])
    validate_cfg(cfg)
    check_config(cfg)
    source = load_settings()
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(_run_experiment).remote(cfg, source))
