"""Graders, found by name."""

from polar.errors import ConfigError
from polar.evaluators.base import Evaluator
from polar.plugins import load
from polar.records.task import EvaluatorRequest


def load_evaluator(request: EvaluatorRequest) -> Evaluator:
    """Raises ConfigError where there is none of that name, or its config can't be used."""
    try:
        evaluator: Evaluator = load("evaluators", request.strategy)(request.config)
    except ConfigError as error:
        raise ConfigError(f"evaluator ({request.strategy}): {error}") from error
    return evaluator
