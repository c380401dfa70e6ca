"""Sessions made by hand, as the service tells of them."""

from polar.export.base import SessionItem
from polar.records.result import SessionResult
from polar.rollout.results import render_session_result


def result(item: SessionItem) -> SessionResult:
    return SessionResult.model_validate(render_session_result(item))
