"""Other durable queues, timed with jobs in which nothing happens. Run by an interpreter that has them, which need not
have Polar:

    python peer_queues.py huey|procrastinate JOBS PLACE

PLACE is a file for huey (SQLite), and the URL of an empty database for procrastinate (PostgreSQL). Workers are threads
or tasks of the same process. Writes a line of JSON: seconds from the first submission until the last result is known,
and the CPU seconds of the process meanwhile. A tenth of the jobs runs before, for their caches.
"""

import asyncio
import importlib.metadata
import json
import sys
import time
from importlib import import_module
from typing import Any

WORKERS = 4
TASKS = 64
BATCH = 200


def measure_huey(jobs: int, place: str) -> tuple[float, float]:
    """Results are kept, and read one by one, which takes them out."""
    queue: Any = import_module("huey").SqliteHuey(filename=place)

    def nothing(number: int) -> int:
        return number

    task = queue.task()(nothing)
    consumer = queue.create_consumer(workers=WORKERS, initial_delay=0.001, max_delay=0.01)
    consumer.start()

    def run(count: int) -> None:
        asked = [task(number) for number in range(count)]
        if [one.get(blocking=True, backoff=1, max_delay=0.005) for one in asked] != list(range(count)):
            sys.exit("huey gave other results than were expected")

    run(jobs // 10)
    started_at, cpu = time.monotonic(), time.process_time()
    run(jobs)
    took = time.monotonic() - started_at, time.process_time() - cpu
    consumer.stop(graceful=True)
    return took


async def measure_procrastinate(jobs: int, place: str) -> tuple[float, float]:
    """It keeps no results: known is that each job has ended well."""
    made: Any = import_module("procrastinate")
    app = made.App(connector=made.PsycopgConnector(conninfo=place))

    async def nothing(number: int) -> int:
        return number

    task = app.task(name="nothing")(nothing)

    async def run(count: int) -> None:
        for first in range(0, count, BATCH):
            await task.batch_defer_async(*({"number": number} for number in range(first, min(count, first + BATCH))))
        await app.run_worker_async(wait=False, concurrency=TASKS, install_signal_handlers=False)

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        await run(jobs // 10)
        started_at, cpu = time.monotonic(), time.process_time()
        await run(jobs)
        took = time.monotonic() - started_at, time.process_time() - cpu
        ended = len(list(await app.job_manager.list_jobs_async(status="succeeded")))
    if ended != jobs + jobs // 10:
        sys.exit(f"procrastinate ended {ended} jobs well, instead of {jobs + jobs // 10}")
    return took


if __name__ == "__main__":
    which, number_of, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    found = measure_huey(number_of, where) if which == "huey" else asyncio.run(measure_procrastinate(number_of, where))
    told = {"version": importlib.metadata.version(which), "seconds": found[0], "cpu": found[1]}
    sys.stdout.write(json.dumps(told) + "\n")
