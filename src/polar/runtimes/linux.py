"""The few system calls that Python 3.11 has no function for. Each raises OSError, as `os` does.

Only the standard library is used, since the spawner forks for every command and must stay small.
"""

import ctypes
import errno
import fcntl
import os
import struct

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
_CLONE_INTO_CGROUP = 0x2_0000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000
_MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_SECUREBITS = 28
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38

_SECCOMP_MODE_FILTER = 2
_SECBIT_NO_SETUID_FIXUP = 4
_INSTRUCTION_BYTES = 8  # bytes of struct sock_filter

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442  # the same on every architecture, as the next
_SYS_CLONE3, _SYS_OPENAT2 = 435, 437

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_MOUNT_ATTR_IDMAP = 0x10_0000

_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_INFO_FLAGS = 52  # where lo_flags stands in struct loop_info64
_LOOP_INFO_SIZE = 232

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str | bytes | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def setns(fd: int, namespaces: int) -> None:
    """Enters a namespace, or with a process's pidfd those of its namespaces that are named."""
    _check(_libc.setns(fd, namespaces))


def unshare(namespaces: int) -> None:
    _check(_libc.unshare(namespaces))


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*arguments), target)


def unmount(target: str) -> None:
    """With all that is mounted below."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), target)


_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)


def _prctl(option: int, value: int, other: int = 0) -> None:
    _check(_libc.prctl(option, value, other, 0, 0))


def die_with_parent(signal: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
    """Whoever loses its parent below this process becomes its child instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def read_last_capability() -> int:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        return int(file.read())


def drop_capabilities(dropped: tuple[int, ...]) -> None:
    """They are gone with the next exec."""
    for capability in dropped:
        _prctl(_PR_CAPBSET_DROP, capability)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(program: bytes) -> None:
    """Filters the system calls of this process and of all that it starts; it needs `no_new_privileges`."""
    filled = _FilterProgram(len(program) // _INSTRUCTION_BYTES, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filled))


def supports_seccomp() -> bool:
    """Whether the kernel has filters: then it misses the program, and otherwise it does not know the option."""
    try:
        _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER)
    except OSError as error:
        return error.errno == errno.EFAULT
    return False


def keep_capabilities() -> None:
    """Changing user ids no longer takes this process's capabilities away."""
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)


def map_owners(path: str, namespace: int) -> None:
    """Mounts a folder over itself, with its files owned as a user namespace maps their owners."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    tree = _check(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags), path)
    try:
        attributes = struct.pack("=QQQQ", _MOUNT_ATTR_IDMAP, 0, 0, namespace)
        flags = _AT_EMPTY_PATH | _AT_RECURSIVE
        _check(_libc.syscall(_SYS_MOUNT_SETATTR, tree, b"", flags, attributes, len(attributes)), path)
        target = (_AT_FDCWD, path.encode())
        _check(_libc.syscall(_SYS_MOVE_MOUNT, tree, b"", *target, _MOVE_MOUNT_F_EMPTY_PATH), path)
    finally:
        os.close(tree)


_CLONE_FIELDS = "flags pidfd child_tid parent_tid exit_signal stack stack_size tls set_tid set_tid_size cgroup"


class _CloneArguments(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in _CLONE_FIELDS.split(" "))


def fork_into(cgroup: int, exit_signal: int) -> int:
    """A fork whose child starts in the cgroup (v2) that `cgroup` is open on. Moving a process there takes the kernel
    tens of milliseconds; starting it there takes none. Only for processes with one thread."""
    arguments = _CloneArguments(flags=_CLONE_INTO_CGROUP, exit_signal=exit_signal, cgroup=cgroup)
    return _check(_libc.syscall(_SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments)))


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_below(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens as if `root` were the root of the file system: no link, `..` or absolute path leads out of it."""
    how = _OpenHow(flags=flags | os.O_CLOEXEC, mode=mode, resolve=RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    where = os.fsencode(path) or b"/"
    return _check(_libc.syscall(_SYS_OPENAT2, root, where, ctypes.byref(how), ctypes.sizeof(how)), path)


def attach_loop(image: str) -> tuple[str, int]:
    """A loop device over a file, and a descriptor on it. The device is given back when the last user is gone: close the
    descriptor once it is mounted."""
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(1000):
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            held = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            info = bytearray(_LOOP_INFO_SIZE)
            struct.pack_into("=I", info, _LOOP_INFO_FLAGS, _LO_FLAGS_AUTOCLEAR)
            try:
                fcntl.ioctl(held, _LOOP_CONFIGURE, struct.pack("=II", backing, 0) + bytes(info) + bytes(64))
            except OSError as error:
                os.close(held)
                if error.errno != errno.EBUSY:  # else someone took it first
                    raise
            else:
                return device, held
        raise OSError(errno.EBUSY, "no loop device is free", "/dev/loop-control")
    finally:
        os.close(control)
        os.close(backing)
