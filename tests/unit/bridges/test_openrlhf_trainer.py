"""The trainer's side of OpenRLHF's bridge, without OpenRLHF; tests/trainers/test_openrlhf.py has its own loop."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polar.bridges.openrlhf import trainer as openrlhf_trainer
from polar.bridges.openrlhf.agent import GroupLabel
from polar.bridges.openrlhf.trainer import (
    check_arguments,
    drop_prompts_without_reward,
    fill_optimizer_step,
    make_experience_maker,
    make_samples_generator,
    neutralize_missing_sessions,
)
from polar.errors import ConfigError
from tests.unit.bridges.pretending import pretend


@dataclass
class Row:
    sequences: Any
    action_mask: Any
    info: dict[str, Any] = field(default_factory=dict)


def row(length: int, *trains: int) -> Row:
    mask = torch.zeros(1, length - 1)
    mask[:, list(trains)] = 1
    return Row(torch.ones(1, length), mask)


def test_rows_of_a_step() -> None:
    """As many as it takes, with each token trained once, in its own session; the shortest are given twice."""
    rows = [(0, row(9, 3, 4, 5)), (1, row(4, 0, 2)), (1, row(3, 1))]
    found = fill_optimizer_step(rows, 5)
    assert [number for number, _ in found] == [0, 0, 1, 1, 1]
    assert [one.action_mask.nonzero()[:, 1].tolist() for _, one in found] == [[3], [4, 5], [0], [2], [1]]
    assert fill_optimizer_step(rows, 3) == rows


def test_more_traces_or_fewer_tokens_than_a_step_takes() -> None:
    with pytest.raises(ConfigError, match="batch_size to 2 at least"):
        fill_optimizer_step([(0, row(3, 1)), (0, row(3, 1))], 1)
    with pytest.raises(ConfigError, match=r"fewer than --train.batch_size 4"):
        fill_optimizer_step([(0, row(3, 0, 1))], 4)


def arguments(**changes: Any) -> Any:
    known: dict[str, dict[str, Any]] = {
        "actor": {"loss_agg_mode": "token-mean", "policy_loss_type": "ppo"},
        "advantage": {"is_correction_level": "token", "estimator": "group_norm"},
        "train": {"dynamic_batch_enable": False, "batch_size": 16},
        "reward": {"overlong_buffer_len": None, "stop_properly_penalty_coef": None},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 8},
    }
    for name, value in changes.items():
        table, _, key = name.partition("__")
        known[table][key] = value
    made = {name: SimpleNamespace(**values) for name, values in known.items()}
    return SimpleNamespace(algo=SimpleNamespace(advantage=made.pop("advantage")), **made)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("actor__loss_agg_mode", "seq-mean-token-mean"),
        ("actor__policy_loss_type", "gspo"),
        ("advantage__is_correction_level", "seq"),
        ("advantage__estimator", "gae"),
        ("train__dynamic_batch_enable", True),
        ("train__batch_size", 15),
        ("reward__overlong_buffer_len", 100),
        ("reward__stop_properly_penalty_coef", 0.5),
    ],
)
def test_settings_that_sessions_of_several_traces_do_not_stand(name: str, value: Any) -> None:
    check_arguments(arguments())
    with pytest.raises(ConfigError, match=rf"^Set .*{name.partition('__')[2]}"):
        check_arguments(arguments(**{name: value}))


class Samples:
    """OpenRLHF's SamplesGenerator."""

    args = SimpleNamespace(rollout=SimpleNamespace(n_samples_per_prompt=2))
    given: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.told: list[Any] = []

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[Any], **_: Any) -> None:
        assert len(prompts) == len(labels)
        self.told += labels

    def generate_eval_samples(self, **asked: Any) -> Any:
        return [self._process_response_into_experience(one, **asked) for one in self.given]

    def _process_response_into_experience(self, response: Any, **asked: Any) -> Any:
        return SimpleNamespace(cut=response["observation_tokens"][: asked.get("max_len", 2048)])


