"""Settings of a whole process that serves calls: garbage collection, memory arenas, threads and open files."""

import contextlib
import ctypes
import gc
import os
import resource
import sys

_OPEN_MAX = 10_240
"""OPEN_MAX in macOS's sys/syslimits.h."""

_M_ARENA_MAX = -8
"""Parameter of mallopt, from glibc's malloc.h."""


def tune_process() -> None:
    """Tunes this process to serve calls. Call it once, when everything is imported.

    A full garbage collection stops every stream while it walks all objects. Imported objects live forever and calls
    leave no cycles, so young objects are collected in small portions and old ones hardly ever. A short switch interval
    lets the store's thread yield to the event loop soon. Tokenizers start no threads: they run in ours, and long texts
    in other processes. All threads allocate from one arena.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 5, 10_000)
    sys.setswitchinterval(0.0005)
    _share_malloc_arena()
    _raise_open_files_limit()


def _raise_open_files_limit() -> None:
    """Raises the limit as far as the system allows, since each open call takes two files. macOS refuses more than
    OPEN_MAX if its hard limit is infinite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _OPEN_MAX), hard))


def _share_malloc_arena() -> None:
    """Makes all threads allocate from one arena of glibc.

    Memory that one thread allocates and another frees returns to the first thread's arena and leaves holes there.
    Caches filled by many threads would take ever more memory without holding more. The interpreter's lock keeps most
    threads from allocating at the same time anyway. Other C libraries have no such parameter.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, 1)
