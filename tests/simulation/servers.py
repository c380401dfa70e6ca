"""The server's processes: the production Rollout, started again whenever it is no more."""

import asyncio
from typing import TYPE_CHECKING, Any

from polar.config import ServerSettings
from polar.errors import StoreError
from polar.rollout.service import RolloutService
from tests.simulation.database import Store

if TYPE_CHECKING:
    from tests.simulation.world import World

REPLICA = "http://engine"


class ServerProcess:
    def __init__(self, world: "World", number: int) -> None:
        self.name = f"server-{number}"
        self.process = world.process(self.name)
        self.rollout: RolloutService
        self.ready = False
        self.calls: list[Any] = []  # under way
        self._world = world

    async def main(self) -> None:
        world, schedule = self._world, self._world.schedule
        store: Any = Store(world.disk, world.loop, self.process, world.troubles, world.rng(f"store {self.name}"))
        settings = ServerSettings(
            attempts=schedule.attempts, lease_seconds=schedule.lease_seconds, beat_seconds=schedule.beat_seconds
        )
        try:
            self.rollout = world.parts.rollout(
                store, settings, store_id="the server's", replicas=[REPLICA], versions=store.read_policy_versions
            )
            await self.rollout.__aenter__()
        except StoreError as error:
            world.note(self.name, f"can't start: {error}")
            world.ended(self)
            return
        except Exception as error:  # noqa: BLE001 - whatever it was, it should not have been
            world.crashed(self.name, error)
            return
        self.ready = True
        world.took_over(self)
        for machine in world.machines:
            if machine.spec.inside:
                machine.start_inside(self.process, self.rollout.lease_manager)
        await self.rollout.superseded.wait()
        world.note(self.name, "is superseded, and ends")
        world.ended(self)
        await asyncio.Event().wait()
