"""How long to wait before something is tried again."""

import random
from collections.abc import Iterator


def backoff_delays(first: float, max_delay: float) -> Iterator[float]:
    """Seconds, each about twice as long as the one before, up to a limit."""
    delay = first
    while True:
        yield add_jitter(delay)
        delay = min(2 * delay, max_delay)


def add_jitter(seconds: float) -> float:
    """Never the same for everybody: who failed together would come again together."""
    return seconds * random.uniform(0.5, 1)
