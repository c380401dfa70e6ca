"""What an update does to the weights, by each way of training them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from polar.errors import ConfigError
from polar.records.trajectory import SessionPaths
from polar.testing.token_paths import make_path
from polar.train.batch import TrainingGroup, select_training_sessions
from polar.train.checkpoint import export_model
from polar.train.learner import Learner, LearnerStats
from polar.train.settings import GrpoSettings, TrainSettings
from tests.unit.train import tiny
from tests.unit.train.documents import group

OLD_WEIGHTS = {
    *("consolidated.safetensors", "consolidated.safetensors.index.json", "model.safetensors.index.json"),
    *("pytorch_model.bin", "weights.pt", "model-q4.gguf"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.folder(tmp_path_factory.mktemp("model"), vocab_size=16)


def learner(folder: Path, **changes: Any) -> Learner:
    tables: dict[str, Any] = {"steps": 1, "tasks": {"train": ["x"]}, "model": {"device": "cpu"}}
    for name, value in changes.items():
        tables[name] = tables.get(name, {}) | value
    tables["optimizer"] = {"lr": 0.01} | tables.get("optimizer", {})
    return Learner(folder, TrainSettings.model_validate(tables))


def batch(count: int = 2) -> list[TrainingGroup]:
    made = []
    for index in range(count):
        sessions = []
        for number, reward in enumerate((1.0, 0.0, 0.0)):
            calls = [make_path(0, [1, 2, index], [3 + number, 7], session_id=f"{index}-{number}", scale=1.0)]
            sessions.append(SessionPaths(f"{index}-{number}", calls, reward))
        one = select_training_sessions(group(sessions, index=index), GrpoSettings())
        assert isinstance(one, TrainingGroup)
        made.append(one)
    return made


def changed(one: Learner, folder: Path) -> set[str]:
    before = tiny.model(vocab_size=16).state_dict()
    base = one.model.get_base_model() if hasattr(one.model, "get_base_model") else one.model
    after = {name.replace("base_layer.", ""): tensor for name, tensor in base.state_dict().items()}
    return {name for name, tensor in after.items() if name in before and not torch.equal(tensor, before[name])}


def likelier(one: Learner) -> bool:
    """What was rewarded, against what was not."""
    return one.score([1, 2, 0], [3, 7])[0] > one.score([1, 2, 0], [4, 7])[0]


def many(one: Learner, steps: int = 12) -> LearnerStats:
    for step in range(steps):
        told = one.step(batch(), step)
    return told


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"lora": {"rank": 4}}},
        {"model": {"trainable_layers": 1}},
        {"optimizer": {"epochs": 2, "minibatches": 2}},
        {"optimizer": {"chunk_tokens": 3, "kept_tokens": 2}},
        {"grpo": {"kl": 0.01, "normalise": "token", "advantage": "leave_one_out", "scale": False}},
        {"grpo": {"kl": 0.01}, "model": {"lora": {}}},
    ],
    ids=str,
)
def test_what_was_rewarded_gets_likelier(folder: Path, changes: dict[str, Any]) -> None:
    one = learner(folder, **changes)
    assert likelier(many(one) and one)


def test_only_what_is_to_be_trained_changes(folder: Path) -> None:
    layers = learner(folder, model={"trainable_layers": 1})
    layers.step(batch(), 1)
    assert all(name.startswith(("model.layers.1.", "model.norm.")) for name in changed(layers, folder))
    adapters = learner(folder, model={"lora": {"rank": 2, "targets": ["q_proj"]}})
    adapters.step(batch(), 1)
    assert changed(adapters, folder) == set()
    assert all("lora" in name for name in adapters.get_trained_weights())


def test_updates_and_rates_are_counted(folder: Path) -> None:
    one = learner(folder, optimizer={"epochs": 2, "minibatches": 2, "warmup": 8, "lr": 0.008})
    told = one.step(batch(), 1)
    assert told.updates == 4
    assert told.learning_rate == pytest.approx(0.004)  # of the last one
    assert told.computed_tokens == 3 * 2 * 9  # scored once, and gone through twice; nine tokens of each tree


def test_a_small_step_is_not_far_from_the_initial_model(folder: Path) -> None:
    told = learner(folder, grpo={"kl": 0.1}).step(batch(), 1)
    assert told.kl_initial == pytest.approx(0, abs=1e-5)


def test_ratios_are_against_what_was_recorded(folder: Path) -> None:
    one = learner(folder)
    groups = batch(1)
    recorded = torch.from_numpy(groups[0].columns.behavior_logprobs.copy())
    own = torch.tensor(one.step(groups, 1).logprobs)
    told = learner(folder).step(groups, 1)
    ratio = (own - recorded).exp()
    assert told.ratio_mean == pytest.approx(float(ratio.mean()), rel=1e-4)
    assert told.ratio_max == pytest.approx(float(ratio.max()), rel=1e-4)
    assert told.truncated == pytest.approx(float((ratio > 2).float().mean()))


@pytest.mark.parametrize("changes", [{}, {"model": {"lora": {"rank": 2}}}], ids=["full", "lora"])
def test_the_folder_that_is_left_says_the_same(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    one = learner(folder, **changes)
    many(one, 3)
    export_model(one.model, folder, tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    ids = torch.tensor([[1, 2, 0, 3, 7]])
    with torch.no_grad():
        logprobs = plain(ids).logits[0, 2:4].log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(one.score([1, 2, 0], [3, 7]), abs=1e-5)
    assert (tmp_path / "model" / "tokenizer.json").exists()


def test_what_cannot_be_trained_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no model in .*: it would have a config.json"):
        learner(tmp_path)
    with pytest.raises(ConfigError, match="the model has 2 layers, and not 3"):
        learner(folder, model={"trainable_layers": 3})
    with pytest.raises(ConfigError, match="Target modules"):
        learner(folder, model={"lora": {"targets": ["nothing"]}})
    with pytest.raises(ConfigError, match="there is no device 'gpu'"):
        learner(folder, model={"device": "gpu"})


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_is_the_one_that_was_trained(tmp_path: Path, tied: bool) -> None:
    base = tiny.folder(tmp_path / "base", tie_word_embeddings=tied)
    one = learner(base)
    one.step(batch(), 1)
    for name in OLD_WEIGHTS:
        (base / name).touch()
    export_model(one.model, base, tmp_path / "model")
    assert not OLD_WEIGHTS & {path.name for path in (tmp_path / "model").iterdir()}
    assert (tmp_path / "model" / "tokenizer.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("device", ["nope", "cuda:1000"])
def test_a_device_that_can_not_be_used(folder: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.device: .*'{device}'"):
        learner(folder, model={"device": device})
