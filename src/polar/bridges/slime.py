"""slime and Miles: their rollout function, and rewards that are normalised by session.

    --rollout-function-path polar.bridges.slime.generate_rollout
    --custom-reward-post-process-path polar.bridges.slime.normalize_rewards
    --custom-config-path polar.yaml       # polar: {server: "http://...", tasks: [tasks/], name: run-7, max_lag: 1}
    --prompt-data tasks.jsonl --input-key task_id
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --use-tis                             # where max_lag is not 0: corrects for the policy that sampled

A row of the data names a task, in `metadata["task_id"]`, its label or its prompt. A group is a prompt, a session one of
its samples, and a trace a `Sample`; traces of a session share a `rollout_id`.

Who divides: the trainer, by the mask sum of the whole rollout, so a session counts once however many traces it has;
`weight` is not applied again. Miles up to 0.0.2 knows no `rollout_id`, and takes the mean over samples. There
`normalize_rewards` puts a trace's share of its session, and the number of rows, into its advantage, which comes to the
same (for the policy's loss: terms of KL and entropy stay means over samples). It has to see all rows in one step for
that, so --use-dynamic-global-batch-size must be set; without it sessions of several traces are refused.

Asynchronous: up to `max_lag` rollouts' worth of groups are on their way while one is returned. A session whose oldest
token is older than `max_lag` rollouts is left out, as is one that has no reward or nothing to train. Where all sessions
of a group are, the group is taken anew, twice at most. What is missing of a group is stood in for by samples that train
nothing (`remove_sample`): these trainers count rollouts.

Versions are rollouts: the engines' weights when `generate_rollout(rollout_id)` is called are version `rollout_id`.
Generation stands still from its return until the next call, since that is when these trainers load weights. Groups on
their way are kept in the data source's metadata, and so in its checkpoint: a run that resumes from it gets the same.

The recorded log-probabilities must be of --rollout-temperature, as the trainer's are; else it says so and ends. Engines
are not probed, since no model is where a rollout function runs: `train_rollout_logprob_abs_diff` tells the same.

With --use-rollout-routing-replay samples have `rollout_routed_experts`, each token's from the call that computed it
first.

What is left out: rewards of single turns (advantages are one number a sample here), and token texts, which don't train.
"""

import asyncio
import atexit
import copy
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from statistics import fmean
from typing import Any

import aiohttp
import numpy as np
from msgspec import Struct

from polar.bridges.advantages import compute_session_advantages
from polar.bridges.bridge import BlockingBridge, TrainerBridge
from polar.bridges.rollouts import (
    SessionGroup,
    build_sampling_overrides,
    check_temperature,
    gather_or_cancel,
    require_experts,
)
from polar.errors import ConfigError, PolarError
from polar.export.base import SessionItem, list_version_runs
from polar.export.slime import SlimeExporter

_MAX_GROUP_ATTEMPTS = 3  # times that a group is run, before another takes its place
_GROUP_RELATIVE_ESTIMATORS = frozenset(("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"))  # to the group's mean
_SCALED_ESTIMATORS = _GROUP_RELATIVE_ESTIMATORS - {"reinforce_plus_plus_baseline"}
_IN_FLIGHT_METADATA_KEY = "polar_on_their_way"  # among the data source's metadata
_UNSUPPORTED_OPTIONS = {
    "custom_generate_function_path": "the harness generates",
    "custom_rm_path": "sessions are graded by their task's evaluator",
    "group_rm": "sessions are graded by their task's evaluator",
    "partial_rollout": "set max_lag in the bridge's settings instead",
    "rollout_sample_filter_path": "use --dynamic-sampling-filter-path",
    "rollout_all_samples_process_path": "there is no call for it",
}


class NothingToTrainError(PolarError):
    """Too many groups had no session that can be trained on."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The function for `--rollout-function-path`, also used for evaluation. Raises ConfigError, ClientError,
    NothingToTrainError."""
    run = _get_run(args)
    types = import_module(f"{_find_trainer_package()}.rollout.base_types")
    if evaluation:
        data, metrics = run.bridge.run(run.evaluate(rollout_id))
        return types.RolloutFnEvalOutput(data=data, metrics=metrics)
    samples, metrics = run.bridge.run(run.collect_rollout(rollout_id, data_source))
    return types.RolloutFnTrainOutput(samples=samples, metrics=metrics)


