"""Polar's own: a line is a SessionResult, as the rollout service gives it and as bridges for NVIDIA's Polar read it.

Who divides: the trainer; each trace has its `weight`.

What is lost: nothing. A session without a reward has null and its reason, and one with nothing to train has no traces.
"""

from typing import Any, ClassVar

from polar.export.base import Item, Need, SessionLines
from polar.rollout.results import session_result


class Polar(SessionLines):
    name: ClassVar[str] = "polar"
    needs: ClassVar[frozenset[Need]] = frozenset(("messages",))

    def lines(self, item: Item) -> list[dict[str, Any]]:
        return [session_result(item)]
