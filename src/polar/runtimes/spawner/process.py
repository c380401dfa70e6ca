"""The process that starts everything which runs in a runtime: small, with one thread, and safe to fork.

The node asks through a socket, in a message with the job (as JSON) and the descriptors that it needs, the status pipe
first; a job that is too large for a message is in a file, the last descriptor. The spawner forks, and the fork does the
job and tells on its own status pipe, a JSON line each, how it goes:

    {"pid": N}       the process to signal: a supervisor, or bwrap; with "replaced": true where bwrap starts a program
                     that what ran inside before has put there
    {"error": "..."} it could not be started; with "spoiled": true where what ran inside before is to blame
    {"exit": N}      the command ended, 128 + N for a signal as in a shell
    end of file      it was killed, or (for a sandbox) bwrap has taken over

The jobs: `sandbox` (mounts in a namespace of its own, then bwrap), `inside` (a command in a running sandbox),
`kill_inside`, `user_namespace`, `map_owners` (whether sandboxes can have user ids of their own) and `local` (a command
with a supervisor, below which everything that it starts stays, daemons too).

When the node dies, however it dies, the socket closes, the spawner ends, and with it every sandbox and every
supervisor. Nothing of the node's environment or memory is here. Only the standard library is
used.

A node without root has the spawner in a user namespace: in it, and below it, the node's user is root and may mount.

    node (user 1000) -> spawner: user 0 of a user namespace, process 1 of a pid namespace -> mounts -> bwrap

Only the node's own user and group are mapped, since mapping others takes `newuidmap`: files inside all belong to that
user, as they do in a sandbox that root makes. The pid namespace is needed because only the owner of a namespace may
enter it: the spawner steps into a sandbox's pid namespace for a fork, and must be able to step back. It also ends
everything inside with the spawner.
"""

import contextlib
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
import warnings  # noqa: F401  needed by os.execvpe, which imports it only then
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from polar.runtimes import linux

UNPRIVILEGED = "unprivileged"
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells say it
MAX_MESSAGE_BYTES = 1 << 16  # bytes
JOB_IN_FILE = b"+"
_ANCILLARY_BYTES = socket.CMSG_SPACE(8 * 4)
_OPEN_PATH_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_SANDBOX_NAMESPACES = (
    linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS | linux.CLONE_NEWCGROUP
)
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18})
"""What root inside may do, within its own user namespace: chown, dac_override, fowner, fsetid, kill, setgid, setuid,
net_bind_service, sys_chroot. No mounts, no network settings."""
_LIBRARY_FOLDERS = ("lib", "lib64", "usr/lib", "usr/lib64")
STAGE_FOLDER = "/mnt"
"""Where a sandbox's mounts are made, in a mount namespace of their own: a folder that every machine has, and that
anyone may look into. What the machine has there is not touched."""
_READ_ONLY_MOUNT_FLAGS = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
_MAX_TERMINALS = 64  # a sandbox's share of the machine's, of which there are some 3,000 besides the machine's own
_THREAD_COUNT_FIELD = 17  # index of num_threads in /proc/PID/stat, counted from the state
_DROPPED_CAPABILITIES = tuple(set(range(linux.read_last_capability() + 1)) - _KEPT_CAPABILITIES)

Job = dict[str, Any]


def main() -> None:
    """Takes jobs from the socket on descriptor 0 until the node is gone. Argument 2 says whether without root."""
    if sys.argv[2:] == [UNPRIVILEGED]:
        enter_user_and_pid_namespaces()
    requests = socket.socket(fileno=os.dup(0))
    gc.disable()  # its passes write to every object, and each page written to is copied in every fork
    linux.adopt_orphans()  # a sandbox can't end while a process of it waits to be reaped by a slow init
    sys.meta_path.clear()  # a fork that stands in a sandbox must not import what it finds there
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the node's thread had blocked
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup_read, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    running: dict[int, int] = {}  # status pipes by process
    while True:
        for ready in select.select([requests.fileno(), wakeup_read], [], [])[0]:
            if ready == wakeup_read:
                os.read(wakeup_read, 1 << 16)
                _reap(running)
            elif not _receive_job(requests, running):
                return


