"""The wire models: what a task is made of, and what comes back.

The fields are those that bridges for NVIDIA's Polar send and read, so that its task files run here unchanged; what is
ours is added. Names that other systems use for the same thing are taken as well. A field that isn't known is an error
that names it: a misspelt limit must not be no limit.
"""

import posixpath
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from polar.config import DEFAULT_RUN, SamplingOverrides

OnLimit = Literal["grade", "zero", "mask"]
"""What a session that ran into a limit earns: what stands then is evaluated, or nothing (0), or it has no reward."""

SessionStatus = Literal["COMPLETED", "ERROR", "TIMEOUT"]
TaskState = Literal["running", "completed", "failed"]
Unit = Literal["session", "group"]
"""What results are read by: sessions, or tasks with all of their sessions."""
PauseMode = Literal["freeze", "hold", "drain", "sleep"]
"""What becomes of calls that run when generation is paused."""


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class UploadFile(Model):
    """A file into the runtime: one of this machine, or its content."""

    type: Literal["upload_file"]
    source: str | None = Field(None, validation_alias=AliasChoices("source", "src", "local_path", "path"))
    content: str | None = None
    target: str = Field(validation_alias=AliasChoices("target", "dst", "dest", "remote_path"))

    @model_validator(mode="after")
    def _one_of_both(self) -> "UploadFile":
        if (self.source is None) == (self.content is None):
            raise ValueError("it takes either `source` or `content`")
        return self


class UploadDir(Model):
    """A folder of this machine into the runtime; folders are merged."""

    type: Literal["upload_dir"]
    source: str = Field(validation_alias=AliasChoices("source", "src", "local_path", "path"))
    target: str = Field(validation_alias=AliasChoices("target", "dst", "dest", "remote_path"))


class Exec(Model):
    """A command in the runtime: words, or a line for `sh -c`. It must end with 0."""

    type: Literal["exec"]
    command: str | list[str] = Field(validation_alias=AliasChoices("command", "cmd"))
    cwd: str | None = None
    env: dict[str, str] = {}
    timeout_seconds: float = Field(600, gt=0, validation_alias=AliasChoices("timeout_seconds", "timeout"))


Step = Annotated[UploadFile | UploadDir | Exec, Field(discriminator="type")]


class RuntimeRequest(Model):
    backend: str = "bubblewrap"
    image: str | None = None
    prepare: list[Step] = []
    eval_prepare: list[Step] = Field([], description="besides `prepare`, in the evaluator's fresh runtime")
    env: dict[str, str] = {}
    network: Literal["gateway", "none", "internet"] | None = None
    allow_internet: bool = False
    workdir: str = "/workspace"
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0)
    disk_mb: int | None = Field(None, gt=0)
    processes: int | None = Field(1024, gt=0)
    gpus: int = Field(0, ge=0)

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, workdir: str) -> str:
        if not posixpath.isabs(workdir) or posixpath.normpath(workdir) == "/":
            raise ValueError("it must be an absolute path, and not the root")
        return posixpath.normpath(workdir)

    @property
    def reaches(self) -> Literal["gateway", "none", "internet"]:
        return self.network or ("internet" if self.allow_internet else "gateway")


