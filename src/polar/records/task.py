"""A task: what is run, in which runtime, by which agent, and how it is graded.

The fields are those that bridges for NVIDIA's Polar send, so that its task files run here unchanged; ours are added.
Names that other systems use for the same thing are accepted as aliases. An unknown field is an error that names it: a
misspelt limit must not be no limit.

`TaskSemantics` says what a task means where rollout systems differ: one record, chosen when the task is submitted and
stored with it. `[server] compat = "nvidia"` (or a run's own setting) chooses the meaning that tasks have on NVIDIA's
Polar, for bridges that were written for it. It changes what is graded and reported, never how sessions are isolated.
"""

import posixpath
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from polar.config import DEFAULT_RUN, Compat, SamplingOverrides

OnLimit = Literal["grade", "zero", "mask"]
"""What a session that ran into a limit earns: what stands then is evaluated, or nothing (0), or it has no reward."""

OnTampering = Literal["zero", "keep", "exclude"]
"""What a session with proven evidence of tampering earns: 0, what its evaluator said, or no reward at all."""

MASKED_REASONS = frozenset(("timeout", "length", "nonzero_exit", "timeout_grading", "suspicious"))
"""Reasons of sessions that earn nothing because their task says so: neither the platform nor a grader failed."""


class TaskSemantics(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    on_failed_exit: Literal["grade", "mask"] = Field(
        "grade", description="a harness that exits non-zero: what it left is graded, or it has no reward"
    )
    on_timeout: OnLimit = Field("grade", description="of tasks that don't set their own `on_timeout`")
    on_grader_timeout: Literal["zero", "mask"] = Field(
        "zero", description="a grader that runs out of time: reward 0, or none"
    )
    builder: str = Field("prefix_merging", description="of tasks that name no `builder.strategy`")
    eval_prepare: Literal["add", "replace"] = Field(
        "add", description="the evaluator's runtime: `prepare` and `eval_prepare`, or `eval_prepare` in its place"
    )
    clock: Literal["run", "init"] = Field(
        "run", description="`timeout_seconds` counts the run of the harness; or INIT, the run and the grading"
    )
    mask_traces: bool = Field(False, description="traces of sessions without a reward have masks and rewards of zeros")
    all_failed: Literal["failed", "completed"] = Field("failed", description="status of a task without usable sessions")
    resubmit_ended: Literal["keep", "rerun"] = Field("keep", description="an ended task that is submitted again")


POLAR = TaskSemantics()

NVIDIA = TaskSemantics(
    on_failed_exit="mask",
    on_timeout="mask",
    on_grader_timeout="mask",
    builder="per_request",
    eval_prepare="replace",
    clock="init",
    mask_traces=True,
    all_failed="completed",
    resubmit_ended="rerun",
)

SEMANTICS: dict[Compat, TaskSemantics] = {"polar": POLAR, "nvidia": NVIDIA}


class RequestModel(BaseModel):
    """A part of a request. Null stands for a field's default, unless null is a value of the field's own."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls._not_nullable()}

    @classmethod
    @cache
    def _not_nullable(cls) -> frozenset[str]:
        """Names of the optional fields that null is no value of, with their aliases."""
        names: set[str] = set()
        for name, field in cls.model_fields.items():
            if not field.is_required() and NoneType not in get_args(field.annotation):
                alias = field.validation_alias
                names |= {name, *(map(str, alias.choices) if isinstance(alias, AliasChoices) else ())}
        return frozenset(names)


def _unsupported_field(hint: str) -> BeforeValidator:
    """Of a field that there is no equal of here: `instead` says what to use in its place. Empty values are taken."""

    def refuse(value: Any) -> None:
        if value not in (None, {}, []):
            raise ValueError(hint)

    return BeforeValidator(refuse)


class StepModel(RequestModel):
    """A step that is written with the fields of all kinds of steps has null in those of the others."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_of_other_steps(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in _STEP_FIELDS}


_STEP_FIELDS = frozenset(("source", "target", "command", "cwd", "env"))


class Upload(StepModel):
    max_attempts: Literal[1] = Field(1, exclude=True, description="uploads are not tried again")
    retry_backoff_seconds: float = Field(0, ge=0, le=0, exclude=True, description="without effect")


class UploadFile(Upload):
    """A file into the runtime: one of this machine, or its content."""

    type: Literal["upload_file"] = Field(description="upload_file")
    source: str | None = Field(
        None, validation_alias=AliasChoices("source", "src", "local_path", "path"), description="a file of this machine"
    )
    content: str | None = Field(None, description="the file's text")
    target: str = Field(
        validation_alias=AliasChoices("target", "dst", "dest", "remote_path"),
        description="where it goes in the runtime",
    )

    @model_validator(mode="after")
    def _check_source(self) -> "UploadFile":
        if (self.source is None) == (self.content is None):
            raise ValueError("it takes either `source` or `content`")
        return self


class UploadDir(Upload):
    """A folder of this machine into the runtime; folders are merged."""

    type: Literal["upload_dir"] = Field(description="upload_dir")
    source: str = Field(
        validation_alias=AliasChoices("source", "src", "local_path", "path"), description="a folder of this machine"
    )
    target: str = Field(
        validation_alias=AliasChoices("target", "dst", "dest", "remote_path"),
        description="where its content goes in the runtime",
    )


class Exec(StepModel):
    """A command in the runtime: words, or a line for `sh -c`. It must end with 0."""

    type: Literal["exec"] = Field(description="exec")
    command: str | list[str] = Field(
        validation_alias=AliasChoices("command", "cmd"), description="words, or a line for `sh -c`"
    )
    cwd: str | None = Field(None, description="[default: the working folder]")
    env: dict[str, str] = Field({}, description="variables of the command")
    timeout_seconds: float = Field(
        600, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"), description="for each try"
    )
    max_attempts: int = Field(1, ge=1, le=10, description="tries")
    retry_backoff_seconds: float = Field(
        0, ge=0, le=60, description="before the second try; doubled each time, up to 5"
    )


Step = Annotated[UploadFile | UploadDir | Exec, Field(discriminator="type")]


def _normalize_network(name: Any) -> Any:
    """A container engine's default networks are not handed out: `allow_internet` says what a sandbox may reach."""
    return None if name in ("host", "bridge", "default") else name


class RuntimeRequest(RequestModel):
    backend: str = Field("bubblewrap", description="kind of sandbox")
    image: str | None = Field(None, description="what it is made from: docs/tasks.md")
    prepare: list[Step] = Field([], description="steps before the agent")
    eval_prepare: list[Step] | None = Field(
        None, description="in the evaluator's fresh runtime: besides `prepare`, unless `semantics` says otherwise"
    )
    env: dict[str, str] = Field({}, description="variables of everything that runs in it")
    network: Annotated[Literal["gateway", "none", "internet"] | None, BeforeValidator(_normalize_network)] = Field(
        None, description="what can be reached [default: gateway]"
    )
    allow_internet: bool = Field(False, description='the same as network = "internet"')
    workdir: str = Field("/workspace", description="the working folder")
    cpus: float | None = Field(None, gt=0, description="CPU time, in cores")
    memory_mb: int | None = Field(None, gt=0, description="memory")
    disk_mb: int | None = Field(None, gt=0, validation_alias=AliasChoices("disk_mb", "storage_mb"), description="disk")
    processes: int | None = Field(1024, gt=0, description="processes and threads at once; null: no limit")
    gpus: int = Field(0, ge=0, description="GPUs; only 0 is supported")
    seccomp: bool | list[str] = Field(
        True, description="false: system calls are not filtered; a list: calls and address families allowed besides"
    )
    kwargs: Annotated[
        None, _unsupported_field("set the fields of `runtime` itself: cpus, memory_mb, disk_mb, network, env")
    ] = Field(None, exclude=True, description="refused")
    import_path: Annotated[
        None,
        _unsupported_field(
            "code is never named over HTTP: install it as an entry point of polar.runtimes, and name that in `backend`"
        ),
    ] = Field(None, exclude=True, description="refused")
    internet_volumes: Annotated[
        None,
        _unsupported_field(
            "folders of the machine are never mounted: copy them in with an `upload_dir` step of `prepare`"
        ),
    ] = Field(None, exclude=True, description="refused")
    direct_exec_init_command: Annotated[None, _unsupported_field("make it an `exec` step of `prepare`")] = Field(
        None, exclude=True, description="refused"
    )

    @field_validator("workdir")
    @classmethod
    def _check_workdir(cls, workdir: str) -> str:
        if not posixpath.isabs(workdir) or posixpath.normpath(workdir) == "/":
            raise ValueError("it must be an absolute path, and not the root")
        return posixpath.normpath(workdir)

    @property
    def effective_network(self) -> Literal["gateway", "none", "internet"]:
        return self.network or ("internet" if self.allow_internet else "gateway")


def _normalize_transport(name: Any) -> Any:
    return "http" if name in ("streamable-http", "streamable_http") else name


class McpServer(RequestModel):
    """A server of tools: a command that speaks over its standard input and output, or an address."""

    name: str = Field(description="of the server")
    command: str | None = Field(None, description="started in the sandbox")
    args: list[str] = Field([], description="of the command")
    env: dict[str, str] = Field({}, description="of the command")
    url: str | None = Field(None, description="its address, instead of a command")
    headers: dict[str, str] = Field({}, description="sent to the address")
    transport: Annotated[Literal["stdio", "http", "sse"] | None, BeforeValidator(_normalize_transport)] = Field(
        None, validation_alias=AliasChoices("transport", "type"), description="[default: told by command or url]"
    )

    @model_validator(mode="after")
    def _check_address(self) -> "McpServer":
        if (self.command is None) == (self.url is None):
            raise ValueError("it takes either `command` or `url`")
        return self


class CustomShell(RequestModel):
    command: str = Field(description="the command line; {{INSTRUCTION}} stands for the instruction")
    cwd: str | None = Field(None, description="[default: the working folder]")
    env: dict[str, str] = Field({}, description="variables of the command")


def _list_servers(value: Any) -> Any:
    """A table by name, as most harnesses write it, is as good as a list."""
    if isinstance(value, dict):
        return [{"name": name, **server} if isinstance(server, dict) else server for name, server in value.items()]
    return value


class AgentRequest(RequestModel):
    harness: str = Field("shell", description="a preset's name, perhaps with a version: pi@0.87.1")
    model_name: str | None = Field(None, description="the name that the harness is told to ask for")
    settings: dict[str, Any] = Field({}, description="of the preset: docs/harnesses.md")
    env: dict[str, str] = Field({}, description="variables of the harness")
    mcp_servers: Annotated[list[McpServer], BeforeValidator(_list_servers)] = Field(
        [], description="for harnesses that take them"
    )
    skills_path: str | None = Field(None, description="folder of skills, for harnesses that take them")
    custom_shell: CustomShell | None = None
    import_path: Annotated[
        None,
        _unsupported_field(
            "code is never named over HTTP: install it as an entry point of polar.harnesses, and name that in "
            "`harness`; or use the harness `shell` with `custom_shell`"
        ),
    ] = Field(None, exclude=True, description="refused")

    @property
    def preset(self) -> str:
        return self.harness.partition("@")[0]

    @property
    def version(self) -> str | None:
        return self.harness.partition("@")[2] or None


class BuilderRequest(RequestModel):
    strategy: str = Field("prefix_merging", description="name of the builder")
    config: dict[str, Any] = Field({}, description="of the builder")


class EvaluatorRequest(RequestModel):
    strategy: str = Field(description="name of the evaluator")
    config: dict[str, Any] = Field({}, description="of the evaluator: docs/evaluators.md")
    env: dict[str, str] = Field({}, description="variables of its commands")
    refresh_runtime: bool = Field(True, description="false: in the agent's own runtime as it runs; the verdict says so")


class Budget(RequestModel):
    """What a session may use up besides its seconds. A turn is a model call of the harness, whoever in it makes it;
    tokens are sampled ones."""

    turns: int | None = Field(None, gt=0, description="model calls")
    tokens: int | None = Field(None, gt=0, description="sampled tokens")


def _resolve_semantics(value: Any) -> Any:
    if isinstance(value, str):
        if value not in SEMANTICS:
            raise ValueError(f"there are no semantics {value!r}; known: {', '.join(SEMANTICS)}")
        return SEMANTICS[value]
    return value


class TaskRequest(RequestModel):
    """What an agent is asked to do, where it runs, how it is graded, and how many sessions of that there are."""

    task_id: str = Field(
        min_length=1, max_length=200, description="the task's identity: the same id with other content is refused"
    )
    instruction: str = Field(description="what the agent is told")
    num_samples: int = Field(1, ge=1, le=100_000, description="sessions")
    timeout_seconds: float = Field(600, gt=0, description="of each session's run")
    budget: Budget = Budget()
    on_timeout: OnLimit = Field("grade", description="what a session earns whose time is up")
    on_length: OnLimit = Field("grade", description="what a session earns that ran out of turns, tokens or context")
    suspicious: OnTampering = Field("zero", description="what a session earns that tampered with its grading")
    sampling: SamplingOverrides = SamplingOverrides()
    runtime: RuntimeRequest = RuntimeRequest()
    agent: AgentRequest = AgentRequest()
    builder: BuilderRequest = BuilderRequest()
    evaluator: EvaluatorRequest | None = None
    dispatch_priority: int = Field(
        0,
        ge=0,
        le=100,
        validation_alias=AliasChoices("dispatch_priority", "priority"),
        description="0 to 100; higher ones first",
    )
    early_stop_min_usable_sessions: int | None = Field(
        None, ge=1, lt=2**31, description="usable sessions after which the others are ended"
    )
    oldest_version: int | None = Field(None, ge=0, lt=2**31, description="of the policy, that a consumer still takes")
    max_lag: int | None = Field(
        None, ge=0, lt=2**31, description="versions that the policy may be ahead when a session ends"
    )
    on_stale: Literal["mark", "cancel"] = Field(
        "mark", description="sessions that are too old: delivered, and marked as stale; or ended as soon as they are"
    )
    callback_url: str | None = Field(None, description="told when the task has ended")
    run: str = Field(DEFAULT_RUN, min_length=1, max_length=200, description="the experiment that it belongs to")
    metadata: dict[str, Any] = Field({}, description="kept with each session")
    semantics: Annotated[TaskSemantics, BeforeValidator(_resolve_semantics)] = Field(
        POLAR, description="what it means where systems differ: polar, nvidia, or each of it [default: the server's]"
    )

    @model_validator(mode="after")
    def _with_defaults(self) -> "TaskRequest":
        self._set_defaults()
        return self

    def _set_defaults(self) -> None:
        """What the task leaves open is as its semantics have it: written down, so that every reader finds the same."""
        if self.semantics != POLAR:
            if "on_timeout" not in self.model_fields_set:
                self.on_timeout = self.semantics.on_timeout
            if "strategy" not in self.builder.model_fields_set:
                self.builder = self.builder.model_copy(update={"strategy": self.semantics.builder})

    def with_semantics(self, semantics: TaskSemantics) -> "TaskRequest":
        """With these semantics, unless it names its own."""
        if "semantics" in self.model_fields_set or semantics == self.semantics:
            return self
        adopted = self.model_copy(update={"semantics": semantics})
        adopted._set_defaults()
        return adopted
