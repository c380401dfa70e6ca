"""Any change to a task's file gives a task, or an error that names the file. Never anything else."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.records.task import TaskRequest
from polar.tasks import read

EXAMPLES = Path(__file__).parents[3] / "examples"
WHOLE: dict[str, Any] = {
    "task_id": "whole",
    "instruction": "Do it.",
    "num_samples": 2,
    "timeout_seconds": 60.5,
    "budget": {"turns": 5, "tokens": 1000},
    "on_timeout": "zero",
    "sampling": {"temperature": 1.0},
    "runtime": {
        "backend": "bubblewrap",
        "image": "./root",
        "prepare": [
            {"type": "upload_file", "source": "in.txt", "target": "in.txt"},
            {"type": "upload_dir", "src": "root", "dst": "root"},
            {"type": "exec", "command": ["make", "all"], "cwd": "root", "env": {"A": "1"}, "timeout": 5},
        ],
        "eval_prepare": [{"type": "upload_file", "content": "x", "target": "y"}],
        "env": {"B": "2"},
        "cpus": 1.5,
    },
    "agent": {
        "harness": "pi@1.0",
        "settings": {"a": [1]},
        "skills_path": "root",
        "mcp_servers": {"files": {"command": "files", "args": ["-v"]}},
    },
    "builder": {"strategy": "per_request"},
    "evaluator": {
        "strategy": "command",
        "config": {
            "command": "sh check.sh",
            "files": [{"type": "upload_file", "source": "in.txt", "target": "check.sh"}],
            "artifacts": ["*.txt"],
            "timeout_seconds": 5,
        },
    },
    "metadata": {"split": "train", "day": "2025-03-01"},
}
DOCKERFILE = (EXAMPLES / "harbor" / "greeter" / "environment" / "Dockerfile").read_text() + "ENV A=1\nADD greet /\n"

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "upload_file",
            "upload_dir",
            "exec",
            "harbor",
            "command",
            "weighted",
            "answer",
            "./root",
            "in.txt",
            "..",
            "/",
            "1G",
        ]
    )
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, whole: dict[str, Any]) -> Any:
    """The document with one to three places changed, removed, doubled or renamed."""
    document: Any = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(_places(document)))
        how = draw(st.sampled_from(["change", "remove", "move", "wrap"]))
        if how == "change":
            holder[key] = draw(values)
        elif how == "wrap":
            holder[key] = [holder[key]]
        elif how == "move" and isinstance(holder, dict):
            holder[draw(st.sampled_from(_names(document)) | st.text(max_size=8))] = holder.pop(key)
        else:
            del holder[key]
        if not _places(document):
            return document
    return document


def _places(document: Any) -> list[tuple[Any, Any]]:
    if isinstance(document, dict):
        return [(document, key) for key in document] + [one for value in document.values() for one in _places(value)]
    if isinstance(document, list):
        return [(document, key) for key in range(len(document))] + [one for value in document for one in _places(value)]
    return []


def _names(document: Any) -> list[str]:
    return [key for _, key in _places(document) if isinstance(key, str)] or ["x"]


@st.composite
def mutated_text(draw: st.DrawFn, text: str) -> bytes:
    """The text with a piece cut out, doubled or replaced."""
    data = text.encode()
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 20)))
    piece = draw(
        st.just(b"") | st.just(data[start:stop] * 2) | st.binary(max_size=4) | st.text(max_size=4).map(str.encode)
    )
    return data[:start] + piece + data[stop:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "in.txt").write_text("")
    (folder / "root").mkdir()
    harbor = folder / "harbor"
    for name in ("environment", "tests"):
        (harbor / name).mkdir(parents=True)
    (harbor / "instruction.md").write_text("Do it.")
    (harbor / "tests" / "test.sh").write_text("")
    (harbor / "environment" / "greet").write_text("")
    return folder


def a_task_or_an_error(path: Path, backend: str | None = None) -> None:
    tasks, message = [], ""
    try:
        tasks = read([path], backend=backend)
    except ConfigError as error:
        message = str(error)
    if tasks:
        for task in tasks:
            assert TaskRequest.model_validate_json(task.model_dump_json()) == task, "it travels as JSON"
    else:
        assert message.startswith(str(path))
        assert len(message.splitlines()) == 1


def test_the_unchanged_task_is_right(folder: Path) -> None:
    (folder / "a.json").write_text(json.dumps(WHOLE))
    (task,) = read([folder / "a.json"])
    assert task.task_id == "whole"


@given(document=mutated(WHOLE))
def test_a_changed_document(folder: Path, document: Any) -> None:
    for name, text in (
        ("a.json", json.dumps(document)),
        ("a.yaml", yaml.safe_dump(document, allow_unicode=True)),
        ("a.jsonl", json.dumps(document) + "\n"),
    ):
        (folder / name).write_bytes(text.encode())
        a_task_or_an_error(folder / name)


@given(data=st.data())
@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.toml", "a.jsonl"])
def test_a_changed_text(folder: Path, name: str, data: st.DataObject) -> None:
    if name == "a.toml":
        text = (EXAMPLES / "tasks" / "query-database.toml").read_text()
    else:
        text = yaml.safe_dump(WHOLE) if name == "a.yaml" else json.dumps(WHOLE)
    (folder / name).write_bytes(data.draw(mutated_text(text)))
    a_task_or_an_error(folder / name)


@given(text=mutated_text((EXAMPLES / "harbor" / "greeter" / "task.toml").read_text()), builds=st.booleans())
def test_a_changed_harbor_task(folder: Path, text: bytes, builds: bool) -> None:
    (folder / "harbor" / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (folder / "harbor" / "task.toml").write_bytes(text)
    a_task_or_an_error(folder / "harbor", "docker" if builds else "bubblewrap")


@given(text=mutated_text(DOCKERFILE), builds=st.booleans())
def test_a_changed_dockerfile(folder: Path, text: bytes, builds: bool) -> None:
    (folder / "harbor" / "task.toml").write_text("")
    (folder / "harbor" / "environment" / "Dockerfile").write_bytes(text)
    a_task_or_an_error(folder / "harbor", "docker" if builds else "bubblewrap")
