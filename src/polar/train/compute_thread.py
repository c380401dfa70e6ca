"""One thread for all that computes on a model. PyTorch keeps the plans of attention's kernels by thread, and frees
none: in whatever thread is free, each would be made again and again."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_EXECUTOR = ThreadPoolExecutor(1, thread_name_prefix="computing")


async def run_on_compute_thread(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_EXECUTOR, partial(function, *args, **options))
