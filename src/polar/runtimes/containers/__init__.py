"""Containers of Docker and podman. What both share is in `backend`; here is what is different."""

import os
import resource
import shutil
from pathlib import Path

import msgspec

from polar.runtimes.cgroups import CONTROLLERS
from polar.runtimes.containers.backend import ContainerBackend

__all__ = ["Docker", "Podman"]

_MAX_OPEN_FILES = 1 << 20  # podman's own limits, as far as we may keep them


class Docker(ContainerBackend):
    """Containers of a Docker daemon on this machine (20.10 or later)."""

    name = "docker"
    install_hint = "install Docker (Debian: docker.io) and start its daemon, dockerd"


class Podman(ContainerBackend):
    """Containers without a daemon (podman 4 or later)."""

    name = "podman"
    install_hint = "install podman"

    @property
    def is_rootless(self) -> bool:
        return os.geteuid() != 0

    async def check_availability(self) -> str | None:
        if (why := await super().check_availability()) is not None or not self.is_rootless:
            return why
        told = await self._cli.call("info", "--format", "{{.Host.CgroupsVersion}} {{json .Host.CgroupControllers}}")
        version, _, controllers = told.partition(" ")
        offered = (msgspec.json.decode(controllers) or []) if version == "v2" else []
        self.missing_controllers = frozenset(name for name in CONTROLLERS if name not in offered)
        return None

    def build_command(self) -> tuple[str, ...]:
        # crun, the default, refuses machines where v2 has controllers of its own besides v1 ("hybrid"); runc doesn't.
        controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
        hybrid = controllers.exists() and controllers.read_text().strip()
        return ("podman", "--runtime", "runc") if hybrid and shutil.which("runc") else ("podman",)

    def list_create_options(self) -> tuple[str, ...]:
        # Left to itself podman asks for more than it has where root may not raise limits (no CAP_SYS_RESOURCE).
        most_processes = int(Path("/proc/sys/kernel/pid_max").read_text())
        return (
            _format_ulimit("nofile", resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
            _format_ulimit("nproc", resource.RLIMIT_NPROC, most_processes),
        )


def _format_ulimit(name: str, limit: int, max_value: int) -> str:
    ours = resource.getrlimit(limit)[1]
    kept = max_value if ours == resource.RLIM_INFINITY else min(ours, max_value)
    return f"--ulimit={name}={kept}:{kept}"
