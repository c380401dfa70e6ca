"""The filter of system calls: the program, run here instruction by instruction, and what the kernel makes of it."""

import ctypes
import errno
import os
import re
import signal
import socket
import struct
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.runtimes import linux, seccomp
from polar.runtimes.seccomp import (
    DENY_RULES,
    MESSAGE_QUEUE_RULE,
    Allowances,
    build_profile,
    build_program,
    detect_architecture,
    parse_allowances,
)

DOCS = Path(__file__).parents[3] / "docs/isolation.md"
ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOW, ERROR = 0x7FFF_0000, 0x0005_0000
READ = {"x86_64": 0, "aarch64": 63}
SOCKET = {"x86_64": 41, "aarch64": 198}
CLONE = {"x86_64": 56, "aarch64": 220}
MACHINES = pytest.mark.parametrize("machine_name", ["x86_64", "aarch64"])


def answer(filter: bytes, architecture: int, number: int, *arguments: int) -> int | None:
    """What the program returns: None for allowed, or an errno."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number & 0xFFFF_FFFF, architecture, 0, *(word & (1 << 64) - 1 for word in padded))
    instructions = [struct.unpack_from("=HBBI", filter, at) for at in range(0, len(filter), 8)]
    at = loaded = 0
    while True:
        code, if_true, if_false, constant = instructions[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("=I", data, constant)
        elif code == 0x06:
            assert constant == ALLOW or constant & 0xFFFF_0000 == ERROR  # nothing is killed
            return None if constant == ALLOW else constant & 0xFFFF
        else:
            holds = {0x15: loaded == constant, 0x25: loaded > constant, 0x45: bool(loaded & constant)}[code]
            at += if_true if holds else if_false


@MACHINES
def test_the_calls_of_the_table_are_refused_and_others_are_not(machine_name: str) -> None:
    refused = {
        number: rule.error_number
        for rule in (*DENY_RULES, MESSAGE_QUEUE_RULE)
        for call in rule.calls
        if (number := getattr(call, machine_name)) is not None
    }
    filter = build_program(machine_name, own_users=False)
    for number in range(470):
        if number not in {getattr(call, machine_name) for call in seccomp.ARGUMENT_CHECKED_CALLS}:
            assert answer(filter, ARCHITECTURES[machine_name], number) == refused.get(number), number
    own = build_program(machine_name, own_users=True)
    for call in MESSAGE_QUEUE_RULE.calls:
        assert answer(own, ARCHITECTURES[machine_name], getattr(call, machine_name)) is None


@MACHINES
def test_foreign_and_unknown_calls_do_not_exist(machine_name: str) -> None:
    filter = build_program(machine_name, own_users=True)
    own = ARCHITECTURES[machine_name]
    for architecture in (0x4000_0003, 0x4000_0028, *({*ARCHITECTURES.values()} - {own})):  # i386, arm
        assert answer(filter, architecture, READ[machine_name]) == errno.ENOSYS
    for number in (0x4000_0000 | READ[machine_name], 470, 1000, -1):
        assert answer(filter, own, number) == errno.ENOSYS


@MACHINES
def test_arguments_decide_on_sockets_and_namespaces(machine_name: str) -> None:
    def ask(number: int, *arguments: int, allowed: Allowances = seccomp.NO_ALLOWANCES) -> int | None:
        filter = build_program(machine_name, allowed, own_users=True)
        return answer(filter, ARCHITECTURES[machine_name], number, *arguments)

    number, high = SOCKET[machine_name], 1 << 32
    for family in range(50):
        allowed = family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
        for words in ((family, 1, 0), (family | high, 1, 0)):
            assert ask(number, *words) == (None if allowed else errno.EPERM), family
    for family in (socket.AF_INET, socket.AF_INET6):
        assert [ask(number, family, 1, protocol) for protocol in (6, 17, 1, 262)] == [None] * 4
        assert [ask(number, family, 1, protocol) for protocol in (132, 33, 132 | high)] == [errno.EPERM] * 3
    assert [ask(number, socket.AF_NETLINK, 3, protocol) for protocol in (0, 4)] == [None, None]
    assert [ask(number, socket.AF_NETLINK, 3, protocol) for protocol in (9, 12, 16)] == [errno.EPERM] * 3
    assert ask(number, 40, 1, 0, allowed=parse_allowances(["AF_VSOCK"])) is None
    assert ask(number, 38, 5, 0, allowed=parse_allowances(["AF_VSOCK"])) == errno.EPERM
    assert ask(number, socket.AF_NETLINK, 3, 16, allowed=parse_allowances(["AF_NETLINK"])) is None
    clone = CLONE[machine_name]
    assert ask(clone, 0x3D0F00) is None  # a thread
    assert ask(clone, signal.SIGCHLD) is None
    for flag in (0x2_0000, 0x200_0000, 0x400_0000, 0x800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000):
        assert ask(clone, flag | signal.SIGCHLD) == errno.EPERM
    assert ask(clone, 0x1000_0000, allowed=parse_allowances(["clone"])) is None


def test_a_task_names_what_it_needs() -> None:
    allowed = parse_allowances(["io_uring_setup", "AF_ALG"])
    filter = build_program("x86_64", allowed, own_users=True)
    assert answer(filter, ARCHITECTURES["x86_64"], 425) is None
    assert answer(filter, ARCHITECTURES["x86_64"], 426) == errno.ENOSYS
    for unknown in ("read", "io_uring", "AF_NOTHING", "socket:AF_ALG"):
        with pytest.raises(ConfigError, match=unknown):
            parse_allowances([unknown])


@pytest.mark.parametrize("machine_name", [name for name, path in HEADERS.items() if path.exists()])
def test_numbers_are_the_kernels(machine_name: str) -> None:
    defined = {
        match[1]: int(match[2])
        for match in re.finditer(r"__NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine_name].read_text())
    }
    calls = [call for rule in (*DENY_RULES, MESSAGE_QUEUE_RULE) for call in rule.calls] + list(
        seccomp.ARGUMENT_CHECKED_CALLS
    )
    for call in calls:
        if call.name in defined:
            assert getattr(call, machine_name) == defined[call.name], call.name


@pytest.mark.skipif(detect_architecture() is None or not linux.supports_seccomp(), reason="no filter for this machine")
def test_the_kernel_takes_it() -> None:
    """In a child of its own: a filter can't be taken back."""
    name = detect_architecture()
    assert name is not None
    keyctl = next(getattr(call, name) for rule in DENY_RULES for call in rule.calls if call.name == "keyctl")
    libc = ctypes.CDLL(None, use_errno=True)
    filter = build_program(name, own_users=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            linux.forbid_new_privileges()
            linux.install_filter(filter)
            refused = libc.syscall(keyctl, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS
            os.close(os.pipe()[0])
            code = 0 if refused and os.getppid() > 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_engines_are_given_the_same_calls() -> None:
    rules = build_profile("x86_64")["syscalls"]
    plain = {name: rule["errnoRet"] for rule in rules if not rule["args"] for name in rule["names"]}
    for rule in (*DENY_RULES, MESSAGE_QUEUE_RULE):
        for call in rule.calls:
            assert plain[call.name] == rule.error_number
    checked = {name for rule in rules if rule["args"] for name in rule["names"]}
    assert checked == {"clone", "unshare", "socket", "socketpair"}
    assert all(rule["action"] == "SCMP_ACT_ERRNO" for rule in rules)
    assert "keyctl" not in str(build_profile("x86_64", parse_allowances(["keyctl"])))


def test_the_table_is_documented() -> None:
    documented = {(name, row[1]) for row in _rows() for name in re.findall(r"`([a-z_0-9]+)`", row[0])}
    for rule in (*DENY_RULES, MESSAGE_QUEUE_RULE):
        for call in rule.calls:
            assert (call.name, errno.errorcode[rule.error_number]) in documented


def _rows() -> list[list[str]]:
    lines = DOCS.read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
