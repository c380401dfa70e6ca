"""OpenRLHF's executor and its engine, without OpenRLHF; tests/trainers/test_openrlhf.py has its own loop."""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polar.bridges import rollouts
from polar.bridges.openrlhf import agent
from polar.bridges.openrlhf.agent import EngineServer
from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.bridges.settings import SETTINGS_FILE_VARIABLE
from polar.client.calls import ClientError
from polar.config import EngineSettings, SamplingOverrides
from polar.engines.base import TokenPrompt
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError, EngineError
from polar.testing.conversations import make_session_item
from polar.testing.token_paths import make_path, make_session_paths
from polar.types import Request, SamplingParams
from tests.unit.bridges.pretending import pretend


class Engine:
    """As an executor has it: it says the prompt again, backwards."""

    async def generate(self, prompt: list[int], params: Any) -> Any:
        if len(prompt) > 4:
            raise ValueError("The prompt is longer than the maximum model length.")
        ids = prompt[::-1][: params.max_tokens]
        logprobs = [{id: SimpleNamespace(logprob=-params.temperature / id)} for id in ids]
        said = SimpleNamespace(token_ids=ids, logprobs=logprobs, text="", finish_reason="length", stop_reason=None)
        return SimpleNamespace(outputs=[said])


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmEngine]:
    pretend(monkeypatch, {"vllm": {"SamplingParams": SimpleNamespace}})
    front = EngineServer(Engine(), 64, host="127.0.0.1")
    engine = VllmEngine(await front.start(), EngineSettings(kind="vllm"))
    try:
        yield engine
    finally:
        await engine.close()
        await front.stop()


async def sampled(engine: VllmEngine, prompt: list[int], *, stream: bool) -> tuple[list[int], list[Any], Any]:
    request = Request(model="", messages=[], sampling=SamplingParams(temperature=2.0, max_tokens=3))
    text = ",".join(map(str, prompt)).encode()
    ids: list[int] = []
    logprobs: list[Any] = []
    finish = None
    async for chunk in engine.generate(request, stream=stream, prompt=TokenPrompt(np.array(prompt, np.int32), text)):
        ids += chunk.ids
        logprobs += chunk.logprobs or []
        finish = chunk.finish_reason or finish
    return ids, logprobs, finish


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_of_an_executor_is_one_for_polar(client: VllmEngine, stream: bool) -> None:
    assert (await client.start()).context_length == 64
    assert await sampled(client, [1, 2, 4, 8], stream=stream) == ([8, 4, 2], [-0.25, -0.5, -1.0], "length")


async def test_what_its_engine_refuses(client: VllmEngine) -> None:
    with pytest.raises(EngineError, match="maximum model length"):
        await sampled(client, [1, 2, 3, 4, 5], stream=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What executors ask a service for, which gives them one session of two, sampled at temperature 0.7."""
    pretend(monkeypatch, {"openrlhf.utils.agent": {"AgentExecutorBase": object}})
    told: list[Any] = []

    class Asked(RolloutClient):
        def __init__(self, _: Any) -> None: ...

        async def run_group(self, task: str, key: str, **more: Any) -> SessionGroup:
            told.append((key, more["samples"], more["sampling"]))
            await asyncio.sleep(0.01)
            ran = make_session_item(make_session_paths(make_path(0, [1, 2], [3], scale=0.7), reward=1.0), task_id=task)
            return SessionGroup(task, task, 2, [ran], [], Counter(timeout=1))

    monkeypatch.setattr(rollouts, "_shared_groups", {})
    monkeypatch.setattr(rollouts, "RolloutClient", Asked)
    return told


def executor() -> Any:
    return agent.make_agent_executor({"tasks": ["anywhere"], "name": "one"}, serves_engine=False)()


def params(temperature: float = 0.7, *, logprobs: int | None = 1) -> Any:
    return SimpleNamespace(temperature=temperature, top_p=0.9, top_k=-1, logprobs=logprobs)


async def executed(made: Any, sampling: Any, *, trains: bool = True) -> list[dict[str, Any]]:
    label = agent.GroupLabel("t", "train-0", 2, 0, trains)
    return list(await asyncio.gather(*(made.execute("go", label, sampling, 64, None, None) for _ in range(2))))


async def test_samples_of_a_prompt_are_one_group(asked: list[Any]) -> None:
    """With the trainer's sampling. One that was left out has no traces, and the mean of the others."""
    first, second = await executed(executor(), params())
    assert [len(one["traces"]) for one in (first, second)] == [1, 0]
    assert first["reward"] == second["reward"] == 1.0
    assert asked == [("train-0", 2, SamplingOverrides(temperature=0.7, top_p=0.9, top_k=0))]


@pytest.mark.usefixtures("asked")
async def test_one_sample_that_is_cancelled() -> None:
    """Takes the group from nobody else."""
    made, label = executor(), agent.GroupLabel("t", "k", 2, 0, is_training=True)
    first, second = (asyncio.ensure_future(made.execute("go", label, params(), 64, None, None)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert (await second)["traces"] == []
    assert first.cancelled()


@pytest.mark.usefixtures("asked")
async def test_log_probabilities_of_another_temperature() -> None:
    """End the training, unless it has no use for them."""
    with pytest.raises(ConfigError, match=r"computes at temperature 1, .* of temperature 0\.7"):
        await executed(executor(), params(1.0))
    await executed(executor(), params(1.0), trains=False)
    await executed(executor(), params(1.0, logprobs=None))


@pytest.mark.usefixtures("asked")
async def test_the_file_that_openrlhf_loads_knows_the_trainers_labels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is loaded by its path, and labels come by the module's name."""
    file = tmp_path / "bridge.toml"
    file.write_text('name = "one"\ntasks = "anywhere"\n')
    monkeypatch.setenv(SETTINGS_FILE_VARIABLE, str(file))
    spec = importlib.util.spec_from_file_location("agent_module", agent.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.AgentExecutor()
    monkeypatch.setattr(type(made), "_serve", served)
    assert len((await executed(made, params()))[0]["traces"]) == 1


@pytest.mark.usefixtures("asked")
async def test_an_engine_that_could_not_be_handed_over_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    async def serve(*_: Any) -> None:
        tries.append(len(tries))
        if len(tries) == 1:
            raise ClientError("It is away.")

    made = agent.make_agent_executor({"tasks": ["anywhere"], "name": "one"})()
    monkeypatch.setattr(type(made), "_serve", serve)
    with pytest.raises(ClientError):
        await executed(made, params())
    for _ in range(2):
        assert len((await executed(made, params()))[0]["traces"]) == 1
    assert tries == [0, 1]


async def served(*_: Any) -> None: ...
