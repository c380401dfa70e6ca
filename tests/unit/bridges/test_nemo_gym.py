"""NeMo Gym's runs and NeMo RL's batches, without either."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from polar.bridges import bridge as bridge_module
from polar.bridges.bridge import BlockingBridge
from polar.bridges.nemo_gym import SessionRunner, agent_class, build_verify_response, collect_replies, split_traces
from polar.bridges.nemo_rl import NemoRl, SessionAdvantageEstimator, build_batch, build_message_log
from polar.bridges.rollouts import SessionGroup
from polar.bridges.settings import BridgeSettings, load_settings
from polar.errors import ConfigError
from polar.export.base import SessionItem
from polar.records.trajectory import SessionPaths, Trace
from polar.testing.conversations import ConversationBuilder, make_session_item, make_text_parts
from polar.testing.token_paths import make_path
from polar.trajectory.builders import per_request, prefix_merging
from polar.types import Text
from tests.bridging import served, serving, task
from tests.unit.bridges import nemo_contract as nemo_rl
from tests.unit.bridges.telling import result
from tests.unit.train import tiny


def run(one: SessionItem) -> dict[str, Any]:
    return build_verify_response(one, result(one))


def session(name: str, reward: float, build: Any, *, task_id: str = "t", shift: int = 0) -> SessionItem:
    """Three turns, each of which goes on from the one before."""
    first = make_path(0, [11, 12 + shift], [13, 14], session_id=name)
    second = make_path(1, [11, 12 + shift, 13, 14, 15], [16, 17, 18], session_id=name)
    third = make_path(2, [11, 12 + shift, 13, 14, 15, 16, 17, 18, 19], [20], session_id=name)
    return make_session_item(SessionPaths(name, [first, second, third], reward), build, task_id=task_id)


def read(log: list[dict[str, Any]]) -> tuple[list[int], list[int], list[float]]:
    """A message log's tokens, mask and log-probabilities."""
    data = nemo_rl.flat({"message_log": [log]})
    return data["input_ids"][0].tolist(), data["token_mask"][0].int().tolist(), data["generation_logprobs"][0].tolist()


def expected(trace: Trace) -> tuple[list[int], list[int], list[float]]:
    assert trace.logprobs is not None
    before = [0] * len(trace.prompt_ids)
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    return ids, before + trace.loss_mask.tolist(), before + trace.logprobs.tolist()


# Runs


def test_a_run_is_the_main_agents_trace_and_carries_the_others() -> None:
    paths = [
        make_path(0, [1], [2], role="main"),
        make_path(1, [5, 6], [7, 8, 9], role="subagent"),
        make_path(2, [3], [4, 4], role="main"),
    ]
    one = make_session_item(SessionPaths("s", paths, 0.5), task_id="t")
    made = run(one)
    assert made["polar"]["exchange_ids"] == [paths[2].exchange_id]  # the subagent said more, but is no main agent
    assert (made["polar_traces"], made["polar_share"]) == (3, pytest.approx(2 / 6))
    assert [row["polar"]["trace"] for row in made["polar_others"]] == [0, 1]
    assert made["reward"] == 0.5
    again = split_traces(json.loads(json.dumps(made)))
    assert [read(build_message_log(row)) for row in again] == [expected(trace) for trace in one.trajectory.traces]


def test_items_say_what_was_said_as_far_as_it_is_known() -> None:
    talk = ConversationBuilder()
    name = talk.add_call([{"role": "user", "content": "Hello?"}], make_text_parts("Hello."))
    one = talk.build_item()
    assert collect_replies(one, result(one)) == {name: [Text("Hello.")]}
    (message,) = run(one)["response"]["output"]
    assert message["content"][0]["text"] == "Hello."
    told = result(one)
    assert told.trajectory is not None
    told.trajectory.traces[0].response_messages = []  # a history that does not fit the calls
    (message,) = build_verify_response(one, told)["response"]["output"]
    assert (message["content"][0]["text"], len(message["generation_token_ids"])) == ("", 3)


