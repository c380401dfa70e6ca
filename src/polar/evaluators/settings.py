"""An evaluator's part of the task, read into its model."""

from typing import Any, TypeVar

from pydantic import ValidationError

from polar.errors import ConfigError
from polar.rollout.models import Model

_Settings = TypeVar("_Settings", bound=Model)
_MESSAGES = {"extra_forbidden": "there is no such field", "missing": "it must be given"}


def read(model: type[_Settings], config: dict[str, Any]) -> _Settings:
    """Raises ConfigError, which names the field."""
    try:
        return model.model_validate(config)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(("config", *(str(step) for step in problem["loc"])))
        message = _MESSAGES.get(problem["type"], problem["msg"].removeprefix("Value error, "))
        raise ConfigError(f"{where}: {message}.") from error
