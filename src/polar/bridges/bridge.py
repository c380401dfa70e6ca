"""The Bridge protocol, and bases of Polar's own bridges: for trainers with and without an event loop."""

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
                       └► engines.updating(version) ─► generation is paused while the engines get weights

    A plug-in of the entry-point group `polar.bridges`, named after the trainer. Its constructor depends on how the
    trainer is configured and is not part of the protocol. A bridge promises:

    - its module imports the trainer's package only inside functions, so it loads without the trainer;
    - the trainer gets, bit for bit, what an export of the same sessions contains;
    - a step that runs again, for example after a crash, gets the same sessions (group keys are made of the step);
    - advantages are computed over sessions, and splitting a session into traces changes no gradient.
    """

    @property
    def rollouts(self) -> RolloutClient:
        """Runs groups of sessions by task id."""
        ...

    @property
    def engines(self) -> WeightUpdater:
        """The trainer's engines: their addresses, their version, and pauses."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Closes the connections. A coroutine if the bridge runs in the trainer's event loop."""
        ...


class AsyncBridge(AsyncCloseable):
    """A bridge that runs in the trainer's event loop. Use as an async context manager, or close it."""

    def __init__(self, source: SettingsSource = None) -> None:
        """`source` as `polar.bridges.settings.load_settings` takes it. Raises ConfigError."""
        self.rollouts = RolloutClient(load_settings(source))

    @cached_property
    def engines(self) -> WeightUpdater:
        return WeightUpdater(self.rollouts.client)

    async def close(self) -> None:
        await self.rollouts.close()


class BlockingBridge(Closeable):
    """A bridge with its own event loop in a thread, for trainers without one. Use as a context manager, or close it.
    Thread-safe."""

    def __init__(self, source: SettingsSource = None) -> None:
        """`source` as `polar.bridges.settings.load_settings` takes it. Raises ConfigError."""
        self.rollouts = RolloutClient(load_settings(source))
        self.engines = WeightUpdater(self.rollouts.client)
        self._loop = BackgroundLoop(self.rollouts.close)

    def close(self) -> None:
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine of `rollouts` or `engines` and returns its result."""
        return self._loop.run(coroutine)

    def run_groups(self, tasks: Iterable[str], key: str, *, samples: int | None = None) -> list[SessionGroup]:
        """Runs one group for each task, in their order."""
        return self.run(self.rollouts.run_groups(tasks, key, samples=samples))

    @contextmanager
    def updating(self, version: int, mode: PauseMode = "freeze") -> Iterator[None]:
        """Like `engines.updating`: generation is paused within, while the engines get the weights of `version`."""
        self.run(self.engines.freeze(mode))
        yield
        self.run(self.engines.finish_update(version))


class TrainerBridge(Closeable):
    """Base of a bridge that adds one trainer's hooks to a BlockingBridge."""

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
