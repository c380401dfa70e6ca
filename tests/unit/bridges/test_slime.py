"""slime's and Miles' rollout function against slime's published fields; the service is played by hand."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polar.bridges import slime
from polar.bridges.rollouts import SessionGroup
from polar.bridges.slime import build_samples, pad_to_ranks
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.records.trajectory import SessionPaths
from polar.testing.conversations import make_session_item as item_of
from polar.testing.token_paths import make_path
from tests.trainers.splitting import split
from tests.unit.bridges import slime_contract as contract
from tests.unit.train import tiny

TASKS = ["fix", "build", "test", "run"]


def session(name: str, reward: float, *, traces: int = 1, version: int = 0, scale: float | None = 1.0) -> SessionItem:
    """Of two turns that go on from one another, and further ones that don't."""
    paths = [
        make_path(0, [11, 12], [13, 14], session_id=name, scale=scale),
        make_path(1, [11, 12, 13, 14, 15], [16], session_id=name, scale=scale),
        *(make_path(2 + more, [20 + more], [18, 17, 16], session_id=name, scale=scale) for more in range(traces - 1)),
    ]
    for one in paths:
        one.versions = np.full(len(one.sampled), version, np.int32)
    return item_of(SessionPaths(name, paths, reward), task_id="t")


class Engines:
    def __init__(self) -> None:
        self.told: list[Any] = []

    async def freeze(self, mode: str) -> None:
        self.told.append(mode)

    async def finish_update(self, version: int) -> None:
        self.told.append(version)

    async def attach(self, urls: list[str], version: int) -> None:
        self.told.append((urls, version))


class Service:
    """Answers a group when it is let: `sessions` makes them of its task and key."""

    def __init__(self, sessions: Any) -> None:
        self.sessions = sessions
        self.asked: list[tuple[str, str]] = []
        self.hold: set[str] = set()
        self.sampling: set[str] = set()

    async def run_group(self, task: str, key: str, *, samples: int, sampling: Any) -> SessionGroup:
        self.asked.append((task, key))
        self.sampling.add(repr(sampling.model_dump(exclude_none=True)))
        while task in self.hold:  # noqa: ASYNC110  # another thread changes it
            await asyncio.sleep(0.001)
        items = self.sessions(task, key)
        missing = Counter({"timeout": samples - len(items)} if len(items) < samples else {})
        return SessionGroup(task, key, samples, items, [], missing)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "tasks.jsonl"
    agent = {"custom_shell": {"command": "true"}}
    tasks = [{"task_id": name, "instruction": name, "agent": agent} for name in TASKS]
    file.write_text("\n".join(json.dumps(task) for task in tasks))
    return {"name": "run-1", "tasks": [str(file)], "max_lag": 1}


@pytest.fixture(autouse=True)
def _trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    contract.install(monkeypatch)
    yield
    slime.close()


def run_of(args: Any, service: Service) -> Any:
    run: Any = slime._get_run(args)
    run.rollouts.run_group = service.run_group
    run.bridge.engines = Engines()
    return run


def two(task: str, key: str) -> list[SessionItem]:
    return [session(f"{task}-{key}-a", 1.0), session(f"{task}-{key}-b", 0.0, traces=3)]


