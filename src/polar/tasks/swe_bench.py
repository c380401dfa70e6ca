"""Rows of SWE-bench's schema as tasks: SWE-bench and its Verified part, SWE-Gym, and other sets with the same fields.

A row names a repository at a commit, what is wrong with it, and the tests that tell whether it was put right. The
agent gets the repository and `problem_statement`; tests and patches are for the evaluator `swebench` alone, and hints
for nobody. Its history ends at the commit: images, and clones, hold the later one that has the solution.

The repository comes from an image of the row's own, as the sets' authors publish them, or from a folder of clones.
"""

import datetime
import json
import posixpath
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct, field
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from polar import validation_errors
from polar.distribution import install_hint
from polar.errors import ConfigError
from polar.evaluators import load_evaluator
from polar.evaluators.patches import list_patch_paths
from polar.records.task import TaskRequest
from polar.tasks.task_files import read_text

IMAGE_TEMPLATES = {
    "swe-bench": "swebench/sweb.eval.x86_64.{owner}_1776_{name}:latest",
    "swe-gym": "xingyaoww/sweb.eval.x86_64.{owner}_s_{name}:latest",
}
"""How the sets' images are called: `owner__name` is the row's instance_id, in small letters."""

PYTEST_COMMAND = "{python} -m pytest {files}"
TEST_COMMANDS = {"django/django": "{python} tests/runtests.py --verbosity 2 --parallel 1 {labels}"}
"""How a repository's tests are run, where it isn't by PYTEST."""

INSTRUCTION = """\
The current folder is a git repository with this issue:

<issue>
{problem_statement}
</issue>

Change the code so that the issue is resolved. You are graded by tests that you don't see; changes to existing tests are
not counted. Nobody answers questions, and the internet can't be reached.
"""

_WORKDIR = "/testbed"
_CONDA = "/opt/miniconda3"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PYTEST_FOLDER = "/opt/polar-pytest"
_WORKSPACE_MB = 4096
_PREPARE_SECONDS = 1200

# Branches, tags, remotes and what was checked out before lead to later commits; without them git forgets those.
_TRUNCATE_HISTORY = """\
set -e
git checkout -q --detach
git for-each-ref --format='delete %(refname)' | git update-ref --stdin
for remote in $(git remote); do git remote remove "$remote"; done
rm -f .git/FETCH_HEAD .git/ORIG_HEAD
git reflog expire --expire=now --all
git repack -adq
git prune --expire=now
git checkout -q -b work
"""
_CHECK_OUT = "git checkout -q -f {commit} && git clean -q -f -d -x"

# A repository of another user's is refused otherwise.
_GIT_ENV = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


def _parse_list(value: Any) -> Any:
    """SWE-bench has lists as JSON in a string, SWE-Gym as lists; Parquet has null for an empty one."""
    if isinstance(value, str):
        try:
            return json.loads(value) if value.strip() else []
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    return [] if value is None else value


def _to_text(value: Any) -> Any:
    """Some sets have dates as text, others as dates."""
    return value.isoformat() if isinstance(value, datetime.date) else value


class SweBenchRow(BaseModel):
    """What is needed of a row; the other fields may be named in an image's template."""

    model_config = ConfigDict(extra="allow")

    instance_id: str = Field(min_length=1, max_length=150)
    repo: str
    base_commit: str = Field(pattern=r"^[0-9a-fA-F]{7,64}$")
    problem_statement: str
    test_patch: str
    FAIL_TO_PASS: Annotated[list[str], BeforeValidator(_parse_list)]
    PASS_TO_PASS: Annotated[list[str], BeforeValidator(_parse_list)] = []
    version: str | None = None
    created_at: Annotated[str | None, BeforeValidator(_to_text)] = None

    @property
    def ungradable_reason(self) -> str | None:
        """Why nothing can tell whether the issue is resolved."""
        if not self.FAIL_TO_PASS:
            return "no FAIL_TO_PASS"
        return None if list_patch_paths(self.test_patch) else "no test_patch"


class SweBenchOptions(Struct, frozen=True):
    """What a set's rows don't say."""

    image: str | None = IMAGE_TEMPLATES["swe-bench"]  # {owner}, {name}, or any field of the row
    repositories: Path | None = None  # clones as OWNER__NAME, instead of images
    backend: str = "docker"
    harnesses: tuple[str, ...] = ()  # a task each
    samples: int = 1
    timeout: float = 1800
    turns: int | None = None
    instruction: str = INSTRUCTION
    python: str | None = None  # [that of the images]
    pytest: Path | None = None  # a folder with it, for images that have none: pip install --target
    commands: dict[str, str] = field(default_factory=dict)  # over COMMANDS


class SweBenchTasks(Struct):
    tasks: list[TaskRequest] = []
    left_out: dict[str, list[str]] = {}  # instances that can't be graded, by why


