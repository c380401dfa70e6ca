"""The process that is Ray's client for the server: `python -m polar.cluster.driver`, started by RayCluster.

It is a process of its own because Ray ends its clients when it loses its head, and takes over their signals. It ends
when its standard input does (the server is gone, and the nodes are left as they are), or when it is told to drain.
"""

import io
import os
import select
import sys
import threading
from typing import Literal

import msgspec

from polar.cluster.driver_protocol import DRAIN_LINE, DriverConfig, DriverFailed, DriverMessage, LogMessage, NodesPlaced
from polar.cluster.node_supervisor import NamespaceTaken, NodeSupervisor
from polar.errors import ConfigError

POLL_SECONDS = 2.0
CONNECT_SECONDS = 20.0


def main() -> int:
    lines = io.FileIO(0, closefd=False)  # unbuffered: a buffer would hide from `select` what it holds
    orders = msgspec.json.decode(lines.readline(), type=DriverConfig)
    out = os.dup(1)
    os.dup2(2, 1)  # Ray prints

    def write_message(line: DriverMessage) -> None:
        os.write(out, msgspec.json.encode(line) + b"\n")

    def log_line(level: Literal["info", "warning", "error"], text: str) -> None:
        write_message(LogMessage(level, text))

    def give_up() -> None:
        write_message(DriverFailed(orders.unreachable_message(f"no answer in {CONNECT_SECONDS:g} seconds")))
        os._exit(1)  # nothing else ends Ray's attempts

    nodes = NodeSupervisor(orders, log_line)
    patience = threading.Timer(CONNECT_SECONDS, give_up)
    patience.daemon = True
    patience.start()
    try:
        nodes.connect()
        patience.cancel()
        nodes.start()
        write_message(NodesPlaced(nodes.names))
        while not select.select([lines], [], [], POLL_SECONDS)[0]:
            nodes.poll()
        if lines.readline() == DRAIN_LINE:
            nodes.drain()
    except ConfigError as error:
        patience.cancel()
        write_message(DriverFailed(str(error)))
        return 1
    except NamespaceTaken:
        write_message(
            DriverFailed(
                f"Another server has taken over the nodes of the namespace {orders.namespace!r}: give each server "
                "on a Ray cluster a [cluster] namespace of its own.",
                final=True,
            )
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
