from collections.abc import AsyncIterator

import pytest

from tests.unit.client.plane import Plane


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with Plane() as plane:
        yield plane
