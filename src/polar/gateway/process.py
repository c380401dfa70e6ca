"""Settings of a whole process that serves calls: garbage collection, memory arenas, threads and open files."""

import contextlib
import ctypes
import gc
import os
import resource
import sys

_OPEN_MAX = 10_240
"""Of macOS's sys/syslimits.h."""

_M_ARENA_MAX = -8
"""mallopt's parameter, of glibc's malloc.h."""


def tune_process() -> None:
    """Makes this process fit to serve calls. Call it once, when everything is imported.

    A full garbage collection stops every stream for as long as it takes to walk all objects. What is imported stays
    anyway, and calls leave no cycles behind: young objects are looked at in small portions, old ones hardly ever. The
    store's thread gives way to the event loop soon. Tokenizers start no threads of their own: they have ours, and
    processes for what is long. All threads allocate from one arena.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 5, 10_000)
    sys.setswitchinterval(0.0005)
    _share_malloc_arena()
    _raise_open_files_limit()


def _raise_open_files_limit() -> None:
    """As far as the system allows: each open call takes two. macOS refuses more than OPEN_MAX where its hard limit is
    infinite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _OPEN_MAX), hard))


def _share_malloc_arena() -> None:
    """Has glibc give new threads no arenas of their own.

    What one thread allocates and another frees goes back to the first one's arena, where holes are left. Caches that
    many threads fill then take ever more memory, though they hold no more. The interpreter's lock keeps most threads
    from allocating at the same time anyway. Other C libraries have no such parameter.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_ARENA_MAX, 1)
