"""`bubblewrap`: a sandbox of namespaces, with its own layer over a shared root, and no way out but the gateway.

    spawner -> mounts in a namespace of their own -> bwrap -> process 1, a `cat` that holds the sandbox open

*Root.* An overlay: below, the machine's programs without its files, or an unpacked image; above, a layer of the
sandbox's own. It is mounted where only the sandbox sees it, so that it is gone with the last process and the last
descriptor of ours, also after kill -9 of the node. We hold the root open: files go in and out from outside, also when
every process is dead. A disk limit is a file of that size with ext4 in it, on a loop device, under the layer: in a
tmpfs files would eat the sandbox's memory limit, and quotas are not set up on most machines. /dev/shm counts as
memory.

*Users.* Root inside is a user outside that no other sandbox has (see `user_ranges`), so that what the kernel counts by
user is the sandbox's own. The layers below are mounted with their owners mapped into its range; its own layer belongs
to it. Where the kernel or a file system can't, it is the node's own user outside, without any capability there, and
with the kernel's files in /proc read-only or hidden. Inside it may do with files what root may; it can't mount, set up
networks or make user namespaces, and a filter refuses system calls that no agent needs (seccomp.py).

*Names.* Whoever is inside can read what is mounted, and from where (/proc/self/mountinfo). Layers are therefore named
by descriptors, and folders of the machine are seen through an overlay, which does not tell where they are.

*Processes.* A command is forked by the spawner into the sandbox's namespaces and a cgroup of its own, which dies as
one at the time-out. No signal from inside ends process 1, but there are other ways (its limits, its memory): whoever
finds one has ended the sandbox, and commands after that are as if killed. Where no cgroup can be made, a time-out kills
all that is inside.

*Again.* A restart mounts the same layer anew, as what ran inside has left it. What bwrap makes or mounts over is put
right first: bwrap follows links there, at a time when the machine's files are still in its reach.

*Network.* `gateway` and `none` have loopback only; the gateway is on a port of it (relay.py). `internet` shares the
machine's network, its loopback included: only for what is trusted with that.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import posixpath
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from msgspec.structs import replace

from polar.runtimes import files, linux, relay, seccomp
from polar.runtimes.base import SHARED_USERS, CommandResult, CorruptedRuntimeError, FileState, RuntimeSpec, SandboxError
from polar.runtimes.bubblewrap import privileges, roots
from polar.runtimes.bubblewrap.user_ranges import UserRange, UserRanges
from polar.runtimes.cgroups import Cgroup, CgroupHierarchies
from polar.runtimes.namespace_worker import NamespaceWorkers
from polar.runtimes.relay import GATEWAY_PORT, GatewayRelay
from polar.runtimes.spawner.client import SpawnedJob, Spawner, mark_out_of_memory, run_command
from polar.runtimes.spawner.process import STAGE_FOLDER
from polar.runtimes.state_folder import StateFolder, remove_tree

_log = logging.getLogger(__name__)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_SECONDS = 60.0
_DEATH_GRACE_SECONDS = 2.0  # a sandbox takes no more processes a moment before its first has ended
_OWN_PROCESSES = 2  # bwrap, and the first inside
_DISK_IMAGE = "disk.img"
_SHARED_USERS_WARNING = (
    "Sandboxes have no user ids of their own here, and can use up what the kernel counts by user (inotify, pipes, "
    "signals): %s."
)
_CHUNK_BYTES = 1 << 16


class BubblewrapRuntime:
    def __init__(
        self,
        id: str,
        spec: RuntimeSpec,
        backend: "Bubblewrap",
        folder: Path,
        cgroup: Cgroup | None,
        user_range: UserRange | None,
    ) -> None:
        self.id = id
        self.spec = spec
        self._backend = backend
        self._folder = folder
        self._cgroup = cgroup
        self._user_range = user_range  # this sandbox's own, until it is removed
        self._owner = -1 if user_range is None else user_range.first_id  # of its files; -1 is the node's user
        self._seccomp_program = backend.build_seccomp_program(spec, own_users=user_range is not None)
        self._bwrap: SpawnedJob | None = None
        self._disk_creation: asyncio.Future[None] | None = None
        self._relay: GatewayRelay | None = None
        self._transfers = files.FileTransfers()
        self._disk_mb = None if backend.unprivileged else spec.limits.disk_mb  # of a disk that is mounted
        self._stopped = False
        self._stop_count = 0  # how often: a command that was running then has no exit code
        self._lifecycle_lock = asyncio.Lock()
        self._descriptors = contextlib.ExitStack()  # descriptors, until it is removed
        self._init_pidfd: int | None = None  # a pidfd of the first process inside
        self._spawner_process: subprocess.Popen[bytes] | None = None  # the spawner that it dies with
        self._root_fd: int | None = None

    async def start(self) -> None:
        if self._bwrap is not None or self._stopped:
            raise SandboxError(f"Runtime {self.id} was started before.")
        if self._cgroup is not None:
            self._cgroup.create()
        if self._disk_mb is not None:
            self._disk_creation = asyncio.ensure_future(asyncio.to_thread(self._make_disk, self._disk_mb))
            await asyncio.shield(self._disk_creation)
        await self._launch()
        await self._listen()

    async def _listen(self) -> None:
        if self.spec.network == "gateway":
            assert self._init_pidfd is not None
            self._relay = GatewayRelay(self._backend.gateway)
            try:
                listening = await relay.listen_in_namespace(self._init_pidfd, self._transfers.worker)
            except OSError as error:
                raise SandboxError(f"The gateway's port can't be opened in the sandbox: {error}.") from error
            await self._relay.serve(listening)

    async def _launch(self, *, restarting: bool = False) -> None:
        try:
            await self._start_bwrap(restarting)
        except OSError as error:
            raise SandboxError(f"The sandbox did not start: {error}.") from error

    async def _start_bwrap(self, restarting: bool) -> None:
        job = self._build_job(restarting)
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                (inside_hold, hold), (ready, inside_ready), (info, inside_info) = (
                    _open_pipe(),
                    _open_pipe(),
                    _open_pipe(),
                )
                errors = os.memfd_create("bwrap")
                for fd in (hold, ready):  # `ready` too: whoever writes to `cat` must not make it fail to pass that on
                    self._descriptors.callback(os.close, fd)
                for fd in (info, errors):
                    ours.callback(os.close, fd)
                for fd in (inside_hold, inside_ready, inside_info):
                    theirs.callback(os.close, fd)
                os.write(hold, b"\n")  # `cat` writes it back once it runs
                users = () if self._user_range is None else (self._user_range.namespace_fd,)
                lent = (inside_hold, inside_ready, inside_info, errors, *users)
                self._bwrap = await self._backend.spawner.spawn(job, lent)
                self._spawner_process = self._backend.spawner.process
            try:
                async with asyncio.timeout(_START_SECONDS):
                    pid = await self._wait_until_up(info, ready)
            except TimeoutError:
                pid = None
            if pid is None:
                stderr = os.pread(errors, 4096, 0).decode(errors="replace").strip()
                raise _make_start_error(self._bwrap, stderr, restarting=restarting)
        if self._backend.unprivileged and self._spawner_process is not None:
            self._transfers.worker = self._backend.workers.get_for_process(self._spawner_process.pid)
        # Its mounts stay while this is open.
        mount_namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors.callback(os.close, mount_namespace)
        self._root_fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._descriptors.callback(os.close, self._root_fd)

    async def _wait_until_up(self, info: int, ready: int) -> int | None:
        """Waits until the first process inside runs; its id, or None where it ended before."""
        await _wait_readable(info)
        match = re.search(rb'"child-pid": (\d+)', os.read(info, _CHUNK_BYTES))
        if match is None:
            return None
        assert self._bwrap is not None
        pid = int(match[1]) if not self._backend.unprivileged else await _find_child(self._bwrap)
        if pid is None:
            return None
        try:
            self._init_pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        self._descriptors.callback(os.close, self._init_pidfd)
        # bwrap itself, which also writes to `ready`, does not hear of the end
        await _wait_readable(ready, self._init_pidfd)
        os.set_blocking(ready, False)
        with contextlib.suppress(BlockingIOError):
            return pid if os.read(ready, 1) == b"\n" else None
        return None

    def _max_file_size(self) -> int | None:
        """In bytes: all that is left of a disk limit where no disk can be mounted."""
        megabytes = self.spec.limits.disk_mb
        return None if megabytes is None or self._disk_mb is not None else megabytes << 20

    def _make_disk(self, megabytes: int) -> None:
        (self._folder / "disk").mkdir()
        roots.copy_sparse(self._backend.ensure_disk_template(megabytes), self._folder / _DISK_IMAGE)

    def _build_job(self, restarting: bool) -> dict[str, object]:
        limited = self._disk_mb is not None
        below = [str(folder) for folder in self._backend.list_lower_layers(self.spec)]
        return {
            "job": "sandbox",
            **_build_cgroup_fields(self._cgroup),
            "owner": self._owner,
            "filter": self._seccomp_program,
            "disk": {"image": str(self._folder / _DISK_IMAGE)} if limited else None,
            "layer": str(self._folder / "disk" if limited else self._folder),
            "below": below,
            "mapped": [*below, *self._backend.list_visible_folders(self.spec)],
            "shown": [str(mount.source) for mount in self.spec.mounts if mount.source.is_dir()],
            "mended": self._list_mount_points() if restarting else None,
            "unprivileged": self._backend.unprivileged,
            "argv": self._build_argv(),
            "env": {"PATH": _PATH},
        }

    def _list_mount_points(self) -> dict[str, list[str]]:
        """What bwrap makes or mounts over. What ran inside may have put links there, which bwrap would follow."""
        spec = self.spec
        folders = ["/dev", "/proc", "/tmp", spec.workdir, spec.home]
        if spec.image is None:
            folders += roots.list_machine_mounts()
        files = ["/etc/resolv.conf"] if spec.network == "internet" else []
        for mount in spec.mounts:
            (folders if mount.source.is_dir() else files).append(mount.target)
        return {"folders": [*map(posixpath.normpath, folders)], "files": [*map(posixpath.normpath, files)]}

    def _build_argv(self) -> list[str]:
        spec = self.spec
        words = [self._backend.program, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        words += ["--unshare-cgroup-try", "--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--disable-userns"]
        words += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--info-fd", "{info}"]
        words += ["--bind", f"{STAGE_FOLDER}/root", "/", "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp"]
        words += ["--dev-bind", f"{STAGE_FOLDER}/terminals", "/dev/pts"]
        if self._seccomp_program is not None:
            words += ["--seccomp", "{filter}"]
        kernel = self._backend.kernel_files[self._user_range is not None]
        for path in kernel.read_only:
            words += ["--ro-bind", path, path]
        for path in kernel.hidden:
            words += ["--ro-bind", "/dev/null", path]
        if spec.network != "internet":
            words += ["--unshare-net"]
        else:
            words += ["--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        if spec.image is None:
            for folder in roots.list_machine_mounts():
                words += ["--ro-bind", folder, folder]
        folders = itertools.count()  # on the stage, in this order
        for mount in spec.mounts:
            staged = f"{STAGE_FOLDER}/{next(folders)}" if mount.source.is_dir() else str(mount.source)
            words += ["--ro-bind", staged, mount.target]
        return [*words, "--dir", spec.workdir, "--dir", spec.home, "--chdir", "/", "--", "cat"]

    def gateway_url(self) -> str:
        return self._backend.shared_url if self.spec.network == "internet" else f"http://127.0.0.1:{GATEWAY_PORT}"

    def path(self, inside: str) -> str:
        return inside

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
        if self._init_pidfd is None or self._stopped:
            raise SandboxError(f"Runtime {self.id} is not running.")
        group = None if self._cgroup is None else self._cgroup.create_child()
        job = {
            "job": "inside",
            **_build_cgroup_fields(group),
            "owner": self._owner,
            "filter": self._seccomp_program,
            "argv": argv,
            "env": {"PATH": _PATH, "HOME": self.spec.home, "LANG": "C.UTF-8"} | self.spec.env | (env or {}),
            "cwd": cwd or self.spec.workdir,
            "file_size": self._max_file_size(),
            "shares_network": self.spec.network == "internet",
        }

        async def kill(spawned: SpawnedJob) -> None:
            if group is None:
                await self._kill_inside()
            else:
                await group.kill()
            await spawned.gone

        started_at = time.monotonic()
        killed, stops = 0 if self._cgroup is None else self._cgroup.count_oom_kills(), self._stop_count
        try:
            completed = await run_command(
                self._backend.spawner,
                job,
                (self._init_pidfd,),
                stdin=stdin,
                timeout=timeout,
                output=output,
                max_output=max_output,
                kill=kill,
            )
        except SandboxError:
            if not await self._ended_from_inside():
                raise
            completed = CommandResult(128 + signal.SIGKILL, time.monotonic() - started_at)
        finally:
            if group is not None:
                group.remove_if_empty()
        if completed.exit_code is None and not completed.timed_out and self._stop_count == stops:
            raise SandboxError(f"Runtime {self.id} ended with the spawner, which is gone.")
        if self._stop_count > stops and completed.exit_code == 128 + signal.SIGKILL:
            completed = replace(completed, exit_code=None)
        return mark_out_of_memory(completed, self._cgroup is not None and self._cgroup.count_oom_kills() > killed)

    async def _ended_from_inside(self) -> bool:
        """Whether the first process is gone, or about to be, and neither by us nor with the spawner."""
        if self._init_pidfd is None:
            return False
        init = os.dup(self._init_pidfd)  # of this call alone: a loop tells one of a descriptor's followers only
        try:
            async with asyncio.timeout(_DEATH_GRACE_SECONDS):
                await _wait_readable(init)
        except TimeoutError:
            return False
        finally:
            os.close(init)
        return self._spawner_process is not None and self._backend.spawner.process is self._spawner_process

    async def _kill_inside(self) -> None:
        """Everything but process 1, told from within."""
        assert self._init_pidfd is not None
        spawned = await self._backend.spawner.spawn(
            {"job": "kill_inside", **_build_cgroup_fields(None)}, (self._init_pidfd,)
        )
        await spawned.gone
        if spawned.error is not None and not await self._ended_from_inside():
            raise SandboxError(f"What runs inside could not be killed: {spawned.error}.")

    async def put(self, source: Path | bytes, path: str) -> None:
        owner = None if self._owner < 0 else (self._owner, self._owner)
        await self._transfers.put(self._require_root(), source, path, owner)

    async def get(self, path: str, destination: Path, *, max_bytes: int = 1 << 30, all_links: bool = False) -> None:
        await self._transfers.get(self._require_root(), path, destination, max_bytes, all_links)

    async def delete(self, paths: list[str]) -> None:
        await self._transfers.delete(self._require_root(), paths)

    async def list_entries(self, path: str, *, exclude: Collection[str] = ()) -> dict[str, FileState]:
        return await self._transfers.list_entries(self._require_root(), path, exclude)

    def _require_root(self) -> int:
        if self._root_fd is None:
            raise SandboxError(f"Runtime {self.id} is not there.")
        return self._root_fd

    async def stop(self) -> None:
        async with self._lifecycle_lock:
            await self._stop()

    async def _stop(self) -> None:
        self._stopped = True
        self._stop_count += 1
        if self._disk_creation is not None:
            await asyncio.wait([self._disk_creation])  # a thread, which goes on when `start` is cancelled
        if self._relay is not None:
            await self._relay.close()
            self._relay = None
        if self._bwrap is not None:
            bwrap = await self._bwrap.wait_for_pidfd()
            for process in (self._init_pidfd, bwrap):
                if process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(process, signal.SIGKILL)
                    await _wait_readable(process)
            self._bwrap.close()
            self._bwrap = None
        if self._cgroup is not None:
            await self._cgroup.kill()

    async def restart(self) -> None:
        async with self._lifecycle_lock:
            if self._root_fd is None or not self._stopped:
                raise SandboxError(f"Runtime {self.id} can't be restarted: it is not stopped, or not there.")
            await self._release_root()
            if self._disk_mb is not None:
                await roots.wait_until_unmounted(self._folder / _DISK_IMAGE)  # two mounts of one disk would spoil it
            if self._cgroup is not None:
                await self._cgroup.remove()
                self._cgroup.create()
            await self._launch(restarting=True)
            await self._listen()
            self._stopped = False

    async def _release_root(self) -> None:
        """Of its mounts, which are gone with that."""
        self._root_fd = self._init_pidfd = None
        await self._transfers.wait_until_idle()
        await asyncio.to_thread(self._descriptors.close)

    async def remove(self) -> None:
        async with self._lifecycle_lock:
            await self._stop()
            await self._release_root()
            if self._cgroup is not None:
                await self._cgroup.remove()
            await asyncio.to_thread(remove_tree, self._folder)
            self._backend.forget(self.id, self._user_range)
            self._user_range = None


class Bubblewrap:
    name = "bubblewrap"

    def __init__(self, state: Path, gateway: str) -> None:
        self._state = StateFolder(state / self.name)
        self._cgroups: CgroupHierarchies | None = None
        self._relay: GatewayRelay | None = None
        self.gateway = gateway
        self.shared_url = gateway  # for sandboxes that share the machine's network
        self.program = shutil.which("bwrap") or "bwrap"
        self.kernel_files = {own: roots.find_kernel_files(own_users=own) for own in (False, True)}
        self.unprivileged = not privileges.may_mount()
        self.spawner = Spawner(unprivileged=self.unprivileged)
        self.workers = NamespaceWorkers()  # where there is no root
        self._warned_about_disk = False
        self._architecture = seccomp.detect_architecture() if linux.supports_seccomp() else None
        self._filters: dict[tuple[tuple[str, ...], bool], str] = {}
        self._ranges: UserRanges | None = None
        self._shares_users = False  # among sandboxes, as far as they were made
        self._mappable: dict[frozenset[int], bool] = {}  # by the devices that a sandbox's folders are on
        self.runtimes: dict[str, BubblewrapRuntime] = {}

    async def check_availability(self) -> str | None:
        if shutil.which("bwrap") is None:
            return "bwrap is not there: install the package bubblewrap (0.8 or later)."
        return await privileges.check_sandbox_support(self._state.root, unprivileged=self.unprivileged)

    def check_image(self, image: str | None) -> str | None:
        return None if image is None else roots.check_image_root(image)

    async def prepare(self, image: str | None) -> None:
        await self._set_up()
        self.list_lower_layers(RuntimeSpec(image=image))

    async def _set_up(self) -> CgroupHierarchies:
        """What all runtimes share, once."""
        if self._cgroups is None:
            self._cgroups = CgroupHierarchies.detect()
            if missing := self._cgroups.missing_controllers:
                _log.warning("No cgroups for %s can be made here: such limits are not kept.", ", ".join(missing))
            self._state.record_cgroups(self._cgroups)
            self.spawner.start()
            if self._architecture is None:
                _log.warning("System calls are not filtered here: the filter needs seccomp, on x86_64 or aarch64.")
            self._ranges = self._create_user_ranges()
        if self._relay is None and self.gateway.startswith("unix:"):
            self._relay = GatewayRelay(self.gateway)
            listening = relay.listen()
            self.shared_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            await self._relay.serve(listening)
        return self._cgroups

    def _create_user_ranges(self) -> UserRanges | None:
        if self.unprivileged:
            self._report_shared_users("only root can give them")
            return None
        try:
            return UserRanges(self.spawner)
        except (OSError, SandboxError) as error:
            self._report_shared_users(error)
            return None

    def _report_shared_users(self, why: object) -> None:
        self._shares_users = True
        _log.warning(_SHARED_USERS_WARNING, why)

    def list_lower_layers(self, spec: RuntimeSpec) -> tuple[Path, ...]:
        """The layers below, the same for all sandboxes of an image. Folders that the sandbox must have are among them:
        each folder that a sandbox has to make for itself costs the disk more than the rest of its start."""
        inside = (spec.workdir, spec.home, "/tmp", *(mount.target for mount in spec.mounts if mount.source.is_dir()))
        folders = roots.build_folder_layer(self._state.get_shared_path("folders"), inside)
        if spec.image is not None:
            return folders, roots.resolve_image_root(spec.image)
        return folders, roots.build_machine_root(self._state.get_shared_path("root"), RuntimeSpec().home)

    def list_visible_folders(self, spec: RuntimeSpec) -> list[str]:
        """Folders of the machine that are mounted in the sandbox."""
        machine = roots.list_machine_mounts() if spec.image is None else []
        return [*machine, *sorted({str(mount.source) for mount in spec.mounts})]

    def build_seccomp_program(self, spec: RuntimeSpec, *, own_users: bool) -> str | None:
        """The program of system calls that are refused, in hexadecimal."""
        if self._architecture is None or spec.seccomp is False:
            return None
        names = () if spec.seccomp is True else spec.seccomp
        if (names, own_users) not in self._filters:
            program = seccomp.build_program(self._architecture, seccomp.parse_allowances(names), own_users=own_users)
            self._filters[names, own_users] = program.hex()
        return self._filters[names, own_users]

    async def _acquire_user_range(self, spec: RuntimeSpec) -> UserRange | None:
        """User ids that no other sandbox has; None where the machine has none to give."""
        if self._ranges is None:
            return None
        folders = [*map(str, self.list_lower_layers(spec)), *self.list_visible_folders(spec)]
        devices = frozenset(os.stat(folder).st_dev for folder in folders)
        if self._mappable.get(devices) is False:
            return None
        users = await self._ranges.acquire()
        try:
            if devices not in self._mappable:
                why = await self._check_mappable(folders, users)
                self._mappable[devices] = why is None
                if why is not None:
                    self._report_shared_users(why)
        except BaseException:  # a cancellation too
            self._release(users)
            raise
        if self._mappable[devices]:
            return users
        self._release(users)
        return None

    async def _check_mappable(self, folders: list[str], user_range: UserRange) -> str | None:
        """Tries whether the kernel can show these folders' files as owned by others, under an overlay (Linux 5.19)."""
        job = {"job": "map_owners", **_build_cgroup_fields(None), "mapped": folders}
        with contextlib.closing(await self.spawner.spawn(job, (user_range.namespace_fd,))) as spawned:
            await spawned.gone
            return spawned.error

    def forget(self, id: str, user_range: UserRange | None) -> None:
        """A runtime that is removed."""
        self.runtimes.pop(id, None)
        if user_range is not None:
            self._release(user_range)

    def _release(self, users: UserRange) -> None:
        if self._ranges is not None:
            self._ranges.release(users)

    def ensure_disk_template(self, megabytes: int) -> Path:
        return roots.ensure_disk_template(self._state.get_shared_path(f"disk-{megabytes}.img"), megabytes)

    async def create(self, id: str, spec: RuntimeSpec) -> BubblewrapRuntime:
        if self.unprivileged and spec.limits.disk_mb is not None and not self._warned_about_disk:
            self._warned_about_disk = True
            _log.warning("The disk of a sandbox can't be limited without root: only the size of each file is limited.")
        group = (await self._set_up()).build_cgroup(id, spec.limits, own_processes=_OWN_PROCESSES)
        users = await self._acquire_user_range(spec)
        try:
            runtime = BubblewrapRuntime(id, spec, self, self._state.create_runtime_folder(id), group, users)
        except BaseException:
            self.forget("", users)
            raise
        self.runtimes[id] = runtime
        return runtime

    def trial_image(self) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def list_isolation_gaps(self) -> list[str]:
        gaps = CgroupHierarchies.detect().missing_limits
        if self.unprivileged:
            gaps.append("disk limit (only the size of each file)")
        if self._shares_users:
            gaps.append(SHARED_USERS)
        if self._architecture is None:
            gaps.append("system calls (no filter)")
        return gaps

    async def sweep(self) -> list[str]:
        """Processes and mounts ended with the node; what is left are groups and folders."""
        swept = []
        for abandoned in self._state.iter_abandoned():
            for folder in abandoned.runtime_folders:
                if (group := abandoned.find_cgroup(folder.name)) is not None:
                    await group.remove()
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
        self.workers.close()
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None
        await asyncio.to_thread(self._state.close)


