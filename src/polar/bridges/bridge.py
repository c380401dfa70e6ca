"""A bridge for trainers that have no event loop, or one that they can't wait in: it has one of its own."""

from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from polar.bridges.engines import TrainerEngines
from polar.bridges.rollouts import RolloutClient, SessionGroup
from polar.bridges.settings import SettingsSource, load_settings
from polar.client.background_loop import BackgroundLoop
from polar.closeable import Closeable
from polar.records.result import PauseMode

T = TypeVar("T")


class Bridge(Closeable):
    """Use as a context manager, or close it. Threads may share it."""

    def __init__(self, source: SettingsSource = None) -> None:
        """As `settings` takes it. Raises ConfigError."""
        self.rollouts = RolloutClient(load_settings(source))
        self.engines = TrainerEngines(self.rollouts.client)
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
        self.run(self.engines.begin_update(mode))
        yield
        self.run(self.engines.finish_update(version))
