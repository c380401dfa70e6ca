"""The system calls that a sandbox is refused: one table, as a BPF program for bubblewrap and as a profile for engines.

    RULES ─► denied calls ─┬► program(): BPF, installed by the spawner and by bwrap
                           └► profile(): JSON for `docker create --security-opt seccomp=`

A refused call returns an error that programs know from kernels without the feature (ENOSYS) or from ordinary users
(EPERM); nothing is ever killed. Everything that is not in the table is allowed, `seccomp` and Landlock among it, so
that harnesses can still sandbox their own tools. Calls of other instruction sets (i386, x32), and calls newer than this
table, return ENOSYS.

The program is linear: the kernel caches the answers that depend on the number alone, and then runs no instruction.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from msgspec import Struct

from polar.errors import ConfigError


class SystemCall(Struct, frozen=True):
    """A system call, with its number on each machine; None where the machine lacks it."""

    name: str
    x86_64: int | None
    aarch64: int | None


class DenyRule(Struct, frozen=True):
    """Calls that are refused for one reason."""

    calls: tuple[SystemCall, ...]
    error_number: int  # errno
    reason: str


def _list_calls(*numbers: tuple[str, int | None, int | None]) -> tuple[SystemCall, ...]:
    return tuple(SystemCall(*each) for each in numbers)


def _list_new_calls(**numbers: int) -> tuple[SystemCall, ...]:
    """Those above 423 have the same number everywhere."""
    return tuple(SystemCall(name, number, number) for name, number in numbers.items())


DENY_RULES = (
    DenyRule(
        _list_calls(("add_key", 248, 217), ("request_key", 249, 218), ("keyctl", 250, 219)),
        errno.ENOSYS,
        "Keyrings outlive the sandbox and are counted and found by user id, across sandboxes.",
    ),
    DenyRule(
        _list_new_calls(io_uring_setup=425, io_uring_enter=426, io_uring_register=427),
        errno.ENOSYS,
        "io_uring runs operations that no filter of system calls sees; programs fall back to epoll.",
    ),
    DenyRule(
        _list_calls(
            ("io_setup", 206, 0),
            ("io_destroy", 207, 1),
            ("io_getevents", 208, 4),
            ("io_submit", 209, 2),
            ("io_cancel", 210, 3),
            ("io_pgetevents", 333, 292),
        ),
        errno.ENOSYS,
        "The kernel has one limit on asynchronous I/O for the whole machine (fs.aio-max-nr).",
    ),
    DenyRule(
        _list_calls(("bpf", 321, 280), ("perf_event_open", 298, 241), ("userfaultfd", 323, 282)),
        errno.EPERM,
        "They look into the kernel, or help to exploit it.",
    ),
    DenyRule(
        _list_calls(
            ("init_module", 175, 105),
            ("finit_module", 313, 273),
            ("delete_module", 176, 106),
            ("create_module", 174, None),
            ("get_kernel_syms", 177, None),
            ("query_module", 178, None),
            ("kexec_load", 246, 104),
            ("kexec_file_load", 320, 294),
        ),
        errno.EPERM,
        "They change the machine's kernel.",
    ),
    DenyRule(
        (
            *_list_calls(("mount", 165, 40), ("umount2", 166, 39), ("pivot_root", 155, 41)),
            *_list_new_calls(open_tree=428, move_mount=429, fsopen=430, fsconfig=431, fsmount=432, fspick=433),
            *_list_new_calls(mount_setattr=442, open_tree_attr=467),
        ),
        errno.EPERM,
        "A sandbox's mounts are its walls.",
    ),
    DenyRule(
        _list_calls(("setns", 308, 268), ("open_by_handle_at", 304, 265)),
        errno.EPERM,
        "They lead into other namespaces, or to files outside the root.",
    ),
    DenyRule(
        _list_new_calls(clone3=435),
        errno.ENOSYS,
        "Its flags can't be checked by a filter; libraries fall back to clone.",
    ),
    DenyRule(
        (
            *_list_calls(("acct", 163, 89), ("quotactl", 179, 60), ("swapon", 167, 224), ("swapoff", 168, 225)),
            *_list_calls(("reboot", 169, 142), ("syslog", 103, 116), ("vhangup", 153, 58), ("lookup_dcookie", 212, 18)),
            *_list_calls(("settimeofday", 164, 170), ("clock_settime", 227, 112), ("clock_adjtime", 305, 266)),
            *_list_calls(("sethostname", 170, 161), ("setdomainname", 171, 162), ("fanotify_init", 300, 262)),
            *_list_calls(("iopl", 172, None), ("ioperm", 173, None), ("nfsservctl", 180, 42), ("_sysctl", 156, None)),
            *_list_calls(("sysfs", 139, None), ("uselib", 134, None), ("ustat", 136, None)),
            *_list_new_calls(quotactl_fd=443),
        ),
        errno.EPERM,
        "They administer a machine: its log, clock, names, quotas, swap and ports.",
    ),
)

MESSAGE_QUEUE_RULE = DenyRule(
    _list_calls(
        ("mq_open", 240, 180),
        ("mq_unlink", 241, 181),
        ("mq_timedsend", 242, 182),
        ("mq_timedreceive", 243, 183),
        ("mq_notify", 244, 184),
        ("mq_getsetattr", 245, 185),
    ),
    errno.ENOSYS,
    "POSIX message queues are counted by user id: refused where sandboxes have no user ids of their own.",
)

_CLONE = SystemCall("clone", 56, 220)
_UNSHARE = SystemCall("unshare", 272, 97)
_SOCKET = SystemCall("socket", 41, 198)
_SOCKETPAIR = SystemCall("socketpair", 53, 199)
ARGUMENT_CHECKED_CALLS = (_CLONE, _UNSHARE, _SOCKET, _SOCKETPAIR)
"""Calls that are refused by their arguments: new namespaces, and families and protocols of sockets."""

_NEW_NAMESPACES = 0x7E02_0000  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_NEW_TIME_NAMESPACE = 0x80  # of unshare; in clone these bits are the signal at the end
_IP_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_REFUSED_IP_PROTOCOLS = (33, 115, 132, 136, 256)  # DCCP, L2TP, SCTP, UDP-Lite, SMC
_NETLINK_PROTOCOLS = (0, 4)  # ROUTE, SOCK_DIAG
_LAST_KNOWN_CALL = 469  # file_setattr, of Linux 6.17

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}  # AUDIT_ARCH_*


class Allowances(Struct, frozen=True):
    """What a task is allowed beyond the table: calls, and address families."""

    calls: frozenset[str] = frozenset()
    families: frozenset[int] = frozenset()


NO_ALLOWANCES = Allowances()


def parse_allowances(names: Collection[str]) -> Allowances:
    """By the names that a task gives. Raises ConfigError for one that is not refused anyway."""
    known = {call.name for rule in (*DENY_RULES, MESSAGE_QUEUE_RULE) for call in rule.calls} | {
        call.name for call in ARGUMENT_CHECKED_CALLS
    }
    calls: set[str] = set()
    families: set[int] = set()
    for name in names:
        if name in known:
            calls.add(name)
        elif name.startswith("AF_") and isinstance(family := getattr(socket, name, None), int):
            families.add(int(family))
        else:
            raise ConfigError(
                f"runtime.seccomp: {name!r} is neither a system call that the filter refuses nor an address family "
                "(AF_ALG). docs/isolation.md lists them."
            )
    return Allowances(frozenset(calls), frozenset(families))


def detect_architecture() -> str | None:
    """This machine's name in the table; None where it is not one that the filter is written for."""
    name = os.uname().machine
    return name if name in _ARCHITECTURES and sys.byteorder == "little" and sys.maxsize > 1 << 32 else None


