"""Polar's own: a line is a SessionResult, as the rollout service gives it and as bridges for NVIDIA's Polar read it.

Who divides: the trainer; each trace has its `weight`.

What is lost: nothing. A session without a reward has null and its reason, and one with nothing to train has no traces.
"""

from typing import Any, ClassVar

from polar.export.base import ExportNeed, SessionItem, SessionLines
from polar.rollout.results import render_session_result


class PolarExporter(SessionLines):
    name: ClassVar[str] = "polar"
    needs: ClassVar[frozenset[ExportNeed]] = frozenset(("messages",))

    def lines(self, item: SessionItem) -> list[dict[str, Any]]:
        return [render_session_result(item)]
