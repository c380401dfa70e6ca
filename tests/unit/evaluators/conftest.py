"""Where evaluators find their work: `place` is local, `sandbox` bubblewrap (mark its tests `runtimes`)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.runtimes.bubblewrap import Bubblewrap
from polar.runtimes.local import Local
from polar.testing.grading import WorkFactory

NO_GATEWAY = "http://127.0.0.1:1"


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[WorkFactory]:
    kind = Local(tmp_path / "state", NO_GATEWAY)
    try:
        yield WorkFactory(kind, tmp_path)
    finally:
        await kind.close()


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[WorkFactory]:
    kind = Bubblewrap(tmp_path / "state", NO_GATEWAY)
    try:
        if (why := await kind.check_availability()) is not None:
            pytest.skip(f"no bubblewrap here: {why}")
        yield WorkFactory(kind, tmp_path)
    finally:
        await kind.close()
