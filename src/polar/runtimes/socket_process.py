"""A process of ours that takes requests from a socket, as its descriptor 0, and ends when the socket closes."""

import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence


class SocketProcess:
    """Started when it is first needed, and anew if it is gone."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        self._argv = argv
        self._env = env
        self._cwd = cwd
        self._pass_fds = pass_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def running(self) -> "subprocess.Popen[bytes] | None":
        """The process that runs now; what an earlier one had started is dead with it."""
        return self._process if self._process is not None and self._process.poll() is None else None

    def connect(self) -> socket.socket:
        """The socket to send requests to. Starts the process where none runs."""
        with self._lock:
            if self._socket is None or self.running is None:
                self._end()
                ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with its:
                    self._process = subprocess.Popen(
                        self._argv,
                        stdin=its.fileno(),
                        stdout=subprocess.DEVNULL,
                        env=self._env,
                        start_new_session=True,
                        cwd=self._cwd,
                        pass_fds=self._pass_fds,
                    )
                self._socket = ours
            return self._socket

    def close(self) -> None:
        """Ends the process, and waits until it has."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.wait()
            self._process = None