def normalize_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """The function for `--custom-reward-post-process-path`: raw rewards, and rewards that become advantages. A group's
    mean and deviation are over its sessions, however many samples each has."""
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    rewards = [0.0 if sample.remove_sample else reward for sample, reward in zip(samples, raw, strict=True)]
    if args.advantage_estimator in _GROUP_RELATIVE_ESTIMATORS and args.rewards_normalization:
        scale = args.advantage_estimator in _SCALED_ESTIMATORS and args.grpo_std_normalization
        groups: dict[Any, dict[str, float]] = {}
        for sample, reward in zip(samples, raw, strict=True):
            if not sample.remove_sample:
                groups.setdefault(sample.group_index, {})[get_session_id(sample)] = reward
        advantages = {
            session: advantage
            for group in groups.values()
            for session, advantage in zip(
                group, compute_session_advantages(list(group.values()), scale=scale), strict=True
            )
        }
        rewards = [0.0 if sample.remove_sample else advantages[get_session_id(sample)] for sample in samples]
    factors = compute_session_shares(args, samples)
    return raw, [reward * factor for reward, factor in zip(rewards, factors, strict=True)]


def close() -> None:
    """Closes this process's bridge. Groups in flight keep running and are returned when requested again."""
    global _current_run
    with _lock:
        run, _current_run = _current_run, None
    if run is not None:
        run.close()


class _InFlightGroup(Struct):
    """A group in flight."""

    task: str
    samples: list[Any]  # the trainer's samples, one for each session
    attempt: int
    group: asyncio.Future[SessionGroup]


