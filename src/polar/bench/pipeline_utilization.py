"""How busy an engine was, told from the calls that held its slots."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from polar.bench.pipeline_engine import EngineCall

Times = NDArray[np.float64]


class Window(Struct, frozen=True):
    """Seconds of the monotonic clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Utilization(Struct, frozen=True):
    """Shares of a window, 0 to 1."""

    seconds: float
    slots: float  # of all slots in use, on average: what the engine did of what it could
    full: float  # of the time with every slot in use
    waiting: float  # calls that waited for a slot, on average


def compute_utilization(calls: Sequence[EngineCall], slots: int, window: Window) -> Utilization:
    began, ended = _began(calls), np.array([call.ended for call in calls])
    arrived = np.array([call.arrived for call in calls])
    held = _overlap(began, ended, window)
    return Utilization(
        seconds=window.seconds,
        slots=float(held.sum()) / (slots * window.seconds),
        full=_full(began, ended, slots, window) / window.seconds,
        waiting=float(_overlap(arrived, began, window).sum()) / window.seconds,
    )


def compute_slot_series(calls: Sequence[EngineCall], window: Window, step: float) -> list[float]:
    """Slots in use, on average over each `step` seconds of the window."""
    edges = window.begin + step * np.arange(int(window.seconds / step) + 1)
    seconds = np.array([call.seconds for call in calls])
    used: Times = np.clip(edges[:, None] - _began(calls), 0, seconds).sum(axis=1)  # slot-seconds up to each edge
    means: list[float] = (np.diff(used) / step).tolist()
    return means


def _began(calls: Sequence[EngineCall]) -> Times:
    return np.array([call.began for call in calls])


def _overlap(begin: Times, end: Times, window: Window) -> Times:
    within: Times = np.minimum(end, window.end) - np.maximum(begin, window.begin)
    return np.maximum(within, 0.0)


def _full(began: Times, ended: Times, slots: int, window: Window) -> float:
    """Seconds of the window with every slot in use. One that passes from call to call at a moment is never free."""
    times = np.concatenate([began, ended])
    changes = np.repeat([1, -1], len(began))
    order = np.lexsort((changes, times))
    in_use = np.cumsum(changes[order])[:-1]
    times = times[order]
    spans = _overlap(times[:-1], times[1:], window)
    return float(spans[in_use >= slots].sum())