class Rollouts:
    """Sessions of a service that is played: those under these keys can be trained on, others ended for a reason."""

    def __init__(self, *good: str, left_out: dict[str, int] | None = None) -> None:
        self.good = good
        self.left_out = {"harness_error": 1} if left_out is None else left_out
        self.keys: list[str] = []
        self.closed = 0

    async def run_group(self, task: str, key: str, **_: Any) -> SessionGroup:
        self.keys.append(key)
        name = f"train/{key}/{task}"
        if key not in self.good:
            return SessionGroup(task, name, 1, [], [], Counter(self.left_out))
        one = session(key, 1.0, prefix_merging, task_id=name)
        return SessionGroup(task, name, 1, [one], [result(one)])

    async def close(self) -> None:
        self.closed += 1


def playing(monkeypatch: pytest.MonkeyPatch, rollouts: Rollouts, *, resume: bool = False) -> SessionRunner:
    monkeypatch.setattr(bridge_module, "RolloutClient", lambda _: rollouts)
    return SessionRunner(BridgeSettings(name="first", tasks=["tasks.jsonl"]), resume=resume)


ROW: dict[str, Any] = {"task_id": "t", "responses_create_params": {"input": []}}
NAMED = ROW | {"_ng_task_index": 0, "_ng_rollout_index": 1}


