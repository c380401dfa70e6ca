"""Groups for trainers that ask for each session by itself, and make an object for each: the first to ask has the group
run, and all of them share a client."""

import asyncio
from typing import Any

from msgspec import Struct

from polar.bridges.rollouts import Group, Rollouts
from polar.bridges.settings import BridgeSettings
from polar.config import SamplingOverrides

_MOST = 4096
"""Groups that are waited for: more than any step has."""


class _Coming(Struct):
    group: asyncio.Future[Group]
    taken: int = 0  # sessions that somebody has come for


class SharedGroups:
    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self._coming: dict[tuple[str, str], _Coming] = {}

    async def session(self, task: str, key: str, samples: int, sampling: SamplingOverrides) -> tuple[Group, int]:
        """The group, and which of its sessions this is: there may be fewer of them. It is forgotten when the last one
        has come for it, or it has failed; asked again, the service has it. Who is cancelled takes nothing from the
        others. Raises ConfigError and ClientError."""
        coming = self._coming.get((task, key))
        if coming is None or failed(coming.group):
            asked = asyncio.ensure_future(self.rollouts.group(task, key, samples=samples, sampling=sampling))
            asked.add_done_callback(failed)  # asyncio complains of an error that nobody has looked at
            coming = self._coming[task, key] = _Coming(asked)
            if len(self._coming) > _MOST:  # a trainer that died of something else never comes for some
                del self._coming[next(iter(self._coming))]
        number = coming.taken
        coming.taken += 1
        if coming.taken == samples:
            del self._coming[task, key]
        return await asyncio.shield(coming.group), number


def failed(work: asyncio.Future[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


_shared: dict[asyncio.AbstractEventLoop, dict[str, SharedGroups]] = {}


def shared(wanted: BridgeSettings) -> SharedGroups:
    """Those of these settings, in the event loop that runs. What a closed loop had is forgotten."""
    for loop in [one for one in list(_shared) if one.is_closed()]:
        _shared.pop(loop, None)  # not by a weak reference: a client holds its loop
    known = _shared.setdefault(asyncio.get_running_loop(), {})
    name = wanted.model_dump_json()
    if name not in known:
        known[name] = SharedGroups(Rollouts(wanted))
    return known[name]
