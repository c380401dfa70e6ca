"""A trial of a kind of runtime: one is made, used and removed, as the current user."""

import asyncio
import secrets

from polar.runtimes.base import Limits, RuntimeBackend, RuntimeSpec, SandboxError

TRIAL_SECONDS = 60.0
_DISK_MB = 64
_PROBE_CONTENT = b"It works."


async def run_trial(backend: RuntimeBackend, seconds: float = TRIAL_SECONDS) -> str | None:
    """Why no runtime of this kind can be made and used here; None where one was. Leaves nothing behind."""
    if (why := await backend.check_availability()) is not None:
        return why
    try:
        async with asyncio.timeout(seconds), backend.trial_image() as image:
            await _use_runtime(backend, image)
    except TimeoutError:
        return f"A runtime could not be made, used and removed within {seconds:g} seconds."
    except (SandboxError, OSError) as error:
        return str(error)
    return None


async def _use_runtime(backend: RuntimeBackend, image: str | None) -> None:
    await backend.prepare(image)
    runtime = await backend.create(
        f"trial-{secrets.token_hex(6)}", RuntimeSpec(image=image, limits=Limits(disk_mb=_DISK_MB))
    )
    try:
        await runtime.start()
        await runtime.put(_PROBE_CONTENT, "/workspace/said")
        completed = await runtime.run(["cat", runtime.path("/workspace/said")])
        if completed.exit_code != 0:
            raise SandboxError(f"A command in the runtime ended with {completed.exit_code}.")
    finally:
        await runtime.remove()
