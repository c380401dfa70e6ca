"""A bridge written for NVIDIA's Polar, end to end: a whole service, real HTTP, a real agent, a scripted engine."""

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from polar.engines.scripted import Play, ScriptedServer, ScriptedTurn
from polar.gateway.meter import Meter, UsedUpLimit
from polar.rollout import models as our_models
from polar.service import Service
from tests import nvidia as their_models
from tests.conditions import wait_until
from tests.integration.agents import ASK
from tests.integration.stack import settings
from tests.nvidia_bridge import Bridge, Killed, Sample, Status, endless

KINDS = ("good", "bad", "exits", "hangs", "silent")
HANGS_AFTER = 3  # turns

AGENT = (
    ASK
    + """
import pathlib
kinds, places = sys.argv[1].split(","), pathlib.Path(sys.argv[2])
for kind in kinds:  # each sample of a task takes the next
    try:
        (places / (os.environ["TASK_ID"] + "." + kind)).mkdir()
        break
    except FileExistsError:
        continue
while kind == "waits" and not (places / "go").exists():
    time.sleep(0.02)
if kind == "silent":
    sys.exit(0)
ask("first")
ask("second")
if kind == "good":
    open("good", "w").close()
if kind == "exits":
    sys.exit(3)
if kind == "hangs":
    ask("third")
    (places / "hangs.now").touch()
    time.sleep(600)
"""
)


