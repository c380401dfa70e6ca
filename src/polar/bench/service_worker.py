"""A node that joins a rollout server over HTTP, and in whose sessions nothing happens.

    python -m polar.bench.service_worker SERVER_URL NAME DATA_DIR [STORE_URL]

Without the server's own store, it sends the server a copy of each session. Ends with its input.
"""

import sys
from pathlib import Path

from polar.bench.service_host import no_op_worker
from polar.bench.service_server import Address, at_work, input_ends, say, settings
from polar.cli.common import run
from polar.data_plane import DataPlane, settle_process
from polar.node.remote import RemoteServer


async def work(server_url: str, name: str, data: Path, store: str | None) -> None:
    settle_process()
    async with (
        RemoteServer(server_url, None) as server,
        DataPlane(settings(store), data, engines=False) as plane,
        at_work(no_op_worker(server, plane, await plane.store.identity(), name)),
    ):
        say(Address(server_url))
        await input_ends()


if __name__ == "__main__":
    run(work(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None))