def list_denied(allowed: Allowances, *, own_users: bool) -> Iterator[tuple[SystemCall, int]]:
    """The calls that are refused whatever their arguments, each with its answer."""
    for rule in DENY_RULES if own_users else (*DENY_RULES, MESSAGE_QUEUE_RULE):
        for call in rule.calls:
            if call.name not in allowed.calls:
                yield call, rule.error_number


# The program: eight bytes an instruction, as in linux/filter.h

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERROR = 0x7FFF_0000, 0x0005_0000

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant
_Block = list[_Instruction]
_RETURN_ALLOW: _Instruction = (_RETURN, 0, 0, _ALLOW)


def build_program(architecture: str, allowed: Allowances = NO_ALLOWANCES, *, own_users: bool) -> bytes:
    """The filter. `own_users`: the sandbox has user ids of its own, and what is counted by user is its own too."""
    block: _Block = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[architecture]),
        _return_error(errno.ENOSYS),
    ]
    block += [(_LOAD, 0, 0, _NUMBER), (_GREATER, 0, 1, _LAST_KNOWN_CALL), _return_error(errno.ENOSYS)]
    for call, answer in list_denied(allowed, own_users=own_users):
        block += _if_call(call, architecture, [_return_error(answer)])
    for call, checks in _build_argument_checks(allowed).items():
        block += _if_call(call, architecture, checks)
    block.append(_RETURN_ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in block)


