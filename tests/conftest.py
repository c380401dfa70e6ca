"""What all tests have in common."""

import gc
import os

from hypothesis import settings

# Where no engine is named it would be the embedded one, whose model takes a while to fetch and to load.
os.environ.setdefault("POLAR_ENGINE__KIND", "scripted")

# Several tests run at the same time, each with a process or two: more threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes is up to the machine. `make test` tries the same examples in every run, so that what passed
# once passes again; `make test-properties` tries many more, and others each time.
settings.register_profile("polar", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=500)
settings.load_profile("polar")


def pytest_collection_finish() -> None:
    """Thousands of collected tests and what they import stay anyway: the garbage collector need not walk them again."""
    gc.collect()
    gc.freeze()
