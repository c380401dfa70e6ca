"""Groups for trainers that ask for each session by itself, and make an object for each: the first to ask has the group
run, and all of them share a client."""

import asyncio
from typing import Any

from msgspec import Struct

from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.bridges.settings import BridgeSettings
from polar.config import SamplingOverrides

_MAX_PENDING_GROUPS = 4096
"""Groups that are waited for: more than any step has."""


class _PendingGroup(Struct):
    group: asyncio.Future[SessionGroup]
    taken: int = 0  # sessions that somebody has come for


class SharedGroups:
    def __init__(self, rollouts: RolloutClient) -> None:
        self.rollouts = rollouts
        self._pending: dict[tuple[str, str], _PendingGroup] = {}

    async def claim_session(
        self, task: str, key: str, samples: int, sampling: SamplingOverrides
    ) -> tuple[SessionGroup, int]:
        """The group, and which of its sessions this is: there may be fewer of them. It is forgotten when the last one
        has come for it, or it has failed; asked again, the service has it. Who is cancelled takes nothing from the
        others. Raises ConfigError and ClientError."""
        coming = self._pending.get((task, key))
        if coming is None or has_failed(coming.group):
            asked = asyncio.ensure_future(self.rollouts.run_group(task, key, samples=samples, sampling=sampling))
            asked.add_done_callback(has_failed)  # asyncio complains of an error that nobody has looked at
            coming = self._pending[task, key] = _PendingGroup(asked)
            if len(self._pending) > _MAX_PENDING_GROUPS:  # a trainer that died of something else never comes for some
                del self._pending[next(iter(self._pending))]
        number = coming.taken
        coming.taken += 1
        if coming.taken == samples:
            del self._pending[task, key]
        return await asyncio.shield(coming.group), number


def has_failed(work: asyncio.Future[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


_shared_groups: dict[asyncio.AbstractEventLoop, dict[str, SharedGroups]] = {}


def get_shared_groups(settings: BridgeSettings) -> SharedGroups:
    """Those of these settings, in the event loop that runs. What a closed loop had is forgotten."""
    for loop in [one for one in list(_shared_groups) if one.is_closed()]:
        _shared_groups.pop(loop, None)  # not by a weak reference: a client holds its loop
    known = _shared_groups.setdefault(asyncio.get_running_loop(), {})
    name = settings.model_dump_json()
    if name not in known:
        known[name] = SharedGroups(RolloutClient(settings))
    return known[name]
