"""How engines should be: the replicas of each run, the policy that they hold, and whether they stand still. Whoever has
engines makes it so (pools.Pools.apply)."""

from typing import Literal

from msgspec import Struct

PauseState = Literal["freeze", "hold", "drain", "sleep", "settle"]
"""settle: frozen calls hear of new weights before any engine goes on."""


class DesiredReplica(Struct, frozen=True):
    url: str
    version: int = 0


class DesiredPool(Struct, frozen=True):
    replicas: list[DesiredReplica] = []
    paused: PauseState | None = None
    since: int = 0  # the generation in which calls were frozen last: who froze them earlier has missed a thaw


class DesiredEngines(Struct, frozen=True):
    """The engines of every run that has some of its own; the others use those of "default"."""

    generation: int = 0  # grows with every change
    pools: dict[str, DesiredPool] = {}
    server: str = ""  # whose document it is: another one's numbers can't be compared with its
