"""Runs: experiments that share one service.

Each has quotas, a limit on how far it may run ahead of its trainer, and engines with their policy versions.
"""

from typing import Literal

import msgspec
from msgspec import Struct, field

from polar.config import DEFAULT_RUN, Compat
from polar.engines.base import DesiredEngines, DesiredPool, DesiredReplica, RunEngine
from polar.records.policy import PauseState


class Quotas(Struct, frozen=True):
    """None is unlimited.

    `batch` and `max_lag` belong together: running sessions and graded ones that no consumer has taken are at most
    `batch * (max_lag + 1)`. So a session that begins now is trained on at most `max_lag` batches later, and sessions
    begin as the trainer takes results."""

    max_running: int | None = None
    max_queued: int | None = None
    batch: int | None = None
    max_lag: int = 0

    @property
    def max_ahead(self) -> int | None:
        return None if self.batch is None else self.batch * (self.max_lag + 1)


class RunSettings(Struct):
    """The stored settings of a run."""

    quotas: Quotas = field(default_factory=Quotas)
    added: list[str] = []  # replicas besides the configured ones
    removed: list[str] = []
    paused: PauseState | None = None
    compat: Compat | None = None  # semantics of its tasks [default: the server's]
    since: int = 0  # the generation in which its engines were last frozen
    engine: RunEngine = RunEngine()

    @classmethod
    def decode(cls, text: str) -> "RunSettings":
        return msgspec.json.decode(text, type=cls)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


OnStale = Literal["mark", "cancel"]


class StalenessLimits(Struct, frozen=True):
    """A task's limits on the age of the policy that sampled its tokens (fields of a TaskRequest)."""

    oldest_version: int | None = None
    max_lag: int | None = None
    on_stale: OnStale = "mark"

    def is_stale(self, version: int | None, newest: int) -> bool:
        if version is None:
            return False
        oldest = max(
            0 if self.oldest_version is None else self.oldest_version,
            0 if self.max_lag is None else newest - self.max_lag,
        )
        return version < oldest


_staleness_decoder = msgspec.json.Decoder(StalenessLimits)


def parse_staleness_limits(request: str) -> StalenessLimits:
    """`request` is a TaskRequest, as JSON."""
    return _staleness_decoder.decode(request)


class RunRegistry:
    """All runs with the desired state of their engines, in memory.

    Nodes apply that state (engines.base.DesiredEngines). Callers that change it store the change.
    """

    def __init__(
        self,
        configured: list[str],
        versions: dict[str, int],
        runs: dict[str, RunSettings],
        generation: int,
        server: str,
    ) -> None:
        """`configured` are the replicas of the default run; `versions` are by URL, for all runs; `server` is the id of
        the server's store."""
        self._configured = configured
        self.versions = versions
        self.runs = runs
        self._generation = generation
        self._server = server

    @property
    def engines(self) -> DesiredEngines:
        pools = {
            run: self.get_pool(run)
            for run in {DEFAULT_RUN, *self.runs}
            if run == DEFAULT_RUN or self._has_own_engines(run)
        }
        return DesiredEngines(self._generation, pools, self._server)

    def advance_generation(self) -> int:
        """To be called after every change. Returns the new generation."""
        self._generation += 1
        return self._generation

    def pause(self, run: str, mode: PauseState | None) -> None:
        settings = self.get_settings(run)
        if mode == "freeze" and settings.paused not in ("freeze", "settle"):
            settings.since = self._generation + 1
        settings.paused = mode

    def get_settings(self, run: str) -> RunSettings:
        return self.runs.setdefault(run, RunSettings())

    def get_quotas(self, run: str) -> Quotas:
        return self.runs[run].quotas if run in self.runs else Quotas()

    def get_compat(self, run: str) -> Compat | None:
        return self.runs[run].compat if run in self.runs else None

    def get_pool(self, run: str) -> DesiredPool:
        settings = self.runs.get(run, RunSettings())
        replicas = [DesiredReplica(url, self.versions.get(url, 0)) for url in self.get_replica_urls(run)]
        return DesiredPool(replicas, settings.paused, settings.since, settings.engine)

    def get_replica_urls(self, run: str) -> list[str]:
        """The run's own replicas, else those of the default run."""
        settings = self.runs.get(run, RunSettings())
        if run != DEFAULT_RUN and not self._has_own_engines(run):
            return self.get_replica_urls(DEFAULT_RUN)
        configured = self._configured if run == DEFAULT_RUN else []
        return [url for url in dict.fromkeys((*configured, *settings.added)) if url not in settings.removed]

    def get_newest_version(self, run: str) -> int:
        """The newest version among the run's replicas."""
        return max((self.versions.get(url, 0) for url in self.get_replica_urls(run)), default=0)

    def _has_own_engines(self, run: str) -> bool:
        """Whether the run has replicas of its own, or another engine than the default run."""
        return run in self.runs and (bool(self.runs[run].added) or self.runs[run].engine != RunEngine())

    def add_replica(self, run: str, url: str) -> None:
        settings = self.get_settings(run)
        settings.removed = [other for other in settings.removed if other != url]
        if url not in self.get_replica_urls(run) or (run != DEFAULT_RUN and url not in settings.added):
            settings.added = [*settings.added, url]

    def remove_replica(self, run: str, url: str) -> bool:
        """False where the run has no such replica."""
        settings = self.get_settings(run)
        if url not in (self.get_replica_urls(run) if run == DEFAULT_RUN else settings.added):
            return False
        settings.added = [other for other in settings.added if other != url]
        if run == DEFAULT_RUN and url in self._configured:
            settings.removed = [*settings.removed, url]
        return True
