"""Typed settings: polar.toml, overridden by the environment (POLAR_SECTION__KEY; lists and tables as JSON)."""

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar.errors import ConfigError
from polar.types import Sampling

PREFIX = "POLAR_"


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingOverrides(Section):
    """What is sampled with, whatever the harness asks for. While training, the trainer decides, not the harness."""

    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(None, gt=0)
    max_tokens: int | None = Field(None, gt=0)

    def apply(self, sampling: Sampling) -> None:
        for name, value in self:
            if value is not None:
                setattr(sampling, name, value)


class EngineSettings(Section):
    kind: str = "scripted"
    urls: list[str] = []
    model: str | None = None
    tokenizer: str | None = None
    api_key: str | None = Field(None, repr=False)
    continuation: Literal["auto", "sampled", "off"] = "auto"
    logprobs: bool = True
    sampling: SamplingOverrides = SamplingOverrides()
    timeout: float = Field(600, gt=0, description="seconds without a byte from the engine before a call is given up")
    options: dict[str, Any] = Field({}, description="settings of the engine's own kind")
    max_inflight: int = Field(512, gt=0, description="calls at one replica before sessions move to another")


class GatewaySettings(Section):
    host: str = "127.0.0.1"
    port: int = 8100
    max_body: int = Field(64 * 1024 * 1024, gt=0, description="bytes of a request; larger ones get 413")
    keep_alive: float = Field(10, gt=0, description="seconds of silence before a stream gets a keep-alive")
    grace: float = Field(2, ge=0, description="seconds that a generation goes on after its harness went away")


class ServerSettings(Section):
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = Field(None, repr=False)


class StoreSettings(Section):
    url: str | None = None  # default: SQLite in the data folder
    durability: Literal["process", "power"] = "process"


class Settings(Section):
    engine: EngineSettings = EngineSettings()
    gateway: GatewaySettings = GatewaySettings()
    server: ServerSettings = ServerSettings()
    store: StoreSettings = StoreSettings()


def load(path: Path | None = None, environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `path` (default: polar.toml in this folder, if there is one) and the environment."""
    tables: dict[str, Any] = {}
    if path is None and Path("polar.toml").exists():
        path = Path("polar.toml")
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"Can't read {path}: {error.strerror}.") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    for name, value in environment.items():
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if name.startswith(PREFIX) and separator:
            tables.setdefault(section, {})[key] = _parsed(value)
    try:
        return Settings.model_validate(tables)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(step) for step in problem["loc"])
        source = path or "the environment"
        raise ConfigError(f"{source}: {where}: {problem['msg']}.") from error


def _parsed(value: str) -> Any:
    """Lists and tables are JSON; what other strings mean follows from the setting's type."""
    if not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