class McpServer(Model):
    """A server of tools: a command that speaks over its standard input and output, or an address."""

    name: str
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    url: str | None = None
    headers: dict[str, str] = {}
    transport: Literal["stdio", "http", "sse"] | None = Field(
        None, validation_alias=AliasChoices("transport", "type"), description="[default: told by command or url]"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> "McpServer":
        if (self.command is None) == (self.url is None):
            raise ValueError("it takes either `command` or `url`")
        return self


class CustomShell(Model):
    command: str
    cwd: str | None = None
    env: dict[str, str] = {}


def _servers(value: Any) -> Any:
    """A table by name, as most harnesses write it, is as good as a list."""
    if isinstance(value, dict):
        return [{"name": name, **server} if isinstance(server, dict) else server for name, server in value.items()]
    return value


class AgentRequest(Model):
    harness: str = Field("shell", description="a preset's name, perhaps with a version: pi@0.87.1")
    model_name: str | None = None
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    mcp_servers: Annotated[list[McpServer], BeforeValidator(_servers)] = []
    skills_path: str | None = None
    custom_shell: CustomShell | None = None

    @property
    def preset(self) -> str:
        return self.harness.partition("@")[0]

    @property
    def version(self) -> str | None:
        return self.harness.partition("@")[2] or None


class BuilderRequest(Model):
    strategy: str = "prefix_merging"
    config: dict[str, Any] = {}


class EvaluatorRequest(Model):
    strategy: str
    config: dict[str, Any] = {}
    env: dict[str, str] = {}
    refresh_runtime: bool = Field(True, description="false: in the agent's own runtime as it runs; the verdict says so")


class Budget(Model):
    """What a session may use up besides its seconds. A turn is a model call of the harness, whoever in it makes it;
    tokens are sampled ones."""

    turns: int | None = Field(None, gt=0)
    tokens: int | None = Field(None, gt=0)


class TaskRequest(Model):
    task_id: str = Field(min_length=1, max_length=200)
    instruction: str
    num_samples: int = Field(1, ge=1, le=100_000)
    timeout_seconds: float = Field(600, gt=0)
    budget: Budget = Budget()
    on_timeout: OnLimit = "grade"
    on_length: OnLimit = "grade"
    sampling: SamplingOverrides = SamplingOverrides()
    runtime: RuntimeRequest = RuntimeRequest()
    agent: AgentRequest = AgentRequest()
    builder: BuilderRequest = BuilderRequest()
    evaluator: EvaluatorRequest | None = None
    dispatch_priority: int = Field(
        0, ge=-(2**31), lt=2**31, validation_alias=AliasChoices("dispatch_priority", "priority")
    )
    early_stop_min_usable_sessions: int | None = Field(None, ge=1, lt=2**31)
    oldest_version: int | None = Field(None, ge=0, lt=2**31, description="of the policy, that a consumer still takes")
    max_lag: int | None = Field(
        None, ge=0, lt=2**31, description="versions that the policy may be ahead when a session ends"
    )
    on_stale: Literal["mark", "cancel"] = Field(
        "mark", description="sessions that are too old: delivered, and marked as stale; or ended as soon as they are"
    )
    callback_url: str | None = None
    run: str = Field(DEFAULT_RUN, min_length=1, max_length=200)
    metadata: dict[str, Any] = {}


class TraceResult(BaseModel):
    model_config = ConfigDict(extra="allow")

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    response_logprobs: list[float] | None = None
    prompt_messages: list[dict[str, Any]] | None = Field([], description="null where a bare prompt was sampled from")
    response_messages: list[dict[str, Any]] | None = []
    tools: list[Any] | None = None
    finish_reason: str | None = None
    reward: float | None = None
    metadata: dict[str, Any] = {}


class TrajectoryResult(BaseModel):
    model_config = ConfigDict(extra="allow")

    status: str
    traces: list[TraceResult] = []
    metadata: dict[str, Any] = {}
    error: str | None = None


class SessionResult(BaseModel):
    model_config = ConfigDict(extra="allow")

    session_id: str
    task_id: str
    status: SessionStatus
    reward: float | None = None
    reason: str | None = None  # why there is no reward
    trajectory: TrajectoryResult | None = None
    timing: dict[str, Any] = {}
    node_id: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}


class TaskSession(BaseModel):
    """Where one session of a task is by now."""

    model_config = ConfigDict(extra="allow")

    sample: int
    state: Literal["queued", "leased", "waiting", "done"] = Field(description="waiting: for another try")
    attempt: int = Field(0, description="tries that the platform failed")
    node: str | None = Field(None, description="that has it, or had it last")
    id: str | None = Field(None, description="of the session that it ended with")


class TaskStatus(BaseModel):
    model_config = ConfigDict(extra="allow")

    task_id: str
    run: str = DEFAULT_RUN
    status: TaskState
    total_sessions: int = 0
    completed_sessions: int = Field(0, description="that have ended, with a reward or without")
    usable_sessions: int = Field(0, description="that have ended with a reward")
    cancelled: str | None = Field(None, description="why it is ended early: cancelled, early_stop")
    created_at: float | None = Field(None, description="seconds since 1970")
    ended_at: float | None = None
    cursor: int | None = Field(None, description="of its end, among groups")
    sessions: list[TaskSession] = Field([], description="the first 1000")
    results: list[SessionResult] = Field([], description="once it has ended")
    result_paths: list[str] = Field([], description="always empty: results are not in files")


class TaskResult(TaskStatus):
    """What is posted to `callback_url`."""


class NumberedResult(SessionResult):
    """A session's result, and where it stands in the order in which they ended."""

    cursor: int
    sample: int


class GroupResult(BaseModel):
    """All sessions of a task that has ended."""

    model_config = ConfigDict(extra="allow")

    task_id: str
    run: str = DEFAULT_RUN
    status: TaskState
    asked: int  # sessions
    usable: int  # those with a reward
    cancelled: int
    cursor: int
    results: list[SessionResult] = []
