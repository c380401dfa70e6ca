"""What all bridges are made of, over a real service and engine: groups, the trainer's engines, a loop of its own."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from polar.bridges.bridge import BlockingBridge
from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.bridges.settings import load_settings
from polar.client.async_client import AsyncClient, ClientError
from polar.config import EngineSettings
from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.engines.scripted.sampler import route_experts
from polar.errors import ConfigError
from polar.records import wire
from polar.service import Service
from polar.weight_sync.base import WeightMismatchError
from polar.weight_sync.probe import make_scorer
from polar.weight_sync.updater import WeightUpdater
from tests.bridging import TOKEN, served, serving, write_tasks
from tests.integration.stack import settings as service_settings


async def test_groups_are_what_the_service_recorded(tmp_path: Path) -> None:
    """Each number of each trace, and the same sessions when it is asked again."""
    async with serving(tmp_path) as it, RolloutClient(load_settings(it.settings())) as rollouts:
        plain, split = await rollouts.run_groups(["plain-0", "split-0"], "step-1")
        assert [(group.task, group.requested_samples, len(group.items)) for group in (plain, split)] == [
            ("plain-0", 4, 4),
            ("split-0", 4, 4),
        ]
        assert {len(item.trajectory.traces) for item in plain.items} == {1}
        assert {len(item.trajectory.traces) for item in split.items} == {3}
        assert all(np.isclose(sum(trace.weight for trace in item.trajectory.traces), 1) for item in split.items)
        for group in (plain, split):
            for item, result in zip(group.items, group.results, strict=True):
                assert result.trajectory is not None
                again = wire.trajectory_to_dict(item.trajectory)
                told = result.trajectory.model_dump()
                for trace in [*told["traces"], *again["traces"]]:
                    for name in ("prompt_messages", "response_messages", "tools"):  # not tokens' matter
                        trace.pop(name)
                assert again["traces"] == told["traces"]
        twice = await rollouts.run_group("plain-0", "step-1")
        assert [item.session.session_id for item in twice.items] == [item.session.session_id for item in plain.items]
        other = await rollouts.run_group("plain-0", "step-2")
        assert {item.session.session_id for item in other.items}.isdisjoint(
            item.session.session_id for item in plain.items
        )


async def test_experts_come_with_their_tokens(tmp_path: Path) -> None:
    """From the engine's replies to the trainer's traces: they are those of exactly these tokens, in this context."""
    sections = {"server": {"port": 0, "token": TOKEN}, "node": {"run_workers": 4}}
    async with (
        ScriptedServer(Play.random(3, 4, 12), experts=64) as engine,
        Service(service_settings([engine.url], **sections), tmp_path / "data", node=True) as service,
    ):
        table = {"server": service.control_url, "token": TOKEN, "tasks": [str(write_tasks(tmp_path))], "name": "test"}
        async with RolloutClient(load_settings({**table, "samples": 2})) as rollouts:
            groups = await rollouts.run_groups(["plain-0", "split-0"], "step-1")
    traces = [trace for group in groups for item in group.items for trace in item.trajectory.traces]
    assert len(traces) == 8
    for trace in traces:
        assert trace.experts is not None
        ids = np.concatenate([trace.prompt_ids, trace.response_ids])
        assert trace.experts.tolist() == route_experts(ids, 64).tolist()


async def test_a_task_that_nobody_wrote(tmp_path: Path) -> None:
    async with serving(tmp_path) as it, RolloutClient(load_settings(it.settings())) as rollouts:
        with pytest.raises(ConfigError, match=r"no task 'plain-9'.*plain-0"):
            await rollouts.run_group("plain-9", "step-1")


async def test_engines_of_the_trainer(tmp_path: Path) -> None:
    """Attached with their version, and paused across an update. These engines don't know of versions themselves."""
    play = Play([ScriptedTurn(text="all done")])
    async with ScriptedServer(play) as first, ScriptedServer(play) as second:
        wanted = service_settings([first.url], server={"port": 0, "token": TOKEN})
        async with (
            Service(wanted, tmp_path / "data", node=True) as service,
            RolloutClient(
                load_settings(
                    {
                        "server": service.control_url,
                        "token": TOKEN,
                        "tasks": str(write_tasks(tmp_path)),
                        "name": "test",
                        "samples": 1,
                    }
                )
            ) as rollouts,
        ):
            engines = WeightUpdater(rollouts.client)
            await engines.attach([second.url], 3)
            known = (await rollouts.client.engines())["replicas"]
            assert [(replica["url"], replica["version"]) for replica in known] == [(second.url, 3)]
            assert versions(await rollouts.run_group("plain-0", "3")) == {3}
            async with engines.updating(4):
                assert (await rollouts.client.policy())["paused"]
                waiting = asyncio.ensure_future(rollouts.run_group("plain-0", "4"))
                await asyncio.sleep(0.3)
                assert not waiting.done()
            assert versions(await waiting) == {4}
            await engines.freeze()  # and the trainer dies
            await engines.attach([second.url], 4)
            assert not (await rollouts.client.policy())["paused"]


def versions(group: SessionGroup) -> set[int]:
    traces = [trace for item in group.items for trace in item.trajectory.traces]
    return {version for trace in traces for version in trace.policy_versions[trace.loss_mask == 1].tolist()}


async def test_engines_with_other_weights_are_found(tmp_path: Path) -> None:
    async with serving(tmp_path) as it, AsyncClient(it.url, TOKEN) as client:
        engines = WeightUpdater(client)
        model = AutoModelForCausalLM.from_pretrained(it.model, dtype="float32")
        same = EngineSettings(kind="embedded", model=str(it.model))
        found = await engines.probe(make_scorer(model), 32, same, "float32")
        assert found.tokens > 8
        model.lm_head.weight.data.mul_(1.5)
        with pytest.raises(WeightMismatchError, match="does not have the trainer's weights"):
            await engines.probe(make_scorer(model), 32, same, "float32")


async def test_a_service_that_is_not_there(tmp_path: Path) -> None:
    """Is told at once, and not after the patience that one has which goes away."""
    nobody = {"server": "http://127.0.0.1:9", "tasks": str(write_tasks(tmp_path)), "name": "test", "patience": 3600}
    async with RolloutClient(load_settings(nobody)) as rollouts, asyncio.timeout(120):
        with pytest.raises(ClientError, match="polar up"):
            await rollouts.run_group("plain-0", "1")


def test_without_a_loop(tmp_path: Path) -> None:
    with served(tmp_path) as it, BlockingBridge(it.settings(samples=2)) as bridge:
        (group,) = bridge.run_groups(["plain-1"], "a")
        assert len(group.items) == 2


def test_settings_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bridge.toml"
    file.write_text('server = "http://there:1"\nname = "test"\ntasks = "tasks"\nsamples = 3\n')
    monkeypatch.setenv("POLAR_BRIDGE", str(file))
    monkeypatch.setenv("POLAR_SERVER__TOKEN", "secret")
    found = load_settings()
    assert (found.server, found.samples, found.token) == ("http://there:1", 3, "secret")
    assert found.tasks == [str(tmp_path / "tasks")]
    file.write_text('name = "test"\ntasks = "tasks"\nsample = 3\n')
    with pytest.raises(ConfigError, match=r"bridge.toml: sample"):
        load_settings()
    file.write_text('name = "test"\n')
    with pytest.raises(ConfigError, match=r"bridge.toml: tasks"):
        load_settings()
    monkeypatch.delenv("POLAR_BRIDGE")
    with pytest.raises(ConfigError, match="POLAR_BRIDGE"):
        load_settings()
