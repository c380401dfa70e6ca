"""What the server tells the process that keeps its nodes, and what that tells the server: lines of JSON over pipes."""

import hashlib
from typing import Literal

import msgspec
from msgspec import Struct

from polar.config import ClusterSettings, ServerSettings, Settings

DRAIN_LINE = b"drain\n"  # said to the process: end all nodes in good order, then yourself
ONE_PER_MACHINE = "each"
DEFAULT_SERVE = "polar.node.node_service:serve_node"


class NodeSpec(Struct, frozen=True):
    """What a node is made with. It holds secrets: it goes to Ray as an argument of the actor, and nowhere else."""

    server_url: str
    token: str | None
    settings: str  # JSON
    folder: str  # on each machine; every node has one of its name in it
    serve: str  # the coroutine function that is a node, as MODULE:NAME

    def __repr__(self) -> str:
        return f"Task(server_url={self.server_url!r}, ...)"

    @property
    def digest(self) -> str:
        """Nodes with another one are not what this server wants."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class DriverConfig(Struct, frozen=True):
    """The first line to the process."""

    address: str  # of the Ray cluster
    namespace: str
    nodes: Literal["each"] | int
    resources: dict[str, float]  # that Ray sets aside for each node
    task: NodeSpec

    def format_unreachable_message(self, why: str) -> str:
        return (
            f"No Ray cluster could be reached at {self.address!r} ({why}). "
            "This machine must be part of one (`ray start --head` or `--address=...`); see [cluster] address. "
            "If its head asks for a token, set RAY_AUTH_MODE=token wherever Ray starts, here as well."
        )


class LogMessage(Struct, frozen=True, tag=True):
    """A line from the process: something to log."""

    level: Literal["info", "warning", "error"]
    text: str


class NodesPlaced(Struct, frozen=True, tag=True):
    """Every node that is wanted now was found or asked for."""

    names: list[str]


class DriverFailed(Struct, frozen=True, tag=True):
    """It can't go on, and has ended. `final`: nor could another."""

    error: str
    final: bool = False


DriverMessage = LogMessage | NodesPlaced | DriverFailed


def make_node_settings(settings: Settings) -> str:
    """Settings as nodes need them: nothing that is the server's alone (its admin token, its file), and no fixed port.
    What changes only the server leaves nodes as they are."""
    changed: dict[str, object] = {
        "gateway": settings.gateway.model_copy(update={"port": 0}),  # several nodes may share a machine
        "server": ServerSettings(),
        "cluster": ClusterSettings(),
    }
    if (settings.store.url or "").startswith("sqlite:"):
        changed["store"] = settings.store.model_copy(update={"url": None})  # in the node's own folder
    return settings.model_copy(update=changed).model_dump_json()
