"""TRL's own loops over Polar's sessions. Runs in the trainers' environment: python trl_loops.py WHAT GIVEN.json

GIVEN has the bridge's `settings`, the `engine` of the service, the folder `model`, `even`, tasks of which about every
second session earns something, and `output`, a folder that may be written to. Whatever does not hold is an
AssertionError.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from polar.bridges.bridge import BlockingBridge
from polar.bridges.rollouts import SessionGroup
from polar.bridges.trl import RolloutFunc, async_grpo_trainer, grpo_trainer, recorded_reward
from polar.config import SamplingOverrides
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.export.trl import TrlExporter, to_sample
from polar.records.trajectory import Trace

Given = dict[str, Any]
GROUP = 4
AT_ONE = SamplingOverrides(temperature=1.0)


def tokenizer_of(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def by_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs from session to session, whatever they earned."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def settings(given: Given, **more: Any) -> GRPOConfig:
    wanted: dict[str, Any] = {
        "output_dir": given["output"],
        "num_generations": GROUP,
        "per_device_train_batch_size": 2 * GROUP,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "disable_tqdm": True,
    }
    return GRPOConfig(**wanted | more)


def by_name(session_id: list[str], **_: Any) -> list[float]:
    """Of nothing but the session, so that it is the same however that is cut."""
    return [sum(map(ord, name)) % 5 / 5 for name in session_id]


def trainer_of(given: Given, tasks: list[str], args: GRPOConfig, *rewards: Any, **more: Any) -> Any:
    return grpo_trainer(
        given["settings"],
        model=AutoModelForCausalLM.from_pretrained(given["model"], dtype="float32"),
        processing_class=tokenizer_of(given["model"]),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": task} for task in tasks]),
        reward_funcs=list(rewards),
        **more,
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


# GRPOTrainer's loop


class Row(msgspec.Struct, frozen=True):
    """What a loss makes of a row; compared as a whole."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float


def seen(inputs: dict[str, torch.Tensor]) -> list[Row]:
    """The rows of a loss's inputs that train."""
    rows = []
    for index in range(len(inputs["completion_ids"])):
        there = inputs["completion_mask"][index].bool()
        mask = tuple(inputs["tool_mask"][index][there].tolist())
        if any(mask):
            rows.append(
                Row(
                    tuple(inputs["prompt_ids"][index][inputs["prompt_mask"][index].bool()].tolist()),
                    tuple(inputs["completion_ids"][index][there].tolist()),
                    mask,
                    tuple(inputs["old_per_token_logps"][index][there].tolist()),
                    round(float(inputs["advantages"][index]), 4),
                )
            )
    return rows


def recorded(group: SessionGroup) -> list[Row]:
    """The same, of what the service has."""
    firsts = [item.trajectory.traces[0] for item in group.items]
    extra = by_tokens([trace.response_ids.tolist() for trace in firsts])
    earned = np.array([reward + more for reward, more in zip(group.rewards, extra, strict=True)], np.float32)
    advantages = (earned - earned.mean()) / (earned.std(ddof=1) + 1e-4)
    return [
        Row(
            tuple(trace.prompt_ids.tolist()),
            tuple(trace.response_ids.tolist()),
            tuple(trace.loss_mask.tolist()),
            tuple([] if trace.logprobs is None else trace.logprobs.tolist()),
            round(float(advantage), 4),
        )
        for item, advantage in zip(group.items, advantages, strict=True)
        for trace in item.trajectory.traces
    ]


def grpo(given: Given) -> None:
    """Two steps of two groups, one of them of sessions with three traces; the engine gets the weights of each."""
    tasks = ["plain-0", "split-0", "plain-1", "split-1"]
    args = settings(given, max_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=GROUP)
    trainer = trainer_of(given, tasks, args, recorded_reward, by_tokens, engine=given["engine"])
    before = weights(trainer.model)
    losses: list[list[Row]] = []
    compute = trainer.compute_loss

    def looked_at(model: Any, inputs: Any, **more: Any) -> Any:
        losses.append(seen(inputs))
        return compute(model, inputs, **more)

    trainer.compute_loss = looked_at
    trainer.train()
    assert any(not torch.equal(before[name], after) for name, after in weights(trainer.model).items())
    assert len(losses) == 4  # two small batches a step
    with BlockingBridge(given["settings"]) as bridge:
        for step, named in enumerate((tasks[:2], tasks[2:])):
            groups = [
                bridge.run(bridge.rollouts.run_group(task, f"train-{step}.1.{place}", samples=GROUP, sampling=AT_ONE))
                for place, task in enumerate(named)
            ]
            expected = sorted(repr(row) for group in groups for row in recorded(group))
            found = sorted(repr(row) for rows in losses[2 * step : 2 * step + 2] for row in rows)
            assert found == expected, (found, expected)
            assert len(expected) == GROUP * (1 + 3)
            sampled = {
                version
                for group in groups
                for item in group.items
                for trace in item.trajectory.traces
                for version in trace.policy_versions[trace.loss_mask == 1].tolist()
            }
            assert sampled == {step}, sampled  # what each step learns from was sampled with the weights before it
        assert {replica["version"] for replica in bridge.run(bridge.rollouts.client.policy())["replicas"]} == {2}


