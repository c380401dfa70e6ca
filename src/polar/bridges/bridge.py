"""A bridge for trainers that have no event loop, or one that they can't wait in: it has one of its own."""

from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from polar.bridges.engines import Engines
from polar.bridges.rollouts import Group, Rollouts
from polar.bridges.settings import BridgeSettings, settings
from polar.client.background import Background

T = TypeVar("T")


class Bridge:
    """Use as a context manager, or close it. Threads may share it."""

    def __init__(self, source: BridgeSettings | Mapping[str, Any] | str | Path | None = None) -> None:
        """As `settings` takes it. Raises ConfigError."""
        self.rollouts = Rollouts(settings(source))
        self.engines = Engines(self.rollouts.client)
        self._loop = Background(self.rollouts.close)

    def __enter__(self) -> "Bridge":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for a coroutine of `rollouts` or `engines`."""
        return self._loop.run(work)

    def groups(self, wanted: Iterable[str], key: str, *, samples: int | None = None) -> list[Group]:
        """One for each task, in their order."""
        return self.run(self.rollouts.groups(wanted, key, samples=samples))
