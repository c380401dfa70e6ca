"""In place of `polar up`: python -m tests.cluster.server_process ADDRESS NAMESPACE FOLDER, until SIGTERM."""

import asyncio
import signal
import sys

from polar.cluster.ray_cluster import RayCluster
from polar.config import ClusterSettings, Settings


async def main(address: str, namespace: str, folder: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = Settings(cluster=ClusterSettings(engine="ray", address=address, data=folder))
    serve = "tests.cluster.stand_in:serve_node"
    async with RayCluster(settings, "http://127.0.0.1:1", namespace=namespace, serve=serve):
        print("placed", flush=True)
        await stop.wait()


asyncio.run(main(*sys.argv[1:]))
