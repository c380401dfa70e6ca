"""A bridge for trainers that have no event loop, or one that they can't wait in: it has one of its own."""

from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from polar.bridges.engines import Engines
from polar.bridges.rollouts import Group, Rollouts
from polar.bridges.settings import Source, settings
from polar.client.background import Background
from polar.closing import Closing
from polar.rollout.models import PauseMode

T = TypeVar("T")


class Bridge(Closing):
    """Use as a context manager, or close it. Threads may share it."""

    def __init__(self, source: Source = None) -> None:
        """As `settings` takes it. Raises ConfigError."""
        self.rollouts = Rollouts(settings(source))
        self.engines = Engines(self.rollouts.client)
        self._loop = Background(self.rollouts.close)

    def close(self) -> None:
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine of `rollouts` or `engines`."""
        return self._loop.run(work)

    def groups(self, wanted: Iterable[str], key: str, *, samples: int | None = None) -> list[Group]:
        """One for each task, in their order."""
        return self.run(self.rollouts.groups(wanted, key, samples=samples))

    @contextmanager
    def updating(self, version: int, mode: PauseMode = "freeze") -> Iterator[None]:
        """As `engines.updating`: generation stands still within, while engines get the weights of `version`."""
        self.run(self.engines.stop(mode))
        yield
        self.run(self.engines.go_on(version))