class SlimeBridge(TrainerBridge):
    """The groups in flight of one training run. Its coroutines run in the bridge's loop."""

    def __init__(self, args: Any) -> None:
        for name, why in _UNSUPPORTED_OPTIONS.items():
            if getattr(args, name, None):
                raise ConfigError(f"--{name.replace('_', '-')} can't be used with Polar's rollouts: {why}.")
        relative = args.advantage_estimator in _GROUP_RELATIVE_ESTIMATORS and args.rewards_normalization
        if relative and not args.custom_reward_post_process_path:
            raise ConfigError(
                "Rewards would be normalised by position: set --custom-reward-post-process-path "
                "polar.bridges.slime.normalize_rewards."
            )
        self.args = args
        super().__init__(BlockingBridge(getattr(args, "polar", None)))
        self.lag = self.rollouts.settings.max_lag
        self.in_flight: list[_InFlightGroup] = []
        self.newest_rollout_id: int | None = None  # the last requested rollout

    async def collect_rollout(self, rollout_id: int, source: Any) -> tuple[list[list[list[Any]]], dict[str, float]]:
        """Collects a rollout's samples, by group and session, and its metrics."""
        group_count = int(self.args.rollout_batch_size)
        await self._attach_engines(rollout_id)
        if self.newest_rollout_id is None:
            self._restore_in_flight(source)
        self.newest_rollout_id = rollout_id
        kept: list[tuple[_InFlightGroup, list[list[Any]]]] = []
        counts: Counter[str] = Counter()
        while len(kept) < group_count:
            self._fill_in_flight(source, group_count * (1 + (self.lag or 0)) - len(kept))
            for flight in await self._wait_for_groups(group_count - len(kept)):
                items, left_out = self._drop_stale_sessions(flight.group.result(), rollout_id)
                check_temperature(items, self.args.rollout_temperature)
                counts.update({f"polar/left_out/{reason}": count for reason, count in left_out.items()})
                if not items:
                    self._retry_group(flight, counts)
                elif self._passes_filter(group_samples := build_samples(self.args, flight.samples, items)):
                    kept.append((flight, group_samples))
                    counts["polar/sessions"] += len(items)
                else:
                    counts["polar/groups_filtered"] += 1
        self._save_in_flight(source)
        await self.engines.freeze("drain")
        kept.sort(key=lambda flight_and_samples: int(flight_and_samples[0].samples[0].index))
        samples = [group_samples for _, group_samples in kept]
        return pad_to_ranks(self.args, samples), {name: float(count) for name, count in counts.items()}

    async def evaluate(self, rollout_id: int) -> tuple[dict[str, dict[str, list[Any]]], dict[str, float]]:
        """Evaluates the datasets of `--eval-prompt-data`; each session counts once, as its last sample. Sessions
        without a reward are left out and counted. Keys contain the weights' version, because a `rollout_id` may occur
        twice, before and after it was trained on."""
        version = rollout_id if self.newest_rollout_id is None else self.newest_rollout_id + 1
        await self._attach_engines(version)
        data: dict[str, dict[str, list[Any]]] = {}
        counts: Counter[str] = Counter()
        for dataset in self.args.eval_datasets or []:
            templates = list(_load_eval_samples(dataset))
            tasks = [self._find_task_id(sample) for sample in templates]
            sampling = build_sampling_overrides(
                temperature=dataset.temperature, top_p=dataset.top_p, top_k=dataset.top_k
            )
            groups = await gather_or_cancel(
                self.rollouts.run_group(
                    task,
                    f"eval-{version}/{dataset.name}.{index}",
                    samples=dataset.n_samples_per_eval_prompt,
                    sampling=sampling,
                )
                for index, task in enumerate(tasks)
            )
            last = []
            for sample, group in zip(templates, groups, strict=True):
                session_templates = [sample] * len(group.items)
                last += [
                    session_samples[-1]
                    for session_samples in (
                        build_samples(self.args, session_templates, group.items) if session_templates else []
                    )
                ]
                counts.update(
                    {f"eval/{dataset.name}/left_out/{reason}": count for reason, count in group.left_out.items()}
                )
            if not last:
                raise NothingToTrainError(f"No session of the set {dataset.name!r} has a reward: {dict(counts)}.")
            truncated = [sample.status.value == "truncated" for sample in last]
            rewards = [sample.metadata["reward"] for sample in last]
            data[dataset.name] = {"rewards": rewards, "truncated": truncated, "samples": last}
        return data, {name: float(count) for name, count in counts.items()}

    async def _attach_engines(self, version: int) -> None:
        """Attaches the trainer's engines with their current weights and resumes generation."""
        if getattr(self.args, "sglang_router_ip", None):
            await self.engines.attach(await _list_engine_urls(self.args), version)
        else:
            await self.engines.finish_update(version)

    def _fill_in_flight(self, source: Any, group_count: int) -> None:
        """Launches groups until `group_count` are in flight."""
        while len(self.in_flight) < group_count:
            (samples,) = source.get_samples(1)
            if any(sample.group_index is None or sample.index is None for sample in samples):
                raise ConfigError(
                    "The data source numbers neither groups nor samples: sessions are found by these numbers."
                )
            self._launch_group(self._find_task_id(samples[0]), samples)

    def _launch_group(self, task: str, samples: list[Any], attempt: int = 0) -> None:
        key = str(samples[0].group_index) + (f".{attempt}" if attempt else "")
        args = self.args
        sampling = build_sampling_overrides(
            temperature=args.rollout_temperature, top_p=args.rollout_top_p, top_k=args.rollout_top_k
        )
        work = self.rollouts.run_group(task, key, samples=len(samples), sampling=sampling)
        self.in_flight.append(_InFlightGroup(task, samples, attempt, asyncio.ensure_future(work)))

    async def _wait_for_groups(self, max_groups: int) -> list[_InFlightGroup]:
        """Waits for at least one finished group and removes up to `max_groups` from those in flight."""
        await asyncio.wait([flight.group for flight in self.in_flight], return_when=asyncio.FIRST_COMPLETED)
        finished = [flight for flight in self.in_flight if flight.group.done()][:max_groups]
        for flight in finished:
            self.in_flight.remove(flight)
        return finished

    def _drop_stale_sessions(self, group: SessionGroup, rollout_id: int) -> tuple[list[SessionItem], Counter[str]]:
        """The group's sessions that are not stale by now, and the counts of those left out."""
        left_out = Counter(group.left_out)
        items = []
        for item in group.items:
            oldest_version = min(
                (version for trace in item.trajectory.traces for version in list_version_runs(trace)), default=None
            )
            if self.lag is not None and oldest_version is not None and rollout_id - oldest_version > self.lag:
                left_out["stale"] += 1
            else:
                items.append(item)
        return items, left_out

    def _retry_group(self, flight: _InFlightGroup, counts: Counter[str]) -> None:
        if flight.attempt + 1 < _MAX_GROUP_ATTEMPTS:
            counts["polar/groups_again"] += 1
            self._launch_group(flight.task, flight.samples, flight.attempt + 1)
            return
        counts["polar/groups_given_up"] += 1
        if counts["polar/groups_given_up"] >= max(2, self.args.rollout_batch_size):
            reasons = {name.rpartition("/")[2]: count for name, count in counts.items() if "left_out" in name}
            raise NothingToTrainError(
                f"{counts['polar/groups_given_up']} groups of this rollout had no session to train on, though each was "
                f"asked for {_MAX_GROUP_ATTEMPTS} times ({reasons}): look at their sessions (`polar show`)."
            )

    def _passes_filter(self, sessions: list[list[Any]]) -> bool:
        """Applies the filter of --dynamic-sampling-filter-path."""
        path = getattr(self.args, "dynamic_sampling_filter_path", None)
        if path is None:
            return True
        module, _, name = path.rpartition(".")
        decision = getattr(import_module(module), name)(
            self.args, [sample for session in sessions for sample in session]
        )
        return bool(getattr(decision, "keep", decision))

    def _find_task_id(self, sample: Any) -> str:
        return find_task_id(sample, self.rollouts.tasks)

    def _save_in_flight(self, source: Any) -> None:
        if hasattr(source, "update_metadata"):
            flights = [[flight.attempt, [sample.to_dict() for sample in flight.samples]] for flight in self.in_flight]
            source.update_metadata({_IN_FLIGHT_METADATA_KEY: flights})

    def _restore_in_flight(self, source: Any) -> None:
        """Relaunches groups that an earlier process had in flight when its data source was saved."""
        if hasattr(source, "get_metadata"):
            sample_class = import_module(f"{_find_trainer_package()}.utils.types").Sample
            for attempt, fields in source.get_metadata().get(_IN_FLIGHT_METADATA_KEY, []):
                samples = [sample_class.from_dict(sample_fields) for sample_fields in fields]
                self._launch_group(self._find_task_id(samples[0]), samples, attempt)


