"""A process that copies files in and out of sandboxes for a node without root.

What runs in a sandbox of an ordinary user can take the rights from its files (`chmod 000`). To that user they are then
closed; to root of a user namespace in which the user is root they are not. The threads of a node can't enter a user
namespace, so this process does, and forks for each copy.

    node: a thread per copy -> socket: descriptors (reply, request, root) -> fork: a function of `files` -> reply
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, NoReturn

import polar
from polar.runtimes import files, linux, user_namespace
from polar.runtimes.base import SandboxError

_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from polar.runtimes.file_worker import main; main()"
_DESCRIPTORS = 3
_OPERATIONS = {operation.__name__: operation for operation in (files.put, files.get, files.delete, files.entries)}


class FileWorker:
    """The node's side. The process is started when it is first needed, and anew if it is gone."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def call(self, operation: str, root: int, *arguments: object) -> Any:
        """Waits for an operation of `files` on an open root; returns or raises what it does."""
        absolute = [argument.absolute() if isinstance(argument, Path) else argument for argument in arguments]
        read, write = os.pipe2(os.O_CLOEXEC)
        with open(read, "rb") as reply, open(os.memfd_create("polar"), "w+b") as request:
            try:
                pickle.dump((operation, absolute), request)
                request.flush()
                socket.send_fds(self._connected(), [b"+"], [write, request.fileno(), root])
            except OSError as error:
                raise SandboxError(f"The process that copies files can't be reached: {error}.") from error
            finally:
                os.close(write)
            return _outcome(reply)

    def _connected(self) -> socket.socket:
        with self._lock:
            if self._socket is None or self._process is None or self._process.poll() is not None:
                self._close()
                ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                path = [str(Path(polar.__file__).parent.parent), *filter(None, sys.path)]
                argv = [sys.executable, "-I", "-S", "-c", _CODE, json.dumps(path)]
                with its:
                    self._process = subprocess.Popen(
                        argv, stdin=its.fileno(), stdout=subprocess.DEVNULL, env={}, start_new_session=True
                    )
                self._socket = ours
            return self._socket

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None


def _outcome(reply: IO[bytes]) -> Any:
    try:
        error, result = pickle.load(reply)
    except EOFError:
        raise SandboxError("The process that copies files was killed.") from None
    if error is not None:
        raise error
    return result


def main() -> None:
    """Takes requests from the socket on descriptor 0 until the node is gone."""
    user_namespace.enter()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are reaped by the kernel
    asked = socket.socket(fileno=os.dup(0))
    while True:
        message, fds, _, _ = socket.recv_fds(asked, 1, _DESCRIPTORS)
        if not message:
            return
        if os.fork() == 0:
            _work(*fds)
        for fd in fds:
            os.close(fd)


def _work(reply: int, request: int, root: int) -> NoReturn:
    linux.die_with_parent(signal.SIGKILL)
    error: BaseException | None = None
    result: object = None
    try:
        with open(request, "rb") as file:
            file.seek(0)
            operation, arguments = pickle.load(file)
        result = _OPERATIONS[operation](root, *arguments)
    except BaseException as raised:  # noqa: BLE001  it is raised in the node instead
        error = raised
    with contextlib.suppress(BrokenPipeError), open(reply, "wb") as file:
        pickle.dump((error, result), file)
    os._exit(0)
