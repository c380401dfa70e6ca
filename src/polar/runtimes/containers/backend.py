"""Containers: what the kinds `docker` and `podman` share.

A runtime is one container, whose first process is a shell that sleeps and reaps; commands are started in it with `exec`
(runtime.py). Engines are driven through their command line, which Docker and podman have in common; their HTTP
interfaces differ, and podman has one only where a service was started for it.

A container carries three labels: its runtime's id, the process that made it, and that process's state folder. A sweep
removes those of its own state folder whose process is gone, and touches no others.

Images are names that the engine or its registry knows, and folders with a Dockerfile. `build:FOLDER` is built once by
each node for each content of the folder: its tag is a hash over names, modes and bytes, so that a change of any file is
another image. That nothing has changed since an earlier node is for the engine to find out, which knows what a
Dockerfile starts from; that comes from the engine, or from the registry that it asks.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
from msgspec import Struct

from polar.runtimes import linux, seccomp
from polar.runtimes.base import SHARED_USERS, Limits, RuntimeSpec, SandboxError
from polar.runtimes.cgroups import CONTROLLERS, LIMIT_NAMES, Controller
from polar.runtimes.containers.cli import ContainerCli, ContainerCliError
from polar.runtimes.containers.runtime import INIT_SCRIPT, ContainerRuntime, make_container_name, remove_container
from polar.runtimes.namespace_worker import NamespaceWorkers

log = logging.getLogger(__name__)

RUNTIME_LABEL = "polar.runtime"
MAKER_LABEL = "polar.maker"
STATE_LABEL = "polar.state"

_BUILD_PREFIX = "build:"
_BUILT_REPOSITORY = "localhost/polar-build"
_BUILD_TIMEOUT_SECONDS = 3600.0  # to fetch or to build one
_MAX_LOG_TAIL_CHARS = 4000  # characters of what a failed build printed
_TRIAL_PROGRAMS = ("sh", "env", "sleep", "cat")
_TRIAL_FOLDERS = ("dev", "etc", "proc", "sys", "tmp")
_NO_IMAGE = ("no such image", "image not known", "unable to find image")
_OWN_PROCESSES = 2  # the first process and its sleep count against the limit


class ContainerImage(Struct, frozen=True):
    name: str  # the engine's
    user: str  # that commands run as


class ContainerImages:
    """Those of one engine. Made once, they are taken to be there until `forget` says otherwise."""

    def __init__(self, cli: ContainerCli) -> None:
        self._cli = cli
        self._tasks: dict[str, asyncio.Task[ContainerImage]] = {}  # or being made so
        self._tags: dict[Path, tuple[bytes, str]] = {}  # of folders, by how their files looked

    async def ensure(self, image: str) -> ContainerImage:
        """Fetches or builds what is not here; for those who ask at the same time, once."""
        folder = Path(image.removeprefix(_BUILD_PREFIX)) if image.startswith(_BUILD_PREFIX) else None
        name = image if folder is None else await asyncio.to_thread(self._compute_tag, folder)
        if (making := self._tasks.get(name)) is None:
            making = asyncio.create_task(self._fetch_or_build(name, folder))
            self._tasks[name] = making
            making.add_done_callback(lambda made: self._forget_failed(name, made))
        return await asyncio.shield(making)

    def forget(self, image: ContainerImage) -> None:
        """It is gone from the engine (somebody pruned it): whoever asks next has it made again."""
        made = self._tasks.get(image.name)
        if made is None or not made.done() or made.cancelled() or made.exception() is not None:
            return  # it is being made again already
        if made.result() is image:
            del self._tasks[image.name]

    def _forget_failed(self, name: str, made: "asyncio.Task[ContainerImage]") -> None:
        if made.cancelled() or made.exception() is not None:
            del self._tasks[name]  # whoever asks next tries again

    async def _fetch_or_build(self, name: str, folder: Path | None) -> ContainerImage:
        if folder is not None:
            await self._build(name, folder)
            return ContainerImage(name, await self._inspect_user(name) or "0")
        try:
            user = await self._inspect_user(name)
        except ContainerCliError:
            await self._pull(name)
            user = await self._inspect_user(name)
        return ContainerImage(name, user or "0")

    async def _inspect_user(self, name: str) -> str:
        return await self._cli.call("image", "inspect", "--format", "{{.Config.User}}", name)

    async def _pull(self, name: str) -> None:
        try:
            await self._cli.call("pull", "--quiet", name, seconds=_BUILD_TIMEOUT_SECONDS, cancellable=True)
        except ContainerCliError as error:
            raise SandboxError(f"The image {name} is not here, and can't be fetched: {error}") from error

    async def _build(self, name: str, folder: Path) -> None:
        arguments = ("build", "--force-rm", "--tag", name, str(folder))  # a step that fails leaves no container
        try:
            await self._cli.call(*arguments, seconds=_BUILD_TIMEOUT_SECONDS, cancellable=True)
        except ContainerCliError as error:
            raise SandboxError(f"The image of {folder} can't be built: {str(error)[-_MAX_LOG_TAIL_CHARS:]}") from error

    def _compute_tag(self, folder: Path) -> str:
        if not folder.is_absolute() or not (folder / "Dockerfile").is_file():
            raise SandboxError(
                f"The image {_BUILD_PREFIX}{folder} must be the absolute path of a folder with a Dockerfile."
            )
        looks = _hash_folder(folder, contents=False)
        if (known := self._tags.get(folder)) is None or known[0] != looks:
            known = looks, f"{_BUILT_REPOSITORY}:{_hash_folder(folder, contents=True).hex()[:32]}"
            self._tags[folder] = known
        return known[1]

    async def close(self) -> None:
        """Breaks off what is still being fetched or built."""
        making = list(self._tasks.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        self._tasks.clear()


def _hash_folder(folder: Path, *, contents: bool) -> bytes:
    """Over everything in a folder: what it holds, or (which is quicker) how that looks."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found = path.lstat()
        digest.update(os.fsencode(path.relative_to(folder)) + f"\0{found.st_mode:o}\0".encode())
        if not contents:
            digest.update(f"{found.st_size} {found.st_mtime_ns} {found.st_ino}\0".encode())
        elif stat.S_ISLNK(found.st_mode):
            digest.update(os.fsencode(os.readlink(path)) + b"\0")
        elif stat.S_ISREG(found.st_mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


class ContainerBackend:
    """A kind of runtime whose engine has Docker's command line."""

    name: str
    install_hint: str  # what to do where the engine doesn't answer

    def __init__(self, state: Path, gateway: str) -> None:
        self._state_label = f"{STATE_LABEL}={state.absolute()}"
        self._state = state.absolute()
        self._architecture = seccomp.detect_architecture() if linux.supports_seccomp() else None
        self._gateway = gateway
        self._cli = ContainerCli(*self.build_command())
        self._images = ContainerImages(self._cli)
        self._can_limit_disk = True  # until the engine says otherwise
        self.missing_controllers: frozenset[Controller] = frozenset()
        self._warned_about_limits = False
        self._runtimes: dict[str, ContainerRuntime] = {}
        self._workers = NamespaceWorkers() if self.is_rootless else None

    @property
    def is_rootless(self) -> bool:
        """Whether the engine runs containers as this user, who is not root, in a user namespace."""
        return False

    def build_command(self) -> tuple[str, ...]:
        return (self.name,)

    def list_create_options(self) -> tuple[str, ...]:
        """What this engine needs besides, to create a container."""
        return ()

    async def check_availability(self) -> str | None:
        if shutil.which(self.name) is None:
            return f"There is no program {self.name}: {self.install_hint}."
        if os.geteuid() != 0 and not self.is_rootless:
            return (
                f"The runtime {self.name} needs root, to listen in a container's network and to end its commands: run "
                "Polar with sudo. (Members of the group docker can be root on this machine anyway.) Without root, use "
                "bubblewrap or podman."
            )
        try:
            await self._cli.call("ps", "--quiet")
        except SandboxError as error:
            return f"{error} Please {self.install_hint}."
        return None

    def check_image(self, image: str | None) -> str | None:
        return f"A runtime of kind {self.name} needs an image: name it in runtime.image." if image is None else None

    async def prepare(self, image: str | None) -> None:
        await self._ensure_image(image)

    async def _ensure_image(self, image: str | None) -> ContainerImage:
        if image is None:
            raise SandboxError(f"A runtime of kind {self.name} needs an image.")
        return await self._images.ensure(image)

    async def create(self, id: str, spec: RuntimeSpec) -> ContainerRuntime:
        image = await self._ensure_image(spec.image)
        try:
            return await self._create_from(image, id, spec)
        except ContainerCliError as error:
            if not error.mentions(*_NO_IMAGE):
                raise
        self._images.forget(image)
        return await self._create_from(await self._ensure_image(spec.image), id, spec)

    async def _create_from(self, image: ContainerImage, id: str, spec: RuntimeSpec) -> ContainerRuntime:
        options = [
            *("--name", make_container_name(id), "--hostname", "sandbox", "--pull", "never", "--log-driver", "none"),
            *("--stop-signal", "KILL"),  # there is nothing in it that would tidy up
            *("--label", f"{RUNTIME_LABEL}={id}", "--label", self._state_label),
            *("--label", f"{MAKER_LABEL}={_identify_process(os.getpid())}"),
            *(() if spec.network == "internet" else ("--network", "none")),
            *(f"--mount=type=bind,source={mount.source},target={mount.target},readonly" for mount in spec.mounts),
            *_build_limit_options(self._drop_unsupported_limits(spec.limits)),
            *self._build_seccomp_options(spec.seccomp),
            *self.list_create_options(),
        ]
        try:
            container = await self._create_container(
                options,
                ("--entrypoint", "/bin/sh", image.name, "-c", INIT_SCRIPT, make_container_name(id)),
                spec.limits,
            )
        except asyncio.CancelledError:
            for made in await self._list_by_label(f"{RUNTIME_LABEL}={id}"):
                await remove_container(self._cli, made)
            raise
        self._runtimes[id] = ContainerRuntime(
            self._cli,
            container,
            id,
            spec,
            user=image.user,
            gateway=self._gateway,
            on_removed=lambda id: self._runtimes.pop(id, None),
            workers=self._workers,
        )
        return self._runtimes[id]

    def _build_seccomp_options(self, setting: bool | tuple[str, ...]) -> list[str]:
        """Polar's list of refused system calls, which replaces the engine's own; without it the engine's own stays."""
        if setting is False or self._architecture is None:
            return []
        allowed = seccomp.NO_ALLOWANCES if setting is True else seccomp.parse_allowances(setting)
        content = msgspec.json.encode(seccomp.build_profile(self._architecture, allowed))
        file = self._state / f"seccomp-{hashlib.sha256(content).hexdigest()[:16]}.json"
        if not file.exists():
            self._state.mkdir(parents=True, exist_ok=True)
            beside = file.with_suffix(f".{secrets.token_hex(4)}")
            beside.write_bytes(content)
            beside.replace(file)
        return ["--security-opt", f"seccomp={file}"]

    async def _create_container(self, options: list[str], image_arguments: tuple[str, ...], limits: Limits) -> str:
        if limits.disk_mb is None:
            return await self._cli.call("create", *options, *image_arguments)
        if self._can_limit_disk:
            try:
                return await self._cli.call(
                    "create", *options, "--storage-opt", f"size={limits.disk_mb}m", *image_arguments
                )
            except ContainerCliError as error:
                if not error.mentions("xfs", "size option", "project quota"):
                    raise
            self._can_limit_disk = False
            log.warning(
                "%s can't limit a container's disk here (it takes overlayfs over XFS with project quotas): "
                "only the size of each file is limited.",
                self.name,
            )
        size = limits.disk_mb << 20
        return await self._cli.call("create", *options, "--ulimit", f"fsize={size}:{size}", *image_arguments)

    def _drop_unsupported_limits(self, limits: Limits) -> Limits:
        """Without those that can't be kept, which engines may refuse."""
        if not self.missing_controllers:
            return limits
        if not self._warned_about_limits:
            self._warned_about_limits = True
            log.warning("%s can't keep limits of %s here.", self.name, ", ".join(sorted(self.missing_controllers)))
        return Limits(
            cpus=None if "cpu" in self.missing_controllers else limits.cpus,
            memory_mb=None if "memory" in self.missing_controllers else limits.memory_mb,
            processes=None if "pids" in self.missing_controllers else limits.processes,
            disk_mb=limits.disk_mb,
        )

    def trial_image(self) -> AbstractAsyncContextManager[str]:
        return _build_trial_image(self._cli)

    def list_isolation_gaps(self) -> list[str]:
        found = [LIMIT_NAMES[name] for name in CONTROLLERS if name in self.missing_controllers]
        if not self._can_limit_disk:
            found.append("disk limit (only the size of each file)")
        found.append(SHARED_USERS)
        if self._architecture is None:
            found.append("system calls (only the engine's own filter)")
        return found

    async def sweep(self) -> list[str]:
        swept = []
        form = f'{{{{index .Config.Labels "{RUNTIME_LABEL}"}}}} {{{{index .Config.Labels "{MAKER_LABEL}"}}}}'
        for container in await self._list_by_label(self._state_label):
            try:
                labels = await self._cli.call("inspect", "--type", "container", "--format", form, container)
            except ContainerCliError as error:
                if not error.mentions("no such"):
                    raise
                continue  # its own process has just removed it
            id, maker = labels.split(" ")
            if maker != _identify_process(int(maker.partition("-")[0])):
                await remove_container(self._cli, container)
                swept.append(id)
        return swept

    async def close(self) -> None:
        await self._images.close()
        await asyncio.gather(*(runtime.remove() for runtime in self._runtimes.values()))
        if self._workers is not None:
            self._workers.close()

    async def _list_by_label(self, label: str) -> list[str]:
        listed = await self._cli.call("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}")
        return listed.split()


def _build_limit_options(limits: Limits) -> list[str]:
    found = []
    if limits.cpus is not None:
        found += ["--cpus", f"{limits.cpus:g}"]
    if limits.memory_mb is not None:
        found += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]  # so, no swap
    # podman has a limit of its own where none is named
    found += ["--pids-limit", "-1" if limits.processes is None else str(limits.processes + _OWN_PROCESSES)]
    return found


def _identify_process(pid: int) -> str | None:
    """A name for a running process that no later one has: its id, and when it started. None where there is none."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return f"{pid}-{after_name.split()[19]}"


@contextlib.asynccontextmanager
async def _build_trial_image(cli: ContainerCli) -> AsyncIterator[str]:
    """An image of this machine's shell and three programs, which no registry is asked for. It is removed again."""
    name = f"localhost/polar-trial:{secrets.token_hex(6)}"
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder, "root.tar")
        await asyncio.to_thread(_pack_root, packed)
        await cli.call("import", str(packed), name)
    try:
        yield name
    finally:
        await cli.call("image", "rm", name)


def _pack_root(target: Path) -> None:
    programs = {name: Path(found).resolve() for name in _TRIAL_PROGRAMS if (found := shutil.which(name))}
    with tarfile.open(target, "w", dereference=True) as tar:
        for name in _TRIAL_FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for library in sorted(set().union(*map(_find_libraries, programs.values()))):
            tar.add(library, library.lstrip("/"))
        for name, program in programs.items():
            tar.add(program, f"bin/{name}")


def _find_libraries(program: Path) -> set[str]:
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    return {word for word in listed.split() if word.startswith("/")}
