"""verl's bridge, as far as it needs no verl (tests/trainers/test_verl.py runs verl's own trainer)."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polar.bridges import rollouts
from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.bridges.settings import BridgeSettings
from polar.bridges.verl import agent_loop
from polar.bridges.verl.trainer import NamingAgentLoopManager, check_config, check_same_weights, make_polar_trainer
from polar.config import SamplingOverrides
from polar.errors import ConfigError, PolarError
from polar.export.base import SessionItem
from polar.export.verl import list_trajectory_keys
from polar.records.task import TaskRequest
from polar.testing.conversations import make_session_item
from polar.testing.token_paths import make_path, make_session_paths
from polar.trajectory.builders import per_request
from polar.weight_sync.base import WeightMismatchError
from tests.unit.bridges.pretending import pretend


def split(name: str) -> SessionItem:
    """Two calls that don't extend one another."""
    calls = [make_path(0, [1, 2], [3, 4, 5], session_id=name), make_path(1, [1, 7], [8], session_id=name)]
    return make_session_item(make_session_paths(*calls, reward=0.5), task_id="run/step-1/t")


def test_a_session_is_one_output_a_trace() -> None:
    first, second = agent_loop.build_outputs(split("s"))
    assert (first["prompt_ids"], first["response_ids"], first["response_mask"]) == ([1, 2], [3, 4, 5], [1, 1, 1])
    assert (second["prompt_ids"], second["response_ids"]) == ([1, 7], [8])
    assert first["response_logprobs"] == [-1 / 64, -2 / 64, -3 / 64]
    assert {one["reward_score"] for one in (first, second)} == {0.5}
    # verl reads these three of sessions with several outputs: versions for staleness, and its reward's details
    told = first["extra_fields"]
    assert (told["min_global_steps"], told["max_global_steps"], told["reward_extra_info"]) == (0, 1, {})
    assert told["weight"] == 0.75


def test_without_recorded_logprobs() -> None:
    made = make_session_item(make_session_paths(make_path(0, [1], [2], logprobs=False)), task_id="t")
    with pytest.raises(ConfigError, match="calculate_log_probs"):
        agent_loop.build_outputs(made)
    assert [one["response_logprobs"] for one in agent_loop.build_outputs(made, logprobs=False)] == [None]
    assert [one["response_logprobs"] for one in agent_loop.build_outputs(split("s"), logprobs=False)] == [None, None]


def test_keys_go_by_session() -> None:
    rows = [row for name in ("a", "b") for row in agent_loop.build_outputs(split(name))]
    group = "run/step-1/t"
    assert list_trajectory_keys(rows) == [f"{group}_0_0", f"{group}_0_1", f"{group}_1_0", f"{group}_1_1"]
    one = make_session_item(
        make_session_paths(make_path(0, [1], [2]), make_path(1, [1, 2, 3], [4])), per_request, task_id=group
    )
    assert list_trajectory_keys(agent_loop.build_outputs(one)) == [f"{group}_0_0", f"{group}_0_1"]


def test_sampling_is_the_trainers() -> None:
    params = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert agent_loop.build_sampling(params) == SamplingOverrides(
        temperature=0.7, top_p=0.9, top_k=0, repetition_penalty=1.0
    )
    assert agent_loop.build_sampling({"temperature": 0, "top_k": 20}) == SamplingOverrides(temperature=0, top_k=20)


def test_rows_name_tasks() -> None:
    (row,) = agent_loop.build_rows([TaskRequest(task_id="t", instruction="Go.")])
    assert (row["task_id"], row["agent_name"], row["extra_info"]) == ("t", "polar", {"index": 0})


def group(samples: int, *given: SessionItem) -> SessionGroup:
    """Of so many sessions, with those that are left."""
    return SessionGroup("t", "run/k/t", samples, [*given], [], Counter({"timeout": samples - len(given)}))


def test_a_group_of_which_nothing_is_left_has_failed() -> None:
    with pytest.raises(PolarError, match=r"Nothing of run/k/t can be trained on: timeout x 2\."):
        agent_loop.check_usable(group(2), "step-1")


def test_a_single_session_of_several_has_nothing_to_be_compared_with() -> None:
    """verl's GRPO would take its reward for its advantage. Validation has none."""
    with pytest.raises(PolarError, match=r"A single session of run/k/t can be trained on: timeout x 1\."):
        agent_loop.check_usable(group(2, split("a")), "step-1")
    for key, samples in (("val-1", 2), ("step-1", 1)):
        agent_loop.check_usable(group(samples, split("a")), key)


