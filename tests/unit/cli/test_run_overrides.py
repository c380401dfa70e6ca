"""What the command line wants otherwise than a task says."""

import pytest

from polar.errors import ConfigError
from polar.records.task import TaskRequest
from polar.tasks.overrides import Overrides

TASK = TaskRequest.model_validate(
    {
        "task_id": "t",
        "instruction": "do it",
        "num_samples": 2,
        "timeout_seconds": 60,
        "runtime": {"backend": "local", "prepare": [{"type": "exec", "cmd": "true"}]},
        "agent": {"harness": "shell", "custom_shell": {"command": "true"}, "env": {"A": "1"}},
    }
)


def test_nothing_is_changed_where_nothing_is_wanted() -> None:
    assert Overrides().apply(TASK) == TASK


def test_each_takes_the_place_of_the_tasks_own() -> None:
    task = Overrides(samples=5, model="m", timeout=1.5).apply(TASK)
    assert (task.num_samples, task.agent.model_name, task.timeout_seconds) == (5, "m", 1.5)
    assert task.runtime == TASK.runtime
    assert task.agent.custom_shell == TASK.agent.custom_shell


def test_the_runtime_is_another_one_and_prepared_as_before() -> None:
    runtime = Overrides(image="debian", backend="docker").apply(TASK).runtime
    assert (runtime.image, runtime.backend, runtime.prepare) == ("debian", "docker", TASK.runtime.prepare)
    bare = TaskRequest(task_id="t", instruction="do it")
    assert Overrides(backend="podman").apply(bare).runtime.backend == "podman"


def test_what_is_said_to_one_harness_is_not_said_to_another() -> None:
    task = Overrides(harness="pi@1.2.3").apply(TASK)
    assert (task.agent.preset, task.agent.version) == ("pi", "1.2.3")
    assert task.agent.custom_shell is None
    assert task.agent.env == {"A": "1"}
    pi = Overrides(harness="pi").apply(TASK).model_copy(deep=True)
    pi.agent.settings = {"thinking": "high"}
    assert Overrides(harness="pi@1.2.3").apply(pi).agent.settings == {"thinking": "high"}
    assert Overrides(harness="codex").apply(pi).agent.settings == {}


def test_the_same_harness_by_another_name_keeps_its_settings() -> None:
    fields = TASK.model_dump() | {"agent": {"harness": "claude-code", "settings": {"x": 1}}}
    assert Overrides(harness="claude").apply(TaskRequest.model_validate(fields)).agent.settings == {"x": 1}


def test_what_can_not_be_is_said() -> None:
    with pytest.raises(ConfigError, match="num_samples"):
        Overrides(samples=0).apply(TASK)
    with pytest.raises(ConfigError, match="no 'nobody'; known: aider"):
        Overrides(harness="nobody").apply(TASK)
