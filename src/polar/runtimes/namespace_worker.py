"""A process that works in sandboxes for a node without root, in the user namespace that the sandboxes were made in.

What runs in a sandbox of an ordinary user can take the rights from its files (`chmod 000`): they are then closed to
that user, but not to root of the user namespace. Nor may that user open a port in the sandbox's network. The threads
of a node can't enter a user namespace, so this process does, and forks for each operation.

    node: a thread per call -> socket: descriptors (reply, request, subject) -> fork: an operation -> reply
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import polar
from polar.runtimes import files, linux, relay
from polar.runtimes.base import SandboxError
from polar.runtimes.socket_process import SocketProcess

_WORKER_CODE = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from polar.runtimes.namespace_worker import main
main(int(sys.argv[2]))"""
_REQUEST_DESCRIPTORS = 3
_OPERATIONS = {
    operation.__name__: operation
    for operation in (
        files.put,
        files.get,
        files.delete,
        files.list_entries,
        files.make_folders,
        files.resolve_owner,
        relay.enter_and_listen,
    )
}


class NamespaceWorker:
    """The node's side of one process, which is started when it is first needed, and anew if it is gone."""

    def __init__(self, namespace: int) -> None:
        path = [str(Path(polar.__file__).parent.parent), *filter(None, sys.path)]
        argv = [sys.executable, "-I", "-S", "-c", _WORKER_CODE, json.dumps(path), str(namespace)]
        self._namespace = namespace
        self._process = SocketProcess(argv, env={}, pass_fds=(namespace,))

    def call(self, operation: str, subject: int, *arguments: object) -> Any:
        """Waits for an operation on an open descriptor; returns or raises what it does."""
        absolute = [argument.absolute() if isinstance(argument, Path) else argument for argument in arguments]
        ours, its = socket.socketpair()
        with ours, open(os.memfd_create("polar"), "w+b") as request:
            with its:
                pickle.dump((operation, absolute), request)
                request.flush()
                try:
                    socket.send_fds(self._process.connect(), [b"+"], [its.fileno(), request.fileno(), subject])
                except OSError as error:
                    raise SandboxError(f"The process that works in sandboxes can't be reached: {error}.") from error
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
            with ours.makefile("rb") as reply:
                try:
                    raised, result = pickle.load(reply)
                except EOFError:
                    raise SandboxError("The process that works in sandboxes was killed.") from None
        if raised is not None:
            raise raised
        return socket.socket(fileno=fds[0]) if fds else result

    def close(self) -> None:
        self._process.close()
        os.close(self._namespace)


class NamespaceWorkers:
    """One for each user namespace."""

    def __init__(self) -> None:
        self._workers: dict[int, NamespaceWorker] = {}

    def get_for_process(self, pid: int) -> NamespaceWorker:
        """Raises OSError where the process is gone."""
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        inode = os.fstat(namespace).st_ino
        if inode in self._workers:
            os.close(namespace)
        else:
            self._workers[inode] = NamespaceWorker(namespace)
        return self._workers[inode]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


def main(namespace: int) -> None:
    """Takes requests from the socket on descriptor 0 until the node is gone."""
    linux.setns(namespace, linux.CLONE_NEWUSER)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are reaped by the kernel
    asked = socket.socket(fileno=os.dup(0))
    while True:
        message, fds, _, _ = socket.recv_fds(asked, 1, _REQUEST_DESCRIPTORS)
        if not message:
            return
        if os.fork() == 0:
            _run_operation(*fds)
        for fd in fds:
            os.close(fd)


def _run_operation(reply: int, request: int, subject: int) -> NoReturn:
    linux.die_with_parent(signal.SIGKILL)
    error: BaseException | None = None
    result: object = None
    try:
        with open(request, "rb") as file:
            file.seek(0)
            operation, arguments = pickle.load(file)
        result = _OPERATIONS[operation](subject, *arguments)
    except BaseException as raised:  # noqa: BLE001  it is raised in the node instead
        error = raised
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), socket.socket(fileno=reply) as answer:
        if isinstance(result, socket.socket):
            socket.send_fds(answer, [b"+"], [result.fileno()])
            result = None
        else:
            answer.sendall(b"+")
        answer.sendall(pickle.dumps((error, result)))
    os._exit(0)
