"""A rollout server for `polar bench service`, with or without something that runs sessions in the same process.

    python -m polar.bench.service_server FORM DATA_DIR [STORE_URL]

FORM is `none`, `noop` (sessions in which nothing happens), `long` (the same, with calls of 50,000 tokens in the store)
or `node` (the production node, over runtimes in which nothing happens). Prints its address, and ends with its input.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from polar.bench.pipeline_runtime import SimulatedBackend, SimulatedBackends
from polar.bench.service_host import SLOTS, make_no_op_worker
from polar.bench.trajectory import make_conversation
from polar.cli.common import run_async
from polar.config import GatewaySettings, NodeSettings, ServerSettings, Settings, StoreSettings
from polar.gateway.process import tune_process
from polar.node.node_service import make_node, make_worker
from polar.node.worker import Worker
from polar.service import Service

Form = Literal["none", "noop", "long", "node"]
LONG_TURNS = 42  # of a session of about 50,000 tokens


class Address(Struct):
    control: str


def build_settings(store: str | None) -> Settings:
    return Settings(
        gateway=GatewaySettings(port=0),
        server=ServerSettings(port=0),
        store=StoreSettings(url=store),
        node=NodeSettings(init_workers=SLOTS, ready_buffer=SLOTS, run_workers=SLOTS, postrun_workers=SLOTS),
    )


async def serve(form: Form, data: Path, store: str | None) -> None:
    tune_process()
    async with Service(build_settings(store), data) as service, _working(form, service, data):
        print_message(Address(service.control_url))
        await wait_for_input_end()


@contextlib.asynccontextmanager
async def _working(form: Form, service: Service, data: Path) -> AsyncIterator[None]:
    if form == "none":
        yield
        return
    store_id = await service.data_plane.store.store_id()
    leasing = service.rollout.lease_manager
    if form != "node":
        calls = make_conversation(LONG_TURNS)[0] if form == "long" else []
        async with run_worker(make_no_op_worker(leasing, service.data_plane, store_id, "here", calls)):
            yield
        return
    kind = SimulatedBackend(data / "simulated", service.gateway_url, start_seconds=0.0, seed=0)
    plane = service.data_plane
    node = make_node(plane, SimulatedBackends(kind))
    async with node, run_worker(await make_worker(leasing, plane, node, name="here", store_id=store_id)):
        yield


@contextlib.asynccontextmanager
async def run_worker(worker: Worker) -> AsyncIterator[None]:
    """Until the end of the block, which is at once where the worker fails."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(stop))
        yield
        stop.set()


def print_message(value: Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


async def read_input_lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line


async def wait_for_input_end() -> None:
    async for _ in read_input_lines():
        pass


if __name__ == "__main__":
    [chosen] = [form for form in get_args(Form) if form == sys.argv[1]]
    run_async(serve(chosen, Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
