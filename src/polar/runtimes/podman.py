"""`podman`: containers without a daemon (podman 4 or later)."""

import os
import resource
import shutil
from pathlib import Path

import msgspec

from polar.runtimes.cgroups import CONTROLLERS
from polar.runtimes.containers import Containers

_MOST_FILES = 1 << 20  # podman's own limits, as far as we may keep them


class Podman(Containers):
    name = "podman"
    advice = "install podman"

    @property
    def rootless(self) -> bool:
        return os.geteuid() != 0

    async def unavailable(self) -> str | None:
        if (why := await super().unavailable()) is not None or not self.rootless:
            return why
        told = await self._cli.call("info", "--format", "{{.Host.CgroupsVersion}} {{json .Host.CgroupControllers}}")
        version, _, controllers = told.partition(" ")
        offered = (msgspec.json.decode(controllers) or []) if version == "v2" else []
        self.missing_controllers = frozenset(name for name in CONTROLLERS if name not in offered)
        return None

    def command(self) -> tuple[str, ...]:
        # crun, the default, refuses machines where v2 has controllers of its own besides v1 ("hybrid"); runc doesn't.
        controllers = Path("/sys/fs/cgroup/unified/cgroup.controllers")
        hybrid = controllers.exists() and controllers.read_text().strip()
        return ("podman", "--runtime", "runc") if hybrid and shutil.which("runc") else ("podman",)

    def options(self) -> tuple[str, ...]:
        # Left to itself podman asks for more than it has where root may not raise limits (no CAP_SYS_RESOURCE).
        most_processes = int(Path("/proc/sys/kernel/pid_max").read_text())
        return (
            _ulimit("nofile", resource.RLIMIT_NOFILE, _MOST_FILES),
            _ulimit("nproc", resource.RLIMIT_NPROC, most_processes),
        )


def _ulimit(name: str, limit: int, most: int) -> str:
    ours = resource.getrlimit(limit)[1]
    kept = most if ours == resource.RLIM_INFINITY else min(ours, most)
    return f"--ulimit={name}={kept}:{kept}"