def test_samples_are_the_traces(settings: dict[str, Any]) -> None:
    """In the places that slime gave; those of a session share its rollout's id; and nothing is repaired."""
    args = contract.arguments()
    ((given,),) = [contract.Source(["fix"], 2).get_samples(1)]
    given[0].metadata = {"source": "mine"}
    first, second = build_samples(args, given, two("fix", "0"))
    assert [len(first), len(second)] == [1, 3]
    for place, (made, item) in enumerate(zip((first, second), two("fix", "0"), strict=True)):
        assert {(one.group_index, one.index, one.rollout_id, one.prompt) for one in made} == {(0, place, place, "fix")}
        for sample, trace in zip(made, item.trajectory.traces, strict=True):
            assert trace.logprobs is not None
            assert sample.tokens == [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
            assert (sample.loss_mask, sample.rollout_log_probs) == (trace.loss_mask.tolist(), trace.logprobs.tolist())
            assert (sample.response_length, sample.weight_versions) == (len(trace.response_ids), ["0"])
            assert sample.metadata["policy_versions"] == trace.policy_versions.tolist()
    assert first[0].metadata["source"] == "mine"
    (keyed,) = build_samples(contract.arguments(reward_key="score"), given[:1], two("fix", "0")[:1])
    assert keyed[0].reward == {"score": 1.0}


def test_a_group_with_gaps_keeps_its_size() -> None:
    """What stands in trains nothing, and does not change what the others earn."""
    args = contract.arguments()
    ((given,),) = [contract.Source(["fix"], 4).get_samples(1)]
    made = build_samples(args, given, two("fix", "0"))
    rows = [sample for one in made for sample in one]
    assert [one[0].rollout_id for one in made] == [0, 1, 2, 3]
    assert [sample.remove_sample for sample in rows] == [False] * 4 + [True] * 2
    assert sum(sum(sample.loss_mask) for sample in rows[4:]) == 0
    raw, rewards = slime.normalize_rewards(args, rows)
    assert raw == [1.0, 0.0, 0.0, 0.0, 0.5, 0.5]
    assert rewards == pytest.approx([0.7071, *[-0.7071] * 3, 0.0, 0.0], abs=1e-4)


def test_rewards_are_normalised_over_sessions() -> None:
    args = contract.arguments(grpo_std_normalization=False)
    rows = []
    for given, rewards in zip(
        contract.Source(TASKS, 3).get_samples(2), ([1.0, 0.0, 0.5], [2.0, 2.0, 2.0]), strict=True
    ):
        sessions = [session(f"{given[0].index}-{n}", reward, traces=n + 1) for n, reward in enumerate(rewards)]
        rows += [sample for one in build_samples(args, given, sessions) for sample in one]
    raw, advantages = slime.normalize_rewards(args, rows)
    assert raw == [1.0, 0.0, 0.0, 0.5, 0.5, 0.5, *[2.0] * 6]
    assert advantages == pytest.approx([0.5, -0.5, -0.5, 0, 0, 0, *[0.0] * 6])
    assert slime.normalize_rewards(contract.arguments(rewards_normalization=False), rows)[1] == raw


@pytest.mark.parametrize("kind", [contract.Sample, contract.OldSample])
def test_splitting_a_session_changes_no_gradient(kind: type[Any]) -> None:
    """By slime's reduction; and by that of trainers that know no rollouts, to which each sample is one."""
    args = contract.arguments(use_dynamic_global_batch_size=True, actor_num_gpus_per_node=8)
    model = tiny.model()
    gradients: list[Any] = []
    for change in (lambda item: item, split):
        given = [kind(group_index=0, index=place) for place in range(3)]
        sessions = [session(f"{n}", reward, traces=n + 1) for n, reward in enumerate([1.0, 0.0, 0.0])]
        made = [build_samples(args, given, [change(sessions[0]), *sessions[1:]])]
        rows = [sample for group in pad_to_ranks(args, made) for one in group for sample in one]
        if kind is contract.OldSample:
            assert len(rows) == 8
            for number, sample in enumerate(rows):
                sample.rollout_id = number
        else:
            assert len({sample.rollout_id for sample in rows}) == 3
        model.zero_grad()
        loss: Any = contract.reduced(rows, slime.normalize_rewards(args, rows)[1], model)
        loss.backward()
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]).clone())
    whole, parts = gradients
    assert whole.norm() > 1e-3
    assert torch.allclose(whole, parts, atol=1e-6 * float(whole.norm()))


def test_trainers_that_would_cut_sessions_are_refused() -> None:
    given = [contract.OldSample(group_index=0, index=place) for place in range(2)]
    rows = [sample for one in build_samples(contract.arguments(), given, two("fix", "0")) for sample in one]
    with pytest.raises(ConfigError, match="--use-dynamic-global-batch-size"):
        slime.normalize_rewards(contract.arguments(use_dynamic_global_batch_size=False), rows)