# Splitting


def parts_of(trace: Trace) -> list[Trace]:
    """Each of its calls as a trace of its own: the same tokens, behind the same context."""
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    start = len(trace.prompt_ids)
    made = []
    for span in trace.spans:
        cut = slice(span.start, span.stop)
        made.append(
            msgspec.structs.replace(
                trace,
                prompt_ids=ids[: start + span.start],
                response_ids=trace.response_ids[cut],
                loss_mask=trace.loss_mask[cut],
                logprobs=None if trace.logprobs is None else trace.logprobs[cut],
                policy_versions=trace.policy_versions[cut],
                exchange_ids=[span.exchange_id],
                spans=[msgspec.structs.replace(span, start=0, stop=span.stop - span.start)],
            )
        )
    return made


def split_item(item: SessionItem) -> SessionItem:
    traces = [part for trace in item.trajectory.traces for part in parts_of(trace)]
    return msgspec.structs.replace(item, trajectory=msgspec.structs.replace(item.trajectory, traces=traces))


def split_group(group: SessionGroup) -> SessionGroup:
    """Every second session, so that what counts rows would tell."""
    items = [item if place % 2 else split_item(item) for place, item in enumerate(group.items)]
    return msgspec.structs.replace(group, items=items)


def one_step(given: Given, **more: Any) -> GRPOConfig:
    """That moves the weights by the gradient."""
    return settings(
        given, max_steps=1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, **more
    )


def trained(trainer: Any) -> dict[str, torch.Tensor]:
    """How it moved the weights."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    before = weights(model)
    trainer.train()
    return {name: after - before[name] for name, after in weights(model).items()}


def split(given: Given) -> None:
    """A step from the same sessions, whole and some with a trace for each call, moves the weights alike."""
    moved = []
    for cut in (False, True):
        args = one_step(given, gradient_accumulation_steps=2, per_device_train_batch_size=GROUP)
        trainer = trainer_of(given, ["plain-2", "plain-3"], args, by_name)
        rollouts = trainer.rollout_func.rollouts
        ask = rollouts.run_group
        counts: list[int] = []

        async def group(
            *names: Any, ask: Any = ask, cut: bool = cut, counts: list[int] = counts, **more: Any
        ) -> SessionGroup:
            found = await ask(*names, **more)
            found = split_group(found) if cut else found
            counts.extend(len(item.trajectory.traces) for item in found.items)
            return found

        rollouts.run_group = group
        moved.append(trained(trainer))
        assert set(counts) == ({1, 2} if cut else {1}), counts
    whole, parts = moved
    assert max(float(change.abs().max()) for change in whole.values()) > 1e-3
    for name, change in whole.items():
        torch.testing.assert_close(parts[name], change, rtol=1e-3, atol=1e-6)


def processes(given: Given) -> None:
    """A step in one process or several, which share a group and have unequal numbers of traces."""
    args = one_step(given, per_device_train_batch_size=given["rows"])
    moved = trained(trainer_of(given, ["split-2", "split-3", "plain-2"], args, by_name))
    if args.process_index == 0:
        torch.save(moved, given["moved"])


def failure(work: Callable[[], Any]) -> str | None:
    try:
        work()
    except ConfigError as error:
        return str(error)
    return None


def refused(given: Given) -> None:
    """What would make a session's weight depend on how it was split, and a trainer that takes one row a session."""
    for name, value in (
        ("loss_type", "grpo"),
        ("importance_sampling_level", "sequence"),
        ("mask_truncated_completions", True),
    ):
        args = settings(given, **{name: value})
        said = failure(partial(trainer_of, given, ["plain-0"], args, recorded_reward))
        assert said is not None, name
        assert name in said, said
    for task, expected in (("plain-0", None), ("split-0", "several traces")):
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given["model"], dtype="float32"),
            processing_class=tokenizer_of(given["model"]),
            args=settings(given, max_steps=1, per_device_train_batch_size=GROUP),
            train_dataset=Dataset.from_list([{"prompt": task}]),
            reward_funcs=recorded_reward,
            rollout_func=RolloutFunc(given["settings"]),
        )
        said = failure(trainer.train)
        assert said is None if expected is None else expected in str(said), said


