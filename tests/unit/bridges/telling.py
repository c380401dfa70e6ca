"""Sessions made by hand, as the service tells of them."""

from polar.export.base import SessionItem
from polar.export.polar import render_session_result
from polar.records.result import SessionResult


def result(item: SessionItem) -> SessionResult:
    return SessionResult.model_validate(render_session_result(item))
