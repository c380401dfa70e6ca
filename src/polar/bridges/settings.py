"""What a bridge needs to know: a table of the trainer's own settings, a TOML file, or one that a variable names."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar import validation_errors
from polar.config import DEFAULT_RUN
from polar.errors import ConfigError
from polar.trajectory.session import TRACE_BUILDER

SETTINGS_FILE_VARIABLE = "POLAR_BRIDGE"
"""The variable that names a TOML file, where a trainer's configuration has no place for one."""


class BridgeSettings(BaseModel):
    model_config = ConfigDict(extra="forbid")

    server: str = Field("http://127.0.0.1:8080", description="the rollout service's control plane")
    token: str | None = Field(None, description="its admin token [default: the variable POLAR_SERVER__TOKEN]")
    run: str = Field(DEFAULT_RUN, description="whose engines, policy and quotas these rollouts have")
    tasks: list[str] = Field(description="files or folders of tasks, as `polar run` reads them")
    name: str = Field(
        min_length=1,
        description="of this training; all groups' names begin with it: who asks again under it gets the same sessions",
    )
    samples: int = Field(8, ge=1, description="sessions of a group, where the trainer does not say")
    builder: str = Field(TRACE_BUILDER, description="how sessions become traces")
    max_lag: int | None = Field(
        None, ge=0, description="versions that a session may be old when it ends; older: dropped"
    )
    verify_share: float = Field(1.0, ge=0, le=1, description="of sessions that are checked when they are received")
    patience: float = Field(300, gt=0, description="seconds that a call waits for a server that is away")


SettingsSource = BridgeSettings | Mapping[str, Any] | str | Path | None
"""Where a bridge's settings are: in a table, in a TOML file, or (None) in the file that the environment names."""


def load_settings(source: SettingsSource = None) -> BridgeSettings:
    """A table, a TOML file, or the file that the environment names. Paths in a file are relative to it. Raises
    ConfigError."""
    if isinstance(source, BridgeSettings):
        return source
    origin, table = "The bridge's settings", source
    if not isinstance(table, Mapping):
        path = Path(table or os.environ.get(SETTINGS_FILE_VARIABLE, ""))
        if not path.name:
            raise ConfigError(
                f"No settings: pass a table, or a TOML file, or name one in the variable {SETTINGS_FILE_VARIABLE}."
            )
        origin, table = str(path), _read_toml(path)
    fields = {"token": os.environ.get("POLAR_SERVER__TOKEN"), **table}
    if isinstance(fields.get("tasks"), str):
        fields["tasks"] = [fields["tasks"]]
    try:
        settings = BridgeSettings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {validation_errors.format_validation_errors(error)}.") from error
    if not settings.tasks:
        raise ConfigError(
            f"{origin}: tasks: name the files or folders of tasks that rows of the trainer's data stand for."
        )
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error
    tasks = table.get("tasks", [])
    named = [tasks] if isinstance(tasks, str) else tasks
    return table | {"tasks": [str(path.parent / one) for one in named]}
