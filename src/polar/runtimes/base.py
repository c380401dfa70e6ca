"""Runtimes: where harnesses run and their work is graded.

    create -> started -> run*, put*, get* -> stopped (every process dead, files still there) -> removed (nothing left)
                  ^-- restart --------------+

A runtime has its own files, processes and limits. Nothing that runs inside can outlive it, see another runtime, or
reach the network except the gateway. Everything that a runtime occupies on the machine (processes, mounts, cgroups,
sockets, folders) carries its id, so that a restarted node finds and removes what a crash left.

Backends are plug-ins (entry points `polar.runtimes`); `polar.testing.RuntimeContract` is the contract that each must
pass.
"""

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct, field

from polar.errors import PolarError

Network = Literal["gateway", "none", "internet"]

SHARED_USERS = "user ids (inotify, pipes and signals are shared)"
"""An isolation gap, for `list_isolation_gaps`: sandboxes share user ids."""


class Limits(Struct, frozen=True):
    """None is unlimited."""

    cpus: float | None = None
    memory_mb: int | None = None
    processes: int | None = 1024
    disk_mb: int | None = None


class Mount(Struct, frozen=True):
    """A folder of the machine that is visible inside, read-only."""

    source: Path
    target: str


class RuntimeSpec(Struct, frozen=True):
    """What a runtime is made from. Paths are those inside."""

    image: str | None = None  # depends on the backend: a Docker image, `build:FOLDER`, an unpacked root; None: default
    workdir: str = "/workspace"
    home: str = "/home/agent"  # the same in every session, since harnesses write it into their prompts
    env: dict[str, str] = field(default_factory=dict)
    limits: Limits = Limits()
    network: Network = "gateway"
    mounts: tuple[Mount, ...] = ()
    seccomp: bool | tuple[str, ...] = True  # whether system calls are filtered; the names of those allowed besides


class CommandResult(Struct, frozen=True):
    """How a command ended."""

    exit_code: int | None  # None where it was killed: it timed out, ran out of memory, or its runtime was stopped
    seconds: float
    timed_out: bool = False
    out_of_memory: bool = False
    output_truncated: bool = False  # it wrote more than `max_output`


class SandboxError(PolarError):
    """A failure of the platform: a runtime could not be made or used. Never the agent's fault, never a reward."""


class CorruptedRuntimeError(PolarError):
    """The runtime can't be restarted, by the fault of what ran inside."""


class TransferTooLargeError(PolarError):
    """A file or folder exceeds the limits of `get`, by the fault of what ran inside."""


class FileState(Struct, frozen=True):
    """The state of a path. The kernel sets `changed_ns` at every change of a file or its metadata, and nothing inside
    can set it: if a path has the same state in two runtimes of one image, it has the same content."""

    kind: Literal["file", "folder", "link"]
    mode: int  # permissions
    size: int = 0
    modified_ns: int = 0
    changed_ns: int = 0
    target: str | None = None  # of a link


class Runtime(Protocol):
    id: str
    spec: RuntimeSpec

    async def start(self) -> None: ...

    def gateway_url(self) -> str:
        """The gateway's address as seen from inside."""
        ...

    def path(self, inside: str) -> str:
        """How a command must spell a path: unchanged, except for backends without a root of their own (`local`)."""
        ...

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
        """Runs a command to its end. Standard output and error are written to the file `output` as they come. At the
        time-out, and when the call is cancelled, the command and everything that it started are killed. A missing
        program is exit code 127, death by a signal 128 plus its number, as in a shell."""
        ...

    async def put(self, source: Path | bytes, path: str) -> None:
        """Writes a file or a folder into the runtime; `source` may be the bytes of a file."""
        ...

    async def get(self, path: str, destination: Path, *, max_bytes: int = 1 << 30, all_links: bool = False) -> None:
        """Copies a file or a folder out of the runtime, atomically. Links are copied as links, not followed; links that
        lead out of the folder, devices and sockets are omitted. `all_links` includes all links, for a copy that goes
        into another runtime and is not read through links here. Raises FileNotFoundError where there is no such file
        or folder, TransferTooLargeError where it exceeds `max_bytes`."""
        ...

    async def delete(self, paths: list[str]) -> None:
        """Removes files, links and folders from outside. Missing paths are ignored; links are not followed."""
        ...

    async def list_entries(self, path: str, *, exclude: Collection[str] = ()) -> dict[str, FileState]:
        """The files, folders and links at and below a path, by absolute path, listed from outside without following
        links. `exclude` are paths that are omitted with everything below them. Empty for a missing path."""
        ...

    async def stop(self) -> None:
        """Kills every process inside. Files stay readable through `get`."""
        ...

    async def restart(self) -> None:
        """After `stop`: commands can run again over the same files (except those in memory: /dev/shm). No earlier
        process is left. Raises CorruptedRuntimeError where what ran inside broke what a start needs."""
        ...

    async def remove(self) -> None:
        """Stops the runtime and leaves nothing behind. May be called at any time, repeatedly."""
        ...


class RuntimeBackend(Protocol):
    """Makes runtimes. Constructed with a folder for its state (`state`) and the gateway's address on this machine
    (`gateway`: `http://HOST:PORT` or `unix:PATH`)."""

    name: str

    async def check_availability(self) -> str | None:
        """Why the backend does not work here, with advice; None where it works."""
        ...

    def check_image(self, image: str | None) -> str | None:
        """What is wrong with an image's name, with advice; None where it is valid."""
        ...

    async def prepare(self, image: str | None) -> None:
        """Prepares what runtimes of this image share, so that creating one is fast."""
        ...

    async def create(self, id: str, spec: RuntimeSpec) -> Runtime:
        """Creates a runtime, not started yet."""
        ...

    def trial_image(self) -> AbstractAsyncContextManager[str | None]:
        """A temporary image for a trial of this backend; None where none is needed."""
        ...

    def list_isolation_gaps(self) -> list[str]:
        """Isolation and limits that runtimes lack here. Known once one was made."""
        ...

    async def sweep(self) -> list[str]:
        """Removes what runtimes of an earlier process left. Returns their ids."""
        ...

    async def close(self) -> None:
        """Removes every remaining runtime and what they shared."""
        ...
