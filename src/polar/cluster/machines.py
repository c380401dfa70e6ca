"""The machines of the Ray cluster that this process is a client of, and whether they reach this one."""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import ray
from msgspec import Struct

from polar.gateway.http import is_loopback

_ray: Any = ray  # not all of it has types


class Machine(Struct, frozen=True):
    id: str  # Ray's: another each time that Ray is started there
    name: str
    address: str
    resources: dict[str, float]

    def satisfies(self, resources: Mapping[str, float]) -> bool:
        return all(self.resources.get(kind, 0) >= amount for kind, amount in resources.items())


def list_machines() -> list[Machine]:
    """Those that live."""
    return [
        Machine(
            node["NodeID"],
            re.sub(r"[^A-Za-z0-9._-]", "-", node["NodeName"]),  # it is to name a folder
            node["NodeManagerAddress"],
            node["Resources"],
        )
        for node in _ray.nodes()
        if node["Alive"]
    ]


def reachable_url(url: str) -> str:
    """The address of a server here that listens on all of this machine's, as the others name it."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    host = own_address()
    netloc = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{netloc}:{parts.port}" if parts.port else netloc).geturl()


def unreachable_addresses(url: str, own: str, machines: list[Machine]) -> set[str]:
    """Addresses of machines to which that of the server, on the machine `own`, means something else."""
    if not is_loopback(urlsplit(url).hostname or ""):
        return set()
    return {machine.address for machine in machines} - {own}


def own_address() -> str:
    """Of this machine, as Ray knows it."""
    address: str = _ray.util.get_node_ip_address()
    return address
