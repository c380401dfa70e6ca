"""Tasks from files and folders, and what is said about broken ones."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from polar.errors import ConfigError
from polar.records.task import Exec, TaskRequest, UploadDir, UploadFile
from polar.tasks import read, read_sources

TASK: dict[str, Any] = {"instruction": "Do it.", "evaluator": {"strategy": "command", "config": {"command": "true"}}}
TOML = 'instruction = "Do it."\n[evaluator]\nstrategy = "command"\nconfig.command = "true"\n'


def written(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def wrong(path: Path, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read([path], **keywords)
    message = str(caught.value)
    assert message.startswith(f"{path}")
    assert "\n" not in message
    return message.removeprefix(str(path))


def one(path: Path, **keywords: Any) -> TaskRequest:
    (task,) = read([path], **keywords)
    return task


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", TOML),
        ("a.json", json.dumps(TASK)),
        ("a.yaml", yaml.safe_dump(TASK)),
        ("a.yml", yaml.safe_dump({"tasks": [TASK | {"task_id": "a"}]})),
        ("a.json", json.dumps([TASK | {"task_id": "a"}])),
        ("a.jsonl", json.dumps(TASK | {"task_id": "a"}) + "\n\n"),
    ],
)
def test_every_format_holds_the_same_task(tmp_path: Path, name: str, text: str) -> None:
    assert one(written(tmp_path, name, text)) == TaskRequest.model_validate(TASK | {"task_id": "a"})


def test_several_tasks_in_a_file_have_names_by_their_number(tmp_path: Path) -> None:
    listed = written(tmp_path, "listed.yaml", yaml.safe_dump([TASK, TASK | {"task_id": "named"}, TASK]))
    assert [task.task_id for task in read([listed])] == ["listed-1", "named", "listed-3"]
    lines = written(tmp_path, "lines.jsonl", f"\n{json.dumps(TASK)}\n{json.dumps(TASK)}\n")
    assert [task.task_id for task in read([lines])] == ["lines-2", "lines-3"]


def test_a_folder_has_its_tasks_in_order(tmp_path: Path) -> None:
    for name in ("b.toml", "a.toml", ".hidden.toml", "files/c.toml"):
        written(tmp_path, name, TOML)
    written(tmp_path, "README.md", "# Tasks")
    written(tmp_path, "harbor/task.toml", "")
    written(tmp_path, "harbor/instruction.md", "Say hello.")
    written(tmp_path, "harbor/environment/Dockerfile", "FROM debian")
    written(tmp_path, "harbor/tests/test.sh", "true")
    tasks = read([tmp_path])
    assert [(task.task_id, task.instruction) for task in tasks] == [
        ("a", "Do it."),
        ("b", "Do it."),
        ("harbor", "Say hello."),
    ]
    assert [task.task_id for task in read([tmp_path / "b.toml", tmp_path / "a.toml"])] == ["b", "a"]


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tasks/data/in.txt", "tasks/grader/check.py", "common/lib.py", "tasks/root/bin/sh", "tasks/SKILL.md"):
        written(tmp_path, name, "")
    upload = {"type": "upload_file", "source": "data/in.txt", "target": "in.txt"}
    folder = {"type": "upload_dir", "src": "../common", "dst": "lib"}
    inner = {"strategy": "command", "config": {"command": "true", "files": [upload]}}
    task = TASK | {
        "runtime": {"image": "./root", "prepare": [upload, folder], "eval_prepare": [upload]},
        "agent": {"skills_path": "data"},
        "evaluator": {"strategy": "weighted", "config": {"parts": [inner]}},
    }
    path = written(tmp_path, "tasks/a.json", task)
    monkeypatch.chdir(tmp_path)
    read_task = one(path.relative_to(tmp_path))
    here = tmp_path / "tasks"
    assert read_task.runtime.prepare == [
        UploadFile(type="upload_file", source=str(here / "data/in.txt"), target="in.txt"),
        UploadDir(type="upload_dir", source=str(tmp_path / "common"), target="lib"),
    ]
    assert read_task.runtime.eval_prepare == read_task.runtime.prepare[:1]
    assert read_task.runtime.image == str(here / "root")
    assert read_task.agent.skills_path == str(here / "data")
    assert read_task.evaluator is not None
    (part,) = read_task.evaluator.config["parts"]
    assert part["config"]["files"][0]["source"] == str(here / "data/in.txt")


@pytest.mark.parametrize("image", ["debian:12", "registry.example.com/a/b@sha256:0", "/srv/root", None])
def test_other_images_are_names(tmp_path: Path, image: str | None) -> None:
    assert one(written(tmp_path, "a.json", TASK | {"runtime": {"image": image}})).runtime.image == image


def test_a_folder_to_build_from(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    task = TASK | {"runtime": {"backend": "docker", "image": "build:environment"}}
    assert one(written(tmp_path, "a.json", task)).runtime.image == f"build:{tmp_path / 'environment'}"


def test_an_instruction_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, "a.md", "Größe\n")
    task = {"instruction_file": "a.md"}
    path = written(tmp_path, "a.json", task)
    assert one(path).instruction == "Größe\n"
    assert "it takes one of them" in wrong(written(tmp_path, "b.json", task | {"instruction": "or this"}))
    for bad in ("none.md", "..", 3, None, "x" * 5000, "a\0"):
        assert ": instruction_file: there is no file" in wrong(written(tmp_path, "c.json", {"instruction_file": bad}))


def test_the_caller_may_say_where_everything_runs(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json", TASK | {"runtime": {"backend": "docker", "image": "debian"}})
    assert one(path).runtime.backend == "docker"
    assert one(path, backend="podman").runtime == one(path).runtime.model_copy(update={"backend": "podman"})
    assert one(written(tmp_path, "b.json", TASK), backend="local").runtime.backend == "local"
    assert "runtime.backend: there is no 'vm'; known: bubblewrap, docker, local, podman" in wrong(path, backend="vm")


def test_commands_and_limits_stay_as_they_are(tmp_path: Path) -> None:
    step = {"type": "exec", "command": "make", "cwd": "src", "timeout": 5}
    task = one(written(tmp_path, "a.json", TASK | {"runtime": {"prepare": [step], "cpus": 2}, "budget": {"turns": 3}}))
    assert task.runtime.prepare == [Exec(type="exec", command="make", cwd="src", timeout_seconds=5)]
    assert (task.runtime.cpus, task.budget.turns) == (2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": None}, ": instruction: input should be a valid string."),
        ({"timeout": 3}, ": timeout: there is no such field."),
        ({"runtime": {"cpu": 1}}, ": runtime.cpu: there is no such field."),
        (
            {"runtime": {"cpus": 0, "memory_mb": "much"}},
            ": runtime.cpus: input should be greater than 0; runtime.memory_mb: input should be a valid integer,"
            " unable to parse string as an integer.",
        ),
        ({"runtime": "docker"}, ": runtime: this is a table of fields."),
        ({"runtime": {"prepare": [{"type": "exec"}]}}, ": runtime.prepare[0].command: it is missing."),
        (
            {"runtime": {"prepare": [{"type": "exec", "command": 3}]}},
            ": runtime.prepare[0].command: input should be a valid string;"
            " runtime.prepare[0].command: input should be a valid list.",
        ),
        (
            {"runtime": {"prepare": [{"type": "upload", "target": "x"}]}},
            ": runtime.prepare[0]: its `type` is one of upload_file, upload_dir, exec.",
        ),
        (
            {"runtime": {"prepare": [{"target": "x"}]}},
            ": runtime.prepare[0]: its `type` is missing: upload_file, upload_dir, exec.",
        ),
        (
            {"runtime": {"prepare": [{"type": "upload_file", "target": "x"}]}},
            ": runtime.prepare[0]: it takes either `source` or `content`.",
        ),
        ({"agent": {"harness": "emacs@1"}}, ": agent.harness: there is no 'emacs'; known: aider, "),
        ({"builder": {"strategy": "mine"}}, ": builder.strategy: there is no 'mine'; known: per_request, "),
        ({"evaluator": {"strategy": "mine"}}, ": evaluator.strategy: there is no 'mine'; known: answer, "),
        ({"evaluator": {"strategy": "command"}}, ": evaluator.config.command: it must be given."),
        (
            {"evaluator": {"strategy": "command", "config": {"command": "true", "comand": "x"}}},
            ": evaluator.config.comand: there is no such field.",
        ),
        ({"agent": {"skills_path": "none"}}, ": agent.skills_path: there is no folder "),
        ({"runtime": {"image": "../none"}}, ": runtime.image: there is no folder "),
        ({"metadata": {"half": "\ud800"}}, ": the text '\\ud800' is not Unicode."),
        ({"timeout_seconds": float("inf")}, ": inf is no number that a task can have."),
    ],
)
def test_a_broken_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert wrong(written(tmp_path, "a.json", TASK | change)).startswith(message)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    """Each of them, with its place in the task: a folder is no file, and a file no folder."""
    written(tmp_path, "file", "")
    (tmp_path / "folder").mkdir()
    upload = {"type": "upload_file", "source": "folder", "target": "x"}
    task = TASK | {
        "runtime": {
            "prepare": [upload | {"source": "file"}, upload],
            "eval_prepare": [{"type": "upload_dir", "path": "file", "target": "x"}],
        },
        "evaluator": {"strategy": "command", "config": {"command": "true", "files": [upload | {"source": "none"}]}},
    }
    assert wrong(written(tmp_path, "a.json", task)) == (
        f": runtime.prepare[1].source: there is no file '{tmp_path}/folder'; "
        f"runtime.eval_prepare[0].source: there is no folder '{tmp_path}/file'; "
        f"evaluator.config.files[0].source: there is no file '{tmp_path}/none'."
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "x = 1\ny = \n", ": this is not valid TOML: Invalid value (at line 2, column 5)."),
        ("a.json", '{\n"x": }', ": line 2, column 6: this is not valid JSON: Expecting value."),
        ("a.yaml", "x: 1\ny: [", ": line 2, column 5: this is not valid YAML: "),
        ("a.yaml", "x: \x01", ": it can't be read: unacceptable character #x0001"),
        ("a.yaml", "x: !!python/name:os.system", ": line 1, column 4: this is not valid YAML: could not determine"),
        ("a.yaml", "when: 2025-13-41", ": it can't be read: month must be in 1..12"),
        ("a.yaml", "1: x", ": the name 1 of a field is not text: put it in quotes."),
        ("a.yaml", "x: !!binary aGk=", ": a value of type bytes has no place in a task."),
        ("a.yaml", "&x [*x]", ": it is nested too deeply."),
        ("a.yaml", "", ": a task is a table of fields, and this is empty."),
        ("a.json", "[]", ": it holds no task."),
        ("a.json", '{"tasks": []}', ": it holds no task."),
        ("a.json", "[3]", ": task 1: a task is a table of fields, and this is 3."),
        ("a.json", json.dumps([TASK, {}]), ": task 2: instruction: it is missing."),
        ("a.json", "[" * 100_000, ": it is nested too deeply."),
        ("a.jsonl", "", ": it holds no task."),
        ("a.jsonl", json.dumps(TASK) + "\n\n{]", ": line 3: this is not valid JSON: "),
        ("a.jsonl", json.dumps(TASK) + "\n{}\n", ": line 2: instruction: it is missing."),
        ("a.jsonl", "[" * 100_000, ": line 1: it is nested too deeply."),
        ("a.txt", "x", ": a task file ends in .toml, "),
    ],
)
def test_what_can_not_be_read_says_where(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert wrong(written(tmp_path, name, text)).startswith(message)


def test_bytes_that_are_no_text_say_where(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"x = 1\ny = '\xff'\n")
    assert wrong(path) == ": line 2: this is not UTF-8."


def test_nothing_to_read(tmp_path: Path) -> None:
    assert "there is no such file or folder" in wrong(tmp_path / "none.toml")
    assert "there are no tasks in this folder" in wrong(tmp_path)
    (tmp_path / "a.toml").mkdir()
    assert "there are no tasks in this folder" in wrong(tmp_path)


def test_two_tasks_of_the_same_name_are_both_told(tmp_path: Path) -> None:
    first = written(tmp_path, "first/a.toml", TOML)
    second = written(tmp_path, "second/b.jsonl", json.dumps(TASK | {"task_id": "a"}))
    with pytest.raises(ConfigError) as caught:
        read([first, second])
    assert str(caught.value).startswith(f"{second}: line 1: task_id: 'a' is already the task of {first}")
    with pytest.raises(ConfigError, match="already the task of"):
        read([first, first])


def test_dates_are_text(tmp_path: Path) -> None:
    toml = written(tmp_path, "a.toml", TOML + "[metadata]\nday = 2025-03-01\nat = 07:30:00\n")
    assert one(toml).metadata == {"day": "2025-03-01", "at": "07:30:00"}
    assert one(written(tmp_path, "b.yaml", "instruction: x\nmetadata: {day: 2025-03-01}")).metadata == {
        "day": "2025-03-01"
    }


def test_a_tasks_source_is_its_own_or_where_it_stands(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "alone.json").write_text(json.dumps(TASK))
    (folder / "many.jsonl").write_text("\n".join(json.dumps(TASK | {"task_id": name}) for name in "ab"))
    (folder / "said.json").write_text(json.dumps(TASK | {"metadata": {"source": "elsewhere"}}))
    found = {task.task_id: source for source, task in read_sources([folder])}
    assert found == {"alone": "mine", "a": "many.jsonl", "b": "many.jsonl", "said": "elsewhere"}
