"""What a bridge is, and what ours are made of: one for trainers without an event loop, one for those with one."""

from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol, TypeVar

from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.bridges.settings import SettingsSource, load_settings
from polar.client.closeable import AsyncCloseable, Closeable
from polar.client.sync_client import BackgroundLoop
from polar.records.policy import PauseMode
from polar.weight_sync.updater import WeightUpdater

T = TypeVar("T")


class Bridge(Protocol):
    """Polar in the loop of one trainer.

        trainer's loop ─► rollouts.run_group(task, key) ─► sessions as traces ─► the trainer's own types
                       └► engines.updating(version) ─► generation stands still while the engines get weights

    A plug-in of the entry-point group `polar.bridges`, by the trainer's name. The trainer's users construct it as the
    trainer's configuration has it, so the constructor is the bridge's own. What it promises:

    - its module imports the trainer's package only inside functions, so it loads without the trainer;
    - what the trainer is handed is, to the bit, what an export of the same sessions says;
    - a step that is run again, after a crash say, gets the same sessions (keys of groups follow from the step);
    - advantages are over sessions, and splitting a session into traces changes no gradient.
    """

    @property
    def rollouts(self) -> RolloutClient:
        """Groups of sessions, by the names of tasks."""
        ...

    @property
    def engines(self) -> WeightUpdater:
        """The trainer's engines: where they are, their version, when they stand still."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Ends its connections. A coroutine where the bridge lives in the trainer's event loop."""
        ...


class AsyncBridge(AsyncCloseable):
    """For trainers with an event loop, which it belongs to. Use as an async context manager, or close it."""

    def __init__(self, source: SettingsSource = None) -> None:
        """`source` as `polar.bridges.settings.load_settings` takes it. Raises ConfigError."""
        self.rollouts = RolloutClient(load_settings(source))

    @cached_property
    def engines(self) -> WeightUpdater:
        return WeightUpdater(self.rollouts.client)

    async def close(self) -> None:
        await self.rollouts.close()


class BlockingBridge(Closeable):
    """For trainers that have no event loop, or one that they can't wait in: it has one of its own. Use as a context
    manager, or close it. Threads may share it."""

    def __init__(self, source: SettingsSource = None) -> None:
        """`source` as `polar.bridges.settings.load_settings` takes it. Raises ConfigError."""
        self.rollouts = RolloutClient(load_settings(source))
        self.engines = WeightUpdater(self.rollouts.client)
        self._loop = BackgroundLoop(self.rollouts.close)

    def close(self) -> None:
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine of `rollouts` or `engines`."""
        return self._loop.run(work)

    def run_groups(self, tasks: Iterable[str], key: str, *, samples: int | None = None) -> list[SessionGroup]:
        """One for each task, in their order."""
        return self.run(self.rollouts.run_groups(tasks, key, samples=samples))

    @contextmanager
    def updating(self, version: int, mode: PauseMode = "freeze") -> Iterator[None]:
        """As `engines.updating`: generation stands still within, while engines get the weights of `version`."""
        self.run(self.engines.freeze(mode))
        yield
        self.run(self.engines.finish_update(version))


class TrainerBridge(Closeable):
    """A bridge with what one trainer needs besides, over a blocking one."""

    def __init__(self, bridge: BlockingBridge) -> None:
        self.bridge = bridge

    @property
    def rollouts(self) -> RolloutClient:
        return self.bridge.rollouts

    @property
    def engines(self) -> WeightUpdater:
        return self.bridge.engines

    def close(self) -> None:
        self.bridge.close()