def test_what_executors_are_told_of_a_group() -> None:
    """A task that comes again in a step, by filtering or in the data, has another group. No evaluation trains."""
    made = make_samples_generator(Samples)()
    made.step = 3
    made._dispatch_prompts_to_vllm(["go", "go", "go"], ["a", "b", "a"])
    made._dispatch_prompts_to_vllm(["go"], ["b"])
    made._phase = "eval"
    made._dispatch_prompts_to_vllm(["go"], ["b"], n_samples_per_prompt=1)
    assert made.told == [
        GroupLabel("a", "train-3", 2, 3, is_training=True),
        GroupLabel("b", "train-3", 2, 3, is_training=True),
        GroupLabel("a", "train-3.1", 2, 3, is_training=True),
        GroupLabel("b", "train-3.1", 2, 3, is_training=True),
        GroupLabel("b", "eval-3", 1, 3, is_training=False),
    ]


def response(*lengths: int) -> dict[str, Any]:
    """With traces so long."""
    traces = [{"observation_tokens": [0] * length, "label": "t"} for length in lengths]
    return {"observation_tokens": [0], "label": "t", "traces": traces}


def test_a_trace_that_openrlhf_would_cut() -> None:
    made = make_samples_generator(Samples)()
    assert len(made._process_response_into_experience(response(8, 9), max_len=9).traces) == 2
    with pytest.raises(ConfigError, match=r"task t has 10 tokens.*--data\.max_len to 10 at least"):
        made._process_response_into_experience(response(8, 10), max_len=9)
    made.given = (response(10), response(10))
    assert len(made.generate_eval_samples(max_len=9)) == 2  # of which nothing trains


def test_an_evaluation_has_no_reward_for_what_the_platform_failed(caplog: pytest.LogCaptureFixture) -> None:
    made = make_samples_generator(Samples)()
    made.given = (response(3), response(), response(), response())
    assert [len(one.traces) for one in made.generate_eval_samples()] == [1, 0]
    assert "1 of 2 prompts of this evaluation have no session with a reward" in caplog.text
    assert drop_prompts_without_reward([], 2) == []


class Maker:
    """OpenRLHF's RemoteExperienceMaker: its estimators, word for word."""

    def __init__(self, estimator: str, samples: int) -> None:
        advantage = SimpleNamespace(estimator=estimator)
        self.args = SimpleNamespace(
            algo=SimpleNamespace(advantage=advantage),
            rollout=SimpleNamespace(n_samples_per_prompt=samples),
            train=SimpleNamespace(batch_size=1),
        )

    def split_rollout_samples(self, rows: list[Any]) -> list[Any]:
        return rows

    def compute_advantages_and_returns(self, experiences: list[Any]) -> list[Any]:
        samples, estimator = self.args.rollout.n_samples_per_prompt, self.args.algo.advantage.estimator
        rewards = torch.cat([one.rewards for one in experiences]).reshape(-1, samples)
        deviations = rewards.std(-1, keepdim=True).repeat(1, samples).reshape(-1)
        if estimator == "rloo":
            rewards = rewards - (rewards.sum(-1, keepdim=True) - rewards) / (samples - 1)
        elif estimator in ("reinforce_baseline", "dr_grpo"):
            rewards = rewards - rewards.mean(-1, keepdim=True)
        elif estimator == "group_norm":
            rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)
        elif estimator == "flash_reinforce":
            rewards = rewards - rewards.mean()
        for one, reward, deviation in zip(experiences, rewards.reshape(-1), deviations, strict=True):
            one.advantages = one.returns = reward * one.action_mask
            one.info["group_reward_std"] = deviation.reshape(1)
        return experiences


