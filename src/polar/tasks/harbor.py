"""Harbor's task folders: task.toml, instruction.md, environment/ and tests/, as a task of ours.

What Harbor knows and we can't do is an error; what neither knows is kept in the task's metadata, where task.toml
stands whole. For docker and podman the image is built from environment/Dockerfile; for bubblewrap, which builds none,
the Dockerfile becomes steps over the machine's own programs.

In system folders (/etc, /opt, /usr, ...) the agent's changes count only at paths that the task names: those in
`metadata.polar.system_paths`, and those that the instruction names in full.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from polar import validation_errors
from polar.errors import ConfigError
from polar.tasks.dockerfile import DockerfileError, DockerfileSteps, find_last_workdir
from polar.tasks.task_files import read_text, read_toml

TASK_FILE = "task.toml"
DEFAULT_BACKEND = "docker"
_INSTRUCTION_FILE = "instruction.md"
_DEFAULT_WORKDIR = "/app"
_COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_IMAGE_BACKENDS = ("docker", "podman")
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
_MAX_MEGABYTES = 1 << 40  # an exbibyte
_VARIABLE_PATTERN = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SYSTEM_PATH = re.compile(r"(?<![\w./~:-])/(?:etc|opt|var|root|home|tmp)(?:/[\w.+@-]*[\w+@-])+")
_TRANSPORTS = {"streamable-http": "http"}


def _parse_megabytes(size: Any) -> Any:
    """`2G`, as schema 1.0 has it."""
    if not isinstance(size, str):
        return size
    if not (found := _SIZE_PATTERN.fullmatch(size.strip())):
        raise ValueError(f"{size!r} is no size: write 512M or 2G")
    megabytes = float(found[1]) * _MEGABYTES[found[2].upper()]
    if megabytes > _MAX_MEGABYTES:
        raise ValueError(f"{size[:40]!r} is more than any machine has")
    return max(1, int(megabytes))


Size = Annotated[int | None, BeforeValidator(_parse_megabytes), Field(gt=0)]
NetworkMode = Literal["public", "no-network", "allowlist"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="allow")  # Harbor's own readers ignore what they don't know


class _NetworkedPhase(_Table):
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] = []


class _Verifier(_NetworkedPhase):
    user: str | int | None = None
    timeout_sec: float = Field(600, gt=0)
    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None


class _Agent(_NetworkedPhase):
    user: str | int | None = None
    timeout_sec: float | None = Field(None, gt=0)


class _Environment(_NetworkedPhase):
    build_timeout_sec: float = Field(600, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(None, gt=0)
    memory_mb: Size = None
    memory: Size = None
    storage_mb: Size = None
    storage: Size = None
    gpus: int | None = Field(None, ge=0)
    allow_internet: bool | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None


class _Task(_Table):
    schema_version: str = "1.1"
    version: str | None = None  # its name in schema 1.0
    metadata: dict[str, Any] = {}
    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()
    steps: list[Any] | None = None


def is_task_folder(path: Path) -> bool:
    """Also where its instruction was forgotten: better a sentence about that than a task file full of odd fields."""
    return (path / TASK_FILE).is_file() and ((path / _INSTRUCTION_FILE).is_file() or (path / "environment").is_dir())


def read_task_fields(folder: Path, backend: str) -> dict[str, Any]:
    """The fields of a TaskRequest. Paths are absolute."""
    place = folder / TASK_FILE
    written = read_toml(place)
    try:
        task = _Task.model_validate(written)
    except ValidationError as error:
        raise ConfigError(f"{place}: {validation_errors.format_validation_errors(error)}.") from error
    if wrong := _find_unsupported(task, folder, backend):
        raise ConfigError(f"{place}: {validation_errors.escape_line('; '.join(wrong))}.")
    agent: dict[str, Any] = {"mcp_servers": [_normalize_server(server) for server in task.environment.mcp_servers]}
    instruction = read_text(folder / _INSTRUCTION_FILE)
    config = {"tests": os.path.abspath(folder / "tests"), "timeout_seconds": task.verifier.timeout_sec}
    evaluator = {
        "strategy": "harbor",
        "config": config | _list_system_paths(task, instruction),
        "env": _fill_variables(task.verifier.env, "verifier.env", place),
    }
    return {
        "task_id": os.path.basename(os.path.abspath(folder)),
        "instruction": instruction,
        **({} if task.agent.timeout_sec is None else {"timeout_seconds": task.agent.timeout_sec}),
        "runtime": _build_runtime_fields(task, folder, backend),
        "agent": agent,
        "evaluator": evaluator,
        "metadata": {"harbor": written},
    }


def _list_system_paths(task: _Task, instruction: str) -> dict[str, list[str]]:
    """Files and folders that the task is about, though they stand in folders of the system's. A program in the
    instruction is one to call rather than one to change, and /usr is nothing but programs and what they need."""
    own = task.metadata.get("polar")
    named = own.get("system_paths", []) if isinstance(own, dict) else []
    told = {path for path in _SYSTEM_PATH.findall(instruction) if not {"bin", "sbin", "lib"} & set(path.split("/"))}
    paths = [*named, *sorted(told - set(named))]
    return {"system_paths": paths} if paths else {}


def _find_unsupported(task: _Task, folder: Path, backend: str) -> list[str]:
    environment, verifier = task.environment, task.verifier
    version = task.version or task.schema_version
    reasons = {
        f"schema_version: {version} is not known: 1.x is": version.split(".")[0] != "1",
        "steps: tasks of several steps can't be run": bool(task.steps) or (folder / "steps").is_dir(),
        "environment.gpus: a runtime has no GPU": bool(environment.gpus),
        f"environment.os: {environment.os} can't be run": environment.os.lower() != "linux",
        "environment.healthcheck: it can't be waited for": environment.healthcheck is not None,
        "environment.skills_dir: skills can't be taken from inside": environment.skills_dir is not None,
        "verifier.environment: a separate environment for the verifier can't be made": (
            verifier.environment_mode == "separate" or verifier.environment is not None
        ),
        "tests: there is no tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
        f"a Harbor task needs a root of its own, which {backend} has not: use docker, podman or bubblewrap": (
            backend == "local"
        ),
    }
    reasons |= {
        f"environment/{name}: several containers can't be run": (folder / "environment" / name).exists()
        for name in _COMPOSE_FILES
    }
    phases: dict[str, _NetworkedPhase] = {"environment": environment, "agent": task.agent, "verifier": verifier}
    reasons |= {
        f"{name}.network_mode: a list of allowed hosts can't be kept": (
            phase.network_mode == "allowlist" or bool(phase.allowed_hosts)
        )
        for name, phase in phases.items()
    }
    reasons |= {
        f"{name}.user: {user!r}: everything runs as the image's user": user not in (None, "root", "0", 0)
        for name, user in (("agent", task.agent.user), ("verifier", verifier.user))
    }
    return [reason for reason, holds in reasons.items() if holds]


def _build_runtime_fields(task: _Task, folder: Path, backend: str) -> dict[str, Any]:
    environment = task.environment
    file = folder / "environment" / "Dockerfile"
    context = Path(os.path.abspath(file.parent))
    text = read_text(file) if file.is_file() else None
    runtime: dict[str, Any] = {"backend": backend}
    env: dict[str, str] = {}
    workdir = None
    try:
        if backend in _IMAGE_BACKENDS:
            runtime["image"] = environment.docker_image or f"build:{context}"
            workdir = None if text is None else find_last_workdir(text)
            missing = text is None and environment.docker_image is None
        else:
            missing = text is None
            if text is not None:
                translated = DockerfileSteps(text, context, environment.build_timeout_sec)
                env, workdir, runtime["prepare"] = translated.env, translated.workdir, translated.steps
    except DockerfileError as error:
        raise ConfigError(f"{file}: {validation_errors.escape_line(str(error))}.") from error
    if missing:
        raise ConfigError(
            f"{folder / TASK_FILE}: environment: there is no environment/Dockerfile for {backend} to use."
        )
    return {
        **runtime,
        "workdir": environment.workdir or workdir or _DEFAULT_WORKDIR,
        "env": env | _fill_variables(environment.env, "environment.env", folder / TASK_FILE),
        "allow_internet": backend in _IMAGE_BACKENDS and _wants_internet(task),
        "cpus": environment.cpus,
        "memory_mb": environment.memory_mb or environment.memory,
        "disk_mb": environment.storage_mb or environment.storage,
    }


def _wants_internet(task: _Task) -> bool:
    """Only where the task says so: Harbor's own default is the whole internet. Never in bubblewrap, where it would be
    the machine's own network."""
    mode = task.agent.network_mode or task.environment.network_mode
    return mode == "public" if mode is not None else task.environment.allow_internet is True


def _normalize_server(server: dict[str, Any]) -> dict[str, Any]:
    """Harbor's transport is told even where the other fields are of another kind."""
    transport = server.get("transport", "sse")
    return server | {"transport": _TRANSPORTS.get(transport, transport)}


def _fill_variables(env: Mapping[str, str], field: str, place: Path) -> dict[str, str]:
    """`${NAME}` and `${NAME:-else}` stand for variables of this machine."""

    def value(found: re.Match[str]) -> str:
        known = os.environ.get(found[1], found[2])
        if known is None:
            raise ConfigError(f"{place}: {field}: the variable {found[1]} is not set here, and has no default.")
        return known

    return {name: _VARIABLE_PATTERN.sub(value, text) for name, text in env.items()}