def _build_argument_checks(allowed: Allowances) -> dict[SystemCall, _Block]:
    """What is done for calls whose arguments decide. Each block returns. The arguments are ints: of their 64 bits the
    kernel reads the lower half alone, and so does this."""
    others = [int(family) for family in sorted({socket.AF_UNIX, *allowed.families} - {*_IP_FAMILIES})]
    plain = [family for family in others if family != socket.AF_NETLINK]
    netlink = _allow_values(2, _NETLINK_PROTOCOLS) if plain == others else [_RETURN_ALLOW]
    checks: dict[SystemCall, _Block] = {
        _CLONE: _deny_bits(0, _NEW_NAMESPACES),
        _UNSHARE: _deny_bits(0, _NEW_NAMESPACES | _NEW_TIME_NAMESPACE),
        _SOCKET: [
            _load_argument(0),
            *(step for family in plain for step in _if_equal(family, [_RETURN_ALLOW])),
            *_if_equal(socket.AF_NETLINK, netlink),
            *(step for family in _IP_FAMILIES for step in _if_equal(family, _deny_values(2, _REFUSED_IP_PROTOCOLS))),
            _return_error(errno.EPERM),
        ],
        _SOCKETPAIR: _allow_values(0, others),
    }
    return {call: block for call, block in checks.items() if call.name not in allowed.calls}


def _if_call(call: SystemCall, architecture: str, block: _Block) -> _Block:
    """The block, where the number is this call's; it must return. The number stays loaded where it is not."""
    number = call.x86_64 if architecture == "x86_64" else call.aarch64
    return [] if number is None else _if_equal(number, block)


def _if_equal(value: int, block: _Block) -> _Block:
    return [(_EQUAL, 0, len(block), value), *block]


def _allow_values(argument: int, values: Iterable[int]) -> _Block:
    tests = [step for value in values for step in _if_equal(value, [_RETURN_ALLOW])]
    return [_load_argument(argument), *tests, _return_error(errno.EPERM)]


def _deny_values(argument: int, values: Iterable[int]) -> _Block:
    tests = [step for value in values for step in _if_equal(value, [_return_error(errno.EPERM)])]
    return [_load_argument(argument), *tests, _RETURN_ALLOW]


def _deny_bits(argument: int, bits: int) -> _Block:
    return [_load_argument(argument), (_ANY_BIT, 0, 1, bits), _return_error(errno.EPERM), _RETURN_ALLOW]


def _load_argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _return_error(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _ERROR | number)


# The profile: the same for container engines, which compile it with libseccomp

_ENGINE_ARCHITECTURES = {
    "x86_64": ("SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"),
    "aarch64": ("SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"),
}
"""libseccomp kills processes of other instruction sets, so all that the kernel may run are named."""
_I386_CALLS = ("socketcall", "umount", "vm86", "vm86old")


def build_profile(architecture: str, allowed: Allowances = NO_ALLOWANCES) -> dict[str, Any]:
    """Containers of an engine share root's user id, so message queues are refused."""
    answers: dict[int, list[str]] = {errno.EPERM: list(_I386_CALLS)}
    for call, answer in list_denied(allowed, own_users=False):
        answers.setdefault(answer, []).append(call.name)
    rules = [_make_profile_rule(names, answer) for answer, names in answers.items()]
    for name, bits in (("clone", _NEW_NAMESPACES), ("unshare", _NEW_NAMESPACES | _NEW_TIME_NAMESPACE)):
        rules += [_make_profile_rule([name], errno.EPERM, _match_bits(0, bit, bit)) for bit in _list_single_bits(bits)]
    families = {int(family) for family in (socket.AF_UNIX, socket.AF_NETLINK, *_IP_FAMILIES)} | allowed.families
    for name in ("socket", "socketpair"):
        rules += [_make_profile_rule([name], errno.EPERM, other) for other in _match_other_values(0, families)]
    ip = [
        (_match_value(0, family), _match_value(2, number))
        for family in _IP_FAMILIES
        for number in _REFUSED_IP_PROTOCOLS
    ]
    netlink = [(_match_value(0, socket.AF_NETLINK), other) for other in _match_other_values(2, set(_NETLINK_PROTOCOLS))]
    pairs = ip if socket.AF_NETLINK in allowed.families else ip + netlink
    rules += [_make_profile_rule(["socket"], errno.EPERM, *pair) for pair in pairs]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": list(_ENGINE_ARCHITECTURES[architecture]),
        "syscalls": [rule for rule in rules if rule["names"][0] not in allowed.calls],
    }


def _make_profile_rule(names: list[str], answer: int, *arguments: dict[str, Any]) -> dict[str, Any]:
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": answer, "args": list(arguments)}


def _match_value(index: int, value: int) -> dict[str, Any]:
    return _match_bits(index, 0xFFFF_FFFF, value)


def _match_bits(index: int, bits: int, value: int) -> dict[str, Any]:
    return {"index": index, "value": bits, "valueTwo": int(value), "op": "SCMP_CMP_MASKED_EQ"}


def _match_other_values(index: int, values: set[int]) -> list[dict[str, Any]]:
    """Conditions of which one holds for every other value."""
    largest = max(values)
    below = [_match_value(index, value) for value in range(largest) if value not in values]
    return [*below, {"index": index, "value": largest, "op": "SCMP_CMP_GT"}]


def _list_single_bits(bits: int) -> list[int]:
    return [1 << place for place in range(32) if bits >> place & 1]