def advantages(monkeypatch: pytest.MonkeyPatch, estimator: str, *groups: list[float | None]) -> Any:
    """Of sessions with these rewards and one trace each; None was left out and stands at its group's mean. And the
    standard deviations of their groups."""
    pretend(monkeypatch, {"openrlhf.trainer.ppo_utils.experience": {"Experience": SimpleNamespace}})
    ran = []
    for group in groups:
        real = [reward for reward in group if reward is not None]
        for reward in group:
            value = torch.tensor([sum(real) / len(real) if reward is None else reward])
            row = SimpleNamespace(
                sequences=torch.ones(1, 3), action_mask=torch.tensor([[0.0, 1.0]]), kl=torch.zeros(1, 2), info={}
            )
            traces = [] if reward is None else [row]
            ran.append(SimpleNamespace(traces=traces, rewards=value, response_length=1, truncated=False))
    maker = make_experience_maker(Maker)(estimator, len(groups[0]))
    maker.args.train.batch_size = sum(len(one.traces) for one in ran)
    rows = maker.split_rollout_samples(ran)
    for number, one in enumerate(rows):
        one.index = [number]
    found = maker.compute_advantages_and_returns(rows)
    assert maker.args.algo.advantage.estimator == estimator
    assert [one.rewards.item() for one in found] == [one.rewards.item() for one in ran if one.traces]
    return [one.advantages[0, 1].item() for one in found], [one.info["group_reward_std"].item() for one in found]


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "reinforce_baseline", "dr_grpo", "flash_reinforce"])
def test_sessions_that_were_left_out_are_no_samples(monkeypatch: pytest.MonkeyPatch, estimator: str) -> None:
    """The others have the advantages of a group that is as large as what is left of it."""
    left = [advantages(monkeypatch, estimator, [1.0, 0.0, 0.25]), advantages(monkeypatch, estimator, [1.0, 0.0, 0.5])]
    found, deviations = advantages(monkeypatch, estimator, [1.0, None, 0.0, 0.25, None], [None, 1.0, 0.0, None, 0.5])
    if estimator == "flash_reinforce":
        left[0] = advantages(monkeypatch, estimator, [1.0, 0.0, 0.25], [1.0, 0.0, 0.5])
        assert found == pytest.approx(left[0][0], abs=1e-6)
        return
    assert found == pytest.approx(left[0][0] + left[1][0], abs=1e-6)
    assert deviations == pytest.approx(left[0][1] + left[1][1], abs=1e-6)


def test_a_session_that_is_alone_has_no_advantage() -> None:
    there, rewards = [True, False, True, True], [1.0, 1.0, 0.1, 0.1]
    for estimator in ("group_norm", "rloo"):
        assert neutralize_missing_sessions(there, rewards, 2, estimator) == ([0.0] * 4, [0.0] * 4)


def test_generation_that_an_earlier_trainer_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes on when the next one starts, after its engines are out of the run."""
    told: list[str] = []

    class Trainer:
        def __init__(self, *_: Any) -> None:
            self.args = SimpleNamespace(
                rollout=SimpleNamespace(batch_size=1), train=SimpleNamespace(num_episodes=1, max_epochs=1)
            )
            self.prompts_dataloader = [1]
            self.eval_dataloader = self.tokenizer = self.vllm_engines = self.kl_ctl = None
            self.actor_model_group = self.critic_model_group = None
            self.reward_model_group = self.reference_model_group = None

    class Part:
        def __init__(self, *_: Any, **__: Any) -> None: ...

    class Client:
        async def remove_engine(self, url: str) -> None:
            told.append(url)

    async def begin() -> None:
        told.append("begin")

    async def list_urls() -> list[str]:
        return ["gone"]

    bridge = SimpleNamespace(
        engines=SimpleNamespace(resume_if_paused=begin, list_urls=list_urls),
        rollouts=SimpleNamespace(client=Client()),
        run=asyncio.run,
    )
    parts = {
        "openrlhf.trainer.ppo_utils.experience_maker": {"RemoteExperienceMaker": Part},
        "openrlhf.trainer.ppo_utils.samples_generator": {"SamplesGenerator": Part},
    }
    pretend(monkeypatch, parts)
    monkeypatch.setattr(openrlhf_trainer, "BlockingBridge", lambda _: bridge)
    openrlhf_trainer.make_polar_trainer(Trainer)("model", SimpleNamespace(args=arguments()))
    assert told == ["gone", "begin"]
