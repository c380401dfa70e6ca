"""A node that joins a rollout server over HTTP, and in whose sessions nothing happens.

    python -m polar.bench.service_worker SERVER_URL NAME DATA_DIR [STORE_URL]

Without the server's own store, it sends the server a copy of each session. Ends with its input.
"""

import sys
from pathlib import Path

from polar.bench.service_host import make_no_op_worker
from polar.bench.service_server import Address, build_settings, print_message, run_worker, wait_for_input_end
from polar.cli.common import run_async
from polar.gateway.data_plane import DataPlane
from polar.gateway.process import tune_process
from polar.node.remote_server import RemoteServer


async def work(server_url: str, name: str, data: Path, store: str | None) -> None:
    tune_process()
    async with (
        RemoteServer(server_url, None) as server,
        DataPlane(build_settings(store), data, engines=False) as plane,
        run_worker(make_no_op_worker(server, plane, await plane.store.store_id(), name)),
    ):
        print_message(Address(server_url))
        await wait_for_input_end()


if __name__ == "__main__":
    run_async(work(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None))