@pytest.fixture
def only_hanging_sessions_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what a session did, and not by how long it took here: its agent has read its last reply."""

    async def used_up(self: Meter, _: float) -> UsedUpLimit:
        await wait_until(lambda: self.turns >= HANGS_AFTER and (tmp_path / "hangs.now").exists(), seconds=3600)
        return "timeout"

    monkeypatch.setattr(Meter, "wait_until_used_up", used_up)


@asynccontextmanager
async def serving(data: Path, compat: str) -> AsyncIterator[Service]:
    play = Play([ScriptedTurn(text="one answer"), ScriptedTurn(text="another answer")])
    server: dict[str, Any] = {"port": 0, "compat": compat}
    async with (
        ScriptedServer(play) as engine,
        Service(settings([engine.url], server=server, node={"run_workers": 8}), data / "data", node=True) as service,
    ):
        yield service


def group(folder: Path, *kinds: str) -> dict[str, Any]:
    """A task as a bridge renders it from its template, nulls and all. Its samples behave differently."""
    command = shlex.join([sys.executable, "-c", AGENT, ",".join(kinds), str(folder)])
    return {
        "instruction": "do it",
        "timeout_seconds": 600,
        "dispatch_priority": 0,
        "early_stop_min_usable_sessions": None,
        "runtime": {
            **{"backend": "local", "image": None, "prepare": [], "eval_prepare": None, "env": None, "workdir": None},
            **{"network": "host", "kwargs": {}, "import_path": None, "storage_mb": None, "internet_volumes": []},
        },
        "agent": {
            **{"harness": "shell", "import_path": None, "model_name": "m", "settings": None, "mcp_servers": None},
            "custom_shell": {"command": command, "cwd": None, "env": None},
        },
        "evaluator": {"strategy": "test_on_output", "config": {"command": "test -f good"}, "env": None},
        "metadata": None,
    }


def by_session(samples: list[Sample]) -> dict[int, list[Sample]]:
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.index, []).append(sample)
    return found


@pytest.mark.usefixtures("only_hanging_sessions_time_out")
@pytest.mark.parametrize("models", [their_models, our_models], ids=["their models", "our models"])
async def test_groups_arrive_as_the_bridge_expects_them(tmp_path: Path, models: ModuleType) -> None:
    async with serving(tmp_path, "nvidia") as service, httpx.AsyncClient(base_url=service.control_url) as http:
        groups = endless(
            group(tmp_path, "exits", "silent", "exits", "exits", "exits"),  # nothing of it can be trained on
            group(tmp_path, *KINDS),
            then=lambda: group(tmp_path, "good", "bad", "bad", "bad", "bad"),
        )
        bridge = Bridge(service.control_url, models, groups, group_size=5, batch=2, salt="a").start()
        batch = await asyncio.to_thread(bridge.generate_rollout)
        await asyncio.to_thread(bridge.kill)
        assert len(batch) == 2
        assert bridge.metrics["dropped_zero_trainable"] == 1, bridge.problems
        assert bridge.metrics["dropped_failed"] == 0, bridge.problems
        assert not any("validation" in problem for problem in bridge.problems)
        (mixed,) = [samples for samples in batch if any(sample.remove_sample for sample in samples)]
        sessions = by_session(mixed)
        assert len(sessions) == 5
        seen = set()
        for samples in sessions.values():
            about = samples[0].metadata["polar"]
            assert set(about["timing"]) == {"register_to_init_queue_ms", "init_ms", "run_ms", "postrun_ms"}
            assert about["metadata"]["group_id"] == 1
            if samples[0].remove_sample:
                assert (about["session_status"], about["placeholder"]) == ("COMPLETED", True)
                seen.add("silent")
                continue
            recorded = (await http.get(f"/sessions/{about['session_id']}/exchanges")).json()
            assert len(samples) == len(recorded)  # per request
            for sample, exchange in zip(samples, recorded, strict=True):
                check_sample(sample, exchange)
            reward, status = samples[0].reward["score"], samples[0].status
            trained = [sample.trainable > 0 for sample in samples]
            assert trained == [status is Status.COMPLETED] * len(samples)
            seen.add((about["session_status"], status, reward, len(samples)))
            if status is Status.COMPLETED:
                assert about["error"] is None
                assert about["evaluation"]["report"]["resolved"] is (reward == 1.0)
            else:
                assert about["error"]
        assert seen == {
            ("COMPLETED", Status.COMPLETED, 1.0, 2),
            ("COMPLETED", Status.COMPLETED, 0.0, 2),
            ("ERROR", Status.FAILED, 0.0, 2),
            ("TIMEOUT", Status.ABORTED, 0.0, HANGS_AFTER),
            "silent",
        }


def check_sample(sample: Sample, exchange: dict[str, Any]) -> None:
    """Its tokens and log-probabilities are those of the call."""
    sampled = exchange["sampled_ids"]
    assert sample.tokens == exchange["prompt_ids"] + sampled
    assert sample.response_length == len(sample.loss_mask) == len(sampled)
    assert sample.rollout_log_probs == exchange["logprobs"]
    assert set(sample.loss_mask) == ({1} if sample.trainable else {0})
    assert sample.metadata["polar"]["text"].startswith("[assistant] ")


async def test_a_restarted_trainer_goes_on(tmp_path: Path) -> None:
    """On another port, with the same names: of one task that has ended, and of one that still runs."""
    async with serving(tmp_path, "nvidia") as service, httpx.AsyncClient(base_url=service.control_url) as http:
        groups = [group(tmp_path, "good"), group(tmp_path, "waits")]

        async def begin() -> tuple[Bridge, asyncio.Future[list[list[Sample]]]]:
            made = Bridge(service.control_url, their_models, iter(groups), group_size=1, batch=2, salt="a").start()
            generating = asyncio.get_running_loop().run_in_executor(None, made.generate_rollout)
            async with asyncio.timeout(60):
                while made.metrics["completed_groups"] < 1 or made.metrics["submitted"] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            return made, generating

        trainer, generating = await begin()
        before = (await http.get("/rollout/task/miles-0-a")).json()["results"][0]["session_id"]
        await asyncio.to_thread(trainer.kill)
        with pytest.raises(Killed):
            await generating
        trainer, generating = await begin()
        (tmp_path / "go").touch()
        batch = await generating
        await asyncio.to_thread(trainer.kill)
        assert trainer.metrics["called_back"] == 2
        assert [sample.trainable > 0 for samples in batch for sample in samples] == [True] * 4
        ids = {sample.metadata["polar"]["session_id"] for samples in batch for sample in samples}
        assert before not in ids  # what had ended was run again,
        ran = {one["session_id"] for one in (await http.get("/sessions", params={"limit": 100})).json()}
        assert ran == {before, *ids}  # and what ran was not


async def test_a_bridge_that_polls_is_served_with_our_own_meaning_too(tmp_path: Path) -> None:
    async with serving(tmp_path, "polar") as service:
        groups = iter([group(tmp_path, "good", "exits")])
        bridge = Bridge(
            service.control_url, their_models, groups, group_size=2, batch=1, salt="a", poll_seconds=0.05
        ).start()
        (samples,) = await asyncio.to_thread(bridge.generate_rollout)
        await asyncio.to_thread(bridge.kill)
        assert {sample.reward["score"] for sample in samples} == {0.0, 1.0}
        assert {sample.status for sample in samples} == {Status.COMPLETED}  # what an agent brings about is graded
        assert all(sample.trainable for sample in samples)
