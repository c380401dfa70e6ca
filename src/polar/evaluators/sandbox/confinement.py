"""What a process of a run of tests in two processes gives up before it loads any code that is not the grader's.

    the test process    confine(writable): its memory can be read by nobody, and it writes only below `writable`
    the worker          confine_worker(): besides, no signals and no abstract sockets to processes outside;
                        hide(paths): it can't read these files, the tests

Both rely on Landlock (Linux 6.2 and later), which binds root and every child as well. File metadata (modes, times) is
beyond its reach.

This file is uploaded into the runtime beside reporter.py. It needs only the standard library.
"""

import contextlib
import ctypes
import os
import struct

MIN_LANDLOCK_VERSION = 3  # the first version that also keeps files from being truncated

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _TRUNCATE = 1 << 1, 1 << 2, 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 14))  # remove, make and move entries of every kind
_ALL_SCOPES = 3  # abstract sockets and signals, since version 6
_MIN_SCOPE_VERSION = 6
_FILE_CAPABILITIES = 0b11111  # chown, dac_override, dac_read_search, fowner, fsetid
_CAPABILITY_VERSION = 0x20080522
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")

_libc = ctypes.CDLL(None, use_errno=True)


class ConfinementError(Exception):
    pass


def get_landlock_version() -> int:
    """0 where the kernel has none, or does not let us use it."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return max(0, int(version))


def confine(writable: str) -> None:
    if get_landlock_version() < MIN_LANDLOCK_VERSION:
        raise ConfinementError("Landlock is missing or too old: grading in two processes takes Linux 6.2 or later.")
    _call(_libc.prctl, _SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))
    _call(_libc.prctl, _SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    _drop_capabilities()
    handled = _WRITE_FILE | _TRUNCATE | _CHANGE_FOLDER
    ruleset = _make_ruleset(struct.pack("=Q", handled))
    for path in _DEVICES:
        with contextlib.suppress(FileNotFoundError):
            _allow(ruleset, path, _WRITE_FILE | _TRUNCATE)
    for folder in (writable, "/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            _allow(ruleset, folder, handled)
    _restrict(ruleset)


def confine_worker() -> None:
    if get_landlock_version() >= _MIN_SCOPE_VERSION:
        _restrict(_make_ruleset(struct.pack("=QQQ", 0, 0, _ALL_SCOPES)))


def hide(paths: "list[str]") -> None:
    """Landlock only allows: every file of the system but these, which takes a rule for each neighbour of a folder on
    the way to one. What is made later beside such a folder can't be read, either."""
    hidden = {os.path.realpath(path) for path in paths}
    holding = {folder for path in hidden for folder in _folders_above(path)}
    if hidden:
        ruleset = _make_ruleset(struct.pack("=Q", _READ_FILE))
        for folder in sorted(holding):
            for entry in os.scandir(folder):
                if entry.path not in hidden and entry.path not in holding and not entry.is_symlink():
                    with contextlib.suppress(OSError, ConfinementError):  # then it can't be read
                        _allow(ruleset, entry.path, _READ_FILE)
        _restrict(ruleset)


def _folders_above(path: str) -> "list[str]":
    above = []
    while path != "/":
        path = os.path.dirname(path)
        above.append(path)
    return above


def _make_ruleset(attributes: bytes) -> int:
    return _call(_libc.syscall, _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))


def _allow(ruleset: int, path: str, access: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, file)
        _call(_libc.syscall, _ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(file)


def _restrict(ruleset: int) -> None:
    _call(_libc.syscall, _RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def _drop_capabilities() -> None:
    """All but those for files, which Landlock bounds. None comes back: no program that is started gains any."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    now = ctypes.create_string_buffer(24)
    _call(_libc.capget, header, now)
    words = struct.unpack("=6I", now.raw)  # effective, permitted, inheritable; then the upper halves
    kept = [word & _FILE_CAPABILITIES for word in words[:3]]
    _call(_libc.capset, header, struct.pack("=6I", *kept, 0, 0, 0))


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> int:
    result = function(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise ConfinementError(f"The run of the tests can't be confined: {os.strerror(code)}.")
    return int(result)
