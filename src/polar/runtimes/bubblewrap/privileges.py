"""What this process may do on this machine, found by doing it: mounts, with root or in a user namespace.

Kernels forbid user namespaces in several ways, and file systems refuse overlays in others; each has its own fix, which
is named.
"""

import asyncio
import errno
import os
import platform
import sys
import tempfile
from pathlib import Path

import msgspec

import polar
from polar.runtimes.state_folder import remove_tree

_CAP_SYS_ADMIN = 21
_PROBE_CODE = "import sys; sys.path.append(sys.argv[1]); from polar.runtimes.spawner.process import probe; probe()"
_PROBE_SECONDS = 30.0
_FULL_UID_MAP = ["0", "0", "4294967295"]
_MIN_KERNEL = (5, 11)  # whose overlays can be mounted in a user namespace
_ALTERNATIVES = "or run Polar as root, or use the runtime local for trusted code"


def may_mount() -> bool:
    """Whether this process is root on the machine. Root of a user namespace only is not."""
    status = Path("/proc/self/status").read_text().splitlines()
    capabilities = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff:"))
    return bool(capabilities >> _CAP_SYS_ADMIN & 1) and _all_users_are_mapped()


def _all_users_are_mapped() -> bool:
    try:
        return Path("/proc/self/uid_map").read_text().split() == _FULL_UID_MAP
    except FileNotFoundError:  # a kernel without user namespaces
        return True


class ProbeFailure(msgspec.Struct, frozen=True):
    """What the probe could not do."""

    step: str
    errno: int


async def check_sandbox_support(folder: Path, *, unprivileged: bool) -> str | None:
    """Why no sandbox can be mounted with its layer in this folder, with what to do; None where one can."""
    try:
        scratch = await asyncio.to_thread(_make_scratch, folder)
    except OSError as error:
        return f"The folder {folder} can't be written to ({error.strerror}): name another one with --data."
    try:
        failure = await _probe(scratch, unprivileged=unprivileged)
    finally:
        await asyncio.to_thread(remove_tree, scratch)
    return None if failure is None else explain_failure(failure, folder, unprivileged=unprivileged)


def _make_scratch(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=".probe-", dir=folder))


async def _probe(scratch: Path, *, unprivileged: bool) -> ProbeFailure | None:
    argv = ("-I", "-S", "-c", _PROBE_CODE, str(Path(polar.__file__).parent.parent), ".")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        "unprivileged" if unprivileged else "root",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=scratch,  # whose own path may have characters in it that separate options
    )
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            printed, said = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return ProbeFailure("hang", errno.ETIMEDOUT)
    if process.returncode:
        return ProbeFailure(said.decode(errors="replace").strip().rpartition("\n")[2], errno.EIO)
    return msgspec.json.decode(printed, type=ProbeFailure) if printed else None


def explain_failure(failure: ProbeFailure, folder: Path, *, unprivileged: bool) -> str:
    forbidden = failure.errno in (errno.EPERM, errno.EACCES)
    reason = os.strerror(failure.errno)
    if failure.step in ("namespace", "mounts") and unprivileged:
        if failure.errno in (errno.ENOSPC, errno.EUSERS):
            most = _read_sysctl("user/max_user_namespaces")
            return (
                f"No user namespace can be made: the limit user.max_user_namespaces is {most}. As root: "
                f"`sysctl user.max_user_namespaces=15000`, {_ALTERNATIVES}."
            )
        if failure.errno in (errno.EINVAL, errno.ENOSYS):
            return f"This kernel has no user namespaces (CONFIG_USER_NS): use another one, {_ALTERNATIVES}."
        if forbidden:
            return f"{_explain_forbidden()}, {_ALTERNATIVES}."
    if failure.step == "overlay" and failure.errno == errno.ENODEV:
        return "The kernel has no overlayfs: as root, load it with `modprobe overlay`."
    if failure.step == "overlay" and forbidden and unprivileged:
        if read_kernel_version() < _MIN_KERNEL:
            return (
                f"Linux {platform.release()} mounts no overlay in a user namespace: use Linux 5.11 or later, "
                f"{_ALTERNATIVES}."
            )
        return f"{_explain_forbidden()}, {_ALTERNATIVES}."
    if failure.step in ("overlay", "layer"):
        return (
            f"The file system of {folder} ({find_file_system(folder)}) can't hold a sandbox's layer ({reason}): name a "
            "folder on ext4, XFS, Btrfs or tmpfs with --data."
        )
    return f"A sandbox can't be mounted here: {failure.step}: {reason}."


def _explain_forbidden() -> str:
    """Who forbids user namespaces, or mounts in them, with the fix."""
    if _read_sysctl("kernel/unprivileged_userns_clone") == "0":
        return "Only root may make user namespaces here. As root: `sysctl kernel.unprivileged_userns_clone=1`"
    if _read_sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor allows no mounts in user namespaces here. As root: "
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    return (
        "User namespaces are forbidden here, as by the seccomp profile of a container. Start the container with "
        "`--security-opt seccomp=unconfined --security-opt systempaths=unconfined`"
    )


def _read_sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def read_kernel_version() -> tuple[int, ...]:
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())


def find_file_system(folder: Path) -> str:
    """The type of the file system that holds a folder."""
    at = str(folder.resolve())
    found = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mounted = before.split(" ")[4]
        below = mounted == "/" or at == mounted or at.startswith(f"{mounted}/")
        if below and len(mounted) >= len(found[0]):
            found = mounted, after.split(" ")[0]
    return found[1]
