"""`local`: runs commands on the machine itself, in a folder. For trusted code: no isolation.

Guaranteed: every process that a command starts dies at the time-out and at `stop` (each command runs below a supervisor
that adopts its orphans, daemons included); CPU, memory and process limits hold where cgroups can be made; files are in
a folder that is removed.

Not supported: `image`, `disk_mb` and `network`. Paths inside are below the runtime's folder (see `path`), so home and
workdir differ from session to session. Processes that another service starts for a command (a container engine,
systemd, at) are not tracked. A command that kills its supervisor loses its orphans to the machine's init; they die with
the runtime's cgroup if there is one, and at the latest at the next sweep, which finds them by the runtime's id in their
environment.
"""

import asyncio
import contextlib
import logging
import os
import posixpath
import signal
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from polar.runtimes import files, relay
from polar.runtimes.base import CommandResult, FileState, RuntimeSpec, SandboxError
from polar.runtimes.cgroups import Cgroup, CgroupHierarchies
from polar.runtimes.relay import GatewayRelay
from polar.runtimes.spawner.client import SpawnedJob, Spawner, mark_out_of_memory, run_command
from polar.runtimes.state_folder import StateFolder, remove_tree

_log = logging.getLogger(__name__)
_OWN_PROCESSES = 1  # the supervisor
_ID_VARIABLE = "POLAR_RUNTIME"  # in the environment of everything that runs


class LocalRuntime:
    def __init__(self, id: str, spec: RuntimeSpec, backend: "Local", folder: Path, cgroup: Cgroup | None) -> None:
        self.id = id
        self.spec = spec
        self._backend = backend
        self._folder = folder
        self._cgroup = cgroup
        self._root_fd: int | None = None
        self._running: set[SpawnedJob] = set()
        self._transfers = files.FileTransfers()
        self._stopped = False
        self._lifecycle_lock = asyncio.Lock()

    async def start(self) -> None:
        if self._root_fd is not None or self._stopped:
            raise SandboxError(f"Runtime {self.id} was started before.")
        for inside in (self.spec.workdir, self.spec.home, "/tmp"):
            os.makedirs(self.path(inside), exist_ok=True)
        self._root_fd = os.open(self._folder / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if self._cgroup is not None:
            self._cgroup.create()

    def gateway_url(self) -> str:
        return self._backend.gateway_url

    def path(self, inside: str) -> str:
        """Mounted folders keep their path on the machine; everything else is below the runtime's folder."""
        inside = posixpath.normpath(inside)
        for mount in self.spec.mounts:
            if inside == mount.target or inside.startswith(mount.target.rstrip("/") + "/"):
                return str(mount.source) + inside[len(mount.target.rstrip("/")) :]
        return str(self._folder / "root") + "/" + inside.lstrip("/")

    async def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout: float | None = None,
        output: Path | None = None,
        max_output: int = 64 * 1024 * 1024,
    ) -> CommandResult:
        if self._root_fd is None or self._stopped:
            raise SandboxError(f"Runtime {self.id} is not running.")
        entry = None if self._cgroup is None else self._cgroup.entry
        default_env = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        runtime_env = {"HOME": self.path(self.spec.home), "TMPDIR": self.path("/tmp"), _ID_VARIABLE: self.id}
        job = {
            "job": "local",
            "into": None if entry is None else entry.unified_folder,
            "tasks": () if entry is None else entry.tasks_files,
            "argv": argv,
            "env": default_env | runtime_env | self.spec.env | (env or {}),
            "cwd": self.path(cwd or self.spec.workdir),
        }
        killed = 0 if self._cgroup is None else self._cgroup.count_oom_kills()
        completed = await run_command(
            self._backend.spawner,
            job,
            (),
            stdin=stdin,
            timeout=timeout,
            output=output,
            max_output=max_output,
            kill=SpawnedJob.kill_all,
            follow=self._follow,
        )
        return mark_out_of_memory(completed, self._cgroup is not None and self._cgroup.count_oom_kills() > killed)

    def _follow(self, spawned: SpawnedJob) -> None:
        """Tracks a command's supervisor until it is gone: daemons of an ended command run below it until `stop`."""

        def forget(_: object) -> None:
            self._running.discard(spawned)
            spawned.close()

        self._running.add(spawned)
        spawned.gone.add_done_callback(forget)

    async def put(self, source: Path | bytes, path: str) -> None:
        await self._transfers.put(self._require_root(), source, path)

    async def get(self, path: str, destination: Path, *, max_bytes: int = 1 << 30, all_links: bool = False) -> None:
        await self._transfers.get(self._require_root(), path, destination, max_bytes, all_links)

    async def delete(self, paths: list[str]) -> None:
        await self._transfers.delete(self._require_root(), paths)

    async def list_entries(self, path: str, *, exclude: Collection[str] = ()) -> dict[str, FileState]:
        return await self._transfers.list_entries(self._require_root(), path, exclude)

    def _require_root(self) -> int:
        if self._root_fd is None:
            raise SandboxError(f"Runtime {self.id} does not exist: it was never started, or is removed.")
        return self._root_fd

    async def stop(self) -> None:
        async with self._lifecycle_lock:
            await self._stop()

    async def _stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*(spawned.kill_all() for spawned in set(self._running)))
        if self._cgroup is not None:
            await self._cgroup.kill()

    async def restart(self) -> None:
        async with self._lifecycle_lock:
            if self._root_fd is None or not self._stopped:
                raise SandboxError(f"Runtime {self.id} can't be restarted: it is not stopped, or does not exist.")
            if self._cgroup is not None:
                await self._cgroup.remove()
                self._cgroup.create()
            self._stopped = False

    async def remove(self) -> None:
        async with self._lifecycle_lock:
            await self._stop()
            root, self._root_fd = self._root_fd, None
            await self._transfers.wait_until_idle()
            if root is not None:
                os.close(root)
            if self._cgroup is not None:
                await self._cgroup.remove()
            await asyncio.to_thread(remove_tree, self._folder)
            self._backend.runtimes.pop(self.id, None)


