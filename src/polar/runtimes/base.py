"""A runtime: where a harness runs, and where what it did is graded.

    create -> started -> run*, put*, get* -> stopped (every process dead, files still there) -> removed (nothing left)
                  ^-- restart --------------+

A runtime is a place with its own files, processes and limits. Nothing that runs inside can outlive it, reach the
network (but for the gateway, through one address), or see another runtime. What a runtime holds on the machine
(processes, mounts, cgroups, sockets, folders) carries its id, so that a node that starts again finds and removes what
a crash left.

Kinds are plug-ins (entry points `polar.runtimes`); `polar.testing.RuntimeContract` is the contract that each must pass.
"""

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct, field

from polar.errors import PolarError

Network = Literal["gateway", "none", "internet"]

SHARED_USERS = "user ids (inotify, pipes and signals are shared)"
"""An isolation gap, for `list_isolation_gaps`: sandboxes have no range of user ids of their own."""


class Limits(Struct, frozen=True):
    """None is no limit of ours."""

    cpus: float | None = None
    memory_mb: int | None = None
    processes: int | None = 1024
    disk_mb: int | None = None


class Mount(Struct, frozen=True):
    """A folder of the machine that is seen inside, read-only."""

    source: Path
    target: str


class RuntimeSpec(Struct, frozen=True):
    """What a runtime is made of. Paths are those inside."""

    image: str | None = None  # a kind's own: a Docker image or `build:FOLDER`, an unpacked root; None for the default
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
    output_truncated: bool = False  # it wrote more than was kept


class SandboxError(PolarError):
    """The platform's own failure: a runtime could not be made or used. Never the agent's fault, never a reward."""


class CorruptedRuntimeError(PolarError):
    """What ran inside left it so that it can't be started again: its own doing, and not the platform's."""


class TransferTooLargeError(PolarError):
    """What `get` was asked for is more than may be taken: the doing of what ran inside."""


class FileState(Struct, frozen=True):
    """What stands at a path. The kernel sets `changed_ns` at every change of a file or of what is known of it, and
    nothing that runs inside can set it: two runtimes of one image in which a path has the same state have the same
    content there."""

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
        """How a command must spell a path: as it is, but for kinds that have no root of their own (`local`)."""
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
        """Runs a command to its end. Standard output and error go to the file `output`, as they come. At the time-out,
        and when the call is cancelled, the command dies with everything that it started, inside. A program that isn't
        there is exit code 127, and death by a signal 128 + its number, as in a shell."""
        ...

    async def put(self, source: Path | bytes, path: str) -> None:
        """A file or a folder, or the bytes of a file."""
        ...

    async def get(self, path: str, destination: Path, *, max_bytes: int = 1 << 30, all_links: bool = False) -> None:
        """A file or a folder, whole or not at all. Links are not followed: they come as links, and those that lead out
        of what was asked for, like devices and sockets, not at all; with `all_links` they come too, for a copy that
        goes into another runtime and that nobody here reads through a link. FileNotFoundError where there is no file
        or folder of that name, TransferTooLargeError where it is more than `max_bytes`."""
        ...

    async def delete(self, paths: list[str]) -> None:
        """Removes files, links and folders, from outside. What is not there is fine; links are not followed."""
        ...

    async def list_entries(self, path: str, *, exclude: Collection[str] = ()) -> dict[str, FileState]:
        """The files, folders and links at and below a path, by absolute path, found from outside and without following
        a link. `exclude` are paths that are left out, with what is below them. Nothing where there is nothing."""
        ...

    async def stop(self) -> None:
        """Kills every process inside. Files stay readable through `get`."""
        ...

    async def restart(self) -> None:
        """After `stop`: commands can be run again, over the files as they stand (but for those in memory: /dev/shm). No
        process from before is there. CorruptedRuntimeError where what ran inside broke
        what a start needs."""
        ...

    async def remove(self) -> None:
        """Stops it, and leaves nothing behind. May be called at any time, and again."""
        ...


class RuntimeBackend(Protocol):
    """Makes runtimes of one kind. Is itself made with the folder that it may keep its state in (`state`) and the
    address of the gateway on this machine (`gateway`: `http://HOST:PORT`, or `unix:PATH`)."""

    name: str

    async def check_availability(self) -> str | None:
        """Why there can be none here, with what to do; None where there can."""
        ...

    def check_image(self, image: str | None) -> str | None:
        """What is wrong with an image's name, with what to do; None where nothing is."""
        ...

    async def prepare(self, image: str | None) -> None:
        """Makes ready what runtimes of this image share, so that creating one is quick."""
        ...

    async def create(self, id: str, spec: RuntimeSpec) -> Runtime:
        """Not started yet."""
        ...

    def trial_image(self) -> AbstractAsyncContextManager[str | None]:
        """An image for a trial of this kind, made here and for as long as it is needed; None where none is needed."""
        ...

    def list_isolation_gaps(self) -> list[str]:
        """What runtimes made here do not isolate, or which limits they do not keep. Known once one was made."""
        ...

    async def sweep(self) -> list[str]:
        """Removes what runtimes of an earlier process left; their ids."""
        ...

    async def close(self) -> None:
        """Removes every runtime that is still there, and what they shared."""
        ...