def _build_cgroup_fields(cgroup: Cgroup | None) -> dict[str, object]:
    entry = None if cgroup is None else cgroup.entry
    return {
        "into": None if entry is None else entry.unified_folder,
        "tasks": () if entry is None else entry.tasks_files,
    }


def _make_start_error(bwrap: SpawnedJob, stderr: str, *, restarting: bool) -> SandboxError | CorruptedRuntimeError:
    """Whose fault it is. At a restart bwrap has done all this before, but the machine can fail as ever: what ran
    inside is to blame for what bwrap says of its files, and for silence where it has replaced what is to speak."""
    if restarting and (
        bwrap.is_corrupted
        or (bwrap.error is None and (_blames_sandbox_files(stderr) if stderr else bwrap.has_replaced_program))
    ):
        return CorruptedRuntimeError(
            f"The sandbox can't be started over its files as they stand: {bwrap.error or stderr or 'it hangs'}."
        )
    return SandboxError(f"The sandbox did not start: {bwrap.error or stderr or 'no word from it'}.")


def _blames_sandbox_files(stderr: str) -> bool:
    """Whether bwrap got as far as the first program inside, or stumbled over files there."""
    return not stderr.startswith("bwrap: ") or any(word in stderr for word in ("execvp", "Can't mkdir", "Can't create"))


def _open_pipe() -> tuple[int, int]:
    return os.pipe2(os.O_CLOEXEC)


async def _wait_readable(*fds: int) -> None:
    """Waits until there is something to read on one, or its end; for a pidfd, until its process is dead."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    for fd in fds:
        loop.add_reader(fd, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        for fd in fds:
            loop.remove_reader(fd)


async def _find_child(bwrap: SpawnedJob) -> int | None:
    """The id on this machine of bwrap's only child; bwrap itself is in the spawner's pid namespace, and tells another.
    None where it ended."""
    await bwrap.wait_for_pidfd()
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{bwrap.pid}/task/{bwrap.pid}/children") as file:  # noqa: ASYNC230
        return int(file.read())
    return None
