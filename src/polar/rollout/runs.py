"""Runs: experiments that share one service. What each may use, and how far ahead of its trainer it may be."""

from typing import Literal

import msgspec
from msgspec import Struct, field

from polar.config import Compat
from polar.engines.base import PauseState, RunEngine


class Quotas(Struct, frozen=True):
    """None is without limit.

    `batch` and `max_lag` go together: sessions that run, and graded ones that no consumer has taken yet, are at most
    `batch * (max_lag + 1)`. So a session that begins now is trained on at most `max_lag` batches later, and as soon as
    the trainer takes some, as many begin."""

    max_running: int | None = None
    max_queued: int | None = None
    batch: int | None = None
    max_lag: int = 0

    @property
    def max_ahead(self) -> int | None:
        return None if self.batch is None else self.batch * (self.max_lag + 1)


class RunSettings(Struct):
    """What is kept of a run."""

    quotas: Quotas = field(default_factory=Quotas)
    added: list[str] = []  # replicas, besides those of the configuration
    removed: list[str] = []
    paused: PauseState | None = None
    compat: Compat | None = None  # whose meaning its tasks have [default: the server's]
    since: int = 0  # the generation of the engines in which they were frozen last
    engine: RunEngine = RunEngine()

    @classmethod
    def decode(cls, text: str) -> "RunSettings":
        return msgspec.json.decode(text, type=cls)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


OnStale = Literal["mark", "cancel"]


class StalenessLimits(Struct, frozen=True):
    """What a task says about the age of the policy that its tokens come from (fields of a TaskRequest)."""

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
    """Of a TaskRequest, as JSON."""
    return _staleness_decoder.decode(request)
