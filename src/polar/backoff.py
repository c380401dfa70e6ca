"""Delays between retries."""

import random
from collections.abc import Iterator


def backoff_delays(first: float, max_delay: float) -> Iterator[float]:
    """Yields delays in seconds, each about twice the previous one, up to a limit."""
    delay = first
    while True:
        yield add_jitter(delay)
        delay = min(2 * delay, max_delay)


def add_jitter(seconds: float) -> float:
    """Randomizes a delay, so that clients that failed together do not retry together."""
    return seconds * random.uniform(0.5, 1)