def find_task_id(sample: Any, tasks: Mapping[str, Any]) -> str:
    """The task that a sample of the trainer's data refers to. Raises ConfigError."""
    candidates = [(sample.metadata or {}).get("task_id"), sample.label, sample.prompt]
    for name in candidates:
        if isinstance(name, str) and name in tasks:
            return name
    examples = ", ".join(sorted(tasks)[:3])
    raise ConfigError(
        f"A row of the trainer's data names no task: neither metadata['task_id'], nor its label, nor its prompt is one "
        f"({candidates}); tasks are {examples}, for example."
    )


def _load_eval_samples(dataset: Any) -> Iterator[Any]:
    """Reads the samples of an evaluation dataset."""
    package = _find_trainer_package()
    read_file = import_module(f"{package}.utils.data").read_file
    sample_class = import_module(f"{package}.utils.types").Sample
    for index, row in enumerate(read_file(dataset.path)):
        label = row.get(dataset.label_key) if dataset.label_key else None
        metadata = row.get(dataset.metadata_key) if dataset.metadata_key else None
        yield sample_class(index=index, prompt=row.get(dataset.input_key, ""), label=label, metadata=metadata or {})


# Sessions as `Sample`s: the exporter's rows, in the trainer's samples


def build_samples(args: Any, templates: Sequence[Any], items: Sequence[SessionItem]) -> list[list[Any]]:
    """Builds samples by session. `templates` are the trainer's samples, one for each requested session. Missing
    sessions are filled with samples that train nothing, since trainers count rollouts."""
    sessions = [_build_session_samples(args, template, item) for template, item in zip(templates, items, strict=False)]
    shortest = min((sample for session in sessions for sample in session), key=lambda sample: len(sample.tokens))
    mean_reward = fmean(session[0].metadata["reward"] for session in sessions)  # keeps the group's logged mean
    for template in templates[len(items) :]:
        absent = _copy_without_loss(shortest)
        absent.index = absent.rollout_id = template.index
        absent.reward = _format_reward(args, mean_reward)
        absent.status = type(absent).Status("failed")
        absent.metadata = {**(template.metadata or {}), "session_id": f"absent-{template.index}", "reward": mean_reward}
        sessions.append([absent])
    return sessions


