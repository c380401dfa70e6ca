"""The settings of a matrix: one TOML file. Paths of tasks and output are relative to the file's folder."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from polar import config, validation_errors
from polar.config import EngineSettings, Settings
from polar.errors import ConfigError


class MatrixModel(EngineSettings):
    """An engine that serves it, as [engine] in polar.toml."""

    kind: str = "vllm"


class MatrixSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: list[str] = Field(min_length=1, description="files and folders, as `polar run` takes them")
    harnesses: list[str] = Field(min_length=1, description="NAME or NAME@VERSION")
    models: dict[str, MatrixModel] = Field(min_length=1)
    samples: int = Field(1, gt=0, description="sessions of each task, with each model and harness")
    attempts: int = Field(3, gt=0, description="tries of a session, where the platform fails")
    backend: str | None = Field(None, description="where all tasks run, whatever they say")
    timeout: float | None = Field(None, gt=0, description="seconds of each session's run, likewise")
    output: str = Field("matrix", description="the folder of everything that is kept")
    polar: dict[str, dict[str, Any]] = Field({}, description="other settings of polar.toml, by section")
    folder: Path = Field(Path(), exclude=True, description="what relative paths are relative to")

    @field_validator("harnesses")
    @classmethod
    def _drop_duplicates(cls, harnesses: list[str]) -> list[str]:
        return list(dict.fromkeys(harnesses))

    @field_validator("models")
    @classmethod
    def _check_folder_names(cls, models: dict[str, MatrixModel]) -> dict[str, MatrixModel]:
        """A model's name is that of a folder."""
        for name in models:
            if "/" in name or name in (".", "..") or not name.isprintable():
                raise ValueError(f"{name!r} is the name of a folder as well, so without slashes")
        return models

    @property
    def task_paths(self) -> list[Path]:
        return [self.folder / path for path in self.tasks]

    @property
    def output_folder(self) -> Path:
        return (self.folder / self.output).absolute()

    def data_folder(self, model: str) -> Path:
        """The model's data folder."""
        return self.output_folder / model

    def model_settings(self, name: str) -> Settings:
        """Those of a gateway in front of the model's engine, with a store of its own. A key that the model hasn't is
        that of polar.toml, or of POLAR_ENGINE__API_KEY. Raises ConfigError."""
        common = config.load(overrides={**self.polar, "gateway": config.PRIVATE_GATEWAY, "store": {"url": None}})
        engine = self.models[name]
        if engine.api_key is None:
            engine = engine.model_copy(update={"api_key": common.engine.api_key})
        return common.model_copy(update={"engine": engine})


def load_matrix_settings(path: Path, **overrides: Any) -> MatrixSettings:
    """`overrides` win; None is none. Raises ConfigError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"Can't read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    wanted = {name: value for name, value in overrides.items() if value is not None}
    try:
        return MatrixSettings.model_validate(table | wanted | {"folder": path.parent})
    except ValidationError as error:
        raise ConfigError(
            f"{path}: {validation_errors.format_validation_errors(error, subject='the settings')}."
        ) from error
