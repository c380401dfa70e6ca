"""What of OpenRLHF's bridge needs no OpenRLHF; tests/trainers/test_openrlhf.py has its own loop."""

import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from polar.bridges.openrlhf import check, filled
from polar.bridges.openrlhf_engine import Front
from polar.config import EngineSettings
from polar.engines.base import TokenPrompt
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError, EngineError
from polar.types import Request, Sampling


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
    vllm = ModuleType("vllm")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    front = Front(Engine(), 64, host="127.0.0.1")
    engine = VllmEngine(await front.start(), EngineSettings(kind="vllm"))
    try:
        yield engine
    finally:
        await engine.close()
        await front.stop()


async def sampled(engine: VllmEngine, prompt: list[int], *, stream: bool) -> tuple[list[int], list[Any], Any]:
    request = Request(model="", messages=[], sampling=Sampling(temperature=2.0, max_tokens=3))
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
    found = filled(rows, 5)
    assert [number for number, _ in found] == [0, 0, 1, 1, 1]
    assert [one.action_mask.nonzero()[:, 1].tolist() for _, one in found] == [[3], [4, 5], [0], [2], [1]]
    assert filled(rows, 3) == rows


def test_more_traces_or_fewer_tokens_than_a_step_takes() -> None:
    with pytest.raises(ConfigError, match="batch_size to 2 at least"):
        filled([(0, row(3, 1)), (0, row(3, 1))], 1)
    with pytest.raises(ConfigError, match=r"fewer than --train.batch_size 4"):
        filled([(0, row(3, 0, 1))], 4)


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
    check(arguments())
    with pytest.raises(ConfigError, match=rf"^Set .*{name.partition('__')[2]}"):
        check(arguments(**{name: value}))
