"""A wall clock that jumps back and forth by hours while the process runs. Python imports this by itself when it starts,
where the folder is on its path; the clock that only goes forward is left alone."""

import random
import time

_HOURS = 9 * 3600
_EACH = 0.15  # seconds between two jumps
_true, _steady = time.time, time.monotonic


def _jumping() -> float:
    return _true() + random.Random(int(_steady() / _EACH)).uniform(-_HOURS, _HOURS)


time.time = _jumping
time.time_ns = lambda: int(_jumping() * 1e9)