async def test_an_agent_loop_is_given_the_session_that_verl_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl makes one for each session: they share a group, in whatever order they come."""
    pretend(monkeypatch, {"verl.experimental.agent_loop.agent_loop": {"AgentLoopOutput": SimpleNamespace}})
    calls = []

    class Asked(RolloutClient):
        async def run_group(self, task: str, key: str, **more: Any) -> SessionGroup:
            calls.append((task, key, more["samples"]))
            return group(3, split("a"), split("b"))

        def __init__(self, _: Any) -> None: ...

    monkeypatch.setattr(rollouts, "RolloutClient", Asked)
    rollout = Table(calculate_log_probs=True)
    told = Table(config=Table(actor_rollout_ref=Table(rollout=rollout)))
    row = {"task_id": "t", agent_loop.KEY_FIELD: "step-1", agent_loop.SAMPLES_FIELD: 3}
    monkeypatch.setattr(agent_loop, "parse_loop_settings", lambda _: BridgeSettings(name="run", tasks=[]))
    made = [agent_loop.AgentLoop({}, told).run({}, **row, session_id=number) for number in (2, 1, 0)]
    found = await asyncio.gather(*made)
    assert [[one.extra_fields["session_id"] for one in outputs] for outputs in found] == [[], ["b", "b"], ["a", "a"]]
    assert calls == [("t", "step-1", 3)]


def test_a_row_that_names_no_task_ends_the_training() -> None:
    """Before anything is sampled: in the agent loop it would be one of the groups that fail."""
    naming = NamingAgentLoopManager(None, Table(actor_rollout_ref=Table(rollout=Table(n=4))), {"a", "b"})
    with pytest.raises(ConfigError, match="no task 'c' in the files"):
        naming.generate_sequences({"task_id": ["a", "c"], "global_steps": 1})


async def test_another_trainer_mode_is_told_what_to_set() -> None:
    loop = agent_loop.AgentLoop.__new__(agent_loop.AgentLoop)
    with pytest.raises(ConfigError, match=r"trainer\.v1\.trainer_mode"):
        await loop.run({}, task_id="t", session_id=0)


class Table(dict[str, Any]):
    """A configuration as verl's: by attribute, and by name."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def config(mode: str = "token-mean", estimator: str = "grpo", **correction: Any) -> Table:
    algorithm = Table(adv_estimator=estimator, use_kl_in_reward=False, rollout_correction=Table(correction))
    return Table(actor_rollout_ref=Table(actor=Table(loss_agg_mode=mode), rollout=Table()), algorithm=algorithm)


def test_what_goes_by_token_is_taken() -> None:
    check_config(config())
    check_config(config("token-sum", rollout_is="token", rollout_rs=None))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (config("seq-mean-token-mean"), "loss_agg_mode=seq-mean-token-mean weighs rows"),
        (config("seq-mean-token-sum-norm"), "set it to token-mean or token-sum"),
        (config(estimator="rloo"), "adv_estimator=rloo goes by row"),
        (config(rollout_is="sequence"), "rollout_is=sequence goes by row"),
        (config(rollout_rs="seq_mean_k3"), "rollout_rs=seq_mean_k3 goes by row"),
    ],
)
def test_what_goes_by_row_is_refused(wrong: Table, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        check_config(wrong)


def test_kl_in_the_reward_is_refused() -> None:
    wrong = config()
    wrong.algorithm["use_kl_in_reward"] = True
    with pytest.raises(ConfigError, match="use_kl_loss"):
        check_config(wrong)


def test_routing_of_experts() -> None:
    call = make_path(0, [1, 2], [3])
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        agent_loop.build_outputs(make_session_item(make_session_paths(call), task_id="t"), experts=True)
    call.experts = np.array([[[5, 6]], [[7, 8]]], np.uint8)
    (told,) = agent_loop.build_outputs(make_session_item(make_session_paths(call), task_id="t"), experts=True)
    assert told["routed_experts"].tolist() == [[[5, 6]], [[7, 8]]]
    assert "routed_experts" not in agent_loop.build_outputs(make_session_item(make_session_paths(call), task_id="t"))[0]


def test_weights_are_proved() -> None:
    said, mask = np.array([-1.0, -2.0, -3.0]), np.array([1, 1, 0])
    check_same_weights(said, said + np.array([1e-5, -1e-5, 9]), mask, "float32")  # what doesn't train is not looked at
    check_same_weights(said, said + 0.1, mask, "float32", "bfloat16")
    with pytest.raises(WeightMismatchError, match=r"differ by 0.1 in the mean; 0\.0001 is allowed"):
        check_same_weights(said, said + 0.1, mask, "float32")


def batch_of(monkeypatch: pytest.MonkeyPatch, *scales: float | None) -> Any:
    """As verl's trainer has one: rows in its queue, and one that fills up."""
    calls = [make_path(seq, [1, 2 + seq], [3], scale=scale) for seq, scale in enumerate(scales)]
    told = [
        one["extra_fields"]
        for one in agent_loop.build_outputs(make_session_item(make_session_paths(*calls), task_id="t"))
    ]
    given = {"kv_batch_get": lambda keys, **_: {"extra_fields": [told[int(key)] for key in keys]}}
    pretend(monkeypatch, {"transfer_queue": given})
    tags: list[dict[str, bool]] = [*({} for _ in told), {"is_padding": True}]
    return SimpleNamespace(keys=[*map(str, range(len(told))), "fill"], tags=tags, partition_id="train")


@pytest.mark.parametrize("wrong", [1.0, None])
def test_log_probabilities_of_another_temperature(monkeypatch: pytest.MonkeyPatch, wrong: float | None) -> None:
    """They end the training, in the trainer's own process."""
    made: Any = object.__new__(make_polar_trainer(object, "sync"))
    made.config = Table(actor_rollout_ref=Table(rollout=Table(temperature=0.7, calculate_log_probs=True)))
    made._check_temperature(batch_of(monkeypatch, 0.7, 0.7))
    with pytest.raises(ConfigError, match=r"temperature 0\.7, and the log-probabilities of s are of temperature"):
        made._compute_old_log_prob(batch_of(monkeypatch, 0.7, wrong), {})