def test_later_groups_are_on_their_way(settings: dict[str, Any]) -> None:
    """A rollout is returned as soon as it has its groups. Generation stands still until the next one, which has the
    next version, and takes what has come meanwhile."""
    service = Service(two)
    service.hold = {"test"}
    args = contract.arguments(polar=settings)
    run = run_of(args, service)
    source = contract.Source(TASKS, 2)
    first = slime.generate_rollout(args, 0, source)
    assert [[len(one) for one in group] for group in first.samples] == [[1, 3], [1, 3]]
    assert [group[0][0].group_index for group in first.samples] == [0, 1]
    assert service.asked == [(task, str(index)) for index, task in enumerate(TASKS)]
    assert service.sampling == {"{'temperature': 1.0, 'top_p': 1.0, 'top_k': 0}"}
    assert first.metrics == {"polar/sessions": 4.0}
    assert run.bridge.engines.told == [0, "drain"]
    service.hold = {"fix", "build"}
    second = slime.generate_rollout(args, 1, source)
    assert [group[0][0].group_index for group in second.samples] == [2, 3]
    assert run.bridge.engines.told == [0, "drain", 1, "drain"]


def test_a_routers_engines_are_told_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who attaches them has said the version, and they go on."""

    async def workers(_: Any) -> list[str]:
        return ["http://a:1", "http://b:1"]

    monkeypatch.setattr(slime, "_list_engine_urls", workers)
    args = contract.arguments(polar=settings, sglang_router_ip="127.0.0.1")
    run = run_of(args, Service(two))
    slime.generate_rollout(args, 0, contract.Source(TASKS, 2))
    assert run.bridge.engines.told == [(["http://a:1", "http://b:1"], 0), "drain"]


def test_what_was_on_its_way_is_found_again(settings: dict[str, Any]) -> None:
    """By another process, from the data source's checkpoint."""
    args = contract.arguments(polar=settings)
    source = contract.Source(TASKS, 2)
    service = Service(two)
    service.hold = {"test", "run"}
    run_of(args, service)
    slime.generate_rollout(args, 0, source)
    slime.close()
    saved = json.loads(json.dumps(source.metadata))
    service = Service(two)
    run_of(args, service)
    later = contract.Source(TASKS, 2)
    later.taken, later.metadata = 4, saved
    samples = slime.generate_rollout(args, 1, later).samples
    assert [group[0][0].group_index for group in samples] == [2, 3]
    assert service.asked[:2] == [("test", "2"), ("run", "3")]


def test_too_old_sessions_are_left_out(settings: dict[str, Any]) -> None:
    """And a group of which none is left is taken anew."""

    def sessions(task: str, key: str) -> list[SessionItem]:
        if task == "fix":
            return [session(f"{key}-a", 1.0, version=3 if "." in key else 1), session(f"{key}-b", 0.0, version=1)]
        return [session(f"{key}-a", 1.0, version=2), session(f"{key}-b", 0.0, version=1)]

    service = Service(sessions)
    args = contract.arguments(polar=settings, rollout_batch_size=1)
    run_of(args, service)
    source = contract.Source(["fix"], 2)
    output = slime.generate_rollout(args, 3, source)
    assert service.asked[:1] == [("fix", "0")]
    assert ("fix", "0.1") in service.asked
    ((kept, absent),) = output.samples
    assert [kept[0].weight_versions, absent[0].remove_sample] == [["3"], True]
    assert output.metrics["polar/groups_again"] >= 1
    assert output.metrics["polar/left_out/stale"] >= 3


def test_groups_that_come_to_nothing(settings: dict[str, Any]) -> None:
    service = Service(lambda task, key: two(task, key) if task == "build" else [])
    args = contract.arguments(polar=settings, rollout_batch_size=1)
    run_of(args, service)
    output = slime.generate_rollout(args, 0, contract.Source(["fix", "build"], 2))
    assert output.samples[0][0][0].prompt == "build"
    run_of(args, Service(lambda task, key: []))
    with pytest.raises(slime.NothingToTrainError, match=r"asked for 3 times .*timeout"):
        slime.generate_rollout(args, 1, contract.Source(["fix"], 2))


