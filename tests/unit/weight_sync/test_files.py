"""What is sent to engines: names, merged adapters, files."""

import math
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from polar.engines.embedded.weights import WeightUpdate, load_update, save_update
from polar.errors import ConfigError
from polar.weight_sync import files
from polar.weight_sync.base import create_transport
from polar.weight_sync.files import (
    EmbeddedTransport,
    WeightStaging,
    choose_staging_folder,
    move_weights_to_disk,
    remove_other_stagings,
    remove_staged_weights,
)
from polar.weight_sync.merged_weights import get_merged_weights
from polar.weight_sync.probe import Difference, Probe, ProbeSample, Tolerance, choose_tolerance, make_scorer


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
    staged = WeightStaging(tmp_path)
    staged.write(get_merged_weights(model), 3)
    sent = load_file(staged.get_weights_file(3))
    assert "lm_head.weight" in sent  # also where it is the embedding
    other = tiny(tied=tied, seed=9)
    other.load_state_dict(sent)
    assert make_scorer(other)(PROMPT, SAMPLED) == make_scorer(model)(PROMPT, SAMPLED)


def test_adapters_are_merged_into_what_is_sent_and_not_into_the_model() -> None:
    model = adapted(tiny())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = tiny(seed=9)
    merged.load_state_dict(get_merged_weights(model))
    np.testing.assert_allclose(make_scorer(merged)(PROMPT, SAMPLED), make_scorer(model)(PROMPT, SAMPLED), atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert make_scorer(model)(PROMPT, SAMPLED) != make_scorer(tiny())(PROMPT, SAMPLED)


def test_a_model_that_is_being_trained_is_scored_without_dropout() -> None:
    model = adapted(tiny())
    model.train()
    assert make_scorer(model)(PROMPT, SAMPLED) == make_scorer(model)(PROMPT, SAMPLED)
    assert model.training


def test_layers_that_are_trained_whole_beside_an_adapter_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(ConfigError, match="can't be sent"):
        get_merged_weights(get_peft_model(tiny(tied=False), config))


def test_only_the_latest_weights_stay(tmp_path: Path) -> None:
    staged = WeightStaging(tmp_path / "weights")
    for version in (1, 2, 2):
        staged.write({"a": torch.full((3,), float(version))}, version)
    (staged.folder / "3.unfinished").mkdir()
    staged.keep_only(2)
    assert [path.name for path in staged.folder.iterdir()] == ["2"]
    assert load_file(staged.get_weights_file(2))["a"].tolist() == [2.0, 2.0, 2.0]


class Usage(NamedTuple):
    free: int


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(files, "_SHARED_MEMORY", folder)
    return folder


def tensors(scale: float, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    tied = torch.arange(6.0).reshape(2, 3).T.to(dtype) * scale  # not as it lies in memory
    odd = torch.full((3,), scale).bfloat16()
    return {"tied": tied, "again": tied, "odd": odd, "one": torch.tensor(scale), "none": torch.zeros(0)}


def test_in_memory_the_file_of_the_version_before_last_is_written_over(memory: Path) -> None:
    staged = WeightStaging(memory / "weights")
    files = []
    for version in range(1, 6):
        staged.write(tensors(version), version)
        files.append(staged.get_weights_file(version).stat().st_ino)
        for written in staged.folder.glob("[0-9]*"):  # engines still read the one before
            found = load_file(written / "model.safetensors")
            expected = tensors(int(written.name))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        staged.keep_only(version)
    assert files[2:] == files[:3]
    assert sorted(path.name for path in staged.folder.iterdir()) == ["5", "spare"]


@pytest.mark.parametrize(
    "other", [{"a": torch.ones(2, 3).half()}, {"a": torch.ones(3, 2)}, {"a": torch.ones(2, 4)}, {"b": torch.ones(2, 3)}]
)
def test_weights_of_another_kind_have_a_file_of_their_own(memory: Path, other: dict[str, torch.Tensor]) -> None:
    staged = WeightStaging(memory / "weights")
    same = {"a": torch.zeros(2, 3)}
    for version, weights in enumerate((same, same, other, same, same, same), 1):
        staged.write(weights, version)
        staged.keep_only(version)
        found = load_file(staged.get_weights_file(version))
        assert found.keys() == weights.keys()
        assert all(found[name].dtype == weights[name].dtype for name in weights)
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_spare_file_of_another_kind_makes_room(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = WeightStaging(memory / "weights")
    for version in (1, 2):
        staged.write({"a": torch.ones(3)}, version)
        staged.keep_only(version)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=0 if (staged.folder / "spare").exists() else 100))
    staged.write({"a": torch.ones(4)}, 3)
    assert len(load_file(staged.get_weights_file(3))["a"]) == 4


def test_a_version_that_is_written_anew_may_be_of_another_kind(memory: Path) -> None:
    """The next update of one that failed; that of after that finds no spare that fits."""
    staged = WeightStaging(memory / "weights")
    staged.write({"a": torch.ones(3)}, 1)
    staged.write({"a": torch.ones(4)}, 1)
    for version in (2, 3):
        staged.write({"a": torch.full((3,), float(version))}, version)
        staged.keep_only(version)
        assert load_file(staged.get_weights_file(version))["a"].tolist() == [version] * 3


def test_versions_that_never_arrived_go(memory: Path) -> None:
    staged = WeightStaging(memory / "weights")
    for version, arrives in ((1, True), (2, False), (3, True), (4, False), (5, False), (6, True)):
        staged.write(tensors(version), version)
        if arrives:
            staged.keep_only(version)
            staged.keep_only(version)
            assert {path.name for path in staged.folder.iterdir()} <= {str(version), "spare"}
        assert load_file(staged.get_weights_file(version))["one"] == version


def test_what_another_process_wrote_is_not_written_over(memory: Path) -> None:
    """It may hold anything."""
    for first in (1, 4):
        staged = WeightStaging(memory / "weights")
        for version in range(first, first + 3):
            left = staged.folder / f"{version + (version == first)}.unfinished"  # of one that was killed
            left.mkdir(parents=True)
            (left / "half").write_text("written")
            staged.write({"a": torch.full((first,), float(version))}, version)
            assert not left.exists()
            staged.keep_only(version)
            assert (version > first) == (staged.folder / "spare").exists()
            assert load_file(staged.get_weights_file(version))["a"].tolist() == [version] * first
            assert [path.name for path in staged.get_version_folder(version).iterdir()] == ["model.safetensors"]


def test_the_latest_weights_stay_when_a_trainer_ends_and_no_others(memory: Path) -> None:
    sync = EmbeddedTransport(memory / "weights")
    for version in (1, 2):
        sync.prepare(tensors(version), version)
        sync.release_previous(version)
    sync.close()
    sync.close()
    assert [path.name for path in sync.staging.folder.iterdir()] == ["2"]
    sync.prepare(tensors(3), 3)
    assert load_file(sync.staging.get_weights_file(3))["one"] == 3


def test_a_spare_file_that_somebody_removed_is_no_loss(memory: Path) -> None:
    staged = WeightStaging(memory / "weights")
    for version in (1, 2):
        staged.write(tensors(version), version)
        staged.keep_only(version)
    shutil.rmtree(staged.folder)
    staged.write(tensors(3), 3)
    assert load_file(staged.get_weights_file(3))["one"] == 3


def test_an_overwriting_that_fails_leaves_nothing_half_done(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = WeightStaging(memory / "weights")
    for version in (1, 2):
        staged.write(tensors(version), version)
        staged.keep_only(version)

    def broken(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(files.np, "memmap", broken)  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"can't be written to .*: Cannot allocate memory"):
            staged.write(tensors(3), 3)
    assert [path.name for path in staged.folder.iterdir()] == ["2"]
    staged.write(tensors(3), 3)
    assert load_file(staged.get_weights_file(3))["one"] == 3


def test_weights_without_room_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=100))
    with pytest.raises(ConfigError, match="no room"):
        WeightStaging(tmp_path).write({"a": torch.zeros(1000)}, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left"), OSError(28, "No space left")])
def test_a_disk_that_fills_up_meanwhile_is_an_error_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(ConfigError, match=r"can't be written to .*: .*No space left"):
        WeightStaging(tmp_path).write({"a": torch.zeros(1000)}, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_finds_its_weights_again(tmp_path: Path, memory: Path) -> None:
    assert choose_staging_folder(tmp_path / "a", 1).parent == memory
    assert choose_staging_folder(tmp_path / "a", 1) == choose_staging_folder(tmp_path / "b" / ".." / "a", 1)
    assert choose_staging_folder(tmp_path / "a", 1) != choose_staging_folder(tmp_path / "b", 1)


def test_weights_go_to_the_runs_folder_where_memory_has_no_room_for_two(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    in_memory, on_disk = choose_staging_folder(run, 1), run / "weights"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=10_000))
    assert choose_staging_folder(run, 5_000) == on_disk
    assert choose_staging_folder(run, 4_999) == in_memory
    WeightStaging(in_memory).write({"a": torch.zeros(1000)}, 1)  # its own weights are no reason to move
    assert choose_staging_folder(run, 7_000) == in_memory
    remove_other_stagings(run, on_disk)
    assert not in_memory.exists()
    memory.rmdir()
    assert choose_staging_folder(run, 1) == on_disk


def test_an_interrupted_run_leaves_nothing_in_memory_and_its_engine_finds_its_weights(
    tmp_path: Path, memory: Path
) -> None:
    run, state = tmp_path / "run", tmp_path / "run" / "engine.json"
    staged = WeightStaging(choose_staging_folder(run, 1))
    for version in (7, 8):
        staged.write({"a": torch.full((3,), float(version))}, version)
    run.mkdir()
    save_update(state, WeightUpdate(str(staged.get_weights_file(7)), 7))  # 8 has been prepared, and no more
    move_weights_to_disk(run, state)
    move_weights_to_disk(run, state)  # of a process that gave its engine nothing
    assert list(memory.iterdir()) == []
    last = load_update(state)
    assert last == WeightUpdate(str(run / "weights" / "7" / "model.safetensors"), 7)
    assert last is not None
    assert load_file(last.path)["a"].tolist() == [7.0, 7.0, 7.0]
    remove_staged_weights(run)
    assert [path.name for path in run.iterdir()] == ["engine.json"]


def test_weights_that_cannot_be_moved_stay_where_the_engine_finds_them(
    tmp_path: Path, memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, state = tmp_path / "run", tmp_path / "engine.json"
    staged = WeightStaging(choose_staging_folder(run, 1))
    staged.write({"a": torch.ones(3)}, 7)
    save_update(state, WeightUpdate(str(staged.get_weights_file(7)), 7))
    run.write_text("no folder")
    move_weights_to_disk(run, state)
    assert staged.get_weights_file(7).exists()
    assert f"stay in {staged.folder}" in caplog.text
    move_weights_to_disk(run, None)  # of an engine that remembers nothing
    assert list(memory.iterdir()) == []


def test_other_kinds_of_engines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'scripted'.* Available: embedded, vllm, vllm_ipc"):
        create_transport("scripted", tmp_path)


async def test_a_difference_is_over_all_tokens_and_nan_is_infinite() -> None:
    probe = Probe(lambda _, sampled: [-1.0] * len(sampled), 100, Tolerance(0.5, 0.2))
    samples = [ProbeSample([1], [2, 3], [-1.0, -1.4]), ProbeSample([1], [4, 5], [-1.0, -1.0])]
    found = await probe.measure_difference(samples)
    assert (found.tokens, round(found.largest, 6), round(found.mean, 6)) == (4, 0.4, 0.1)
    assert found.is_within(probe.tolerance)
    assert not Difference(4, 0.6, 0.1).is_within(probe.tolerance)
    assert not Difference(4, 0.4, 0.3).is_within(probe.tolerance)
    spoiled = await probe.measure_difference([ProbeSample([1], [2], [float("nan")])])
    assert not spoiled.is_within(probe.tolerance)


async def test_a_few_tokens_may_be_far_apart_in_half_precision_but_not_one_of_every_reply() -> None:
    probe = Probe(lambda _, sampled: [-1.0] * len(sampled), 100, choose_tolerance("bfloat16"))

    async def passes(*last: float) -> bool:
        """Four replies, and the last log-probability of some."""
        usual = [-1.1] * 8
        replies = [[*usual[:-1], value] for value in last] + [usual] * (4 - len(last))
        found = await probe.measure_difference([ProbeSample([1], list(range(8)), reply) for reply in replies])
        return found.is_within(probe.tolerance)

    assert await passes(-11.0, -9.0)
    assert not await passes(-11.0, -9.0, -3.0)
    assert not await passes(-11.0, -9.0, -3.0, -8.0)
    assert not await passes(float("nan"))
    assert not await passes(-math.inf)


async def test_what_stands_for_no_number_is_none() -> None:
    class WritesPlaceholders:
        url = "http://engine"

        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            yield SimpleNamespace(ids=[1, 2], logprobs=[-1.0, -9999.0])

    engine: Any = WritesPlaceholders()
    probe = Probe(lambda _, sampled: [-1.0] * len(sampled), 100, choose_tolerance("bfloat16"))
    samples = await probe.sample(engine)
    assert [math.isnan(value) for value in samples[0].logprobs] == [False, True]
    assert not (await probe.measure_difference(samples)).is_within(probe.tolerance)


def test_the_coarser_dtype_decides_what_is_tolerated() -> None:
    assert choose_tolerance("float32").largest == 1e-3
    assert choose_tolerance("float32", "bfloat16") == choose_tolerance("bfloat16")
    assert choose_tolerance("bfloat16", "float32") == choose_tolerance("bfloat16")
    assert choose_tolerance("float32", "auto") == choose_tolerance("bfloat16")
