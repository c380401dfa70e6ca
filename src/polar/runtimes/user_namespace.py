"""A user namespace for a node without root: in it, and below it, the node's user is root and may mount.

    node (user 1000) -> spawner: user 0 of a user namespace, process 1 of a pid namespace -> mounts -> bwrap

Only the node's own user and group are mapped, since mapping others takes `newuidmap`: files inside all belong to that
user, as they do in a sandbox that root makes. The pid namespace is needed because only the owner of a namespace may
enter it: the spawner steps into a sandbox's pid namespace for a fork, and must be able to step back. It also ends
everything inside with the spawner.

This module is part of the spawner: only the standard library is used.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence

from polar.runtimes import linux


def enter_user_namespace() -> None:
    """Makes this process, which must have one thread, root of a new user namespace."""
    user, group = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER)
    for file, value in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        fd = os.open(f"/proc/self/{file}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


def enter_user_and_pid_namespaces() -> None:
    """Enters a new user namespace and a new pid namespace. Returns in a fork, which is process 1 there; this process
    waits for it and exits. Each ends with the other."""
    enter_user_namespace()
    linux.unshare(linux.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        linux.die_with_parent(signal.SIGKILL)
        return
    os.close(0)  # the spawner's socket: the node must see its end close with the fork
    _, status = os.waitpid(child, 0)
    os._exit(min(abs(os.waitstatus_to_exitcode(status)), 255))


def overlay_options(lower: Sequence[str | int], layer: str | None = None, *, unprivileged: bool) -> str:
    """Of an overlay over these folders. Without a layer, a folder that holds `upper` and `work`, it is read-only.
    `userxattr`: in a user namespace an overlay may mark files only with attributes that their owner may set."""
    options = [f"lowerdir={':'.join(map(str, lower))}"]
    if layer is not None:
        options += [f"upperdir={layer}/upper", f"workdir={layer}/work", "volatile"]
    return ",".join([*options, "userxattr"] if unprivileged else options)


def probe() -> None:
    """Does in a folder (argument 2) what a sandbox needs there; argument 3 says whether without root. Prints the step
    that failed and its error number, or nothing. The folder must be empty, and free of characters that overlays
    separate options with."""
    folder, unprivileged = sys.argv[2], sys.argv[3] == "unprivileged"
    lower, _, _, root = folders = [os.path.join(folder, name) for name in ("lower", "upper", "work", "root")]
    step = "namespace"
    try:
        if unprivileged:
            enter_user_namespace()
        step = "mounts"
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)
        step = "folder"
        for path in (*folders, f"{lower}/below"):
            os.mkdir(path)
        step = "overlay"
        options = overlay_options([lower], folder, unprivileged=unprivileged)
        linux.mount("overlay", root, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
        step = "layer"  # network file systems mount, and then fail at what marks a removed file
        os.rmdir(f"{root}/below")
        os.mkdir(f"{root}/below")
    except OSError as error:
        os.write(1, json.dumps({"step": step, "errno": error.errno}).encode())
