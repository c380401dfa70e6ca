"""A trainer, as `make bench-service` has it: it submits tasks and reads results, in a process of its own.

    python -m benchmarks.service.client SERVER_URL

Each line of its input is a `ClientOrder`, and is answered with a `ClientResult`.
"""

import asyncio
import sys
import time

import msgspec
from msgspec import Struct

from benchmarks.process import print_message, read_input_lines, run_async
from benchmarks.service.worker import make_no_op_task
from polar.client.async_client import AsyncClient
from polar.records.task import TaskRequest

_PAGE = 200


class ClientOrder(Struct):
    count: int  # results that are read
    after: int = 0  # the cursor from which on
    submit: str | None = None  # as many tasks before, whose ids begin with this
    task: str | None = None  # JSON: like this one; default: one that does nothing
    page: int = _PAGE


class ClientResult(Struct):
    seconds: float  # from the first submission to the last result
    cpu: float  # seconds, of the client
    cursor: int
    size: int  # bytes of results
    usable: int  # of the results: those with a reward


_NO_REWARD, _HEAD = b'"reward":null', 1000
"""Where a result says so: in its first bytes. (To read all of it here would take as long as to make it there.)"""


async def serve(url: str) -> None:
    async with AsyncClient(url) as client:
        async for line in read_input_lines():
            print_message(await _carry_out(client, msgspec.json.decode(line, type=ClientOrder)))


async def _carry_out(client: AsyncClient, order: ClientOrder) -> ClientResult:
    tasks = [] if order.submit is None else [_make_task(order, number) for number in range(order.count)]
    started_at, cpu = time.monotonic(), time.process_time()
    size = usable = 0
    async with asyncio.TaskGroup() as group:
        if tasks:
            group.create_task(client.submit(tasks))
        async with client.results(order.after, raw=True, limit=order.page, count=order.count) as results:
            async for result in results:
                size += len(result.data)
                usable += _NO_REWARD not in result.data[:_HEAD]
    assert results.cursor is not None
    return ClientResult(time.monotonic() - started_at, time.process_time() - cpu, results.cursor, size, usable)


def _make_task(order: ClientOrder, number: int) -> TaskRequest:
    task_id = f"{order.submit}-{number}"
    if order.task is None:
        return make_no_op_task(task_id)
    return TaskRequest.model_validate_json(order.task).model_copy(update={"task_id": task_id})


if __name__ == "__main__":
    run_async(serve(sys.argv[1]))
