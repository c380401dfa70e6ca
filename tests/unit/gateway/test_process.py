"""Settings of a process that serves."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from polar.gateway import process

ALLOCATE_IN_THREADS = """
import ctypes, sys, threading
from polar.gateway.process import tune_process

tune_process()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_here = threading.Barrier(8)

def allocate():
    all_here.wait()
    libc.malloc(10_000)
    all_here.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc's arenas are glibc's")
def test_threads_share_one_arena(tmp_path: Path) -> None:
    """With an arena for each thread, what caches hold is scattered, and memory grows without end."""
    told = tmp_path / "malloc.xml"
    subprocess.run([sys.executable, "-c", ALLOCATE_IN_THREADS, str(told)], check=True)
    assert told.read_text(encoding="utf-8").count("<heap nr=") == 1


def test_macos_does_not_raise_the_limit_of_open_files_to_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, resource.RLIM_INFINITY)]

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    process._raise_open_files_limit()
    assert limits[1:] == [(10_240, resource.RLIM_INFINITY)]