def make_tasks(rows: Iterable[tuple[str, dict[str, Any]]], options: SweBenchOptions) -> SweBenchTasks:
    """`rows` with their places, as `read` gives them. Raises ConfigError for the first one that isn't of the schema."""
    made = SweBenchTasks()
    seen: dict[str, str] = {}
    for place, fields in rows:
        row = _validate_row(place, fields)
        if row.instance_id in seen:
            raise ConfigError(f"{place}: instance_id: {row.instance_id!r} is already that of {seen[row.instance_id]}.")
        seen[row.instance_id] = place
        if (why := row.ungradable_reason) is not None:
            made.left_out.setdefault(why, []).append(row.instance_id)
            continue
        try:
            made.tasks += [_make_task(row, harness, options) for harness in options.harnesses or (None,)]
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error
    if not made.tasks:
        raise ConfigError("There is no row that a task can be made of.")
    return made


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, as the sets are published: Parquet, JSON lines, or JSON. Raises ConfigError."""
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif path.suffix == ".json":
        rows = _parse_json(read_text(path), str(path))
    elif path.suffix == ".jsonl":
        lines = enumerate(read_text(path).split("\n"), 1)
        rows = [_parse_json(line, f"{path}: line {number}") for number, line in lines if line.strip()]
    else:
        raise ConfigError(f"{path}: rows are in a file that ends in .parquet, .jsonl or .json.")
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: this is no list of rows.")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}: row {number}: this is no table of fields.")
        yield f"{path}: row {number}", row


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{place}: this is not valid JSON: {error}.") from error
    except RecursionError:
        raise ConfigError(f"{place}: it is nested too deeply.") from None


def _read_parquet(path: Path) -> list[Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f"Reading Parquet needs pyarrow: {install_hint('arrow')}.") from error
    try:
        found: list[Any] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: this can't be read as Parquet: {error}.") from error
    return found


def _validate_row(place: str, fields: dict[str, Any]) -> SweBenchRow:
    try:
        return SweBenchRow.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(
            f"{place}: {validation_errors.format_validation_errors(error, subject='the row')}."
        ) from error


def _make_task(row: SweBenchRow, harness: str | None, options: SweBenchOptions) -> TaskRequest:
    several = len(options.harnesses) > 1
    fields = {
        "task_id": f"{row.instance_id}.{harness}" if several else row.instance_id,
        "instruction": options.instruction.replace("{problem_statement}", row.problem_statement.strip()),
        "num_samples": options.samples,
        "timeout_seconds": options.timeout,
        "budget": {} if options.turns is None else {"turns": options.turns},
        "runtime": _runtime_fields(row, options),
        "agent": {} if harness is None else {"harness": harness},
        "evaluator": {"strategy": "swebench", "config": _evaluator_config(row, options), "env": _grading_env(options)},
        "metadata": {
            "instance_id": row.instance_id,
            "repo": row.repo,
            "base_commit": row.base_commit,
            **{name: value for name in ("version", "created_at") if (value := getattr(row, name)) is not None},
        },
    }
    try:
        task = TaskRequest.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{validation_errors.format_validation_errors(error)}.") from error
    assert task.evaluator is not None
    load_evaluator(task.evaluator)
    return task


def _runtime_fields(row: SweBenchRow, options: SweBenchOptions) -> dict[str, Any]:
    runtime: dict[str, Any] = {"backend": options.backend}
    prepare: list[dict[str, Any]] = []
    if options.repositories is not None:
        clone = options.repositories / row.repo.replace("/", "__")
        if not (clone / ".git").is_dir():
            raise ConfigError(f"repo: there is no clone of {row.repo} at {clone}: git clone it there.")
        prepare.append({"type": "upload_dir", "source": str(clone.absolute()), "target": "."})
        prepare.append(_exec_step(_CHECK_OUT.format(commit=row.base_commit)))
    else:
        runtime |= {"image": _image_name(row, options), "workdir": _WORKDIR, "env": {"PATH": _conda_path()}}
    prepare.append(_exec_step(_TRUNCATE_HISTORY))
    runtime["prepare"] = prepare
    if options.pytest is not None:
        source = str(options.pytest.absolute())
        runtime["eval_prepare"] = [{"type": "upload_dir", "source": source, "target": _PYTEST_FOLDER}]
    return runtime


def _exec_step(command: str) -> dict[str, Any]:
    return {"type": "exec", "command": command, "env": _GIT_ENV, "timeout_seconds": _PREPARE_SECONDS}


def _image_name(row: SweBenchRow, options: SweBenchOptions) -> str:
    if options.image is None:
        raise ConfigError("Name the rows' images, or a folder of repositories.")
    owner, _, name = row.instance_id.lower().partition("__")
    try:
        return options.image.format_map(dict(row) | {"owner": owner, "name": name})
    except KeyError as error:
        raise ConfigError(f"The image {options.image!r} names a field that the row hasn't: {error}.") from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(f"The image {options.image!r} can't be filled in: {error}. Write {{FIELD}}.") from error


def _conda_path() -> str:
    return f"{_CONDA}/envs/testbed/bin:{_CONDA}/bin:{_PATH}"


def _evaluator_config(row: SweBenchRow, options: SweBenchOptions) -> dict[str, Any]:
    return {
        "instance_id": row.instance_id,
        "test_patch": row.test_patch,
        "FAIL_TO_PASS": row.FAIL_TO_PASS,
        "PASS_TO_PASS": row.PASS_TO_PASS,
        "test_command": _test_command(row, options),
        "max_mb": _WORKSPACE_MB,
    }


def _test_command(row: SweBenchRow, options: SweBenchOptions) -> list[str]:
    """`{labels}` are the test files as unittest names modules, from below `tests/`."""
    python = options.python or (f"{_CONDA}/envs/testbed/bin/python" if options.repositories is None else "python3")
    written = (TEST_COMMANDS | options.commands).get(row.repo, PYTEST_COMMAND)
    words: list[str] = []
    for word in shlex.split(written):
        words += _test_labels(row.test_patch) if word == "{labels}" else [word.replace("{python}", python)]
    return words


def _test_labels(test_patch: str) -> list[str]:
    files = [path for path in list_patch_paths(test_patch, existing_only=True) if path.endswith(".py")]
    inside = [posixpath.splitext(path.removeprefix("tests/"))[0] for path in files]
    return [path.removesuffix("/__init__").replace("/", ".") for path in inside]


def _grading_env(options: SweBenchOptions) -> dict[str, str]:
    env = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf8"}
    return env if options.pytest is None else env | {"PYTHONPATH": _PYTEST_FOLDER}