def _build_session_samples(args: Any, template: Any, item: SessionItem) -> list[Any]:
    samples = [_build_sample(args, template, row) for row in SlimeExporter().build_lines(item)]
    if getattr(args, "use_rollout_routing_replay", False):
        for sample, trace in zip(samples, item.trajectory.traces, strict=True):
            sample.rollout_routed_experts = require_experts(trace).astype(np.int32)
    return samples


def pad_to_ranks(args: Any, groups: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """Adds rows that train nothing until the rows divide among the ranks. Trainers without rollout ids would drop the
    remainder."""
    rows = [sample for group in groups for session in group for sample in session]
    if divides_by_rollout(rows[0]):
        return groups
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
    shortest = min(rows, key=lambda row: len(row.tokens))
    groups[-1][-1] += [_copy_without_loss(shortest) for _ in range(-len(rows) % ranks)]
    return groups


def divides_by_rollout(sample: Any) -> bool:
    """Whether the trainer divides by the mask sum of whole rollouts: then samples have a rollout id."""
    return "rollout_id" in type(sample).__dataclass_fields__


def get_session_id(sample: Any) -> str:
    return str(sample.metadata["session_id"])


def compute_session_shares(args: Any, samples: Sequence[Any]) -> list[float]:
    """Factors that make each session count once if the trainer averages over samples: a sample's share of its session's
    tokens, times the samples per session. All 1 if the trainer divides by rollout or by tokens."""
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
    samples_per_session = len(samples) / len(totals)
    return [
        samples_per_session * _count_trained_tokens(sample) / max(totals[get_session_id(sample)], 1)
        for sample in samples
    ]


def _count_trained_tokens(sample: Any) -> int:
    return 0 if sample.remove_sample else sum(sample.loss_mask)


def _build_sample(args: Any, template: Any, row: dict[str, Any]) -> Any:
    sample_class = type(template)
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
    if str(sample_class.__dataclass_fields__["weight_versions"].type).removeprefix("typing.") not in (
        "list[str]",
        "List[str]",
    ):
        del fields["weight_versions"]  # of another type in this trainer; each token's are in the metadata
    return sample_class.from_dict(fields)


def _format_reward(args: Any, value: float) -> float | dict[str, float]:
    return {args.reward_key: value} if args.reward_key else value


def _copy_without_loss(sample: Any) -> Any:
    absent = copy.copy(sample)
    absent.loss_mask = [0] * sample.response_length
    absent.remove_sample = True
    return absent


# The process


async def _list_engine_urls(args: Any) -> list[str]:
    """The addresses of the engines behind the trainer's router, since Polar itself keeps a session on one engine. With
    separate prefill and decode engines, the address of the router."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    async with aiohttp.ClientSession() as http:
        try:
            async with http.get(f"{router}/workers") as response:
                if response.status != 404:
                    response.raise_for_status()
                    workers = (await response.json())["workers"]
                    are_regular = all(worker.get("worker_type", "regular") == "regular" for worker in workers)
                    return [worker["url"] for worker in workers] if are_regular else [router]
            async with http.get(f"{router}/list_workers") as response:  # routers up to 0.2.1
                response.raise_for_status()
                return list((await response.json())["urls"])
        except aiohttp.ClientError as error:
            raise ConfigError(f"The trainer's router at {router} does not list its engines: {error}.") from error


def _find_trainer_package() -> str:
    """Which trainer runs in this process."""
    for name in ("slime", "miles"):
        if f"{name}.utils.types" in sys.modules:
            return name
    raise ConfigError("Neither slime nor Miles has called: this is their --rollout-function-path.")


def _get_run(args: Any) -> SlimeBridge:
    global _current_run
    with _lock:
        if _current_run is None:
            _current_run = SlimeBridge(args)
        return _current_run


_lock = threading.Lock()
_current_run: SlimeBridge | None = None
"""One per process: the trainer calls its rollout function by name, which keeps no state between calls."""

atexit.register(close)


normalise = normalize_rewards  # its name until 0.2, which launch scripts may still pass