class Local:
    name = "local"

    def __init__(self, state: Path, gateway: str) -> None:
        self._state = StateFolder(state / self.name)
        self._gateway = gateway
        self._relay: GatewayRelay | None = None
        self._cgroups: CgroupHierarchies | None = None
        self.gateway_url = gateway
        self.spawner = Spawner()
        self.runtimes: dict[str, LocalRuntime] = {}

    async def check_availability(self) -> str | None:
        return None

    def check_image(self, image: str | None) -> str | None:
        return None if image is None else "local has no images: leave runtime.image out, or name another backend."

    async def prepare(self, image: str | None) -> None:  # noqa: ARG002  there are no images
        if self._cgroups is None:
            self._cgroups = CgroupHierarchies.detect()
            self._state.record_cgroups(self._cgroups)
            if missing := self._cgroups.missing_controllers:
                _log.warning("No cgroups for %s can be made here: such limits are not kept.", ", ".join(missing))
        if self._relay is None and self._gateway.startswith("unix:"):
            self._relay = GatewayRelay(self._gateway)
            listening = relay.listen()
            self.gateway_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            await self._relay.serve(listening)

    async def create(self, id: str, spec: RuntimeSpec) -> LocalRuntime:
        await self.prepare(spec.image)
        assert self._cgroups is not None
        group = self._cgroups.build_cgroup(id, spec.limits, own_processes=_OWN_PROCESSES)
        runtime = LocalRuntime(id, spec, self, self._state.create_runtime_folder(id), group)
        self.runtimes[id] = runtime
        return runtime

    def trial_image(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def list_isolation_gaps(self) -> list[str]:
        return [
            "files, processes and network are the machine's",
            *CgroupHierarchies.detect().missing_limits,
            "disk limit",
        ]

    async def sweep(self) -> list[str]:
        swept = []
        for abandoned in self._state.iter_abandoned():
            for folder in abandoned.runtime_folders:
                if (group := abandoned.find_cgroup(folder.name)) is not None:
                    await group.remove()
                await _kill_by_runtime_id(folder.name)
                swept.append(folder.name)
            await asyncio.to_thread(abandoned.remove)
        return swept

    async def close(self) -> None:
        for runtime in list(self.runtimes.values()):
            await runtime.remove()
        if self._relay is not None:
            await self._relay.close()
            self._relay = None
        self.spawner.close()
        await asyncio.to_thread(self._state.close)


async def _kill_by_runtime_id(id: str) -> None:
    """Kills processes with the runtime's id in their environment until none is left."""
    while pids := _find_by_runtime_id(id):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.005)


def _find_by_runtime_id(id: str) -> list[int]:
    mark = f"{_ID_VARIABLE}={id}".encode()
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended, or is none of ours
            if mark in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                pids.append(int(name))
    return pids
