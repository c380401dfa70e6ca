"""What is sent to engines: names, merged adapters, files."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from polar.engines.http import EngineHttp
from polar.errors import ConfigError
from polar.train.syncing.kinds import EmbeddedSync, sync_of
from polar.train.syncing.probe import Difference, Probe, Sample, Tolerance, scorer, tolerance_of
from polar.train.syncing.staging import Staging, staging_folder
from polar.train.syncing.weights import weights_of


def tiny(*, tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], lora_dropout=0.5)
    model = get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


PROMPT, SAMPLED = [1, 2, 3, 4], [5, 6, 7]


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_the_sent_weights_is_the_same(tmp_path: Path, tied: bool) -> None:
    model = tiny(tied=tied)
    staging = Staging(tmp_path)
    staging.write(weights_of(model), 3)
    sent = load_file(staging.file(3))
    assert "lm_head.weight" in sent  # also where it is the embedding
    other = tiny(tied=tied, seed=9)
    other.load_state_dict(sent)
    assert scorer(other)(PROMPT, SAMPLED) == scorer(model)(PROMPT, SAMPLED)


def test_adapters_are_merged_into_what_is_sent_and_not_into_the_model() -> None:
    model = adapted(tiny())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = tiny(seed=9)
    merged.load_state_dict(weights_of(model))
    np.testing.assert_allclose(scorer(merged)(PROMPT, SAMPLED), scorer(model)(PROMPT, SAMPLED), atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert scorer(model)(PROMPT, SAMPLED) != scorer(tiny())(PROMPT, SAMPLED)


def test_a_model_that_is_being_trained_is_scored_without_dropout() -> None:
    model = adapted(tiny())
    model.train()
    assert scorer(model)(PROMPT, SAMPLED) == scorer(model)(PROMPT, SAMPLED)
    assert model.training


def test_layers_that_are_trained_whole_beside_an_adapter_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="can't be sent"):
        weights_of(get_peft_model(tiny(tied=False), config))


def test_only_the_latest_weights_stay(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "weights")
    for version in (1, 2, 2):
        staging.write({"a": torch.full((3,), float(version))}, version)
    (staging.folder / "3.unfinished").mkdir()
    staging.keep_only(2)
    assert [path.name for path in staging.folder.iterdir()] == ["2"]
    assert load_file(staging.file(2))["a"].tolist() == [2.0, 2.0, 2.0]
    staging.clear()
    assert not staging.folder.exists()


def test_weights_without_room_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=100))
    with pytest.raises(ConfigError, match="no room"):
        Staging(tmp_path).write({"a": torch.zeros(1000)}, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_finds_its_weights_again(tmp_path: Path) -> None:
    assert staging_folder(tmp_path / "a") == staging_folder(tmp_path / "b" / ".." / "a")
    assert staging_folder(tmp_path / "a") != staging_folder(tmp_path / "b")


async def test_the_embedded_engine_is_told_file_and_version(tmp_path: Path) -> None:
    told: list[Any] = []

    async def handle(request: web.BaseRequest) -> web.Response:
        if request.path == "/update_weights":
            told.append(await request.json())
        return web.json_response({"version": 4})

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = EngineHttp("http://{}:{}".format(*runner.addresses[0][:2]), None, 5)
    sync = EmbeddedSync(tmp_path)
    sync.prepare({"a": torch.ones(2)}, 4)
    await sync.load(engine, 4)
    assert await sync.held(engine) == 4
    (order,) = told
    assert order["version"] == 4
    assert load_file(order["path"])["a"].tolist() == [1.0, 1.0]
    await engine.close()
    await runner.cleanup()


def test_other_kinds_of_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scripted can't be given new weights; those that can: embedded, vllm"):
        sync_of("scripted", tmp_path)


async def test_a_difference_is_over_all_tokens_and_nan_is_infinite() -> None:
    probe = Probe(lambda _, sampled: [-1.0] * len(sampled), 100, Tolerance(0.5, 0.2))
    samples = [Sample([1], [2, 3], [-1.0, -1.4]), Sample([1], [4, 5], [-1.0, -1.0])]
    found = await probe.difference(samples)
    assert (found.tokens, round(found.largest, 6), round(found.mean, 6)) == (4, 0.4, 0.1)
    assert found.within(probe.tolerance)
    assert not Difference(4, 0.6, 0.1).within(probe.tolerance)
    assert not Difference(4, 0.4, 0.3).within(probe.tolerance)
    spoiled = await probe.difference([Sample([1], [2], [float("nan")])])
    assert not spoiled.within(probe.tolerance)


def test_the_coarser_dtype_decides_what_is_tolerated() -> None:
    assert tolerance_of("float32").largest == 1e-3
    assert tolerance_of("float32", "bfloat16") == tolerance_of("bfloat16")
    assert tolerance_of("bfloat16", "float32") == tolerance_of("bfloat16")
    assert tolerance_of("float32", "auto") == tolerance_of("bfloat16")
