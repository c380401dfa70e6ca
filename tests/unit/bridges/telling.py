"""Sessions made by hand, as the service tells of them."""

from polar.export.base import Item
from polar.rollout.models import SessionResult
from polar.rollout.results import session_result


def result(item: Item) -> SessionResult:
    return SessionResult.model_validate(session_result(item))
