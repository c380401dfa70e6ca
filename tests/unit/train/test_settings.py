import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from polar.demo import tasks
from polar.errors import ConfigError
from polar.train.run import read_tasks
from polar.train.service_process import build_service_settings, get_engine_state_file
from polar.train.settings import TrainSettings, load_settings

LEAST = 'steps = 3\n[tasks]\ntrain = ["tasks"]\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return path


def test_little_must_be_said(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, LEAST), steps=7, seed=None)
    assert (settings.steps, settings.seed, settings.rollout.builder) == (7, 0, "prefix_tree")
    assert settings.output_folder == tmp_path / "runs" / "train"
    assert settings.resolve_path("tasks") == tmp_path / "tasks"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "steps: it is missing; tasks: it is missing"),
        (LEAST + "[grpo]\nclip = 1", "grpo.clip: there is no such field"),
        (LEAST + "[rollout]\ngroup_size = 1", "rollout.group_size: input should be greater than 1"),
        (LEAST + '[grpo]\nadvantage = "median"', "grpo.advantage: input should be 'mean' or 'leave_one_out'"),
        (LEAST + "[model]\ntrainable_layers = 2\nlora = {}", "model: it takes either `lora` or `trainable_layers`"),
        ('name = "a/b"\n' + LEAST, "name: it is the name of a folder, so without slashes"),
        (LEAST + '[rollout]\nurl = "http://x"', "sync.kind"),
        (LEAST + '[sync]\nkind = "vllm"\n[rollout]\nurl = "http://x"\nconfig = "polar.toml"', "for one started here"),
        ('folder = "/"\n' + LEAST, "folder: there is no such field"),
        ("steps = ", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_settings(written(tmp_path, text))
    assert problem in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "train.toml"))


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    text = LEAST + '[sync]\nkind = "vllm"\napi_key = "secret-key"\n[rollout]\nurl = "http://x"\ntoken = "secret-token"'
    shown = repr(load_settings(written(tmp_path, text)))
    assert "secret-key" not in shown
    assert "secret-token" not in shown


def of(tmp_path: Path, **tables: Any) -> TrainSettings:
    return TrainSettings.model_validate({"folder": tmp_path, "steps": 1, "tasks": {"train": ["x"]}} | tables)


def test_the_service_serves_the_model_that_is_trained(tmp_path: Path) -> None:
    settings, variables = build_service_settings(of(tmp_path, polar={"node": {"run_workers": 3}}), tmp_path / "model")
    assert (settings.engine.kind, settings.engine.model) == ("embedded", str(tmp_path / "model"))
    assert (settings.node.run_workers, variables["POLAR_NODE__RUN_WORKERS"]) == (3, "3")
    state = str(tmp_path / "runs" / "train" / "engine.json")
    assert settings.engine.options == {"state": state}


def test_an_engine_that_is_named_is_left_as_it_is(tmp_path: Path) -> None:
    polar = {"engine": {"kind": "vllm", "urls": ["http://127.0.0.1:1"], "options": {"a": {"b": True}}}}
    settings, _ = build_service_settings(of(tmp_path, polar=polar), tmp_path / "model")
    assert (settings.engine.kind, settings.engine.urls, settings.engine.model) == ("vllm", ["http://127.0.0.1:1"], None)
    assert settings.engine.options == {"a": {"b": True}}


def test_a_file_of_the_services_own(tmp_path: Path) -> None:
    (tmp_path / "polar.toml").write_text('[engine]\nkind = "scripted"\n[node]\nrun_workers = 5\n')
    polar = {"node": {"run_workers": 2}}
    settings, _ = build_service_settings(
        of(tmp_path, rollout={"config": "polar.toml"}, polar=polar), tmp_path / "model"
    )
    assert (settings.engine.kind, settings.node.run_workers) == ("scripted", 2)


def test_an_engine_of_the_services_own_file_finds_its_weights_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service launches it, and both may be killed."""
    monkeypatch.delenv("POLAR_ENGINE__KIND", raising=False)
    text = '[engine]\nmodel = "other"\noptions = { threads = 2 }\n'
    (tmp_path / "polar.toml").write_text(text)
    wanted = of(tmp_path, rollout={"config": "polar.toml"})
    settings, variables = build_service_settings(wanted, tmp_path / "model")
    state = tmp_path / "runs" / "train" / "engine.json"
    assert (settings.engine.kind, settings.engine.model) == ("embedded", "other")
    assert settings.engine.options == json.loads(variables["POLAR_ENGINE__OPTIONS"])
    assert settings.engine.options == {"state": str(state), "threads": 2}
    assert get_engine_state_file(wanted, settings.engine) == state
    (tmp_path / "polar.toml").write_text('[engine]\noptions = { state = "mine.json" }\n')
    settings, _ = build_service_settings(wanted, tmp_path / "model")
    assert settings.engine.model == str(tmp_path / "model")
    assert get_engine_state_file(wanted, settings.engine) == tmp_path / "mine.json"
    (tmp_path / "polar.toml").write_text('[engine]\nkind = "embedded"\nurls = ["http://127.0.0.1:1"]\n')
    settings, _ = build_service_settings(wanted, tmp_path / "model")
    assert (settings.engine.model, settings.engine.options) == (None, {})  # somebody else's
    assert get_engine_state_file(wanted, settings.engine) is None


TASK = 'instruction = "x"\n[evaluator]\nstrategy = "session_completed"\n'


def test_tasks_are_checked_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TASK)
    (tmp_path / "b.toml").write_text('instruction = "x"\n')
    tasks = read_tasks(of(tmp_path, tasks={"train": ["a.toml"], "timeout": 5, "backend": "local"}))
    assert [(task.task_id, task.timeout_seconds, task.runtime.backend) for task in tasks.train] == [("a", 5, "local")]
    with pytest.raises(ConfigError, match="'b' has no evaluator"):
        read_tasks(of(tmp_path, tasks={"train": ["b.toml"]}))
    with pytest.raises(ConfigError, match="'a' is held out, and trained on as well"):
        read_tasks(of(tmp_path, tasks={"train": ["a.toml"], "held_out": ["a.toml"]}))


@pytest.mark.parametrize("path", sorted(Path("examples/train").glob("*.toml")), ids=lambda path: path.name)
def test_the_examples_can_be_read(path: Path, tmp_path: Path) -> None:
    """With the tasks that one of them has written first."""
    shutil.copytree("examples/tasks", tmp_path / "tasks")
    copy = tmp_path / "train" / path.name
    copy.parent.mkdir()
    shutil.copyfile(path, copy)
    tasks.main([str(tmp_path / "train" / "lookup"), "--train", "2", "--held-out", "1"])
    assert load_settings(copy).steps > 0
    assert read_tasks(load_settings(copy)).train
