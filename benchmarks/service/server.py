"""A rollout server for `make bench-service`, with or without something that runs sessions in the same process.

    python -m benchmarks.service.server FORM DATA_DIR [STORE_URL]

FORM is `none`, `noop` (sessions in which nothing happens), `long` (the same, with calls of 50,000 tokens in the store)
or `node` (the production node, over runtimes in which nothing happens). Prints its address, and ends with its input.
"""

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, get_args

from benchmarks.calls import make_conversation
from benchmarks.pipeline.runtime import SimulatedBackend, SimulatedBackends
from benchmarks.process import Address, print_message, run_async, wait_for_input_end
from benchmarks.service.worker import build_settings, make_no_op_worker, run_worker
from polar.gateway.process import tune_process
from polar.node.node_service import make_node, make_worker
from polar.service import Service

Form = Literal["none", "noop", "long", "node"]
LONG_TURNS = 42  # of a session of about 50,000 tokens


async def serve(form: Form, data: Path, store: str | None) -> None:
    tune_process()
    async with Service(build_settings(store), data) as service, _run_sessions(form, service, data):
        print_message(Address(service.control_url))
        await wait_for_input_end()


@contextlib.asynccontextmanager
async def _run_sessions(form: Form, service: Service, data: Path) -> AsyncIterator[None]:
    if form == "none":
        yield
        return
    store_id = await service.data_plane.store.ensure_store_id()
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


if __name__ == "__main__":
    [chosen] = [form for form in get_args(Form) if form == sys.argv[1]]
    run_async(serve(chosen, Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None))