def _receive_job(requests: socket.socket, running: dict[int, int]) -> bool:
    """Starts one job; False where the node is gone."""
    # No command may have one of these (and above all not its status pipe), so they are closed by exec.
    message, ancillary, _, _ = requests.recvmsg(MAX_MESSAGE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return False
    fds = [fd for _, _, data in ancillary for fd in memoryview(data).cast("i")]
    try:
        _start_job(message, fds, requests, running)
    except Exception as error:  # noqa: BLE001  of one job, which hears of it: all others live here too
        if fds:
            _report(fds[0], error=f"{type(error).__name__}: {error}")
    for fd in fds:
        os.close(fd)
    return True


def _start_job(message: bytes, fds: list[int], requests: socket.socket, running: dict[int, int]) -> None:
    status, *others = fds
    if message == JOB_IN_FILE:
        request = others.pop()
        message = os.read(request, os.fstat(request).st_size)
    job: Job = json.loads(message)
    job["parent"] = 0 if job["job"] == "inside" else os.getpid()  # a parent in another pid namespace has no number

    def run_job() -> None:
        requests.close()
        signal.set_wakeup_fd(-1)
        for fd in running.values():
            os.close(fd)
        _JOB_HANDLERS[job["job"]](job, status, others)

    try:
        child = _fork(job, others)
    except OSError as error:
        _report_fork_failure(job, status, others, error)
        return
    if child == 0:
        _run_and_exit(status, run_job)
    if job["job"] == "inside":
        running[child] = os.dup(status)


def _reap(running: dict[int, int]) -> None:
    """Whoever has ended: forks, and orphans of theirs. Of commands inside it is told how."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (status := running.pop(ended[0], None)) is not None:
                _report(status, exit=_to_exit_code(ended[1]))
                os.close(status)


def _report_fork_failure(job: Job, status: int, fds: list[int], error: OSError) -> None:
    """A command that can't be started since those before it left no room is a command that failed, as in a shell."""
    if job["job"] not in ("inside", "local") or error.errno != errno.EAGAIN:
        _report(status, error=f"fork: {error.strerror}")
    else:
        with contextlib.suppress(BrokenPipeError):
            os.write(fds[1], f"{job['argv'][0]}: fork: {error.strerror}\n".encode())
        _report(status, exit=NOT_EXECUTABLE)


def _fork(job: Job, fds: list[int]) -> int:
    """Into the cgroup at once; a command inside into the sandbox's process ids too, which count for children only."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if job["job"] == "inside" else None
    group = None if job["into"] is None else os.open(job["into"], _OPEN_PATH_FLAGS)
    child = -1
    try:
        if own is not None:
            linux.setns(fds[-1], linux.CLONE_NEWPID)
        child = os.fork() if group is None else linux.fork_into(group, signal.SIGCHLD)
        return child
    finally:
        if own is not None and child != 0:
            linux.setns(own, linux.CLONE_NEWPID)
        for fd in (own, group):
            if fd is not None:
                os.close(fd)


def _run_and_exit(status: int, work: Callable[[], None]) -> NoReturn:
    """A fork never returns into the loop above."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001  it is told, whatever it is, and this process ends here
        _report(status, error=f"{type(error).__name__}: {error}")
    os._exit(0)


def _report(status: int, **fields: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # the node no longer listens
        os.write(status, json.dumps(fields).encode() + b"\n")


def _initialize_fork(job: Job, death: signal.Signals) -> None:
    """What every fork does first: into its groups, and not to outlive the spawner."""
    linux.die_with_parent(death)
    if os.getppid() != job["parent"]:
        raise RuntimeError("the spawner is gone")
    for tasks in job["tasks"]:
        _write(tasks, b"0")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _write(path: str, value: bytes) -> None:
    """Without the layers of `open`: each page of memory that a fork touches is copied."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)


def _run_sandbox(job: Job, status: int, fds: list[int]) -> None:
    """Mounts, seen by this process and the sandbox only, and then bwrap in its place."""
    hold, ready, info, errors, *users = fds
    _initialize_fork(job, signal.SIGKILL)
    os.setsid()
    with contextlib.suppress(PermissionError):
        _write("/proc/self/oom_score_adj", b"-900")  # what runs inside goes first, where we may say so
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)
    pid = _read_host_pid()
    if job["unprivileged"]:  # bwrap looks for its child, by the number that it has here
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
    with contextlib.suppress(OSError):  # it is no mount of its own
        linux.unmount("/sys")  # a dozen mounts that no sandbox has: bwrap reads the list of all for each of its own
    if (disk := job["disk"]) is not None:
        device, held = linux.attach_loop(disk["image"])
        linux.mount(device, job["layer"], "ext4", linux.MS_NOSUID | linux.MS_NODEV, "discard")
        os.close(held)
    replaced = job["mended"] is not None and _has_replaced_program(f"{job['layer']}/upper", job["env"]["PATH"])
    try:
        _mount_root(job, users)  # from here on the stage hides what the machine has in its place
    except OSError as error:
        filled = job["mended"] is not None and disk is not None and error.errno == errno.ENOSPC
        _report(status, error=str(error), spoiled=filled)
        return
    for target_fd, fd in enumerate((hold, ready, errors)):
        os.dup2(fd, target_fd)
    os.set_inheritable(info, True)
    placeholders = {"{info}": info, "{filter}": _create_filter_file(job["filter"])}
    argv = [str(placeholders.get(word, word)) for word in job["argv"]]
    for namespace in users:
        os.setgroups([])
        linux.setns(namespace, linux.CLONE_NEWUSER)
        _become_root_inside(job, signal.SIGKILL)
    _reset_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # inherited by the first process inside: orphans leave no zombies
    _report(status, pid=pid, replaced=replaced)
    os.execve(argv[0], argv, job["env"])


def _read_host_pid() -> int:
    """This process's id where the node looks: /proc is the node's, also where the spawner has a pid namespace."""
    return int(os.readlink("/proc/self"))


def _hold_user_namespace(job: Job, status: int, fds: list[int]) -> None:
    """A user namespace that belongs to a user. The node gives it its ids and lets go of the pipe."""
    (held,) = fds
    first = job["first"]
    linux.keep_capabilities()  # some machines let only root make user namespaces
    os.setresgid(first, first, first)
    os.setresuid(first, first, first)
    linux.unshare(linux.CLONE_NEWUSER)
    _report(status, pid=os.getpid())
    os.read(held, 1)


def _become_root_inside(job: Job, death: signal.Signals) -> None:
    """Who is root in the user namespace that was entered just now."""
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    linux.die_with_parent(death)  # which another user id undoes
    if os.getppid() != job["parent"]:
        raise RuntimeError("the spawner is gone")


def _create_filter_file(program: str | None) -> int:
    if program is None:
        return -1
    file = os.memfd_create("filter", 0)
    os.write(file, bytes.fromhex(program))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _mount_root(job: Job, users: list[int]) -> None:
    """Everything that bwrap binds is mounted on a stage, which whoever bwrap is can reach. What is mounted is named by
    descriptors: those inside see the names."""
    for namespace in users:
        for path in job["mapped"]:
            linux.map_owners(path, namespace)
    below, layer = [_open_path(path) for path in job["below"]], _open_path(job["layer"])
    shown = [_open_path(path) for path in job["shown"]]
    owner = job["owner"]
    _mount_stage("root", "terminals", "empty", *map(str, range(len(shown))))
    os.fchdir(_open_path("/proc/self/fd"))
    if job["mended"] is None:
        os.mkdir(f"{layer}/upper")
        os.chown(f"{layer}/upper", owner, owner)
        os.mkdir(f"{layer}/work")
    else:
        os.unlink(f"{layer}/work/work/incompat/volatile/dirty")  # a mark that it was mounted, and is refused for
        os.removedirs(f"{layer}/work/work/incompat/volatile")
        os.makedirs(f"{layer}/work", exist_ok=True)
    layers = build_overlay_options(below, str(layer), unprivileged=job["unprivileged"])
    linux.mount("overlay", f"{STAGE_FOLDER}/root", "overlay", linux.MS_NOSUID | linux.MS_NODEV, layers)
    empty = _open_path(f"{STAGE_FOLDER}/empty")
    for number, folder in enumerate(shown):
        _mount_unnamed(f"{STAGE_FOLDER}/{number}", empty, folder, unprivileged=job["unprivileged"])
    terminals = f"newinstance,ptmxmode=0666,mode=0620,max={_MAX_TERMINALS}"
    linux.mount("devpts", f"{STAGE_FOLDER}/terminals", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, terminals)
    os.chdir("/")
    if (mended := job["mended"]) is not None:
        for path in mended["folders"]:
            os.close(_open_real_folder(f"{STAGE_FOLDER}/root", path, owner))
        for path in mended["files"]:
            above, _, name = path.rpartition("/")
            folder = _open_real_folder(f"{STAGE_FOLDER}/root", above, owner)
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=folder)
            os.close(folder)


def _mount_stage(*folders: str) -> None:
    linux.mount("none", STAGE_FOLDER, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=0755")
    for folder in folders:
        os.mkdir(f"{STAGE_FOLDER}/{folder}")


def _mount_unnamed(target: str, empty: int, folder: int, *, unprivileged: bool) -> None:
    """A folder of the machine, read-only, without its name. An overlay takes two layers at least."""
    linux.mount(
        "overlay",
        target,
        "overlay",
        _READ_ONLY_MOUNT_FLAGS,
        build_overlay_options([empty, folder], unprivileged=unprivileged),
    )


def _open_path(path: str) -> int:
    return os.open(path, _OPEN_PATH_FLAGS)


def _try_map_owners(job: Job, _: int, fds: list[int]) -> None:
    """Tries what a sandbox with user ids of its own needs. The mounts are gone with this process."""
    (users,) = fds
    _initialize_fork(job, signal.SIGKILL)
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "none", linux.MS_REC | linux.MS_PRIVATE)
    for path in job["mapped"]:
        linux.map_owners(path, users)
    folders = [_open_path(path) for path in job["mapped"] if os.path.isdir(path)]
    _mount_stage("root", "empty")
    empty = _open_path(f"{STAGE_FOLDER}/empty")
    os.fchdir(_open_path("/proc/self/fd"))
    for folder in folders:
        _mount_unnamed(f"{STAGE_FOLDER}/root", empty, folder, unprivileged=False)


def _has_replaced_program(upper: str, path: str) -> bool:
    """Whether a layer holds another first program, or another of the files that one is loaded with."""
    programs = [folder.lstrip("/") for folder in path.split(":")]
    libraries = [
        f"{folder}{below}" for folder in _LIBRARY_FOLDERS for below in ("", f"/{os.uname().machine}-linux-gnu")
    ]
    if any(os.path.islink(f"{upper}/{folder}") for folder in ("etc", "usr", *programs, *libraries)):
        return True
    files = ("etc/ld.so.preload", *(f"{folder}/cat" for folder in programs))
    if any(os.path.lexists(f"{upper}/{file}") for file in files):
        return True
    library_names = (os.listdir(f"{upper}/{folder}") for folder in libraries if os.path.isdir(f"{upper}/{folder}"))
    return any(name.startswith(("ld-", "libc.")) for names in library_names for name in names)


def _open_real_folder(root: str, path: str, owner: int) -> int:
    """A folder that is reached through no link; whatever else has its name is removed. One that is made is the owner's
    (-1: root's)."""
    folder = os.open(root, _OPEN_PATH_FLAGS)
    for name in filter(None, path.split("/")):
        try:
            opened = os.open(name, _OPEN_PATH_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ENOENT:
                os.unlink(name, dir_fd=folder)
            os.mkdir(name, 0o755, dir_fd=folder)
            os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)
            opened = os.open(name, _OPEN_PATH_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
        os.close(folder)
        folder = opened
    return folder


def _run_inside(job: Job, _: int, fds: list[int]) -> None:
    """The command, in the sandbox's other namespaces as well. The spawner waits for it."""
    stdin, output, init = fds
    _initialize_fork(job, signal.SIGKILL)
    if own_users := job["owner"] >= 0:
        os.setgroups([])
        for fd in (stdin, output):
            os.fchown(fd, job["owner"], job["owner"])  # so that /dev/stdin and /dev/stdout can be opened
    # The machine's own network, which the spawner is in as well, only root may enter.
    linux.setns(init, _SANDBOX_NAMESPACES & ~linux.CLONE_NEWNET if job["shares_network"] else _SANDBOX_NAMESPACES)
    linux.setns(init, linux.CLONE_NEWUSER)  # last, since the others belong to its parent
    if own_users:
        _become_root_inside(job, signal.SIGKILL)
    linux.drop_capabilities(_DROPPED_CAPABILITIES)
    linux.forbid_new_privileges()
    if (program := job["filter"]) is not None:
        linux.install_filter(bytes.fromhex(program))
    _exec_command(job, stdin, output)


def _kill_inside(job: Job, status: int, fds: list[int]) -> None:
    """Everything in a sandbox but its first process."""
    (init,) = fds
    _initialize_fork(job, signal.SIGKILL)
    linux.setns(init, linux.CLONE_NEWPID)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(ProcessLookupError):  # there is nothing any more
            while True:
                os.kill(-1, signal.SIGKILL)
                time.sleep(0.001)
        os._exit(0)
    _report(status, exit=_to_exit_code(os.waitpid(child, 0)[1]))


def _run_supervisor(job: Job, status: int, fds: list[int]) -> None:
    """Supervises a command: adopts its orphans, and at SIGTERM kills everything below this process.

    SIGTERM and SIGCHLD stay blocked here and are taken with `sigwaitinfo`. A Python signal handler runs between two
    bytecodes only: a signal that arrived after the last of them and before a blocking call would wait for that call.
    """
    stdin, output = fds
    linux.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
    _initialize_fork(job, signal.SIGTERM)
    os.setsid()
    _report(status, pid=os.getpid())
    try:
        child = os.fork()
    except BlockingIOError as error:
        _report_fork_failure(job, status, fds, error)
        return
    if child == 0:
        _exec_command(job, stdin, output)
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                _report(status, exit=_to_exit_code(ended))
            if _wait_for_sigterm(blocking=pid == 0):
                _kill_descendants()


def _wait_for_sigterm(*, blocking: bool) -> bool:
    """Takes a pending SIGTERM. If `blocking`, waits for one, or for a child to change its state."""
    if not blocking:
        return signal.sigtimedwait((signal.SIGTERM,), 0) is not None
    return signal.sigwaitinfo((signal.SIGTERM, signal.SIGCHLD)).si_signo == signal.SIGTERM


def _kill_descendants() -> None:
    """Stops everything below this process, so that nothing new is started, and then kills it.

    Raises ChildProcessError when no child is left.
    """
    supervisor = os.getpid()
    seen: set[int] = set()
    while (found := find_descendants(supervisor)) - seen:
        _send_signal(found - seen, signal.SIGSTOP)
        seen |= found
    while True:
        _send_signal(find_descendants(supervisor), signal.SIGKILL)
        os.waitpid(-1, 0)


def find_descendants(root: int) -> set[int]:
    """The live processes below `root`. One whose first thread has ended is shown as a zombie while others run."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            if fields[0] != "Z" or int(fields[_THREAD_COUNT_FIELD]) > 1:
                children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def _send_signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _exec_command(job: Job, stdin: int, output: int) -> NoReturn:
    """The command itself. What can't be run says so where its output goes, with the exit code of a shell."""
    code = NOT_EXECUTABLE
    try:
        os.setsid()
        for at, fd in enumerate((stdin, output, output)):
            os.dup2(fd, at)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if (size := job.get("file_size")) is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        os.umask(0o022)
        _reset_signals()
        os.chdir(job["cwd"])
        os.execvpe(job["argv"][0], job["argv"], job["env"])
    except FileNotFoundError as error:
        code = NOT_FOUND
        os.write(2, f"{job['argv'][0]}: {error.strerror} ({error.filename or job['cwd']})\n".encode())
    except (OSError, ValueError) as error:
        os.write(2, f"{job['argv'][0]}: {error}\n".encode())
    finally:
        os._exit(code)


def _reset_signals() -> None:
    """Python, or who started the node, ignores these, and a supervisor blocks some; commands expect the defaults."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _to_exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


_JOB_HANDLERS: dict[str, Callable[[Job, int, list[int]], None]] = {
    "sandbox": _run_sandbox,
    "inside": _run_inside,
    "kill_inside": _kill_inside,
    "user_namespace": _hold_user_namespace,
    "map_owners": _try_map_owners,
    "local": _run_supervisor,
}


# A user namespace for a node without root.


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


def build_overlay_options(lower: Sequence[str | int], layer: str | None = None, *, unprivileged: bool) -> str:
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
        options = build_overlay_options([lower], folder, unprivileged=unprivileged)
        linux.mount("overlay", root, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
        step = "layer"  # network file systems mount, and then fail at what marks a removed file
        os.rmdir(f"{root}/below")
        os.mkdir(f"{root}/below")
    except OSError as error:
        os.write(1, json.dumps({"step": step, "errno": error.errno}).encode())


if __name__ == "__main__":
    sys.exit("This is started by the node: see polar.runtimes.spawner.client.")
