"""What a sandbox's root is made of: the layer below, which all share, and the disk that its own layer is on."""

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import subprocess
import time
from pathlib import Path

from msgspec import Struct

from polar.runtimes.base import SandboxError

_USR_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ROOT_FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "usr", "var/tmp", "var/log")
_ETC_PATTERNS = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "fonts",
    "gai.conf",
    "inputrc",
    "java*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "magic",
    "magic.mime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki/tls/certs",
    "profile",
    "profile.d",
    "protocols",
    "python3*",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
"""Of /etc: what programs need and nobody must keep secret. No keys, no passwords, no names of hosts."""


_HIDDEN_PROC_FILES = (
    "/proc/kcore",
    "/proc/key-users",
    "/proc/keys",
    "/proc/kmsg",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/timer_list",
)
"""The machine's memory, its keyrings, and what goes on in it."""

_UNMOUNT_SECONDS = 30.0


def build_machine_root(folder: Path, home: str) -> Path:
    """The machine's own programs without its files: an almost empty tree over which /usr is mounted."""
    if folder.is_dir():
        return folder
    making = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}")
    for name in _ROOT_FOLDERS:
        (making / name).mkdir(parents=True)
    for name, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("root", 0o700)):
        (making / name).mkdir(exist_ok=True)
        (making / name).chmod(mode)
    for name in _USR_LINKS:
        if Path("/", name).is_symlink():
            (making / name).symlink_to(os.readlink(f"/{name}"))
        elif Path("/", name).is_dir():
            (making / name).mkdir()
    etc = making / "etc"
    for pattern in _ETC_PATTERNS:
        for found in Path("/etc").glob(pattern):
            target = etc / found.relative_to("/etc")
            target.parent.mkdir(parents=True, exist_ok=True)
            if not _may_read(found):
                continue
            if found.is_dir():
                shutil.copytree(found, target, symlinks=True, ignore=_list_unreadable)
            else:
                shutil.copy2(found, target, follow_symlinks=False)
    (etc / "passwd").write_text(f"root:x:0:0:root:{home}:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n")
    (etc / "group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (etc / "hosts").write_text("127.0.0.1 localhost sandbox\n")
    _rename_unless_exists(making, folder)
    return folder


def _may_read(path: Path) -> bool:
    return path.is_symlink() or os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0))


def _list_unreadable(folder: str, names: list[str]) -> list[str]:
    """What only root may read, the programs of an ordinary user do without as well."""
    return [name for name in names if not _may_read(Path(folder, name))]


def list_machine_mounts() -> list[str]:
    """Folders of the machine that stand read-only over `build_machine_root`."""
    apart = (f"/{name}" for name in _USR_LINKS)
    return ["/usr", *(path for path in apart if Path(path).is_dir() and not Path(path).is_symlink())]


class KernelFiles(Struct, frozen=True):
    """Of /proc: what must be read-only inside, and what must not be read."""

    read_only: list[str]
    hidden: list[str]


def find_kernel_files(*, own_users: bool) -> KernelFiles:
    """Root inside is a user outside who has no capability, but who may own the kernel's files: where the node runs as
    root, /proc/sys/kernel/core_pattern is one that such a user may write to, and its content is run by the machine.

    Where a sandbox has user ids of its own, it owns none but settings of its own namespaces, in /proc/sys: what anyone
    may read or write is left to lock and hide (/proc/pressure keeps the kernel busy with watching). Each mount that is
    saved makes its start quicker.
    """
    names = [f"/proc/{name}" for name in sorted(os.listdir("/proc")) if not name.isdigit()]
    written, read = (0o002, 0o004) if own_users else (0o222, 0o444)
    return KernelFiles(
        read_only=[path for path in names if path == "/proc/sys" or _has_file(path, written)],
        hidden=[path for path in _HIDDEN_PROC_FILES if os.path.exists(path) and os.lstat(path).st_mode & read],
    )


def _has_file(path: str, permissions: int) -> bool:
    """Whether it is a file with one of these permissions, or holds one."""
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
        return any(_has_file(file, permissions) for file in found)
    return stat.S_ISREG(mode) and bool(mode & permissions)


def build_folder_layer(below: Path, inside: tuple[str, ...]) -> Path:
    """A layer of empty folders, made once for each set of them."""
    names = sorted({name.strip("/") for name in inside})
    layer = below / hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]
    if not layer.is_dir():
        making = below / f"{layer.name}-{secrets.token_hex(4)}"
        for name in (*names, "dev", "proc"):
            (making / name).mkdir(parents=True, exist_ok=True)
        (making / "tmp").chmod(0o1777)
        _rename_unless_exists(making, layer)
    return layer


def _rename_unless_exists(making: Path, made: Path) -> None:
    """Where another thread was first, its work is as good."""
    try:
        making.rename(made)
    except OSError:
        if not made.exists():
            raise
        shutil.rmtree(making)


def check_image_root(image: str) -> str | None:
    folder = Path(image)
    if folder.is_absolute() and (folder / "usr").is_dir():
        return None
    return f"The image {image!r} must be the absolute path of an unpacked root, with /usr in it."


def resolve_image_root(image: str) -> Path:
    if (why := check_image_root(image)) is not None:
        raise SandboxError(why)
    return Path(image)


def ensure_disk_template(template: Path, megabytes: int) -> Path:
    """An empty ext4 of this size, made once: a file of holes, which is copied for each sandbox."""
    if template.is_file():
        return template
    making = template.with_name(f"{template.name}-{secrets.token_hex(4)}")
    with making.open("wb") as file:
        file.truncate(megabytes << 20)
    program = shutil.which("mkfs.ext4", path=f"{os.defpath}:/usr/sbin:/sbin")
    if program is None:
        raise SandboxError("A disk limit needs mkfs.ext4: install e2fsprogs.")
    # No journal: what is in a sandbox need not outlive a crash of the machine.
    options = ["-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=1,root_owner=0:0"]
    made = subprocess.run([program, *options, str(making)], capture_output=True, text=True)
    if made.returncode:
        raise SandboxError(f"A disk of {megabytes} MB can't be formatted: {made.stderr.strip()}.")
    making.rename(template)
    return template


def copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        size = os.fstat(read.fileno()).st_size
        write.truncate(size)
        at = 0
        while at < size:
            try:
                at = os.lseek(read.fileno(), at, os.SEEK_DATA)
            except OSError:  # holes to the end
                return
            end = os.lseek(read.fileno(), at, os.SEEK_HOLE)
            write.seek(at)
            write.write(os.pread(read.fileno(), end - at, at))
            at = end


async def wait_until_unmounted(image: Path) -> None:
    """Waits until no loop device is over a file: they go a moment after their mounts."""
    deadline = time.monotonic() + _UNMOUNT_SECONDS
    while str(image) in _list_loop_files():
        if time.monotonic() > deadline:
            raise SandboxError(f"{image} is still mounted.")
        await asyncio.sleep(0.005)


def _list_loop_files() -> set[str]:
    found = set()
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it is gone by now
            found.add(file.read_text().strip())
    return found