def keep(args: Any, samples: list[Any]) -> Any:
    return SimpleNamespace(keep=samples[0].prompt != "fix")


def test_dynamic_sampling(settings: dict[str, Any]) -> None:
    args = contract.arguments(polar=settings, dynamic_sampling_filter_path=f"{__name__}.keep")
    run_of(args, Service(two))
    output = slime.generate_rollout(args, 0, contract.Source(TASKS, 2))
    assert "fix" not in {group[0][0].prompt for group in output.samples}
    assert output.metrics["polar/groups_filtered"] == 1


def test_evaluation(settings: dict[str, Any], tmp_path: Path) -> None:
    """A session is one result, whatever its traces; the version is that of the weights that come next."""
    file = tmp_path / "held.jsonl"
    file.write_text('{"text": "?", "label": "fix"}\n{"text": "?", "label": "build"}')
    named = SimpleNamespace(
        name="held",
        path=str(file),
        input_key="text",
        label_key="label",
        metadata_key=None,
        n_samples_per_eval_prompt=3,
        temperature=0.0,
        top_p=None,
        top_k=None,
    )
    args = contract.arguments(polar=settings, eval_datasets=[named])
    service = Service(two)
    run = run_of(args, service)
    output = slime.generate_rollout(args, 0, None, evaluation=True)
    assert output.data["held"]["rewards"] == [1.0, 0.0, 1.0, 0.0]
    assert output.data["held"]["truncated"] == [False] * 4
    assert [sample.label for sample in output.data["held"]["samples"]] == ["fix", "fix", "build", "build"]
    assert output.metrics == {"eval/held/left_out/timeout": 2.0}
    assert service.asked == [("fix", "eval-0/held.0"), ("build", "eval-0/held.1")]
    assert service.sampling == {"{'temperature': 0.0}"}
    slime.generate_rollout(args, 0, contract.Source(TASKS, 2))
    slime.generate_rollout(args, 0, None, evaluation=True)
    assert run.bridge.engines.told == [0, 0, "drain", 1]
    assert service.asked[-2:] == [("fix", "eval-1/held.0"), ("build", "eval-1/held.1")]  # of the trained weights


def test_routing_is_replayed() -> None:
    args = contract.arguments(use_rollout_routing_replay=True)
    given = contract.Source(TASKS, 1).get_samples(1)[0]
    made = session("a", 1.0)
    with pytest.raises(
        ConfigError, match=r"which experts a's tokens were routed to.*\[engine\] options\.routed_experts"
    ):
        build_samples(args, given, [made])
    (trace,) = made.trajectory.traces
    trace.experts = np.arange(10, dtype=np.uint8).reshape(5, 1, 2)
    ((sample,),) = build_samples(args, given, [made])
    assert sample.rollout_routed_experts.dtype == np.int32
    assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 1, 2)


@pytest.mark.parametrize("scale", [0.7, None])
def test_log_probabilities_of_another_temperature(settings: dict[str, Any], scale: float | None) -> None:
    args = contract.arguments(polar=settings)
    run_of(args, Service(lambda task, key: [session("a", 1.0), session("b", 0.0, scale=scale)]))
    with pytest.raises(ConfigError, match="temperature 1, and the log-probabilities of b are of temperature"):
        slime.generate_rollout(args, 0, contract.Source(TASKS, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_rm_path": "mine.reward"}, "--custom-rm-path can't be used"),
        ({"partial_rollout": True}, "set max_lag"),
        ({"custom_reward_post_process_path": None}, r"set --custom-reward-post-process-path polar\.bridges\.slime"),
        ({}, "names no task"),
    ],
)
def test_what_can_not_be(settings: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    args = contract.arguments(**{"polar": settings, **changes})

    def asked() -> None:
        run_of(args, Service(two))
        slime.generate_rollout(args, 0, contract.Source(["unheard of"], 2))

    with pytest.raises(ConfigError, match=message):
        asked()
