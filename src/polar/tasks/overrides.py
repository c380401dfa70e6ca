"""Settings of a run that take the place of what its tasks say."""

from typing import Any

from msgspec import Struct
from pydantic import ValidationError

from polar import validation_errors
from polar.errors import ConfigError
from polar.harnesses import load_harness
from polar.records.task import AgentRequest, TaskRequest


class Overrides(Struct, frozen=True):
    """None leaves it as the task has it."""

    harness: str | None = None
    samples: int | None = None
    model: str | None = None
    timeout: float | None = None
    image: str | None = None
    backend: str | None = None

    def apply(self, task: TaskRequest) -> TaskRequest:
        """Raises ConfigError. What a task says to its harness alone (settings, a command) is for no other one."""
        fields: dict[str, Any] = task.model_dump(exclude_unset=True)
        agent: dict[str, Any] = fields.get("agent", {})
        if self.harness is not None:
            wanted = AgentRequest(harness=self.harness)
            if load_harness(wanted.preset).name != load_harness(task.agent.preset).name:
                agent = {name: value for name, value in agent.items() if name not in ("settings", "custom_shell")}
            agent = agent | {"harness": self.harness}
        if self.model is not None:
            agent = agent | {"model_name": self.model}
        if self.samples is not None:
            fields["num_samples"] = self.samples
        if self.timeout is not None:
            fields["timeout_seconds"] = self.timeout
        for name, value in (("image", self.image), ("backend", self.backend)):
            if value is not None:
                fields["runtime"] = fields.get("runtime", {}) | {name: value}
        try:
            return TaskRequest.model_validate(fields | {"agent": agent})
        except ValidationError as error:
            raise ConfigError(f"{validation_errors.format_validation_errors(error)}.") from error
