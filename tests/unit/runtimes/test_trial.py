"""A trial says whether a runtime can be made and used, within its time, and leaves nothing."""

import asyncio
from pathlib import Path

import pytest

from polar.runtimes.base import RuntimeSpec, SandboxError
from polar.runtimes.local import Local, LocalRuntime
from polar.runtimes.trial import run_trial
from polar.testing import leftovers


class Broken(Local):
    async def create(self, id: str, spec: RuntimeSpec) -> LocalRuntime:
        raise SandboxError(f"{id} is not made, whatever {spec.workdir} says.")


class Hanging(Local):
    async def create(self, id: str, spec: RuntimeSpec) -> LocalRuntime:
        runtime = await super().create(id, spec)
        await asyncio.Event().wait()
        return runtime


@pytest.mark.parametrize(("plugin", "said"), [(Local, None), (Broken, "not made"), (Hanging, "within 0.2 seconds")])
async def test_what_a_trial_says(plugin: type[Local], said: str | None, tmp_path: Path) -> None:
    kind = plugin(tmp_path, "http://127.0.0.1:1")
    try:
        why = await run_trial(kind, 30.0 if said is None else 0.2)
        assert why is None if said is None else said in (why or "")
    finally:
        await kind.close()
    assert leftovers.list_processes(str(tmp_path)) == []
    assert list((tmp_path / "local").iterdir()) == []
