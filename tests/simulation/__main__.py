"""One schedule with all that happens in it, or many of them; these until a signal or for so many seconds, if given.

python -m tests.simulation SEED
python -m tests.simulation FIRST COUNT [SECONDS]
"""

import signal
import sys
import time
from collections.abc import Iterator

from tests.simulation.world import Broken, outcomes, simulate

_SHOWN = 50  # schedules between two looks at how far it is


def one(seed: int) -> int:
    try:
        seconds = simulate(seed, say=print)
    except Broken as error:
        print(error)
        return 1
    print(f"seed {seed}: all is well after {seconds:.0f} s")
    return 0


def many(first: int, count: int, limit: float) -> int:
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    deadline = time.monotonic() + limit

    def seeds() -> Iterator[int]:
        for seed in range(first, first + count):
            if stopped or time.monotonic() > deadline:
                return
            yield seed

    began, done, found = time.process_time(), 0, 0
    for problem in outcomes(seeds()):
        done += 1
        if problem is not None:
            found += 1
            print(problem, flush=True)
        if done % _SHOWN == 0 and sys.stderr.isatty():
            print(f"\r{done} of {count}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    seconds = time.process_time() - began
    some = f"{done}" if done == count else f"{done} of {count}"
    rate = done / seconds * 60 if seconds else 0.0
    print(f"{some} schedules in {seconds:.1f} s of CPU ({rate:.0f} a minute), {found} with problems")
    return 1 if found or stopped else 0


def main() -> int:
    words = sys.argv[1:]
    if len(words) == 1:
        return one(int(words[0]))
    first, count, *limit = words
    return many(int(first), int(count), float(limit[0]) if limit else float("inf"))


if __name__ == "__main__":
    sys.exit(main())