# The asynchronous trainer


class Attention:
    """For its one kernel, which wants a GPU: the same in torch."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        *_: Any,
        softmax_scale: float,
        **__: Any,
    ) -> torch.Tensor:
        shared = query.shape[1] // key.shape[1]
        made = []
        for part in range(len(query_ends) - 1):
            asks = query[query_ends[part] : query_ends[part + 1]]
            known = slice(int(key_ends[part]), int(key_ends[part + 1]))
            keys, values = (one[known].repeat_interleave(shared, 1) for one in (key, value))
            scores = torch.einsum("qhd,khd->hqk", asks, keys) * softmax_scale
            later = torch.ones(scores.shape[1:]).triu(1 + len(keys) - len(asks)).bool()
            made.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values))
        return torch.cat(made)


def gradient(trainer: Any, samples: list[Any]) -> torch.Tensor:
    """Of its loss over one small batch."""
    from trl.experimental.async_grpo.packing import TreeRow

    row = TreeRow()
    for sample in samples:
        row.add({name: getattr(sample, name) for name in type(sample).__slots__})
    trainer.model.zero_grad()
    trainer.compute_loss(trainer.model, trainer.get_train_dataloader().collate_fn([[row]])).backward()
    return torch.cat([weight.grad.flatten() for weight in trainer.model.parameters() if weight.grad is not None])


def asynchronous(given: Given) -> None:
    """Three steps over tree rows, while sessions go on; and whole sessions against split ones."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, packing
    from trl.experimental.async_grpo import async_grpo_trainer as module

    packing._flash_attn = Attention  # type: ignore[assignment]
    module.get_peak_flops_per_device = lambda *_: None  # it asks the GPU for its name
    trainer = async_grpo_trainer(
        given["settings"],
        engine=given["engine"],
        model=given["model"],
        processing_class=tokenizer_of(given["model"]),
        train_dataset=Dataset.from_list([{"prompt": task} for task in given["even"]]),
        args=AsyncGRPOConfig(
            output_dir=given["output"],
            max_steps=3,
            num_generations=GROUP,
            per_device_train_batch_size=6,
            token_budget=0,
            max_staleness=4,
            max_inflight_tasks=2 * GROUP,
            learning_rate=1e-3,
            dtype="float32",
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
    )
    before = weights(trainer.model)
    taken: list[Any] = []
    worker = trainer.rollout_worker
    get = worker.rollout_buffer.get

    def looked_at(*given: Any, **more: Any) -> Any:
        taken.append(get(*given, **more))
        return taken[-1]

    worker.rollout_buffer.get = looked_at
    trainer.train()
    assert any(not torch.equal(before[name], after) for name, after in weights(trainer.model).items())
    assert len(taken) >= 18
    with BlockingBridge(given["settings"]) as bridge:
        newest = {replica["version"] for replica in bridge.run(bridge.rollouts.client.policy())["replicas"]}
        assert newest == {3}, newest
        groups = {
            number: bridge.run(
                bridge.rollouts.run_group(
                    given["even"][number % len(given["even"])], worker.key(number), samples=GROUP, sampling=AT_ONE
                )
            )
            for number in {sample.group_id for sample in taken}
        }
    for sample in taken:
        assert described(sample) in [described(one) for one in samples_of(groups[sample.group_id], sample.group_id)], (
            sample
        )
    several = [group for group in groups.values() if len(set(group.rewards)) > 1]
    assert several, [group.rewards for group in groups.values()]
    for group in several:
        whole = gradient(trainer, samples_of(group, 0))
        parts = gradient(trainer, samples_of(split_group(group), 0))
        assert float(whole.abs().max()) > 1e-4
        torch.testing.assert_close(parts, whole, rtol=1e-3, atol=1e-6)


def samples_of(group: SessionGroup, number: int) -> list[Any]:
    earned = np.array(group.rewards)
    advantages = (earned - earned.mean()) / (earned.std() + 1e-8)
    return [
        to_sample(row, advantage=float(advantage), model_version=0, group_id=number)
        for item, advantage in zip(group.items, advantages, strict=True)
        for row in TrlExporter().build_lines(item)
    ]


def described(sample: Any) -> tuple[Any, ...]:
    arrays = (sample.input_ids, sample.completion_mask, sample.old_log_probs)
    return (*(tuple(array.tolist()) for array in arrays), round(sample.advantage, 5))


def main() -> None:
    what, given = sys.argv[1:]
    globals()[what](json.loads(Path(given).read_text()))


if __name__ == "__main__":
    main()