async def test_a_row_with_a_name_is_tried_again_under_others(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Rollouts("0.1.again-2")
    made = await playing(monkeypatch, played, resume=True).run(NAMED)
    assert played.keys == ["0.1", "0.1.again-1", "0.1.again-2"]
    assert (made["reward"], made["polar"]["session_id"]) == (1.0, "0.1.again-2")
    played = Rollouts("x")
    await playing(monkeypatch, played).run(ROW | {"_ng_rollout_id": "x"})
    assert played.keys == ["x"]


async def test_tries_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Rollouts()
    failed = await playing(monkeypatch, played, resume=True).run(NAMED)
    assert (len(played.keys), failed["_ng_failure_class"]) == (3, "harness_error")
    played = Rollouts()
    await playing(monkeypatch, played).run(NAMED)  # it has no name: who asks again gets a new session anyway
    assert len(played.keys) == 1


async def test_a_task_without_results_is_a_failure_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = await playing(monkeypatch, Rollouts(left_out={})).run(ROW)
    assert failed["_ng_failure_class"] == failed["polar"]["reason"] == "no_results"


class Client:
    """A service's engines, with one of another trainer among them."""

    def __init__(self) -> None:
        self.urls = ["http://other:1"]

    async def add_engine(self, url: str, version: int) -> None:
        assert version == 3
        self.urls.append(url)

    async def remove_engine(self, url: str) -> None:
        self.urls.remove(url)

    async def engines(self) -> dict[str, Any]:
        return {"replicas": [{"url": url} for url in self.urls]}

    async def set_policy(self, version: int) -> None:
        assert version == 3

    async def policy(self) -> dict[str, Any]:
        return {"paused": False}


async def test_engines_are_named_without_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo RL lists them with that of OpenAI's API."""
    played: Any = Rollouts()
    played.client = Client()
    await playing(monkeypatch, played).engines.attach(
        ["http://a:1/v1", "http://b:2/v1/", "http://c:3", "http://a:1"], 3
    )
    assert played.client.urls == ["http://a:1", "http://b:2", "http://c:3"]


async def test_an_agent_that_fails_closes_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def inner(_: Any) -> AsyncIterator[None]:
        yield

    class Agent:
        def __init__(self, config: Any) -> None:
            self.config = config

        def setup_webserver(self) -> Any:
            return SimpleNamespace(router=SimpleNamespace(lifespan_context=inner))

    gym: Any = SimpleNamespace(
        FastAPI=object,
        BaseRunRequest=object,
        BaseVerifyResponse=object,
        BaseResponsesAPIAgentConfig=object,
        SimpleResponsesAPIAgent=Agent,
        NeMoGymResponse=object,
        NeMoGymResponseCreateParamsNonStreaming=object,
    )
    names = ("", ".base_resources_server", ".base_responses_api_agent", ".openai_utils")
    for name in ("fastapi", *(f"nemo_gym{name}" for name in names)):
        monkeypatch.setitem(sys.modules, name, gym)
    played = Rollouts()
    monkeypatch.setattr(bridge_module, "RolloutClient", lambda _: played)
    known = {"name": "first", "tasks": ["tasks.jsonl"]}
    config = SimpleNamespace(polar=known, resume=False, engines=None, version=0)
    made: Any = agent_class()
    app = made(config).setup_webserver()
    with pytest.raises(RuntimeError, match="the server falls"):
        async with app.router.lifespan_context(app):
            raise RuntimeError("the server falls")
    assert played.closed == 1
    config.engines = "http://127.0.0.1:1/v1"
    played.client = SimpleNamespace()  # type: ignore[attr-defined]  # without engines: attaching fails
    app = made(config).setup_webserver()
    with pytest.raises(AttributeError):
        async with app.router.lifespan_context(app):
            pass
    assert played.closed == 2


async def test_runs_of_a_service(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        silent = task("silent", "plain") | {"agent": {"custom_shell": {"command": f"{sys.executable} -c ''"}}}
        more = tmp_path / "more.jsonl"
        more.write_text(json.dumps(silent))
        source = load_settings(it.settings(tasks=[str(it.tasks), str(more)]))
        runs, resumed = SessionRunner(source), SessionRunner(source, resume=True)
        try:
            asked = {"input": [], "temperature": 0.5, "max_output_tokens": 3}
            row = {"task_id": "split-0", "responses_create_params": {"input": []}}
            named = row | {"_ng_rollout_id": "step-3/7"}
            counted = row | {"_ng_task_index": 0, "_ng_rollout_index": 1}
            plain, failed, *split = await asyncio.gather(
                runs.run({"task_id": "plain-0", "responses_create_params": asked}),
                runs.run({"task_id": "silent", "responses_create_params": {"input": []}}),
                *(runs.run(one) for one in (row, named)),
                *(resumed.run(one) for one in (named, counted, counted)),
            )
            assert plain["polar"]["temperature"] == 0.5
            assert [len(one["generation_token_ids"]) for one in plain["response"]["output"]] == [3, 3]
            assert plain["responses_create_params"] == asked

            sessions = [one["polar"]["session_id"] for one in split]
            assert len(set(sessions)) == 3
            assert (sessions[1], sessions[3]) == (sessions[2], sessions[4])  # who asks again gets the same
            assert {one["polar"]["task"] for one in split} == {"split-0"}
            with pytest.raises(ConfigError, match="_ng_task_index"):
                await resumed.run(row)

            assert failed["_ng_failure_class"] == failed["polar"]["reason"] == "nothing_to_train"
            assert failed["response"]["output"] == []
            with pytest.raises(ConfigError, match="task_id"):
                await runs.run({"responses_create_params": {"input": []}})
        finally:
            await runs.close()
            await resumed.close()


# Batches


def test_a_batch_has_all_traces_and_empty_rows() -> None:
    whole, split = session("a", 1.0, prefix_merging), session("b", 0.0, per_request, task_id="u")
    fields = build_batch([run(whole), run(split)], rows=6)
    assert fields["polar_session"].tolist() == [0, 1, 1, 1, -1, -1]
    assert fields["polar_group"].tolist() == [0, 1, 1, 1, -1, -1]
    assert fields["loss_multiplier"].tolist() == [1, 1, 1, 1, 0, 0]
    assert fields["total_reward"].tolist() == [1, 0, 0, 0, 0, 0]
    assert fields["length"].tolist() == [2, 2, 5, 9, 1, 1]
    traces = [*whole.trajectory.traces, *split.trajectory.traces]
    assert [read(log) for log in fields["message_log"][:4]] == [expected(trace) for trace in traces]
    weights = build_batch([run(split)], rows=3, token_level=False)["loss_multiplier"]
    assert weights.tolist() == pytest.approx([2 / 6, 3 / 6, 1 / 6])
    with pytest.raises(ConfigError, match=r"2 sessions have 4 traces.*train_global_batch_size \(3\)"):
        build_batch([run(whole), run(split)], rows=3)


def test_calls_without_context_between_them_have_ids_all_the_same() -> None:
    paths = [make_path(0, [11, 12], [13, 14]), make_path(1, [11, 12, 13, 14], [15])]
    one = make_session_item(SessionPaths("s", paths, 0.5), task_id="t")
    log = build_message_log(run(one))
    assert [len(message["token_ids"]) for message in log] == [2, 2, 0, 1]
    assert {message["token_ids"].dtype for message in log} == {torch.long}
    assert nemo_rl.flat({"message_log": [log]})["input_ids"].dtype == torch.long


def gradient(items: list[SessionItem], *, token_level: bool) -> torch.Tensor:
    model = tiny.model()
    fields = build_batch([run(one) for one in items], rows=16, token_level=token_level)
    advantages = nemo_rl.advantages(SessionAdvantageEstimator(nemo_rl.GRPOAdvantageEstimator()), fields)
    nemo_rl.loss(model, fields, advantages, token_level=token_level).backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("token_level", [True, False])
def test_splitting_a_session_leaves_the_gradient_as_it_was(token_level: bool) -> None:
    def group(build: Callable[[SessionPaths], Any]) -> list[SessionItem]:
        """Of four sessions, the second of which is built in this way."""
        rewards = {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.25}
        return [
            session(name, reward, build if name == "b" else prefix_merging, shift=place)
            for place, (name, reward) in enumerate(rewards.items())
        ]

    whole, split = (gradient(group(build), token_level=token_level) for build in (prefix_merging, per_request))
    assert whole.abs().max() > 1e-3
    assert torch.allclose(whole, split, rtol=1e-4, atol=1e-6)


def test_advantages_are_over_sessions() -> None:
    """Whatever their prompts are, and however many traces they have."""
    items = [session("a", 1.0, per_request), session("b", 0.0, prefix_merging, shift=5), session("c", 0.5, per_request)]
    fields = build_batch([run(one) for one in items], rows=8)
    by_row = nemo_rl.advantages(SessionAdvantageEstimator(nemo_rl.GRPOAdvantageEstimator()), fields)[:, 0]
    a, b, c = by_row[0], by_row[3], by_row[4]
    assert by_row.tolist() == [a, a, a, b, c, c, c, 0]
    spread = np.std([0.0, 0.5], ddof=1) + 1e-6
    assert a.item() == pytest.approx((1.0 - 0.25) / spread, rel=1e-5)
    del fields["polar_session"]
    with pytest.raises(ConfigError, match="polar_session"):
        nemo_rl.advantages(SessionAdvantageEstimator(nemo_rl.GRPOAdvantageEstimator()), fields)


def config(**loss: Any) -> dict[str, Any]:
    """NeMo RL's, part of it as tables and part as objects."""
    grpo = SimpleNamespace(adv_estimator=SimpleNamespace(name="grpo"), use_dynamic_sampling=False)
    return {"grpo": grpo, "policy": {"train_global_batch_size": 24}, "loss_fn": {"token_level_loss": True, **loss}}


def test_settings_that_go_by_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss_fn.sequence_level_importance_ratios is True.*set it to False"):
        NemoRl.from_config(Mock(), config(sequence_level_importance_ratios=True))
    other = config()
    other["grpo"].adv_estimator.name = "gdpo"
    with pytest.raises(ConfigError, match=r"grpo.adv_estimator.name is 'gdpo'"):
        NemoRl.from_config(Mock(), other)


class Keys:
    """A bridge that notes what is asked for."""

    def __init__(self, *items: SessionItem) -> None:
        self.engines, self.rollouts = Mock(), self
        self.asked: list[str] = []
        self.items = list(items)

    async def run_group(self, task: str, key: str, **_: Any) -> SessionGroup:
        self.asked.append(f"{key}/{task}")
        return SessionGroup(task, key, 1, self.items, [])

    def run(self, work: Any) -> Any:
        return asyncio.run(work) if asyncio.iscoroutine(work) else None


def keys(*rounds: str, validates: str = "", step: int = 7) -> list[str]:
    """Of a trainer that begins at this step: what it asks for, first to validate."""
    bridge = Keys()
    loop = NemoRl(cast(BlockingBridge, bridge), rows=8, step=step)

    def ask(tasks: str) -> None:
        loop.run_groups([{"task_id": name} for name in tasks], {})

    if validates:
        loop.wrap_validate(ask)(validates)
    for tasks in rounds:
        ask(tasks)
    return bridge.asked


@pytest.mark.parametrize("validates", ["aab", "aabc", "c"])
def test_training_finds_its_own_sessions_whether_validation_runs_or_not(validates: str) -> None:
    first = keys("aab", "aab", validates=validates)
    assert len(set(first)) == len(first)
    again = keys("aab", "aab")
    assert again == first[-4:]
    assert not set(again) & set(keys("aab", step=8))


def test_validation_that_is_not_told_of_counts_by_itself() -> None:
    assert keys("abc", "aab")[-2:] == keys("aab")
    assert keys("aab") == keys("baa")[::-1]


def test_validation_ends_where_it_fails() -> None:
    bridge: Any = Keys()
    loop = NemoRl(bridge, rows=8, step=7)
    with pytest.raises(ZeroDivisionError):
        loop.wrap_validate(lambda: 1 / 0)()
    loop.run_groups([{"task_id": "a"}], {})
    assert bridge.asked == keys("a")


@pytest.mark.parametrize("scale", [1.0, None])
def test_log_probabilities_of_another_temperature(scale: float | None) -> None:
    """Are not trained on; a validation's may be what they like."""
    bridge: Any = Keys(make_session_item(SessionPaths("s", [make_path(0, [1], [2], scale=scale)], 1.0), task_id="a"))
    loop = NemoRl(bridge, rows=8, step=7)
    with pytest.raises(ConfigError, match=r"temperature 0\.7, and the log-probabilities of s are of temperature"):
        loop.run_groups([{"task_id": "a"}], {"temperature": 0.7})
    assert loop.wrap_validate(loop.run_groups)([{"task_id": "a"}], {"temperature": 0.7})


@pytest.mark.slow
def test_a_step_from_real_rollouts(tmp_path: Path) -> None:
    """By NeMo RL's contract: groups, a batch, advantages, loss, an optimizer step; Polar hears of the refit."""
    with served(tmp_path) as it, BlockingBridge(it.settings()) as bridge:
        loop = NemoRl.from_config(bridge, config(), step=6)
        rows = [{"task_id": name} for name in ("plain-0", "split-0") for _ in range(4)]
        refitted: list[bool] = []

        def refit() -> None:
            refitted.append(bridge.run(bridge.rollouts.client.policy())["paused"])

        loop.wrap_refit(refit)()
        assert refitted == [True]
        policy = bridge.run(bridge.rollouts.client.policy())
        assert (policy["paused"], policy["replicas"][0]["version"]) == (False, 7)
        groups = loop.run_groups(rows, {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 4})
        names = [group.name.split("/") for group in groups]
        assert [(name[0], name[1].split(".")[0], name[2]) for name in names] == [
            (bridge.rollouts.settings.name, "7", task) for task in ("plain-0", "split-0")
        ]
        traces = [trace for group in groups for one in group.items for trace in one.trajectory.traces]
        fields = loop.build_batch(groups)
        assert len(traces) == 4 + 12
        assert [read(log) for log in fields["message_log"][: len(traces)]] == [expected(trace) for trace in traces]

        model = tiny.model()  # the engine's weights: so its log-probabilities are the recorded ones
        data = nemo_rl.flat(fields)
        with torch.no_grad():
            scored = model(data["input_ids"]).logits[:, :-1].log_softmax(-1)
        current = scored.gather(-1, data["input_ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
        trains = data["token_mask"][: len(traces), 1:].bool()
        recorded = data["generation_logprobs"][: len(traces), 1:][trains]
        assert torch.allclose(current[: len(traces)][trains], recorded, atol=1e-4)

        fields["total_reward"][:4] = torch.tensor([1.0, 0.0, 0.0, 1.0])  # random weights rarely earn anything
        before = model.lm_head.weight.detach().clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        advantages = nemo_rl.advantages(SessionAdvantageEstimator(nemo_rl.GRPOAdvantageEstimator()), fields)
        nemo_rl.loss(model, fields, advantages, token_level=True).backward()
        optimizer.step()
        assert not torch.equal(before, model.lm_head.weight)
